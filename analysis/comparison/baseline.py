"""Every configuration against its baseline: its speed-up, efficiency, energy ratio and verdict."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from analysis import text
from analysis.comparison.campaign import campaign
from analysis.comparison.exclusions import Exclusion
from analysis.comparison.issues import unlike, unlike_probes
from analysis.comparison.notes import Code, Note, Subject, write
from analysis.comparison.pairing import Pairing, RepeatPair
from analysis.comparison.ratio import of_several
from analysis.comparison.verdict import SpeedVerdict, of_speed
from analysis.comparison.work import ONE_DEVICE, PROBED
from analysis.metrics.runs import efficiency
from analysis.runs.reader import once
from parallelbench.errors import count_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from analysis.comparison.campaign import Campaign, Configuration
    from analysis.comparison.ratio import Ratio
    from analysis.runs.reader import Runs


def subjects_of(found: Campaign, configurations: Iterable[Configuration]) -> tuple[Subject, ...]:
    """Configurations as notes name them."""
    several = len(found.groups) > 1
    return tuple(Subject(each.name, each.group if several else "") for each in configurations)


def without_baseline(runs: Runs) -> list[Note]:
    """The configurations that are compared with nothing, and why."""
    found = campaign(runs)
    lost: dict[tuple[str, str], list[Configuration]] = defaultdict(list)
    for each in found.counted:
        if found.baseline_of(each) is None:
            lost[each.group, each.framework].append(each)
    return [
        Note(Code.NO_BASELINE, {"why": _why_without(found, *key)}, subjects_of(found, members))
        for key, members in lost.items()
    ]


def _why_without(found: Campaign, group: str, framework: str) -> str:
    members = [each for each in found.groups[group] if each.framework == framework]
    ones = [each for each in members if each.is_one_device]
    if chosen := found.chosen_among(members):
        return f"no run of {chosen.name} counts, the baseline that was chosen"
    if len(ones) > 1:
        sets = text.listed([each.name for each in ones], sep="; ")
        return (
            f"of one device's sets of options ({sets}) not exactly one shares theirs and counts; --baseline names one"
        )
    others = "no other configuration" if framework == "torch" else f"no other configuration of {framework}"
    strategy = "" if framework == "program" else f"strategy={ONE_DEVICE[framework]} "
    return f"{others} that counts did the same work; measure {strategy}devices=1"


def stand_ins(runs: Runs) -> list[tuple[Configuration, Configuration | None]]:
    """The baselines on several devices, each with its framework's configuration on one device, if there is any."""
    found = campaign(runs)
    return [(one, found.one_device_of(one)) for one in found.baselines if not one.is_one_device]


ONE_DEVICE_IN_WORDS = "one device"


def in_words(name: str | None, *, named: bool = False) -> str:
    """What sentences call a baseline: "one device" for a framework's training on one device without options, unless it
    is to be `named`, and "the baseline" where several are meant (None).
    """
    is_one = name in {f"{strategy} × 1" for strategy in ONE_DEVICE.values()}
    return "the baseline" if name is None else ONE_DEVICE_IN_WORDS if is_one and not named else name


def baseline_in_words(runs: Runs) -> str:
    """What sentences about all configurations call what they are compared with."""
    ones = campaign(runs).baselines
    names = {one.name for one in ones}
    if all(one.is_one_device for one in ones):
        return ONE_DEVICE_IN_WORDS
    return in_words(names.pop() if len(names) == 1 else None)


def stand_ins_in_words(runs: Runs) -> list[str]:
    """Why speed-ups are not over one device: a sentence for each such baseline, with its repeats without a pair."""
    return write(stand_in_notes(runs))


def stand_in_notes(runs: Runs) -> list[Note]:
    """The baselines on several devices, why one device is none, and their repeats without a pair."""
    notes, found = _not_followed(runs), campaign(runs)
    for one, single in stand_ins(runs):
        failed = failed_repeats(one)
        chosen = found.chosen_among([each for each in found.groups[one.group] if each.framework == one.framework])
        lost = f". Of the repeats of {one.name}, {failed}: left out" if failed else ""
        if chosen is one:
            why = "which was chosen" if single and single.counts else f"which was chosen: {why_not_one_device(single)}"
        else:
            why = f"the first one on the fewest devices that count, as {why_not_one_device(single)}"
        why = f"{why}{lost}"
        notes.append(Note(Code.STAND_IN, {"why": why}, subjects_of(found, [one])))
    return notes


