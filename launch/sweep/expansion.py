"""Expand a sweep into runs: the blocks' products and side-by-side lists, less exclusions, times the repeats.

Hydra composes once per file that is chosen; other keys are set afterwards.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from launch.sweep.compose import (
    NOTHING,
    Extension,
    Plain,
    compose_plain,
    group_choices,
    keeps_to_its_node,
    parse,
    resolve,
    values_of,
)
from launch.sweep.habits import unknown_key
from launch.sweep.points import Point, check_exclusions, check_place, points_of, refuse_places, without
from launch.sweep.sources import Sources
from parallelbench.config.build import build, from_mapping
from parallelbench.config.check import check_fit
from parallelbench.config.identity import run_id
from parallelbench.config.run import Sweep
from parallelbench.config.structure import structure
from parallelbench.errors import ConfigError, Refusals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from parallelbench.config.components import Strategy
    from parallelbench.config.run import RunConfig

    Tell = Callable[[str], object]

Choices = tuple[tuple[str, str], ...]
"""Groups, and the name of the file that is chosen for each."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep, and the overrides that lead to it."""

    run: RunConfig
    overrides: list[str]
    tune: bool = False
    """Whether a trial chooses the keys that no override sets."""


def one_run(
    overrides: Sequence[str], extension: Extension = NOTHING, *, instead: str = "use `parallelbench submit`"
) -> PlannedRun:
    """The single run that the overrides describe; raises `ConfigError` for a choice list or a sweep file.

    `instead` is the advice for several runs.
    """
    swept = [override for override in parse(overrides, extension.conf) if override.is_sweep_override()]
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
    axis. `tell` is called with a line for each configuration that `sweep.unfit` leaves out. Raises `ConfigError` for
    anything that is not valid.
    """
    parsed = parse(_as_published(overrides, extension.conf), extension.conf)
    fixed = [str(override.input_line) for override in parsed if not override.is_sweep_override()]
    axes = {override.key_or_group: values_of(override) for override in parsed if override.is_sweep_override()}
    if "sweep" in axes:
        raise ConfigError(f"sweep={','.join(map(str, axes['sweep']))} names several sweeps: choose one at a time")
    refuse_places(axes)
    composer = _Composer(fixed, extension, later=[key for key in axes if key not in group_choices(extension.conf)])
    sweep: Sweep = structure(composer.sweep(), Sweep, "sweep")
    given = {override.key_or_group: values_of(override) for override in parsed}
    for block in sweep.blocks:
        refuse_places(block.grid | block.zip)
        check_exclusions(block, given, groups=group_choices(extension.conf), sweep=sweep.name)
    points = [point for block in sweep.blocks for point in points_of(without(block, set(given)), axes)]
    return _ordered(sweep, composer, points, tell)


def _as_published(overrides: Sequence[str], conf: Path | None) -> list[str]:
    """The overrides; `faithful=true` becomes the name of the sweep's twin, which repeats the publication exactly."""
    rest = [text for text in overrides if not text.startswith("faithful=")]
    values = [text.partition("=")[2].lower() for text in overrides if text.startswith("faithful=")]
    if any(value not in ("true", "false") for value in values):
        raise ConfigError(f"faithful={values[-1]}: expected true or false")
    if values[-1:] != ["true"]:
        return rest
    sweeps = group_choices(conf)["sweep"]
    twins = {name: f"sweep={name}_faithful" for name in sweeps if f"{name}_faithful" in sweeps}
    named = [text.partition("=")[2] for text in rest if text.startswith("sweep=")]
    name = named[-1] if named else "adhoc"
    if f"sweep={name}" in twins.values():
        return rest
    if name not in twins:
        raise ConfigError(
            f"faithful=true has no meaning for sweep={name}: it is for {', '.join(twins)}, which differ "
            "from what was published"
        )
    return [twins[name] if text.startswith("sweep=") else text for text in rest]


def _ordered(sweep: Sweep, composer: _Composer, points: list[Point], tell: Tell) -> list[PlannedRun]:
    planned: dict[tuple[str, bool], PlannedRun] = {}
    left_out: dict[str, None] = {}
    sources, refused = Sources(composer.extension), Refusals()
    for point in points:
        composer.ready(point)  # before the runs are looked at: what can't be composed refuses all alike
    for repeat in range(sweep.repeats):
        order = list(points)
        if sweep.order == "interleaved":
            random.Random(f"{sweep.name} {repeat}").shuffle(order)
        for point in order:
            with refused:
                plain = composer.apply(point)
                plain["repeat"] = structure(plain.get("repeat"), int, "repeat") + repeat
                tune = structure(plain.get("tune"), bool, "tune")
                run = _fitting(plain, point, sweep, composer.extension.plugin)
                if isinstance(run, str):
                    left_out[run] = None
                    continue
                run = sources.given_to(run)
                _check_setup(run, composer.extension)
                overrides = [*composer.fixed, *_as_overrides(point, plain["repeat"])]
                same = planned.setdefault((run_id(run), tune), PlannedRun(run, overrides, tune))
                check_place(run, same.run, next(iter(planned.values())).run)
        refused.raise_any()
    if left_out and not planned:
        raise ConfigError("\n".join([f"sweep={sweep.name} has no configuration that fits:", *left_out]))
    for line in left_out:
        tell(line)
    return list(planned.values())


