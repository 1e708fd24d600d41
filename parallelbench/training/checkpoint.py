"""Training states on disk: saved between two epochs, outside every measured window, and resumed from later."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from parallelbench.errors import ConfigError, StorageError, one_line
from parallelbench.measure.memory import release_host
from parallelbench.models.gpt import Gpt
from parallelbench.results.files import new_file, storage_errors, sync, write_file
from parallelbench.results.folder import file_sha256
from parallelbench.results.journal import OtherVersionError, kept_entries
from parallelbench.training.failure import classify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks import RankWorld
    from parallelbench.results.attempt import Attempt
    from parallelbench.results.journal import Journal, Row


KEPT = 2
"""Checkpoints kept: a second one in case the newest is damaged."""
_NAME = re.compile("attempt-([0-9]{1,9})-epoch-([0-9]{1,9})")
_LOST = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EFBIG, errno.EIO, None}
"""What a file of a checkpoint that is damaged for good may say; others, such as ESTALE, may say so for a moment."""

State = dict[str, Any]


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
    unread: set[Key] = field(default_factory=set)
    """Those of them of which no file is known to be spoiled: another version, or other ranks, may read them."""

    def newest(
        self, measured: Callable[[Key], list[Row] | None], *, fits: Callable[[State], bool] = lambda _: True
    ) -> tuple[Key, State, list[Row]] | None:
        """The newest checkpoint whose files all ranks can read, with this rank's state, which `fits`, and what it has
        `measured`.

        Raises `StorageError` where the disk does not answer, and what lacks memory: what is there may be whole, and a
        later attempt read it.
        """
        for key in self._proposals():
            entries = measured(key)
            state = None
            spoiled = False
            if entries is not None:
                state, spoiled = self._read(key)
            if state is not None and not fits(state):
                state = None
            found = self.world.gather([state is None, spoiled])
            if not any(is_lacking for is_lacking, _ in found):
                assert state is not None
                assert entries is not None
                return key, state, entries
            self.damaged.append(key)
            if not any(is_spoiled for _, is_spoiled in found):
                self.unread.add(key)
        return None

    def save(self, key: Key, state: State) -> str | None:
        """Write this rank's state, and the manifest once all ranks have; then delete all but the last `KEPT`, and those
        that were only `unread`.

        Returns the reason if it failed, on rank 0 at least; then nothing of it remains. Tensors may be those
        that training goes on with: they are written before this returns.
        """
        digest, problem = self._write(key, state)
        digests: list[str] = self.world.gather(digest)
        if "" in digests:
            with suppress(OSError):  # without a manifest it is no checkpoint
                self._file(key).unlink(missing_ok=True)
            problem = problem or f"rank {digests.index('')} failed"
        if self.world.rank == 0:
            problem = problem or self._conclude(key, digests)
            if problem is not None:
                shutil.rmtree(self.folder / key.name, ignore_errors=True)
        return problem

    def size_bytes(self, key: Key) -> int | None:
        """Size of a checkpoint's files, of all ranks; None where the disk does not say."""
        files = [self.folder / key.name / f"rank{rank}.pt" for rank in range(self.world.size)]
        try:
            return sum(os.stat(file).st_size for file in files)
        except OSError:
            return None

    def _write(self, key: Key, state: State) -> tuple[str, str | None]:
        """The sha256 of what was written, never read back; or, where that is empty, the reason why it failed."""
        path = self._file(key)
        try:
            with storage_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            with new_file(path) as file:
                hashed = _Hashed(file)
                self.world.write_state(state, hashed)
        except StorageError as error:
            return "", one_line(str(error))
        return hashed.sha256.hexdigest(), None

    def _conclude(self, key: Key, digests: list[str]) -> str | None:
        try:
            write_file(self._manifest(key), msgspec.json.encode({"sha256": digests}))
            with storage_errors(self.folder):
                sync(self.folder)  # before the older ones go
        except StorageError as error:
            return str(error)
        with suppress(OSError, StorageError):  # the older ones may stay
            finished = self._finished()
            for old in self._all():
                # A later attempt's checkpoints are not this one's to delete: this one may have been taken for dead.
                if old not in finished[:KEPT] and old not in self.unread and old < key:
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

    def _proposals(self) -> list[Key]:
        """The checkpoints that rank 0 sees, newest first: other nodes may see the folder's content later."""
        finished = self._finished() if self.world.rank == 0 else []
        return [Key(*proposed) for proposed in self.world.gather([(key.attempt, key.epoch) for key in finished])[0]]

    def _read(self, key: Key) -> tuple[State | None, bool]:
        """This rank's state, None where it can't be used; and whether its file is not what was written.

        Raises `StorageError` where it can't be read for the moment, and what lacks memory.
        """
        path = self._file(key)
        try:
            manifest = msgspec.json.decode(self._manifest(key).read_bytes(), type=dict[str, list[str]])
            digests = manifest["sha256"]  # of each rank's file
            if len(digests) != self.world.size:
                return None, False
            if file_sha256(path) != digests[self.world.rank]:
                return None, True
            state: State = self.world.read_state(path)
        except Exception as error:
            if classify(error)[0] == "oom":
                raise
            if not isinstance(error, OSError):  # e.g. of another version: the checkpoint before it may be readable
                return None, False
            if error.errno in _LOST:
                return None, True
            with storage_errors(path, verb="read"):
                raise
        return state, False

    def _manifest(self, key: Key) -> Path:
        return self.folder / key.name / "manifest.json"

    def _file(self, key: Key) -> Path:
        return self.folder / key.name / f"rank{self.world.rank}.pt"


