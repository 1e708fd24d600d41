"""Training states on disk, from which a later attempt of the same run resumes.

```
<run folder>/checkpoints/attempt-<n>-epoch-<k>/
  rank<r>.pt       what rank r needs to go on after epoch k
  manifest.json    the sha256 of each of them; written last, so a folder without it was never finished
```
Attempts share no files: one that was taken for dead and comes back damages no other attempt's.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from parallelbench.errors import StorageError, one_line
from parallelbench.store.durable import new_file, storage_errors, sync, write_file
from parallelbench.store.folder import file_sha256
from parallelbench.store.reading import read_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from parallelbench.frameworks.contract import RankWorld

KEPT = 2
"""Checkpoints kept: a second one in case the newest is damaged."""
_NAME = re.compile("attempt-([0-9]{1,9})-epoch-([0-9]{1,9})")
_DIGEST_BYTES = 32
_LOST = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EFBIG, errno.EIO, None}
"""What a file of a checkpoint that is damaged for good may say; others, such as ESTALE, may say so for a moment."""

State = dict[str, Any]


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What `manifest.json` holds."""

    sha256: list[str]
    """sha256 of each rank's file."""


@dataclass(frozen=True, order=True)
class Key:
    """A checkpoint's attempt and epoch; the largest is the newest."""

    attempt: int
    epoch: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"attempt-{self.attempt}-epoch-{self.epoch}"


@dataclass
class Checkpoints:
    """One rank's access to a run's checkpoints. All ranks call each method together."""

    folder: Path
    world: RankWorld
    damaged: list[Key] = field(default_factory=list)
    """Checkpoints that `newest` could not use."""

    def newest(self, usable: Callable[[Key], bool]) -> tuple[Key, State] | None:
        """The newest checkpoint whose files all ranks can read and call `usable`, with this rank's state.

        Raises `StorageError` where the disk does not answer: what is there may be whole, and a later attempt read it.
        """
        for key in self._proposals():
            state = self._read(key) if usable(key) else None
            if self._count(state is None) == 0:
                assert state is not None
                return key, state
            self.damaged.append(key)
        return None

    def save(self, key: Key, state: State) -> str | None:
        """Write this rank's state, and the manifest once all ranks have; then delete all but the last `KEPT`.

        Returns the reason if it failed, on rank 0 at least; then nothing of it remains. Tensors may be those
        that training goes on with: they are written before this returns.
        """
        digest, problem = self._write(key, state)
        digests = self._digests(digest)
        if "" in digests:
            with suppress(OSError):  # without a manifest it is no checkpoint
                self._file(key).unlink(missing_ok=True)
            problem = problem or f"rank {digests.index('')} failed"
        if self.world.rank == 0:
            problem = problem or self._conclude(key, digests)
            if problem is not None:
                shutil.rmtree(self.folder / key.name, ignore_errors=True)
        return problem

    def _write(self, key: Key, state: State) -> tuple[bytes | None, str | None]:
        """The sha256 of what was written, never read back; or the reason if it failed."""
        path = self._file(key)
        try:
            with storage_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            with new_file(path) as file:
                hashed = _Hashed(file)
                self.world.write_state(state, hashed)
        except StorageError as error:
            return None, one_line(str(error))
        return hashed.sha256.digest(), None

    def _digests(self, own: bytes | None) -> list[str]:
        """sha256 of every rank's file, in hex; empty where writing failed."""
        width = _DIGEST_BYTES + 1
        table = [0.0] * (self.world.size * width)
        if own is not None:
            start = self.world.rank * width
            table[start : start + width] = [1.0, *map(float, own)]
        numbers = list(map(int, self.world.total(table)))
        rows = [numbers[start : start + width] for start in range(0, len(numbers), width)]
        return [bytes(digest).hex() if there else "" for there, *digest in rows]

    def _conclude(self, key: Key, digests: list[str]) -> str | None:
        try:
            write_file(self._manifest(key), msgspec.json.encode(CheckpointManifest(sha256=digests)))
            with storage_errors(self.folder):
                sync(self.folder)  # before the older ones go
        except StorageError as error:
            return str(error)
        with suppress(OSError, StorageError):  # the older ones may stay
            finished = self._finished()
            for old in self._all():
                # A later attempt's checkpoints are not this one's to delete: this one may have been taken for dead.
                if old not in finished[:KEPT] and old < key:
                    shutil.rmtree(self.folder / old.name, ignore_errors=True)
        return None

    def _all(self) -> list[Key]:
        """Newest first, finished or not."""
        try:
            names = list(map(_NAME.fullmatch, os.listdir(self.folder)))
        except FileNotFoundError:
            return []
        return sorted((Key(int(name[1]), int(name[2])) for name in names if name), reverse=True)

    def _finished(self) -> list[Key]:
        """Likewise; raises `StorageError` where it is unknown what there is."""
        with storage_errors(self.folder, verb="read"):
            keys = self._all()
        return [key for key in keys if self._has_manifest(key)]

    def _has_manifest(self, key: Key) -> bool:
        # `Path.exists` takes more errors for a file that is not there, the more the later the Python.
        with storage_errors(self._manifest(key), verb="read"):
            try:
                os.stat(self._manifest(key))
            except (FileNotFoundError, NotADirectoryError):
                return False
        return True

    def _proposals(self) -> Iterator[Key]:
        """The checkpoints that rank 0 sees, newest first: other nodes may see the folder's content later."""
        finished = iter(self._finished() if self.world.rank == 0 else ())
        nothing = Key(0, 0)
        while True:
            proposed = next(finished, nothing)
            key = Key(*map(int, self.world.total([proposed.attempt, proposed.epoch])))
            if key == nothing:
                return
            yield key

    def _read(self, key: Key) -> State | None:
        """This rank's state; None where its file is not what was written, or belongs to another number of ranks.

        Raises `StorageError` where it can't be read for the moment.
        """
        path = self._file(key)
        try:
            manifest = msgspec.json.decode(read_record(self._manifest(key)), type=CheckpointManifest)
            if len(manifest.sha256) != self.world.size or file_sha256(path) != manifest.sha256[self.world.rank]:
                return None
            state: State = self.world.read_state(path)
        except OSError as error:
            if error.errno in _LOST:
                return None
            with storage_errors(path, verb="read"):
                raise
        except Exception:  # e.g. of another version of the framework: the checkpoint before it may be readable
            return None
        return state

    def _manifest(self, key: Key) -> Path:
        return self.folder / key.name / "manifest.json"

    def _file(self, key: Key) -> Path:
        return self.folder / key.name / f"rank{self.world.rank}.pt"

    def _count(self, holds: bool) -> int:
        return int(self.world.total([float(holds)])[0])


class _Hashed(io.BufferedIOBase, BinaryIO):
    """A file that is only written, from start to end, and the sha256 of that."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sha256 = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self._file.write(data)
