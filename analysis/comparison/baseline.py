"""Every configuration against one device: its speed-up, efficiency, energy ratio and verdict."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from analysis import text
from analysis.comparison.exclusions import excluded
from analysis.comparison.issues import Blocker, Caveat, Issue, refusal, said_once, unlike_probes
from analysis.comparison.pairing import Pairing, RepeatPair, paired
from analysis.comparison.ratio import of_several
from analysis.comparison.run import ComparedRun, compared_runs
from analysis.comparison.verdict import SpeedVerdict, of_speed
from analysis.comparison.work import BASELINES, PROBED, WHICH_STRATEGY, is_below, labels
from analysis.metrics.runs import efficiency
from analysis.runs.reader import once
from parallelbench.measure.environment_match import FRAMEWORK

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from analysis.comparison.ratio import Ratio
    from analysis.runs.reader import Runs

Configuration = tuple[str, str]
"""Group and configuration."""


@once
def against_one_device(runs: Runs) -> dict[Configuration, Pairing]:
    """Every configuration of a group that has a baseline of its framework → its counted runs, paired with that's."""
    members, ones = _members(runs), baseline_of(runs)
    baselines = {key: (key[0], ones.get(key, "")) for key in members}
    return {key: _paired(runs, one, key) for key, one in baselines.items() if one in members}


@once
def _paired(runs: Runs, one: Configuration, other: Configuration) -> Pairing:
    """The counted runs of two configurations."""
    members = _members(runs)
    return paired(members[one], members[other])


@once
def baseline_of(runs: Runs) -> dict[Configuration, str]:
    """Every configuration that has one → the configuration of its group that it is compared with: one device.

    The ratio of two frameworks is no speed-up by devices. Where one device was measured with several sets of options,
    as with and without XLA, it is the one that shares the configuration's.
    """
    found: dict[Configuration, str] = {}
    for (group, name), run in _first_runs(runs).items():
        ones = {} if run.is_baseline else _ones(runs)[group, _framework(run)]
        alike = [one for one, its in ones.items() if len(ones) == 1 or _shares_options(run, its)]
        if run.is_baseline or len(alike) == 1:
            found[group, name] = name if run.is_baseline else alike[0]
    return found


def without_baseline(runs: Runs) -> list[str]:
    """What no set of one device's options fits, where it was asked for with several, in sentences."""
    members, found = _members(runs), baseline_of(runs)
    lost: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (group, name), runs_of in members.items():
        if (group, found.get((group, name), "")) not in members:
            lost[group, _framework(runs_of[0])].append(name)
    return [
        f"No speed-up for {text.listed(names, sep='; ')} ({group}): of one device's sets of options "
        f"({text.listed([*ones], sep='; ')}) not exactly one shares theirs and counts."
        for (group, framework), names in lost.items()
        if len(ones := _ones(runs)[group, framework]) > 1
    ]


@once
def _first_runs(runs: Runs) -> dict[Configuration, ComparedRun]:
    """The first run of each configuration that counts, or, where none does, the first."""
    known, first = compared_runs(runs), {key: runs_of[0] for key, runs_of in _members(runs).items()}
    for run_id, group, configuration in labels(runs).select("run_id", "group", "configuration").rows():
        first.setdefault((group, configuration), known[run_id])
    return first


@once
def _ones(runs: Runs) -> dict[tuple[str, str], dict[str, ComparedRun]]:
    """By group and framework, the configurations of one device."""
    ones: dict[tuple[str, str], dict[str, ComparedRun]] = defaultdict(dict)
    for (group, name), run in _first_runs(runs).items():
        if run.is_baseline:
            ones[group, _framework(run)][name] = run
    return ones


def _shares_options(run: ComparedRun, other: ComparedRun) -> bool:
    """Whether the options that both strategies have are equal."""
    one, two = run.definition, other.definition
    shared = {key for key in one.keys() & two.keys() if is_below(key, ("strategy",))}
    return all(one[key] == two[key] for key in shared.difference(WHICH_STRATEGY))


