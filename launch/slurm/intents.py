"""The run folders that a submission makes, and takes back where Slurm gives it no job."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from launch.preparation import Prepared
    from parallelbench.store.folder import RunFolder

_WRITERS = 16
_FILES = {"config.yaml", "overrides.txt"}
"""All that an intent consists of."""


@dataclass
class Intents:
    """What one array's runs got written before Slurm was asked for it."""

    made: dict[str, tuple[RunFolder, Path | None]] = field(default_factory=dict)
    """Run → its folder, which was not there before, and where the result is that it had; None: it had none."""

    def write(self, items: Iterable[Prepared]) -> None:
        """Write several at a time: each waits for the disk, or for a file server, longer than it computes."""
        with ThreadPoolExecutor(_WRITERS) as pool:
            for item in pool.map(self._write, items):
                if item is not None:
                    self.made[item[0].path.name] = item

    def take_back(self) -> None:
        """Remove the folders of runs that have no jobs, and bring back the results that they had."""
        for folder, former in self.made.values():
            if untouched(folder):
                remove(folder)
                if former is not None:
                    with suppress(OSError):
                        os.rename(former, folder.path)

    @staticmethod
    def _write(item: Prepared) -> tuple[RunFolder, Path | None] | None:
        was_there = os.path.lexists(item.folder.path)
        former = item.write_intent()
        return None if was_there and former is None else (item.folder, former)


def untouched(folder: RunFolder) -> bool:
    """Whether a run's folder holds its intent and nothing else."""
    try:
        return set(os.listdir(folder.path)) <= _FILES
    except OSError:
        return False


def remove(folder: RunFolder) -> None:
    """Remove an intent; a folder that something else was put into meanwhile stays."""
    with suppress(OSError):
        for name in sorted(_FILES):
            (folder.path / name).unlink(missing_ok=True)
        folder.path.rmdir()
