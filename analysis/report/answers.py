"""The answers of a report in sentences, the first that a reader sees: speed-ups over one device, what to do next."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis import text
from analysis.comparison.baseline import not_told_apart, refused
from analysis.comparison.configurations import facts, summary
from analysis.comparison.exclusions import Exclusion, disturbed_lines
from analysis.comparison.ratio import MOST_FURTHER
from analysis.comparison.verdict import SpeedVerdict
from analysis.comparison.work import BASELINES
from analysis.report.claims import judged
from analysis.report.warnings import few_repeats
from parallelbench.errors import count_of

if TYPE_CHECKING:
    from analysis.runs.reader import Runs


def headline(runs: Runs, *, most: int = 4) -> list[str]:
    """The answers, then the configurations that are not compared, runs that others disturbed, and what to do next."""
    not_compared, disturbed = refused(runs)[:most], disturbed_lines(runs, advise=False)
    found = [] if _compared(runs).is_empty() and (not_compared or disturbed) else answers(runs, most=most)
    return [*found, *not_compared, *disturbed, *_next(runs)]


_AT_RANDOM = (Exclusion.ERROR, Exclusion.DISTURBED)
"""What may not happen again, and is tried again only where `--retry` names it."""


def _next(runs: Runs) -> list[str]:
    """One line for all advice to measure more: the most repeats that any names, what is open without them, and what to
    try again.
    """
    undecided = summary(runs)["repeats_to_decide"].drop_nulls()
    open_claims = [each for each in judged(runs) if each.cases and _repeats_named(each.why)]
    named = [*few_repeats(runs), *(judgement.why for judgement in open_claims)]
    repeats = max([*undecided, *(number for line in named for number in _repeats_named(line))], default=None)
    gone = set(facts(runs)["exclusion"])
    retried = [each.value for each in _AT_RANDOM if each.value in gone]
    options = [f"sweep.repeats={repeats}"] * (repeats is not None) + [f"--retry {','.join(retried)}"] * bool(retried)
    when = "when the machine is free, " if Exclusion.DISTURBED.value in retried else ""
    what = "sweep" if runs.run["sweep"].n_unique() == 1 else "sweeps"
    comparisons = count_of(len(undecided), "comparison with one device", "comparisons with one device")
    left = [comparisons] * (not undecided.is_empty()) + [count_of(len(open_claims), "claim")] * bool(open_claims)
    why = f" That may decide {text.listed(left)}." if left else ""
    return [f"Next: {when}submit the {what} again with `{' '.join(options)}`.{why}"] if options else []


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
        shown = [_counted(compared), f"{best}: {fastest}{_ties(runs, ordered)}", f"Smallest speed-up: {slowest}"]
    else:
        fastest, *others = (_gain(row, named=several) for row in rows)
        shown = [f"{fastest}{_ties(runs, ordered)}", *others, *([f"{more} more are in the table."] if more else [])]
    return [*_one_device_is_fastest(compared, uncompared=_uncompared(runs)), *shown]


def _ties(runs: Runs, ordered: pl.DataFrame) -> str:
    """What did the same work, and is not shown to be slower than the first."""
    alike = ordered.filter(pl.col(key) == pl.col(key).first() for key in ("group", "framework"))
    fastest, *others = alike["configuration"]
    tied = not_told_apart(runs, alike["group"][0], fastest, others)
    return f" Not told apart from it: {text.listed(tied)}." if tied else ""


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


def _counted(compared: pl.DataFrame) -> str:
    """How many configurations have which verdict beside one device."""
    counts = Counter(compared["verdict"])
    words = [f"{counts[verdict]} {verdict.value}" for verdict in SpeedVerdict if counts[verdict]]
    works = count_of(compared["group"].n_unique(), "kind of work", "kinds of work")
    return f"Beside one device, over {works} and {count_of(compared.height, 'configuration')}: {', '.join(words)}."


def _compared(runs: Runs) -> pl.DataFrame:
    """The rows of `summary` that have a speed-up over other runs, each with its `framework`."""
    rows = summary(runs).filter(pl.col("speed_up").is_not_null(), pl.col("verdict") != SpeedVerdict.BASELINE.value)
    keys = ("group", "configuration")
    of_framework = facts(runs).select(*keys, pl.col("framework").fill_null("torch")).unique(keys)
    return rows.join(of_framework, on=keys, maintain_order="left")


def _gain(row: dict[str, Any], *, named: bool) -> str:
    what = f"{row['configuration']} ({row['group']})" if named else row["configuration"]
    does = f"{what} {'trains an epoch' if row['scaling'] == 'strong' else 'trains'}"
    times = text.estimate(row["speed_up"], row["speed_up_low"], row["speed_up_high"])
    one_device = "one device" if row["framework"] == "torch" else f"{BASELINES[row['framework']]} × 1"
    speed, pairs = f"{times} times as fast as {one_device}", count_of(row["speed_up_pairs"], "repeat")
    rest = f"{text.percent(row['efficiency'])} of theoretical scaling" if row["devices"] > 1 else pairs
    if row["devices"] > 1 and row["efficiency_with_startup"] is not None:
        rest += f", {text.percent(row['efficiency_with_startup'])} including start-up"
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
