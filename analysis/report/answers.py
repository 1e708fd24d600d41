"""The answers of a report in sentences, the first that a reader sees: an answer to each question that readers have."""

from __future__ import annotations

import re
import shlex
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import polars as pl

from analysis import text
from analysis.comparison.baseline import (
    ONE_DEVICE_IN_WORDS,
    baseline_in_words,
    beside_fastest,
    in_words,
    refusals,
    stand_ins,
    without_baseline,
)
from analysis.comparison.campaign import campaign
from analysis.comparison.exclusions import Exclusion, disturbed_lines, disturbed_runs
from analysis.comparison.issues import PROBE_TOLERANCE
from analysis.comparison.notes import Code, Note, Remedy, named, remedy_of, write
from analysis.comparison.pairing import MEMORY, Pairing
from analysis.comparison.ratio import DECIDING_REPEATS
from analysis.comparison.summary import facts, summary
from analysis.comparison.verdict import EQUAL_WITHIN, SpeedVerdict
from analysis.comparison.work import IS_ONE_DEVICE, IS_PROGRAM, PROGRAM, REFERENCE, configurations
from analysis.figures.stacked import attribution
from analysis.report.claims import judged
from analysis.report.costs import MOST_LISTED, cost, energy, length, memory
from analysis.report.programs import checks_of_programs, memory_of_programs, times_of_programs
from analysis.report.sentence import sentences
from analysis.report.warnings import few_repeats, parity_of, subjects, to_know, warnings
from analysis.runs.reader import once
from parallelbench.config.build import COMPONENTS
from parallelbench.config.sites import shipped
from parallelbench.errors import count_of
from parallelbench.results.folder import ASKED

if TYPE_CHECKING:
    from analysis.comparison.campaign import Configuration
    from analysis.runs.reader import Runs


class Answer(NamedTuple):
    """What the first screen says to one of the questions that every reader has."""

    question: str
    """In a word or two."""
    lines: list[str]
    """Sentences."""


SPEED, TRUST, PAPER, NEXT = "Speed", "Trust", "For a paper", "Next"


def first_screen(runs: Runs, *, with_refused: bool = True) -> list[Answer]:
    """Every question that has an answer, in the order in which readers ask; *Next* is the last one.

    `with_refused`: also what is not compared, in brief.
    """
    not_compared, disturbed = write(refusals(runs), brief=True)[:MOST_LISTED], disturbed_lines(runs, advise=False)
    is_silent = _compared(runs).is_empty() and bool(not_compared or disturbed)
    every = [
        Answer(SPEED, [*([] if is_silent else answers(runs)), *(not_compared if with_refused else []), *disturbed]),
        Answer("Baseline", _baseline(runs)),
        Answer("Time spent", _time(runs)),
        Answer("Memory", [*memory(runs), *memory_of_programs(runs)]),
        Answer("Energy", energy(runs)),
        Answer("Cost", cost(runs)),
        Answer("Checks", [*checks_of_programs(runs), *_parity(runs)]),
        Answer(TRUST, _trust(runs)),
        Answer(PAPER, _paper(runs)),
        Answer(NEXT, next_steps(runs)),
    ]
    return [answer for answer in every if answer.lines]


def headline(runs: Runs, *, with_refused: bool = True) -> list[str]:
    """The same as lines: one for each question, but for the speeds, which have one each."""
    lines = []
    for question, told in first_screen(runs, with_refused=with_refused):
        lines += told if question == SPEED else [f"{question}: {' '.join(told)}"]
    return lines


def _baseline(runs: Runs) -> list[str]:
    """What speed-ups are over, and why."""
    names = list(dict.fromkeys(one.name for one in campaign(runs).baselines if one.is_one_device))
    if not (names and campaign(runs).others):
        return [*write(stand_ins(runs)), *_no_scaling(runs)]
    alike = "the same work, framework and options" if len(names) > 1 else "the same work"
    one = (
        f"Speed-ups are over {ONE_DEVICE_IN_WORDS} with {alike} ({text.listed(names)}): they say what more devices gain"
    )
    return [*write(stand_ins(runs)), *_no_scaling(runs), f"{one}. `report --baseline NAME` takes another."]


