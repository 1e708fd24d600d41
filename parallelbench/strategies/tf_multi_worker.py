"""TensorFlow's MultiWorkerMirroredStrategy: one process per device, gradients all-reduced by collectives.

https://www.tensorflow.org/api_docs/python/tf/distribute/MultiWorkerMirroredStrategy
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from parallelbench.errors import ConfigError
from parallelbench.frameworks.tensorflow.tf_options import MirroredCopies, check_all_reduce

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks.tensorflow.tf_world import TensorFlowWorld


class TfMultiWorker(MirroredCopies, frozen=True, kw_only=True):
    """One process per device; workers exchange gradients over gRPC (ring), or between GPUs by NCCL."""

    spans_nodes: ClassVar[bool] = True

    all_reduce: Literal["auto", "nccl", "ring"]
    """How gradients are summed. auto: nccl on GPUs, ring on CPUs."""

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One slice per device."""
        return run.devices

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse one device, and NCCL on CPUs."""
        super().check(run, device_type)
        check_all_reduce(self.all_reduce, ("auto", "nccl", "ring"), device_type)
        if run.devices < 2:
            raise ConfigError(f"strategy={self.name} needs devices=2 or more: choose strategy=tf_single for one")

    def connect(self, run: RunConfig, world: TensorFlowWorld) -> Any:
        """The strategy over all ranks."""
        import tensorflow as tf

        world.configure_cluster("worker")
        chosen = {"auto": "AUTO", "nccl": "NCCL", "ring": "RING"}[self.all_reduce]
        if self.all_reduce == "auto" and world.device_type == "cpu":
            chosen = "RING"
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=getattr(tf.distribute.experimental.CommunicationImplementation, chosen),
            timeout_seconds=run.launcher.collective_timeout_s,
        )
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
