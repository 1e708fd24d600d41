"""What observes the epochs of a run: each observer is told of the same few moments, all of them outside the windows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from parallelbench.errors import ConfigError
from parallelbench.measure.clock import StepClock
from parallelbench.measure.memory import MemoryProbe
from parallelbench.measure.processor import ProcessorShare, WorkerProbe
from parallelbench.results.tables import CLIPPING, EXPERT_BALANCE, METRIC, SAMPLES
from parallelbench.training.checks.comparability import Finding

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from parallelbench.config.components import Batch
    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks import RankWorld
    from parallelbench.loaders.order import BatchLoader
    from parallelbench.measure.clock import StartUp

Row = dict[str, Any]


class Observer:
    """One rank's part in observing something. Every moment does nothing unless an observer says otherwise.

    Moments come in the order of the methods. Observers are told in their order, but of the end of training in the
    reverse one: what the last one measures is nearest to the window.
    """

    def epoch_starts(self, epoch: int) -> None:
        """The training window of an epoch (from 1) opens next."""

    def epoch_trained(self, trained: Any) -> Row:
        """The training window is closed. `trained`: sums over the samples whose loss this rank owns; None: none.

        Returns columns of this rank's row of `ranks`.
        """
        return {}

    def epoch_evaluated(self, evaluated: Any) -> Row:
        """The evaluation window is closed. `evaluated`: its sums, likewise. Returns further columns of that row."""
        return {}

    def rows(self) -> Iterable[tuple[str, Row]]:
        """This rank's rows of other tables about the epoch, each with the table's name, but without epoch and rank."""
        return ()

    def sums(self) -> list[float]:
        """Numbers to be added up over all ranks: as many on every rank. All observers' share one all-reduce."""
        return []

    def epoch_summed(self, total: Sequence[float]) -> Iterable[tuple[str, Row]]:
        """What was added up. Returns rows of tables, but for the epoch, for rank 0 to write.

        Columns of `epochs` go into its one row.
        """
        return ()


class Memory(Observer):
    """Peaks of memory in the training window. It comes late, so that no peak holds what other observers take."""

    def __init__(self, world: RankWorld) -> None:
        self._probe = MemoryProbe(world)
        self._held_bytes = 0

    def epoch_starts(self, epoch: int) -> None:
        self._probe.start()

    def epoch_trained(self, trained: Any) -> Row:
        self._held_bytes = self._probe.held_bytes()
        return self._probe.stop()

    def epoch_evaluated(self, evaluated: Any) -> Row:
        self._probe.give_back(self._held_bytes)  # no later peak counts what the evaluation and the checksums took
        return {}


class Capture(Observer):
    """Captures the step as a CUDA graph (`graph=true`) before the first window, whose time so doesn't hold it.

    The peak of that epoch does, as a replay asks the allocator for nothing: this comes after the peaks begin anew.
    """

    def __init__(self, replica: Replica, loader: BatchLoader, startup: StartUp | None) -> None:
        self._replica, self._loader, self._startup = replica, loader, startup
        self._captured = False

    def epoch_starts(self, epoch: int) -> None:
        if self._captured:
            return
        self._captured = True
        if self._startup is not None:
            self._startup.done("model")
        self._replica.compile_warmup(next(self._loader.train(epoch)))
        if self._startup is not None:
            self._startup.done("compile")


class Processor(Observer):
    """Processor time in the training window: the loader's workers', and what others took."""

    def __init__(self, loader: BatchLoader, own_cores: Collection[int]) -> None:
        self._workers, self._share = WorkerProbe(loader), ProcessorShare(own_cores)

    def epoch_starts(self, epoch: int) -> None:
        self._workers.start()
        self._share.start()

    def epoch_trained(self, trained: Any) -> Row:
        workers = self._workers.stop()
        return {**workers, **self._share.stop(children_s=workers["loader_cpu_time_s"] or 0.0)}


