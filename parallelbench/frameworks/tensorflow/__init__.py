"""TensorFlow's strategies: their options, and what they refuse. Loads no TensorFlow, which the other files here need.

https://www.tensorflow.org/api_docs/python/tf/distribute has those of `tf.distribute`.
"""

from __future__ import annotations

from abc import abstractmethod
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta

from parallelbench.config.components import Shard, StateShards, Strategy
from parallelbench.loaders.resident import Resident
from parallelbench.models.cnn import Cnn, CnnLarge, CnnSmall
from parallelbench.models.mlp import LogisticRegression, Mlp
from parallelbench.models.resnet import ResNet
from parallelbench.optim.losses import CrossEntropy
from parallelbench.optim.metrics import NoMetric
from parallelbench.optim.optimizers import Adagrad, Adam, AdamW, Sgd
from parallelbench.strategies.shared_refusals import on_one_node, one_device, some_worker, two_devices

if TYPE_CHECKING:
    from parallelbench.config.components import Arrays
    from parallelbench.config.rule import Rules
    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks.tensorflow.world import TensorFlowWorld
    from parallelbench.training.exchange import Exchange


TWINS = (LogisticRegression, Mlp, CnnSmall, CnnLarge, Cnn, ResNet)
"""Models that `parallelbench.frameworks.tensorflow.twins` has; not what a plugin derives from them."""
UPDATES = (Sgd, Adam, AdamW, Adagrad)
"""Optimizers whose formulas `parallelbench.frameworks.tensorflow.updates` has; likewise."""


_OF_TORCH = {
    "channels_last": (False, "TensorFlow's images are channels last anyway"),
    "cudnn_benchmark": (False, "TensorFlow always lets cuDNN choose"),
    "measure.attribution_steps": (0, "phases are torch's"),
    "measure.detect_anomaly": (False, "it is torch's"),
    "measure.trace": (False, "the trace is torch's"),
    "measure.waits": ("allowed", "only torch says that the host waits"),
    "nccl.backend": ("default", "it is torch's"),
}
"""Options that mean something to torch only → the one value that is accepted, and why."""


class TensorFlowStrategy(Strategy, frozen=True, kw_only=True):
    """A strategy of `tf.distribute`, in a training loop of its own: Keras's `fit` is not used."""

    framework: ClassVar[str] = "tensorflow"
    spans_nodes: ClassVar[bool] = False
    """Whether its processes may be on several nodes."""

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        """Models without a twin, and options that mean something to torch only."""
        who = f"with strategy={self.name} is refused"
        yield (
            type(run.model) not in TWINS,
            f"model={run.model.name} has no twin in TensorFlow, so strategy={self.name} can't train it",
            ("model", "strategy"),
        )
        yield (
            type(run.optimizer) not in UPDATES,
            f"optimizer={run.optimizer.name} {who}: its update is not written for TensorFlow",
            ("optimizer", "strategy"),
        )
        yield run.precision not in ("fp64", "fp32"), f"precision={run.precision} {who}", ("precision=fp32", "precision")
        yield (
            isinstance(run.model, TWINS) and run.data.kind != "images",
            f"data={run.data.name} {who}: TensorFlow's part takes images only, and it holds {run.data.kind}",
            ("data", "strategy"),
        )
        yield (
            run.loss != CrossEntropy(name=run.loss.name, label_smoothing=0.0),
            f"loss={run.loss.name} {who}: TensorFlow's part computes cross entropy without smoothing only",
            ("loss=cross_entropy loss.label_smoothing=0.0", "strategy"),
        )
        yield (
            not isinstance(run.metric, NoMetric),
            f"metric={run.metric.name} {who}: TensorFlow's part evaluates loss and accuracy only",
            ("metric=none", "strategy"),
        )
        implementation = getattr(run.optimizer, "implementation", "auto")
        yield (
            implementation != "auto",
            f"optimizer.implementation={implementation} {who}: it is torch's",
            ("optimizer.implementation=auto", "strategy"),
        )
        yield (
            run.launcher.packed,
            f"launcher.packed=true {who}: only torch's processes are forked",
            ("launcher.pack=false", "strategy"),
        )
        yield (
            run.launcher.in_this_process,
            f"launcher=inline {who}: TensorFlow has an environment of its own",
            ("launcher=local", "strategy"),
        )
        yield (
            type(run.loader) is not Resident,
            f"loader={run.loader.name} {who}: TensorFlow's part holds the data set in memory",
            ("loader=resident", "strategy"),
        )
        yield (
            run.preprocess.engine != "none",
            f"preprocess.engine={run.preprocess.engine} {who}: it is torch's",
            ("preprocess.engine=none preprocess.recipe=null", "strategy"),
        )
        yield run.nodes > 1 and not self.spans_nodes, f"nodes={run.nodes} {who}", (on_one_node(run), "strategy")
        for key, (only, why) in ({"compile": (False, self.instead_of_compile)} | _OF_TORCH).items():
            value = attrgetter(key)(run)
            yield value != only, f"{key}={str(value).lower()} {who}: {why}", (f"{key}={str(only).lower()}", "strategy")

    instead_of_compile: ClassVar[str] = "it is torch's"
    """Why not compile=true."""

    @abstractmethod
    def connect(self, run: RunConfig, world: TensorFlowWorld) -> Any:
        """The `tf.distribute.Strategy` of this rank, or what stands for it; a collective. Loads TensorFlow."""

    @abstractmethod
    def feed(self, arrays: Arrays, run: RunConfig, exchange: Exchange, world: TensorFlowWorld) -> Any:
        """What this rank's replica trains on: a `BatchLoader`. Loads TensorFlow."""


