"""The campaign: everything that was measured, as configurations with their repeats. Every answer selects from it.

A configuration is one way to train on one work. It is built once per load; the summary, comparisons, claims, figures
and the next command ask the same objects, so that none can pair runs in a way of its own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from analysis.comparison.exclusions import Exclusion, excluded
from analysis.comparison.pairing import Pairing, paired
from analysis.comparison.run import ComparedRun, compared_runs
from analysis.comparison.work import (
    ONE_DEVICE,
    WHICH_STRATEGY,
    canonical,
    configuration_label,
    is_below,
    labels,
    natural,
    without,
)
from analysis.runs.reader import once
from parallelbench.errors import ConfigError, choices

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from analysis.comparison.work import Work
    from analysis.runs.reader import Runs


@dataclass(frozen=True, slots=True)
class Label:
    """What a configuration is called."""

    group: str
    """Its work: "digits · cnn_small", with the keys that tell it apart from the other works."""
    variant: str
    """Its strategy, with the options that tell it apart from others of that strategy."""
    strategy: str
    devices: int
    nodes: int

    def __str__(self) -> str:
        return configuration_label(self.variant, self.devices, self.nodes)

    @property
    def short(self) -> str:
        """Without options: "ddp × 2"."""
        return configuration_label(self.strategy, self.devices, self.nodes)


@dataclass(frozen=True, eq=False)
class Configuration:
    """One way to train on one work, and all its repeats. Two are equal where they are the same object."""

    place: int
    """Its index in `Campaign.configurations`, which is that of its row in `summary`."""
    definition: Work
    """Dotted key → value of all that defines it, without the repeat."""
    label: Label
    framework: str
    sweep_place: int
    """Where the sweep's file names it first."""
    every: tuple[ComparedRun, ...]
    """All its runs, in the order of their repeats."""
    runs: Mapping[int, ComparedRun]
    """Repeat → the run that counts."""
    failed: Mapping[str, tuple[int, ...]]
    """Value of an `Exclusion` → the repeats whose runs do not count for this reason."""

    def __str__(self) -> str:
        return str(self.label)

    @property
    def group(self) -> str:
        """The label of its work."""
        return self.label.group

    @property
    def name(self) -> str:
        """ "ddp × 2, bucket mib 25": unique within its group."""
        return str(self.label)

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.label.devices

    @property
    def counts(self) -> bool:
        """Whether any of its runs counts."""
        return bool(self.runs)

    @property
    def is_disturbed(self) -> bool:
        """Whether none of its runs counts, and others disturbed some: their times are shown, and compared with none."""
        return not self.counts and Exclusion.DISTURBED.value in self.failed

    @property
    def is_one_device(self) -> bool:
        """Whether it is its framework's strategy on one device."""
        return self.every[0].is_one_device


