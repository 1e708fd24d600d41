"""The answers of a report in sentences, the first that a reader sees: speed-ups over one device, what to do next."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from analysis import text
from analysis.comparison.baseline import (
    ENERGY,
    ONE_DEVICE_IN_WORDS,
    baseline_in_words,
    beside_fastest,
    in_words,
    refusals,
    stand_ins,
)
from analysis.comparison.campaign import campaign
from analysis.comparison.exclusions import Exclusion, disturbed_lines, disturbed_runs
from analysis.comparison.issues import FLAGS, PROBE_TOLERANCE, is_quotable
from analysis.comparison.notes import Code, Note, Remedy, named, remedy_of, write
from analysis.comparison.pairing import MEMORY
from analysis.comparison.ratio import DECIDING_REPEATS
from analysis.comparison.summary import facts, summary
from analysis.comparison.verdict import SpeedVerdict
from analysis.comparison.work import IS_ONE_DEVICE, IS_PROGRAM, configurations
from analysis.report.claims import judged
from analysis.report.programs import of_programs
from analysis.report.warnings import few_repeats, parity_of
from analysis.runs.reader import once
from parallelbench.config.build import COMPONENTS
from parallelbench.config.sites import shipped
from parallelbench.errors import count_of
from parallelbench.results.folder import ASKED

if TYPE_CHECKING:
    from collections.abc import Callable

    from analysis.comparison.campaign import Configuration
    from analysis.comparison.pairing import Pairing
    from analysis.comparison.ratio import Ratio
    from analysis.runs.reader import Runs


def headline(runs: Runs) -> list[str]:
    """What was found, what is not compared, runs that others disturbed, and what to do next."""
    not_compared, disturbed = write(refusals(runs), brief=True)[:_MOST_LISTED], disturbed_lines(runs, advise=False)
    is_silent = _compared(runs).is_empty() and bool(not_compared or disturbed)
    found = _beside(runs) if is_silent else findings(runs)
    return [*write(stand_ins(runs)), *found, *not_compared, *disturbed, *next_steps(runs)]


def findings(runs: Runs) -> list[str]:
    """The answers, then whether they were checked against one device, and what they took of memory and energy."""
    return [*answers(runs), *_beside(runs)]


def _beside(runs: Runs) -> list[str]:
    return [*of_programs(runs), *_parity(runs), *_fits(runs), *_memory(runs), *_energy(runs), *_hours(runs)]


def _parity(runs: Runs) -> list[str]:
    """In how many runs the check against one device passed, and which were not checked."""
    asked = facts(runs).filter(~IS_ONE_DEVICE & ~IS_PROGRAM)
    checked = asked.drop_nulls("parity_passed")
    passed, whole = int(checked["parity_passed"].sum()), checked.height
    told = [f"passed in {passed} of {count_of(whole, 'run')}"] * bool(whole)
    if passed < whole:
        names = checked.filter(~pl.col("parity_passed"))["configuration"].unique(maintain_order=True).to_list()
        told += [f"failed in {whole - passed}, which do not count ({text.listed(names)})"]
    if off := parity_of(runs, Code.PARITY_OFF):
        told.append(f"not checked (measure.parity=false): {named(off)}")
    if never := parity_of(runs, Code.PARITY_NEVER):
        told.append(f"not checked, as one device does not compute the same: {named(never)}")
    return [f"Parity with one device: {'; '.join(told)}."] if told else []


_MOST_LISTED = 4
"""Configurations of which the speed-up is told, and a cost of each; of more, the least and the most of all."""


SMALL_HEADROOM = 0.2
"""Share of the memory that is left, below which a reader is told."""


def _fits(runs: Runs) -> list[str]:
    """On how many devices each strategy fits in memory, and how full it was at most, those that ran out of it first.

    Of a work in which any run was out of memory all its strategies are told, as the others say what fits; of any other
    work those that left less than `SMALL_HEADROOM`. An unknown headroom alone is no reason. Devices are those of runs
    that count: nothing is said of others between or beyond.
    """
    rows = summary(runs).with_columns(
        failed=(pl.col("oom_runs") > 0).any().over("group"),
        left=pl.col("memory_headroom").filter(pl.col("repeats") > 0).min().over("group", "variant", "nodes"),
        lost=(pl.col("oom_runs") > 0).any().over("group", "variant", "nodes"),
    )
    told = rows.filter(pl.col("failed") | (pl.col("left") < SMALL_HEADROOM))
    of_strategies = told.sort(~pl.col("lost"), "left", maintain_order=True, nulls_last=True).group_by(
        "group", "variant", "nodes", maintain_order=True
    )
    several = rows["group"].n_unique() > 1
    lines = []
    for (group, variant, nodes), members in of_strategies:
        name = f"{variant} on {nodes} nodes" if int(str(nodes)) > 1 else str(variant)
        if words := _where_it_fits(members.sort("devices").to_dicts()):
            lines.append(f"{name}{f' ({group})' if several else ''} {words}")
    return [f"Memory: {text.listed(lines, most=_MOST_LISTED, sep='; ')}."] if lines else []


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


def _fullest(fitting: list[dict[str, Any]]) -> str:
    """The most of its memory that any of these took."""
    # Pages that ranks of a host share count several times: below 0 nothing is known.
    known = [row for row in fitting if row["memory_headroom"] is not None and row["memory_headroom"] >= 0]
    if not known:
        return "; how full it was is not known"
    least = min(known, key=lambda row: row["memory_headroom"])
    whole = f"{text.number(least['memory_limit_bytes'] / 2**30)} GiB"
    by = _LIMITED_BY.get(least["memory_limit_by"], "its limit")
    return f"; at most {text.percent(1 - least['memory_headroom'])} of {whole}, on {least['devices']} ({by})"


def _memory(runs: Runs) -> list[str]:
    """The peak of each configuration's largest device, or process, and of all its processes together."""
    peak = pl.coalesce("peak_memory_device_bytes", "peak_memory_max_bytes")
    rows = summary(runs).with_columns(took=peak).drop_nulls("took")
    kinds = {"device": "device", "host": "process"}
    largest = " or ".join(sorted({kinds[kind] for kind in rows["memory_kind"].drop_nulls()}))

    def beside_baseline(some: pl.DataFrame) -> str:
        together = _least_and_most(_ratios(runs, some, _ratio_of_sums))
        over_all = f"{together} over all processes" if together else ""
        return " and ".join(filter(None, (_ends(runs, some, _ratio_of_peaks), over_all)))

    each = [_peaks(row) for row in _few(rows)]
    return _told(runs, f"Peak memory of the largest {largest}", each, _within_works(rows, beside_baseline))