class MirroredCopies(TensorFlowStrategy, frozen=True, kw_only=True):
    """A copy of everything on each device; all are updated alike, by the sum of all gradients."""

    instead_of_compile: ClassVar[str] = "strategy.xla=true compiles TensorFlow's steps"

    xla: bool
    """Compile forward and backward with XLA (`jit_compile`); the exchange of gradients stays outside."""
    tf_function: bool
    """Trace each step once as a graph (`tf.function`); false: run it eagerly."""
    trace: Literal["startup", "first_epoch"]
    """When the step is traced: before the first epoch, or in its first step, as in a loop without a warm-up."""

    def state_shards(self, run: RunConfig) -> StateShards | None:
        return StateShards.even(1)

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        """What a step that is not traced can't do, and what XLA can't compile."""
        yield from super().rules(run, device_type)
        norm = getattr(run.model, "norm", None)
        yield (
            self.xla and run.devices > 1 and norm in ("batch", "sync"),
            f"strategy.xla=true with model.norm={norm} and devices={run.devices} is refused: XLA can't compile a "
            "forward pass in which devices exchange statistics",
            ("strategy.xla", "model.norm"),
        )
        yield (
            self.xla and not self.tf_function,
            "strategy.xla=true needs strategy.tf_function=true: XLA compiles what was traced",
            ("strategy.tf_function", "strategy.xla"),
        )
        yield (
            self.trace == "startup" and not self.tf_function,
            "strategy.tf_function=false traces nothing at strategy.trace=startup",
            ("strategy.trace", "strategy.tf_function"),
        )

    def prepare(self, model: Any, run: RunConfig, world: Any) -> Any:
        """This rank's replica; `model` is the initial state, under torch's names, in torch's layout."""
        from parallelbench.frameworks.tensorflow.synchronous import SyncReplica

        return SyncReplica(model, run, world)

    def feed(self, arrays: Arrays, run: RunConfig, exchange: Exchange, world: TensorFlowWorld) -> Any:
        from parallelbench.frameworks.tensorflow.feed import ResidentFeed

        return ResidentFeed(arrays, run, exchange, shard=Shard(world.rank, world.size), devices=world.device_names)


def no_nccl(chosen: str, device_type: str) -> Rules:
    """Refuses NCCL where there are no GPUs; `chosen`: the option `all_reduce`."""
    yield (
        chosen == "nccl" and device_type == "cpu",
        "strategy.all_reduce=nccl needs GPUs",
        ("strategy.all_reduce", "device"),
    )


class TfSingle(MirroredCopies, frozen=True, kw_only=True):
    """Training on one device with TensorFlow.

    One process, one device, TensorFlow's default strategy.
    """

    def processes(self, run: RunConfig, device_type: str) -> int:
        return 1

    def data_parallel_degree(self, run: RunConfig) -> int:
        return 1

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        yield from super().rules(run, device_type)
        yield from one_device(run)

    def connect(self, run: RunConfig, world: TensorFlowWorld) -> Any:
        import tensorflow as tf

        return tf.distribute.get_strategy()


