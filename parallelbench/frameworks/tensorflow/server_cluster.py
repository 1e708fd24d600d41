"""The processes of `strategy=tf_parameter_server`: each rank's server, and on rank 0 the coordinator of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks.tensorflow.tf_world import TensorFlowWorld

COORDINATOR, WORKER, SERVER = "chief", "worker", "ps"
"""TensorFlow's names of the jobs."""


class Cluster:
    """This rank's part: ranks 0 … workers − 1 are workers, those after them hold parameters."""

    def __init__(self, run: RunConfig, world: TensorFlowWorld, *, servers: int) -> None:
        """Start this rank's server; on rank 0 connect to all. A collective."""
        self.workers, self.servers = run.devices - servers, servers
        self.resident: Any = None
        """What `per_worker` gave for the data set, once it did."""
        self._world = world
        addresses = world.addresses(2 if world.rank == 0 else 1)
        ranks = [of_rank[-1] for of_rank in addresses]
        spec = tf.train.ClusterSpec(
            {COORDINATOR: addresses[0][:1], WORKER: ranks[: self.workers], SERVER: ranks[self.workers :]}
        )
        job, index = (WORKER, world.rank) if world.rank < self.workers else (SERVER, world.rank - self.workers)
        threads = tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=run.cores_per_device,
            # A server answers all others at once, each in a thread of its own.
            inter_op_parallelism_threads=run.devices + 1,
        )
        self._server = tf.distribute.Server(spec, job_name=job, task_index=index, protocol="grpc", config=threads)
        world.barrier()  # all listen
        if world.rank == 0:
            resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
                spec, task_type=COORDINATOR, task_id=0, rpc_layer="grpc"
            )
            with world.patience:
                self.strategy = tf.distribute.ParameterServerStrategy(resolver)
                self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)

    def schedule(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Let some worker execute a traced function; returns its value to come."""
        return self._coordinator.schedule(function, args=arguments)

    def fetched(self, values: Sequence[Any]) -> list[NDArray[Any]]:
        """Wait for values to come: TensorFlow itself would wait for ever."""
        with self._world.patience:
            return [np.asarray(value.fetch()) for value in values]

    def per_worker(self, new_dataset: Callable[[], Any]) -> Any:
        """An iterator over a data set that each worker makes for itself."""
        with self._world.patience:
            return iter(self._coordinator.create_per_worker_dataset(new_dataset))