def _within_works(rows: pl.DataFrame, ends: Callable[[pl.DataFrame], str]) -> str:
    """What is told of these rows of `summary`, of each work alone: what unlike works take is not to be ranked."""
    told = {str(group): ends(some) for (group,), some in rows.group_by("group", maintain_order=True)}
    named = [f"{words} ({group})" if len(told) > 1 else words for group, words in told.items() if words]
    return text.listed(named, most=_MOST_LISTED, sep="; ")


def _least_and_most(ratios: list[tuple[float, Configuration]]) -> str:
    ends = dict.fromkeys(f"{value:.2f}" for value, _ in (*ratios[:1], *ratios[-1:]))
    return f"{' to '.join(ends)} times" if ends else ""


def _ratio_of_sums(pairing: Pairing) -> Ratio | None:
    return pairing.ratio("peak_memory_sum_bytes")


def _peaks(row: dict[str, Any]) -> str:
    one, every = (f"{text.mebibytes(row[name])} MiB" for name in ("took", "peak_memory_sum_bytes"))
    return f"{one} with {row['configuration']}" + (f" ({every} over all its processes)" if one != every else "")


def _ratio_of_peaks(pairing: Pairing) -> Ratio | None:
    return pairing.ratio("peak_memory_device_bytes") or pairing.ratio("peak_memory_max_bytes")


