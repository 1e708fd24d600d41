"""Run by TensorFlow's interpreter for `tests/bench/tensorflow.py`: `… tensorflow_side ATTEMPT`; prints one JSON object.

Keras gets images that are normalised and in the suite's order already, so it only trains.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
if __name__ == "__main__":
    # Before TensorFlow makes threads: both sides get as many cores as the run has, and tf.data's threads no others.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[2])])

import msgspec
import numpy as np
import tensorflow as tf

from parallelbench.frameworks.tensorflow.feed import channels_last
from parallelbench.frameworks.tensorflow.twins import TwinState
from parallelbench.frameworks.tensorflow.world import TensorFlowWorld
from parallelbench.optim.optimizers import Sgd
from parallelbench.results.attempt import Attempt
from parallelbench.results.journal import Journal
from parallelbench.training.exchange import Exchange
from parallelbench.training.loop import Trainer
from tests.bench.measure import paired

if TYPE_CHECKING:
    from parallelbench.config.components import Arrays
    from parallelbench.config.run import RunConfig


ROUNDS = 5


class Suite:
    """The suite's loop with all its probes and its journal, as in `tests/bench/loop.py`."""

    def __init__(self, run: RunConfig, attempt: Attempt, arrays: Arrays, world: TensorFlowWorld) -> None:
        strategy: Any = run.strategy
        exchange = Exchange.of(attempt)
        replica: Any = strategy.prepare(exchange.read("initial"), run, world)
        self.feed = strategy.feed(arrays, run, exchange, world)
        self._journal = Journal(attempt.path / "journal-rank0.jsonl", keys={"run_id": "bench", "attempt": 1})
        self._trainer = Trainer(replica, self.feed, run=run, world=world, journal=self._journal)
        self._epoch, self.losses = 0, list[float]()

    def epoch(self) -> float:
        """Seconds of one more epoch, with all that is written of it."""
        self._epoch += 1
        start = time.perf_counter()
        row = self._trainer.train_epoch(self._epoch)
        self._journal.event("epoch", **row)
        self._trainer.write_rows()
        self._journal.commit()
        self.losses.append(row["train_loss_sum"] / row["train_samples"])
        return time.perf_counter() - start

    def fed(self) -> float:
        """Seconds in which an epoch's batches reach a graph that only looks at them."""
        start = time.perf_counter()
        for _ in self.feed.train(1):
            self._look()
        return time.perf_counter() - start

    @tf.function
    def _look(self) -> Any:
        images, labels = self.feed.next(0)
        self.feed.advance()
        return _seen(images, labels)


