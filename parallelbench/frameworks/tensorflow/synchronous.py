"""One rank's part of MirroredStrategy or MultiWorkerMirroredStrategy: on each of its devices a copy of everything."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from parallelbench.config.components import Shard
from parallelbench.frameworks.tensorflow.twins import TwinState
from parallelbench.measure.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from parallelbench.config.components import Batch
    from parallelbench.config.replica import Push
    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks.tensorflow.feed import ResidentFeed
    from parallelbench.frameworks.tensorflow.world import TensorFlowWorld
    from parallelbench.training.exchange import State


class StepSums:
    """Summed loss, correct predictions and samples, read when somebody asks; as `Sums` of `numerics`."""

    def __init__(self, parts: list[Any], patience: AbstractContextManager[None] | None = None) -> None:
        """`parts`: three sums each. `patience`: around waiting for the device, and so for other ranks."""
        self._parts, self._patience = parts, patience or nullcontext()
        self._known: NDArray[np.float64] | None = None

    def __iadd__(self, other: StepSums) -> StepSums:
        self._parts += other._parts  # of the loop's running total, which nobody else holds
        self._known = None
        return self

    def _read(self) -> NDArray[np.float64]:
        """All sums of each part: waits for the device."""
        if self._known is None:
            with self._patience:
                self._known = tf.stack(self._parts).numpy()  # one copy from the device, not one a step
        return self._known

    @property
    def samples(self) -> int:
        """Rows of logits whose loss was differentiated, counted where that happened: waits for the device."""
        return int(self._read()[:, 2].sum())

    def tensor(self) -> NDArray[np.float64]:
        """Loss and correct predictions."""
        total: NDArray[np.float64] = self._read()[:, :2].sum(axis=0)
        return total

    def losses(self) -> NDArray[np.float64]:
        """The summed loss of each part, in the order in which they were added."""
        return self._read()[:, 0]

    def tolist(self) -> list[float]:
        """Loss and correct predictions."""
        both: list[float] = self.tensor().tolist()
        return both


class TwinReplica:
    """What TensorFlow's replicas have in common."""

    shares_at_evaluation = False
    keeps_gradients = False
    """Whether `full_gradients` is asked for after steps."""
    _values: dict[str, Any]
    """Parameters and buffers: variables, by name."""
    _slots: dict[str, list[Any]]
    """What the optimizer keeps of each parameter."""
    _step: Any

    def __init__(self, initial: State, run: RunConfig, world: TensorFlowWorld, data_shard: Shard) -> None:
        """`initial`: the state under torch's names, in torch's layout."""
        self._run, self._world, self._twin = run, world, TwinState(initial, run)
        self.data_shard, self.traffic = data_shard, Traffic()

    def _all_variables(self) -> dict[str, Any]:
        slots = {f"{name}/{n}": slot for name, each in self._slots.items() for n, slot in enumerate(each)}
        return {**self._values, **slots, "step": self._step}

    def take_pushes(self) -> list[Push]:
        return []

    def close(self) -> None:
        """Nothing."""