def _energy(runs: Runs) -> list[str]:
    """Energy of the GPUs per sample, of each configuration that has one to quote; on GPUs without such, why."""
    what, of_gpus = "Energy of the GPUs for a sample", summary(runs).filter(memory_kind="device")
    rows = summary(runs).filter(is_quotable()).drop_nulls(ENERGY)
    each = [f"{text.number(row[ENERGY])} J with {row['configuration']}" for row in _few(rows)]
    ends = _within_works(rows, lambda some: _ends(runs, some, _ratio_of_energies))
    if told := _told(runs, what, each, ends):
        left = of_gpus.filter(~is_quotable()).drop_nulls(ENERGY).height
        more = f" {count_of(left, 'configuration')} left out, whose readings are flagged (see the warnings)."
        return [f"{told[0]}{more}"] if left else told
    flags = sorted({flag for found in of_gpus["energy_flags"].drop_nulls() for flag in found.split()} & FLAGS.keys())
    why = text.listed([f"{FLAGS[flag]} ({flag})" for flag in flags]) if flags else "none was measured"
    return [f"{what}: none to quote: {why}."] if of_gpus.height and rows.is_empty() else []


def _hours(runs: Runs) -> list[str]:
    """Device-hours of a run's whole training, the least and the most, with their price where the site has one.

    Of one work only, as those of unlike works are not to be ranked; without runs of which others disturbed an epoch.
    """
    quiet = pl.col("whole_disturbed").fill_null(value=False).not_()
    rows = summary(runs).filter(quiet, pl.col("repeats") > 0).drop_nulls("device_hours").sort("device_hours")
    if rows["group"].n_unique() != 1:
        return []
    ends = [rows.row(0, named=True), *([rows.row(-1, named=True)] if rows.height > 1 else [])]
    told = []
    for row in ends:
        price = "" if row["cost"] is None else f" (cost {text.number(row['cost'])})"
        told.append(f"{text.number(row['device_hours'])} with {row['configuration']}{price}")
    return [f"Device-hours of a whole run's training: {' to '.join(told)}."]


def _ratio_of_energies(pairing: Pairing) -> Ratio | None:
    """None where the energies of either side are flagged."""
    flagged = any(note.code is Code.ENERGY for note in pairing.caveats(metric=ENERGY))
    return None if flagged else pairing.ratio(ENERGY)


def _told(runs: Runs, what: str, each: list[str], ends: str) -> list[str]:
    """A cost of each configuration, or the ends of its ratios to the baseline's; nothing where there is neither."""
    if each:
        return [f"{what}: {text.listed(each, most=_MOST_LISTED)}."]
    return [f"{what}, beside {baseline_in_words(runs)}: {ends}."] if ends else []


def _few(rows: pl.DataFrame) -> list[dict[str, Any]]:
    """The rows, where they are so few that something is told of each; else none."""
    return rows.to_dicts() if rows.height <= _MOST_LISTED and rows["group"].n_unique() == 1 else []


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


def remediable(runs: Runs) -> list[Note]:
    """The notes that more measuring mends: what is open about comparisons and claims, and runs that may be tried again.

    Of several sweeps no single submit measures two sides in turn, so what was measured apart stays so.
    """
    is_one = runs.run["sweep"].n_unique() == 1
    few, undecided = few_repeats(runs), summary(runs).drop_nulls("repeats_to_decide")["repeats_to_decide"]
    failed = Exclusion.ERROR.value in facts(runs)["exclusion"]  # which may not happen again
    return [
        *([few] if few else []),
        *(pairing.apart for _, pairing in campaign(runs).others if is_one and pairing.is_apart),
        *map(_would_decide, undecided),
        *(Note(Code.CLAIM, remedy=Remedy(each.repeats)) for each in judged(runs) if each.repeats),
        *([Note(Code.FAILED, remedy=Remedy(retry=frozenset({Exclusion.ERROR.value})))] if failed else []),
        *disturbed_runs(runs),
    ]


