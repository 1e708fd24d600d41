"""What a report says of what each configuration takes: memory, energy, device-hours and money."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis import text
from analysis.comparison.baseline import ENERGY, baseline_in_words
from analysis.comparison.campaign import campaign
from analysis.comparison.issues import FLAGS, is_quotable
from analysis.comparison.notes import Code
from analysis.comparison.summary import facts, summary
from analysis.comparison.work import IS_PROGRAM, PROGRAM
from parallelbench.errors import count_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from analysis.comparison.campaign import Configuration
    from analysis.comparison.pairing import Pairing
    from analysis.comparison.ratio import Ratio
    from analysis.runs.reader import Runs


MOST_LISTED = 4
"""Configurations, and kinds of work, of which a cost is told each; of more works, the ends beside the baseline."""


SMALL_HEADROOM = 0.2
"""Share of the memory that is left, below which a reader is told."""


def memory(runs: Runs) -> list[str]:
    """What fits in memory and how close to the limit it was, then the peaks."""
    return [*_fits(runs), *_peaks(runs)]


def _fits(runs: Runs) -> list[str]:
    """On how many devices each strategy fits in memory, and how full it was at most, those that ran out of it first.

    Of a work in which any run was out of memory all its strategies are told, as the others say what fits; of any other
    work those that left less than `SMALL_HEADROOM`. Without either, all is one sentence. Devices are those of runs that
    count: nothing is said of others between or beyond.
    """
    rows = summary(runs).with_columns(
        failed=(pl.col("oom_runs") > 0).any().over("group"),
        left=pl.col("memory_headroom").filter(pl.col("repeats") > 0).min().over("group", "variant", "nodes"),
        lost=(pl.col("oom_runs") > 0).any().over("group", "variant", "nodes"),
    )
    told = rows.filter(pl.col("failed") | (pl.col("left") < SMALL_HEADROOM))
    fullest = _fullest(rows.filter("fits").to_dicts(), named=True)
    if told.is_empty():
        return [f"Everything fits{fullest or _UNKNOWN_LIMIT}."] if rows["fits"].any() else []
    of_strategies = told.sort(~pl.col("lost"), "left", maintain_order=True, nulls_last=True).group_by(
        "group", "variant", "nodes", maintain_order=True
    )
    several = rows["group"].n_unique() > 1
    found: dict[str, list[str]] = defaultdict(list)
    for (group, variant, nodes), members in of_strategies:
        name = f"{variant} on {nodes} nodes" if int(str(nodes)) > 1 else str(variant)
        if words := _where_it_fits(members.sort("devices").to_dicts()):
            found[words].append(f"{name} ({group})" if several else name)
    lines = [
        f"{text.listed(names)} {words.replace('fits', 'fit', 1) if len(names) > 1 else words}"
        for words, names in found.items()
    ]
    return [f"{text.listed(lines, most=MOST_LISTED, sep='; ')}{'' if fullest else _UNKNOWN_LIMIT}."] if lines else []


_UNKNOWN_LIMIT = "; how close to the limit is not known: no run recorded one (a GPU's, a job's cgroup's or the node's)"


def _where_it_fits(rows: list[dict[str, Any]]) -> str:
    """Of one strategy, by devices; empty where nothing is known."""
    fitting, failing = ([row for row in rows if row["fits"] is known] for known in (True, False))
    if not (fitting or failing):
        return ""
    if not fitting and not any(row["repeats"] for row in failing):
        failed = sum(row["oom_runs"] for row in failing)
        tried = count_of(failing[-1]["devices"], "device")
        where = f"fits nowhere, on {tried} at most" if len(failing) > 1 else f"does not fit on {tried}"
        return f"{where} (out of memory in {failed} of {count_of(failed, 'run')})"
    on = text.listed([str(row["devices"]) for row in fitting], most=len(fitting))
    lost = [f"{row['devices']} ({row['oom_runs']} of {row['oom_runs'] + row['repeats']} runs)" for row in failing]
    out_of = f"is out of memory on {text.listed(lost, most=len(lost))}"
    if not fitting:
        return out_of
    not_on = f", but {out_of}" if lost else ""
    return f"fits on {on} device{'' if on == '1' else 's'}{not_on}{_fullest(fitting)}"


_LIMITED_BY = {"device": "the device's memory", "node": "the node's memory", "cgroup": "the cgroup's limit"}


def _fullest(fitting: list[dict[str, Any]], *, named: bool = False) -> str:
    """The most of its memory that any of these took, with its name if that is wanted; empty where nothing is known."""
    # Pages that ranks of a host share count several times: below 0 nothing is known.
    known = [row for row in fitting if row["memory_headroom"] is not None and row["memory_headroom"] >= 0]
    if not known:
        return ""
    least = min(known, key=lambda row: row["memory_headroom"])
    whole = f"{text.number(least['memory_limit_bytes'] / 2**30)} GiB"
    by = _LIMITED_BY.get(least["memory_limit_by"], "its limit")
    which = f"with {least['configuration']}" if named else f"on {least['devices']}"
    return f"; at most {text.percent(1 - least['memory_headroom'])} of {whole}, {which} ({by})"


def _peaks(runs: Runs) -> list[str]:
    """The peak of each configuration's largest device, or process, and of all its processes together."""
    peak = pl.coalesce("peak_memory_device_bytes", "peak_memory_max_bytes")
    rows = summary(runs).with_columns(took=peak).drop_nulls("took")
    kinds = {"device": "device", "host": "process"}
    largest = " or ".join(sorted({kinds[kind] for kind in rows["memory_kind"].drop_nulls()}))
    what = f"Peak memory of the largest {largest}"
    if told := _of_works(rows, "took", f"{what}{{of work}}: {{each}}", _peak):
        return told

    def beside_baseline(some: pl.DataFrame) -> str:
        together = _least_and_most(_ratios(runs, some, _ratio_of_sums))
        over_all = f"{together} over all processes" if together else ""
        return " and ".join(filter(None, (_ends(runs, some, _ratio_of_peaks), over_all)))

    told_beside = _within_works(rows, beside_baseline)
    return [f"{what}, beside {baseline_in_words(runs)}: {told_beside}."] if told_beside else []


