"""Between two epochs, outside every measured window: save the state, stop, or resume from a saved state."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from parallelbench.probes.memory_probe import release
from parallelbench.rank.checkpoint import Checkpoints, Key
from parallelbench.store.durable import storage_errors
from parallelbench.store.journal import kept_entries

if TYPE_CHECKING:
    from collections.abc import Callable

    from parallelbench.frameworks.contract import RankWorld
    from parallelbench.spec.config import RunConfig
    from parallelbench.spec.replica import Replica
    from parallelbench.store.attempt import Attempt
    from parallelbench.store.journal import Journal, Row


AUTO_MARGIN = 1.25
"""checkpoint=auto saves where this times the estimated time left doesn't fit into the limit: an epoch may take longer
than the one before, and Slurm's warning may come a minute early."""


class Policy:
    """Decides on rank 0, for all ranks, whether to save and whether to stop."""

    def __init__(self, run: RunConfig, attempt: Attempt, *, clock: Callable[[], float] = time.time) -> None:
        self._run, self._attempt, self._clock = run, attempt, clock
        self._last = clock()
        info, limit_s = attempt.info(), run.launcher.limit_s
        self._deadline = None if info is None or limit_s is None else info.launched_at + limit_s
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
        self.saved = 0
        """The last epoch whose state is on disk; 0: none."""

    def requests(self, epoch: int, took_s: float) -> list[float]:
        """Whether to stop and to save after an epoch, as 0 or 1; zeros except on rank 0, so the sum is rank 0's."""
        return list(map(float, self._policy.after(epoch, took_s))) if self._world.rank == 0 else [0.0, 0.0]

    def save(self, epoch: int, replica: Replica) -> None:
        """Save every rank's state after this epoch; training continues if that fails."""
        start = time.perf_counter()
        state = {"replica": replica.local_state(), "random": self._world.random_state()}
        problem = self._checkpoints.save(Key(self._attempt.number, epoch), state)
        del state
        release()  # it counts in no epoch's peak
        if problem is not None:
            self._warn(f"no checkpoint after epoch {epoch}: {problem}")
            return
        self.saved = epoch
        if self._world.rank == 0:
            self._journal.event("checkpoint", epoch=epoch, save_s=time.perf_counter() - start)

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
        entries: list[Row] = []

        def usable(key: Key) -> bool:
            path = self._attempt.path.with_name(str(key.attempt)) / f"journal-rank{self._world.rank}.jsonl"
            with storage_errors(path, verb="read"):
                kept = kept_entries(path, through=key.epoch)
            entries[:] = kept or ()
            return kept is not None

        newest = self._checkpoints.newest(usable)
        for key in self._checkpoints.damaged:
            self._warn(f"the checkpoint after epoch {key.epoch} of attempt {key.attempt} was damaged and not used")
        if newest is None:
            return None
        key, state = newest
        self._journal.take_over(entries)
        self.saved = key.epoch
        return Resumed(key.epoch, state, entries, self._world)


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
        """Load the state into a fresh replica, once; then forget it."""
        replica.load_local_state(self._state["replica"])
        self._world.set_random_state(self._state["random"])
        self._state.clear()

    def again(self) -> str:
        """The column `resumed_after`."""
        before = self.facts.get("resumed_after")
        return f"{before}, {self.epoch}" if before else str(self.epoch)
