"""What limits the numbers of a report: runs that don't count, wide intervals, unlike environments; a line for each."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from analysis import text
from analysis.comparison.baseline import (
    limits,
    refusals,
    reported_differences,
    speed_ups,
    stand_ins,
    without_baseline,
)
from analysis.comparison.campaign import campaign
from analysis.comparison.exclusions import Exclusion, describe, disturbed_runs, disturbed_times, folders_of, unchecked
from analysis.comparison.issues import FLAGS
from analysis.comparison.notes import Code, Note, Remedy, Subject, remedy_of, write
from analysis.comparison.ratio import DECIDING_REPEATS, ENOUGH_REPEATS, FEWEST_REPEATS, WITH_STARTUP
from analysis.comparison.run import environments_of
from analysis.comparison.summary import counted, facts, summary, unreached
from analysis.comparison.work import IS_PROGRAM, REFERENCE
from analysis.runs.reader import format_skipped, once
from parallelbench.errors import count_of
from parallelbench.measure.environment_match import flatten, is_volatile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from analysis.runs.reader import Runs


_Key = tuple[str, str]
"""Group and configuration."""
_FLAGS = FLAGS | {
    "short": f"{FLAGS['short']}: they are not compared",
    "reset": "a counter restarted in some epochs, which have no energy",
    "incomplete": "no sample before or after some epochs, which have no energy",
}
"""Values of `telemetry_flags`, in words."""
_SLOWED = {
    0x4: "their power limit",
    0x8: "the hardware, for heat or power",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power supply",
}
"""Bits of `gpu_throttle_reasons` (nvml.h) that slow down some runs on a GPU and not others → their cause."""


_MOST_REASONS = 25
"""For which runs are excluded: so many have a line."""


@once
def warnings(runs: Runs) -> list[str]:
    """Everything that limits the numbers, in one line each."""
    before = [*stand_ins(runs), *unreached(runs), *refusals(runs), *_excluded(runs)]
    before += [*disturbed_runs(runs), *disturbed_times(runs), *_packed(runs), *_warmed(runs)]
    after = [*_few_repeats(runs), *_by_chance(runs), *without_baseline(runs), *_samples(runs), *_single_epoch(runs)]
    after += [*_resumed(runs), *_energies(runs), *_throttled(runs), *_parity_off(runs), *unchecked(runs)]
    after += [*_recorded(runs), *_shared(runs), *limits(runs), *_environments(runs)]
    return [*write(before), *_skipped(runs, is_run=True), *write(after)]


def not_runs(runs: Runs) -> list[str]:
    """The folders that hold no run: they limit no number."""
    return _skipped(runs, is_run=False)


def _skipped(runs: Runs, *, is_run: bool) -> list[str]:
    return format_skipped((each for each in runs.skipped if each.is_run is is_run), root=runs.root)


_TOLD_WITH_SPEEDS = (Code.APART, Code.ABOVE_IDEAL, Code.AT_MEMORY_LIMIT, Code.DRIFT)


def to_know(runs: Runs) -> list[Note]:
    """What limits the numbers and stands beside none of the first answers, by weight."""
    notes = [note for note in limits(runs) if note.code not in _TOLD_WITH_SPEEDS]
    notes += [*_recorded(runs), *without_baseline(runs), *_throttled(runs), *_shared(runs), *_environments(runs)]
    notes += [*_resumed(runs), *_single_epoch(runs), *unchecked(runs), *_warmed(runs), *_packed(runs)]
    return [*notes, *_samples(runs), *_by_chance(runs)]


def _excluded(runs: Runs) -> list[Note]:
    gone = facts(runs).filter(pl.col("exclusion") != Exclusion.DISTURBED.value)  # which have a line of their own
    of_errors = pl.when(pl.col("exclusion") == Exclusion.ERROR.value).then("exclusion_detail")  # each its own cause
    alike = gone.group_by("exclusion", of_errors.alias("error"), maintain_order=True).agg("slug", "exclusion_detail")
    notes = [
        Note(Code.EXCLUDED, {"slugs": text.listed(slugs), "why": _why(exclusion, details)})
        for exclusion, _, slugs, details in alike.head(_MOST_REASONS).rows()
    ]
    more = alike["slug"].list.len().slice(_MOST_REASONS).sum()
    return [*notes, Note(Code.EXCLUDED_MORE, {"more": more})] if more > 0 else notes


def _why(exclusion: str, details: Sequence[str | None]) -> str:
    """The reason of like exclusions, with the first run's detail for an example where they differ."""
    if exclusion == Exclusion.OOM.value:  # how many bytes were asked for says nothing of the run
        return Exclusion.OOM.words
    first = describe(exclusion, details[0])
    return first if len(set(details)) == 1 else f"{first} (the first one; the table of all runs has each one's reason)"


def _packed(runs: Runs) -> list[Note]:
    """What is not known of many short runs."""
    rows = facts(runs).filter(pl.col("epochs") > 0, pl.col("packed"), pl.col("startup_s").is_null())
    return [Note(Code.PACKED, {"runs": count_of(rows.height, "packed run")})] if rows.height else []