def next_steps(runs: Runs) -> list[str]:
    """One command for all advice to measure more: the most repeats that any note asks for, what is open without them,
    and what to try again.
    """
    notes = remediable(runs)
    of_claims = [note for note in notes if note.code is Code.CLAIM]
    of_comparisons = remedy_of(note for note in notes if note.code is not Code.CLAIM).repeats
    remedy = remedy_of(notes)
    repeats = remedy.repeats
    retried = [each.value for each in Exclusion if each.value in remedy.retry]
    if retried and repeats is None:  # the words that the sweep was asked for with are without its repeats
        repeats = max(int(str(runs.run["repeat"].max())) + 1, DECIDING_REPEATS)
    options = [f"sweep.repeats={repeats}"] * (repeats is not None) + [f"--retry {','.join(retried)}"] * bool(retried)
    if not options:
        return []
    when = "when the machine is free, " if Exclusion.DISTURBED.value in retried else ""
    undecided, over = _undecided(runs, in_turn=remedy.in_turn), baseline_in_words(runs)
    compared = count_of(undecided, f"comparison with {over}", f"comparisons with {over}")
    if of_comparisons and of_comparisons < (repeats or 0):
        compared += f" (sweep.repeats={of_comparisons} may be enough)"
    left = [compared] * bool(undecided) + [count_of(len(of_claims), "claim")] * bool(of_claims)
    why = f" That may decide {text.listed(left)}." if left else ""
    turns = " One submit measures all sides of the new repeats in turn." if remedy.in_turn else ""
    if runs.run["sweep"].n_unique() > 1:
        return [f"Next: {when}submit the sweeps again with `{' '.join(options)}`.{why}"]
    if remedy.reordered:
        options.insert(0, "sweep.order=interleaved")
    if not (asked := _asked(runs)):
        return [f"Next: {when}submit the sweep again with `{' '.join(options)}`.{turns}{why}"]
    own = ", with its --conf and --plugin" if _has_own_files(runs, asked) else ""
    return [f"Next: {when}`parallelbench submit {' '.join([asked, *options])}`{own}.{turns}{why}"]


def _undecided(runs: Runs, *, in_turn: bool) -> int:
    """How many comparisons lack a verdict that more repeats may give: of what was measured apart, those in turn."""
    lacking = [SpeedVerdict.TOO_FEW.value] + [SpeedVerdict.NOT_INTERLEAVED.value] * in_turn
    return summary(runs).filter(pl.col("verdict").is_in(lacking) | pl.col("repeats_to_decide").is_not_null()).height


def _asked(runs: Runs) -> str:
    """The words that all runs were asked for with, quoted for a shell; empty where they differ or are not known."""
    asked = {_asked_for(Path(folder)) for folder in runs.run["folder"]}
    return quoted_overrides(asked.pop()) if len(asked) == 1 else ""


_OVERRIDE = re.compile(r"(\+{0,2}|~)[A-Za-z_][\w.@/-]*=[^`]*|~[A-Za-z_][\w.@/-]*")


def quoted_overrides(line: str) -> str:
    """The overrides of a line of somebody's folder, each quoted; empty where any is no override: the reader pastes them
    into a shell.
    """
    try:
        words = shlex.split(line)
    except ValueError:
        return ""
    harmless = all(_OVERRIDE.fullmatch(word) and word.isprintable() for word in words)
    return shlex.join(words) if harmless else ""


def _has_own_files(runs: Runs, asked: str) -> bool:
    """Whether the sweep or a choice of its runs is none of the suite's. No run records where such files are."""
    groups = (*COMPONENTS, "launcher", "site")
    parts = {(group, its[group]) for its in configurations(runs).values() for group in groups if group in its}
    nodes = [(group, msgspec.json.decode(part)) for group, part in parts]
    own = ".program."  # what stands for a program's parts has no files
    chosen = {(group, str(node.get("name"))) for group, node in nodes if own not in str(node.get("_target_"))}
    named = [each.partition("=")[::2] for each in shlex.split(asked)]
    chosen |= {(group, name) for group, name in named if group == "sweep"}
    chosen |= {(group, name) for group, name in named if group == "program" and name.isidentifier()}
    return any(shipped(group, name) is None for group, name in chosen)


