"""torch's part in a run of another framework: what it starts from, and what it is held against. Loads torch.

`python -m parallelbench.training.reference make|judge RUN_DIR ATTEMPT [PLUGIN FOLDER]`, before and after the ranks.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from parallelbench.config.components import Shard
from parallelbench.config.dataset_check import checked
from parallelbench.config.identity import run_id
from parallelbench.measure.count_layers import model_counts
from parallelbench.processes import die_with_parent
from parallelbench.results.attempt import Attempt
from parallelbench.results.journal import Journal
from parallelbench.training.checks.before_training import Reference
from parallelbench.training.checks.closing import why_no_steps
from parallelbench.training.checks.comparability import CLOSING_STEPS, Finding, as_reference
from parallelbench.training.checks.parity import as_arrays, as_checked, checks_parity
from parallelbench.training.checks.plain_step import Judge, Taken
from parallelbench.training.exchange import Exchange, Order
from parallelbench.training.failure import record
from parallelbench.training.torch_session import build_loader, build_model
from parallelbench.world.world import World

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from parallelbench.config.components import Arrays
    from parallelbench.config.run import RunConfig
    from parallelbench.loaders.order import BatchLoader


def main(arguments: list[str]) -> int:
    """Make or judge; a failure leaves an error file, as rank 0's would."""
    die_with_parent()
    verb, folder, number, *plugin = arguments
    attempt = Attempt(Path(folder) / "attempts" / number)
    sys.path.extend(plugin[1:])
    try:
        run = attempt.config(plugin[0] if plugin else None)
        (make if verb == "make" else judge)(run, attempt)
    except (Exception, SystemExit) as error:
        if verb == "make":
            record(attempt, 0, error)
        with suppress(OSError):
            traceback.print_exc()
        return 1
    return 0


def make(run: RunConfig, attempt: Attempt) -> None:
    """Hand over the initial state and the order of samples, and what one device makes of them."""
    arrays, exchange = checked(run.data, run.data.load(run.site.data_folder)), Exchange.of(attempt)
    exchange.write("initial", as_arrays(build_model(run).state_dict()))
    least_flop = model_counts(run).least_flop
    exchange.write("facts", {} if least_flop is None else {"least_flop_per_sample": least_flop})
    further = -(-CLOSING_STEPS // run.steps_per_epoch) if run.measure.parity else 0
    _write_orders(exchange, arrays, run, epochs=run.epochs + further)
    if checks_parity(run):
        _make_expected(exchange, arrays, as_checked(run))


def _make_expected(exchange: Exchange, arrays: Arrays, checked: RunConfig) -> None:
    """One device's steps of the checked run."""
    model, steps = build_model(checked), checked.measure.parity_steps
    exchange.checked.write("initial", as_arrays(model.state_dict()))
    _write_orders(exchange.checked, arrays, checked, epochs=-(-steps // checked.steps_per_epoch))
    reference = Reference(model, checked, World(), lambda run, shard: build_loader(arrays, run, World(), shard))
    for step in range(1, steps + 1):
        expected = reference.step()
        assert expected is not None, "the host has memory"
        exchange.checked.write_step(f"expected-{step}", expected)
    reference.close()


def _write_orders(exchange: Exchange, arrays: Arrays, run: RunConfig, *, epochs: int) -> None:
    loader = build_loader(arrays, as_reference(run), World(), Shard())
    for epoch in range(1, epochs + 1):
        plan = loader.plan(epoch)
        shape = (run.steps_per_epoch, run.global_batch_size)
        samples, down, right = (_as_int32(values, shape) for values in (plan.samples, plan.down, plan.right))
        assert samples is not None
        flip = None if plan.flip is None else plan.flip.view(shape).numpy()
        exchange.write_order(epoch, Order(samples, down, right, flip))
    loader.close()


def _as_int32(values: torch.Tensor | None, shape: tuple[int, int]) -> NDArray[np.int32] | None:
    return None if values is None else values.to(torch.int32).view(shape).numpy()


def judge(run: RunConfig, attempt: Attempt) -> None:
    """Hold what was trained against plain code on one device: rows of `checks`, in rank 0's journal."""
    start, exchange = time.perf_counter(), Exchange.of(attempt)
    findings = _findings(run, exchange)
    keys = {"run_id": run_id(run), "attempt": attempt.number}
    journal = Journal(attempt.path / "journal-rank0.jsonl", keys=keys)
    journal.write("checks", [finding.row(run.epochs) for finding in findings])
    journal.event("facts", closing_check_s=time.perf_counter() - start)
    journal.commit()
    journal.close()


def _findings(run: RunConfig, exchange: Exchange) -> list[Finding]:
    trained = exchange.step("closing-0")
    state, arrays = _as_tensors(trained.state), checked(run.data, run.data.load(run.site.data_folder))

    def loader_of(run: RunConfig, shard: Shard) -> BatchLoader:
        # The whole global batch, on this one device.
        return build_loader(arrays, as_reference(run), World(), shard)

    judging = Judge(build_model(run), run, World(), loader_of)
    loss, accuracy = trained.evaluated
    findings = judging.evaluation(state, loss=loss, accuracy=accuracy)
    reason = why_no_steps(run)
    if reason is None:
        kept: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for path, value in _as_tensors(exchange.read("optimizer")).items():
            key, _, name = path.partition("/")
            kept[key][name] = value
        judging.begin_updates(kept, before=run.epochs * run.steps_per_epoch)
    else:
        findings.append(Finding("steps", reason))
    for step in range(1, CLOSING_STEPS + 1) if reason is None else ():
        taken = exchange.step(f"closing-{step}")
        number, after = run.epochs * run.steps_per_epoch + step, _as_tensors(taken.state)
        findings += judging.step(Taken(number, taken.loss, _as_tensors(taken.gradients), state, after, 1.0))
        state = after
    findings += judging.rounding()
    findings.append(Finding("bytes", f"what {run.strategy.framework} sends is not counted, only computed"))
    judging.close()
    return findings


def _as_tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in arrays.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