def beside_fastest(
    runs: Runs, group: str, fastest: str, others: Sequence[str], *, among: int
) -> dict[str, SpeedVerdict]:
    """Other configurations of the same work → the verdict of their own pairs with the fastest, which was chosen `among`
    so many by the same runs.

    Two intervals beside one device may overlap where every pair of the two says the same.
    """
    pairings = {other: _paired(runs, (group, fastest), (group, other)) for other in others}
    ratios = {other: None if pairing.blockers() else pairing.speed_up() for other, pairing in pairings.items()}
    error = of_several(ratios.values(), fastest_of=among)
    return {
        other: SpeedVerdict.NOT_COMPARABLE if pairings[other].blockers() else of_speed(ratio and ratio.at(error))
        for other, ratio in ratios.items()
    }


@once
def _members(runs: Runs) -> dict[Configuration, list[ComparedRun]]:
    """The counted runs of each configuration of each group."""
    members: dict[Configuration, list[ComparedRun]] = defaultdict(list)
    known = compared_runs(runs)
    rows = labels(runs).join(excluded(runs), on="run_id", how="anti").select("run_id", "group", "configuration")
    for run_id, group, configuration in rows.rows():
        members[group, configuration].append(known[run_id])
    return members


def _framework(run: ComparedRun) -> str:
    """As the run says; of one that has not, what its strategy is one device of."""
    own = {strategy: framework for framework, strategy in BASELINES.items()}
    return str(run.environment.get(FRAMEWORK) or own.get(run.definition["strategy.name"], "torch"))


def refused(runs: Runs, *, brief: bool = False) -> list[str]:
    """What is not compared with one device, with what differs and, unless `brief`, details and remedies, in sentences.

    `compare` judges all groups of a configuration at once, so that the keys of all are named.
    """
    pairings = against_one_device(runs)
    keys: dict[str, dict[str, None]] = defaultdict(dict)
    for (_, configuration), pairing in pairings.items():
        keys[configuration] |= dict.fromkeys(pairing.unlike_environments)
    several = len({group for group, _ in pairings}) > 1
    of_groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for (group, configuration), pairing in pairings.items():
        for issue in pairing.blockers():
            strategy = pairing.pairs[0].runs[0].definition["strategy.name"]
            unlike = issue.kind is Blocker.ENVIRONMENT
            whole = refusal(issue.differences, tuple(keys[configuration])) if unlike else str(issue)
            words = f"{issue.brief} (see the warnings)" if brief else whole
            of_groups[group, f"{strategy} × 1", words].append(configuration)
    alike: dict[tuple[tuple[str, ...], str, str], list[str]] = defaultdict(list)
    for (group, baseline, words), members in of_groups.items():  # one line for all works of which this is true
        alike[tuple(members), baseline, words].append(group)
    lines = []
    for (configurations, baseline, words), groups in alike.items():
        works = f" ({text.listed(groups, sep='; ')})" if several else ""
        lines.append(f"{text.listed(configurations)}{works} can't be compared with {baseline}: {words}.")
    return lines


LIMITS = (Caveat.APART, Caveat.ORDER, Caveat.ABOVE_IDEAL)
"""What is said beside every speed-up; what else limits them is in the warnings."""


def limited(runs: Runs, kinds: Collection[Caveat] = LIMITS, *, brief: bool = False) -> list[str]:
    """What limits the comparisons with one device, in sentences, each with the configurations that it is true of;
    `brief`: without causes and remedies.
    """
    pairings = against_one_device(runs).items()
    several = len({group for (group, _), _ in pairings}) > 1
    caveats = (
        (f"{configuration} ({group})" if several else configuration, caveat)
        for (group, configuration), pairing in pairings
        for caveat in pairing.caveats(per_sample=True)
    )
    return said_once(((name, caveat) for name, caveat in caveats if caveat.kind in kinds), brief=brief)


