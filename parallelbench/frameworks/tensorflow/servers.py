"""The ranks of `strategy=tf_parameter_server`: the coordinator hands out slices of batches; the others' servers work.

Workers take batches from their own memory, by numbers of samples. After every step the coordinator tells all ranks
which worker has trained on which slice, so each rank's rows hold what its own worker did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import tensorflow as tf

from parallelbench.config.components import Batch, Shard
from parallelbench.config.replica import Push
from parallelbench.frameworks.tensorflow.feed import (
    Feed,
    Preparation,
    channels_last,
    orders_of_shard,
    padded,
)
from parallelbench.frameworks.tensorflow.synchronous import StepSums, TwinReplica
from parallelbench.loaders.order import evaluation_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from parallelbench.config.components import Arrays
    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks.tensorflow.world import TensorFlowWorld
    from parallelbench.training.exchange import Exchange, State


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


_LOSS, _CORRECT, _SAMPLES, _WORKER, _STALENESS, _UPDATE = range(6)
"""What a worker returns of a slice; the last: the number of the update that it made, from 1."""


class TaskReplica(TwinReplica):
    """A rank whose server gets its work from the coordinator: a worker, or a server of parameters."""

    whole_epochs: ClassVar[bool] = True

    def __init__(self, initial: State, run: RunConfig, world: TensorFlowWorld) -> None:
        super().__init__(initial, run, world, Shard(world.rank, run.devices, images=False, labels=False))
        self._cluster: Cluster = world.distribution
        self._pushes: list[Push] = []
        self._position = 0
        self._served_bytes: list[int] = world.gather(self._make_variables())[0]

    def _make_variables(self) -> list[int]:
        """Rank 0 makes them, and tells all ranks how many bytes of parameters each server holds."""
        return []

    def step(self, batch: Batch) -> StepSums | None:
        """Wait until the coordinator has ended the step."""
        return self._account(self._world.gather(None)[0])

    def _account(self, slices: Sequence[Sequence[float]]) -> StepSums | None:
        """This rank's part of a step, of which the coordinator has said who did what."""
        self._position = self._position % self._run.steps_per_epoch + 1
        own = [row for row in slices if int(row[_WORKER]) == self._world.rank]
        self._pushes += [Push(self._position, int(row[_STALENESS])) for row in own]
        if self._world.rank < self._cluster.workers:
            self.traffic.send("gradient", self._twin.nbytes * len(own))
            return StepSums([np.sum([row[: _SAMPLES + 1] for row in own] or [[0.0, 0.0, 0.0]], axis=0)])
        self.traffic.send("parameter", self._served_bytes[self._world.rank - self._cluster.workers] * len(slices))
        return None

    def evaluate(self, batches: Iterable[Batch]) -> NDArray[np.float64] | None:
        """The coordinator has the workers evaluate."""
        return None

    def full_state_dict(self) -> State:
        """Rank 0 has everything."""
        return {}

    def full_gradients(self) -> State:
        return {}

    def full_optimizer_state(self, key: str) -> State:
        return {}

    def copied(self) -> Mapping[int, Iterable[NDArray[Any]]]:
        """None: workers read the parameters anew for every slice."""
        return {}

    def local_state(self) -> State:
        """Rank 0 saves what the servers hold."""
        return {}

    def load_local_state(self, state: State) -> None:
        """Likewise."""

    def warm_up(self, feed: Any) -> None:
        """Functions are traced when they are first handed out."""

    def take_pushes(self) -> list[Push]:
        pushes, self._pushes = self._pushes, []
        return pushes


