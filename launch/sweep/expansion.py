"""Expand a sweep into runs: the blocks' products and side-by-side lists, less exclusions, times the repeats.

Files are composed once per choice of theirs; other keys are set afterwards.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import shlex
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from launch.launcher import launcher_of
from launch.sweep.compose import (
    NOTHING,
    Extension,
    Plain,
    compose_plain,
    group_choices,
    parse,
    resolve,
    values_of,
)
from launch.sweep.keys import unknown_key
from launch.sweep.program import translated
from parallelbench.config.build import build, from_mapping
from parallelbench.config.identity import PLACES, run_id
from parallelbench.config.plugin import imported_sources, training_plugin
from parallelbench.config.rule import RefusedError
from parallelbench.config.run import Sweep, SweepBlock
from parallelbench.config.run_rules import refusals
from parallelbench.config.structure import structure
from parallelbench.errors import ConfigError, Refusals, choices, one_line
from parallelbench.frameworks import FRAMEWORKS
from parallelbench.results.folder import ASKED

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from launch.launcher import Launcher
    from parallelbench.config.components import Strategy
    from parallelbench.config.rule import Refusal
    from parallelbench.config.run import RunConfig
    from parallelbench.results.folder import RunFolder

    Tell = Callable[[str], object]


Choices = tuple[tuple[str, str], ...]
"""Groups, and the name of the file that is chosen for each."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep, and the overrides that lead to it."""

    run: RunConfig
    overrides: list[str]
    asked: str = field(default="", compare=False)
    """The words that the whole sweep was asked for with, as a shell takes them, but for its repeats."""

    @property
    def recorded(self) -> list[str]:
        """The lines of a run folder's overrides.txt."""
        return [*self.overrides, *([f"{ASKED}{self.asked}"] if self.asked else [])]


def one_run(
    overrides: Sequence[str], extension: Extension = NOTHING, *, instead: str = "use `parallelbench submit`"
) -> PlannedRun:
    """The single run that the overrides describe; raises `ConfigError` for a choice list or a sweep file.

    `instead` is the advice for several runs.
    """
    words = translated(overrides, extension.conf)
    swept = [override for override in parse(words, extension.conf) if override.is_sweep_override()]
    refuse_places({override.key_or_group: values_of(override) for override in swept})
    if lists := [override.input_line for override in swept]:
        raise ConfigError(f"{lists[0]} asks for several runs: {instead}, or choose one value")
    plan = expand(overrides, extension)
    if len(plan) != 1:
        raise ConfigError(f"these overrides ask for {len(plan)} runs: {instead}, or leave out sweep=…")
    return plan[0]


def expand(overrides: Sequence[str], extension: Extension = NOTHING, *, tell: Tell = str) -> list[PlannedRun]:
    """All runs of the sweep that the overrides describe, in the order in which they should run.

    A key on the command line replaces the sweep file's values of that key; a choice list (`devices=1,2`) is one more
    axis. `tell` is called with a line for each configuration that `sweep.unfit` leaves out, and for each strategy of
    one device that stands for others. Raises `ConfigError` for anything that is not valid.
    """
    parsed = parse(translated(overrides, extension.conf), extension.conf)
    fixed = [str(override.input_line) for override in parsed if not override.is_sweep_override()]
    axes = {override.key_or_group: values_of(override) for override in parsed if override.is_sweep_override()}
    if "sweep" in axes:
        raise ConfigError(f"sweep={','.join(map(str, axes['sweep']))} names several sweeps: choose one at a time")
    refuse_places(axes)
    composer = _Composer(fixed, extension, later=[key for key in axes if key not in group_choices(extension.conf)])
    node = composer.sweep()
    if of_block := [key for key in SweepBlock.__struct_fields__ if isinstance(node, dict) and key in node]:
        named = ", ".join(f"{key}: …" for key in of_block)
        raise ConfigError(f"sweep.{of_block[0]} stands in a block: write `blocks: [{{{named}}}]`")
    sweep: Sweep = structure(node, Sweep, "sweep")
    given = {override.key_or_group: values_of(override) for override in parsed}
    for block in sweep.blocks:
        refuse_places(block.grid | block.zip)
        check_exclusions(block, given, groups=group_choices(extension.conf), sweep=sweep.name)
    points = [point for block in sweep.blocks for point in points_of(without(block, set(given)), axes)]
    asked = shlex.join(text for text in overrides if not text.startswith(("sweep.repeats=", "repeat=")))
    return [replace(planned, asked=asked) for planned in _ordered(sweep, composer, points, tell)]