class Sending(Observer):
    """Bytes sent in the training window, and updates that were pushed to servers."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def epoch_starts(self, epoch: int) -> None:
        self._replica.traffic.take()  # what evaluation has sent

    def epoch_trained(self, trained: Any) -> Row:
        return self._replica.traffic.take()

    def rows(self) -> Iterator[tuple[str, Row]]:
        for push in self._replica.take_pushes():
            yield "pushes", {"step": push.step, "staleness": push.staleness}


class Clipping(Observer):
    """Norms of the gradients that were clipped in the training window."""

    def __init__(self, replica: Replica, run: RunConfig) -> None:
        self._replica, self._clips = replica, run.clip_norm is not None

    def epoch_starts(self, epoch: int) -> None:
        self._take()  # those of steps before the window

    def epoch_trained(self, trained: Any) -> Row:
        return self._take()

    def _take(self) -> Row:
        taken = self._replica.take_norms() if self._clips else {}
        return {column.name: taken.get(column.name) for column in CLIPPING}


class StepTimes(StepClock, Observer):
    """Durations of sampled steps, whose batches the loop lets pass through the clock."""

    def __init__(self, world: RankWorld, run: RunConfig) -> None:
        # On a GPU by torch's events: other frameworks launch steps there without saying when they end.
        is_timed = world.device_type == "cpu" or run.strategy.framework == "torch"
        sampled = run.measure.steps_sampled if is_timed else 0
        super().__init__(world, steps=run.steps_per_epoch, sampled=sampled)

    def rows(self) -> Iterator[tuple[str, Row]]:
        for step, duration_s in self.durations():
            yield "steps", {"step": step, "step_time_s": duration_s}


class Scores(Observer):
    """Loss and correct predictions in training and in evaluation; whether gradients were taken of all samples."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self.test_samples = 0
        """How many this rank has evaluated in the epoch: whoever hands the batches over counts them."""
        self.train_loss = self.test_loss = self.test_accuracy = math.nan
        """Over all ranks: the mean losses, and the share of correct predictions on the test set."""

    def epoch_starts(self, epoch: int) -> None:
        self._epoch, self.test_samples = epoch, 0

    def counted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The test batches, whose samples are counted."""
        for batch in batches:
            self.test_samples += batch.size
            yield batch

    def epoch_trained(self, trained: Any) -> Row:
        both, samples = (None, 0) if trained is None else (trained.tensor(), trained.samples)
        self._trained = _scores("train", both, samples)
        return self._trained

    def epoch_evaluated(self, evaluated: Any) -> Row:
        both, samples = (None, 0) if evaluated is None else (evaluated[:2], self.test_samples)
        self._evaluated = _scores("test", both, samples)
        return self._evaluated

    def sums(self) -> list[float]:
        return [float(value) for value in (*self._trained.values(), *self._evaluated.values())]

    def epoch_summed(self, total: Sequence[float]) -> list[tuple[str, Row]]:
        train_samples, train_loss, train_correct, test_samples, test_loss, test_correct = total
        run, labels = self._run, self._run.data.labels_per_sample
        assert test_samples == run.data.test_samples, f"{test_samples} test samples evaluated"
        asked = run.steps_per_epoch * run.global_batch_size
        self.train_loss, self.test_loss = train_loss / asked, test_loss / test_samples
        self.test_accuracy = test_correct / (test_samples * labels)
        row = {
            "train_loss": self.train_loss,
            "train_accuracy": train_correct / (asked * labels),
            "test_loss": self.test_loss,
            "test_accuracy": self.test_accuracy,
            "train_samples": int(train_samples),
            "test_samples": int(test_samples),
            "steps": run.steps_per_epoch,
        }
        rows = [("epochs", row)]
        if train_samples != asked or self._epoch == run.epochs:
            what = f"gradients taken of {int(train_samples):,} samples in an epoch of {asked:,}"
            what += "" if train_samples else ": sums() sees those of a backward pass that comes after it"
            finding = Finding(SAMPLES, what, difference=float(abs(train_samples - asked)), limit=0.0)
            rows.append(("checks", finding.row(self._epoch)))
        return rows


def _scores(part: str, both: Any, samples: int) -> Row:
    loss_sum, correct = (0.0, 0.0) if both is None else both.tolist()
    return {f"{part}_samples": samples, f"{part}_loss_sum": loss_sum, f"{part}_correct": int(correct)}


BLOCK = 64
"""Steps of a run whose losses have a row each, and steps of a later row: within about as many, right runs drift apart.
"""


class StepLosses(Observer):
    """Losses of single steps, and of blocks of steps: cheap, since sums are kept by step anyway."""

    def __init__(self, run: RunConfig) -> None:
        self._run, self._losses = run, [0.0] * run.steps_per_epoch

    def epoch_starts(self, epoch: int) -> None:
        self._epoch = epoch

    def epoch_trained(self, trained: Any) -> Row:
        self._losses = by_step(trained, self._run.steps_per_epoch)
        return {}

    def sums(self) -> list[float]:
        return self._losses

    def epoch_summed(self, total: Sequence[float]) -> Iterator[tuple[str, Row]]:
        before = (self._epoch - 1) * self._run.steps_per_epoch
        for row in rows_of(total, before=before, samples=self._run.global_batch_size):
            yield "losses", row


def by_step(total: Any, steps: int) -> list[float]:
    """The summed loss of each step of an epoch on this rank: zeros where it owns none, NaN where steps can't be told
    apart. Waits for the device.
    """
    if total is None:
        return [0.0] * steps
    losses: list[float] = total.losses().tolist()
    pieces, rest = divmod(len(losses), steps)
    return [math.nan] * steps if rest else [math.fsum(losses[i * pieces : (i + 1) * pieces]) for i in range(steps)]


def rows_of(losses: Sequence[float], *, before: int, samples: int) -> Iterator[Row]:
    """The columns `step`, `steps` and `train_loss` of an epoch; none where a loss is not finite.

    `losses`: summed over all ranks, of each step. `before`: steps of earlier epochs. `samples`: of a step.
    """
    if not all(map(math.isfinite, losses)):
        return
    first = 0
    while first < len(losses):
        end = first + 1 if before + first < BLOCK else min(len(losses), (first // BLOCK + 1) * BLOCK)
        mean = math.fsum(losses[first:end]) / (end - first) / samples
        yield {"step": first + 1, "steps": end - first, "train_loss": mean}
        first = end


class EvaluatedMetric(Observer):
    """The run's metric, of each evaluation."""

    def __init__(self, run: RunConfig) -> None:
        self._run, self._sums = run, metric_sums(None, run)

    def epoch_evaluated(self, evaluated: Any) -> Row:
        self._sums = metric_sums(evaluated, self._run)
        return {}

    def sums(self) -> list[float]:
        return self._sums

    def epoch_summed(self, total: Sequence[float]) -> Iterator[tuple[str, Row]]:
        (column,) = METRIC
        yield "epochs", {column.name: metric_value(self._run, total)}


