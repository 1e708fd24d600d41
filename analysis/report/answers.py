"""The answers of a report in sentences, the first that a reader sees: speed-ups over one device, what to do next."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis import text
from analysis.comparison.baseline import ENERGY, against_one_device, beside_fastest, refused
from analysis.comparison.configurations import facts, summary
from analysis.comparison.exclusions import Exclusion, disturbed_lines
from analysis.comparison.issues import PROBE_TOLERANCE, Caveat
from analysis.comparison.ratio import FEWEST_REPEATS, MOST_FURTHER
from analysis.comparison.verdict import SpeedVerdict
from analysis.comparison.work import BASELINES, IS_BASELINE
from analysis.report.claims import judged
from analysis.report.warnings import few_repeats, parity_off
from analysis.runs.reader import once
from parallelbench.errors import count_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from analysis.comparison.baseline import Configuration
    from analysis.comparison.pairing import Pairing
    from analysis.comparison.ratio import Ratio
    from analysis.runs.reader import Runs


def headline(runs: Runs, *, most: int = 4) -> list[str]:
    """The answers, then what they took of memory and energy, whether they were checked against one device, what is not
    compared, runs that others disturbed, and what to do next.
    """
    not_compared, disturbed = refused(runs, brief=True)[:most], disturbed_lines(runs, advise=False)
    found = [] if _compared(runs).is_empty() and (not_compared or disturbed) else answers(runs, most=most)
    return [*found, *_memory(runs), *_energy(runs), *_unchecked(runs), *not_compared, *disturbed, *_next(runs)]


def _unchecked(runs: Runs) -> list[str]:
    """Which configurations nobody checked against one device, as that was switched off."""
    names = parity_off(runs)
    return [f"Parity with one device was not checked (measure.parity=false): {text.listed(names)}."] if names else []


_MOST_LISTED = 4
"""Configurations of which a cost is told of each; of more, the least and the most beside one device."""


def _memory(runs: Runs) -> list[str]:
    """The peak of each configuration's largest device, or process, and of all its processes together."""
    peak = pl.coalesce("peak_memory_device_bytes", "peak_memory_max_bytes")
    rows = summary(runs).with_columns(took=peak).drop_nulls("took")
    kinds = {"device": "device", "host": "process"}
    largest = " or ".join(sorted({kinds[kind] for kind in rows["memory_kind"].drop_nulls()}))
    ends = _ends(runs, rows, _ratio_of_peaks)
    whole = _ratios(runs, rows, lambda pairing: pairing.ratio("peak_memory_sum_bytes"))
    least_and_most = dict.fromkeys(f"{value:.2f}" for value, _ in (*whole[:1], *whole[-1:]))
    together = f"; of all processes together: {' to '.join(least_and_most)} times" if whole else ""
    return _told(f"Peak memory of the largest {largest}", [_peaks(row) for row in _few(rows)], f"{ends}{together}")


def _peaks(row: dict[str, Any]) -> str:
    one, every = (f"{text.mebibytes(row[name])} MiB" for name in ("took", "peak_memory_sum_bytes"))
    return f"{one} with {row['configuration']}" + (f" ({every} over all its processes)" if one != every else "")


def _ratio_of_peaks(pairing: Pairing) -> Ratio | None:
    return pairing.ratio("peak_memory_device_bytes") or pairing.ratio("peak_memory_max_bytes")


def _energy(runs: Runs) -> list[str]:
    """Energy of the GPUs per sample, of each configuration that has one to quote."""
    short = pl.col("energy_flags").fill_null("").str.contains("short")
    rows = summary(runs).filter(~short).drop_nulls(ENERGY)
    each = [f"{text.number(row[ENERGY])} J with {row['configuration']}" for row in _few(rows)]
    return _told("Energy of the GPUs for a sample", each, _ends(runs, rows, lambda pairing: pairing.ratio(ENERGY)))


