"""A twin with its run's numbers: initial values in TensorFlow's layout, forward and backward, and the way back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from parallelbench.frameworks.tensorflow.layers import Pass
from parallelbench.frameworks.tensorflow.twins import twin_of
from parallelbench.frameworks.tensorflow.updates import Update

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from parallelbench.config.run import RunConfig
    from parallelbench.training.exchange import State

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Ends of the names of what is no parameter."""


class TwinState:
    """What all replicas of a run share; it holds no variables."""

    def __init__(self, initial: State, run: RunConfig) -> None:
        """`initial`: the state under torch's names, in torch's layout."""
        self._twin, self.update = twin_of(run.model, run.data.shape), Update(run)
        self._shapes = {name: array.shape for name, array in initial.items()}
        self._layouts = self._twin.layouts(initial)
        self._kept = [key for key in run.optimizer.kept() or () if key != "step"]  # type: ignore[attr-defined]
        wide = np.float64 if run.precision == "fp64" else np.float32
        values = {name: self._layouts[name].to_tensorflow(array) for name, array in initial.items()}
        self.initial = {k: v.astype(wide) if np.issubdtype(v.dtype, np.floating) else v for k, v in values.items()}
        """Name → initial value, in TensorFlow's layout and the run's precision."""
        self.parameters = [name for name in self.initial if not name.endswith(BUFFERS)]
        self.nbytes = sum(self.initial[name].nbytes for name in self.parameters)
        """Bytes of all parameters."""
        synced = getattr(run.model, "norm", None) == "sync"
        means = [value for name, value in self.initial.items() if synced and name.endswith("running_mean")]
        self.moments_bytes = sum(2 * (2 * mean.nbytes + mean.itemsize) for mean in means)
        """Bytes of what norms over all replicas sum: moments and a count of each, and their gradients."""

    def differentiated(
        self,
        values: Mapping[str, Any],
        batch: tuple[Any, Any],
        *,
        size: int,
        merge: Callable[[Any, Any, int], tuple[Any, Any, Any]] | None = None,
    ) -> Any:
        """Sums, gradients of the summed loss ÷ `size`, and buffers: a function of tensors, for XLA.

        Sums: loss, correct predictions and samples, which are the rows of logits.
        `batch`: images and labels. `merge`: of a replica's moments, as in `Pass`.
        """
        images, labels = batch
        trained = {name: values[name] for name in self.parameters}
        with tf.GradientTape() as tape:
            tape.watch(trained)
            forward = Pass({**values, **trained}, training=True, moments=merge)
            logits = self._twin.forward(forward, images)
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            mean = loss / size
        samples = tf.cast(tf.shape(logits)[:1], tf.float64)
        return tf.concat([_sums(loss, logits, labels), samples], axis=0), tape.gradient(mean, trained), forward.buffers

    def evaluated(self, values: Mapping[str, Any], images: Any, labels: Any) -> Any:
        """Summed loss and correct predictions, in evaluation mode."""
        logits = self._twin.forward(Pass(values, training=False), images)
        return _sums(tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)), logits, labels)

    def in_torchs_layout(self, tensors: Mapping[str, Any]) -> State:
        """Tensors or variables as arrays under torch's names, in torch's layout."""
        return {name: self._layouts[name].to_torch(each.numpy(), self._shapes[name]) for name, each in tensors.items()}

    def optimizer_state(self, key: str, slots: Mapping[str, list[Any]], step: Any) -> State:
        """What the optimizer keeps of each parameter under torch's `key`; `step`: updates so far."""
        if key == "step":
            return {name: np.full(self._shapes[name], step.numpy()) for name in self.parameters}
        slot = self._kept.index(key)
        return self.in_torchs_layout({name: each[slot] for name, each in slots.items()})


def _sums(loss: Any, logits: Any, labels: Any) -> Any:
    correct = tf.argmax(logits, axis=1, output_type=labels.dtype) == labels
    return tf.stack([tf.cast(loss, tf.float64), tf.reduce_sum(tf.cast(correct, tf.float64))])
