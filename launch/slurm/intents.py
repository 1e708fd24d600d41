"""The run folders that a submission makes, and takes back where Slurm gives it no job."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from launch.stale import remove_intent, untouched

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from launch.preparation import Prepared
    from parallelbench.results.folder import RunFolder

_WRITERS = 16


@dataclass
class Intents:
    """What one array's runs got written before Slurm was asked for it."""

    made: dict[str, tuple[RunFolder, Path | None]] = field(default_factory=dict)
    """Run → its folder, which was not there before, and where the result is that it had; None: it had none."""

    def write(self, items: Iterable[Prepared]) -> None:
        """Write several at a time: each waits for the disk, or for a file server, longer than it computes.

        Where one can't be written, none stays.
        """
        try:
            with ThreadPoolExecutor(_WRITERS) as pool:
                list(pool.map(self._write, items))
        except BaseException:
            self.take_back()
            raise

    def take_back(self) -> None:
        """Remove the folders of runs that have no jobs, and bring back the results that they had."""
        for folder, former in self.made.values():
            if untouched(folder):
                remove_intent(folder)
            if former is not None and not os.path.lexists(folder.path):
                with suppress(OSError):
                    os.rename(former, folder.path)

    def _write(self, item: Prepared) -> None:
        folder = item.folder
        was_there, former = os.path.lexists(folder.path), item.put_aside()
        if former is not None or not was_there:
            self.made[folder.path.name] = (folder, former)  # before the write, which may fail half-way
        folder.write_intent(item.planned.run, item.planned.overrides)