def _within_works(rows: pl.DataFrame, ends: Callable[[pl.DataFrame], str]) -> str:
    """What is told of these rows of `summary`, of each work alone: what unlike works take is not to be ranked."""
    told = {str(group): ends(some) for (group,), some in rows.group_by("group", maintain_order=True)}
    named = [f"{words} ({group})" if len(told) > 1 else words for group, words in told.items() if words]
    return text.listed(named, most=MOST_LISTED, sep="; ")


def _least_and_most(ratios: list[tuple[float, Configuration]]) -> str:
    ends = dict.fromkeys(f"{value:.2f}" for value, _ in (*ratios[:1], *ratios[-1:]))
    return f"{' to '.join(ends)} times" if ends else ""


def _ratio_of_sums(pairing: Pairing) -> Ratio | None:
    return pairing.ratio("peak_memory_sum_bytes")


def _peak(row: dict[str, Any]) -> str:
    one, every = (f"{text.mebibytes(row[name])} MiB" for name in ("took", "peak_memory_sum_bytes"))
    return one if one == every else f"{one} ({every} over all processes)"


def _ratio_of_peaks(pairing: Pairing) -> Ratio | None:
    return pairing.ratio("peak_memory_device_bytes") or pairing.ratio("peak_memory_max_bytes")