def _no_scaling(runs: Runs) -> list[str]:
    """Which speed-ups are of another strategy than the baseline's on several devices."""
    unlike = pl.col("efficiency").is_null() & (pl.col("devices") != pl.col("baseline_devices"))
    rows = _compared(runs).filter(unlike)
    if rows.is_empty():
        return []
    those, its = ("That", "is no scaling: its") if rows.height == 1 else ("Those", "are no scaling: their")
    return [f"{those} of {_names(runs, rows)} {its} strategy is another one, too."]


def _time(runs: Runs) -> list[str]:
    """What a step is spent on, or how to know."""
    rows = facts(runs).filter("displayed")
    told = times_of_programs(runs)
    if rows.is_empty() or rows.select(IS_PROGRAM.all()).item():
        return told
    if attribution.rows(runs).is_empty():
        return [*told, "What a step is spent on was not measured: measure.attribution_steps=20 tells."]
    return [*told, *attribution.finding(runs).splitlines()[:-1]]


_UNRANKED = {
    SpeedVerdict.TOO_FEW.value: "too few repeats for a verdict",
    SpeedVerdict.NOT_INTERLEAVED.value: "measured apart from the baseline",
    SpeedVerdict.NO_DIFFERENCE.value: "no difference shown",
}
"""Verdicts of speed-ups that rank nothing, in words."""


def _trust(runs: Runs) -> list[str]:
    """Which speed-ups rank nothing, and which are to be explained before anybody quotes them."""
    rows = _compared(runs)
    if rows.is_empty():
        return ["No speed-up can be quoted."]
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for row in rows.to_dicts():
        if why := _UNRANKED.get(row["verdict"]):
            found[why].append((row["group"], row["configuration"]))
    lines = [f"{named(subjects(runs, keys))}: {why}" for why, keys in found.items()]
    told = [f"No ranking rests on {text.listed(lines, most=len(lines), sep='; ')}."] if lines else []
    beyond = _above_ideal(runs)
    told += [f"Explain before quoting: {_names(runs, beyond)}, above the ideal."] if beyond.height else []
    whole = count_of(rows.height, "speed-up is decided", "speed-ups are decided")
    return [*(told or [f"{whole}: quote each with its interval."]), *_before_quoting(runs)]


def _above_ideal(runs: Runs) -> pl.DataFrame:
    """The rows of `_compared` that are faster than further devices explain."""
    return _compared(runs).filter(pl.col("efficiency") > 1 + 1e-9)


MOST_TO_KNOW = 2
"""Warnings that the first screen tells in words; it counts the others."""


def _before_quoting(runs: Runs) -> list[str]:
    """The first warnings that no other answer has, in brief, and how many more there are."""
    told = write(to_know(runs), brief=True)[:MOST_TO_KNOW]
    more = len(warnings(runs)) - len(told)
    also = "more " if told else ""
    rest = count_of(more, f"{also}thing to know before quoting", f"{also}things to know before quoting")
    return [*told, *([f"{rest}: see the warnings."] if more else [])]


def _paper(runs: Runs) -> list[str]:
    """The sentence about the largest speed-up, and how many more a paper may quote; or why none."""
    every = sentences(runs)
    if known := quotable(runs):
        more = f"{len(known) - 1} more and a" if len(known) > 1 else "A"
        return [known[0], f"{more} LaTeX table: `parallelbench report DIR --sentence`."]
    reasons: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for each in every:
        reasons[each.reason].append((each.group, each.configuration))
    told = [f"{named(subjects(runs, keys))}: {reason}" for reason, keys in reasons.items()]
    why = text.listed(told, most=MOST_LISTED, sep="; ") if told else "a single configuration compares with nothing"
    return [f"No sentence: {why}."]


def quotable(runs: Runs) -> list[str]:
    """The sentences that a paper may quote, that about the largest speed-up first."""
    speeds = {(group, name): value for group, name, value in summary(runs).select(*_KEYS, "speed_up").rows()}
    known = [each for each in sentences(runs) if each.text]
    known.sort(key=lambda each: speeds[each.group, each.configuration], reverse=True)
    return [each.text for each in known]


