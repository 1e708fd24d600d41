"""The words for what blocks a comparison and for what limits it, which `pairing.py` finds; and what the compared runs'
machines did.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from enum import Enum
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.comparison.ratio import DECIDING_REPEATS
from analysis.comparison.run import is_energy
from analysis.comparison.work import PROBED, Differences, plain
from analysis.metrics.disturbance import SHARE, partly_unmeasured, rank_windows, unsure_s
from analysis.metrics.epochs import AS_TEXT
from analysis.runs.reader import once
from parallelbench.errors import ConfigError, count_of
from parallelbench.measure import environment_match

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
        super().__init__(refusal(differences, self.across))


class Blocker(Enum):
    """Why runs are not compared."""

    ENVIRONMENT = "environment"
    """Entries of the environment that must match differ."""
    SAMPLES = "samples"
    """Epochs hold unequally many samples, and the metric is one of a whole epoch."""
    DATA = "data"
    """The data set of one name and options has unequally many samples: it is another one."""
    UNREACHED = "unreached"
    """Some of the runs never reach the target accuracy."""
    SUPERLINEAR = "superlinear"
    """More devices are faster than fewer by more than they can be."""
    ABOVE_PEAK = "above peak"
    """A device computes more than it can."""
    CORES = "cores"
    """A rank used more cores than its devices have."""
    MEMORY = "memory"
    """The metric is memory: of processes on one side, of devices on the other."""
    SHORT = "short"
    """The metric is an energy, and epochs are too short for the counters."""
    WARMED = "warmed"
    """The metric is of the start-up or the first epoch, before which the parity check warmed up any of the runs."""


class Caveat(Enum):
    """What a reader must know about runs that are compared."""

    ENVIRONMENT = "environment"
    """Entries of the environment differ that may."""
    ORDER = "order"
    """Most runs of one side began before those of the other."""
    APART = "apart"
    """The sides were measured in other sessions than each other, and nothing shows what that has made of the ratio."""
    SAMPLES = "samples"
    """Epochs hold unequally many samples, and ratios are per sample."""
    UNRECORDED = "unrecorded"
    """Not all runs recorded what must match."""
    ABOVE_IDEAL = "above ideal"
    """More devices seem faster than fewer by more than their number explains, but may not be."""
    DRIFT = "drift"
    """A machine changed its speed between the start and the end of a run."""
    ENERGY = "energy"
    """The metric is an energy that was measured less well than others are."""
    WARMED = "warmed"
    """The metric is of the whole training, before which the parity check warmed up some of the runs."""


@dataclass(frozen=True)
class Issue:
    """A blocker or caveat, with the values that its words need."""

    kind: Blocker | Caveat
    differences: Differences
    """What differs; for `UNREACHED` and `SAMPLES` one entry with both numbers."""

    def __str__(self) -> str:
        return "".join(_words(self))

    @property
    def brief(self) -> str:
        """Without causes and remedies, for where another line has them."""
        return _words(self)[0]


def _words(issue: Issue) -> tuple[str, str]:
    """What it is, and what explains or mends it."""
    return _words_of_blocker(issue) if isinstance(issue.kind, Blocker) else _words_of_caveat(issue)


def _numbers(issue: Issue) -> list[str]:
    return [f"{value:,}" for pair in issue.differences.values() for value in pair if isinstance(value, int)]


def _of_unequal_epochs(issue: Issue) -> str:
    return f"epochs hold {' and '.join(_numbers(issue))} samples"


def _words_of_blocker(issue: Issue) -> tuple[str, str]:
    numbers = _numbers(issue)
    match issue.kind:
        case Blocker.ENVIRONMENT:
            told, details = _unlike(issue.differences)
            return told, details + _remedies(issue.differences, tuple(issue.differences))
        case Blocker.SAMPLES:
            return _of_unequal_epochs(issue), ": compare samples per second"
        case Blocker.DATA if "data_sha256" in issue.differences:
            contents = " and ".join(str(value)[:12] for value in issue.differences["data_sha256"])
            told = f"the data sets have the same name and options, but other contents (sha256 {contents} …)"
            return told, ": measure both on one data set"
        case Blocker.DATA:
            return (
                f"{_of_unequal_epochs(issue)}, though the data sets have the same name and options",
                ": these are two data sets; measure both sides on one",
            )
        case Blocker.UNREACHED:
            ((target, _),) = issue.differences.items()
            return f"{' of '.join(numbers)} repeats never reach {target}", ""
        case Blocker.SUPERLINEAR:
            speed_up, most, fewer, more = _scaling(issue)
            return (
                f"{more} seem {speed_up:.3g} times as fast as {fewer}, and more than {most:.3g} times is not believed",
                f": {_CAUSES}",
            )
        case Blocker.ABOVE_PEAK:
            ((_, (rate, peak)),) = issue.differences.items()
            return (
                f"a device would have to compute {rate:.3g} flop/s at least, but a matrix product on it reaches "
                f"{peak:.3g}",
                ": work was left out (read the checks of these runs), the times are too short (a window that does not "
                "wait for the device), or other programs slowed the probe (measure again, alone)",
            )
        case Blocker.CORES:
            ((_, (used, own)),) = issue.differences.items()
            return f"a rank used more cores than its devices: {used:.2f} cores of {own:g}", f"; {_OTHER_CORES}"
        case Blocker.MEMORY:
            return (
                "memory is not compared, as peaks on CPUs are those of processes with all their libraries, and peaks "
                "on GPUs those of tensors",
                "",
            )
        case Blocker.SHORT:
            return f"energies are not compared, as {FLAGS['short']} (short)", ": take more data"
        case Blocker.WARMED:
            ((_, (one, other)),) = issue.differences.items()
            whose = "these runs" if one == other else "one side only"
            return f"the parity check warmed up {whose} before start-up and first epoch", _MEASURE_COLD
    raise AssertionError(issue.kind)


def _words_of_caveat(issue: Issue) -> tuple[str, str]:
    shown = format_differences(issue.differences)
    match issue.kind:
        case Caveat.ENVIRONMENT:
            return f"the compared runs differ in {shown}", ""
        case Caveat.SAMPLES:
            return f"{_of_unequal_epochs(issue)}: ratios of times and energies are per sample", ""
        case Caveat.APART:
            return (
                "the two sides were measured apart",
                ", so the ratios include any change of the machine in between and have neither interval nor verdict: "
                f"measure both in turn, by one submit of {DECIDING_REPEATS} or more further repeats (sweep.repeats), "
                f"or submit each side {DECIDING_REPEATS} times or more, in alternation, now the one first and then the "
                "other (A B, B A)",
            )
        case Caveat.ORDER:
            return (
                "the compared runs were measured one after the other",
                ": the ratios include any change of the machine in between; one submit of both sides interleaves them",
            )
        case Caveat.UNRECORDED:
            names = ", ".join(issue.differences)
            return f"not all of the compared runs recorded {names}", ": whether they match is not known"
        case Caveat.ABOVE_IDEAL:
            speed_up, ideal, fewer, more = _scaling(issue)
            told = f"{more} are {speed_up:.3g} times as fast as {fewer}, more than the ideal {ideal:.3g} times"
            if MEMORY in issue.differences:
                return f"{told}: the baseline is at its memory's limit ({at_limit_in_words(issue)})", ""
            return told, f": by chance, or {_CAUSES}"
        case Caveat.DRIFT:
            return f"the speed of a machine changed by more than {PROBE_TOLERANCE:.0%} during a run: {shown}", (
                ": quote a ratio only with its interval, which allows for the change"
            )
        case Caveat.ENERGY:
            flags = ", ".join(f"{FLAGS[flag]} ({flag})" for flag in issue.differences)
            return f"energies of the compared runs are less exact than others: {flags}", ""
        case Caveat.WARMED:
            return "the parity check warmed up one side only before its first epoch, which is in these times", ""
    raise AssertionError(issue.kind)


_MEASURE_COLD = ": to compare these, measure both sides with measure.parity=false, in a sweep of its own"


_CAUSES = (
    "other programs slowed the runs on fewer devices (measure both again, on an idle machine), work was left out (read "
    "the checks of these runs), or fewer devices alone lack cache or memory (scaling=weak gives every device the same "
    "share)"
)
"""Why more devices may be faster by more than their number."""


_OTHER_CORES = (
    "its threads or workers left those that it was pinned to, so its times are those of more devices (let nothing "
    "change the affinity, and measure again)"
)


MEMORY = "memory"
"""The entry of an `ABOVE_IDEAL` whose fewer devices were at their memory's limit: most retries, least headroom."""