def _told(what: str, each: list[str], ends: str) -> list[str]:
    """A cost of each configuration, or the ends of its ratios to one device's; nothing where there is neither."""
    if each:
        return [f"{what}: {text.listed(each, most=_MOST_LISTED)}."]
    return [f"{what}, beside one device: {ends}."] if ends else []


def _few(rows: pl.DataFrame) -> list[dict[str, Any]]:
    """The rows, where they are so few that something is told of each; else none."""
    return rows.to_dicts() if rows.height <= _MOST_LISTED and rows["group"].n_unique() == 1 else []


def _ends(runs: Runs, rows: pl.DataFrame, ratio: Callable[[Pairing], Ratio | None]) -> str:
    """The least and the most of the paired ratios to one device, with their configurations."""
    found, several = _ratios(runs, rows, ratio), rows["group"].n_unique() > 1
    ends = (*found[:1], *found[-1:])
    named = {f"{value:.2f}": f"{name} ({group})" if several else name for value, (group, name) in ends}
    if len(named) == 1 < len(found):
        named = dict.fromkeys(named, "all")
    return " to ".join(f"{times} times with {name}" for times, name in named.items())


def _ratios(
    runs: Runs, rows: pl.DataFrame, ratio: Callable[[Pairing], Ratio | None]
) -> list[tuple[float, Configuration]]:
    """The paired ratios to one device, in ascending order."""
    pairings = against_one_device(runs)
    keys = rows.filter(~IS_BASELINE).select("group", "configuration").rows()
    return sorted((taken.median, key) for key in keys if key in pairings and (taken := ratio(pairings[key])))


_AT_RANDOM = (Exclusion.ERROR, Exclusion.DISTURBED)
"""What may not happen again, and is tried again only where `--retry` names it."""


def _next(runs: Runs) -> list[str]:
    """One line for all advice to measure more: the most repeats that any names, what is open without them, and what to
    try again.
    """
    rows = summary(runs)
    open_claims = [each for each in judged(runs) if each.cases and _repeats_named(each.why)]
    named = [*few_repeats(runs), *(judgement.why for judgement in open_claims)]
    wanted = rows["repeats_to_decide"].drop_nulls()
    repeats = max([*wanted, *(number for line in named for number in _repeats_named(line))], default=None)
    gone = set(facts(runs)["exclusion"])
    retried = [each.value for each in _AT_RANDOM if each.value in gone]
    options = [f"sweep.repeats={repeats}"] * (repeats is not None) + [f"--retry {','.join(retried)}"] * bool(retried)
    when = "when the machine is free, " if Exclusion.DISTURBED.value in retried else ""
    what = "sweep" if runs.run["sweep"].n_unique() == 1 else "sweeps"
    undecided = rows.filter(_may_be_decided(repeats or 0)).height
    comparisons = count_of(undecided, "comparison with one device", "comparisons with one device")
    left = comparisons if undecided else count_of(len(open_claims), "claim") if open_claims else ""
    why = f" That may decide {left}." if left else ""
    return [f"Next: {when}submit the {what} again with `{' '.join(options)}`.{why}"] if options else []


def _may_be_decided(repeats: int) -> pl.Expr:
    """Of rows of `summary`, whether they lack a verdict that so many repeats may give. What was measured apart has one
    once enough repeats are measured in turn.
    """
    few = pl.col("verdict") == SpeedVerdict.TOO_FEW.value
    apart = pl.col("verdict") == SpeedVerdict.NOT_INTERLEAVED.value
    in_turn = apart & (pl.col("speed_up_pairs") + FEWEST_REPEATS <= repeats)
    return pl.col("repeats_to_decide").is_not_null() | few | in_turn


def _repeats_named(line: str) -> list[int]:
    return [int(found) for found in re.findall(r"sweep\.repeats=(\d+)", line)]