def _warmed(runs: Runs) -> list[Note]:
    """The configurations whose speed-up with start-up is withheld, and how to measure it."""
    found = {
        (each.group, each.name): note
        for each, pairing in campaign(runs).others
        for note in pairing.blockers(metric=WITH_STARTUP.metric)
        if note.code is Code.WARMED and pairing.speed_up()
    }
    why = next(iter(found.values()), None)
    return [Note(Code.NO_START_UP, {"why": why}, subjects(runs, found))] if why else []


def few_repeats(runs: Runs) -> Note | None:
    """The first of `_few_repeats`, with what gives all the ratios a verdict."""
    notes = _few_repeats(runs)
    return replace(notes[0], remedy=remedy_of(notes)) if notes else None


def _few_repeats(runs: Runs) -> list[Note]:
    """How many repeats would give the ratios a verdict, a note for each number of pairs, fewest first; sides that were
    measured apart are told of elsewhere.
    """
    found: dict[int, list[tuple[_Key, int]]] = defaultdict(list)
    for each, speed, ratio in speed_ups(runs):
        if not ratio.is_apart:
            found[len(ratio.logarithms)].append(((each.group, each.name), speed.highest_repeat))
    notes = []
    for pairs, members in sorted(found.items()):
        if pairs >= DECIDING_REPEATS:
            break
        further = ENOUGH_REPEATS - pairs
        values = {
            "some": "All" if len(found) == 1 else "Some",
            "pairs": f"{count_of(pairs, 'independent pair')} of repeats",
            "lack": "neither interval nor verdict" if pairs < FEWEST_REPEATS else "no verdict",
            "further": count_of(further, "repeat"),
        }
        remedy = Remedy(max(highest for _, highest in members) + 1 + further)
        notes.append(Note(Code.FEW_REPEATS, values, subjects(runs, (key for key, _ in members)), remedy))
    return notes


def _by_chance(runs: Runs) -> list[Note]:
    """What holds of many verdicts."""
    verdicts = summary(runs).drop_nulls("speed_up_low").height
    return [Note(Code.TOGETHER, {"verdicts": verdicts})] if verdicts > 1 else []


_ENERGIES = ("gpu_energy_per_epoch_j", "cpu_energy_per_epoch_j", "gpu_hours")