class CoordinatorReplica(TaskReplica):
    """Rank 0: makes the variables on the servers, hands out slices and waits for them."""

    def __init__(self, initial: State, run: RunConfig, world: TensorFlowWorld) -> None:
        self._is_sync = run.strategy.equals_one_device(run)
        super().__init__(initial, run, world)
        self._functions: dict[int, tuple[Any, Any]] = {}
        self._update = tf.function(self._updated)
        self._coming: list[Any] = []
        """Of this epoch's slices, those that nobody has waited for."""
        self._updates: list[int] = []
        """Numbers of this epoch's asynchronous updates."""
        self._updated_before = 0
        """Updates until this epoch."""

    def _make_variables(self) -> list[int]:
        """On the servers: parameters in turn, and beside each what the optimizer keeps of it."""
        strategy, twin = self._cluster.strategy, self._twin

        def beside(name: str, shape: Sequence[int]) -> Any:
            with strategy.extended.colocate_vars_with(self._values[name]):
                return tf.Variable(np.zeros(shape, twin.initial[name].dtype), trainable=False)

        with self._world.patience, strategy.scope():
            self._values = {name: tf.Variable(value, trainable=False) for name, value in twin.initial.items()}
            shapes = {name: twin.initial[name].shape for name in twin.parameters}
            self._slots = {
                name: [beside(name, shape) for _ in range(twin.update.slots)] for name, shape in shapes.items()
            }
            self._step = tf.Variable(np.int64(0), trainable=False)
            places = [self._cluster.workers] if self._is_sync else []
            self._gradients = {name: beside(name, [*places, *shape]) for name, shape in shapes.items() if places}
        return self._placed_bytes()

    def _placed_bytes(self) -> list[int]:
        """Bytes of the parameters on each server, where TensorFlow has placed them."""
        placed = [0] * self._cluster.servers
        for name in self._twin.parameters:
            placed[tf.DeviceSpec.from_string(self._values[name].device).task] += self._twin.initial[name].nbytes
        return placed

    def step(self, batch: Batch) -> StepSums | None:
        """Train on one global batch; asynchronous workers may be ahead of it."""
        feed, first = batch.images  # type: ignore[misc]
        train, _ = self._functions_of(feed)
        if self._is_sync or first == 0:
            last = first + 1 if self._is_sync else self._run.steps_per_epoch
            for step in range(first, last):
                self._coming += [self._hand_out(train, feed, step, index) for index in self._slices]
        here, self._coming = self._coming[: len(self._slices)], self._coming[len(self._slices) :]
        rows = [row.tolist() for row in self._cluster.fetched(here)]
        if self._is_sync:
            self._cluster.fetched([self._cluster.schedule(self._update)])
        else:
            self._count_updates(first, rows)
        self._world.gather(rows)
        return self._account(rows)

    def _count_updates(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        """At an epoch's end: each slice made one update, and no update was made by anybody else, or twice."""
        self._updates += [int(row[_UPDATE]) for row in rows]
        if step == self._run.steps_per_epoch - 1:
            with self._world.patience:
                made = int(self._step.numpy())
            expected = range(made - len(self._updates) + 1, made + 1)
            assert sorted(self._updates) == [*expected], f"{made} updates, and not one of each slice: {self._updates}"
            assert expected.start == self._updated_before + 1, f"{made} updates, not after {self._updated_before}"
            self._updated_before, self._updates = made, []

    @property
    def _slices(self) -> range:
        return range(self._cluster.workers)

    def _hand_out(self, train: Any, feed: CoordinatorFeed, step: int, index: int) -> Any:
        numbers = [tf.constant(values[step, index]) for values in feed.order]
        return self._cluster.schedule(train, feed.resident, tf.constant(index), *numbers)

    def _functions_of(self, feed: CoordinatorFeed) -> tuple[Any, Any]:
        """What workers execute for this feed: training on a slice, and evaluation of one."""
        if id(feed) not in self._functions:
            prepare = feed.preparation

            def train(resident: Any, index: Any, samples: Any, *moved: Any) -> Any:
                images, labels, _, _ = next(resident)
                return self._trained(index, prepare.images(images, samples, *moved), tf.gather(labels, samples))

            def evaluate(resident: Any, start: Any, stop: Any) -> Any:
                _, _, images, labels = next(resident)
                values = {name: variable.read_value() for name, variable in self._values.items()}
                return self._twin.evaluated(values, prepare.normalised(images[start:stop]), labels[start:stop])

            self._functions[id(feed)] = tf.function(train), tf.function(evaluate)
        return self._functions[id(feed)]

    def _trained(self, index: Any, images: Any, labels: Any) -> Any:
        """On a worker: gradients of one slice, which go to the servers."""
        seen = self._step.read_value()
        with tf.control_dependencies([seen]):
            values = {name: variable.read_value() for name, variable in self._values.items()}
        size = self._run.global_batch_size if self._is_sync else images.shape[0]
        sums, gradients, _ = self._twin.differentiated(values, (images, labels), size=size)
        if self._is_sync:
            for name, gradient in gradients.items():
                place = self._gradients[name].handle
                tf.raw_ops.ResourceScatterUpdate(resource=place, indices=index[None], updates=gradient[None])
            staleness = step = tf.constant(0, tf.int64)
        else:
            with tf.control_dependencies(list(gradients.values())):
                # Adds one and returns what it added to, at once; `assign_add` would read what others added meanwhile.
                before = tf.raw_ops.ResourceCountUpTo(resource=self._step.handle, limit=2**62, T=tf.int64)
            staleness, step = before - seen, before + 1
            self._apply(gradients, step)
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        facts = [tf.cast(number, tf.float64) for number in (worker, staleness, step)]
        return tf.concat([sums, facts], axis=0)

    def _updated(self) -> Any:
        """After all slices: one update by their sum, in their order."""
        gradients = {}
        for name, places in self._gradients.items():
            with tf.device(places.device):
                gradients[name] = tf.reduce_sum(places.read_value(), axis=0)
        step = self._step.assign_add(1, read_value=True)
        self._apply(gradients, step)
        return step

    def _apply(self, gradients: dict[str, Any], step: Any) -> None:
        for name, gradient in gradients.items():
            with tf.device(self._values[name].device):
                self._twin.update.apply(self._values[name], self._slots[name], gradient, step, locked=not self._is_sync)

    def evaluate(self, batches: Iterable[Batch]) -> NDArray[np.float64] | None:
        coming = []
        for batch in batches:
            feed, start, stop = batch.images  # type: ignore[misc]
            _, evaluate = self._functions_of(feed)
            if stop > start:
                coming.append(self._cluster.schedule(evaluate, feed.resident, tf.constant(start), tf.constant(stop)))
        total: NDArray[np.float64] = np.sum(self._cluster.fetched(coming), axis=0)
        return total

    def full_state_dict(self) -> State:
        with self._world.patience:
            return self._twin.in_torchs_layout(self._values)

    def full_gradients(self) -> State:
        """The sum by which the last synchronous step updated."""
        with self._world.patience:
            sums = {name: tf.reduce_sum(places.read_value(), axis=0) for name, places in self._gradients.items()}
            return self._twin.in_torchs_layout(sums)

    def full_optimizer_state(self, key: str) -> State:
        with self._world.patience:
            return self._twin.optimizer_state(key, self._slots, self._step)

    def local_state(self) -> State:
        with self._world.patience:
            return {name: variable.numpy() for name, variable in self._all_variables().items()}

    def load_local_state(self, state: State) -> None:
        with self._world.patience:
            for name, variable in self._all_variables().items():
                variable.assign(state[name])
        self._updated_before = int(state["step"])


class CoordinatorFeed(Feed):
    """The order of samples; each worker has the data set in its own memory."""

    def __init__(self, arrays: Arrays, run: RunConfig, exchange: Exchange, *, cluster: Cluster) -> None:
        """Let all workers read the data set, once for the run and its parity check."""
        self._run, self._exchange, self._cluster = run, exchange, cluster
        self.preparation = Preparation.of(run)
        self.order: list[NDArray[np.int32]] = []
        """Each of shape (steps, slices, samples of a slice): rows of the data set, and how they are moved."""
        self._stored = len(arrays.train_labels)
        if cluster.resident is None:
            cluster.resident = cluster.per_worker(_written(arrays, exchange.folder, self.preparation.padding))
        self.resident = cluster.resident
        """Iterator of each worker over training images and labels, test images and labels, again and again."""

    def train(self, epoch: int) -> Iterator[Batch]:
        """One epoch's batches; images: feed, and the step from 0."""
        run = self._run
        samples, *moved = orders_of_shard(self._exchange.order(epoch), Shard(), self._cluster.workers, run)
        self.order = [samples % self._stored, *moved]
        for step in range(run.steps_per_epoch):
            yield Batch((self, step), None, run.global_batch_size)  # type: ignore[arg-type]

    def test(self, samples: int | None = None) -> Iterator[Batch]:
        """The whole test set, or its first `samples`; images: feed, start, stop."""
        local_batch_size = self._run.global_batch_size // self._cluster.workers
        for start, stop in evaluation_batches(self._run.data, Shard(), local_batch_size, samples):
            yield Batch((self, start, stop), None, stop - start)  # type: ignore[arg-type]


class TaskFeed(Feed):
    """Batches without samples, for ranks whose server gets its steps from the coordinator."""

    def __init__(self, run: RunConfig) -> None:
        self._steps = run.steps_per_epoch

    def train(self, epoch: int) -> Iterator[Batch]:
        """As many as the coordinator has."""
        for _ in range(self._steps):
            yield Batch(None, None, 0)

    def test(self, samples: int | None = None) -> Iterator[Batch]:
        """None."""
        yield from ()


def _written(arrays: Arrays, folder: Path, padding: int | None) -> Callable[[], Any]:
    """Write the data set into the attempt's folder, which all nodes see; returns what reads it on a worker, once.

    As raw bytes, since TensorFlow sends no array that a worker would keep: all four arrays as one element.
    """
    labels, test_labels = (np.asarray(each, np.int32) for each in (arrays.train_labels, arrays.test_labels))
    images, test_images = padded(channels_last(arrays.train_images), padding), channels_last(arrays.test_images)
    whole: list[NDArray[Any]] = [images, labels, test_images, test_labels]
    files: dict[str, tuple[Any, tuple[int, ...]]] = {}
    for number, array in enumerate(whole):
        path = folder / f"resident-{number}.bin"
        array.tofile(path)
        files[str(path)] = tf.as_dtype(array.dtype), array.shape

    def read(_: Any) -> tuple[Any, ...]:
        return tuple(
            tf.reshape(tf.io.decode_raw(tf.io.read_file(path), kind), shape) for path, (kind, shape) in files.items()
        )

    return lambda: tf.data.Dataset.from_tensors(0).map(read).cache().repeat()
