"""Find the settings that train fastest on this machine: `python -m parallelbench.training.tuning`, a few steps of each.

It reads a request from stdin and prints findings, both as JSON. Heavy imports follow after the process is pinned to its
cores.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import time
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.config.build import from_mapping
from parallelbench.config.dataset_check import checked
from parallelbench.config.run_rules import check_run
from parallelbench.errors import ConfigError, one_line, program
from parallelbench.training.failure import classify
from parallelbench.world.affinity import pin

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from parallelbench.config.run import RunConfig


Patch = dict[str, Any]
"""Keys of a configuration and their values: `{"precision": "bf16", "optimizer.implementation": "fused"}`."""

LEAST_TIMED_S = 0.5
"""On a GPU at least this long is timed: a few steps of a small model take 2 ms, whose noise exceeds `GAIN`."""
WARM_STEPS = 2
"""Before the steps that are timed: allocations, and the search for algorithms."""
GAIN = 0.02
"""Settings must be faster by more than this share to replace the present ones: a trial is short."""
FIRST_LOSS_TOLERANCE = 0.02
"""Largest relative difference of the first loss from that of the configured settings, on the same weights and batch."""
LOSS_TOLERANCE = 0.25
"""Largest relative excess of a trial's mean loss: losses of equally good settings differ by as much so early."""


class TrialRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The settings to try."""

    run: dict[str, Any]
    """A configuration on one device."""
    stages: list[list[Patch]]
    """Each stage tries each of its patches on top of the best settings so far."""
    device_type: str
    steps: int
    """Timed in each trial; on a GPU at least. Only their losses count."""
    steps_worth: float
    """Budget of all trials, as a number of steps with the configured settings."""
    plugin: list[str]
    """The user's package that the configuration needs, and its folder; empty: none."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The trial of some settings."""

    patch: Patch
    step_time_s: float | None = None
    """Mean over the steps, batches included; None: they could not be tried."""
    first_loss: float | None = None
    loss: float | None = None
    """Mean over the trial."""
    refused: str = ""
    """Why they can't be chosen; empty if they can."""
    took_s: float = 0.0


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """The trials in their order, the configured settings first, and the best settings."""

    trials: list[Trial]
    chosen: Patch
    left: int = 0
    """Number of settings that were not tried for lack of time."""


def patched(plain: dict[str, Any], patch: Patch) -> dict[str, Any]:
    """A configuration with other values for some keys."""
    changed = dict(plain)
    for key, value in patch.items():
        node, _, name = key.rpartition(".")
        if node:
            changed[node] = {**changed[node], name: value}
        else:
            changed[key] = value
    return changed


def search(stages: list[list[Patch]], trial: Callable[[Patch], Trial], *, steps_worth: float = math.inf) -> Findings:
    """Stage by stage, keep settings that are faster by more than `GAIN` and train as well, within the budget."""
    base = best = judge = _judged(trial({}), None)
    trials, left = [base], 0
    for stage in stages:
        start = best.patch
        for patch in stage:
            if any(each.patch == start | patch for each in trials):
                continue
            # The next trial takes about as long as the first one, which always runs.
            spent_s = sum(each.took_s for each in trials[1:]) + judge.took_s
            if judge.step_time_s and spent_s > steps_worth * judge.step_time_s:
                left += 1
                continue
            judged = _judged(trial(start | patch), None if judge.refused else judge)
            judge = judged if judge.refused else judge
            trials.append(judged)
            best = _faster(judged, best)
    return Findings(trials=trials, chosen=best.patch, left=left)


def _judged(trial: Trial, base: Trial | None) -> Trial:
    """Refuse settings that train visibly worse. A few steps can't show the final accuracy of a precision."""
    if trial.refused or trial.loss is None or trial.first_loss is None:
        return trial
    why = ""
    if not math.isfinite(trial.loss):
        why = f"the loss becomes {trial.loss}"
    elif base is not None and base.loss is not None and base.first_loss is not None:
        if abs(trial.first_loss - base.first_loss) > FIRST_LOSS_TOLERANCE * abs(base.first_loss):
            why = f"computes a different result: a first loss of {trial.first_loss:.4g}, not {base.first_loss:.4g}"
        elif trial.loss > (1 + LOSS_TOLERANCE) * base.loss:
            why = f"trains worse: a mean loss of {trial.loss:.4g}, not {base.loss:.4g}"
    return msgspec.structs.replace(trial, refused=why)