def _not_followed(runs: Runs) -> list[Note]:
    """The works in which the baseline that their sweep names can't be followed."""
    found, notes = campaign(runs), []
    if found.chosen is not None:
        return []
    for members in found.groups.values():
        for framework in dict.fromkeys(each.framework for each in members):
            alike = [each for each in members if each.framework == framework]
            if why := found.of_sweep(alike)[1]:
                notes.append(Note(Code.NOT_FOLLOWED, {"why": why}, subjects_of(found, alike)))
    return notes


def why_not_one_device(one: Configuration | None) -> str:
    """Why one device is no baseline: "single × 1 ran out of memory in 6 of 6 repeats"."""
    if one is None:
        return "one device was not measured"
    if Exclusion.OOM.value in one.failed and not one.counts:
        failed = len(one.failed[Exclusion.OOM.value])
        ended = sum(len(repeats) for exclusion, repeats in one.failed.items() if exclusion != Exclusion.NO_RESULT.value)
        return f"{one.name} ran out of memory in {failed} of {count_of(ended, 'repeat')}"
    reasons = ", ".join(f"{len(repeats)} {exclusion}" for exclusion, repeats in one.failed.items())
    return f"no run of {one.name} counts ({reasons})"


def failed_repeats(baseline: Configuration | None) -> str | None:
    """Repeats of a baseline that have no pair: "2 of 6 oom"; None where all count."""
    if baseline is None or not baseline.failed or not baseline.counts:
        return None
    whole = len({run.repeat for run in baseline.every})
    left = {
        exclusion: [repeat for repeat in repeats if repeat not in baseline.runs]
        for exclusion, repeats in baseline.failed.items()
    }
    told = [f"{len(repeats)} of {whole} {exclusion}" for exclusion, repeats in left.items() if repeats]
    return ", ".join(told) or None


def beside_fastest(
    runs: Runs, fastest: Configuration, others: Sequence[Configuration], *, among: int
) -> dict[Configuration, SpeedVerdict]:
    """Other configurations of the same work → the verdict of their own pairs with the fastest, which was chosen `among`
    so many by the same runs.

    Two intervals beside one device may overlap where every pair of the two says the same.
    """
    pairings = {other: campaign(runs).pair(fastest, other) for other in others}
    ratios = {other: None if pairing.blockers() else pairing.speed_up() for other, pairing in pairings.items()}
    error = of_several(ratios.values(), fastest_of=among)
    return {
        other: SpeedVerdict.NOT_COMPARABLE if pairings[other].blockers() else of_speed(ratio and ratio.at(error))
        for other, ratio in ratios.items()
    }


def refused(runs: Runs, *, brief: bool = False) -> list[str]:
    """What is not compared with its baseline, with what differs and, unless `brief`, details and remedies, in
    sentences.
    """
    return write(refusals(runs), brief=brief)


def refusals(runs: Runs) -> list[Note]:
    """What is not compared with its baseline, and why.

    `compare` judges all groups of a configuration at once, so that the keys of all are named.
    """
    found = campaign(runs)
    keys: dict[str, dict[str, None]] = defaultdict(dict)
    for each, pairing in found.others:
        keys[each.name] |= dict.fromkeys(pairing.unlike_environments)
    notes = []
    for each, pairing in found.others:
        for note in pairing.blockers():
            is_unlike = note.code in (Code.ENVIRONMENT, Code.MACHINES)
            why = unlike(pairing.unlike_environments, tuple(keys[each.name])) if is_unlike else note
            values = {"baseline": str(found.baseline_of(each)), "why": why}
            notes.append(Note(Code.REFUSED, values, subjects_of(found, [each])))
    return notes


LIMITS = (Code.APART, Code.ORDER, Code.ABOVE_IDEAL, Code.AT_MEMORY_LIMIT)
"""What is said beside every speed-up; what else limits them is in the warnings."""


def limited(runs: Runs, codes: Collection[Code] = LIMITS, *, brief: bool = False) -> list[str]:
    """What limits the comparisons with the baselines, in sentences, each with the configurations that it is true of;
    `brief`: without causes and remedies.
    """
    return write((note for note in limits(runs) if note.code in codes), brief=brief)