def with_energy(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of `summary` with an energy, GPU-hours, or GPUs whose flags say why there is none; on processors without
    counters, flags are of other samples.
    """
    on_gpus = pl.col("memory_kind") == "device"
    known = pl.any_horizontal(pl.col(_ENERGIES).is_not_null())
    return rows.filter(known | (on_gpus & pl.col("energy_flags").is_not_null()))


def _energies(runs: Runs) -> list[Note]:
    """The configurations on GPUs without energy, where others have it, and the flags of energies."""
    known = pl.col("gpu_energy_per_epoch_j").is_not_null() | pl.col("energy_flags").is_not_null()
    rows = with_energy(summary(runs)).filter(known)
    by_flag: dict[str, list[_Key]] = defaultdict(list)
    for *configuration, flags in rows.select(*_KEYS, "energy_flags").rows():
        for flag in (flags or "").split():
            by_flag[flag].append(tuple(configuration))
    on_gpus = counted(runs).filter(pl.col("device_type") == "cuda")
    silent = on_gpus.join(rows.select(_KEYS), on=_KEYS, how="anti", maintain_order="left").select(_KEYS).rows()
    notes = [Note(Code.NO_ENERGY, {}, subjects(runs, silent))] if silent and rows.height else []
    for flag, found in sorted(by_flag.items()):
        what = "Telemetry" if flag == "sparse" else "Energy"
        values = {"what": what, "why": _FLAGS.get(flag, flag), "flag": flag}
        notes.append(Note(Code.FLAGGED, values, subjects(runs, found)))
    return notes


_KEYS = ("group", "configuration")


def subjects(runs: Runs, keys: Iterable[_Key]) -> tuple[Subject, ...]:
    """Configurations as notes name them, each once."""
    several = len(campaign(runs).groups) > 1
    return tuple(Subject(name, group if several else "") for group, name in dict.fromkeys(keys))


def _throttled(runs: Runs) -> list[Note]:
    """The runs whose GPUs were slowed down, and the cause."""
    rows = counted(runs).drop_nulls("steady_gpu_throttle_reasons").select(*_KEYS, "steady_gpu_throttle_reasons").rows()
    counts = Counter(
        (cause, (group, name)) for group, name, reasons in rows for bit, cause in _SLOWED.items() if reasons & bit
    )
    return [
        Note(Code.THROTTLED, {"cause": cause, "repeats": count_of(count, "repeat")}, subjects(runs, [key]))
        for (cause, key), count in counts.items()
    ]


def _samples(runs: Runs) -> list[Note]:
    dropped = counted(runs).filter(pl.col("dropped_samples") > 0)
    alike = dropped.group_by("train_samples", "dropped_samples", maintain_order=True)
    cases = alike.agg(pl.col("group").unique(maintain_order=True)).rows()
    told = [
        f"{left:,} of {whole:,} are left out ({text.listed(groups, most=1, sep='; ')})" for whole, left, groups in cases
    ]
    return [Note(Code.LEFT_OUT, {"cases": "; ".join(told)})] if told else []


def _single_epoch(runs: Runs) -> list[Note]:
    short = counted(runs).filter(pl.col("epochs") == 1).height
    have = "has one epoch, so it has" if short == 1 else "have one epoch, so they have"
    return [Note(Code.SINGLE_EPOCH, {"runs": count_of(short, "run"), "have": have})] if short else []


def _resumed(runs: Runs) -> list[Note]:
    resumed = counted(runs).drop_nulls("resumed_after")
    rows = resumed.group_by("resumed_after", maintain_order=True).agg("slug").rows()
    return [
        Note(
            Code.RESUMED,
            {"slugs": text.listed(slugs), "were": "was" if len(slugs) == 1 else "were", "epoch": str(epoch)},
        )
        for epoch, slugs in rows
    ]


def _parity_off(runs: Runs) -> list[Note]:
    """The runs without a parity check of their model: it was off, they don't compute what one device would, or a
    smaller one was checked and the whole never compared.
    """
    off, never = _without_check(runs)
    every = counted(runs).filter(pl.col("strategy") != REFERENCE).select(_KEYS).n_unique()
    small = counted(runs).filter("parity_small_only").select(_KEYS).rows()
    whose = (Subject("all configurations"),) if len(off) == every > 1 else subjects(runs, off)
    found = {
        Code.PARITY_OFF: whose,
        Code.PARITY_NEVER: subjects(runs, never),
        Code.PARITY_SMALL: subjects(runs, small),
    }
    return [Note(code, {}, whose) for code, whose in found.items() if whose]


def parity_of(runs: Runs, code: Code) -> tuple[Subject, ...]:
    """The configurations without a parity check: as it was switched off (`Code.PARITY_OFF`), or since one device does
    not do the same (`Code.PARITY_NEVER`).
    """
    return next((note.subjects for note in _parity_off(runs) if note.code is code), ())


@once
def _without_check(runs: Runs) -> tuple[list[_Key], list[_Key]]:
    """The configurations without a parity check: as it was switched off, and as one device does not do the same."""
    is_asked = (pl.col("strategy") != REFERENCE) & ~IS_PROGRAM
    unchecked = counted(runs).filter(is_asked & pl.col("parity_passed").is_null())
    rows = unchecked.select(*_KEYS, "config_json").rows()
    off = dict.fromkeys((group, name) for group, name, config in rows if not json.loads(config)["measure"]["parity"])
    return list(off), list(dict.fromkeys((group, name) for group, name, _ in rows if (group, name) not in off))


def _recorded(runs: Runs) -> list[Note]:
    """The warnings that runs recorded themselves."""
    rows = facts(runs).drop_nulls("warnings").filter(pl.col("warnings") != "")
    return [
        Note(
            Code.RECORDED,
            {
                "warning": warning,
                "runs": count_of(members.height, "run"),
                "folders": folders_of(runs, members["run_id"]),
            },
            subjects(runs, members.select(_KEYS).rows()),
        )
        for (warning,), members in rows.group_by("warnings", maintain_order=True)
    ]


def _shared(runs: Runs) -> list[Note]:
    """Whether other jobs ran beside the measured ones."""
    environments = environments_of(runs)
    shared = sum(environments[run_id].get("allocation") == "shared" for run_id in counted(runs)["run_id"])
    return [Note(Code.SHARED_NODES, {"runs": count_of(shared, "run")})] if shared else []


def _environments(runs: Runs) -> list[Note]:
    entries, told = environment(runs), reported_differences(runs)
    notes = [
        Note(Code.OTHER_VALUES, {"key": key, "shown": text.listed(sorted(values))})
        for key, values in entries.items()
        if len(values) > 1 and not is_volatile(key) and key not in told
    ]
    return [*notes, Note(Code.UNCOMMITTED)] if "true" in entries.get("git.dirty", []) else notes


@once
def environment(runs: Runs) -> dict[str, list[str]]:
    """Dotted name → the distinct values among the counted runs (all runs where none counts)."""
    rows = counted(runs)
    texts = (rows if rows.height else facts(runs))["environment_json"].drop_nulls().unique(maintain_order=True)
    decoded = (msgspec.json.decode(content, type=dict[str, msgspec.Raw]) for content in texts)
    # Nearly all runs have a load of their own. What else they have in common is read once.
    parts = dict.fromkeys((name, bytes(part)) for environment in decoded for name, part in environment.items())
    entries: dict[str, list[str]] = {}
    for name, part in parts:
        for key, value in flatten({name: json.loads(part)}).items():
            shown = text.MISSING if value is None else value if isinstance(value, str) else json.dumps(value)
            if shown not in entries.setdefault(key, []):
                entries[key].append(shown)
    return entries
