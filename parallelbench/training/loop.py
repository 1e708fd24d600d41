"""The only training loop: epochs of one replica, measured, journalled, and stopped for all ranks together."""

from __future__ import annotations

import math
import os
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from parallelbench.measure.clock import StepClock, TimedWindow
from parallelbench.measure.memory import MemoryProbe
from parallelbench.measure.processor import ProcessorShare, WorkerProbe
from parallelbench.measure.traffic import KINDS, Sent
from parallelbench.results.tables import CLIPPING, SAMPLES
from parallelbench.results.telemetry import NOTHING
from parallelbench.training.checks.likeness import Finding, checks_arithmetic
from parallelbench.training.observers import ExpertBalance, Settled, by_step, metric_column, metric_sums, rows_of
from parallelbench.world import cuda
from parallelbench.world.machine import node_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parallelbench.config.components import Batch
    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks import RankWorld
    from parallelbench.loaders.order import BatchLoader
    from parallelbench.measure.clock import StartUp
    from parallelbench.results.journal import Journal
    from parallelbench.training.checkpoint import EpochBoundary
    from parallelbench.world.numerics import Sums


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
        keys: dict[str, Any],
        startup: StartUp | None = None,
        boundary: EpochBoundary | None = None,
    ) -> None:
        """Prepare the probes. `startup` ends with the first step of epoch 1. `boundary`: None for no checkpoints."""
        self._replica, self._loader, self._run, self._world = replica, loader, run, world
        self._journal, self._keys, self._startup, self._boundary = journal, keys, startup, boundary
        self._window, self._memory, self._workers = TimedWindow(world), MemoryProbe(world), WorkerProbe(loader)
        self._share = ProcessorShare(os.sched_getaffinity(0) if world.device_type == "cpu" else ())
        self._steps = StepClock(world, steps=run.steps_per_epoch, sampled=run.measure.steps_sampled)
        self._identity = {"rank": world.rank, "local_rank": world.local_rank, "node": node_name()}
        self._device_uuid = device_uuid(world)
        self.evaluated: tuple[float, float] = (math.nan, math.nan)
        """Mean loss and share of correct predictions on the test set after the last epoch, over all ranks."""
        self._metric_sums = metric_sums(None, run)
        """This rank's, of the last evaluation."""
        self._experts = ExpertBalance(replica, run)
        self._settled = Settled(replica, world, checks=run.measure.parity)
        self.sent: list[Sent] = []
        """What this rank has sent in each epoch of this attempt."""
        self._exchanges: list[int] = []
        """Of the world, after each step of the epoch."""

    def train(self, *, first: int = 1) -> bool:
        """Train the epochs from `first` to the last; returns False after a stop before the last.

        Raises `NotFiniteError` on every rank after the epoch in which a loss stopped being finite.
        """
        for epoch in range(first, self._run.epochs + 1):
            if self._world.rank == 0:
                self._journal.event("phase", phase="epoch", epoch=epoch, epochs=self._run.epochs)
            try:
                row = self._epoch(epoch)
            finally:
                self._report_startup(epoch)
            # Every rank's rows are durable before the sum below can complete anywhere, and rank 0 writes the row
            # of `epochs` after it: where that row exists, the epoch is whole.
            self._journal.write("ranks", [row])
            self._journal.write("steps", self._step_rows(epoch))
            self._journal.write("pushes", self._push_rows(epoch))
            self._journal.commit()
            if self._finish_epoch(epoch, row):
                return False
        return True

    def _report_startup(self, epoch: int) -> None:
        """Record the start-up times after the training window of epoch 1."""
        if self._startup is None or epoch > 1 or self._world.rank > 0:
            return
        if "startup_first_step_s" in self._startup.parts:
            self._journal.event("facts", **self._startup.facts())

    def _epoch(self, epoch: int) -> dict[str, Any]:
        """Train and evaluate; returns the rank's row of `ranks`."""
        trained = self.train_epoch(epoch)
        held_bytes = self._memory.held_bytes()
        self._settled.window_ended()
        evaluated = self._evaluate()
        self._settled.evaluated()
        self._memory.give_back(held_bytes)  # no later peak counts what the evaluation and the checksums took
        place = {"epoch": epoch, **self._identity, "device_uuid": self._device_uuid}
        return {**self._keys, **place, **trained, **evaluated}

    def train_epoch(self, epoch: int) -> dict[str, Any]:
        """The training window of one epoch, with all its probes: columns of `ranks`."""
        self._memory.start()
        self._workers.start()
        self._take_norms()  # those of steps before the window
        self._experts.take()  # likewise
        self._replica.traffic.take()  # the training window excludes what evaluation has sent
        self._share.start()
        self._window.start()
        if epoch == 1 and self._startup is not None:
            self._startup.done("model")  # the first step begins with the window: it is a part of both, once
        trained = self._train_window(epoch)
        epoch_time_s = self._window.stop()
        workers = self._workers.stop()
        share = self._share.stop(children_s=workers["loader_cpu_time_s"] or 0.0)
        probes = {**self._memory.stop(), **workers, **share, **self._replica.traffic.take()}
        probes |= self._take_norms()
        self._experts.take()
        edges = {"training_started_at": self._window.started_at, "training_ended_at": self._window.ended_at}
        times = {"epoch_time_s": epoch_time_s, **edges, "cpu_time_s": self._window.cpu_time_s}
        self._step_losses = by_step(trained, self._run.steps_per_epoch)
        both, samples = (None, 0) if trained is None else (trained.tensor(), trained.samples)
        return {**times, **_sums("train", both, samples), **probes}

    def _take_norms(self) -> dict[str, float | None]:
        """Columns of `ranks` about gradients that were clipped since the last call."""
        taken = self._replica.take_norms() if self._run.clip_norm is not None else {}
        return {column.name: taken.get(column.name) for column in CLIPPING}

    def _evaluate(self) -> dict[str, Any]:
        """The evaluation window: columns of `ranks`."""
        self._window.start()
        evaluated = self._replica.evaluate(counted := _Counted(self._loader.test()))
        evaluation_time_s = self._window.stop()
        samples = counted.samples if evaluated is not None else 0
        self._metric_sums = metric_sums(evaluated, self._run)
        both = None if evaluated is None else evaluated[:2]
        return {"evaluation_time_s": evaluation_time_s, **_sums("test", both, samples)}

    def _train_window(self, epoch: int) -> Sums | None:
        """Sums over the samples whose loss this rank owns. Nothing here waits for a device."""
        total: Sums | None = None
        exchanges = self._world.exchange_counter()
        self._exchanges.clear()
        for index, batch in enumerate(self._steps.timed(self._loader.train(epoch))):
            result = self._replica.step(batch)
            if result is not None:
                total = result if total is None else total + result
            self._exchanges.append(exchanges())
            if index == 0 and epoch == 1 and self._startup is not None:
                self._world.synchronize()
                self._startup.done("first_step")  # the clock only: the journal is written outside the window
        if total is not None:
            total.tensor()
        return total

    def _step_rows(self, epoch: int) -> list[dict[str, Any]]:
        rank = self._world.rank
        return [
            {**self._keys, "epoch": epoch, "step": step, "rank": rank, "step_time_s": duration}
            for step, duration in self._steps.durations()
        ]

    def _push_rows(self, epoch: int) -> list[dict[str, Any]]:
        keys = {**self._keys, "epoch": epoch, "rank": self._world.rank}
        return [{**keys, "step": push.step, "staleness": push.staleness} for push in self._replica.take_pushes()]

    def _finish_epoch(self, epoch: int, row: dict[str, Any]) -> bool:
        """Sum over ranks, check the counts, let rank 0 write the row of `epochs`, and raise where training diverged.

        Then save the state if it is due. Returns whether to stop here, the same on all ranks.
        """
        names = [f"{part}_{what}" for part in ("train", "test") for what in ("loss_sum", "correct", "samples")]
        took_s = row["epoch_time_s"] + row["evaluation_time_s"]
        requests = [0.0, 0.0] if self._boundary is None else self._boundary.requests(epoch, took_s)
        values = [float(row[name]) for name in names] + requests + self._step_losses
        summed = self._world.total(values + self._metric_sums + self._experts.counts)
        total, (stop, save), losses = summed[:6], summed[6:8], summed[8 : len(values)]
        train_loss, _, train_samples, test_loss, _, test_samples = total
        assert test_samples == self._run.data.test_samples, f"{test_samples} test samples evaluated"
        is_last = epoch == self._run.epochs
        checks = [*self._samples(epoch, int(train_samples)), *self._settled.findings(is_last=is_last)]
        if self._world.rank == 0:
            self._journal.write("epochs", [self._epoch_row(epoch, total) | self._further(summed[len(values) :])])
            self._journal.write("losses", self._loss_rows(epoch, losses))
            self._journal.write("checks", [{**self._keys, **finding.row(epoch)} for finding in checks])
            self._journal.commit()
        self.evaluated = (test_loss / test_samples, total[4] / (test_samples * self._run.data.labels_per_sample))
        steps = self._run.steps_per_epoch
        sent_bytes = sum(row[f"{kind}_bytes_sent"] for kind in KINDS)
        # What precedes the second step is left out: in a run's first step DDP has other buckets.
        each = (after - before for before, after in pairwise(self._exchanges))
        self.sent.append(Sent(sent_bytes / steps, min(each, default=0)))
        if not (math.isfinite(train_loss) and math.isfinite(test_loss)):
            which = "training" if not math.isfinite(train_loss) else "test"
            raise NotFiniteError(f"the {which} loss was not finite in epoch {epoch}: {self._advice()}")
        if self._boundary is not None and save:
            self._boundary.save(epoch, self._replica)
        if self._boundary is not None and stop:
            self._boundary.stop(epoch)
        return bool(stop)

    def _advice(self) -> str:
        """What to try after a loss that is not finite, and what was looked at before the rate is blamed."""
        run = self._run
        coarse = ", or choose precision=fp32" if run.precision not in ("fp32", "fp64") else ""
        looked_at = "before training, this rank had the threads that it asks for"
        if checks_arithmetic(run, self._world.device_type):
            looked_at += f", and a step in {run.precision} on them was like one thread's"
        elif not run.measure.parity:
            looked_at += "; measure.parity=true would have checked more"
        known = f" ({looked_at})" if run.strategy.framework == "torch" else ""
        return f"lower optimizer.lr{coarse}{known}"

    def _further(self, summed: list[float]) -> dict[str, float | None]:
        """Columns of `epochs` about the metric and the experts, from their sums over all ranks."""
        size = len(self._metric_sums)
        return metric_column(self._run, summed[:size]) | self._experts.column(summed[size:])

    def _loss_rows(self, epoch: int, losses: list[float]) -> list[dict[str, Any]]:
        before, samples = (epoch - 1) * self._run.steps_per_epoch, self._run.global_batch_size
        return [{**self._keys, "epoch": epoch, **row} for row in rows_of(losses, before=before, samples=samples)]

    def _samples(self, epoch: int, taken: int) -> list[Finding]:
        """Whether gradients were taken of all samples; where they were, said after the last epoch only."""
        asked = self._run.steps_per_epoch * self._run.global_batch_size
        if taken == asked and epoch < self._run.epochs:
            return []
        what = f"gradients taken of {taken:,} samples in an epoch of {asked:,}"
        what += "" if taken else ": sums() sees those of a backward pass that comes after it"
        return [Finding(SAMPLES, what, difference=float(abs(taken - asked)), limit=0.0)]

    def _epoch_row(self, epoch: int, total: list[float]) -> dict[str, Any]:
        train_loss, train_correct, train_samples, test_loss, test_correct, test_samples = total
        asked, labels = self._run.steps_per_epoch * self._run.global_batch_size, self._run.data.labels_per_sample
        return {
            **self._keys,
            "epoch": epoch,
            "train_loss": train_loss / asked,
            "train_accuracy": train_correct / (asked * labels),
            "test_loss": test_loss / test_samples,
            "test_accuracy": test_correct / (test_samples * labels),
            "train_samples": int(train_samples),
            "test_samples": int(test_samples),
            "steps": self._run.steps_per_epoch,
            "finished_at": time.time(),
            **NOTHING,  # the reader of the journals adds the telemetry of all nodes
        }


class _Counted:
    """Passes batches on and counts their samples."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches, self.samples = batches, 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            self.samples += batch.size
            yield batch


def _sums(part: str, total: Any, samples: int) -> dict[str, Any]:
    loss_sum, correct = (0.0, 0.0) if total is None else total.tolist()
    return {f"{part}_samples": samples, f"{part}_loss_sum": loss_sum, f"{part}_correct": int(correct)}


def device_uuid(world: RankWorld) -> str:
    """UUIDs of this rank's GPUs, or the cores it is pinned to."""
    if world.device_type == "cuda":
        return ",".join(map(cuda.device_uuid, world.devices))
    return "cores " + ",".join(map(str, sorted(os.sched_getaffinity(0))))
