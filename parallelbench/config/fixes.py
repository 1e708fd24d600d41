"""What to choose where a run is refused: neighbours of the keys that it is about, nearest first, each of them tried."""

from __future__ import annotations

import itertools
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.config.build import COMPONENTS, build, build_launcher
from parallelbench.config.rule import Refusal
from parallelbench.config.run import Settings
from parallelbench.config.sites import names_of, shipped
from parallelbench.config.structure import fits, listed
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from parallelbench.config.run import RunConfig
    from parallelbench.config.structure import Component

    Trial = tuple[str, tuple[RunConfig, str], list[Refusal]]


MOST = 2
"""Fixes that are proposed where many would do."""
_FURTHER = 2
"""Refusals that may come to light behind others."""
_REACH = 64
"""Whole numbers up to so far from one are tried in its place, besides multiples and divisors of the run's sizes."""


def fixes(run: RunConfig, device_type: str, refused: Sequence[Refusal]) -> list[list[str]]:
    """What to choose for each refusal, as overrides; none where none is found.

    Of one refusal they are at most two, of which each is accepted. Where no single override mends all, there is one for
    each: together they are accepted, or leave only what has none. Where one mends others too, these have none.
    """
    if found := _single(run, device_type, refused):
        return found
    lines: dict[Refusal, dict[str, str]] = {refusal: {} for refusal in refused}
    stuck = set[Refusal]()
    here, left, line = (run, device_type), list(refused), refused[0]
    for _ in range(len(refused) + _FURTHER):
        wanted = [refusal for refusal in left if refusal not in stuck]
        if not wanted:
            break
        nearer = _nearer(left, wanted[0], _tried(*here, wanted[0]))
        if nearer is None:
            stuck.add(wanted[0])
            continue
        line = wanted[0] if wanted[0] in lines else line  # else it follows from the fix before
        fix, here, left = nearer
        for override in fix.split():
            key = override.partition("=")[0]
            for overrides in lines.values():  # what was chosen before, of options of a component that is replaced too
                for earlier in [each for each in overrides if f"{each}.".startswith(f"{key}.")]:
                    del overrides[earlier]
            lines[line][key] = override
    if any(refusal not in stuck or refusal not in lines for refusal in left):
        return [[] for _ in refused]
    return [[" ".join(overrides.values())] if overrides else [] for overrides in lines.values()]


def accepted(run: RunConfig, device_type: str, fix: str) -> bool:
    """Whether a run is accepted with these overrides."""
    other = _applied(run, device_type, fix)
    return other is not None and _judged(*other) == []


def _single(run: RunConfig, device_type: str, refused: Sequence[Refusal]) -> list[list[str]] | None:
    """What one override mends: one for all; of a single refusal two, of which a second component comes last."""
    for refusal in refused:
        found, more = list[str](), list[str]()
        for key in refusal.keys:
            good = (fix for fix, _, left in _tried(run, device_type, Refusal("", (key,))) if not left)
            of_key = list(itertools.islice(good, MOST))
            found += [fix for fix in (of_key[:1] if key in COMPONENTS else of_key) if fix not in found]
            more += of_key
            if len(found) >= MOST:
                break
        if found:
            chosen = list(dict.fromkeys([*found, *more]))[: MOST if len(refused) == 1 else 1]
            return [chosen if each is refusal else [] for each in refused]
    return None


def _tried(run: RunConfig, device_type: str, refusal: Refusal) -> Iterator[Trial]:
    """What may mend a refusal, nearest first, with the run that it makes and all that refuses it."""
    for fix in dict.fromkeys(fix for key in refusal.keys for fix in ([key] if "=" in key else _neighbours(run, key))):
        other = _applied(run, device_type, fix)
        if other and (left := _judged(*other)) is not None:
            yield fix, other, left


def _judged(run: RunConfig, device_type: str) -> list[Refusal] | None:
    """All that refuses a run; None where a check of somebody's own fails at a value that nobody asked for."""
    from parallelbench.config.run_rules import refusals  # which tells what is found here

    try:
        return list(refusals(run, device_type))
    except Exception:
        return None