def _asked_for(folder: Path) -> str:
    try:
        lines = (folder / "overrides.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.removeprefix(ASKED) for line in lines if line.startswith(ASKED)), "")


def answers(runs: Runs) -> list[str]:
    """The speed-ups over the baseline in sentences, the largest first."""
    compared = _compared(runs)
    if compared.is_empty():
        return ["No configuration can be compared with another one: see the warnings."]
    several = compared["group"].n_unique() > 1
    ordered = compared.sort("speed_up", descending=True)
    # Of several groups of like work, the fastest of each; of a single one, all.
    first = ordered.unique("group", keep="first", maintain_order=True) if several else ordered
    rows = first.head(_MOST_LISTED).to_dicts()
    more = compared.height - len(rows)
    if several and more:
        shown = [_counted(runs, compared), *_extremes(runs, ordered)]
    else:
        fastest, *others = (_gain(row, named=several) for row in rows)
        shown = [
            f"{fastest}{_ties(runs, ordered)}",
            *others,
            *([f"{more} more {'is' if more == 1 else 'are'} in the table."] if more else []),
        ]
    return [*_baseline_is_fastest(runs, compared), *shown, *_shortest(runs, ordered)]


def _extremes(runs: Runs, ordered: pl.DataFrame) -> list[str]:
    """The largest speed-up over each baseline, then the smallest: neither ratios over unlike baselines nor strong and
    weak scaling are to be ranked together.
    """
    families = list(ordered.group_by("scaling", "baseline", maintain_order=True))
    kinds, baselines = (ordered[name].n_unique() for name in ("scaling", "baseline"))
    largest, smallest = [], []
    for (scaling, baseline), alike in families[:_MOST_LISTED]:
        first, last = alike.row(0, named=True), alike.row(-1, named=True)
        name = in_words(str(baseline), named=first["several_frameworks"])
        over = f" over {name}" if baselines > 1 else ""
        under = f" under {scaling} scaling" if kinds > 1 else ""
        best = "Only" if alike.height == 1 else "Largest"
        what = f"{best} speed-up{over}" if first["speed_up"] > 1 else f"Nearest to {name}"
        largest.append(f"{what}{under}: {_gain(first, named=True)}{_ties(runs, alike)}")
        if alike.height > 1:
            smallest.append(f"Smallest speed-up{over}{under}: {_gain(last, named=True)}")
    more = len(families) - len(largest)
    rest = [f"Speed-ups over {count_of(more, 'more baseline')} are in the table."] if more > 0 else []
    return [*largest, *smallest, *rest]


def _shortest(runs: Runs, ordered: pl.DataFrame) -> list[str]:
    """Whose epoch is the shortest where several frameworks did the same work: a speed-up is over the framework's own
    one device, which may be the slower one. With the largest speed-up's work for an example. Under weak scaling an
    epoch may hold more samples on more devices.
    """
    rows = summary(runs).filter(pl.col("repeats") > 0, pl.col("scaling") == "strong")
    rows = rows.drop_nulls("steady_epoch_time_s")
    candidates = rows.group_by("group").len()
    by_time = rows.sort("steady_epoch_time_s", "group", "configuration")
    rows = by_time.unique(("group", "framework"), keep="first", maintain_order=True)
    rows = rows.filter(pl.len().over("group") > 1)
    if rows.is_empty():
        return []
    firsts = Counter(rows.unique("group", keep="first", maintain_order=True)["framework"])
    group = next((each for each in ordered["group"] if each in set(rows["group"])), rows["group"][0])
    first, *others = rows.filter(group=group).to_dicts()
    named = f" ({group})" if rows["group"].n_unique() > 1 else ""
    took = [f"{row['configuration']} {text.seconds(row['steady_epoch_time_s'])}" for row in (first, *others)]
    among = candidates.row(by_predicate=pl.col("group") == group)[1]
    fastest, *slowest = (_configuration(runs, row) for row in (first, *others))
    verdicts = beside_fastest(runs, fastest, slowest, among=among)
    slower = all(verdict is SpeedVerdict.SLOWER for verdict in verdicts.values())
    proof = "their own pairs tell them apart" if slower else "without a verdict between them"
    of = firsts.total()
    counts = [f"{framework} in {count} of {of} kinds of work" for framework, count in firsts.most_common()]
    whose = f": {text.listed(counts)}; for one" if of > 1 else ""
    return [f"Shortest epoch of the same work over all frameworks{whose}{named}: {text.listed(took)}, {proof}."]


def _ties(runs: Runs, ordered: pl.DataFrame) -> str:
    """What did the same work, and is not shown to be slower than the first, which is named: the sentence before may be
    about one device. Then what too few repeats can't tell from it, and what was never held against it.
    """
    alike = ordered.filter(pl.col(key) == pl.col(key).first() for key in ("group", "framework"))
    fastest, *others = (_configuration(runs, row) for row in alike.to_dicts())
    verdicts = beside_fastest(runs, fastest, others, among=alike.height)

    def those(*of: SpeedVerdict) -> str:
        names = [each.name for each, verdict in verdicts.items() if verdict in of]
        return "the others" if len(names) == len(others) > 1 else text.listed(names) if names else ""

    decided = (*_NOT_HELD, *_FEW, SpeedVerdict.SLOWER)
    tied = [each.name for each, verdict in verdicts.items() if verdict not in decided]
    told = f" Not told apart from {fastest}: {text.listed(tied)}." if tied else ""
    apart, unlike, few = those(_NOT_HELD[0]), those(_NOT_HELD[1]), those(*_FEW)
    told += f" Not tested whether {fastest} is faster than {apart}: they were measured apart." if apart else ""
    told += f" Not comparable with {fastest}: {unlike}." if unlike else ""
    return f"{told} Too few repeats to tell {fastest} from {few}." if few else told


_NOT_HELD = (SpeedVerdict.NOT_INTERLEAVED, SpeedVerdict.NOT_COMPARABLE)
_FEW = (SpeedVerdict.TOO_FEW, SpeedVerdict.NO_PAIR, SpeedVerdict.NO_STEADY_EPOCH)


def _configuration(runs: Runs, row: dict[str, Any]) -> Configuration:
    """That of a row of `summary`."""
    place: int = row["configuration_place"]
    return campaign(runs).configurations[place]


def _uncompared(runs: Runs) -> bool:
    """Whether a configuration that trained is compared with nothing."""
    rows = summary(runs).filter(pl.col("speed_up").is_null(), pl.col("steady_epoch_time_s").is_not_null())
    return not rows.filter(pl.col("verdict").ne_missing(SpeedVerdict.BASELINE.value)).is_empty()


def _baseline_is_fastest(runs: Runs, compared: pl.DataFrame) -> list[str]:
    """Whether all of several configurations are slower than the baseline, or seem to be with too few repeats."""
    uncompared, over = _uncompared(runs), baseline_in_words(runs)
    verdicts = compared.group_by("group").agg(pl.col("verdict").unique())["verdict"].to_list()
    rest = set().union(*verdicts) - {SpeedVerdict.SLOWER}
    if compared.height < 2 or not rest <= {SpeedVerdict.TOO_FEW} or (compared["speed_up"] >= 1).any():
        return []
    where = f" in all {len(verdicts)} kinds of work" if len(verdicts) > 1 else ""
    of_those = ", of what can be compared with it," if uncompared else ""
    if not all(SpeedVerdict.SLOWER in found for found in verdicts):
        return [f"So far{of_those} {over} is fastest{where}, with too few repeats to be sure."]
    first = f"Of what can be compared with it, {over}" if uncompared else f"{over[0].upper()}{over[1:]}"
    return [f"{first} is fastest{where}{', as far as there are enough repeats' if rest else ''}."]


def _counted(runs: Runs, compared: pl.DataFrame) -> str:
    """How many configurations there are, and how many of them have which verdict beside their baseline."""
    counts = Counter(compared["verdict"])
    words = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in SpeedVerdict if counts[verdict])
    every = summary(runs)
    ones = len(campaign(runs).baselines)
    rest = every.height - ones - compared.height
    what = "of one device" if baseline_in_words(runs) == ONE_DEVICE_IN_WORDS else "baseline" + "s" * (ones > 1)
    parts = [f"{ones} {what}"] * bool(ones) + [f"{compared.height} compared with it ({words})"]
    parts += [f"{rest} not compared"] * bool(rest)
    works = count_of(every["group"].n_unique(), "kind of work", "kinds of work")
    drifted = int(compared["drifted"].sum())
    changed = f" {_DRIFTED} {drifted} of those compared were measured: {_WITH_INTERVAL}." if drifted else ""
    return f"{count_of(every.height, 'configuration')} in {works}: {', '.join(parts)}.{changed}"