def metric_sums(evaluated: Any, run: RunConfig) -> list[float]:
    """What a rank's evaluation gives besides summed loss and correct predictions; zeros where it owns no sample.

    Raises `ConfigError` where a replica leaves them out.
    """
    size = run.metric_size
    if not size or evaluated is None:
        return [0.0] * size
    if evaluated.shape != (2 + size,):
        raise ConfigError(
            f"metric={run.metric.name} with strategy={run.strategy.name} is refused: evaluate of its replica returns "
            f"{math.prod(evaluated.shape)} sums, not 2 and the metric's {size}: return those of numerics_of(run, "
            "device_type).sums(loss, logits, labels), without gradients, or choose metric=none"
        )
    sums: list[float] = evaluated[2:].tolist()
    return sums


def metric_value(run: RunConfig, sums: Sequence[float]) -> float | None:
    """The metric after these sums over all ranks; None where there is none, or they or it are no finite numbers."""
    if not sums or not all(map(math.isfinite, sums)):
        return None
    found = float(run.metric.value(sums))
    return found if math.isfinite(found) else None


class ExpertBalance(Observer):
    """How evenly tokens fall on experts. For models without experts nothing is asked, kept or sent."""

    def __init__(self, replica: Replica, run: RunConfig) -> None:
        self._replica = replica
        experts = run.model.anatomy().experts
        self._blocks, self._experts = experts.blocks, experts.each
        self._counts: list[float] = []
        """Block by block, of each expert; zeros of blocks that are on other ranks."""

    def epoch_starts(self, epoch: int) -> None:
        self._take()  # those of steps before the window

    def epoch_trained(self, trained: Any) -> Row:
        self._take()
        return {}

    def sums(self) -> list[float]:
        return self._counts

    def epoch_summed(self, total: Sequence[float]) -> Iterator[tuple[str, Row]]:
        # Ranks that compute the same tokens, as those of tensor parallelism, count them once each: the ratio stays.
        size = self._experts
        blocks = [total[first : first + size] for first in range(0, len(total), size)] if size else []
        ratios = [max(counts) * size / sum(counts) for counts in blocks if sum(counts)]
        (column,) = EXPERT_BALANCE
        yield "epochs", {column.name: sum(ratios) / len(ratios) if ratios else None}

    def _take(self) -> None:
        """The counts since the last call; waits for the devices."""
        if self._blocks:
            taken, nothing = self._replica.take_expert_tokens(), [0] * self._experts
            self._counts = [float(count) for block in range(self._blocks) for count in taken.get(block, nothing)]
