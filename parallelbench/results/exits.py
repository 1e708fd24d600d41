"""How a node's ranks ended, as data: what has started them leaves it once one fails, and the supervisor judges."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from parallelbench.errors import StorageError
from parallelbench.results.files import write_file

if TYPE_CHECKING:
    from pathlib import Path


class Exits(msgspec.Struct, frozen=True, kw_only=True):
    """How one node's ranks ended."""

    codes: dict[int, int] = {}
    """Rank → exit code, of those that failed by themselves: none that was ended because another had failed."""
    failure: str = ""
    """The error for which no rank was started, or all had to be left: an exception's class, or a name of errno's."""


def exits_file(attempt: Path, node: int) -> Path:
    """Where the exits of one node's ranks are recorded, in the folder of an attempt."""
    return attempt / f"exits-node{node}.json"


def write_exits(path: Path, exits: Exits) -> None:
    """Record them, unless the disk is full: what the ranks themselves have recorded is judged then."""
    with suppress(StorageError):
        write_file(path, msgspec.json.encode(exits))


def read_exits(attempt: Path, processes: int) -> list[Exits]:
    """Those of all nodes that have recorded theirs; a node has one of the run's processes or more.

    Files are opened by name: on a network file system a folder may be listed as it was seconds ago.
    """
    found = []
    for node in range(processes):
        with suppress(OSError, UnicodeDecodeError, msgspec.DecodeError):
            found.append(msgspec.json.decode(exits_file(attempt, node).read_bytes(), type=Exits))
    return found