def _ordered(sweep: Sweep, composer: _Composer, points: list[Point], tell: Tell) -> list[PlannedRun]:
    planned: dict[str, PlannedRun] = {}
    fitting = _Fitting(sweep, composer.extension.plugin)
    refused = Refusals()
    places: dict[str, int] = {}
    for place, point in enumerate(points):
        places.setdefault(_without_repeat(point), place)
        composer.ready(point)  # before the runs are looked at: what can't be composed refuses all alike
    for of_round in _rounds(sweep, composer, points):
        for point, repeat in of_round:
            with refused:
                plain = composer.apply(point)
                plain["repeat"] = structure(plain.get("repeat"), int, "repeat") + repeat
                if (run := fitting.run(plain, point)) is None:
                    continue
                run = identified(run)
                place = places[_without_repeat(point)]
                run = msgspec.structs.replace(run, sweep_place=place, sweep_baseline=sweep.baseline)
                _check_setup(run, composer.extension)
                overrides = [*composer.fixed, *_as_overrides(point, plain["repeat"])]
                same = planned.setdefault(run_id(run), PlannedRun(run, overrides))
                check_place(run, same.run, next(iter(planned.values())).run)
        refused.raise_any()
    if fitting.left_out and not planned:
        raise ConfigError("\n".join([f"sweep={sweep.name} has no configuration that fits:", *fitting.left_out]))
    for line in fitting.lines():
        tell(line)
    return list(planned.values())


def _without_repeat(point: Point) -> str:
    return str({key: value for key, value in point.items() if key != "repeat"})


def _rounds(sweep: Sweep, composer: _Composer, points: list[Point]) -> Iterator[list[tuple[Point, int]]]:
    """The points of each round, in order, each with what is added to its own `repeat`.

    Rounds come in pairs: a drawn order, then its reverse. So every configuration runs before every other one as often
    as after it, and a machine that drifts steadily favours none. A round is one repeat, whether `sweep.repeats`, or
    `repeat` asks for it: repeats that are submitted one by one are reversed, too.
    """
    listed = [[(point, repeat) for point in points] for repeat in range(sweep.repeats)]
    if sweep.order == "listed":
        yield from listed
        return
    rounds: dict[int, list[tuple[Point, int]]] = defaultdict(list)
    for point, repeat in itertools.chain(*listed):
        first = point.get("repeat", composer.ready(point).plain.get("repeat"))
        rounds[repeat + (first if isinstance(first, int) else 0)].append((point, repeat))
    for number, order in sorted(rounds.items()):
        pair, is_second = divmod(number, 2)
        configurations = ", ".join(_without_repeat(point) for point, _ in order)
        random.Random(f"{sweep.name} {pair} [{configurations}]").shuffle(order)
        yield order[::-1] if is_second else order


