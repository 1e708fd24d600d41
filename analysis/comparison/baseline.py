"""Every configuration against its baseline: its speed-up, efficiency, energy ratio and verdict."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from analysis import text
from analysis.comparison.campaign import campaign
from analysis.comparison.exclusions import Exclusion
from analysis.comparison.issues import unlike, unlike_probes
from analysis.comparison.notes import Code, Note, Subject
from analysis.comparison.pairing import Pairing, RepeatPair
from analysis.comparison.speed import Speed, columns_of, judged, speed_of
from analysis.comparison.verdict import SpeedVerdict
from analysis.comparison.work import ONE_DEVICE, PROBED
from analysis.metrics.runs import efficiency
from analysis.runs.reader import once
from parallelbench.errors import count_of
from parallelbench.frameworks import FRAMEWORKS

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
    members = found.families[group, framework]
    ones = [each for each in members if each.is_one_device]
    if chosen := found.chosen_among(members):
        return f"no run of {chosen.name} counts, the baseline that was chosen"
    if len(ones) > 1:
        sets = text.listed([each.name for each in ones], sep="; ")
        return (
            f"of one device's sets of options ({sets}) not exactly one shares theirs and counts; --baseline names one"
        )
    others = "no other configuration" if framework == "torch" else f"no other configuration of {framework}"
    strategy = f"strategy={ONE_DEVICE[framework]} " if FRAMEWORKS[framework].tells_training else ""
    return f"{others} that counts did the same work; measure {strategy}devices=1"


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


def stand_ins(runs: Runs) -> list[Note]:
    """The baselines on several devices, why one device is none, and their repeats without a pair."""
    notes, found = _not_followed(runs), campaign(runs)
    for one in (each for each in found.baselines if not each.is_one_device):
        single, failed = found.one_device_of(one), failed_repeats(one)
        chosen = found.chosen_among(found.family_of(one))
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
    found = campaign(runs)
    if found.chosen is not None:
        return []
    reasons = ((family, found.of_sweep(family)[1]) for family in found.families.values())
    return [Note(Code.NOT_FOLLOWED, {"why": why}, subjects_of(found, family)) for family, why in reasons if why]


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
    speeds = judged([speed_of(campaign(runs).pair(fastest, other)) for other in others], fastest_of=among)
    return {other: speed.verdict for other, speed in zip(others, speeds, strict=True)}


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


BESIDE_SPEED_UPS = (Code.APART, Code.ORDER, Code.ABOVE_IDEAL, Code.AT_MEMORY_LIMIT)
"""What is said beside every speed-up; what else limits them is in the warnings."""


def limits(runs: Runs, codes: Collection[Code] | None = None) -> list[Note]:
    """What limits the comparisons with the baselines; None: all that does."""
    found = campaign(runs)
    return [
        note.about(*subjects_of(found, [each]))
        for each, pairing in found.others
        for note in pairing.caveats(per_sample=True)
        if codes is None or note.code in codes
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
def speeds(runs: Runs) -> tuple[Speed | None, ...]:
    """Of each configuration, by its place, how fast it trains beside its baseline, with verdicts that allow for each
    other; None: nothing to compare it with, or none of its runs counts for another reason than others' load.
    """
    found, known = campaign(runs), {}
    for each in found.configurations:
        side = found.baseline_of(each) or found.one_device_of(each)
        disturbed = each.is_disturbed or (side is not None and side.is_disturbed)
        pairing = found.against_baseline(each)
        if pairing or disturbed:
            known[each.place] = speed_of(pairing or Pairing(()), disturbed=disturbed)
    together = dict(zip(known, judged(list(known.values())), strict=True))
    return tuple(together.get(each.place) for each in found.configurations)


def speed_ups(runs: Runs) -> list[tuple[Configuration, Speed, Ratio]]:
    """The configurations but the baselines that have a speed-up."""
    found = zip(campaign(runs).configurations, speeds(runs), strict=True)
    return [
        (each, speed, speed.ratio)
        for each, speed in found
        if speed and speed.ratio and speed.lacks is not SpeedVerdict.BASELINE
    ]


ENERGY = "gpu_energy_per_sample_j"


def gain(runs: Runs, configuration: Configuration) -> dict[str, Any]:
    """The columns of `summary` that compare with the baseline."""
    found, speed = campaign(runs), speeds(runs)[configuration.place]
    baseline, pairing = found.baseline_of(configuration), found.against_baseline(configuration)
    is_own = baseline is configuration
    steady = speed.columns("speed_up") if speed else columns_of("speed_up", None)
    energy, whole = (pairing.ratio(ENERGY), pairing.speed_up(with_startup=True)) if pairing else (None, None)
    more = configuration.devices / baseline.devices if baseline and found.tells_scaling(configuration) else None
    efficiencies = {
        name.replace("speed_up", "efficiency"): efficiency(value, times_devices=more) for name, value in steady.items()
    }
    return {
        "baseline": baseline and baseline.name,
        "baseline_devices": baseline and baseline.devices,
        "baseline_failed": None if is_own else failed_repeats(baseline),
        "speed_up_pairs": speed.pairs if speed else 0,
        "verdict": speed and speed.verdict.value,
        "repeats_to_decide": speed and speed.repeats_to_decide,
        "efficiency_with_startup": efficiency(whole.median if whole else None, times_devices=more),
        **steady,
        **efficiencies,
        **columns_of("energy_ratio", energy, of_itself=is_own),
    }