class Keras:
    """`fit` of the same layers from the same weights on the same batches."""

    def __init__(self, run: RunConfig, exchange: Exchange, arrays: Arrays) -> None:
        layers, optimizer = tf.keras.layers, run.optimizer
        self._run, self._exchange, self._images = run, exchange, normalised(run, arrays)
        self._labels, self._epoch, self.losses = np.asarray(arrays.train_labels), 0, list[float]()
        self._model = tf.keras.Sequential(
            [
                layers.Input((28, 28, 1)),
                layers.Conv2D(32, 3, padding="same", activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10),
            ]
        )
        initial = TwinState(exchange.read("initial"), run).initial
        self._model.set_weights([initial[name] for name in initial])
        self._model.compile(
            optimizer=_keras_optimizer(optimizer),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    def epoch(self) -> float:
        """Seconds from the first step to the last, without what surrounds `fit`."""
        self._epoch += 1
        order = self._exchange.order(self._epoch).samples.reshape(-1) % len(self._labels)
        images, labels, clock = self._images[order], self._labels[order], _EpochClock()
        history = self._model.fit(images, labels, self._run.batch_size, 1, verbose=0, shuffle=False, callbacks=[clock])
        self.losses.append(history.history["loss"][0])
        return clock.seconds


class _EpochClock(tf.keras.callbacks.Callback):  # type: ignore[misc]
    seconds = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds = time.perf_counter() - self._start


class Tutorial:
    """The pipeline of TensorFlow's and Keras's introductions, from memory."""

    def __init__(self, run: RunConfig, arrays: Arrays) -> None:
        mean, std = run.data.mean[0], run.data.std[0]

        def normalise(image: Any, label: Any) -> tuple[Any, Any]:
            return (tf.cast(image, tf.float32) / 255.0 - mean) / std, label

        images, labels = channels_last(arrays.train_images), np.asarray(arrays.train_labels)
        self._dataset = (
            tf.data.Dataset.from_tensor_slices((images, labels))
            .map(normalise, num_parallel_calls=tf.data.AUTOTUNE)
            .cache()
            .shuffle(len(labels))
            .batch(run.batch_size)
            .prefetch(tf.data.AUTOTUNE)
        )
        self._look = tf.function(_seen)

    def fed(self) -> float:
        """Seconds in which an epoch's batches reach a graph that only looks at them."""
        start = time.perf_counter()
        for images, labels in self._dataset:
            self._look(images, labels)
        return time.perf_counter() - start


def normalised(run: RunConfig, arrays: Arrays) -> Any:
    """All training images as Keras takes them."""
    scaled = (channels_last(arrays.train_images) / 255 - run.data.mean[0]) / run.data.std[0]
    return scaled.astype(np.float32)


def _keras_optimizer(optimizer: Any) -> Any:
    if isinstance(optimizer, Sgd):
        return tf.keras.optimizers.SGD(optimizer.lr, optimizer.momentum, optimizer.nesterov)
    return tf.keras.optimizers.Adam(optimizer.lr, epsilon=optimizer.eps)


def assert_the_work_is_the_same(run: RunConfig, attempt: Attempt, arrays: Arrays, world: TensorFlowWorld) -> None:
    """One epoch of both with an optimizer on which they agree, untimed: Keras's Adam has another eps than torch's."""
    plain = Sgd(
        name="sgd", lr=0.01, lr_rule="constant", weight_decay=0.0, implementation="auto", momentum=0.0, nesterov=False
    )
    run, exchange, strategy = msgspec.structs.replace(run, optimizer=plain), Exchange.of(attempt), run.strategy
    replica: Any = strategy.prepare(exchange.read("initial"), run, world)  # type: ignore[arg-type]
    losses = [replica.step(batch).tensor()[0] for batch in strategy.feed(arrays, run, exchange, world).train(1)]  # type: ignore[attr-defined]
    keras = Keras(run, exchange, arrays)
    keras.epoch()
    suites = sum(losses) / len(losses) / run.global_batch_size
    assert abs(suites - keras.losses[0]) < 1e-5 * suites, f"the work was not the same: {suites} {keras.losses}"


def _seen(images: Any, labels: Any) -> Any:
    """Both tensors are needed, and nearly nothing is computed of them."""
    return images[-1, 0, 0, 0] + tf.cast(labels[-1], images.dtype)


def main(folder: str) -> None:
    attempt = Attempt(Path(folder))
    run = attempt.config()
    arrays, world = run.data.load(Path("nowhere")), TensorFlowWorld(run, "cpu")
    world.distribution = run.strategy.connect(run, world)  # type: ignore[attr-defined]
    assert_the_work_is_the_same(run, attempt, arrays, world)
    suite, keras = Suite(run, attempt, arrays, world), Keras(run, Exchange.of(attempt), arrays)
    fit = paired({"suite": suite.epoch, "keras": keras.epoch}, ROUNDS)
    loss = abs(suite.losses[0] - keras.losses[0]) / keras.losses[0]
    # Keras's Adam adds its eps before it corrects the bias, torch's afterwards: this alone makes 1e-3.
    assert loss < 5e-3, f"the work was not the same: {suite.losses} {keras.losses}"
    tutorial = Tutorial(run, arrays)
    feed = paired({"suite": suite.fed, "tutorial": tutorial.fed}, ROUNDS)
    print(json.dumps({"fit": fit, "feed": feed, "loss": loss, "version": tf.__version__}))


if __name__ == "__main__":
    main(sys.argv[1])
