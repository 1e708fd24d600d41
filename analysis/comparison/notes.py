"""What a reader must know about comparisons: one type, one table of words, one writer.

Finders return notes with the values that were found; nothing but `write` makes sentences of them, and *Next* is
computed from their remedies.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from enum import Enum, unique
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis import text
from analysis.comparison.ratio import DECIDING_REPEATS, MOST_FURTHER
from analysis.comparison.work import plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from analysis.comparison.work import Differences


_CAUSES = (
    "other programs slowed the runs on fewer devices (measure both again, on an idle machine), work was left out (read "
    "the checks of these runs), or fewer devices alone lack cache or memory (scaling=weak gives every device the same "
    "share)"
)
"""Why more devices may be faster by more than their number."""
_RETRY_DISTURBED = " When the machine is free, submit the sweep again with `--retry {retry}`"


@unique
class Code(Enum):
    """What is noted, with its words: what it is, and what explains or mends it.

    In braces: values of the note; `whose`: its subjects, which stand before the words where these don't name them;
    `each`: " each" for several subjects; `see`: where a brief sentence leaves the rest to others; what a remedy holds.
    """

    # Why runs are not compared.
    ENVIRONMENT = "the sides differ in {differences}", "; {ways}"
    MACHINES = (
        "the sides' machines were not equally fast",
        " (unlike, or busy with something else): {differences}; {ways}",
    )
    SAMPLES = "epochs hold {fewer} and {more} samples", ": compare samples per second"
    CONTENTS = (
        "the data sets have the same name and options, but other contents (sha256 {one} and {other} …)",
        ": measure both on one data set",
    )
    DATA = (
        "epochs hold {fewer} and {more} samples, though the data sets have the same name and options",
        ": these are two data sets; measure both sides on one",
    )
    UNREACHED = "{missed} of {repeats} repeats never reach {target}"
    SUPERLINEAR = (
        "{more} seem {speed_up} times as fast as {fewer}, and more than {limit} times is not believed",
        f": {_CAUSES}",
    )
    ABOVE_PEAK = (
        "a device would have to compute {rate} flop/s at least, but a matrix product on it reaches {peak}",
        ": work was left out (read the checks of these runs), the times are too short (a window that does not wait for "
        "the device), or other programs slowed the probe (measure again, alone)",
    )
    CORES = (
        "a rank used more cores than its devices: {used} cores of {own}",
        "; its threads or workers left those that it was pinned to, so its times are those of more devices (let "
        "nothing change the affinity, and measure again)",
    )
    MEMORY = (
        "memory is not compared, as peaks on CPUs are those of processes with all their libraries, and peaks on GPUs "
        "those of tensors"
    )
    SHORT = "energies are not compared, as {why} (short)", ": take more data"
    WARMED = (
        "the parity check warmed up {runs} before start-up and first epoch",
        ": to compare these, measure both sides with measure.parity=false, in a sweep of its own",
    )
    REFUSED = "{whose} can't be compared with {baseline}: {why}{see}"

    # What limits runs that are compared.
    ENTRIES = "the compared runs differ in {differences}"
    ORDER = (
        "the compared runs were measured one after the other",
        ": the ratios include any change of the machine in between; one submit of both sides interleaves them",
    )
    APART = (
        "the two sides were measured apart",
        ", so the ratios include any change of the machine in between and have neither interval nor verdict: measure "
        f"both in turn, by one submit of {DECIDING_REPEATS} or more further repeats (sweep.repeats), or submit each "
        f"side {DECIDING_REPEATS} times or more, in alternation, now the one first and then the other (A B, B A)",
    )
    PER_SAMPLE = "epochs hold {fewer} and {more} samples: ratios of times and energies are per sample"
    UNRECORDED = "not all of the compared runs recorded {names}", ": whether they match is not known"
    ABOVE_IDEAL = (
        "{more} are {speed_up} times as fast as {fewer}, more than the ideal {limit} times",
        f": by chance, or {_CAUSES}",
    )
    AT_MEMORY_LIMIT = (
        "{more} are {speed_up} times as fast as {fewer}, more than the ideal {limit} times: on {fewer} memory is "
        "at its limit ({memory})"
    )
    DRIFT = (
        "the speed of a machine changed by more than {tolerance} during a run: {differences}",
        ": quote a ratio only with its interval, which allows for the change",
    )
    ENERGY = "energies of the compared runs are less exact than others: {flags}"
    PARTLY_WARMED = "the parity check warmed up one side only before its first epoch, which is in these times"

    # What verdicts and speed-ups lack.
    FEW_REPEATS = (
        "{some} ratios rest on {pairs} only and have {lack} ({whose})",
        ": add {further} per side, in turn (sweep.repeats={repeats})",
    )
    UNDECIDED = "if it stays so, {further} would decide (sweep.repeats={repeats})"
    UNDECIDED_SIDES = "no difference shown; if it stays so, {further} more per side, in turn, would decide"
    UNDECIDABLE = f"more than {MOST_FURTHER} further repeats would be needed to decide"
    UNDECIDABLE_SIDES = f"no difference shown; more than {MOST_FURTHER} further repeats would be needed to decide"
    TOGETHER = (
        "the verdicts allow for each other ({verdicts} of them): on average at most 1 in 20 of those that say faster "
        "or slower is wrong. So one may show no difference where its own 95 % interval leaves out 1"
    )
    NO_BASELINE = "No speed-up for {whose}: {why}"
    NOT_FOLLOWED = "The baseline of the sweep is not taken (sweep.baseline={why}): {whose}"
    STAND_IN = "Speed-ups are over {whose}, {why}"
    NO_START_UP = "No speed-up with start-up for {whose}: {why}"
    PACKED = (
        "No start-up from {runs} (launcher.pack=true): a process that had loaded torch, a new one for each repeat, was "
        "forked for each. They are compared with each other only"
    )
    CLAIM = "a claim is undecided"
    FAILED = "runs failed for reasons that may not come again"
    ONE_SIDE = "only {side} has counted runs of {whose}"
    LACKS = "side {side} lacks {what}"

    # Runs that don't count.
    NOT_COUNTED = "{whose}: {gone} of {runs}{each} {do} not count ({why})"
    NOT_COUNTED_MORE = "runs of {more} more configurations do not count"
    EXCLUDED = "Excluded from all comparisons: {slugs}: {why}"
    EXCLUDED_MORE = "{more} more runs are excluded: see the table of all runs"
    DISTURBED = (
        "Others disturbed {runs} of {whose}: {what}. Other runs of the same count; these do not",
        f".{_RETRY_DISTURBED}",
    )
    ALL_DISTURBED = (
        "Others disturbed {runs} of {whose}: {what}. Their times are shown (*), without speed-up or verdict; losses "
        "and accuracies count",
        f".{_RETRY_DISTURBED}",
    )
    DISTURBED_TIME = "Others disturbed {what} of {runs} of {whose}: {numbers} shown, but not compared"
    LOSSES = (
        "Losses of the training, which parity does not check, are not held against one device's: {whose}: {why}"
        "{expected}"
    )
    NOBODY_REACHES = "No run reaches {target} test accuracy, which was chosen; {best}"
    NOT_ALL_REACH = "Not every run reaches {target} test accuracy, so they have no time to it: {best}"

    # What limits the numbers of runs that count.
    LEFT_OUT = (
        "Not all training samples are trained on in an epoch, as they fill no global batch, or the epoch was cut "
        "short; throughput does not count them: {cases}"
    )
    SINGLE_EPOCH = "{runs} {have} no steady state: measure with epochs=2 or more"
    RESUMED = (
        "{slugs} {were} interrupted, and resumed after epoch {epoch}. The first epoch of each attempt warms up and "
        "does not count in times and throughput. There is no total time with start-up"
    )
    NO_ENERGY = (
        "Energy per epoch is not known of {whose}: no energy or power was sampled there, or it has one epoch only"
    )
    FLAGGED = "{what} of {whose}: {why} ({flag})"
    THROTTLED = "Clocks were lowered by {cause} while {repeats} of {whose}{each} trained, which made their times longer"
    PARITY_OFF = "Not checked against one device (measure.parity=false): {whose}"
    PARITY_NEVER = "Not comparable with one device, so without a parity check: {whose}"
    PARITY_SMALL = (
        "Compared with one device as a smaller model only (`parity_model`), since after the training no step of the "
        "whole one was: {whose}"
    )
    RECORDED = "{whose}: {warning} ({runs}: {folders})"
    SHARED_NODES = (
        "{runs} shared nodes with other Slurm jobs, whose load on memory, network and clocks is in the times. "
        "Interleaved repeats spread it over all configurations. Runs on whole nodes avoid it"
    )
    OTHER_VALUES = "Not all counted runs have the same {key}: {shown}"
    UNCOMMITTED = "Some runs were measured with uncommitted changes: the commit alone does not reproduce them"

    brief: str
    full: str

    def __new__(cls, brief: str, rest: str = "") -> Code:
        """A member with its words."""
        member = object.__new__(cls)
        member._value_ = brief
        member.brief, member.full = brief, f"{brief}{rest}"
        return member


class Subject(NamedTuple):
    """A configuration that a note is about."""

    name: str
    group: str = ""
    """Its work; empty where there is but one."""


@dataclass(frozen=True)
class Remedy:
    """What to ask a sweep for, so that a note no longer holds. Several are one: `a | b`."""

    repeats: int | None = None
    """Repeats of each configuration, in all: sweep.repeats."""
    retry: frozenset[str] = frozenset()
    """Exclusions whose runs are to be measured again: --retry."""
    in_turn: bool = False
    """Whether one submit is to measure both sides of the new repeats."""
    reordered: bool = False
    """Whether the sweep itself asks for one side first."""

    def __or__(self, other: Remedy) -> Remedy:
        """What mends both."""
        return Remedy(
            max(filter(None, (self.repeats, other.repeats)), default=None),
            self.retry | other.retry,
            in_turn=self.in_turn or other.in_turn,
            reordered=self.reordered or other.reordered,
        )


@dataclass(frozen=True)
class Note:
    """What is to be known, with the values that its words need, whom it is about, and what mends it."""

    code: Code
    values: Mapping[str, Any] = field(default_factory=dict)
    subjects: tuple[Subject, ...] = ()
    remedy: Remedy | None = None

    def about(self, *subjects: Subject) -> Note:
        """The same about these."""
        return replace(self, subjects=subjects)

    def __str__(self) -> str:
        return _words(self)

    @property
    def brief(self) -> str:
        """Without causes and remedies, for where another line has them."""
        return _words(self, brief=True)


def remedy_of(notes: Iterable[Note]) -> Remedy:
    """What mends all that anything mends."""
    return reduce(or_, (note.remedy for note in notes if note.remedy), Remedy())


def write(notes: Iterable[Note], *, of: int | None = None, brief: bool = False) -> list[str]:
    """Notes in sentences, those with equal words together, with all their subjects.

    `of`: how many subjects there are, if what is true of all needs no names. `brief`: without causes and remedies.
    """
    alike: dict[tuple[Code, str], list[Note]] = defaultdict(list)
    for note in notes:
        alike[note.code, _words(note.about(), brief=brief)].append(note)
    lines = []
    for (code, _), found in alike.items():
        subjects = tuple(dict.fromkeys(subject for note in found for subject in note.subjects))
        words = _words(found[0].about(*subjects), brief=brief)
        if not code.brief.startswith("{"):  # what begins with a name is written as it is
            words = f"{words[:1].upper()}{words[1:]}"
        has_names = "{whose}" in code.brief or len(subjects) in (0, of)
        lines.append(f"{words}." if has_names else f"{named(subjects)}: {words}.")
    return lines


def _words(note: Note, *, brief: bool = False) -> str:
    remedy = note.remedy or Remedy()
    known = {
        "repeats": remedy.repeats,
        "retry": ",".join(sorted(remedy.retry)),
        "whose": named(note.subjects),
        "each": " each" if len(note.subjects) > 1 else "",
        "see": " (see the warnings)" if brief else "",
    } | {key: _shown(value, brief=brief) for key, value in note.values.items()}
    return (note.code.brief if brief else note.code.full).format(**known)


def _shown(value: Any, *, brief: bool) -> str:
    if isinstance(value, Note):
        return _words(value, brief=brief)
    if isinstance(value, dict):
        return format_differences(value)
    if isinstance(value, float):  # beyond a million a power of ten is read sooner
        return text.number(value) if 999.5 <= abs(value) < 1e6 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


MOST_NAMED = 8
"""Configurations that a sentence names."""


def named(subjects: Sequence[Subject], *, most: int = MOST_NAMED) -> str:
    """ "ddp × 2 and ddp × 4 (work)": the works once where all have the same, else with each name."""
    works: dict[str, list[str]] = defaultdict(list)
    for name, group in subjects:
        works[name] += [group] if group else []
    if len({tuple(of) for of in works.values()}) == 1:
        ((groups), *_) = works.values()
        return text.listed(list(works), most=most) + (f" ({text.listed(groups, sep='; ')})" if groups else "")
    few = {name: text.listed(groups, most=2 if len(groups) == 2 else 1, sep="; ") for name, groups in works.items()}
    return text.listed([f"{name} ({groups})" if groups else name for name, groups in few.items()], most=most)


def format_differences(differences: Differences) -> str:
    """ "precision: fp32 and bf16, packages.torch: 2.11 and 2.12"."""
    return ", ".join(
        f"{SPEEDS[key][0] if key in SPEEDS else key}: {plain(one)} and {plain(other)}"
        for key, (one, other) in differences.items()
    )


SPEEDS = {
    "probed_matmul_flop_per_s": ("speed of a matrix product in a short test", "Gflop/s"),
    "probed_memory_bytes_per_s": ("speed of memory in a short test", "GB/s"),
}
"""What is probed of a device, in words, and the billions per second that it comes to."""