def limits(runs: Runs) -> list[Note]:
    """What limits the comparisons with the baselines."""
    found = campaign(runs)
    return [
        note.about(*subjects_of(found, [each]))
        for each, pairing in found.others
        for note in pairing.caveats(per_sample=True)
    ]


def reported_differences(runs: Runs) -> set[str]:
    """The entries of the environment that differ between paired runs: a blocker or a caveat says so."""
    pairings = [pairing for _, pairing in campaign(runs).others]
    return {key for pairing in pairings for key in (*pairing.reported, *pairing.unlike_environments)}


@once
def unlike_groups(runs: Runs) -> dict[str, Note]:
    """Group → why its configurations can't be ranked: what blocks a comparison of any two, or withholds its verdict."""
    found = campaign(runs)
    notes = {group: _unlike(runs, [each for each in of if each.counts]) for group, of in found.groups.items()}
    return {group: note for group, note in notes.items() if note}


def _unlike(runs: Runs, configurations: list[Configuration]) -> Note | None:
    if not configurations:
        return None
    first = campaign(runs).baseline_of(configurations[0]) or configurations[0]
    others = [each for each in configurations if each is not first]
    sides = [list(each.runs.values()) for each in (first, *others)]
    every = [run for side in sides for run in side]
    alike = Pairing(tuple(RepeatPair(run.repeat, (every[0], run)) for run in every[1:]))
    entries = {key: values for key, values in alike.unlike_environments.items() if key not in PROBED}
    if differences := entries | unlike_probes(sides):
        return unlike(differences, tuple(differences))
    pairings = [campaign(runs).pair(first, other) for other in others]
    blockers = (note for pairing in pairings for note in pairing.blockers())
    withheld = (note for pairing in pairings for note in pairing.caveats() if note.code is Code.APART)
    return next(blockers, None) or next(withheld, None)


@once
def error_of_verdicts(runs: Runs) -> float:
    """The error of each verdict on a speed-up: all are given together."""
    return of_several(pairing.speed_up() for _, pairing in campaign(runs).others)


def speed_ups_and_repeats(runs: Runs) -> list[tuple[Ratio, int]]:
    """The speed-ups of all configurations but the baselines, each with the highest repeat of both."""
    pairings = [pairing for _, pairing in campaign(runs).others]
    return [(ratio, pairing.highest_repeat) for pairing in pairings if (ratio := pairing.speed_up())]


ENERGY = "gpu_energy_per_sample_j"


def gain(runs: Runs, configuration: Configuration, *, disturbed: bool) -> dict[str, Any]:
    """The columns of `summary` that compare with the baseline.

    `disturbed`: whether others disturbed all runs of a side.
    """
    found = campaign(runs)
    baseline = found.baseline_of(configuration)
    is_own = baseline is configuration
    pairing = found.against_baseline(configuration) or Pairing(())
    steady, energy = pairing.speed_up(), pairing.ratio(ENERGY)
    steady = steady and steady.at(error_of_verdicts(runs))
    whole = pairing.speed_up(with_startup=True)
    verdict = of_speed(steady) if steady else None
    if pairing.blockers():
        verdict = SpeedVerdict.NOT_COMPARABLE
    elif disturbed and verdict is None:
        verdict = SpeedVerdict.DISTURBED
    further = steady.further_repeats if steady and verdict is SpeedVerdict.NO_DIFFERENCE and not is_own else None
    more = configuration.devices / baseline.devices if baseline else None
    columns: dict[str, Any] = {
        "baseline": baseline and baseline.name,
        "baseline_devices": baseline and baseline.devices,
        "baseline_failed": None if is_own else failed_repeats(baseline),
        "speed_up_pairs": steady.n if steady else 0,
        "verdict": SpeedVerdict.BASELINE.value if is_own else verdict and verdict.value,
        "repeats_to_decide": further and pairing.highest_repeat + 1 + further,
        "efficiency": efficiency(steady.median if steady else None, times_devices=more),
        "efficiency_with_startup": efficiency(whole.median if whole else None, times_devices=more),
    }
    for name, ratio in (("speed_up", steady), ("energy_ratio", energy)):
        # Against itself every ratio is 1 by construction: an interval would say nothing.
        low, high = (ratio.low, ratio.high) if ratio and not is_own else (None, None)
        columns |= {name: ratio and ratio.median, f"{name}_low": low, f"{name}_high": high}
    return columns
