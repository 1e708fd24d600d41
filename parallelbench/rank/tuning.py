"""Which settings train fastest on this machine: a trial of a few steps of each, `python -m parallelbench.rank.tuning`.

It reads a request from stdin and prints findings, both as JSON. Nothing heavy is imported before the process is
pinned to its cores.
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

from parallelbench.errors import ConfigError, one_line
from parallelbench.rank.worker import classify, pin
from parallelbench.spec.check import check_run
from parallelbench.spec.mapping import from_mapping

if TYPE_CHECKING:
    from collections.abc import Callable

    from parallelbench.spec.config import RunConfig

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


class TrialRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be tried."""

    run: dict[str, Any]
    """A configuration on one device."""
    stages: list[list[Patch]]
    """Each stage starts from what won so far, and tries each of these on top of it."""
    device_type: str
    steps: int
    """Timed in each trial."""
    steps_worth: float
    """Trials end once all together have taken as long as so many steps of the settings as they were asked for."""
    plugin: list[str]
    """The package of the user's own that the configuration needs, and where it is; empty: none."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What became of some settings."""

    patch: Patch
    step_time_s: float | None = None
    """Mean over the steps, batches included; None: they could not be tried."""
    first_loss: float | None = None
    loss: float | None = None
    """Mean over the trial."""
    refused: str = ""
    """Why they can't be chosen; empty: they can."""
    took_s: float = 0.0


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """The trials in their order, the first that of the settings as they were asked for, and the best settings."""

    trials: list[Trial]
    chosen: Patch
    left: int = 0
    """Settings that were not tried: it would have taken too long."""


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


def search(stages: list[list[Patch]], trial: Callable[[Patch], Trial], *, steps_worth: float = math.inf) -> Findings:
    """Stage by stage, keep what is faster by more than `GAIN` and trains as well, as far as the time goes."""
    base = best = judge = _judged(trial({}), None)
    trials, left = [base], 0
    for stage in stages:
        start = best.patch
        for patch in stage:
            if any(each.patch == start | patch for each in trials):
                continue
            # The next one will take about as long as the first did, of which there is no choice.
            spent_s = sum(each.took_s for each in trials[1:]) + judge.took_s
            if judge.step_time_s and spent_s > steps_worth * judge.step_time_s:
                left += 1
                continue
            found = _judged(trial(start | patch), None if judge.refused else judge)
            judge = found if judge.refused else judge
            trials.append(found)
            best = _faster(found, best)
    return Findings(trials=trials, chosen=best.patch, left=left)


def _judged(trial: Trial, base: Trial | None) -> Trial:
    """Refuse what trains visibly worse. What a precision costs in the end, no trial of a few steps can tell."""
    if trial.refused or trial.loss is None or trial.first_loss is None:
        return trial
    why = ""
    if not math.isfinite(trial.loss):
        why = f"the loss becomes {trial.loss}"
    elif base is not None and base.loss is not None and base.first_loss is not None:
        if abs(trial.first_loss - base.first_loss) > FIRST_LOSS_TOLERANCE * abs(base.first_loss):
            why = f"computes something else: a first loss of {trial.first_loss:.4g}, not {base.first_loss:.4g}"
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
        found = _tried(request, patch, plugin)
        return msgspec.structs.replace(found, took_s=time.perf_counter() - start)

    with contextlib.redirect_stdout(sys.stderr):  # a model of the user's own may print
        findings = search(request.stages, trial, steps_worth=request.steps_worth)
    print(msgspec.json.encode(findings).decode())
    return 0


def _tried(request: TrialRequest, patch: Patch, plugin: str | None) -> Trial:
    try:
        run = from_mapping(patched(request.run, patch), plugin)
        check_run(run, request.device_type)
        step_s, losses = timed(run, request.device_type, steps=request.steps)
    except ConfigError as error:
        return Trial(patch=patch, refused=str(error))
    except Exception as error:  # whatever torch makes of it, other settings may do
        return Trial(patch=patch, refused=one_line(classify(error)[1]))
    return Trial(patch=patch, step_time_s=step_s, first_loss=losses[0], loss=statistics.fmean(losses))


def timed(run: RunConfig, device_type: str, *, steps: int) -> tuple[float, list[float]]:
    """Mean time of a step, its batch included, in s, and the mean loss of each; after some steps that warm up.

    As in an epoch, nothing waits for the device between steps; batches that workers had ready before are used up first.
    """
    from parallelbench.probes.memory_probe import release
    from parallelbench.rank.session import build_loader, build_model, configure_torch
    from parallelbench.rank.world import join

    configure_torch(run, device_type)
    world = join(device_type, devices=run.devices, timeout_s=run.launcher.collective_timeout_s)
    replica = run.strategy.prepare(build_model(run), run, world)
    loader = build_loader(run.loader.load(run.data, run.site.data_folder), run, world, replica.data_shard)
    ahead = getattr(run.loader, "workers", 0) * getattr(run.loader, "prefetch_factor", 0)
    warm, start, losses = WARM_STEPS + ahead, 0.0, []
    batches = chain.from_iterable(map(loader.train, count(1)))
    try:
        for step in range(warm + steps):
            if step == warm:
                world.synchronize()
                start = time.perf_counter()
            (batch,) = islice(batches, 1)
            result = replica.step(batch)
            assert result is not None, "one device owns the loss of every step"
            losses.append(result[0].detach() / batch.size)
        world.synchronize()
        return (time.perf_counter() - start) / steps, [loss.item() for loss in losses]
    finally:
        loader.close()
        replica.close()
        release()


if __name__ == "__main__":
    sys.exit(main())