class _Fitting:
    """The runs of a sweep's points, less those that the sweep leaves out; one device's strategy stands for others."""

    def __init__(self, sweep: Sweep, plugin: str | None) -> None:
        self.left_out: dict[str, None] = {}
        """A line for each configuration that was left out."""
        self._leaves_out, self._plugin = sweep.unfit == "left_out", plugin
        self._stands_for: dict[str, dict[str, None]] = {}
        self._launchers: dict[str, Launcher] = {}

    def run(self, plain: Plain, point: Point) -> RunConfig | None:
        """The run of a point; None where the sweep leaves it out. Raises `ConfigError` where it is refused."""
        try:
            run = self._on_one_device(from_mapping(plain, self._plugin), point)
            if self._leaves_out and (refused := self._refusals(run)):
                raise RefusedError(refused)
        except ConfigError as error:
            if not self._leaves_out:
                raise
            line = f"left out, {plain['strategy']['name']} × {plain['devices']}: {one_line(error.reason)}"
            self.left_out[line] = None
            return None
        return run

    def lines(self) -> Iterator[str]:
        """What to tell of the sweep: what stands for what, and what was left out."""
        for name, others in self._stands_for.items():
            need = "needs" if len(others) == 1 else "need"
            yield f"at devices=1, strategy={name} stands for {', '.join(others)}, which {need} several devices"
        yield from self.left_out

    def _on_one_device(self, run: RunConfig, point: Point) -> RunConfig:
        """A sweep over `devices` replaces a strategy that needs several of them by its framework's own at one device.

        It needs several where a refusal at one device is about their number: other refusals hold.
        """
        if run.devices > 1 or "devices" not in point or not any(map(_is_about_devices, self._refusals(run))):
            return run
        alone = one_device(run.strategy)
        self._stands_for.setdefault(alone.name, {})[run.strategy.name] = None
        return msgspec.structs.replace(run, strategy=alone)

    def _refusals(self, run: RunConfig) -> tuple[Refusal, ...]:
        """All that refuses a run on the devices that it will have."""
        device_type: str = run.device
        if device_type == "auto":
            name = run.launcher.name  # of a sweep's runs, which share it: a look at this machine takes time
            launcher = self._launchers.get(name) or self._launchers.setdefault(name, launcher_of(run))
            device_type = launcher.device_type(run)
        return tuple(refusals(run, device_type))


def _is_about_devices(refusal: Refusal) -> bool:
    """Whether another number of devices is among what it proposes."""
    return any(word.partition("=")[0] == "devices" for key in refusal.keys for word in key.split())


def one_device(strategy: Strategy) -> Strategy:
    """The strategy of one device in the same framework, with the options that both have."""
    alone = as_in_file(FRAMEWORKS[strategy.framework].one_device)
    both = {*alone.__struct_fields__} & {*strategy.__struct_fields__} - {"name"}
    return msgspec.structs.replace(alone, **{option: getattr(strategy, option) for option in both})


@cache
def as_in_file(name: str) -> Strategy:
    """A strategy of the suite's with the options of its file."""
    strategy: Strategy = build(compose_plain([f"strategy={name}"])["strategy"], "strategy")
    return strategy


def _check_setup(run: RunConfig, extension: Extension) -> None:
    """Setup lines are shell that all jobs execute, so only the site's file may have them."""
    if run.site.setup and run.site.setup != _setup_of(run.site.name, extension.conf):
        raise ConfigError(
            f"site.setup={run.site.setup} is refused: jobs execute these lines, so only the site's file may have them, "
            "in conf/site/ or in the folder of your own that --conf names"
        )


@cache
def _setup_of(site: str, conf: Path | None) -> list[str] | None:
    """The setup lines that a site's file has by itself."""
    if site not in group_choices(conf)["site"]:
        return None
    setup: list[str] = resolve(compose_plain([f"site={site}"], conf))["site"]["setup"]
    return setup


def _as_overrides(point: Point, repeat: int) -> list[str]:
    return [*(f"{key}={as_hydra(value)}" for key, value in point.items()), f"repeat={repeat}"]