def answers(runs: Runs, *, most: int = 4) -> list[str]:
    """The speed-ups over one device in sentences, the largest first."""
    compared = _compared(runs)
    if compared.is_empty():
        return ["No configuration can be compared with one device: see the warnings."]
    several = compared["group"].n_unique() > 1
    ordered = compared.sort("speed_up", descending=True)
    # Of several groups of like work, the fastest of each; of a single one, all.
    rows = (ordered.unique("group", keep="first", maintain_order=True) if several else ordered).to_dicts()[:most]
    more = compared.height - len(rows)
    if several and more:
        fastest, *_, slowest = (_gain(row, named=True) for row in ordered.to_dicts())
        best = "Largest speed-up" if ordered["speed_up"][0] > 1 else "Nearest to one device"
        shown = [_counted(runs, compared), f"{best}: {fastest}{_ties(runs, ordered)}", f"Smallest speed-up: {slowest}"]
    else:
        fastest, *others = (_gain(row, named=several) for row in rows)
        shown = [f"{fastest}{_ties(runs, ordered)}", *others, *([f"{more} more are in the table."] if more else [])]
    return [*_one_device_is_fastest(compared, uncompared=_uncompared(runs)), *shown]


def _ties(runs: Runs, ordered: pl.DataFrame) -> str:
    """What did the same work, and is not shown to be slower than the first; and of what too few repeats can't tell."""
    alike = ordered.filter(pl.col(key) == pl.col(key).first() for key in ("group", "framework"))
    fastest, *others = alike["configuration"]
    verdicts = beside_fastest(runs, alike["group"][0], fastest, others)
    few = [name for name, verdict in verdicts.items() if verdict in (SpeedVerdict.TOO_FEW, SpeedVerdict.NO_PAIR)]
    tied = [name for name, verdict in verdicts.items() if verdict is not SpeedVerdict.SLOWER and name not in few]
    told = f" Not told apart from it: {text.listed(tied)}." if tied else ""
    rest = "the others" if len(few) == len(others) > 1 else text.listed(few)
    return f"{told} Too few repeats to tell it from {rest}." if few else told


def _uncompared(runs: Runs) -> bool:
    """Whether a configuration that trained can't be compared with one device."""
    rows = summary(runs).filter(pl.col("speed_up").is_null(), pl.col("steady_epoch_time_s").is_not_null())
    return not rows.filter(pl.col("verdict").ne_missing(SpeedVerdict.BASELINE.value)).is_empty()


def _one_device_is_fastest(compared: pl.DataFrame, *, uncompared: bool) -> list[str]:
    """Whether all of several configurations are slower than one device, or seem to be with too few repeats."""
    verdicts = compared.group_by("group").agg(pl.col("verdict").unique())["verdict"].to_list()
    rest = set().union(*verdicts) - {SpeedVerdict.SLOWER}
    if compared.height < 2 or not rest <= {SpeedVerdict.TOO_FEW} or (compared["speed_up"] >= 1).any():
        return []
    where = f" in all {len(verdicts)} kinds of work" if len(verdicts) > 1 else ""
    of_those = ", of what can be compared with it," if uncompared else ""
    if not all(SpeedVerdict.SLOWER in found for found in verdicts):
        return [f"So far{of_those} one device is fastest{where}, with too few repeats to be sure."]
    first = "Of what can be compared with it, one" if uncompared else "One"
    return [f"{first} device is fastest{where}{', as far as there are enough repeats' if rest else ''}."]


def _counted(runs: Runs, compared: pl.DataFrame) -> str:
    """How many configurations there are, and how many of them have which verdict beside one device."""
    counts = Counter(compared["verdict"])
    words = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in SpeedVerdict if counts[verdict])
    every = summary(runs)
    ones = every.filter(IS_BASELINE).height
    rest = every.height - ones - compared.height
    parts = [f"{ones} of one device"] * bool(ones) + [f"{compared.height} compared with it ({words})"]
    parts += [f"{rest} not compared"] * bool(rest)
    works = count_of(every["group"].n_unique(), "kind of work", "kinds of work")
    drifted = int(compared["drifted"].sum())
    changed = f" {_DRIFTED} {drifted} of those compared were measured." if drifted else ""
    return f"{count_of(every.height, 'configuration')} in {works}: {', '.join(parts)}.{changed}"


