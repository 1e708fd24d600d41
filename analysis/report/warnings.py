"""What limits the numbers of a report: runs that don't count, wide intervals, unlike environments; a line for each."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import polars as pl

from analysis import text
from analysis.comparison.baseline import (
    limited,
    refused,
    reported_differences,
    speed_ups_and_repeats,
    stand_ins_in_words,
    without_baseline,
)
from analysis.comparison.campaign import campaign
from analysis.comparison.configurations import counted, facts, summary, unreached
from analysis.comparison.exclusions import Exclusion, describe, disturbed_lines, disturbed_times, folders_of, unchecked
from analysis.comparison.issues import FLAGS, Blocker, Caveat
from analysis.comparison.ratio import DECIDING_REPEATS, ENOUGH_REPEATS, FEWEST_REPEATS, WITH_STARTUP
from analysis.comparison.run import environments_of
from analysis.comparison.verdict import SpeedVerdict
from analysis.comparison.work import IS_PROGRAM, REFERENCE
from analysis.runs.reader import format_skipped, once
from parallelbench.errors import count_of
from parallelbench.measure.environment_match import flatten, is_volatile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


def warnings(runs: Runs) -> list[str]:
    """Everything that limits the numbers, in one line each."""
    return [
        *stand_ins_in_words(runs),
        *unreached(runs),
        *refused(runs),
        *_excluded(runs),
        *disturbed_lines(runs),
        *disturbed_times(runs),
        *_packed(runs),
        *_warmed(runs),
        *format_skipped(runs.skipped, root=runs.root),
        *([few.line] if (few := few_repeats(runs)) else []),
        *_by_chance(runs),
        *without_baseline(runs),
        *_samples(runs),
        *_single_epoch(runs),
        *_resumed(runs),
        *_energies(runs),
        *_throttled(runs),
        *_parity_off(runs),
        *unchecked(runs),
        *_recorded(runs),
        *environment_warnings(runs),
    ]


def _excluded(runs: Runs) -> list[str]:
    gone = facts(runs).filter(pl.col("exclusion") != Exclusion.DISTURBED.value)  # which have a line of their own
    of_errors = pl.when(pl.col("exclusion") == Exclusion.ERROR.value).then("exclusion_detail")  # each its own cause
    alike = gone.group_by("exclusion", of_errors.alias("error"), maintain_order=True).agg("slug", "exclusion_detail")
    lines = [
        f"Excluded from all comparisons: {text.listed(slugs)}: {_why(exclusion, details)}."
        for exclusion, _, slugs, details in alike.head(_MOST_REASONS).rows()
    ]
    more = alike["slug"].list.len().slice(_MOST_REASONS).sum()
    return lines + ([f"{more} more runs are excluded: see the table of all runs."] if more > 0 else [])


def _why(exclusion: str, details: Sequence[str | None]) -> str:
    """The reason of like exclusions, with the first run's detail for an example where they differ."""
    if exclusion == Exclusion.OOM.value:  # how many bytes were asked for says nothing of the run
        return Exclusion.OOM.words
    first = describe(exclusion, details[0])
    return first if len(set(details)) == 1 else f"{first} (the first one; the table of all runs has each one's reason)"


def _packed(runs: Runs) -> list[str]:
    """What is not known of many short runs."""
    rows = facts(runs).filter(pl.col("epochs") > 0, pl.col("packed"), pl.col("startup_s").is_null())
    if rows.is_empty():
        return []
    return [
        f"No start-up from {count_of(rows.height, 'packed run')} (launcher.pack=true): a process that had loaded "
        "torch, a new one for each repeat, was forked for each. They are compared with each other only."
    ]


def _warmed(runs: Runs) -> list[str]:
    """The configurations whose speed-up with start-up is withheld, and how to measure it."""
    issues = {
        (each.group, each.name): issue
        for each, pairing in campaign(runs).others
        for issue in pairing.blockers(metric=WITH_STARTUP.metric)
        if issue.kind is Blocker.WARMED and pairing.speed_up()
    }
    if not issues:
        return []
    names = _named(runs, dict.fromkeys(issues, ""))
    return [f"No speed-up with start-up for {text.listed(names)}: {next(iter(issues.values()))}."]


class FewRepeats(NamedTuple):
    """That ratios rest on too few repeats for a verdict, and how many in all would be enough."""

    line: str
    repeats: int