@dataclass(frozen=True, eq=False)
class Campaign:
    """All configurations of some runs, and which of them each is compared with."""

    configurations: tuple[Configuration, ...]
    """By group; one device first, then by devices and name."""
    chosen: str | None = None
    """The baseline that was asked for by name; None: the sweep's own, or the default."""
    _pairings: dict[tuple[int, int], Pairing] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def groups(self) -> dict[str, tuple[Configuration, ...]]:
        """Label of a work → its configurations, in order."""
        members: dict[str, list[Configuration]] = defaultdict(list)
        for each in self.configurations:
            members[each.group].append(each)
        return {group: tuple(of_group) for group, of_group in members.items()}

    @cached_property
    def families(self) -> dict[tuple[str, str], tuple[Configuration, ...]]:
        """Label of a work and framework → its configurations, in order: those that may share a baseline, since the
        ratio of two frameworks is no speed-up by devices.
        """
        members: dict[tuple[str, str], list[Configuration]] = defaultdict(list)
        for each in self.configurations:
            members[each.group, each.framework].append(each)
        return {key: tuple(family) for key, family in members.items()}

    def family_of(self, configuration: Configuration) -> tuple[Configuration, ...]:
        """All of its work and framework, itself included."""
        return self.families[configuration.group, configuration.framework]

    @property
    def counted(self) -> tuple[Configuration, ...]:
        """Those of which any run counts."""
        return tuple(each for each in self.configurations if each.counts)

    def alike_but(self, keys: Iterable[str]) -> list[list[Configuration]]:
        """Classes of configurations that differ in these keys, or below them, only; in the order of their firsts."""
        roots = tuple(keys)
        classes: dict[str, list[Configuration]] = defaultdict(list)
        for each in self.configurations:
            classes[canonical(without(each.definition, roots))].append(each)
        return list(classes.values())

    def pair(self, one: Configuration, other: Configuration) -> Pairing:
        """The runs of two configurations that count, repeat by repeat; ratios are the second's ÷ the first's."""
        key = one.place, other.place
        if key not in self._pairings:
            self._pairings[key] = paired(one.runs.values(), other.runs.values())
        return self._pairings[key]

    def baseline_of(self, configuration: Configuration) -> Configuration | None:
        """What a configuration is compared with; itself where others are compared with it. None: nothing does the same
        work and counts, or one device's several sets of options leave it open.
        """
        return self._baselines.get(configuration)

    def tells_scaling(self, configuration: Configuration) -> bool:
        """Whether its ratio to its baseline is what further devices gain: that has one device, or trains alike.

        Beside several devices of another strategy, the ratio is of both strategies, too.
        """
        baseline = self.baseline_of(configuration)
        return baseline is not None and (baseline.devices == 1 or baseline.label.variant == configuration.label.variant)

    @cached_property
    def _baselines(self) -> dict[Configuration, Configuration]:
        found: dict[Configuration, Configuration] = {}
        for family in self.families.values():
            found |= self._baselines_among(family)
        return found

    def _baselines_among(self, alike: Sequence[Configuration]) -> dict[Configuration, Configuration]:
        """Of a family."""
        if named := self.chosen_among(alike):
            return dict.fromkeys(alike, named) if named.counts else {}
        ones = [each for each in alike if each.is_one_device]
        has_several_devices = any(each.counts and not each.is_one_device for each in alike)
        if any(one.counts for one in ones) and (has_several_devices or len(ones) == 1):
            return {each: one for each in alike if (one := _its_one_device(each, ones)) and one.counts}
        return dict.fromkeys(alike, fewest) if (fewest := _fewest_devices(alike)) else {}

    def chosen_among(self, alike: Sequence[Configuration]) -> Configuration | None:
        """The one that was asked for by name, or that the sweep names; `ConfigError` where several were asked for."""
        if self.chosen is None:
            return self.of_sweep(alike)[0]
        found = named(alike, self.chosen)
        if len(found) > 1:
            raise _ambiguous(self.chosen, found)
        return found[0] if found else None

    def of_sweep(self, alike: Sequence[Configuration]) -> tuple[Configuration | None, str]:
        """The configuration that `sweep.baseline` of the latest runs names, and else why it is not followed; neither
        where no sweep names one.
        """
        names = dict.fromkeys(each.every[-1].sweep_baseline for each in alike)
        asked = [name for name in names if name]
        if not asked:
            return None, ""
        if len(names) > 1:
            return None, f"{' and '.join(asked)}: not all of these runs are of a sweep that names it"
        found = named(alike, asked[0])
        if len(found) == 1:
            return found[0], ""
        return None, f"{asked[0]}: {'several configurations are' if found else 'no configuration is'} called that"

    def one_device_of(self, configuration: Configuration) -> Configuration | None:
        """Its framework's configuration on one device of the same work, whether any of its runs counts or not."""
        ones = [each for each in self.family_of(configuration) if each.is_one_device]
        return _its_one_device(configuration, ones)

    @cached_property
    def baselines(self) -> tuple[Configuration, ...]:
        """Those that others, or only themselves, are compared with; in order."""
        return tuple(dict.fromkeys(one for each in self.counted if (one := self.baseline_of(each)) is not None))

    @property
    def others(self) -> list[tuple[Configuration, Pairing]]:
        """The configurations that are compared with another one, and their pairings with it."""
        return [
            (each, self.pair(one, each))
            for each in self.configurations
            if (one := self.baseline_of(each)) is not None and one is not each and each.counts
        ]

    def against_baseline(self, configuration: Configuration) -> Pairing | None:
        """Its runs beside those of its baseline; None without one, and where none of its runs counts."""
        one = self.baseline_of(configuration)
        return self.pair(one, configuration) if one is not None and configuration.counts else None


def _its_one_device(configuration: Configuration, ones: Sequence[Configuration]) -> Configuration | None:
    """Of one device's several sets of options, as with and without XLA, the one that shares the configuration's."""
    if configuration.is_one_device:
        return configuration
    alike = [one for one in ones if len(ones) == 1 or _shares_options(configuration, one)]
    return alike[0] if len(alike) == 1 else None


def _fewest_devices(alike: Sequence[Configuration]) -> Configuration | None:
    """The first in the sweep's file among those that count with the fewest devices: never the best one, which would be
    chosen by the measurements that it is then compared by.
    """
    counted = [each for each in alike if each.counts]
    if len(counted) < 2:  # nothing is there to be compared
        return None
    return min(counted, key=lambda each: (each.devices, each.sweep_place, each.place))