def _nearer(left: Sequence[Refusal], target: Refusal, trials: Iterable[Trial]) -> Trial | None:
    """The one that leaves fewest refusals, or else the first that leaves others: what was hidden behind the target."""
    fewest = others = None
    for trial in trials:
        if len(trial[2]) < len(fewest[2] if fewest else left):
            fewest = trial
        if others is None and target.keys not in [each.keys for each in trial[2]]:
            others = trial
    return fewest or others


def in_words(chosen: Sequence[str]) -> str:
    """ "batch_size=94 or 96", or "strategy.shard=2, or devices=8"."""
    keys = {fix.partition("=")[0] for fix in chosen}
    if len(keys) == 1 and not any(" " in fix for fix in chosen):
        return f"{keys.pop()}={' or '.join(fix.partition('=')[2] for fix in chosen)}"
    return ", or ".join(chosen)


def _neighbours(run: RunConfig, key: str) -> Iterator[str]:
    """Overrides of a key that are valid by themselves, nearest first; none where the run lacks the key."""
    if key in COMPONENTS:
        own = getattr(run, key)
        others = [each for each in _shipped(key).values() if each.name != own.name and _takes_given(each, key, own)]
        others.sort(key=lambda each: (-_kinship(each, own), -_abilities(each), each.name))
        yield from (f"{key}={each.name}" for each in others)
        return
    node, _, option = key.rpartition(".")
    owner = getattr(run, node) if node else run
    cls: Any = type(owner) if node else Settings  # whose annotations name no component
    kind = _kinds(cls).get(option)
    if kind is None:
        return
    value = getattr(owner, option)
    # Of nodes a run has the number, which null stands for.
    values: list[Any] = [each for each in listed(kind) if each is not value and each != value and key != "nodes"]
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
    divisors = [n for size in (run.devices, run.batch_size) for n in range(1, _REACH + 1) if size % n == 0]
    most = run.data.train_samples // max(1, run.global_batch_size // run.batch_size)  # that a batch may have
    near = {
        *range(value - _REACH, value + _REACH),
        *below,
        *(n + size for n, size in zip(below, sizes, strict=True)),
        *divisors,
        *(size * (most // size) for size in sizes),
    }
    return sorted(near - {value}, key=lambda number: (abs(number - value), number))


def _applied(run: RunConfig, device_type: str, fix: str) -> tuple[RunConfig, str] | None:
    """The run with other choices, and its type of device; None where they can't be made."""
    for override in fix.split():
        key, _, text = override.partition("=")
        node, _, option = key.rpartition(".")
        try:
            value = _chosen(run, key, text) if key in _GROUPS else _value(text)
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


def _chosen(run: RunConfig, group: str, name: str) -> Any:
    """A shipped component with the options that the run gives its own, as its command line would; `KeyError` where it
    lacks one of them.
    """
    chosen, own = _shipped(group)[name], getattr(run, group)
    if not _takes_given(chosen, group, own):
        raise KeyError(name)
    return msgspec.structs.replace(chosen, **_given(group, own))


def _takes_given(other: Any, group: str, own: Component) -> bool:
    """Whether another component has the options that are given: they stay on the command line."""
    return _given(group, own).keys() <= {*other.__struct_fields__}


def _given(group: str, own: Component) -> dict[str, Any]:
    """The options in which a component differs from its shipped file; none where it has no such file."""
    usual = _shipped(group).get(getattr(own, "name", ""))
    options = own.__struct_fields__ if type(usual) is type(own) else ()
    return {key: getattr(own, key) for key in options if getattr(own, key) != getattr(usual, key)}


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
    found = dict[str, Any]()
    for name in names_of(group):
        with suppress(ConfigError):
            node = shipped(group, name)
            found[name] = build_launcher(node) if group == "launcher" else build(node, group)
    return found
