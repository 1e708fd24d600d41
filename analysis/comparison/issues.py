"""What blocks a comparison and what limits it, as notes of the compared runs; and what their machines did."""

from __future__ import annotations

import math
import shlex
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.comparison.notes import SPEEDS, Code, Note
from analysis.comparison.run import is_energy
from analysis.comparison.work import PROBED, Differences
from analysis.metrics.disturbance import SHARE, partly_unmeasured, rank_windows, unsure_s
from analysis.metrics.epochs import AS_TEXT
from analysis.runs.reader import once
from parallelbench.errors import ConfigError
from parallelbench.measure import environment_match

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.comparison.run import ComparedRun
    from analysis.runs.reader import Runs


PROBE_TOLERANCE = 0.25
"""Relative difference from which two probes of a device are unlike: chosen well below the factor of two that the probe
is to tell, not derived from runs of equal devices.
"""


class UnlikeWork(ConfigError):  # noqa: N818
    """Runs that must not be compared; the message names what differs, and the remedy."""

    def __init__(self, differences: Differences, *, across: Sequence[str]) -> None:
        """`across`: the keys with which the comparison is made, in `--across`; empty where no keys are enough."""
        self.differences, self.across = differences, tuple(across)
        super().__init__(str(unlike(differences, self.across)))


def unlike(differences: Differences, across: Sequence[str]) -> Note:
    """What the environments or works of two sides differ in. `across`: the keys that would let them, in `--across`."""
    code = Code.MACHINES if all(key in PROBED for key in differences) else Code.ENVIRONMENT
    return Note(code, {"differences": differences, "ways": _remedies(differences, across)})


def _remedies(differences: Differences, across: Sequence[str]) -> str:
    ways = []
    if any(key in PROBED or environment_match.must_match(key) for key in differences):
        ways.append("measure both in one environment, by one submit")
    if across:
        ways.append(f"compare across what differs: `parallelbench compare … --across {shlex.quote(','.join(across))}`")
    if not ways:
        ways.append("choose folders, or --by, so that each side has one of these")
    return ", or ".join(ways)


def _speeds(key: str, *per_s: float) -> tuple[str, str]:
    one, other = (f"{text.number(each / 1e9)} {SPEEDS[key][1]}" for each in per_s)
    return one, other


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
                unlike[key] = _speeds(key, *filter(None, speeds))
    return unlike


ABOVE_PEAK = 1.25
"""Times what a matrix product reaches: a run that needs more floating-point operations per second is not believed. The
product is a small one, and probes of equal devices differ by up to as much."""
_EXACT = ("fp32", "fp64")
"""Precisions whose products the probe of a CPU is a bound for; on GPUs it is in fp16, the fastest."""


def beyond_peak(runs: Sequence[ComparedRun]) -> list[Note]:
    """Of the first run that would have to compute more than a device can: its least flop/s, and the largest there."""
    for run in runs:
        if not (rate := run.value("least_flop_per_s")):
            continue
        peak = max(run.probes("probed_matmul_flop_per_s"), default=math.inf)
        bounded = run.definition.get("device_type") == "cuda" or run.definition.get("precision") in _EXACT
        if bounded and rate > ABOVE_PEAK * peak:
            return [Note(Code.ABOVE_PEAK, {"rate": rate, "peak": peak})]
    return []


def beyond_cores(runs: Sequence[ComparedRun]) -> list[Note]:
    """Of the first run of which a rank used more cores than its devices have: these, and those."""
    found = (beyond_own_cores(run.runs).get(run.run_id) for run in runs)
    return next(([Note(Code.CORES, {"used": f"{each[0]:.2f}", "own": f"{each[1]:g}"})] for each in found if each), [])


@once
def beyond_own_cores(runs: Runs) -> dict[str, tuple[float, float]]:
    """Run id → cores that a rank used, processor time ÷ time, and those of its devices, of the rank and window in which
    it used most; where these are more by more than may be miscounted.

    Ranks are pinned before they load any library, so all threads of theirs, and the loader's workers, share the rank's
    cores. Only what changes its affinity uses more. Runs on GPUs, and ranks without a reading, have no entry.
    """
    on_gpus = runs.run.filter(pl.col("cores_per_device").is_null())["run_id"]
    share_s = (1 + SHARE) * pl.col("cores") * pl.col("time_s")
    found = rank_windows(runs).filter(pl.col("used_s") > share_s + unsure_s())
    found = found.select(AS_TEXT, "cores", used=pl.col("used_s") / pl.col("time_s"))
    worst = found.sort(pl.col("used") / pl.col("cores"), descending=True).unique("run_id", keep="first")
    rows = worst.filter(~pl.col("run_id").is_in(on_gpus.to_list())).select("run_id", "used", "cores").rows()
    return {run_id: (used, float(cores)) for run_id, used, cores in rows}