class _Hashed(io.BufferedIOBase, BinaryIO):
    """A file that is only written, from start to end, and the sha256 of that."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sha256 = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self._file.write(data)


AUTO_MARGIN = 1.25
"""checkpoint=auto saves where this times the estimated time left doesn't fit into the limit: an epoch may take longer
than the one before, and Slurm's warning may come a minute early."""


class Policy:
    """Decides on rank 0, for all ranks, whether to save and whether to stop."""

    def __init__(self, run: RunConfig, attempt: Attempt, *, clock: Callable[[], float] = time.time) -> None:
        self._run, self._attempt, self._clock = run, attempt, clock
        self._last = clock()
        self._deadline: float | None = None
        if (info := attempt.info()) is not None:
            self._deadline = run.launcher.stops_at(launched_at=info.launched_at, job_ends_at=info.job_ends_at)
        self._regularly = run.launcher.checkpoint == "always"
        """Whether to save without a stop; with `auto`, from the first epoch after which time seems short."""

    def after(self, epoch: int, took_s: float) -> tuple[bool, bool]:
        """Whether to stop after this epoch, which took `took_s`, and whether to save."""
        left = self._run.epochs - epoch
        if self._run.launcher.checkpoint == "auto" and self._deadline is not None:
            self._regularly |= self._clock() + AUTO_MARGIN * left * took_s > self._deadline
        if not left:
            return False, False  # the result follows at once
        stop = self._attempt.stop_requested()
        due = self._regularly and self._clock() - self._last >= self._run.launcher.checkpoint_every_s
        save = self._run.launcher.checkpoint != "never" and (stop or due)
        if save:
            self._last = self._clock()
        return stop, save


class EpochBoundary:
    """One rank's part in what happens between epochs. `warn` adds a warning to the results."""

    def __init__(
        self, run: RunConfig, attempt: Attempt, world: RankWorld, *, journal: Journal, warn: Callable[[str], None]
    ) -> None:
        self._attempt, self._world, self._journal, self._warn = attempt, world, journal, warn
        self._checkpoints = Checkpoints(attempt.checkpoints, world)
        self._policy = Policy(run, attempt)
        self._run = run
        self._warned_of: set[str] = set()
        """Why epochs could not be saved."""
        self.saved = 0
        """The last epoch whose state is on disk; 0: none."""

    def requests(self, epoch: int, took_s: float) -> list[float]:
        """Whether to stop and to save after an epoch, as 0 or 1; zeros except on rank 0, so the sum is rank 0's."""
        return list(map(float, self._policy.after(epoch, took_s))) if self._world.rank == 0 else [0.0, 0.0]

    def save(self, epoch: int, replica: Replica) -> None:
        """Save every rank's state after this epoch; training continues if that fails."""
        start = time.perf_counter()
        state = {"replica": replica.local_state(), "random": self._world.random_state()}
        key = Key(self._attempt.number, epoch)
        problem = self._checkpoints.save(key, state)
        del state
        release_host()  # it counts in no epoch's peak; a GPU's peak is of tensors, whatever its allocator has cached
        if problem is not None:
            if self._world.rank == 0:
                self._journal.event("unsaved", epoch=epoch, reason=problem)
            if (kind := problem.replace(key.name, "")) not in self._warned_of:
                self._warned_of.add(kind)  # once: a disk may stay full for a thousand epochs
                self._warn(f"no checkpoint after epoch {epoch}: {problem}; later epochs that fail alike are not listed")
            return
        self.saved = epoch
        if self._world.rank == 0:
            save_s = time.perf_counter() - start
            self._journal.event("checkpoint", epoch=epoch, save_s=save_s, bytes=self._checkpoints.size_bytes(key))

    def stop(self, epoch: int) -> None:
        """Record that this attempt ends after an epoch, as requested."""
        if self._world.rank == 0:
            self._journal.event("stopped", epoch=epoch, epochs=self._run.epochs, saved=self.saved)
            self._journal.commit()

    def resume(self) -> Resumed | None:
        """The newest state of an earlier attempt that all ranks can resume from; None: start at the beginning.

        Copies the measurements up to there into this rank's journal. Raises `StorageError` where the disk does not
        answer.
        """
        if self._run.launcher.checkpoint == "never":
            return None

        def measured(key: Key) -> list[Row] | None:
            path = self._attempt.path.with_name(str(key.attempt)) / f"journal-rank{self._world.rank}.jsonl"
            with storage_errors(path, verb="read"), suppress(OtherVersionError):
                return kept_entries(path, through=key.epoch)
            return None

        def fits(state: State) -> bool:
            """Development versions had a layer each for queries, keys and values of `gpt`."""
            names = state["replica"].get("tensors", ()) if isinstance(self._run.model, Gpt) else ()
            return not any(".attention.query." in name for name in names)

        newest = self._checkpoints.newest(measured, fits=fits)
        for key in self._checkpoints.damaged:
            self._warn(
                f"the checkpoint after epoch {key.epoch} of attempt {key.attempt} was not used: it is damaged, or of "
                "another version of the suite"
            )
        if newest is None:
            return None
        key, state, entries = newest
        self._journal.take_over(entries)
        self.saved = key.epoch
        return Resumed(key.epoch, state, entries, self._world)