_KEYS = ("group", "configuration")


def _parity(runs: Runs) -> list[str]:
    """In how many runs the check passed, against what, and which were not checked.

    It compares steps of small batches in fp64, so it is known also where one device lacks memory for the training.
    """
    asked = facts(runs).filter(~IS_ONE_DEVICE & ~IS_PROGRAM)
    checked = asked.drop_nulls("parity_passed")
    passed, whole = int(checked["parity_passed"].sum()), checked.height
    others = checked["parity_reference"].count()
    smaller = checked.filter(pl.col("parity_reference").is_null())["parity_model"].count()
    told = [f"passed in {passed} of {count_of(whole, 'run')}"] * bool(whole)
    told += [f"{others} of them held against a reference of the strategy's author, not one device"] * bool(others)
    told += [f"{smaller} of them as a smaller model, of the same kind"] * bool(smaller)
    if passed < whole:
        names = checked.filter(~pl.col("parity_passed"))["configuration"].unique(maintain_order=True).to_list()
        told += [f"failed in {whole - passed}, which do not count ({text.listed(names)})"]
    if off := parity_of(runs, Code.PARITY_OFF):
        told.append(f"not checked (measure.parity=false): {named(off)}")
    if never := parity_of(runs, Code.PARITY_NEVER):
        told.append(f"not checked, as one device does not compute the same: {named(never)}")
    whole_steps = checked.filter(pl.col("parity_reference").is_null(), pl.col("parity_model").is_null())
    lost = summary(runs).filter(pl.col("oom_runs") > 0, strategy=REFERENCE)
    lost = lost.join(whole_steps.select("group").unique(), on="group", how="semi", maintain_order="left")
    fits = f", which fit although {_names(runs, lost)} ran out of memory" if lost.height else ""
    how = f" (its steps in fp64, of small batches as a rule{fits})" if whole > others else ""
    return [f"Parity with one device{how}: {'; '.join(told)}."] if told else []


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
    """What to measure, and what to explain before anybody quotes it."""
    beyond = _above_ideal(runs)
    are = "is" if beyond.height == 1 else "are"
    explain = f"Before quoting, explain why {_names(runs, beyond)} {are} above the ideal: see the warnings."
    return [*_to_measure(runs), *([explain] if beyond.height else [])]


def _to_measure(runs: Runs) -> list[str]:
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
        return _nothing_to_measure(runs)
    when = "when the machine is free, " if Exclusion.DISTURBED.value in retried else ""
    undecided, over = _undecided(runs, in_turn=remedy.in_turn), baseline_in_words(runs)
    compared = count_of(undecided, f"comparison with {over}", f"comparisons with {over}")
    if of_comparisons and of_comparisons < (repeats or 0):
        compared += f" (sweep.repeats={of_comparisons} may be enough)"
    left = [compared] * bool(undecided) + [count_of(len(of_claims), "claim")] * bool(of_claims)
    why = f" That may decide {text.listed(left)}." if left else ""
    turns = " One submit measures all sides of the new repeats in turn." if remedy.in_turn else ""
    if runs.run["sweep"].n_unique() > 1:
        return [f"{when}submit the sweeps again with `{' '.join(options)}`.{why}"]
    if remedy.reordered:
        options.insert(0, "sweep.order=interleaved")
    if not (asked := _asked(runs)):
        return [f"{when}submit the sweep again with `{' '.join(options)}`.{turns}{why}"]
    own = ", with its --conf and --plugin" if _has_own_files(runs, asked) else ""
    return [f"{when}`parallelbench submit {' '.join([asked, *options])}`{own}.{turns}{why}"]


_DECIDED = (SpeedVerdict.FASTER, SpeedVerdict.SLOWER, SpeedVerdict.EQUAL)