class SyncReplica(TwinReplica):
    """Each device computes its slice of the global batch; all update their copies by the summed gradients."""

    def __init__(self, initial: State, run: RunConfig, world: TensorFlowWorld) -> None:
        super().__init__(initial, run, world, Shard(world.rank, world.size))
        self._options: Any = run.strategy
        self._distribution = world.distribution
        self._make_variables()
        self._steps: dict[tuple[int, bool], Callable[[], Any]] = {}
        self._evaluations: dict[int, Callable[[Any, Any], Any]] = {}
        self._gradients: dict[str, Any] = {}

    def _make_variables(self) -> None:
        initial, parameters = self._twin.initial, self._twin.parameters
        with self._distribution.scope():
            self._values = {name: _local_variable(value) for name, value in initial.items()}
            self._slots = {
                name: [_local_variable(np.zeros_like(initial[name])) for _ in range(self._twin.update.slots)]
                for name in parameters
            }
            self._step = _local_variable(np.zeros((), np.int64))
        devices = self._run.devices
        # Of all devices that this process drives.
        share = 2 * (devices - 1) / devices * len(self._world.device_names)
        self._step_bytes, self._moments_bytes = share * self._twin.nbytes, share * self._twin.moments_bytes

    def step(self, batch: Batch) -> StepSums:
        with self._world.patience:
            sums, gradients = self._trained_by(batch.images, keep=self.keeps_gradients)()  # type: ignore[arg-type]
        self._gradients = gradients
        self.traffic.send("gradient", self._step_bytes)
        self.traffic.send("activation", self._moments_bytes)
        return StepSums([sums], self._world.patience)

    def _trained_by(self, feed: ResidentFeed, *, keep: bool) -> Callable[[], Any]:
        """The function of one step; `keep`: also returns the gradients of the first of this rank's devices."""
        if (id(feed), keep) not in self._steps:
            first = self.data_shard.index * feed.replicas

            def on_replica() -> Any:
                context = tf.distribute.get_replica_context()
                index = int(tf.get_static_value(context.replica_id_in_sync_group)) - first
                return self._on_replica(*feed.next(index))

            def step() -> Any:
                sums, gradients = self._distribution.run(on_replica)
                feed.advance()
                kept = {name: self._local(value) for name, value in gradients.items()} if keep else {}
                return tf.add_n(self._copies(sums)), kept

            self._steps[id(feed), keep] = tf.function(step) if self._options.tf_function else step
        return self._steps[id(feed), keep]

    def _on_replica(self, images: Any, labels: Any) -> Any:
        """One device's step: sums of its slice, and the gradients that it updated by."""
        values = {name: variable.read_value() for name, variable in self._values.items()}
        sums, gradients, buffers = self._differentiated(values, images, labels)
        if self._run.devices > 1:
            names = list(gradients)
            reduced = tf.distribute.get_replica_context().all_reduce("sum", [gradients[name] for name in names])
            gradients = dict(zip(names, reduced, strict=True))
        step = self._step.assign_add(1)
        for name, gradient in gradients.items():
            self._twin.update.apply(self._values[name], self._slots[name], gradient, step)
        for name, value in buffers.items():
            self._values[name].assign(value)
        return sums, gradients

    def _differentiated(self, values: dict[str, Any], images: Any, labels: Any) -> Any:
        """Sums, gradients of the mean over the global batch, and buffers."""
        size, merge = self._run.global_batch_size, _merged_moments if self._run.devices > 1 else None

        def compute(values: dict[str, Any], images: Any, labels: Any) -> Any:
            return self._twin.differentiated(values, (images, labels), size=size, merge=merge)

        return (tf.function(compute, jit_compile=True) if self._options.xla else compute)(values, images, labels)

    def evaluate(self, batches: Iterable[Batch]) -> NDArray[np.float64]:
        """Summed loss and correct predictions, on the first of this rank's devices, by rank 0's running statistics."""
        self._share_buffers()
        total = np.zeros(2)
        for batch in batches:
            feed, start, stop = batch.images  # type: ignore[misc]
            if stop > start:
                total += self._evaluated_by(feed)(tf.constant(start), tf.constant(stop)).numpy()
        return total

    def _share_buffers(self) -> None:
        """Give all ranks rank 0's running statistics, as torch's ranks do, so that they evaluate one model."""
        buffers = {name: value for name, value in self._values.items() if name not in self._twin.parameters}
        if self._world.size == 1 or not buffers:
            return
        own = [self._local(value).numpy().tobytes() for value in buffers.values()] if self._world.rank == 0 else None
        for (name, value), content in zip(buffers.items(), self._world.gather(own)[0], strict=True):
            initial = self._twin.initial[name]
            for copy in self._copies(value):
                copy.assign(np.frombuffer(content, initial.dtype).reshape(initial.shape))

    def _evaluated_by(self, feed: ResidentFeed) -> Callable[[Any, Any], Any]:
        if id(feed) not in self._evaluations:

            def evaluate(start: Any, stop: Any) -> Any:
                values = {name: self._local(variable).read_value() for name, variable in self._values.items()}
                return self._twin.evaluated(values, *feed.tested(start, stop))

            number = tf.TensorSpec([], tf.int32)
            self._evaluations[id(feed)] = (
                tf.function(evaluate, input_signature=[number, number]) if self._options.tf_function else evaluate
            )
        return self._evaluations[id(feed)]

    def warm_up(self, feed: ResidentFeed) -> None:
        """Trace the step for this feed, without executing it."""
        function: Any = self._trained_by(feed, keep=False)
        function.get_concrete_function()

    def _local(self, variable: Any) -> Any:
        """The copy on the first of this rank's devices."""
        return self._copies(variable)[0]

    def full_state_dict(self) -> State:
        return self._twin.in_torchs_layout({name: self._local(value) for name, value in self._values.items()})

    def full_gradients(self) -> State:
        return self._twin.in_torchs_layout(self._gradients)

    def full_optimizer_state(self, key: str) -> State:
        slots = {name: [*map(self._local, each)] for name, each in self._slots.items()}
        return self._twin.optimizer_state(key, slots, self._local(self._step))

    def copied(self) -> Mapping[int, Iterable[NDArray[Any]]]:
        """The parameters, of which all ranks hold the same."""
        return {0: map(self._alike, self._twin.parameters)}

    def _alike(self, name: str) -> NDArray[Any]:
        """A parameter; equal on all of this rank's devices, or it is an error of the suite."""
        first, *others = (copy.numpy() for copy in self._copies(self._values[name]))
        assert all(np.array_equal(first, other) for other in others), f"{name} differs between devices"
        result: NDArray[Any] = first
        return result

    def _copies(self, variable: Any) -> tuple[Any, ...]:
        copies: tuple[Any, ...] = self._distribution.experimental_local_results(variable)
        return copies

    def local_state(self) -> State:
        """All variables of this rank's first device; the others' differ in running statistics, which nobody reads."""
        return {name: self._local(variable).numpy() for name, variable in self._all_variables().items()}

    def load_local_state(self, state: State) -> None:
        for name, variable in self._all_variables().items():
            for copy in self._copies(variable):
                copy.assign(state[name])


def _local_variable(value: NDArray[Any]) -> Any:
    """A variable of which each device updates its own copy; all are updated alike."""
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def _merged_moments(mean: Any, squares: Any, count: Any) -> tuple[Any, Any, Any]:
    """Of all replicas, by the formula of Chan, Golub and LeVeque (1983), as `parallelbench.models.norms`."""
    context = tf.distribute.get_replica_context()
    total, weighted = context.all_reduce("sum", [count, mean * count])
    merged = weighted / total
    return merged, context.all_reduce("sum", squares + count * (mean - merged) ** 2), total