def _fitting(plain: Plain, point: Point, sweep: Sweep, plugin: str | None) -> RunConfig | str:
    """The run of a point, or a line that says why the sweep leaves it out; raises `ConfigError` unless it does."""
    try:
        run = _on_one_device(from_mapping(plain, plugin), point)
        if sweep.unfit == "left_out":
            check_fit(run, run.site.device if run.device == "auto" else run.device)
    except ConfigError as error:
        if sweep.unfit != "left_out":
            raise
        return f"left out, {plain['strategy']['name']} × {plain['devices']}: {error}"
    return run


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


def _on_one_device(run: RunConfig, point: Point) -> RunConfig:
    """A sweep over `devices` replaces a strategy that needs several devices by `single` at one device."""
    if run.devices > 1 or "devices" not in point:
        return run
    try:
        run.strategy.check(run, "cpu")
    except ConfigError:
        return msgspec.structs.replace(run, strategy=single())
    return run


@cache
def single() -> Strategy:
    """The strategy of one device."""
    strategy: Strategy = build(compose_plain(["strategy=single"])["strategy"], "strategy")
    return strategy


def _as_overrides(point: Point, repeat: int) -> list[str]:
    return [*(f"{key}={_as_hydra(value)}" for key, value in point.items()), f"repeat={repeat}"]


def _as_hydra(value: Any) -> str:
    """JSON, except that Hydra's grammar has no quotes around the keys of a map."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_as_hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_as_hydra, value)) + "]"
    return msgspec.json.encode(value).decode()


class _Composer:
    """Plain configurations of points; composes each choice of a group file once."""

    def __init__(self, fixed: list[str], extension: Extension, *, later: Sequence[str] = ()) -> None:
        self.fixed, self.extension, self._later = fixed, extension, later
        self._groups = group_choices(extension.conf)
        self._composed: dict[Choices, Plain] = {}
        self._ready: dict[Choices, _Ready] = {}
        self._first: dict[tuple[str, ...], Choices] = {}

    def sweep(self) -> Any:
        """The node `sweep`. Other keys are ignored where they belong to group files that only its points choose."""
        try:
            return resolve(self._hydra(())).get("sweep")
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
                    _set(plain, key, value, self.extension.conf)
        refused.raise_any()
        return resolve(plain) if ready.refers or "${" in str(point) else plain

    def ready(self, point: Point) -> _Ready:
        """What all points have in common that choose the same files."""
        choices_of = tuple((key, str(value)) for key, value in point.items() if key in self._groups)
        return self._ready.get(choices_of) or self._ready.setdefault(choices_of, self._prepared(choices_of))

    def _prepared(self, chosen: Choices) -> _Ready:
        plain = dict(self._node_by_node(chosen))
        plain["sweep_name"] = plain.pop("sweep")["name"]
        return _Ready(plain, "${" in str(plain))

    def _node_by_node(self, chosen: Choices) -> Plain:
        """What Hydra composes for these choices.

        Files that keep to their node can't see each other: the node is taken from a composition where, of the choices
        of the first point, only this one is another. So 4 models and 5 strategies need 8 compositions, not 20.
        """
        first = self._first.setdefault(tuple(group for group, _ in chosen), chosen)
        if not all(keeps_to_its_node(*choice, self.extension.conf) for choice in {*chosen, *first}):
            return self._hydra(chosen)
        plain = dict(self._hydra(first))
        for place, choice in enumerate(chosen):
            plain[choice[0]] = self._hydra((*first[:place], choice, *first[place + 1 :]))[choice[0]]
        return plain

    def _hydra(self, chosen: Choices) -> Plain:
        if chosen not in self._composed:
            texts = [f"{group}={name}" for group, name in chosen]
            parse(texts, self.extension.conf)
            self._composed[chosen] = compose_plain([*self.fixed, *texts], self.extension.conf, later=self._later)
        return self._composed[chosen]


@dataclass(frozen=True)
class _Ready:
    """A composed configuration without its sweep."""

    plain: Plain
    refers: bool
    """Whether it has references (`${…}`) that the keys of a point may change."""


def _set(plain: Plain, key: str, value: Any, conf: Path | None = None) -> None:
    """Set a key of a configuration whose nodes others share: those on the way are copied."""
    *parents, last = key.split(".")
    node: Any = plain
    for part in [*parents, last]:
        if not isinstance(node, dict) or part not in node:
            raise ConfigError(unknown_key(key, plain, conf))
        if part is not last:
            node[part] = dict(node[part]) if isinstance(node[part], dict) else node[part]
            node = node[part]
    node[last] = value
