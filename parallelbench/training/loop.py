"""The only training loop: epochs of one replica, measured, journalled, and stopped for all ranks together."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from parallelbench.measure.clock import TimedWindow
from parallelbench.measure.traffic import KINDS, Sent
from parallelbench.results.sensor_columns import NOTHING
from parallelbench.results.tables import OF_PROGRAMS
from parallelbench.training import observers
from parallelbench.training.checks.copies import Copies
from parallelbench.world import cuda
from parallelbench.world.machine import node_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from parallelbench.config.components import Batch
    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks import RankWorld
    from parallelbench.loaders.order import BatchLoader
    from parallelbench.measure.clock import StartUp
    from parallelbench.results.journal import Journal
    from parallelbench.training.checkpoint import EpochBoundary
    from parallelbench.training.observers import Observer, Row


class NotFiniteError(Exception):
    """A loss that is not a number, or infinite: training has diverged, on all ranks alike."""


class Trainer:
    """One rank's view of the training of one run."""

    def __init__(
        self,
        replica: Replica,
        loader: BatchLoader,
        *,
        run: RunConfig,
        world: RankWorld,
        journal: Journal,
        startup: StartUp | None = None,
        boundary: EpochBoundary | None = None,
        more: Iterable[Observer] = (),
    ) -> None:
        """`startup` ends with the first step of epoch 1. `boundary`: None for no checkpoints. `more` observers."""
        self._replica, self._loader, self._run, self._world = replica, loader, run, world
        self._journal, self._startup, self._boundary = journal, startup, boundary
        self._window = TimedWindow(world)
        self._place = {"rank": world.rank, "local_rank": world.local_rank, "node": node_name()}
        self._place["device_uuid"] = device_uuid(world)
        self._scores, self._step_times = observers.Scores(run), observers.StepTimes(world, run)
        own_cores = os.sched_getaffinity(0) if world.device_type == "cpu" else ()
        self._observers: list[Observer] = [
            self._scores,
            *([Copies(replica, run, world)] if run.measure.parity else []),
            *more,
            observers.StepLosses(run),
            observers.EvaluatedMetric(run),
            observers.ExpertBalance(replica, run),
            observers.Clipping(replica, run),
            observers.Sending(replica),
            self._step_times,
            observers.Memory(world),
            *([observers.Capture(replica, loader, startup)] if run.graph else []),
            observers.Processor(loader, own_cores),
        ]
        self._exchanges: list[int] = []
        """Of the world, after each step of the epoch."""
        self._warm = False
        """Whether this attempt has trained an epoch; the first one may wait for what it loads and connects."""
        self.sent: list[Sent] = []
        """What this rank has sent in each epoch of this attempt."""
        self.evaluations: dict[int, tuple[float, float]] = {}
        """Epoch of this attempt → mean loss and share of correct predictions on the test set, over all ranks."""

    @property
    def evaluated(self) -> tuple[float, float]:
        """Of the last epoch."""
        return self.evaluations[self._run.epochs]

    def train(self, *, first: int = 1) -> bool:
        """Train the epochs from `first` to the last; returns False after a stop before the last.

        Raises `NotFiniteError` on every rank after the epoch in which a loss stopped being finite.
        """
        for epoch in range(first, self._run.epochs + 1):
            if self._world.rank == 0:
                self._journal.event("phase", phase="epoch", epoch=epoch, epochs=self._run.epochs)
            try:
                row = {**self.train_epoch(epoch), **self._evaluate()}
            finally:
                self._report_startup(epoch)
            # Every rank's rows are durable before the sum below can complete anywhere, and rank 0 writes the row
            # of `epochs` after it, as its last: where that row exists, the epoch is whole.
            self._journal.write("ranks", [{"epoch": epoch, **self._place, **row, **dict.fromkeys(OF_PROGRAMS)}])
            self.write_rows()
            self._journal.commit()
            stop, save = self._sum(epoch, took_s=row["epoch_time_s"] + row["evaluation_time_s"])
            self.evaluations[epoch] = self._scores.test_loss, self._scores.test_accuracy
            self._note_sent(row)
            self._require_finite(epoch)
            if self._boundary is not None and save:
                self._boundary.save(epoch, self._replica)
            if self._boundary is not None and stop:
                self._boundary.stop(epoch)
                return False
        return True

    def train_epoch(self, epoch: int) -> Row:
        """The training window of one epoch, with all its observers: columns of `ranks`."""
        self._epoch = epoch
        for observer in self._observers:
            observer.epoch_starts(epoch)
        with self._window:
            trained = self._train(epoch)
        window = self._window
        row: Row = {"epoch_time_s": window.length_s, "cpu_time_s": window.cpu_time_s}
        row |= {"training_started_at": window.started_at, "training_ended_at": window.ended_at}
        for observer in reversed(self._observers):
            row |= observer.epoch_trained(trained)
        return row

    def _train(self, epoch: int) -> Any:
        """Sums over the samples whose loss this rank owns; None: none. Nothing here waits for a device, but the end."""
        if epoch == 1 and self._startup is not None:
            self._startup.done("model")  # the first step begins with the window: it is a part of both, once
        total: Any = None
        batches: Iterable[Batch] = self._noted(self._step_times.timed(self._loader.train(epoch)), epoch)
        if self._warm and self._run.measure.waits == "error":
            batches = without_waits(batches)
        for batch in batches:
            scored = self._replica.step(batch)
            if total is None:
                total = scored
            elif scored is not None:
                total += scored
        if total is not None:
            total.tensor()
        self._warm = True
        return total

    def _noted(self, batches: Iterable[Batch], epoch: int) -> Iterator[Batch]:
        """Pass batches on; after each step, note what was exchanged until then, and when the first one of all ended."""
        startup = self._startup if epoch == 1 else None
        exchanged = self._world.exchange_counter()
        self._exchanges.clear()
        for batch in batches:
            yield batch
            self._exchanges.append(exchanged())
            if startup is not None:
                self._world.synchronize()
                startup.done("first_step")  # the clock only: the journal is written outside the window
                startup = None

    def _evaluate(self) -> Row:
        """The evaluation window: columns of `ranks`."""
        with self._window:
            evaluated = self._replica.evaluate(self._scores.counted(self._loader.test()))
        row = {"evaluation_time_s": self._window.length_s}
        for observer in self._observers:
            row |= observer.epoch_evaluated(evaluated)
        return row

    def write_rows(self) -> None:
        """Write this rank's rows of the last epoch that are not of `ranks`."""
        rows = chain.from_iterable(observer.rows() for observer in self._observers)
        self._write((table, {"rank": self._world.rank, **row}) for table, row in rows)

    def _sum(self, epoch: int, *, took_s: float) -> tuple[bool, bool]:
        """Add up over all ranks what the epoch has given, all at once, and let rank 0 write it.

        Returns whether to stop here, and whether to save, the same on all ranks.
        """
        requests = [0.0, 0.0] if self._boundary is None else self._boundary.requests(epoch, took_s)
        parts = [requests, *(observer.sums() for observer in self._observers)]
        total = iter(self._world.total(list(chain.from_iterable(parts))))
        (stop, save), *sums = [[next(total) for _ in part] for part in parts]
        rows = [*chain.from_iterable(each.epoch_summed(of) for each, of in zip(self._observers, sums, strict=True))]
        if self._world.rank == 0:
            self._write(rows)
            self._journal.commit()
        return bool(stop), bool(save)

    def _write(self, rows: Iterable[tuple[str, Row]]) -> None:
        """Write rows of the last epoch by table. Those of `epochs` are columns of one row, which comes last."""
        tables: dict[str, list[Row]] = defaultdict(list)
        for table, row in rows:
            tables[table].append({"epoch": self._epoch, **row})
        columns = tables.pop("epochs", [])
        for table, written in tables.items():
            self._journal.write(table, written)
        if columns:
            # The reader of the journals adds the telemetry of all nodes.
            whole = {**NOTHING, "finished_at": time.time()}
            for some in columns:
                whole |= some
            self._journal.write("epochs", [whole])

    def _report_startup(self, epoch: int) -> None:
        """Record the start-up times after the training window of epoch 1."""
        if self._startup is None or epoch > 1 or self._world.rank > 0:
            return
        if "startup_first_step_s" in self._startup.parts:
            self._journal.event("facts", **self._startup.facts())

    def _note_sent(self, row: Row) -> None:
        sent_bytes = sum(row[f"{kind}_bytes_sent"] for kind in KINDS)
        # What precedes the second step is left out: in a run's first step DDP has other buckets.
        each = (after - before for before, after in pairwise(self._exchanges))
        self.sent.append(Sent(sent_bytes / self._run.steps_per_epoch, min(each, default=0)))

    def _require_finite(self, epoch: int) -> None:
        """Raise where a loss is not finite, with what to try."""
        if math.isfinite(self._scores.train_loss) and math.isfinite(self._scores.test_loss):
            return
        which = "test" if math.isfinite(self._scores.train_loss) else "training"
        coarse = ", or choose precision=fp32" if self._run.precision not in ("fp32", "fp64") else ""
        raise NotFiniteError(f"the {which} loss was not finite in epoch {epoch}: lower optimizer.lr{coarse}")


def without_waits(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches. A wait for a device is an error from the first, before which an epoch's data moves, to the last."""
    rest = iter(batches)
    first = next(rest)
    with cuda.waits_are_errors():
        yield first
        yield from rest


def device_uuid(world: RankWorld) -> str:
    """UUIDs of this rank's GPUs, or the cores it is pinned to."""
    if gpus := world.gpus():
        return ",".join(uuid for _, uuid in gpus)
    return "cores " + ",".join(map(str, sorted(os.sched_getaffinity(0))))