def at_limit_in_words(issue: Issue) -> str:
    """ "up to 12 retries of the allocator in a run", "1.2 % left"; empty where memory explains nothing."""
    retries, left = issue.differences.get(MEMORY, (0, None))
    if retries:
        return f"up to {retries:,} {'retry' if retries == 1 else 'retries'} of the allocator in a run"
    return "" if left is None else f"{text.percent(left)} left"


def _scaling(issue: Issue) -> tuple[float, float, str, str]:
    """The speed-up, its limit, and the fewer and the more devices in words."""
    devices = [count_of(number, "device") for number in issue.differences["devices"]]
    return (*issue.differences["speed-up"], devices[0], devices[1])


def refusal(differences: Differences, across: Sequence[str]) -> str:
    """Why two sides are not compared, and the remedies: to measure anew, or to let these keys differ."""
    return "".join(_unlike(differences)) + _remedies(differences, across)


def _unlike(differences: Differences) -> tuple[str, str]:
    """What the environments of two sides differ in, and details."""
    if all(key in PROBED for key in differences):
        details = f" (unlike, or busy with something else): {format_differences(differences)}"
        return "the sides' machines were not equally fast", details
    return f"the sides differ in {format_differences(differences)}", ""


def _remedies(differences: Differences, across: Sequence[str]) -> str:
    ways = []
    if any(key in PROBED or environment_match.must_match(key) for key in differences):
        ways.append("measure both in one environment, by one submit")
    if across:
        ways.append(f"compare across what differs: `parallelbench compare … --across {shlex.quote(','.join(across))}`")
    if not ways:
        ways.append("choose folders, or --by, so that each side has one of these")
    return f"; {', or '.join(ways)}"