def told_of_pairs(runs: Runs) -> set[str]:
    """The entries of the environment that differ between paired runs: a blocker or a caveat says so."""
    pairings = against_one_device(runs).values()
    return {key for pairing in pairings for key in (*pairing.reported, *pairing.unlike_environments)}


@once
def unlike_groups(runs: Runs) -> dict[str, Issue]:
    """Group → why its configurations can't be ranked: what blocks a comparison of any two, or withholds its verdict."""
    members: dict[str, list[Configuration]] = defaultdict(list)
    for group, configuration in _members(runs):
        members[group].append((group, configuration))
    issues = {group: _unlike(runs, of_group) for group, of_group in members.items()}
    return {group: issue for group, issue in issues.items() if issue}


def _unlike(runs: Runs, configurations: list[Configuration]) -> Issue | None:
    members = _members(runs)
    first, *others = sorted(configurations, key=lambda one: not members[one][0].is_baseline)
    every = [run for one in (first, *others) for run in members[one]]
    alike = Pairing(tuple(RepeatPair(run.repeat, (every[0], run)) for run in every[1:]))
    entries = {key: values for key, values in alike.unlike_environments.items() if key not in PROBED}
    if unlike := entries | unlike_probes([members[one] for one in (first, *others)]):
        return Issue(Blocker.ENVIRONMENT, unlike)
    pairings = [_paired(runs, first, other) for other in others]
    blockers = (issue for pairing in pairings for issue in pairing.blockers())
    withheld = (issue for pairing in pairings for issue in pairing.caveats() if issue.kind is Caveat.APART)
    return next(blockers, None) or next(withheld, None)


@once
def error_of_verdicts(runs: Runs) -> float:
    """The error of each verdict on a speed-up: all but one device's own are given together."""
    return of_several(each.speed_up() for each in _others(runs))


def speed_ups_and_repeats(runs: Runs) -> list[tuple[Ratio, int]]:
    """The speed-ups of all configurations but one device itself, each with the highest repeat of its configurations."""
    return [(ratio, pairing.highest_repeat) for pairing in _others(runs) if (ratio := pairing.speed_up())]


def _others(runs: Runs) -> list[Pairing]:
    return [pairing for pairing in against_one_device(runs).values() if not _is_own(pairing)]


ENERGY = "gpu_energy_per_sample_j"


def _is_own(pairing: Pairing) -> bool:
    """Whether one device is compared with itself."""
    return all(run.is_baseline for pair in pairing.pairs for run in pair.runs)


def gain(runs: Runs, pairing: Pairing | None, *, devices: int, baseline: bool, disturbed: bool) -> dict[str, Any]:
    """The columns of `summary` that compare with one device.

    `disturbed`: whether others disturbed all runs of a side.
    """
    pairing = pairing or Pairing(())
    steady, energy = pairing.speed_up(), pairing.ratio(ENERGY)
    steady = steady and steady.at(error_of_verdicts(runs))
    whole = pairing.speed_up(with_startup=True)
    verdict = of_speed(steady) if steady else None
    if pairing.blockers():
        verdict = SpeedVerdict.NOT_COMPARABLE
    elif disturbed and verdict is None:
        verdict = SpeedVerdict.DISTURBED
    further = steady.further_repeats if steady and verdict is SpeedVerdict.NO_DIFFERENCE and not baseline else None
    columns: dict[str, Any] = {
        "speed_up_pairs": steady.n if steady else 0,
        "verdict": SpeedVerdict.BASELINE.value if baseline else verdict and verdict.value,
        "repeats_to_decide": further and pairing.highest_repeat + 1 + further,
        "efficiency": efficiency(steady.median if steady else None, devices=devices),
        "efficiency_with_startup": efficiency(whole.median if whole else None, devices=devices),
    }
    for name, ratio in (("speed_up", steady), ("energy_ratio", energy)):
        # Against itself every ratio is 1 by construction: an interval would say nothing.
        low, high = (ratio.low, ratio.high) if ratio and not baseline else (None, None)
        columns |= {name: ratio and ratio.median, f"{name}_low": low, f"{name}_high": high}
    return columns