def _faster(trial: Trial, best: Trial) -> Trial:
    if trial.refused or trial.step_time_s is None:
        return best
    slow = best.refused or best.step_time_s is None or trial.step_time_s < (1 - GAIN) * best.step_time_s
    return trial if slow else best


def main() -> int:
    """Carry out one request."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=TrialRequest)
    sys.path.extend(request.plugin[1:])
    plugin = request.plugin[0] if request.plugin else None
    pin(from_mapping(request.run, plugin), request.device_type)

    def trial(patch: Patch) -> Trial:
        start = time.perf_counter()
        tried = _tried(request, patch, plugin)
        return msgspec.structs.replace(tried, took_s=time.perf_counter() - start)

    with contextlib.redirect_stdout(sys.stderr):  # a user's model may print
        findings = search(request.stages, trial, steps_worth=request.steps_worth)
    print(msgspec.json.encode(findings).decode())
    return 0


def _tried(request: TrialRequest, patch: Patch, plugin: str | None) -> Trial:
    try:
        run = from_mapping(patched(request.run, patch), plugin)
        check_run(run, request.device_type)
        step_s, losses = timed(run, request.device_type, steps=request.steps)
    except ConfigError as error:
        return Trial(patch=patch, refused=error.reason)
    except (Exception, SystemExit) as error:  # any error of torch: other settings may work
        return Trial(patch=patch, refused=one_line(classify(error)[1]))
    return Trial(patch=patch, step_time_s=step_s, first_loss=losses[0], loss=statistics.fmean(losses))


def timed(run: RunConfig, device_type: str, *, steps: int) -> tuple[float, list[float]]:
    """Mean time of a step, its batch included, in s, and the mean loss of the first; after some steps that warm up.

    As in an epoch, nothing waits for the device between steps; batches that workers have ready are consumed first.
    """
    from parallelbench.measure.memory import release
    from parallelbench.training.replica import new_replica
    from parallelbench.training.torch_session import build_loader, build_model
    from parallelbench.world.settings import configure_torch
    from parallelbench.world.world import join

    configure_torch(run, device_type)
    world = join(device_type, devices=run.devices, timeout_s=run.launcher.collective_timeout_s)
    world.wake()
    replica = new_replica(build_model(run), run, world)
    loader = build_loader(checked(run.data, run.data.load(run.site.data_folder)), run, world, replica.data_shard)
    ahead = getattr(run.loader, "workers", 0) * getattr(run.loader, "prefetch_factor", 0)
    losses: list[Tensor] = []
    batches = chain.from_iterable(map(loader.train, count(1)))

    def step() -> None:
        (batch,) = islice(batches, 1)
        result = replica.step(batch)
        assert result is not None, "one device owns the loss of every step"
        if len(losses) < WARM_STEPS + ahead + steps:
            losses.append(result[0].detach() / batch.size)

    try:
        least_s = LEAST_TIMED_S if device_type == "cuda" else 0.0
        _block_s(step, WARM_STEPS + ahead, world.synchronize)
        step_s = mean_step_s(step, steps, world.synchronize, least_s=least_s)
        return step_s, [loss.item() for loss in losses]
    finally:
        loader.close()
        replica.close()
        release()


def mean_step_s(step: Callable[[], None], steps: int, synchronize: Callable[[], None], *, least_s: float) -> float:
    """Mean time of `steps` steps, s. Where they take less than `least_s`, they wake the device, and more are timed."""
    block_s = _block_s(step, steps, synchronize)
    if block_s < least_s:
        steps = math.ceil(steps * least_s / max(block_s, 1e-6))
        block_s = _block_s(step, steps, synchronize)
    return block_s / steps


def _block_s(step: Callable[[], None], steps: int, synchronize: Callable[[], None]) -> float:
    """Time of some steps together, s."""
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(program(main))