_DRIFTED = f"The machine's own speed changed by more than {100 * PROBE_TOLERANCE:.0f} % while"


def _compared(runs: Runs) -> pl.DataFrame:
    """The rows of `summary` that have a speed-up over other runs, each with its `framework`, and whether the machine
    `drifted` while they were measured.
    """
    rows = summary(runs).filter(pl.col("speed_up").is_not_null(), pl.col("verdict") != SpeedVerdict.BASELINE.value)
    keys = ("group", "configuration")
    of_framework = facts(runs).select(*keys, pl.col("framework").fill_null("torch")).unique(keys)
    return rows.join(of_framework, on=keys, maintain_order="left").with_columns(
        drifted=pl.Series([key in _drifted(runs) for key in rows.select(keys).rows()], dtype=pl.Boolean)
    )


@once
def _drifted(runs: Runs) -> set[Configuration]:
    """The configurations that are compared with one device by runs during which a machine changed its speed."""
    return {
        key
        for key, pairing in against_one_device(runs).items()
        if any(caveat.kind is Caveat.DRIFT for caveat in pairing.caveats(per_sample=True))
    }


def _gain(row: dict[str, Any], *, named: bool) -> str:
    return f"{_gained(row, named=named)}{f' {_DRIFTED} this was measured.' if row['drifted'] else ''}"


def _gained(row: dict[str, Any], *, named: bool) -> str:
    what = f"{row['configuration']} ({row['group']})" if named else row["configuration"]
    does = f"{what} {'trains an epoch' if row['scaling'] == 'strong' else 'trains'}"
    times = text.estimate(row["speed_up"], row["speed_up_low"], row["speed_up_high"])
    one_device = "one device" if row["framework"] == "torch" else f"{BASELINES[row['framework']]} × 1"
    speed, pairs = f"{times} times as fast as {one_device}", count_of(row["speed_up_pairs"], "repeat")
    rest = f"{text.percent(row['efficiency'])} of theoretical scaling" if row["devices"] > 1 else pairs
    if row["devices"] > 1 and row["efficiency_with_startup"] is not None:
        whole = row["devices"] * row["efficiency_with_startup"]
        rest += f"; whole runs of this length, start-up included, {text.fixed(whole, 2)} times as fast"
    if row["devices"] > 1 and max(row["efficiency"], row["efficiency_with_startup"] or 0) > 1 + 1e-9:
        rest += " (more than the ideal: by chance, by an error, or one device alone lacks cache or memory)"
    if row["verdict"] == SpeedVerdict.NOT_INTERLEAVED:
        return f"{does} {speed} ({pairs}, but measured apart from it: no interval): {rest}."
    if row["verdict"] == SpeedVerdict.TOO_FEW:
        return f"{does} {speed} in {pairs}, too few for an interval: {rest}."
    told = f"{speed} ({text.interval_of_95(row['speed_up_low'], row['speed_up_high'])}, {pairs})"
    if row["verdict"] == SpeedVerdict.NO_DIFFERENCE:
        return f"{what}: {row['verdict']}: {told}; {_would_decide(row['repeats_to_decide'])}."
    return (
        f"{what}: {row['verdict']}: {told}: {rest}."
        if row["verdict"] == SpeedVerdict.EQUAL
        else f"{does} {told}: {rest}."
    )


def _would_decide(repeats: int | None) -> str:
    """How many repeats would decide, if the ratio and what it varies by stay as they are."""
    if repeats is None:
        return f"more than {MOST_FURTHER} further repeats would be needed to decide"
    return f"if it stays so, {count_of(repeats, 'repeat')} would decide (sweep.repeats={repeats})"