def difference(saved: Any, loaded: Any, place: str = "state") -> str:
    """Where two states of a replica differ first: "optimizer.plain.0.momentum_buffer"; empty: they are the same bits.

    Tensors, of any framework and on any device, numbers, and dicts and lists of them.
    """
    if isinstance(saved, dict) and isinstance(loaded, dict):
        pairs = [(key, saved.get(key, _NONE), loaded.get(key, _NONE)) for key in dict.fromkeys((*saved, *loaded))]
    elif isinstance(saved, (list, tuple)) and isinstance(loaded, (list, tuple)) and len(saved) == len(loaded):
        pairs = [(index, *both) for index, both in enumerate(zip(saved, loaded, strict=True))]
    else:
        return "" if _is_same(saved, loaded) else place
    below = "" if place == "state" else f"{place}."
    return next(filter(None, (difference(one, other, f"{below}{key}") for key, one, other in pairs)), "")


_NONE = object()


def _is_same(one: Any, other: Any) -> bool:
    if not (hasattr(one, "shape") and hasattr(other, "shape")):
        return bool(one == other or (one != one and other != other))
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = (each.cpu() if hasattr(each, "cpu") else each for each in (one, other))
    return bool(((one == other) | ((one != one) & (other != other))).all())


class Resumed:
    """An earlier attempt's state, and its columns of the `run` table."""

    def __init__(self, epoch: int, state: dict[str, Any], entries: list[Row], world: RankWorld) -> None:
        self.epoch, self._state, self._world = epoch, state, world
        self.facts: Row = {}
        """Columns of the `run` table; empty but on rank 0."""
        self.warnings: list[str] = []
        """What earlier attempts have warned of; likewise."""
        for entry in entries:
            if entry.get("event") == "facts":
                self.facts |= entry
            elif entry.get("event") == "warned":
                self.warnings = entry["texts"]
        if not self.warnings and (of_older_release := self.facts.get("warnings")):
            self.warnings = [of_older_release]

    def restore(self, replica: Replica) -> None:
        """Load the state into a fresh replica, once; then forget it. A collective.

        Raises `ConfigError` on every rank where some rank's replica has not what was saved.
        """
        replica.load_local_state(self._state["replica"])
        lost = difference(self._state["replica"], replica.local_state())
        if found := next(filter(None, self._world.gather(lost)), ""):
            raise ConfigError(
                f"after {type(replica).__name__}.load_local_state the replica has another {found} than local_state had "
                "saved, so training would not go on as before: load all that is saved, or choose "
                "launcher.checkpoint=never"
            )
        self._world.set_random_state(self._state["random"])
        self._state.clear()

    def again(self) -> str:
        """The column `resumed_after`."""
        before = self.facts.get("resumed_after")
        return f"{before}, {self.epoch}" if before else str(self.epoch)