def _is_unlike(one: float, other: float) -> bool:
    """Whether two probes of a device say that it is another one, or has changed."""
    return max(one, other) > (1 + PROBE_TOLERANCE) * min(one, other)


def _speed(side: Sequence[ComparedRun], key: str) -> float | None:
    known = [max(speeds) for run in side if (speeds := run.probes(key))]
    return median(known) if known else None


def _device(side: Sequence[ComparedRun]) -> set[tuple[object, ...]]:
    return {tuple(run.definition.get(key) for key in _DEVICE) for run in side}


def disturbances(runs: Sequence[ComparedRun]) -> list[Note]:
    """Notes about machines that changed their speed during a run."""
    changed: Differences = {}
    for key in PROBED:
        for run in runs:
            speeds = run.probes(key)
            if key not in changed and len(speeds) > 1 and _is_unlike(*speeds):
                changed[key] = _speeds(key, *speeds)
    values = {"tolerance": f"{PROBE_TOLERANCE:.0%}", "differences": changed}
    return [Note(Code.DRIFT, values)] if changed else []


FLAGS = {
    "short": "epochs under 2 s are too short for the GPUs' counters, which are refreshed ten times a second",
    "sparse": "samples more than 1 s apart",
    "from_power": "summed up from sampled power, since the GPU has no energy counter",
}
"""Flags of energies that are not to be quoted, in words. Ratios of `short` ones are not even shown: by how much they
are wrong depends on the length of the epochs, which the sides need not share.
"""


def is_quotable() -> pl.Expr:
    """Of rows with `energy_flags`, whether no flag says that their energy is not to be quoted, or ranked."""
    return ~pl.any_horizontal(_has_flag(flag) for flag in FLAGS)


def is_comparable_energy() -> pl.Expr:
    """Of rows with `energy_flags`, whether their energy may be shown beside others'."""
    return ~_has_flag("short")


def _has_flag(flag: str) -> pl.Expr:
    return pl.col("energy_flags").fill_null("").str.split(" ").list.contains(flag)


def of_energies(runs: Sequence[ComparedRun], metric: str) -> tuple[list[Note], list[Note]]:
    """What the flags of the energies behind a metric forbid, and what they limit."""
    if not is_energy(metric):
        return [], []
    found: set[str] = set().union(*(run.energy_flags(metric) for run in runs))
    less = [flag for flag in FLAGS if flag in found and flag != "short"]
    limits = [Note(Code.ENERGY, {"flags": ", ".join(f"{FLAGS[flag]} ({flag})" for flag in less)})] if less else []
    return [Note(Code.SHORT, {"why": FLAGS["short"]})] if "short" in found else [], limits


OF_START_UP = (
    *("startup_without_parity_s", "first_epoch_time_s", "total_time_s", "throughput_with_startup_samples_per_s"),
    *("end_to_end_time_s", "gpu_hours"),
)
"""Metrics that the parity check makes better: it connects the ranks and loads the kernels, and is not counted. With
more ranks it hides more, so not even two checked runs are compared by these.
"""
WITH_FIRST_EPOCH = ("total_training_time_s", "training_time_s", "time_to_accuracy_s")
"""Metrics of all epochs, of which it makes the first one faster."""


def warmed(runs: Sequence[ComparedRun], metric: str) -> tuple[list[Note], list[Note]]:
    """What a parity check before some of the runs forbids for a metric, and what it limits."""
    checked = {run.is_warmed for run in runs}
    whose = "one side only" if False in checked else "these runs"
    return (
        [Note(Code.WARMED, {"runs": whose})] if metric in OF_START_UP and True in checked else [],
        [Note(Code.PARTLY_WARMED)] if metric in WITH_FIRST_EPOCH and len(checked) > 1 else [],
    )


def unlike_memory(runs: Sequence[ComparedRun]) -> bool:
    """Whether the peaks of these runs are of unlike kinds."""
    return len({run.words("memory_kind") for run in runs} - {()}) > 1


def unlike_contents(couples: Sequence[tuple[ComparedRun, ComparedRun]]) -> Differences:
    """The unlike contents of a data set of one name and options, of the first two runs that differ so."""
    for one, other in couples:
        contents = one.data_sha256, other.data_sha256
        if None not in contents and contents[0] != contents[1] and has_same_data(one, other):
            return {"data_sha256": contents}
    return {}


DATA_NAME = "data.name"
"""A key of runs whose data the suite reads."""


def has_same_data(one: ComparedRun, other: ComparedRun) -> bool:
    """Whether two runs were asked to train on the same data set; of users' own programs nobody knows."""
    if DATA_NAME not in one.definition or DATA_NAME not in other.definition:
        return False
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
    lacking = any(run.data_sha256 is None and DATA_NAME in run.definition for run in runs)
    return missing + (("the data's contents",) if lacking else ())
