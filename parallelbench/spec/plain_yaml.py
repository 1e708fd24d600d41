"""YAML from anywhere: refused before it is built where building it would not end, or would fill the memory."""

from __future__ import annotations

from typing import Any

import yaml

from parallelbench.errors import one_line

DEEPEST = 50
"""Levels of nesting; no configuration has ten."""
MOST_NODES = 200_000
"""Keys and values after aliases (`*name`) have been replaced by what they stand for."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_yaml(content: bytes) -> Any:
    """What the text says; raises `ValueError` with one line for what is no YAML, too deep, too large or endless."""
    require_bearable(content)
    try:
        return yaml.load(content, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise ValueError(_in_words(error)) from None


def require_bearable(content: bytes) -> None:
    """Raise `ValueError` with one line for what `load_yaml` refuses, without building anything."""
    try:
        content.decode("utf-8")
        _measure(content)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no text in UTF-8 (byte {error.start})") from None
    except yaml.YAMLError as error:
        raise ValueError(_in_words(error)) from None


def _in_words(error: yaml.YAMLError) -> str:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    return f"line {mark.line + 1}: {one_line(str(error.problem))}" if mark else one_line(str(error))


def _measure(content: bytes) -> None:
    """Follow the parser's events, with the number of nodes of every level that is open and of every anchor."""
    open_levels: list[tuple[str | None, int]] = []
    sizes: dict[str, int] = {}
    for event in yaml.parse(content, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            open_levels.append((event.anchor, 1))
            if event.anchor is not None:
                sizes.pop(event.anchor, None)
            if len(open_levels) > DEEPEST:
                raise ValueError(f"line {_line(event)}: more than {DEEPEST} levels of nesting")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_levels.pop()
        elif isinstance(event, yaml.AliasEvent):
            anchor, size = None, sizes.get(event.anchor, 0)
            if not size:
                raise ValueError(f"line {_line(event)}: *{event.anchor} stands within what it names, or for nothing")
        elif isinstance(event, yaml.ScalarEvent):
            anchor, size = event.anchor, 1
        else:
            continue
        if size > MOST_NODES:
            raise ValueError(f"line {_line(event)}: more than {MOST_NODES:,} values once aliases (*name) are replaced")
        if anchor is not None:
            sizes[anchor] = size
        if open_levels:
            outer, total = open_levels[-1]
            open_levels[-1] = (outer, total + size)


def _line(event: yaml.Event) -> int:
    return int(event.start_mark.line) + 1
