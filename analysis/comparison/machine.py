"""What the compared runs' machines did: whether others disturbed them, whether they are alike, what nobody recorded."""

from __future__ import annotations

from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

from analysis.comparison.policy import PROBE_TOLERANCE, PROBED, Caveat, Issue
from analysis.metrics import beyond_own_cores
from analysis.metrics.disturbed_times import partly_unmeasured
from parallelbench.measure import environment_match

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.comparison.compared_run import ComparedRun
    from analysis.comparison.work import Differences

_DEVICE = ("device_type", "device_name", "cores_per_device")
"""What a probe depends on by design. Where runs differ in these, their probes say nothing about their machines."""


def unlike_probes(sides: Sequence[Sequence[ComparedRun]]) -> Differences:
    """What was probed and differs by more than the tolerance between the medians of two sides.

    Of a run the faster of its two probes counts: the slower one may have been disturbed.
    """
    unlike: Differences = {}
    for key in PROBED:
        for one, other in combinations(sides, 2):
            speeds = [_speed(side, key) for side in (one, other)]
            if None not in speeds and _device(one) == _device(other) and _is_unlike(*filter(None, speeds)):
                unlike[key] = (f"{speeds[0]:.3g}", f"{speeds[1]:.3g}")
    return unlike


ABOVE_PEAK = 1.25
"""Times what a matrix product reaches: a run that needs more floating-point operations per second is not believed. The
product is a small one, and probes of equal devices differ by up to as much."""
_EXACT = ("fp32", "fp64")
"""Precisions whose products the probe of a CPU is a bound for; on GPUs it is in fp16, the fastest."""


def beyond_peak(runs: Sequence[ComparedRun]) -> Differences:
    """Least and largest flop/s of a device, of the first run that would have to compute more than it can."""
    for run in runs:
        rate, peaks = run.value("least_flop_per_s"), run.probes("probed_matmul_flop_per_s")
        bounded = run.definition.get("device_type") == "cuda" or run.definition.get("precision") in _EXACT
        if rate and peaks and bounded and rate > ABOVE_PEAK * max(peaks):
            return {"flop/s": (rate, max(peaks))}
    return {}


def beyond_cores(runs: Sequence[ComparedRun]) -> Differences:
    """Cores that a rank used, and those of its devices, of the first run that used more."""
    found = (beyond_own_cores(run.runs).get(run.run_id) for run in runs)
    return next(({"cores": (each.used, each.own)} for each in found if each), {})


def _is_unlike(one: float, other: float) -> bool:
    """Whether two probes of a device say that it is another one, or has changed."""
    return max(one, other) > (1 + PROBE_TOLERANCE) * min(one, other)


def _speed(side: Sequence[ComparedRun], key: str) -> float | None:
    known = [max(speeds) for run in side if (speeds := run.probes(key))]
    return median(known) if known else None


def _device(side: Sequence[ComparedRun]) -> set[tuple[object, ...]]:
    return {tuple(run.definition.get(key) for key in _DEVICE) for run in side}


def rests_on_disturbed(disturbed: int | None, steady: int | None) -> bool:
    """Whether a median over steady epochs may rest on disturbed ones.

    While fewer than half of the epochs are disturbed, their median lies between the undisturbed ones, however slow the
    others were.
    """
    return bool(disturbed and steady and 2 * disturbed >= steady)


def disturbances(runs: Sequence[ComparedRun]) -> list[Issue]:
    """Caveats about epochs that others disturbed, and about machines that changed their speed during a run.

    Runs of which half of the steady epochs were disturbed do not count, see `analysis.comparison.exclusions`.
    """
    issues = []
    counts = [(run.value("disturbed_epochs"), run.value("steady_epochs")) for run in runs]
    if disturbed := sum(int(count or 0) for count, _ in counts):
        issues.append(
            Issue(Caveat.DISTURBED, {"disturbed": (disturbed, sum(int(steady or 0) for _, steady in counts))})
        )
    changed: Differences = {}
    for key in PROBED:
        for run in runs:
            speeds = run.probes(key)
            if key not in changed and len(speeds) > 1 and _is_unlike(*speeds):
                changed[key] = (f"{speeds[0]:.3g}", f"{speeds[1]:.3g}")
    if changed:
        issues.append(Issue(Caveat.DRIFT, changed))
    return issues


def unlike_contents(couples: Sequence[tuple[ComparedRun, ComparedRun]]) -> Differences:
    """The unlike contents of a data set of one name and options, of the first two runs that differ so."""
    for one, other in couples:
        contents = one.data_sha256, other.data_sha256
        if None not in contents and contents[0] != contents[1] and has_same_data(one, other):
            return {"data_sha256": contents}
    return {}


def has_same_data(one: ComparedRun, other: ComparedRun) -> bool:
    """Whether two runs were asked to train on the same data set."""
    if one.definition is other.definition:
        return True
    data = [
        {key: value for key, value in run.definition.items() if key.startswith("data.") or key == "preprocess.recipe"}
        for run in (one, other)
    ]
    return data[0] == data[1]


def unrecorded(runs: Sequence[ComparedRun], *, of_times: bool) -> tuple[str, ...]:
    """What must match between runs, but not all of them recorded: results of older releases lack it."""
    missing: tuple[str, ...] = ()
    if of_times:
        environments = {id(run.environment): run.environment for run in runs}
        missing = next(filter(None, map(environment_match.unrecorded, environments.values())), ())
        unmeasured = any(run.run_id in partly_unmeasured(run.runs) for run in runs)
        missing += ("the load during the run",) if unmeasured else ()
    return missing + (("the data's contents",) if any(run.data_sha256 is None for run in runs) else ())