_WITH_INTERVAL = "quote a speed-up only with its interval, which allows for the change"
_DRIFTED = f"The machine's own speed changed by more than {100 * PROBE_TOLERANCE:.0f} % while"


def _compared(runs: Runs) -> pl.DataFrame:
    """The rows of `summary` that have a speed-up over other runs, each with whether the machine `drifted` while they
    were measured.
    """
    rows = summary(runs)
    several = rows["framework"].n_unique() > 1
    rows = rows.filter(pl.col("speed_up").is_not_null(), pl.col("verdict") != SpeedVerdict.BASELINE.value)
    return rows.with_columns(
        drifted=pl.col("configuration_place").is_in(list(_drifted(runs))),
        several_frameworks=pl.lit(several),
        at_limit=pl.col("configuration_place").replace_strict(_at_limit(runs), default="", return_dtype=pl.String),
    )


@once
def _at_limit(runs: Runs) -> dict[int, str]:
    """The places of the configurations that are faster than they can be, as the baseline was at its memory's limit →
    what shows it.
    """
    found = campaign(runs).others
    notes = ((each.place, note) for each, pairing in found for note in pairing.caveats(per_sample=True))
    return {place: str(note.values[MEMORY]) for place, note in notes if note.code is Code.AT_MEMORY_LIMIT}


