"""The configurations of a block of a sweep: its grid, times what goes side by side, less its exclusions."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parallelbench.spec.settings import SweepBlock

Point = dict[str, Any]
"""The keys that one configuration of a sweep sets."""


def without(block: SweepBlock, given: set[str]) -> SweepBlock:
    """The block without the keys that the command line sets."""
    grid = {key: values for key, values in block.grid.items() if key not in given}
    side = {key: values for key, values in block.zip.items() if key not in given}
    return msgspec.structs.replace(block, grid=grid, zip=side)


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
