"""The suite's keys, words and choices, for what must not load Hydra; `python -m tests.docs` writes known.json."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@cache
def known() -> Mapping[str, Any]:
    """Keys with the choices that have them and their values, the default choices, and words by placeholder."""
    content: Mapping[str, Any] = json.loads(Path(__file__).with_name("known.json").read_bytes())
    return content


@cache
def group_choices(conf: Path | None = None) -> dict[str, tuple[str, ...]]:
    """The configuration groups and the names one can choose in each; `conf` is a user's folder beside the suite's."""
    groups: dict[str, set[str]] = {}
    for root in (resources.files("conf"), *([conf] if conf else [])):
        for folder in root.iterdir():
            if folder.is_dir() and not folder.name.startswith(("_", ".")):
                names = {f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")}
                groups.setdefault(folder.name, set()).update(names)
    return {group: tuple(sorted(names)) for group, names in sorted(groups.items()) if names}