def energy(runs: Runs) -> list[str]:
    """Energy of the GPUs per sample, of each configuration that has one to quote; without such, that of processors, or
    why none is known.
    """
    quiet = pl.col("steady_disturbed").fill_null(value=False).not_()
    rows = summary(runs).filter(is_quotable(), quiet).drop_nulls(ENERGY)
    told = _of_works(rows, ENERGY, "J per sample{of work}, of the GPUs: {each}", lambda row: text.number(row[ENERGY]))
    told = told or _energy_beside(runs, rows)
    of_gpus = summary(runs).filter(memory_kind="device")
    left = of_gpus.filter(~is_quotable()).drop_nulls(ENERGY).height
    if told:
        more = f"{count_of(left, 'configuration')} left out, whose readings are flagged (see the warnings)."
        return [*told, *([more] if left else [])]
    if of_gpus.is_empty():
        return _energy_of_processors(runs)
    if rows.height:
        return []
    flags = sorted({flag for found in of_gpus["energy_flags"].drop_nulls() for flag in found.split()} & FLAGS.keys())
    why = (
        text.listed([f"{FLAGS[flag]} ({flag})" for flag in flags])
        if flags
        else _off(runs) or "the GPUs' counters could not be read"
    )
    return [f"None to quote: {why}."]


def _energy_beside(runs: Runs, rows: pl.DataFrame) -> list[str]:
    """Of many kinds of work, the ends of the ratios to the baseline."""
    ends = _within_works(rows, lambda some: _ends(runs, some, _ratio_of_energies))
    return [f"Of the GPUs for a sample, beside {baseline_in_words(runs)}: {ends}."] if ends else []


def _energy_of_processors(runs: Runs) -> list[str]:
    name = "cpu_energy_per_epoch_j"
    rows = summary(runs).filter(pl.col("repeats") > 0)
    what = "J per epoch{of work}, of the nodes' whole processors, other programs included: {each}"
    told = _of_works(rows.drop_nulls(name), name, what, lambda row: text.number(row[name]))
    if told or rows.is_empty():
        return told
    counters = f"the counters of these processors (RAPL) could not be read (as root, `{_LET_READ}` allows it to all)"
    return [f"Not measured: {_off(runs) or counters}."]


_LET_READ = "chmod a+r /sys/class/powercap/*/energy_uj"


def _off(runs: Runs) -> str:
    """That nothing was sampled, and how to; empty where it was to be."""
    rates = facts(runs).filter("displayed")["config_json"].str.json_path_match("$.measure.telemetry_hz")
    is_off = set(rates.cast(pl.Float64, strict=False)) == {0.0}
    return "telemetry was off (measure.telemetry_hz=10 turns it on)" if is_off else ""


def cost(runs: Runs) -> list[str]:
    """Device-hours of the training, or up to the accuracy that was chosen, with those of one later epoch (of a program
    1,000 later steps) and the price where the site has one; what is not known, and why.

    Configurations are ranked within their work; those of which others disturbed an epoch are left out.
    """
    is_chosen = runs.target is not None
    hours, money = ("device_hours_to_accuracy", "cost_to_accuracy") if is_chosen else ("device_hours", "cost")
    quiet = pl.col("whole_disturbed").fill_null(value=False).not_()
    rows = summary(runs).filter(quiet, pl.col("repeats") > 0)
    known = rows.drop_nulls(hours)
    if known.is_empty():
        why = "not every run reaches the accuracy" if is_chosen else "no run that counts trained to its end in one go"
        return [f"Device-hours are not known: {why}."] if rows.height else []
    of_programs = (known["strategy"] == PROGRAM).all()
    per, time_s = (
        ("1,000 later steps", "steady_step_time_s") if of_programs else ("a later epoch", "steady_epoch_time_s")
    )
    times = 1000 if of_programs else 1

    def each(row: dict[str, Any]) -> str:
        one_h = None if row[time_s] is None else row["devices"] * times * row[time_s] / 3600
        more = [] if one_h is None else [f"{per}: {text.number(one_h)}"]
        more += [] if row[money] is None else [f"price: {text.number(row[money])}"]
        return text.number(row[hours]) + (f" ({'; '.join(more)})" if more else "")

    how_long = f"to {text.accuracy(runs.target)} test accuracy" if is_chosen else f"for {length(runs)}"
    told = _of_works(known, hours, f"Device-hours of training {how_long}{{of work}}, start-up aside: {{each}}", each)
    told = told or [f"Device-hours of {known['group'].n_unique()} kinds of work: below, with the energy."]
    return (
        told
        if known[money].count()
        else [*told, "In money: not known, as the site names no price (site.price_per_device_hour)."]
    )


