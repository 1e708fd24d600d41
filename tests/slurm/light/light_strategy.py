"""Training without torch in one process, for tests of what is around the training.

Six seconds of a core pass before a rank that loads torch begins its first epoch. In all else these ranks are like any
other: the job starts the same program, which trains in the suite's loop, with its journals, checkpoints and stops. They
train softmax regression in NumPy, whatever the run's model.
"""

from __future__ import annotations

import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import numpy as np
from msgspec import Meta

from parallelbench.config.components import Batch, Shard
from parallelbench.frameworks import FRAMEWORKS, Framework
from parallelbench.measure.traffic import Traffic
from parallelbench.strategies.single import Single
from parallelbench.training.session import RankSession
from parallelbench.world.machine import DeviceMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from parallelbench.config.components import Arrays
    from parallelbench.config.run import RunConfig


class Light(Single, frozen=True, kw_only=True):
    """One process, which has no torch."""

    step_s: Annotated[float, Meta(ge=0)]
    """How long a step takes besides, s: it waits, in the place of work that would take the cores from other jobs."""


class LightSession(RankSession):
    """The only rank's data, model and journal during a run."""

    def __init__(self, run: RunConfig, attempt: Any, *, device_type: str, journal: Any, startup: Any) -> None:
        assert device_type == "cpu"
        super().__init__(run, attempt, journal=journal, startup=startup)
        self._startup.done("imports")
        self._join(LightWorld())
        self._startup.done("process_group")

    def train(self) -> None:
        """Train, or resume where an earlier attempt stopped; results go to the journal."""
        resumed = self._resume()
        if resumed is None:
            self._record_environment()
        arrays = self._arrays()
        self._startup.done("data")
        self._record_data(arrays, resumed)
        self._phase("model")
        loader = LightLoader(arrays, self._run)
        replica = LightReplica(self._run, inputs=loader.inputs)
        if resumed is None:
            self._describe(replica.weights.size, None)
        else:
            self._record_warnings(resumed_after=resumed.again())
            resumed.restore(replica)  # type: ignore[arg-type]
        self._startup.done("model")
        trainer = self._trainer(replica, loader)  # type: ignore[arg-type]
        if trainer.train(first=1 if resumed is None else resumed.epoch + 1):
            self._finished(None)


class LightWorld:
    """One rank among no others; `parallelbench.frameworks.RankWorld`."""

    rank, size, local_rank, device_type = 0, 1, 0, "cpu"

    def gpus(self) -> list[tuple[str, str]]:
        return []

    def reset_peaks(self) -> None:
        """There is no GPU."""

    def peaks(self) -> list[DeviceMemory]:
        return []

    def memory_bytes(self) -> list[int | None]:
        return []

    def synchronize(self) -> None:
        """A call returns when its work is done."""

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def total(self, values: Sequence[float]) -> list[float]:
        return [float(value) for value in values]

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def checksum(self, copied: Iterable[NDArray[Any]]) -> int:
        return zlib.crc32(b"".join(array.tobytes() for array in copied))

    def exchange_counter(self) -> Callable[[], int]:
        return int

    def random_state(self) -> list[Any]:
        return []

    def set_random_state(self, states: Any) -> None:
        """The order of samples follows from seed and epoch, and nothing else is drawn."""

    def write_state(self, state: dict[str, Any], file: BinaryIO) -> None:
        np.savez(file, **state["replica"])

    def read_state(self, path: Path) -> dict[str, Any]:
        with np.load(path) as read:
            return {"replica": {name: read[name] for name in read.files}, "random": []}

    def leave(self) -> None:
        """There is nobody to leave."""


class LightLoader:
    """The data set in memory, with the interface of `BatchLoader`."""

    workers = 0

    def __init__(self, arrays: Arrays, run: RunConfig) -> None:
        self._run = run
        self._train, self._test = _pixels(arrays.train_images), _pixels(arrays.test_images)
        self._train_labels, self._test_labels = arrays.train_labels, arrays.test_labels

    @property
    def inputs(self) -> int:
        return int(self._train.shape[1])

    def train(self, epoch: int) -> Iterator[Batch]:
        run, size = self._run, self._run.global_batch_size
        order = np.random.default_rng([run.effective_seed, epoch]).permutation(run.data.train_samples)
        for step in range(run.steps_per_epoch):
            chosen = order[step * size : (step + 1) * size] % len(self._train)
            yield _batch(self._train[chosen], self._train_labels[chosen])

    def test(self) -> Iterator[Batch]:
        yield _batch(self._test, self._test_labels)

    def worker_pids(self) -> list[int]:
        return []


def _pixels(images: NDArray[np.uint8]) -> NDArray[np.float64]:
    return np.asarray(images).reshape(len(images), -1) / 255 - 0.5


def _batch(images: NDArray[Any], labels: NDArray[Any]) -> Batch:
    return Batch(images, labels, len(labels))  # type: ignore[arg-type]


@dataclass
class LightSums:
    """Summed loss and correct predictions of each step, as `Sums` of `numerics`."""

    rows: list[tuple[float, float]]
    samples: int

    def __add__(self, other: LightSums) -> LightSums:
        return LightSums(self.rows + other.rows, self.samples + other.samples)

    def tensor(self) -> NDArray[np.float64]:
        return np.sum(self.rows, axis=0)

    def losses(self) -> NDArray[np.float64]:
        return np.array(self.rows)[:, 0]


class LightReplica:
    """Softmax regression by gradient descent, with what the loop asks of a `Replica`."""

    data_shard, shares_at_evaluation = Shard(), False

    def __init__(self, run: RunConfig, *, inputs: int) -> None:
        strategy: Any = run.strategy
        optimizer: Any = run.optimizer
        self._step_s, self._lr = strategy.step_s, optimizer.lr
        self.traffic = Traffic()
        self.weights = np.zeros((inputs, run.data.num_classes))

    def step(self, batch: Batch) -> LightSums:
        time.sleep(self._step_s)
        logs, sums = self._forward(batch)
        error = np.exp(logs)
        error[np.arange(batch.size), np.asarray(batch.labels)] -= 1
        self.weights -= self._lr / batch.size * np.asarray(batch.images).T @ error
        return sums

    def evaluate(self, batches: Iterable[Batch]) -> NDArray[np.float64]:
        return np.sum([self._forward(batch)[1].tensor() for batch in batches], axis=0)

    def _forward(self, batch: Batch) -> tuple[NDArray[np.float64], LightSums]:
        """Logarithms of the classes' probabilities, and the two sums."""
        labels, logits = np.asarray(batch.labels), np.asarray(batch.images) @ self.weights
        logits -= logits.max(axis=1, keepdims=True)
        logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        loss = -logs[np.arange(batch.size), labels].sum()
        correct = (logs.argmax(axis=1) == labels).sum()
        return logs, LightSums([(float(loss), float(correct))], batch.size)

    def copied(self) -> Mapping[int, Iterable[NDArray[np.float64]]]:
        return {0: [self.weights]}

    def local_state(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_local_state(self, state: dict[str, Any]) -> None:
        self.weights[:] = state["weights"]

    def take_pushes(self) -> list[Any]:
        return []


def entries() -> dict[str, Any]:
    """What such a rank has in the place of torch's part of the environment."""
    return {"packages": {}, "threads": 1}


if Path(sys.argv[0]).name == "worker.py":  # a rank: whoever plans or submits imports this file as well
    FRAMEWORKS["torch"] = Framework(f"{__name__}:LightSession", f"{__name__}:entries", "single")
