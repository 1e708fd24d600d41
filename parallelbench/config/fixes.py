"""What to choose where a run is refused: neighbours of the keys that it is about, nearest first, each of them tried."""

from __future__ import annotations

import itertools
from contextlib import suppress
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.config.build import COMPONENTS, build, build_launcher, load_yaml
from parallelbench.config.run import Settings
from parallelbench.config.structure import fits, listed
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from parallelbench.config.rules import Refusal
    from parallelbench.config.run import RunConfig
    from parallelbench.config.structure import Component

    Judge = Callable[[RunConfig, str], Iterable[Refusal]]
    Trial = tuple[str, tuple[RunConfig, str], list[Refusal]]


MOST = 2
"""Fixes that are proposed where many would do."""
_FURTHER = 2
"""Refusals that may come to light behind others."""
_REACH = 64
"""Whole numbers up to so far from one are tried in its place, besides multiples and divisors of the run's sizes."""


def fixes(run: RunConfig, device_type: str, refused: Sequence[Refusal], judge: Judge) -> list[list[str]]:
    """What to choose for each refusal, as overrides: at most two, of which each is accepted; none where none is found.

    Where there are several refusals, or one that no single key mends, one for each: together they are accepted. Where
    one mends others too, these have none.
    """
    if len(refused) == 1:
        good = (fix for fix, _, left in _tried(run, device_type, refused[0], judge) if not left)
        if found := list(itertools.islice(good, MOST)):
            return [found]
    lines: dict[Refusal, dict[str, str]] = {refusal: {} for refusal in refused}
    here, left, line = (run, device_type), list(refused), refused[0]
    for _ in range(len(refused) + _FURTHER):
        line = left[0] if left[0] in lines else line  # else it follows from the fix before
        nearer = _nearer(left, _tried(*here, left[0], judge))
        if nearer is None:
            break
        fix, here, left = nearer
        for override in fix.split():
            key = override.partition("=")[0]
            for overrides in lines.values():  # what was chosen before, of options of a component that is replaced too
                for earlier in [each for each in overrides if f"{each}.".startswith(f"{key}.")]:
                    del overrides[earlier]
            lines[line][key] = override
        if not left:
            return [[" ".join(overrides.values())] if overrides else [] for overrides in lines.values()]
    return [[] for _ in refused]


def _tried(run: RunConfig, device_type: str, refusal: Refusal, judge: Judge) -> Iterator[Trial]:
    """What may mend a refusal, nearest first, with the run that it makes and all that refuses it."""
    for fix in _in_turn(run, refusal.keys):
        if other := _applied(run, device_type, fix):
            yield fix, other, list(judge(*other))


def _nearer(left: Sequence[Refusal], trials: Iterable[Trial]) -> Trial | None:
    """The first that leaves fewer refusals, or else the first that leaves others: what was hidden behind the first."""
    others = None
    for trial in trials:
        if len(trial[2]) < len(left):
            return trial
        if others is None and left[0].keys not in [each.keys for each in trial[2]]:
            others = trial
    return others


def in_words(chosen: Sequence[str]) -> str:
    """ "batch_size=94 or 96", or "strategy.shard=2, or devices=8"."""
    keys = {fix.partition("=")[0] for fix in chosen}
    if len(keys) == 1 and not any(" " in fix for fix in chosen):
        return f"{keys.pop()}={' or '.join(fix.partition('=')[2] for fix in chosen)}"
    return ", or ".join(chosen)


def _in_turn(run: RunConfig, keys: Sequence[str]) -> Iterator[str]:
    """What to try: one key after the other, each once."""
    seen = set[str]()
    for fix in itertools.chain.from_iterable([key] if "=" in key else _neighbours(run, key) for key in keys):
        if fix not in seen:
            seen.add(fix)
            yield fix


def _neighbours(run: RunConfig, key: str) -> Iterator[str]:
    """Overrides of a key that are valid by themselves, nearest first; none where the run lacks the key."""
    if key in COMPONENTS:
        own = getattr(run, key)
        others = [each for name, each in _shipped(key).items() if name != own.name]
        others.sort(key=lambda each: (-_kinship(each, own), -_abilities(each), -_in_common(each, own), each.name))
        yield from (f"{key}={each.name}" for each in others)
        return
    node, _, option = key.rpartition(".")
    owner = getattr(run, node) if node else run
    cls: Any = type(owner) if node else Settings  # whose annotations name no component
    kind = _kinds(cls).get(option)
    if kind is None:
        return
    value = getattr(owner, option)
    values: list[Any] = [each for each in listed(kind) if each is not value and each != value]
    if fits(_REACH, kind) and not isinstance(value, float):
        values += _numbers_near(run.devices if value is None else value, run)
    elif isinstance(value, float):
        values.append(0.0)
    yield from (f"{key}={_text(each)}" for each in values if fits(each, kind))


def _numbers_near(value: int, run: RunConfig) -> list[int]:
    """Whole numbers that may be taken in the place of one, nearest first."""
    nodes = (run, run.strategy, run.model, run.data)
    fields = [getattr(node, name) for node in nodes for name in node.__struct_fields__]
    sizes = {size for size in fields if type(size) is int and size > 1}
    sizes |= {run.strategy.data_parallel_degree(run), *(size * run.devices for size in sizes)}
    below = [size * (value // size) for size in sizes]
    divisors = [n for size in (run.devices, run.batch_size) for n in range(1, _REACH) if size % n == 0]
    near = {
        *range(value - _REACH, value + _REACH),
        *below,
        *(n + size for n, size in zip(below, sizes, strict=True)),
        *divisors,
    }
    return sorted(near - {value}, key=lambda number: (abs(number - value), number))


def _applied(run: RunConfig, device_type: str, fix: str) -> tuple[RunConfig, str] | None:
    """The run with other choices, and its type of device; None where they can't be made."""
    for override in fix.split():
        key, _, text = override.partition("=")
        node, _, option = key.rpartition(".")
        try:
            value = _shipped(key)[text] if key in _GROUPS else _value(text)
            changed = msgspec.structs.replace(getattr(run, node), **{option: value}) if node else value
            run = msgspec.structs.replace(run, **{node or option: changed})
        except (ConfigError, KeyError):
            return None
        device_type = text if key == "device" and text != "auto" else device_type
    return run, device_type


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _kinship(one: object, other: object) -> int:
    """How many classes two components have in common."""
    return len({*type(one).__mro__} & {*type(other).__mro__})


def _in_common(one: Component, other: Component) -> int:
    """How many options two components have alike."""
    return sum(getattr(one, name) == getattr(other, name, None) for name in one.__struct_fields__)


def _abilities(component: object) -> int:
    """How much a strategy can do: of equally near ones those that take most are tried first."""
    able = ("can_be_captured", "evaluates_repeatedly", "takes_own_loss", "updates_as_asked")
    return sum(getattr(component, ability, False) for ability in able)


@cache
def _kinds(cls: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(cls)}


_GROUPS = (*COMPONENTS, "launcher")


@cache
def _shipped(group: str) -> dict[str, Any]:
    """The components of a folder of conf/ as their files have them, without those that need options of one's own."""
    found, folder = dict[str, Any](), resources.files("conf") / group
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            with suppress(ConfigError):
                node = load_yaml(file.read_bytes())
                component = build_launcher(node, None) if group == "launcher" else build(node, group)
                found[file.name.removesuffix(".yaml")] = component
    return found
