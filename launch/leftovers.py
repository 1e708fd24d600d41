"""Folders that nothing needs any more: runs that were never begun and that nobody queued, and what dead attempts left.

Results, attempts' records, logs and what a later attempt goes on from are never among them.
"""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallelbench.results.folder import FORGOTTEN, RunFolder, is_configuration_of_run
from parallelbench.results.liveness import file_system_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from launch.launcher import RunStatus


YOUNG_S = 600.0
"""What was touched within this time stays: a submission, or a publication, may be going on."""
_INTENT = {"config.yaml", "overrides.txt"}
"""All that a run consists of that was never begun."""
_LIVE = ("running", "queued", "unknown")
_OF_RUNS = (
    *(".*.tmp", "attempts/.*.tmp", "attempts/*/.*.tmp", "attempts/*/preprocess", "attempts/*/reference"),
    "attempts/*/prepared-*.npy",
)
"""Within a run's folder: files and folders that were being written, prepared samples (earlier versions' in files of
their own), and what frameworks exchange."""
_OF_SWEEPS = (".report.*.tmp", ".report.*.old", ".compacted.*.tmp", f"{FORGOTTEN}-*.tmp")


@dataclass(frozen=True)
class Stale:
    """A folder or file to remove."""

    path: Path
    what: str
    size_bytes: int
    run: RunFolder | None = None
    """The run that was never begun, of which all is removed; None: a part of something that stays."""

    def remove(self) -> bool:
        """Remove it; returns whether it is gone. A run that was begun, or submitted again, meanwhile stays."""
        if self.run is not None:
            remove_intent(self.run, if_still=_never_begun)
        elif self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            with suppress(OSError):
                self.path.unlink()
        return not os.path.lexists(self.path)


def untouched(folder: RunFolder) -> bool:
    """Whether a run's folder holds its intent and nothing else."""
    try:
        begun = set(os.listdir(folder.path)) - _INTENT
        return not begun or (begun == {"attempts"} and not os.listdir(folder.path / "attempts"))
    except OSError:
        return False


def remove_intent(folder: RunFolder, *, if_still: Callable[[RunFolder], bool] = untouched) -> None:
    """Remove a run that was never begun; a folder that something else was put into stays.

    It is looked at once more under a name at which nobody begins it.
    """
    path = folder.path
    aside = path.with_name(f"{FORGOTTEN}-{uuid.uuid4().hex}.tmp")
    with suppress(OSError):
        if path.is_symlink():
            return
        os.rename(path, aside)
        if not if_still(RunFolder(aside)):
            os.rename(aside, path)
            return
        if os.path.lexists(path):  # somebody who knew its configuration has begun it, so this is needed there
            for name in sorted(_INTENT & set(os.listdir(aside)) - set(os.listdir(path))):
                os.rename(aside / name, path / name)
        shutil.rmtree(aside)


def stale(runs: Mapping[RunFolder, RunStatus]) -> Iterator[Stale]:
    """What may be removed of these runs and their sweeps; only one's own, and nothing of runs that go on."""
    busy = {folder.path.parent for folder, status in runs.items() if status.label == "running" and not status.job}
    for folder, status in runs.items():
        if status.label in _LIVE:
            continue
        # A submit that trains here has written all runs of its sweep before the first of them begins.
        if status.label == "missing" and folder.path.parent not in busy and _never_begun(folder):
            yield Stale(folder.path, status.reason or "nobody queued it", _size(folder.path), folder)
            continue
        done = status.state.state == "done"
        for path in _old(_leftovers(folder, done=done), folder.path.parent):
            yield Stale(path, f"left by an attempt; the run is {status.label}", _size(path))
    for sweep in sorted({folder.path.parent for folder in runs}):
        for path in _old((path for pattern in _OF_SWEEPS for path in sorted(sweep.glob(pattern))), sweep):
            yield Stale(path, "was being written", _size(path))


def _never_begun(folder: RunFolder) -> bool:
    """Also not lately submitted again; what a symbolic link points to belongs elsewhere."""
    own = not folder.path.is_symlink() and untouched(folder) and is_configuration_of_run(folder.path)
    return own and bool(list(_old([folder.path], folder.path.parent)))


def _leftovers(folder: RunFolder, *, done: bool) -> Iterator[Path]:
    for pattern in _OF_RUNS:
        yield from sorted(folder.path.glob(pattern))
    checkpoints = folder.path / "checkpoints"
    if done:
        yield from [checkpoints] if checkpoints.is_dir() else []
    else:  # a later attempt goes on from a whole one
        yield from (path for path in sorted(checkpoints.glob("*")) if not (path / "manifest.json").exists())


def _old(paths: Iterable[Path], sweep: Path) -> Iterator[Path]:
    """Those that belong to this user, and were not touched lately, by the clock of their sweep's file system."""
    now = file_system_time(sweep)  # asked there, for it touches the folder
    for path in paths:
        with suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.geteuid() and now - status.st_mtime > YOUNG_S:
                yield path


def _size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    return sum(file.lstat().st_size for file in files)
