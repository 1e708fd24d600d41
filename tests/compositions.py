"""In tests, Hydra composes each shipped file once: it takes a fifth of a second each time.

Choices of several files are put together node by node, as a sweep does it, and single values (`optimizer.lr=0.1`) are
set afterwards, where that comes to the same; `tests/test_compositions.py` holds what comes of it against Hydra.
`by_hydra` is Hydra itself.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from typing import TYPE_CHECKING, Any

from launch.sweep import compose

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

by_hydra = compose._composed
_PLAIN = (bool, int, float, str, type(None))


@contextlib.contextmanager
def once() -> Iterator[None]:
    """Remember what Hydra made of choices. Files of a test's own may change, and are composed each time."""
    before = compose._composed
    compose._composed = _remembered
    try:
        yield
    finally:
        compose._composed = before


def _remembered(overrides: list[str], conf: Path | None) -> compose.Plain:
    if conf is not None:
        return by_hydra(overrides, conf)
    values = [_single_value(text) for text in overrides if not _is_choice(text)]
    plain: compose.Plain = pickle.loads(_of_choices(tuple(filter(_is_choice, overrides))))
    if not all(value is not None and _set(plain, *value) for value in values):
        return pickle.loads(_of_choices(tuple(overrides)))  # type: ignore[no-any-return]
    return plain


@functools.cache
def _of_choices(overrides: tuple[str, ...]) -> bytes:
    chosen = [text.partition("=") for text in overrides]
    groups = {group for group, _, _ in chosen}
    if len(groups) == len(chosen) > 1 and all(map(_is_own_node, chosen)):
        plain = pickle.loads(_of_choices(()))
        plain |= {group: pickle.loads(_of_choices((f"{group}={name}",)))[group] for group, _, name in chosen}
        return pickle.dumps(plain)
    return pickle.dumps(by_hydra(list(overrides), None))


def _is_own_node(choice: tuple[str, str, str]) -> bool:
    """Whether the choice is a file that sets only its own group's node."""
    group, _, name = choice
    return name in compose.group_choices().get(group, ()) and compose.keeps_to_its_node(group, name)


def _is_choice(text: str) -> bool:
    return text.partition("=")[0] in compose.group_choices()


@functools.cache
def _single_value(text: str) -> tuple[tuple[str, ...], Any] | None:
    """The path and the value that an override sets; None where it does anything else."""
    try:
        (override,) = compose.parse([text])
    except compose.ConfigError:
        return None
    if not text.startswith(override.key_or_group + "=") or override.is_sweep_override():
        return None
    value = override.value()
    plain = all(isinstance(each, _PLAIN) for each in (value if isinstance(value, list) else [value]))
    return (tuple(override.key_or_group.split(".")), value) if plain else None


def _set(node: Any, path: tuple[str, ...], value: Any) -> bool:
    """Set a value that is there already; returns whether that was possible."""
    *parents, last = path
    for name in parents:
        node = node.get(name) if isinstance(node, dict) else None
    if not isinstance(node, dict) or last not in node or isinstance(node[last], dict):
        return False
    node[last] = [*value] if isinstance(value, list) else value
    return True