def _shares_options(one: Configuration, other: Configuration) -> bool:
    """Whether the options that both strategies have are equal."""
    shared = {key for key in one.definition.keys() & other.definition.keys() if is_below(key, ("strategy",))}
    return all(one.definition[key] == other.definition[key] for key in shared.difference(WHICH_STRATEGY))


def named(configurations: Iterable[Configuration], name: str) -> list[Configuration]:
    """Those of this name: all with its options, or else all of this strategy, devices and nodes. "x" stands for "×"."""
    wanted = _plain_name(name)
    every = list(configurations)
    exact = [each for each in every if _plain_name(each.name) == wanted]
    return exact or [each for each in every if _plain_name(each.label.short) == wanted]


_TIMES = re.compile(r"\s*(?:×|\*|\bx)\s*(?=\d)")


def _plain_name(name: str) -> str:
    """As labels are written, where a user writes "ddp x 4", "ddp x4" or "ddp*4"."""
    head, comma, options = " ".join(name.split()).partition(", ")
    return _TIMES.sub(" × ", head) + comma + options


def _ambiguous(name: str, found: Sequence[Configuration]) -> ConfigError:
    names = "; ".join(each.name for each in found)
    return ConfigError(f'baseline "{name}" is the name of several configurations ({found[0].group}): choose of {names}')


def require_baseline(found: Campaign, name: str) -> None:
    """Raise `ConfigError` where no configuration has this name, or none of its runs counts, or several match."""
    there = [named(members, name) for members in found.groups.values()]
    for of_group in there:
        if len(of_group) > 1:
            raise _ambiguous(name, of_group)
    matches = [each for of_group in there for each in of_group]
    if not matches:
        names = dict.fromkeys(each.name for each in found.configurations)
        raise ConfigError(f'--baseline "{name}": no configuration is called that; {choices(name, names)}')
    if not any(each.counts for each in matches):
        why = "; ".join(
            f"{exclusion} in repeat{'s' if len(repeats) > 1 else ''} {', '.join(map(str, repeats))}"
            for exclusion, repeats in matches[0].failed.items()
        )
        counted = [each.name for each in found.counted]
        raise ConfigError(
            f'--baseline "{name}": none of its runs counts ({why}); {choices(name, dict.fromkeys(counted))}'
        )


@once
def campaign(runs: Runs) -> Campaign:
    """The configurations of these runs."""
    known = compared_runs(runs)
    gone = dict(excluded(runs).select("run_id", "exclusion").rows())
    rows = labels(runs).join(runs.run.select("run_id", "strategy", "devices", "nodes", "repeat"), on="run_id")
    rows = rows.sort(natural("group"), "devices", "configuration", "repeat", maintain_order=True)
    members: dict[tuple[str, str], list[ComparedRun]] = defaultdict(list)
    names: dict[tuple[str, str], Label] = {}
    columns = ("run_id", "group", "configuration", "variant", "strategy", "devices", "nodes")
    for run_id, group, name, *label in rows.select(columns).rows():
        members[group, name].append(known[run_id])
        names.setdefault((group, name), Label(group, *label))
    order = {group: place for place, group in enumerate(dict.fromkeys(group for group, _ in members))}
    keys = sorted(members, key=lambda key: (order[key[0]], not members[key][0].is_one_device))
    frameworks = dict(runs.run.select("run_id", "framework").rows())
    found = (
        _configuration(place, names[key], members[key], gone, _framework(members[key], frameworks))
        for place, key in enumerate(keys)
    )
    return Campaign(tuple(found), runs.baseline)


def _configuration(
    place: int, label: Label, every: Sequence[ComparedRun], gone: Mapping[str, str], framework: str
) -> Configuration:
    failed: dict[str, list[int]] = defaultdict(list)
    for run in every:
        if run.run_id in gone:
            failed[gone[run.run_id]].append(run.repeat)
    counted = {run.repeat: run for run in every if run.run_id not in gone}
    first = next(iter(counted.values()), every[0])
    return Configuration(
        place=place,
        definition=first.definition,
        label=label,
        framework=framework,
        sweep_place=min(run.sweep_place for run in every),
        every=tuple(every),
        runs=counted,
        failed={exclusion: tuple(repeats) for exclusion, repeats in failed.items()},
    )


_OWN = {strategy: framework for framework, strategy in ONE_DEVICE.items()}
"""Strategy on one device → its framework."""


def _framework(every: Sequence[ComparedRun], recorded: Mapping[str, str | None]) -> str:
    """As its runs have recorded; where none has begun, what their strategy says."""
    known = (name for run in every if (name := recorded[run.run_id]) is not None)
    return next(known, _OWN.get(every[0].definition["strategy.name"], "torch"))
