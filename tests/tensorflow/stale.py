"""Run by TensorFlow's interpreter: a push that is applied after others', forced without a cluster and without a clock.

The slow worker's gradients are there; before it hands them over, others make whole pushes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from parallelbench.frameworks.tensorflow.servers import _STALENESS, _UPDATE, CoordinatorReplica

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks.tensorflow.world import TensorFlowWorld
    from parallelbench.training.exchange import State


def forced(initial: State, run: RunConfig, world: TensorFlowWorld, *, others: int) -> dict[str, Any]:
    """What the replica records of a push before which `others` are made, and how far its update is from the formula."""
    world.distribution = SimpleNamespace(workers=2, servers=1, strategy=tf.distribute.get_strategy())
    tf.distribute.coordinator.experimental_get_current_worker_index = lambda: tf.constant(0)
    replica = CoordinatorReplica(initial, run, world)
    twin = replica._twin
    differentiated, read = twin.differentiated, {name: value.numpy() for name, value in replica._values.items()}
    generator = np.random.default_rng(0)
    images = tf.constant(generator.standard_normal((8, *run.data.shape[1:], run.data.shape[0])), tf.float64)
    labels = tf.constant(generator.integers(0, 10, 8), tf.int32)

    def push() -> Any:
        meanwhile: list[Any] = []
        seen: dict[str, Any] = {}

        def slow(values: Any, batch: Any, *, size: int) -> Any:
            found = differentiated(values, batch, size=size)
            twin.differentiated = differentiated  # type: ignore[method-assign]
            for _ in range(others):
                meanwhile.append(replica._trained(tf.constant(1), images, labels))
            seen.update({name: variable.read_value() for name, variable in replica._values.items()})
            return found

        twin.differentiated = slow  # type: ignore[method-assign, assignment]
        return replica._trained(tf.constant(0), images, labels), meanwhile, seen

    row, meanwhile, before = tf.function(push)()
    _, gradients, _ = differentiated(
        {name: tf.constant(value) for name, value in read.items()}, (images, labels), size=8
    )
    lr = run.optimizer.scaled_lr(run)
    after = {name: variable.numpy() for name, variable in replica._values.items()}
    expected = {name: before[name].numpy() - lr * gradients[name].numpy() for name in twin.parameters}
    replica._account([row.numpy().tolist()])
    return {
        "recorded": [push.staleness for push in replica.take_pushes()],
        "update": int(row[_UPDATE]),
        "others": [(int(each[_STALENESS]), int(each[_UPDATE])) for each in meanwhile],
        "difference": max(float(np.abs(after[name] - expected[name]).max()) for name in twin.parameters),
        "moved": max(float(np.abs(before[name].numpy() - read[name]).max()) for name in twin.parameters),
    }