def few_repeats(runs: Runs) -> FewRepeats | None:
    """How many repeats would give the ratios a verdict; sides that were measured apart are told of elsewhere."""
    pairs = [(len(ratio.logarithms), highest) for ratio, highest in speed_ups_and_repeats(runs) if not ratio.is_apart]
    few, most = (of((n for n, _ in pairs), default=ENOUGH_REPEATS) for of in (min, max))
    if few >= DECIDING_REPEATS:
        return None
    highest_repeat = max(highest for n, highest in pairs if n == few)
    advice = text.to_add(ENOUGH_REPEATS - few, after=highest_repeat)
    without = summary(runs).filter(pl.col("verdict") == SpeedVerdict.TOO_FEW.value)
    names = text.listed(_named(runs, dict.fromkeys(without.select(_KEYS).rows(), "")))
    some = "All" if most == few else "Some"
    lack = "neither interval nor verdict" if few < FEWEST_REPEATS else "no verdict"
    line = f"{some} ratios rest on {_pairs(few)} only and have {lack} ({names}): {advice}."
    return FewRepeats(line, highest_repeat + 1 + ENOUGH_REPEATS - few)


def _pairs(n: int) -> str:
    return f"{count_of(n, 'independent pair')} of repeats"


def _by_chance(runs: Runs) -> list[str]:
    """What holds of many verdicts."""
    verdicts = summary(runs).drop_nulls("speed_up_low").height
    return [text.together(verdicts)] if verdicts > 1 else []


_ENERGIES = ("gpu_energy_per_epoch_j", "cpu_energy_per_epoch_j", "gpu_hours")