def format_differences(differences: Differences) -> str:
    """ "precision: fp32 and bf16, packages.torch: 2.11 and 2.12"."""
    return ", ".join(
        f"{_SPEEDS[key][0] if key in _SPEEDS else key}: {plain(one)} and {plain(other)}"
        for key, (one, other) in differences.items()
    )


_SPEEDS = {
    "probed_matmul_flop_per_s": ("speed of a matrix product in a short test", "Gflop/s"),
    "probed_memory_bytes_per_s": ("speed of memory in a short test", "GB/s"),
}
"""What is probed of a device, and the billions per second that it comes to, in words."""


def _speeds(key: str, *per_s: float) -> tuple[str, str]:
    one, other = (f"{text.number(each / 1e9)} {_SPEEDS[key][1]}" for each in per_s)
    return one, other


def said_once(issues: Iterable[tuple[str, Issue]], *, of: int | None = None, brief: bool = False) -> list[str]:
    """Issues of named comparisons in sentences, equal ones together; `brief`: without causes and remedies.

    Each begins with the names that it is true of, unless it is true of all. `of`: how many comparisons there are; None:
    always with names.
    """
    named: dict[str, dict[str, None]] = {}
    for name, issue in issues:
        named.setdefault(issue.brief if brief else str(issue), {})[name] = None
    sentences = ((text.sentence(words), list(names)) for words, names in named.items())
    return [words if len(names) == of else f"{text.listed(names)}: {words}" for words, names in sentences]


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


def beyond_peak(runs: Sequence[ComparedRun]) -> Differences:
    """Least and largest flop/s of a device, of the first run that would have to compute more than it can."""
    for run in runs:
        if not (rate := run.value("least_flop_per_s")):
            continue
        peak = max(run.probes("probed_matmul_flop_per_s"), default=math.inf)
        bounded = run.definition.get("device_type") == "cuda" or run.definition.get("precision") in _EXACT
        if bounded and rate > ABOVE_PEAK * peak:
            return {"flop/s": (rate, peak)}
    return {}


def beyond_cores(runs: Sequence[ComparedRun]) -> Differences:
    """Cores that a rank used, and those of its devices, of the first run that used more."""
    found = (beyond_own_cores(run.runs).get(run.run_id) for run in runs)
    return next(({"cores": each} for each in found if each), {})


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


def disturbances(runs: Sequence[ComparedRun]) -> list[Issue]:
    """Caveats about machines that changed their speed during a run."""
    changed: Differences = {}
    for key in PROBED:
        for run in runs:
            speeds = run.probes(key)
            if key not in changed and len(speeds) > 1 and _is_unlike(*speeds):
                changed[key] = _speeds(key, *speeds)
    return [Issue(Caveat.DRIFT, changed)] if changed else []


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


def of_energies(runs: Sequence[ComparedRun], metric: str) -> tuple[list[Issue], list[Issue]]:
    """What the flags of the energies behind a metric forbid, and what they limit."""
    if not is_energy(metric):
        return [], []
    found: set[str] = set().union(*(run.energy_flags(metric) for run in runs))
    less = [flag for flag in FLAGS if flag in found and flag != "short"]
    limits = [Issue(Caveat.ENERGY, dict.fromkeys(less, (None, None)))] if less else []
    return [Issue(Blocker.SHORT, {})] if "short" in found else [], limits


OF_START_UP = (
    *("startup_without_parity_s", "first_epoch_time_s", "total_time_s", "throughput_with_startup_samples_per_s"),
    *("end_to_end_time_s", "gpu_hours"),
)
"""Metrics that the parity check makes better: it connects the ranks and loads the kernels, and is not counted. With
more ranks it hides more, so not even two checked runs are compared by these.
"""
WITH_FIRST_EPOCH = ("total_training_time_s", "training_time_s", "time_to_accuracy_s")
"""Metrics of all epochs, of which it makes the first one faster."""


def warmed(runs: Sequence[ComparedRun], metric: str) -> tuple[list[Issue], list[Issue]]:
    """What a parity check before some of the runs forbids for a metric, and what it limits."""
    checked = {run.is_warmed for run in runs}
    sides: Differences = {"checked": (False not in checked, True)}
    return (
        [Issue(Blocker.WARMED, sides)] if metric in OF_START_UP and True in checked else [],
        [Issue(Caveat.WARMED, sides)] if metric in WITH_FIRST_EPOCH and len(checked) > 1 else [],
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
