"""TensorFlow's ParameterServerStrategy: workers send gradients to servers, and a coordinator hands out the steps.

https://www.tensorflow.org/api_docs/python/tf/distribute/ParameterServerStrategy
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta

from parallelbench.errors import ConfigError
from parallelbench.frameworks.tensorflow.tf_options import TensorFlowStrategy
from parallelbench.optim.optimizers import AdamW

if TYPE_CHECKING:
    from parallelbench.config.components import Arrays
    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks.tensorflow.tf_world import TensorFlowWorld
    from parallelbench.training.exchange import Exchange


class TfParameterServer(TensorFlowStrategy, frozen=True, kw_only=True):
    """The last `servers` ranks hold parameters and optimizer, variable by variable in turn; the others train.

    TensorFlow's coordinator lives in rank 0, beside its first worker, and shares that worker's cores. It hands each
    slice of a global batch to whichever worker is free. Data lie in every worker's memory.

    sync: TensorFlow's strategy is asynchronous only, so the suite adds the barrier. In every step each slice's gradient
    goes to a place of its own on the server; once all are there, they are added in the slices' order and make one
    update: the same computation as on one device.

    async: each slice's gradient, the mean over the slice, makes one update when it is there, with the run's learning
    rate, as in Downpour SGD (Dean et al. 2012, with optimizer=adagrad). Updates of one variable exclude each other;
    those of different variables may mix. A push's staleness is the number of updates that others began between its
    reading of the parameters and its own. An epoch ends when all its slices have been applied.
    """

    spans_nodes: ClassVar[bool] = True

    mode: Literal["sync", "async"]
    """sync: all slices' gradients make one update. async: each makes one, when it is there."""
    servers: Annotated[int, Meta(ge=1)]
    """How many of the devices are servers."""

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One slice per worker."""
        return max(1, run.devices - self.servers)

    def equals_one_device(self, run: RunConfig) -> bool:
        """Not when gradients are applied in the order in which they happen to arrive."""
        return self.mode == "sync"

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse counts that don't fit, and what has no place on a server."""
        super().check(run, device_type)
        workers = run.devices - self.servers
        if workers < 1:
            raise ConfigError(
                f"strategy.servers={self.servers} of devices={run.devices} leaves no worker: choose "
                f"devices={self.servers + 1} or more"
            )
        if run.global_batch_size % workers:
            raise ConfigError(
                f"batch_size={run.batch_size} can't be divided among {workers} workers (devices={run.devices} less "
                f"strategy.servers={self.servers}): choose a multiple of {workers}"
            )
        if getattr(run.model, "norm", None) in ("batch", "sync"):
            raise ConfigError(
                f"model.norm={run.model.norm} with strategy={self.name} is refused: "  # type: ignore[attr-defined]
                "no server merges the workers' statistics: choose model.norm=group"
            )
        if self.mode == "async" and isinstance(run.optimizer, AdamW) and run.optimizer.weight_decay:
            raise ConfigError(
                f"optimizer={run.optimizer.name} with strategy.mode=async is refused: its decay would undo updates "
                "that arrive meanwhile: choose optimizer.weight_decay=0 or optimizer=adam"
            )

    def connect(self, run: RunConfig, world: TensorFlowWorld) -> Any:
        """This rank's server and, on rank 0, the coordinator."""
        from parallelbench.frameworks.tensorflow.server_cluster import Cluster

        return Cluster(run, world, servers=self.servers)

    def prepare(self, model: Any, run: RunConfig, world: Any) -> Any:
        """The coordinator's replica on rank 0; elsewhere one that waits while TensorFlow's server works."""
        from parallelbench.frameworks.tensorflow.server_replica import CoordinatorReplica, TaskReplica

        return TaskReplica(model, run, world) if world.rank else CoordinatorReplica(model, run, world)

    def feed(self, arrays: Arrays, run: RunConfig, exchange: Exchange, world: TensorFlowWorld) -> Any:
        """On rank 0 the order of samples; the images are in the workers' memory."""
        from parallelbench.frameworks.tensorflow.server_feed import CoordinatorFeed, TaskFeed

        if world.rank:
            return TaskFeed(run)
        return CoordinatorFeed(arrays, run, exchange, cluster=world.distribution)
