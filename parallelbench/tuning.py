"""Which settings train fastest on this machine: a trial of a few steps of each, `python -m parallelbench.tuning`.

An order comes in on stdin, findings go out on stdout, both as JSON. Nothing heavy is imported before the process is
pinned to its cores.
"""

from __future__ import annotations

import statistics
import sys
import time
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.check import check_run
from parallelbench.config import from_mapping
from parallelbench.errors import ConfigError, one_line
from parallelbench.worker import classify, pin

if TYPE_CHECKING:
    from collections.abc import Callable

    from parallelbench.config import RunConfig

Patch = dict[str, Any]
"""Keys of a configuration and their values: `{"precision": "bf16", "optimizer.implementation": "fused"}`."""

WARM_STEPS = 2
"""Before the steps that are timed: allocations, and the search for algorithms."""
GAIN = 0.02
"""Settings that are less than this much faster give way to those that are there: a trial is short."""
FIRST_LOSS_TOLERANCE = 0.02
"""How far, of itself, the first loss may be from that of the settings as asked for: same weights, same batch."""
LOSS_TOLERANCE = 0.25
"""How much higher the mean loss of a trial may be: so early, losses of equally good settings go apart that far."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be tried."""

    run: dict[str, Any]
    """A configuration on one device."""
    stages: list[list[Patch]]
    """Each stage starts from what won so far, and tries each of these on top of it."""
    device_type: str
    steps: int
    """Timed in each trial."""
    plugin: list[str]
    """The package of the user's own that the configuration needs, and where it is; empty: none."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What became of some settings."""

    patch: Patch
    step_time_s: float | None = None
    """Median over the steps; None: they could not be tried."""
    first_loss: float | None = None
    loss: float | None = None
    """Mean over the trial."""
    refused: str = ""
    """Why they can't be chosen; empty: they can."""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """The trials in their order, the first that of the settings as they were asked for, and the best settings."""

    trials: list[Trial]
    chosen: Patch


def patched(plain: dict[str, Any], patch: Patch) -> dict[str, Any]:
    """A configuration with other values for some keys."""
    found = dict(plain)
    for key, value in patch.items():
        node, _, name = key.rpartition(".")
        if node:
            found[node] = {**found[node], name: value}
        else:
            found[key] = value
    return found


def search(stages: list[list[Patch]], trial: Callable[[Patch], Trial]) -> Findings:
    """Stage by stage, keep what is faster by more than `GAIN` at the same loss as the settings as they are."""
    base = trial({})
    trials, best = [base], base
    for stage in stages:
        start = best.patch
        for patch in stage:
            if any(each.patch == start | patch for each in trials):
                continue
            found = _judged(trial(start | patch), base)
            trials.append(found)
            best = _faster(found, best)
    return Findings(trials=trials, chosen=best.patch)


def _judged(trial: Trial, base: Trial) -> Trial:
    """Refuse what trains visibly worse. What a precision costs in the end, no trial of a few steps can tell."""
    if trial.refused or trial.loss is None or base.loss is None:
        return trial
    assert trial.first_loss is not None
    assert base.first_loss is not None
    why = ""
    if not abs(trial.first_loss - base.first_loss) <= FIRST_LOSS_TOLERANCE * abs(base.first_loss):
        why = f"computes something else: a first loss of {trial.first_loss:.4g}, not {base.first_loss:.4g}"
    elif not trial.loss <= (1 + LOSS_TOLERANCE) * base.loss:
        why = f"trains worse: a mean loss of {trial.loss:.4g}, not {base.loss:.4g}"
    return msgspec.structs.replace(trial, refused=why)


def _faster(trial: Trial, best: Trial) -> Trial:
    if trial.refused or trial.step_time_s is None:
        return best
    return trial if best.step_time_s is None or trial.step_time_s < (1 - GAIN) * best.step_time_s else best


def main() -> int:
    """Carry out one order."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    sys.path.extend(order.plugin[1:])
    plugin = order.plugin[0] if order.plugin else None
    pin(from_mapping(order.run, plugin), order.device_type)

    def trial(patch: Patch) -> Trial:
        try:
            run = from_mapping(patched(order.run, patch), plugin)
            check_run(run, order.device_type)
            times_s, losses = timed(run, order.device_type, steps=order.steps)
        except ConfigError as error:
            return Trial(patch=patch, refused=str(error))
        except Exception as error:  # whatever torch makes of it, other settings may do
            return Trial(patch=patch, refused=one_line(classify(error)[1]))
        time_s, loss = statistics.median(times_s), statistics.fmean(losses)
        return Trial(patch=patch, step_time_s=time_s, first_loss=losses[0], loss=loss)

    print(msgspec.json.encode(search(order.stages, trial)).decode())
    return 0


def timed(run: RunConfig, device_type: str, *, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, its batch included, and the mean loss of each, after some that warm up."""
    from parallelbench.numerics import Numerics
    from parallelbench.probes.memory import release
    from parallelbench.session import build_model, configure_torch
    from parallelbench.world import join

    configure_torch(run, device_type)
    world = join(run, device_type)
    replica = run.strategy.prepare(build_model(run), run, world)
    loader = run.loader.build(
        run.loader.load(run.data, run.site.data_folder),
        run.data,
        device=world.device,
        dtype=Numerics(run.precision, device_type).dtype,
        seed=run.effective_seed,
        global_batch_size=run.global_batch_size,
        shard=replica.data_shard,
        channels_last=run.channels_last,
        steps_per_epoch=run.steps_per_epoch,
    )
    times_s, losses = [], []
    batches = chain.from_iterable(map(loader.train, count(1)))
    try:
        for _ in range(WARM_STEPS + steps):
            start = time.perf_counter()
            (batch,) = islice(batches, 1)
            result = replica.step(batch)
            world.synchronize()
            times_s.append(time.perf_counter() - start)
            assert result is not None, "one device owns the loss of every step"
            losses.append(result[0].item() / batch.size)
    finally:
        loader.close()
        replica.close()
        release()
    return times_s[WARM_STEPS:], losses


if __name__ == "__main__":
    sys.exit(main())