def with_energy(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of `summary` with an energy, GPU-hours, or GPUs whose flags say why there is none; on processors without
    counters, flags are of other samples.
    """
    on_gpus = pl.col("memory_kind") == "device"
    known = pl.any_horizontal(pl.col(_ENERGIES).is_not_null())
    return rows.filter(known | (on_gpus & pl.col("energy_flags").is_not_null()))


def _energies(runs: Runs) -> list[str]:
    """The configurations on GPUs without energy, where others have it, and the flags of energies."""
    known = pl.col("gpu_energy_per_epoch_j").is_not_null() | pl.col("energy_flags").is_not_null()
    rows = with_energy(summary(runs)).filter(known)
    by_flag: dict[str, list[_Key]] = defaultdict(list)
    for *configuration, flags in rows.select(*_KEYS, "energy_flags").rows():
        for flag in (flags or "").split():
            by_flag[flag].append(tuple(configuration))
    on_gpus = counted(runs).filter(pl.col("device_type") == "cuda")
    silent = on_gpus.join(rows.select(_KEYS), on=_KEYS, how="anti", maintain_order="left").select(_KEYS).rows()
    reason = "no energy or power was sampled there, or it has one epoch only"
    without = text.listed(_named(runs, dict.fromkeys(silent, "")))
    lines = [f"Energy per epoch is not known of {without}: {reason}."] if silent and rows.height else []
    return lines + [
        f"{'Telemetry' if flag == 'sparse' else 'Energy'} of {text.listed(_named(runs, dict.fromkeys(found, '')))}: "
        f"{_FLAGS.get(flag, flag)} ({flag})."
        for flag, found in sorted(by_flag.items())
    ]


_KEYS = ("group", "configuration")


def _named(runs: Runs, found: Mapping[_Key, str]) -> list[str]:
    """Each configuration by name, with what is said of it; where there are several works, with those that are meant,
    of more than two the first.
    """
    several = facts(runs)["group"].n_unique() > 1
    told: dict[str, list[str]] = defaultdict(list)
    for (group, configuration), words in found.items():
        told[configuration].append(" of ".join(filter(None, [words, group if several else ""])))
    few = {name: text.listed(words, most=2 if len(words) == 2 else 1, sep="; ") for name, words in told.items()}
    return [f"{name} ({words})" if words else name for name, words in few.items()]


def _throttled(runs: Runs) -> list[str]:
    """The runs whose GPUs were slowed down, and the cause."""
    rows = counted(runs).drop_nulls("steady_gpu_throttle_reasons").select(*_KEYS, "steady_gpu_throttle_reasons").rows()
    by_cause: dict[str, Counter[_Key]] = defaultdict(Counter)
    for group, configuration, reasons in rows:
        for bit, by in _SLOWED.items():
            if reasons & bit:
                by_cause[by][group, configuration] += 1
    return [
        f"Clocks were lowered by {by} while these trained, which made their times longer: "
        f"{text.listed(_named(runs, {key: count_of(count, 'repeat') for key, count in slowed.items()}))}."
        for by, slowed in by_cause.items()
    ]


def _samples(runs: Runs) -> list[str]:
    dropped = counted(runs).filter(pl.col("dropped_samples") > 0)
    alike = dropped.group_by("train_samples", "dropped_samples", maintain_order=True)
    cases = alike.agg(pl.col("group").unique(maintain_order=True)).rows()
    told = [
        f"{left:,} of {whole:,} are left out ({text.listed(groups, most=1, sep='; ')})" for whole, left, groups in cases
    ]
    why = "as they fill no global batch, or the epoch was cut short; throughput does not count them"
    return [f"Not all training samples are trained on in an epoch, {why}: {'; '.join(told)}."] if told else []


def _single_epoch(runs: Runs) -> list[str]:
    short = counted(runs).filter(pl.col("epochs") == 1)
    if short.is_empty():
        return []
    have = "has one epoch, so it has" if short.height == 1 else "have one epoch, so they have"
    return [f"{count_of(short.height, 'run')} {have} no steady state: measure with epochs=2 or more."]


def _resumed(runs: Runs) -> list[str]:
    resumed = counted(runs).drop_nulls("resumed_after")
    rows = resumed.group_by("resumed_after", maintain_order=True).agg("slug").rows()
    return [
        f"{text.listed(slugs)} {'was' if len(slugs) == 1 else 'were'} interrupted, and resumed after epoch {epochs}. "
        "The first epoch of each attempt warms up and does not count in times and throughput. There is no total time "
        "with start-up."
        for epochs, slugs in rows
    ]


def _parity_off(runs: Runs) -> list[str]:
    """The runs without a parity check of their model: it was off, they don't compute what one device would, or a
    smaller one was checked and the whole never compared.
    """
    _, never = _without_check(runs)
    told = {
        "Not comparable with one device, so without a parity check": never,
        "Compared with one device as a smaller model only (`parity_model`), since after the training no step of the "
        "whole one was": dict.fromkeys(counted(runs).filter("parity_small_only").select(_KEYS).rows(), ""),
    }
    named = {"Not checked against one device (measure.parity=false)": parity_off(runs)}
    named |= {words: _named(runs, found) for words, found in told.items()}
    return [f"{words}: {text.listed(names, most=len(names))}." for words, names in named.items() if names]


def parity_off(runs: Runs) -> list[str]:
    """The configurations of which parity was not checked as that was switched off."""
    off, _ = _without_check(runs)
    every = counted(runs).filter(pl.col("strategy") != REFERENCE).select(_KEYS).n_unique()
    return ["all configurations"] if len(off) == every > 1 else _named(runs, off)


def parity_never(runs: Runs) -> list[str]:
    """The configurations without a parity check, since one device does not do the same."""
    return _named(runs, _without_check(runs)[1])


@once
def _without_check(runs: Runs) -> tuple[dict[_Key, str], dict[_Key, str]]:
    """The configurations without a parity check: as it was switched off, and as one device does not do the same."""
    is_asked = (pl.col("strategy") != REFERENCE) & ~IS_PROGRAM
    unchecked = counted(runs).filter(is_asked & pl.col("parity_passed").is_null())
    rows = unchecked.select(*_KEYS, "config_json").rows()
    off = {(group, name): "" for group, name, config in rows if not json.loads(config)["measure"]["parity"]}
    return off, {(group, name): "" for group, name, _ in rows if (group, name) not in off}


def _recorded(runs: Runs) -> list[str]:
    """The warnings that runs recorded themselves."""
    rows = facts(runs).drop_nulls("warnings").filter(pl.col("warnings") != "")
    return [
        f"{text.listed(_named(runs, dict.fromkeys(members.select(_KEYS).rows(), '')), most=8)}: {warning} "
        f"({count_of(members.height, 'run')}: {folders_of(runs, members['run_id'])})."
        for (warning,), members in rows.group_by("warnings", maintain_order=True)
    ]


def environment_warnings(runs: Runs) -> list[str]:
    """Warnings about other jobs, runs that were not interleaved, and different environments, one line each."""
    return [*_shared(runs), *limited(runs, tuple(Caveat)), *_environments(runs)]


def _shared(runs: Runs) -> list[str]:
    """Whether other jobs ran beside the measured ones."""
    environments = environments_of(runs)
    shared = [run_id for run_id in counted(runs)["run_id"] if environments[run_id].get("allocation") == "shared"]
    if not shared:
        return []
    return [
        f"{count_of(len(shared), 'run')} shared nodes with other Slurm jobs, whose load on "
        "memory, network and clocks is in the times. Interleaved repeats spread it over all configurations. Runs on "
        "whole nodes avoid it."
    ]


def _environments(runs: Runs) -> list[str]:
    entries, told = environment(runs), reported_differences(runs)
    lines = [
        f"Not all counted runs have the same {key}: {text.listed(sorted(values))}."
        for key, values in entries.items()
        if len(values) > 1 and not is_volatile(key) and key not in told
    ]
    if "true" in entries.get("git.dirty", []):
        lines.append("Some runs were measured with uncommitted changes: the commit alone does not reproduce them.")
    return lines


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