@once
def _drifted(runs: Runs) -> set[int]:
    """The places of the configurations of which runs were compared during which a machine changed its speed."""
    return {
        each.place
        for each, pairing in campaign(runs).others
        if any(note.code is Code.DRIFT for note in pairing.caveats(per_sample=True))
    }


def _gain(row: dict[str, Any], *, named: bool) -> str:
    has_interval = row["speed_up_low"] is not None
    advice = _WITH_INTERVAL.replace("a speed-up only", "it") if has_interval else "without an interval, do not quote it"
    return f"{_gained(row, named=named)}{f' {_DRIFTED} this was measured: {advice}.' if row['drifted'] else ''}"


def _gained(row: dict[str, Any], *, named: bool) -> str:
    what = f"{row['configuration']} ({row['group']})" if named else row["configuration"]
    does = f"{what} {'trains an epoch' if row['scaling'] == 'strong' else 'trains'}"
    times = text.estimate(row["speed_up"], row["speed_up_low"], row["speed_up_high"])
    baseline = in_words(row["baseline"], named=row["several_frameworks"])
    speed, pairs = f"{times} times as fast as {baseline}", count_of(row["speed_up_pairs"], "repeat")
    more = row["devices"] / row["baseline_devices"]
    rest = ""
    if more > 1:
        begin = f" from {row['baseline_devices']} devices on" if row["baseline_devices"] > 1 else ""
        rest = f": {text.percent(row['efficiency'])} of theoretical scaling{begin}"
        if row["efficiency_with_startup"] is not None:
            whole = more * row["efficiency_with_startup"]
            rest += f"; whole runs of this length, start-up included, {text.fixed(whole, 2)} times as fast"
        if max(row["efficiency"], row["efficiency_with_startup"] or 0) > 1 + 1e-9:
            by = f"{baseline} is at its memory's limit, {row['at_limit']}" if row["at_limit"] else ""
            or_by = f"by chance, by an error, or {baseline} alone lacks cache or memory"
            rest += f" (more than the ideal: {by or or_by})"
    if row["verdict"] == SpeedVerdict.NOT_INTERLEAVED:
        return f"{does} {speed} ({pairs}, but measured apart from it: no interval){rest}."
    if row["speed_up_low"] is None:
        return f"{does} {speed} in {pairs}, too few for an interval{rest}."
    interval = text.interval_of_95(row["speed_up_low"], row["speed_up_high"])
    if row["verdict"] == SpeedVerdict.TOO_FEW:
        return f"{does} {speed} ({interval}, {pairs}, too few for a verdict){rest}."
    excludes_1 = not row["speed_up_low"] <= 1 <= row["speed_up_high"]
    undecided = row["verdict"] in (SpeedVerdict.NO_DIFFERENCE, SpeedVerdict.EQUAL)
    told = f"{speed} ({interval}, {pairs}{_AMONG if excludes_1 and undecided else ''})"
    if row["verdict"] == SpeedVerdict.NO_DIFFERENCE:
        return f"{what}: {row['verdict']}: {told}; {_would_decide(row['repeats_to_decide'])}."
    return (
        f"{what}: {row['verdict']}: {told}{rest}." if row["verdict"] == SpeedVerdict.EQUAL else f"{does} {told}{rest}."
    )


_AMONG = "; not enough among so many verdicts"
"""Beside a 95 % interval that leaves out 1, of a verdict that shows no difference."""


def _would_decide(repeats: int | None) -> Note:
    """How many repeats would decide, if the ratio and what it varies by stay as they are."""
    if repeats is None:
        return Note(Code.UNDECIDABLE)
    return Note(Code.UNDECIDED, {"further": count_of(repeats, "repeat")}, remedy=Remedy(repeats))