def length(runs: Runs) -> str:
    """How long the runs trained, start-up aside."""
    rows = facts(runs).filter("displayed")
    if rows.select(IS_PROGRAM.all()).item():
        lengths = runs.epochs.join(rows.select("run_id"), on="run_id", how="semi").group_by("run_id")
        found, unit = lengths.agg(pl.col("steps").sum())["steps"].unique().to_list(), "step"
    else:
        found, unit = rows["epochs"].unique().to_list(), "epoch"
    return count_of(int(found[0]), unit) if len(found) == 1 else "the whole training"


def _of_works(rows: pl.DataFrame, column: str, words: str, each: Callable[[dict[str, Any]], str]) -> list[str]:
    """A sentence for each of few kinds of work: what each of few configurations took, the least first; of more, the
    least, the most and the fastest configuration's. Those that took the same are told together.
    """
    groups = list(rows.group_by("group", maintain_order=True))
    if len(groups) > MOST_LISTED:
        return []
    lines = []
    for (group,), members in groups:
        took: dict[str, list[str]] = defaultdict(list)
        for row in members.sort(column, maintain_order=True).to_dicts():
            took[each(row)].append(row["configuration"])
        told = [f"{value} with {_all_or_some(names, members.height)}" for value, names in took.items()]
        if len(told) > (2 if len(groups) > 1 else MOST_LISTED):
            fastest = members.sort(*_BY_SPEED, descending=(True, False), nulls_last=True, maintain_order=True)
            row = fastest.row(0, named=True)
            at = list(took).index(each(row))
            name = row["configuration"]
            between = f"; the fastest, {name}: {each(row)}" if 0 < at < len(told) - 1 else ""
            shown = f"{told[0]} to {told[-1]}{between}"
        else:
            shown = text.listed(told, most=MOST_LISTED)
        work = f" of {group}" if len(groups) > 1 else ""
        lines.append(f"{words.format_map({'of work': work, 'each': shown})}.")
    return lines


_BY_SPEED = ("throughput_samples_per_s", "steady_step_time_s")


def _all_or_some(names: list[str], whole: int) -> str:
    return "all" if len(names) == whole > 1 else text.listed(names, most=MOST_LISTED)


def _ratio_of_energies(pairing: Pairing) -> Ratio | None:
    """None where the energies of either side are flagged."""
    flagged = any(note.code is Code.ENERGY for note in pairing.caveats(metric=ENERGY))
    return None if flagged else pairing.ratio(ENERGY)


def _ends(runs: Runs, rows: pl.DataFrame, ratio: Callable[[Pairing], Ratio | None]) -> str:
    """The least and the most of the paired ratios to the baseline in one work, with their configurations."""
    found = _ratios(runs, rows, ratio)
    named = {f"{value:.2f}": each.name for value, each in (*found[:1], *found[-1:])}
    if len(named) == 1 < len(found):
        named = dict.fromkeys(named, "all")
    return " to ".join(f"{times} times with {name}" for times, name in named.items())


def _ratios(
    runs: Runs, rows: pl.DataFrame, ratio: Callable[[Pairing], Ratio | None]
) -> list[tuple[float, Configuration]]:
    """The paired ratios to the baseline, in ascending order."""
    places = set(rows["configuration_place"])
    pairs = [(each, pairing) for each, pairing in campaign(runs).others if each.place in places]
    known = [(taken.median, each) for each, pairing in pairs if (taken := ratio(pairing))]
    return sorted(known, key=lambda pair: (pair[0], pair[1].place))
