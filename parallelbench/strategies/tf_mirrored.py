"""TensorFlow's MirroredStrategy: one process, a copy of the model on each of its devices, gradients all-reduced.

https://www.tensorflow.org/api_docs/python/tf/distribute/MirroredStrategy
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from parallelbench.frameworks.tensorflow.tf_options import MirroredCopies, check_all_reduce

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks.tensorflow.tf_world import TensorFlowWorld


class TfMirrored(MirroredCopies, frozen=True, kw_only=True):
    """One process drives all devices; on CPUs these are logical devices, which share its threads."""

    all_reduce: Literal["auto", "nccl", "hierarchical_copy", "reduce_to_one"]
    """How gradients are summed. auto: nccl on GPUs, hierarchical_copy on CPUs."""

    def processes(self, run: RunConfig, device_type: str) -> int:
        """One process drives all devices."""
        return 1

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One slice per device."""
        return run.devices

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse NCCL on CPUs."""
        super().check(run, device_type)
        check_all_reduce(self.all_reduce, ("auto", "nccl", "hierarchical_copy", "reduce_to_one"), device_type)

    def connect(self, run: RunConfig, world: TensorFlowWorld) -> Any:
        """The strategy over this process's devices."""
        import tensorflow as tf

        chosen = self.all_reduce
        if chosen == "auto":
            chosen = "nccl" if world.device_type == "cuda" else "hierarchical_copy"
        reduce = {
            "nccl": tf.distribute.NcclAllReduce,
            "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
            "reduce_to_one": tf.distribute.ReductionToOneDevice,
        }[chosen]
        return tf.distribute.MirroredStrategy(world.device_names, cross_device_ops=reduce())