def _nothing_to_measure(runs: Runs) -> list[str]:
    """That all is decided; or what no further repeat decides, and what to do instead."""
    rows = summary(runs).filter(pl.col("verdict").ne_missing(SpeedVerdict.BASELINE.value))
    is_open = ~pl.col("verdict").is_in([verdict.value for verdict in _DECIDED]).fill_null(value=False)
    found = rows.filter(is_open, (pl.col("repeats") > 0) | pl.col("disturbed"))
    alike = found.filter(pl.col("verdict") == SpeedVerdict.NO_DIFFERENCE.value)
    others = found.filter(pl.col("verdict").ne_missing(SpeedVerdict.NO_DIFFERENCE.value))
    failed = rows.filter(pl.col("repeats") == 0, ~pl.col("disturbed"))
    if rows.is_empty() or not campaign(runs).others:
        return write(without_baseline(runs)) or ["Measure a second configuration of the same work."]
    told = []
    if alike.height:
        which = f"{_names(runs, alike)} from {baseline_in_words(runs)}"
        told.append(f"No reasonable number of repeats tells {which}: report that no difference was shown.")
    if others.height:
        told.append(f"Repeats alone give no verdict to {_names(runs, others)}: the warnings say what to change.")
    if not told and (ties := _untold(runs)):
        told.append(f"Every comparison with {baseline_in_words(runs)} is decided. More repeats may tell {ties}.")
    if not told:
        told.append("No more measuring is needed for the verdicts: every comparison is decided.")
    lost = failed.filter(pl.col("oom_runs") == pl.col("runs"))
    if lost.height:
        told.append(f"{_names(runs, lost)} ran out of memory: more memory or another strategy helps, no repeat does.")
    for (why,), rows in failed.filter(pl.col("oom_runs") < pl.col("runs")).group_by("exclusions", maintain_order=True):
        told.append(f"No run of {_names(runs, rows)} counts ({why}): mend the cause, then measure again.")
    return told


def _untold(runs: Runs) -> str:
    """The fastest configurations, each with those of the same work from which nothing tells it: "A from B"."""
    found = []
    for _, alike in (
        _compared(runs).sort("speed_up", descending=True).group_by("group", "framework", maintain_order=True)
    ):
        fastest, *others = (_configuration(runs, row) for row in alike.to_dicts())
        verdicts = beside_fastest(runs, fastest, others, among=alike.height)
        ties = [each.name for each, verdict in verdicts.items() if verdict not in _DECIDED]
        found += [f"{fastest} from {text.listed(ties)}"] * bool(ties)
    return text.listed(found, most=MOST_LISTED, sep="; ")


def _names(runs: Runs, rows: pl.DataFrame) -> str:
    return named(subjects(runs, rows.select("group", "configuration").rows()))


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
    baseline = _baseline_is_fastest(runs, compared)
    ordered = compared.sort("speed_up", descending=True)
    # Of several groups of like work, the fastest of each; of a single one, all.
    first = ordered.unique("group", keep="first", maintain_order=True) if several else ordered
    rows = first.head(MOST_LISTED).to_dicts()
    more = compared.height - len(rows)
    if several and more:
        of_works = _of_works(runs, ordered, is_said=bool(baseline))
        shown = [_counted(runs, compared), *(of_works or _extremes(runs, ordered))]
    else:
        fastest, *others = (_gain(row, named=several) for row in rows)
        shown = [
            f"{fastest}{_ties(runs, ordered)}",
            *others,
            *([f"{more} more {'is' if more == 1 else 'are'} in the table."] if more else []),
        ]
    return [*baseline, *shown, *_shortest(runs, ordered)]


def _of_works(runs: Runs, ordered: pl.DataFrame, *, is_said: bool) -> list[str]:
    """The fastest configuration of each of few kinds of work; of several frameworks or kinds of scaling, nothing.

    `is_said`: whether a sentence before says already that the baseline is fastest.
    """
    works = [rows for _, rows in ordered.group_by("group", maintain_order=True)]
    if len(works) > MOST_LISTED or any(ordered[name].n_unique() > 1 for name in ("scaling", "framework")):
        return []
    lines = []
    for rows in works:
        row, over = rows.row(0, named=True), in_words(rows["baseline"][0])
        is_slower = (rows["verdict"] == SpeedVerdict.SLOWER.value).all()
        first = f"{over} is fastest; " if is_slower and not is_said else ""
        lines.append(f"{row['group']}: {first}{_gain(row, named=False)}{_ties(runs, rows)}")
    return lines


