"""Training on one device with TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parallelbench.errors import ConfigError
from parallelbench.frameworks.tensorflow.tf_options import MirroredCopies

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks.tensorflow.tf_world import TensorFlowWorld


class TfSingle(MirroredCopies, frozen=True, kw_only=True):
    """One process, one device, TensorFlow's default strategy."""

    def processes(self, run: RunConfig, device_type: str) -> int:
        """One."""
        return 1

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One: the whole batch."""
        return 1

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse more than one device."""
        super().check(run, device_type)
        if run.devices != 1:
            raise ConfigError(
                f"strategy={self.name} trains on one device, not devices={run.devices}: choose devices=1 or "
                "strategy=tf_mirrored"
            )

    def connect(self, run: RunConfig, world: TensorFlowWorld) -> Any:
        """TensorFlow's default strategy."""
        import tensorflow as tf

        return tf.distribute.get_strategy()