def as_hydra(value: Any) -> str:
    """JSON, except that Hydra's grammar has no quotes around the keys of a map."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_hydra, value)) + "]"
    return msgspec.json.encode(value).decode()


class _Composer:
    """Plain configurations of points; composes each choice of files once."""

    def __init__(self, fixed: list[str], extension: Extension, *, later: Sequence[str] = ()) -> None:
        self.fixed, self.extension, self._later = fixed, extension, later
        self._groups = group_choices(extension.conf)
        self._ready: dict[Choices, _Ready] = {}

    def sweep(self) -> Any:
        """The node `sweep`. Other keys are ignored where they belong to group files that only its points choose."""
        try:
            return resolve(self._composed(())).get("sweep")
        except ConfigError:
            of_sweep = [text for text in self.fixed if re.match(r"[+~]*sweep\b", text)]
            return resolve(compose_plain(of_sweep, self.extension.conf)).get("sweep")

    def apply(self, point: Point) -> Plain:
        """A configuration with the point's keys set and without the sweep; shares nodes with others: don't write."""
        ready, refused = self.ready(point), Refusals()
        plain = dict(ready.plain)
        for key, value in point.items():
            if key not in self._groups:
                with refused:
                    _set(plain, key, value)
        refused.raise_any()
        return resolve(plain) if ready.refers or "${" in str(point) else plain

    def ready(self, point: Point) -> _Ready:
        """What all points have in common that choose the same files."""
        choices_of = tuple((key, str(value)) for key, value in point.items() if key in self._groups)
        return self._ready.get(choices_of) or self._ready.setdefault(choices_of, self._prepared(choices_of))

    def _prepared(self, chosen: Choices) -> _Ready:
        plain = self._composed(chosen)
        plain["sweep_name"] = plain.pop("sweep")["name"]
        return _Ready(plain, "${" in str(plain))

    def _composed(self, chosen: Choices) -> Plain:
        texts = [f"{group}={name}" for group, name in chosen]
        parse(texts, self.extension.conf)
        return compose_plain([*self.fixed, *texts], self.extension.conf, later=self._later)


@dataclass(frozen=True)
class _Ready:
    """A composed configuration without its sweep."""

    plain: Plain
    refers: bool
    """Whether it has references (`${…}`) that the keys of a point may change."""


def _set(plain: Plain, key: str, value: Any) -> None:
    """Set a key of a configuration whose nodes others share: those on the way are copied."""
    *parents, last = key.split(".")
    node: Any = plain
    for part in [*parents, last]:
        if not isinstance(node, dict) or part not in node:
            raise ConfigError(unknown_key(key, plain))
        if part is not last:
            node[part] = dict(node[part]) if isinstance(node[part], dict) else node[part]
            node = node[part]
    node[last] = value


Point = dict[str, Any]
"""The keys that one configuration of a sweep sets."""


def without(block: SweepBlock, given: set[str]) -> SweepBlock:
    """The block without the keys that the command line sets."""
    grid = {key: values for key, values in block.grid.items() if key not in given}
    side = {key: values for key, values in block.zip.items() if key not in given}
    return msgspec.structs.replace(block, grid=grid, zip=side)


def check_exclusions(
    block: SweepBlock, given: Mapping[str, list[Any]], *, groups: Mapping[str, Sequence[str]], sweep: str
) -> None:
    """Refuse what a block excludes and could never have: a key or a value that is no configuration's.

    The block is as its file has it, and `given` has the values of the command line: what only these narrowed may match
    nothing. A key that only the command line has may have any value there, of a group of files those that exist.
    """
    axes = {key: value if isinstance(value, list) else [value] for key, value in block.grid.items()} | block.zip
    refused = Refusals()
    for key, value in (item for entry in block.exclude for item in entry.items()):
        where = f"sweep={sweep}: exclude: {key}={_written(value)}"
        if key not in axes and key not in given:
            valid = choices(key, axes) if axes else "its block has neither grid nor zip"
            refused.add(f"{where}: no configuration of its block sets {key}: {valid}")
        elif key in axes and value not in (there := [*axes[key], *given.get(key, [])]):
            refused.add(f"{where}: no configuration of its block has this value: {_nearest(value, there)}")
        elif key not in axes and value not in (there := [*groups.get(key, [value]), *given[key]]):
            refused.add(f"{where} is no choice: {_nearest(value, there)}")
    refused.raise_any()


def refuse_places(axes: Mapping[str, Any]) -> None:
    """Refuse several values for what says where runs take place: no result would tell them apart."""
    refused = Refusals()
    for key, values in axes.items():
        if key.partition(".")[0] in (*PLACES, "sweep") and isinstance(values, list) and len(values) > 1:
            text = ",".join(map(str, values))
            quoted = "" if key in ("launcher", "site") else f"""; if it is one value, quote it: '{key}="{text}"'"""
            refused.add(
                f"{key}={text} can't be swept: all runs of a sweep share their launcher, site and folders: give a "
                f"command for each value{quoted}"
            )
    refused.raise_any()


def check_place(run: RunConfig, planned: RunConfig, first: RunConfig) -> None:
    """Refuse blocks that disagree about where runs take place.

    `planned` is the same run as some block asks for it: chance would choose one of them. `first`: of the sweep.
    """
    differing = [key for key in (*PLACES, "measure") if getattr(run, key) != getattr(planned, key)]
    places = ((each.launcher.name, each.site.name, each.results, each.sweep_name) for each in (run, first))
    names = ("launcher", "site", "results", "sweep.name")
    differing += [key for key, here, there in zip(names, *places, strict=True) if here != there]
    if differing:
        raise ConfigError(
            f"blocks of the sweep give {' and '.join(dict.fromkeys(differing))} differently, which no result would "
            "tell apart: give them once, for the sweep"
        )


def _nearest(value: Any, there: list[Any]) -> str:
    return choices(_written(value), map(_written, there))


def _written(value: Any) -> str:
    """As a file has it: `ddp`, `64`, and `"64"` in quotes, which is another value."""
    is_word = isinstance(value, str) and value[:1].isalpha()
    return value if is_word else json.dumps(value, default=str)


def points_of(block: SweepBlock, axes: dict[str, list[Any]]) -> Iterator[Point]:
    """The configurations of a block, each crossed with the axes of the command line."""
    lengths = {key: len(values) for key, values in block.zip.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"sweep: the lists of one zip must be equally long, but are {lengths}")
    grid = {key: values if isinstance(values, list) else [values] for key, values in block.grid.items()} | axes
    rows = [dict(zip(block.zip, row, strict=True)) for row in zip(*block.zip.values(), strict=True)] or [{}]
    for combination in itertools.product(*grid.values()):
        for row in rows:
            point = dict(zip(grid, combination, strict=True)) | row
            if not any(_matches(point, entry) for entry in block.exclude):
                yield point


def _matches(point: Point, entry: Point) -> bool:
    return bool(entry) and all(key in point and point[key] == value for key, value in entry.items())


def identified(run: RunConfig) -> RunConfig:
    """The run with the identity of its own code: the sources of a plugin, or of a program."""
    package = training_plugin(run)
    if package is None:
        return msgspec.structs.replace(run, strategy=run.strategy.identified())
    return msgspec.structs.replace(run, plugin_sources=imported_sources(package))


_IN_NAME = ("data", "model", "strategy", "devices", "repeat")
"""Parts of a run's name."""
_NOT_IDENTITY = ("results", "launcher", "site", "sweep")
"""Keys that are no part of an experiment: the same run may be requested with other values."""


def varying(runs: Sequence[Sequence[str]], *, besides: Collection[str] = ()) -> list[str]:
    """For each run, in one line, its overrides whose keys differ between runs; without the keys in `besides`."""
    counts = Counter(override for overrides in runs for override in set(overrides))
    keys = {override.partition("=")[0] for override, count in counts.items() if count < len(runs)}
    keys = {key for key in keys if not key.startswith("#")}  # what the sweep was asked for with
    keys = {key for key in keys if key not in (*_IN_NAME, *besides) and key.partition(".")[0] not in _NOT_IDENTITY}
    # Quotes are for Hydra. Many runs share an override, so each is formatted once.
    shown = {override: override.replace('"', "") for override in counts if override.partition("=")[0] in keys}
    return [" ".join(shown[override] for override in overrides if override in shown) for overrides in runs]


@cache
def overrides_of(folder: RunFolder) -> Sequence[str]:
    """The overrides that a run was requested with, which never change; empty where they are not recorded."""
    try:
        return (folder.path / "overrides.txt").read_bytes().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ()
