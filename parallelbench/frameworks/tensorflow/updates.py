"""The suite's optimizers as TensorFlow's fused updates, by torch's formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from parallelbench.optim.optimizers import Adagrad, Adam, AdamW, Sgd

if TYPE_CHECKING:
    from parallelbench.config.components import Optimizer
    from parallelbench.config.run import RunConfig


class Update:
    """One optimizer. What it keeps of a parameter is a list of variables of the parameter's shape."""

    def __init__(self, run: RunConfig) -> None:
        self._optimizer: Optimizer = run.optimizer
        self._lr = run.optimizer.scaled_lr(run)
        self.slots = run.optimizer.states_per_parameter() or 0
        """Variables per parameter."""

    def apply(self, value: Any, slots: list[Any], gradient: Any, step: Any, *, locked: bool = False) -> None:
        """Update one variable in place; `step`: how many updates there were, this one included (int64).

        `locked`: while others update it, too.
        """
        optimizer, dtype = self._optimizer, gradient.dtype

        def number(x: Any) -> Any:
            return _number(x, dtype)

        decay = getattr(optimizer, "weight_decay", 0.0)
        if decay and isinstance(optimizer, AdamW):
            value.assign(value.read_value() * number(1 - self._lr * decay))
        elif decay:
            gradient = gradient + number(decay) * value.read_value()
        lr = number(self._lr)
        if isinstance(optimizer, Adam):
            self._adam(optimizer, value, slots, gradient=gradient, step=step, locked=locked)
        elif isinstance(optimizer, Adagrad):
            tf.raw_ops.ResourceApplyAdagradV2(
                var=value.handle,
                accum=slots[0].handle,
                lr=lr,
                epsilon=number(optimizer.eps),
                grad=gradient,
                use_locking=locked,
            )
        elif isinstance(optimizer, Sgd) and optimizer.momentum:
            tf.raw_ops.ResourceApplyMomentum(
                var=value.handle,
                accum=slots[0].handle,
                lr=lr,
                grad=gradient,
                momentum=number(optimizer.momentum),
                use_nesterov=optimizer.nesterov,
                use_locking=locked,
            )
        else:
            tf.raw_ops.ResourceApplyGradientDescent(var=value.handle, alpha=lr, delta=gradient, use_locking=locked)

    def _adam(self, optimizer: Adam, value: Any, slots: list[Any], *, gradient: Any, step: Any, locked: bool) -> None:
        """torch adds eps to √v ÷ √(1 − β₂ᵗ), TensorFlow to √v: hence an eps of each step.

        Both corrections are computed in fp64: TensorFlow's own, in fp32, would be off in the fifth digit.
        """

        def number(x: Any) -> Any:
            return _number(x, gradient.dtype)

        power = tf.cast(step, tf.float64)
        first, second = (
            1 - tf.pow(tf.constant(beta, tf.float64), power) for beta in (optimizer.beta1, optimizer.beta2)
        )
        root = tf.sqrt(second)
        tf.raw_ops.ResourceApplyAdam(
            var=value.handle,
            m=slots[0].handle,
            v=slots[1].handle,
            beta1_power=number(0.0),
            beta2_power=number(0.0),
            lr=number(self._lr * root / first),
            beta1=number(optimizer.beta1),
            beta2=number(optimizer.beta2),
            epsilon=number(optimizer.eps * root),
            grad=gradient,
            use_locking=locked,
        )


def _number(x: Any, dtype: Any) -> Any:
    """A scalar of this type; `tf.cast` would round one of Python's to fp32 first."""
    return tf.cast(x, dtype) if tf.is_tensor(x) else tf.constant(x, dtype)