class TfMirrored(MirroredCopies, frozen=True, kw_only=True):
    """TensorFlow's MirroredStrategy: one process, a copy of the model on each of its devices, gradients all-reduced.

    One process drives all devices; on CPUs these are logical devices, which share its threads.
    """

    all_reduce: Literal["auto", "nccl", "hierarchical_copy", "reduce_to_one"]
    """How gradients are summed. auto: nccl on GPUs, hierarchical_copy on CPUs."""

    def processes(self, run: RunConfig, device_type: str) -> int:
        return 1

    def data_parallel_degree(self, run: RunConfig) -> int:
        return run.devices

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        yield from super().rules(run, device_type)
        yield from no_nccl(self.all_reduce, device_type)

    def connect(self, run: RunConfig, world: TensorFlowWorld) -> Any:
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


class TfMultiWorker(MirroredCopies, frozen=True, kw_only=True):
    """TensorFlow's MultiWorkerMirroredStrategy: one process per device, gradients all-reduced by collectives.

    One process per device; workers exchange gradients over gRPC (ring), or between GPUs by NCCL.
    """

    spans_nodes: ClassVar[bool] = True

    all_reduce: Literal["auto", "nccl", "ring"]
    """How gradients are summed. auto: nccl on GPUs, ring on CPUs."""

    def data_parallel_degree(self, run: RunConfig) -> int:
        return run.devices

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        yield from super().rules(run, device_type)
        yield from no_nccl(self.all_reduce, device_type)
        yield from two_devices(run)

    def connect(self, run: RunConfig, world: TensorFlowWorld) -> Any:
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


class TfParameterServer(TensorFlowStrategy, frozen=True, kw_only=True):
    """TensorFlow's ParameterServerStrategy: workers send gradients to servers, and a coordinator hands out the steps.

    The last `servers` ranks hold parameters and optimizer, variable by variable in turn; the others train.

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
        return max(1, run.devices - self.servers)

    def equals_one_device(self, run: RunConfig) -> bool:
        """Not when gradients are applied in the order in which they happen to arrive."""
        return self.mode == "sync"

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        yield from super().rules(run, device_type)
        yield (
            device_type == "cuda",
            f"device=cuda with strategy={self.name} is refused: each server of parameters would hold a GPU idle",
            ("device=cpu", "strategy"),
        )
        yield from some_worker(run, self.servers)
        norm = getattr(run.model, "norm", None)
        yield (
            norm in ("batch", "sync"),
            f"model.norm={norm} with strategy={self.name} is refused: no server merges the workers' statistics",
            ("model.norm", "strategy"),
        )
        yield (
            self.mode == "async" and isinstance(run.optimizer, AdamW) and run.optimizer.weight_decay,
            f"optimizer={run.optimizer.name} with strategy.mode=async is refused: its decay would undo updates that "
            "arrive meanwhile",
            ("optimizer.weight_decay", "optimizer=adam"),
        )

    def connect(self, run: RunConfig, world: TensorFlowWorld) -> Any:
        """This rank's server and, on rank 0, the coordinator."""
        from parallelbench.frameworks.tensorflow.servers import Cluster

        return Cluster(run, world, servers=self.servers)

    def prepare(self, model: Any, run: RunConfig, world: Any) -> Any:
        """The coordinator's replica on rank 0; elsewhere one that waits while TensorFlow's server works."""
        from parallelbench.frameworks.tensorflow.servers import CoordinatorReplica, TaskReplica

        return TaskReplica(model, run, world) if world.rank else CoordinatorReplica(model, run, world)

    def feed(self, arrays: Arrays, run: RunConfig, exchange: Exchange, world: TensorFlowWorld) -> Any:
        """On rank 0 the order of samples; the images are in the workers' memory."""
        from parallelbench.frameworks.tensorflow.servers import CoordinatorFeed, TaskFeed

        if world.rank:
            return TaskFeed(run)
        return CoordinatorFeed(arrays, run, exchange, cluster=world.distribution)
