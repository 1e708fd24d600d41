"""In tests, Hydra composes the shipped files once per list of overrides: it takes a fifth of a second each time."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from typing import TYPE_CHECKING

from launch.sweep import compose

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ANYWHERE = "results=/anywhere"


@contextlib.contextmanager
def once() -> Iterator[None]:
    """Remember what Hydra made of overrides. Files of a test's own may change, and are composed each time."""
    hydra = compose._composed

    @functools.cache
    def composed(overrides: tuple[str, ...]) -> compose.Plain:
        return hydra(list(overrides), None)

    def remembered(overrides: list[str], conf: Path | None) -> compose.Plain:
        if conf is not None:
            return hydra(overrides, conf)
        # Tests differ in their folder. Hydra reads a plain path as it is written.
        folders = [text for text in overrides if text.startswith("results=")]
        if len(folders) != 1 or not re.fullmatch(r"results=/[A-Za-z0-9/_-]+", folders[0]):
            return copy.deepcopy(composed(tuple(overrides)))
        plain = copy.deepcopy(composed(tuple(_ANYWHERE if text == folders[0] else text for text in overrides)))
        plain["results"] = folders[0].removeprefix("results=")
        return plain

    compose._composed = remembered
    try:
        yield
    finally:
        compose._composed = hydra
