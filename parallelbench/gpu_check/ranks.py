"""One rank of a strategy that is checked: `-m parallelbench.gpu_check.ranks RUNS.json cpu|cuda RESULTS.json`."""

from __future__ import annotations

import contextlib
import math
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from parallelbench.config.build import from_mapping
from parallelbench.errors import one_line
from parallelbench.gpu_check.small_runs import loader_of
from parallelbench.gpu_check.training import EPOCHS, train_watched
from parallelbench.optim.optimizers import Lbfgs
from parallelbench.training.checks.closing import ClosingCheck
from parallelbench.training.checks.differences import DIFFERENCES
from parallelbench.training.checks.likeness import as_checked
from parallelbench.training.checks.parity import check_parity
from parallelbench.training.replica import new_replica
from parallelbench.training.torch_session import build_model
from parallelbench.world.settings import configure_torch
from parallelbench.world.world import World, join

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parallelbench.config.run import RunConfig


class Result(msgspec.Struct):
    """Rank 0's results of one run; a part is missing where a rank failed before it."""

    difference: float | None = None
    """Largest difference in the parity check; None: not checked."""
    tolerance: float | None = None
    trained: bool = False
    """Whether two epochs were trained, and held against plain code."""
    watched: bool = False
    """Whether waits were looked for in the second one, and no rank waited for its device."""
    unlike: list[str] = []
    """What was not like one device while training, or after it."""


def main(arguments: list[str]) -> int:
    """Check parity, then train an epoch that must not wait, then compare with plain code: each run in turn."""
    runs_file, device_type, result_file = arguments
    plain = msgspec.json.decode(Path(runs_file).read_bytes())
    runs = {label: from_mapping(mapping) for label, mapping in plain.items()}
    first = next(iter(runs.values()))
    world = join(device_type, devices=first.devices, timeout_s=first.launcher.collective_timeout_s, nccl=first.nccl)
    results: dict[str, Result] = {}
    for label, run in runs.items():
        results[label] = Result()
        try:
            for _ in _checked(run, world, results[label]):
                _write(result_file, results, world)
        except Exception as error:
            # Only the first failure is recorded: the others follow from it.
            with contextlib.suppress(FileExistsError), Path(f"{result_file}.error").open("x") as file:
                file.write(one_line(f"{label}, rank {world.rank}: {type(error).__name__}: {error}"))
            raise
    world.barrier()
    world.leave()
    return 0


def _checked(run: RunConfig, world: World, result: Result) -> Iterator[None]:
    """Fill the result; yields whenever there is more of it."""
    configure_torch(run, world.device_type)
    if run.strategy.equals_one_device(run) and has_parity(run):
        result.difference, result.tolerance = _parity(run, world)
        yield
    configure_torch(run, world.device_type)
    replica = new_replica(build_model(run), run, world)
    watching = world.device_type == "cuda" and not waits_by_design(run)
    with closing(loader_of(run, world, replica.data_shard)) as loader:
        if run.compile:
            replica.compile_warmup(next(loader.train(epoch=1)))
        set_mode = torch.cuda.set_sync_debug_mode if watching else lambda _: None
        trainer, checks = train_watched(replica, loader, run=run, world=world, set_mode=set_mode)
        run = msgspec.structs.replace(run, epochs=EPOCHS)
        after = ClosingCheck(replica, loader, run=run, world=world, loader_of=lambda of, sh: loader_of(of, world, sh))
        loss, accuracy = trainer.evaluated
        findings = after.findings(build_model(run), loss=loss, accuracy=accuracy, sent=trainer.sent)
    replica.close()
    rows = [*checks.rows, *(finding.row(EPOCHS) for finding in findings)]
    result.unlike = [
        f"{row['check']} {row['difference']} (limit {row['limit']})" for row in rows if row["passed"] is False
    ]
    result.trained, result.watched = True, watching
    yield


def has_parity(run: RunConfig) -> bool:
    """Whether the parity check, which is fp64 and compiles nothing, shows anything of this run."""
    return run.precision == "fp32" and not run.compile


def waits_by_design(run: RunConfig) -> str:
    """Why the host waits for the device in every step of this run; empty: it must not."""
    return "L-BFGS reads each loss" if isinstance(run.optimizer, Lbfgs) else run.strategy.waits_in_steps


def _parity(run: RunConfig, world: World) -> tuple[float, float]:
    """The largest difference, infinite for a NaN, and its tolerance."""
    checked = as_checked(run)
    rows = check_parity(build_model(checked), checked, world, lambda of, shard: loader_of(of, world, shard))
    if rows is None:
        raise MemoryError("one device has too little memory for the comparison")
    worst = [row[name] for row in rows for name in DIFFERENCES]  # empty except on rank 0
    broken = any(math.isnan(value) for value in worst)  # which a maximum may lose
    return float("inf") if broken else max(worst, default=0.0), checked.strategy.parity_tolerance()


def _write(path: str, results: dict[str, Result], world: World) -> None:
    if world.rank == 0:
        Path(path).write_bytes(msgspec.json.encode(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