def _extremes(runs: Runs, ordered: pl.DataFrame) -> list[str]:
    """The largest speed-up over each baseline, then the smallest: neither ratios over unlike baselines nor strong and
    weak scaling are to be ranked together.
    """
    families = list(ordered.group_by("scaling", "baseline", maintain_order=True))
    kinds, baselines = (ordered[name].n_unique() for name in ("scaling", "baseline"))
    largest, smallest = [], []
    for (scaling, baseline), alike in families[:MOST_LISTED]:
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
    proof = "told apart where the two are paired directly" if slower else "without a verdict between them"
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
    if others and alike["verdict"][0] == SpeedVerdict.FASTER and set(verdicts.values()) == {SpeedVerdict.SLOWER}:
        return f" {fastest} is the fastest of all, also where two are paired directly."
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
    of = " of one device" if baseline_in_words(runs) == ONE_DEVICE_IN_WORDS else ""
    them = "it" if ones == 1 else "them"
    parts = [f"{count_of(ones, 'baseline')}{of}"] * bool(ones) + [f"{compared.height} compared with {them} ({words})"]
    failed = every.filter(pl.col("repeats") == 0, ~pl.col("disturbed"), pl.col("speed_up").is_null()).height
    parts += [f"{rest - failed} not compared"] * bool(rest - failed)
    parts += [f"{failed} without a run that counts"] * bool(failed)
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
        whole=pl.col("configuration_place").replace_strict(_wholes(runs), default="", return_dtype=pl.String),
    )


@once
def _wholes(runs: Runs) -> dict[int, str]:
    """Place of a configuration → how many times as fast its whole runs are, where that is known and tells more."""
    told = ((each.place, _whole(pairing, length(runs))) for each, pairing in campaign(runs).others)
    return {place: words for place, words in told if words}


_TRAINING = "total_training_time_s"


def _whole(pairing: Pairing, length: str) -> str:
    """With start-up; where that is not compared, of all epochs, if these say another speed than the later ones."""
    if started := pairing.speed_up(with_startup=True):
        times = text.fixed(started.median, 2)
        return f"; whole runs of this length, start-up included, {times} times as fast"
    steady, trained = pairing.speed_up(), pairing.ratio(_TRAINING)
    if steady is None or trained is None or pairing.is_per_sample:
        return ""
    if abs(1 / trained.median / steady.median - 1) <= EQUAL_WITHIN:
        return ""
    warmed = any(note.code is Code.PARTLY_WARMED for note in pairing.caveats(metric=_TRAINING))
    but = " (start-up aside; a parity check warmed up one side)" if warmed else " (start-up aside)"
    of = f" of {length}" if length[0].isdigit() else ""
    return f"; over the whole training{of} {text.fixed(1 / trained.median, 2)} times as fast{but}"


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
    is_of_epochs = row["scaling"] == "strong" and row["strategy"] != PROGRAM
    does = f"{what} {'trains an epoch' if is_of_epochs else 'trains'}"
    times = text.estimate(row["speed_up"], row["speed_up_low"], row["speed_up_high"])
    baseline = in_words(row["baseline"], named=row["several_frameworks"])
    speed, pairs = f"{times} times as fast as {baseline}", count_of(row["speed_up_pairs"], "repeat")
    more = row["devices"] / row["baseline_devices"]
    rest = ""
    if more > 1 and row["efficiency"] is not None:
        begin = f" from {row['baseline_devices']} devices on" if row["baseline_devices"] > 1 else ""
        rest = f": {text.percent(row['efficiency'])} of theoretical scaling{begin}"
        if max(row["efficiency"], row["efficiency_with_startup"] or 0) > 1 + 1e-9:
            by = f"{baseline} is at its memory's limit, {row['at_limit']}" if row["at_limit"] else ""
            or_by = f"by chance, by an error, or {baseline} alone lacks cache or memory"
            rest += f" (more than the ideal: {by or or_by})"
    rest += row["whole"]
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
