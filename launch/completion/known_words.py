"""The words that completion knows: choices by listing files, keys from a list that `make docs` writes."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import conf

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_CONF = Path(next(iter(conf.__path__)))
KNOWN = Path(__file__).with_name("known.json")
"""Keys and other words; written by `make docs`."""


@cache
def known() -> Mapping[str, Any]:
    """Keys with the choices that have them and their values, the default choices, and words by placeholder."""
    content: Mapping[str, Any] = json.loads(KNOWN.read_bytes())
    return content


def choices_of(group: str, own: Path | None) -> list[str]:
    """The names one can choose in a group; `own` is a user's folder beside the suite's."""
    return sorted({file.stem for root in _roots(own) for file in _files(root / group, ".yaml")})


def groups(own: Path | None) -> list[str]:
    """The folders of choices."""
    return sorted({folder.name for root in _roots(own) for folder in root.iterdir() if any(_files(folder, ".yaml"))})


def own_keys(group: str, name: str, own: Path | None) -> list[str]:
    """The keys that a user's file of a choice sets; none where it can't be read."""
    file = own / group / f"{name}.yaml" if own else None
    if file is None or not file.is_file():
        return []
    from parallelbench.config.build import load_yaml  # takes longer than all the rest

    try:
        content = load_yaml(file.read_bytes())
    except (OSError, ValueError):
        return []
    return [f"{group}.{key}" for key in content if key not in ("_target_", "defaults", "name")]


def paths(current: str, *, folders_only: bool) -> Iterator[str]:
    """Files and folders that begin like this; folders end with a slash, files with a space."""
    above, slash, beginning = current.rpartition("/")
    try:
        entries = sorted(os.scandir(os.path.expanduser(above + slash) or "."), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        hidden = entry.name.startswith(".") and not beginning.startswith(".")
        if entry.name.startswith(beginning) and not hidden and entry.name.isprintable():
            if entry.is_dir():
                yield f"{above}{slash}{entry.name}/"
            elif not folders_only:
                yield f"{above}{slash}{entry.name} "


def _roots(own: Path | None) -> list[Path]:
    return [_CONF, *([own] if own and own.is_dir() else [])]


def _files(folder: Path, suffix: str) -> Iterator[Path]:
    if folder.is_dir() and not folder.name.startswith(("_", ".")):
        yield from (file for file in folder.iterdir() if file.suffix == suffix)
