"""The kinds of component that a run is made of, as their authors see them. Nothing here loads torch."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypedDict

from msgspec import Meta

from parallelbench.config.rule import Ruled
from parallelbench.config.sites import prepare_line, shipped
from parallelbench.config.structure import Component
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import Unpack

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.loaders.order import BatchLoader
    from parallelbench.world.world import World

    MeanLoss = Callable[[Tensor, Tensor], Tensor]
    LabelSums = Callable[[Tensor, Tensor], Tensor]


Kind = Literal["images", "vectors", "tokens"]
"""What a sample is. images: squares of bytes. vectors: numbers, float32. tokens: whole numbers, one per position."""


class ModelInput(TypedDict):
    """What a model is told of a sample.

    Of images, channels and side; of vectors, the number of features, and 1; of tokens, the size of the vocabulary, and
    the number of positions.
    """

    in_channels: int
    image_size: int


@dataclass(frozen=True)
class Arrays:
    """The stored samples and labels of a data set; each may be a memory map.

    `…_images`, whatever their kind: uint8 of shape (n, channels, height, width), float32 of shape (n, features), or
    integers of shape (n, positions). `…_labels`: int64 of shape (n,) or, where the data set says so, (n, positions).
    """

    train_images: NDArray[Any]
    train_labels: NDArray[np.int64]
    test_images: NDArray[Any]
    test_labels: NDArray[np.int64]


class Data(Component, frozen=True, kw_only=True):
    """A data set's options and sizes. Nothing here loads torch."""

    mean: ClassVar[tuple[float, ...]]
    """Mean of the training images, on a scale from 0 to 1: one per channel, or one for all channels. Of vectors, one
    per feature, or one for all; of tokens none."""
    std: ClassVar[tuple[float, ...]]
    """Standard deviation of the training samples, like `mean`."""
    flip: ClassVar[bool]
    """Whether an image means the same when it is flipped horizontally: a cat does, a digit doesn't."""

    made_by_prepare: ClassVar[bool] = False
    """Whether `parallelbench prepare` makes its files; if not, whoever owns the class writes them."""

    augment: bool
    """Shift training images by up to `image_size // 8` pixels; flip half of them where `flip` allows it."""

    @property
    def kind(self) -> Kind:
        """What a sample is."""
        return "images"

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of a sample: channels, height and width of an image, which are equal; (features,); or (positions,)."""

    @property
    def vocabulary(self) -> int:
        """Different tokens: 0 … vocabulary − 1; 0 where there are none."""
        return 0

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Of a sample's labels: () for one, (positions,) for one at each position."""
        return ()

    @property
    def labels_per_sample(self) -> int:
        """Predictions that a model makes for a sample."""
        return math.prod(self.label_shape)

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens of a sample, each of which has a label; None where samples are something else."""
        return self.labels_per_sample if self.kind == "tokens" and self.label_shape == self.shape else None

    @property
    def model_input(self) -> ModelInput:
        """What models are told."""
        if self.kind == "images":
            return {"in_channels": self.shape[0], "image_size": self.shape[1]}
        if self.kind == "vectors":
            return {"in_channels": self.shape[0], "image_size": 1}
        return {"in_channels": self.vocabulary, "image_size": self.shape[0]}

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of labels: 0 … num_classes − 1."""

    @property
    @abstractmethod
    def train_samples(self) -> int:
        """Training samples in one epoch (copies of an image count each)."""

    @property
    @abstractmethod
    def test_samples(self) -> int:
        """Test samples; each is evaluated exactly once."""

    @property
    def stored_train_samples(self) -> int:
        """Training images that `load` returns; of `train_samples`, a whole part: an epoch may take each repeatedly."""
        return self.train_samples

    @property
    def stored_bytes(self) -> int:
        """Bytes of all samples and labels, at least; integers, of any type, are counted as one."""
        values = math.prod(self.shape) * (4 if self.kind == "vectors" else 1)
        return (self.stored_train_samples + self.test_samples) * (values + 8 * self.labels_per_sample)

    @property
    def loaded_bytes(self) -> int | None:
        """Bytes that `load` takes of each process's own memory, at least; None: it maps files, or it is not known."""
        return None

    def option_of(self, declared: str) -> str:
        """What a user sets for what is declared: the option by which `num_classes` or `vocabulary` is chosen."""
        return declared

    def missing_files(self, data_dir: Path) -> list[Path]:
        """Files that `load` reads and that are missing; empty: ready to load."""
        return []

    def require_files(self, data_dir: Path) -> None:
        """Raise `ConfigError`, with the place of the files and who writes them, where some are missing."""
        missing = self.missing_files(data_dir)
        if not missing:
            return
        names, where = ", ".join(path.name for path in missing), missing[0].parent
        if not self.made_by_prepare:
            raise ConfigError(
                f"data={self.name}: {names} missing in {where.absolute()}; `parallelbench prepare` does not make it: "
                "write it there, or choose the folder that has it with site.data_dir=DIR"
            )
        own = "" if shipped("data", self.name) else " with the --conf and --plugin of this command"
        raise ConfigError(
            f"data={self.name} is not prepared: {names} missing in {where}; "
            f"run `{prepare_line(self.name, data_dir, *self.prepare_options)}`{own}"
        )

    @property
    def prepare_options(self) -> tuple[str, ...]:
        """What `parallelbench prepare data=NAME` needs besides the name, for these arrays."""
        return ()

    def fingerprint(self, data_dir: Path) -> str | None:
        """Hexadecimal digits that identify what the arrays hold; None: the arrays are read for them."""
        return None

    @abstractmethod
    def load(self, data_dir: Path) -> Arrays:
        """Open the arrays, never downloading; `ConfigError` with the `prepare` line where any are missing."""


@dataclass(frozen=True)
class Shard:
    """The part of every global batch that a rank reads: slice `index` of `count` equal slices."""

    index: int = 0
    count: int = 1
    images: bool = True
    """False where this rank uses no images (a later stage)."""
    labels: bool = True
    """False where this rank uses no labels (an earlier stage)."""


@dataclass(slots=True)
class Batch:
    """This rank's slice of a global batch."""

    images: Tensor | None
    """Normalised, shape (size, channels, height, width); None where the rank uses no images."""
    labels: Tensor | None
    """int64, shape (size,); None where the rank uses no labels."""
    size: int
    """Samples in the slice."""


class LoaderArgs(TypedDict):
    """What every loader needs to make a rank's batches."""

    device: torch.device | str
    dtype: torch.dtype
    """dtype of the images."""
    seed: int
    """Determines permutation and augmentation, together with the epoch."""
    global_batch_size: int
    shard: Shard
    channels_last: bool
    steps_per_epoch: int


class Loader(Component, frozen=True, kw_only=True):
    """A loader's options. With every loader, a rank gets the same samples in the same order."""

    feeds: ClassVar[tuple[Kind, ...]] = ("images",)
    """Kinds of samples that it can feed; labels at positions go with tokens."""
    on_device: ClassVar[bool] = False
    """Whether the whole data set lies in the memory of each device that reads samples."""

    @abstractmethod
    def build(self, arrays: Arrays, data: Data, **arguments: Unpack[LoaderArgs]) -> BatchLoader:
        """Build the batches of one rank."""


class TorchLoader(Loader, frozen=True, kw_only=True):
    """The options of torch's `DataLoader`."""

    feeds: ClassVar[tuple[Kind, ...]] = ("images", "vectors", "tokens")

    workers: Annotated[int, Meta(ge=0, le=256)]
    """Worker processes per rank and split; 0: the rank itself makes the batches. On a CPU, workers share the cores of
    the rank's device."""
    prefetch_factor: Annotated[int, Meta(ge=1, le=1000)]
    """Batches that each worker makes in advance; without workers there are none."""
    persistent_workers: bool
    """Keep the workers from one epoch to the next; false: start them anew in each epoch."""
    pin_memory: bool
    """On CUDA, copy batches to page-locked memory first, so that the GPU fetches them while the host continues."""


Split = Literal["column", "row"]
"""How a linear layer is sharded (Shoeybi et al. 2019, arXiv 1909.08053).

column: by outputs; its input is whole, its output a shard. row: by inputs; its input is a shard, its output whole.
An embedding, whose input is a token, is cut as row: by the vocabulary.
"""


class Linears(NamedTuple):
    """Linear layers that devices can share."""

    plan: Mapping[str, Split] = MappingProxyType({})
    """How each is sharded: paths below the model, `*` for any name, in the order of use. Between a column layer and the
    row layer after it, values are shards. Empty where there is nothing to shard."""
    units: int = 1
    """Equal parts of the plan's layers: any number of devices that divides it can share them."""
    limits: str = ""
    """The options that `units` follow from, for messages; empty: they say themselves."""


class Vocabulary(NamedTuple):
    """Embedding and head, which `strategy.vocabulary_parallel` shards besides."""

    entries: int = 0
    """0: there are none."""
    plan: Mapping[str, Split] = MappingProxyType({})
    """As that of `Linears`. The head is the model's last operation, so that logits are shards."""


class RoutedExperts(NamedTuple):
    """Experts among which tokens are divided."""

    each: int = 0
    """Of each layer that has some; 0: there are none."""
    blocks: int = 0
    """Layers that have some, each with an `ExpertTokens` as an attribute `expert_tokens`."""
    share: float = 0.0
    """Share of the parameters that these experts have."""


class OwnLoss(NamedTuple):
    """The option by which a model's layers add losses of their own to the run's, for messages."""

    option: str = ""
    """Empty: they add none."""
    without: str = ""
    """What to choose for none; empty: nothing."""


class Anatomy(NamedTuple):
    """What a model consists of, for whoever cuts or counts it. The defaults: nothing of all this."""

    linears: Linears = Linears()
    vocabulary: Vocabulary = Vocabulary()
    experts: RoutedExperts = RoutedExperts()
    own_loss: OwnLoss = OwnLoss()
    tied: tuple[str, ...] = ()
    """Layers that share parameters with each other, and so must be on one device."""
    attention: str = ""
    """Paths of the modules below the model, `*` for any name, that attend by a method `attend` between their linear
    layers: what `activation_recomputation=selective` computes again."""
    token_heads: tuple[int, int] | None = None
    """Heads of queries, and of keys and values, where causal attention alone joins the tokens of a sample, so that
    devices can hold parts of the sequence. The layers are `TokenEmbed` and `CausalAttention` of
    `parallelbench.models.gpt_layers`."""
    sequence_norms: tuple[str, ...] = ()
    """Norms of single tokens, which can have parts of a sequence: paths below the model, `*` for any name.

    What only they and residuals compute may be cut by tokens: the values between two layers, (batch, tokens, …).
    What a norm gives goes to column layers of the plan only, but for the last layer's, whose head takes it."""
    sizes_follow_values: bool = False
    """Whether the host needs values of a forward pass for the sizes of tensors: it then waits for a GPU, and a step can
    be neither compiled nor captured."""


class Model(Component, frozen=True, kw_only=True):
    """A model's options. Importing the file loads no torch; `build` does."""

    takes: ClassVar[tuple[Kind, ...]] = ("images",)
    """Kinds of samples that it can be built for."""
    predicts_positions: ClassVar[bool] = False
    """Whether it returns logits at each position of a sample, for data with a label at each."""

    @property
    @abstractmethod
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers in order: the cut points of layer-wise strategies."""

    def anatomy(self) -> Anatomy:
        """What else the model consists of."""
        return Anatomy()

    def least_normalised(self, *, image_size: int) -> int | None:
        """Values that a sample gives each channel of the smallest map that BatchNorm normalises; None: no such norm,
        or it is not known.
        """
        return None

    def with_own_loss(self, mean: MeanLoss) -> MeanLoss:
        """What training minimises, from the run's loss; only where `Strategy.takes_own_loss` is true, if it is more.

        Called once after each forward pass of the whole model. What is added is a mean over the samples, too.
        """
        return mean

    def check(self, *, in_channels: int, image_size: int) -> None:
        """Raise `ConfigError` with the fix where the model can't take such samples; before anything starts.

        Of vectors, `in_channels` is the number of features and `image_size` 1; of tokens, the size of the vocabulary
        and the number of positions.
        """

    @abstractmethod
    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        """Build the layers, initialised from torch's current seed.

        Returns an `nn.Sequential` whose children are named `layer_names`; it maps images of shape (batch,
        in_channels, image_size, image_size), or what else it `takes`, to logits of shape (batch, num_classes), or with
        `predicts_positions` (batch, positions, num_classes). Every intermediate value between two layers is one tensor
        whose first dimension is the batch.

        Raises `ConfigError` where `check` does.
        """


class Loss(Component, frozen=True, kw_only=True):
    """A loss's options. Importing the file loads no torch; `build` does."""

    @abstractmethod
    def build(self) -> MeanLoss:
        """The mean over a batch as a function of logits and labels.

        Logits have the shape (n, classes), or (n, positions, classes), in the parameters' dtype; labels, int64, that of
        the logits without the classes. The function returns one number, differentiable by the logits: the mean over
        all labels, so that the mean over equal parts of a batch is that over the batch.
        """


class Metric(Component, frozen=True, kw_only=True):
    """A metric's options. Importing the file loads no torch; `build` does.

    It follows from sums over the test set's labels. So it is the same whichever ranks, stages or pieces of a batch
    evaluate the samples. Most metrics are a ratio of two sums, and only `build` them.
    """

    @abstractmethod
    def build(self) -> LabelSums:
        """The sums over a batch, a tensor of shape (size,), as a function of logits and labels.

        Logits have the shape (n, classes), or (n, positions, classes), in the parameters' dtype; labels, int64, that of
        the logits without the classes. Sums of several batches are added up in float64.
        """

    def size(self, classes: int) -> int:
        """How many sums there are, where a label has so many logits. 0: nothing is measured."""
        return 2

    def value(self, sums: Sequence[float]) -> float:
        """The metric, from the sums over the whole test set: the first ÷ the second; NaN where that is 0."""
        above, below = sums
        return above / below if below else math.nan

    def check(self, classes: int, loss: Loss) -> None:
        """Raise `ConfigError` with the fix where the metric means nothing after training by `loss`, or for so many
        logits of a label; before anything starts.
        """


class Traits(NamedTuple):
    """What strategies and checks must not assume of a model. The defaults are those of the suite's own models."""

    draws: bool = False
    """Whether it draws random numbers in training, as dropout does."""
    draws_in_evaluation: bool = False
    """Whether it draws them in evaluation, too."""
    generators: tuple[str, ...] = ()
    """Paths of generators that its modules hold."""
    draws_elsewhere: bool = False
    """Whether it draws from a generator of torch's that is neither a global one nor held by its modules."""
    mixes_samples: bool = False
    """Whether what it makes of a sample in training depends on the others of a batch, as in batch normalisation."""
    untouched: tuple[str, ...] = ()
    """Parameters that need a gradient, and that some step gives none."""
    scalars: tuple[str, ...] = ()
    """Parameters without a dimension."""
    empty: tuple[str, ...] = ()
    """Parameters without a value."""
    complex_parameters: tuple[str, ...] = ()
    complex_buffers: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    """Buffers of whole numbers that a step changes."""
    shared: tuple[tuple[str, ...], ...] = ()
    """Names of each parameter that several layers share."""


TRAITS = Traits()
"""Of a model that is not asked."""


EXACT = 1e-9
"""Largest relative difference from one device, in fp64, of a strategy that computes the same."""


class StateShards(NamedTuple):
    """Fractions, 0 to 1, of a model's training state that each device holds; equal on all devices but for rounding."""

    parameters: float
    gradients: float
    states: float
    """The optimizer's states."""

    @classmethod
    def even(cls, parts: int) -> StateShards:
        """Each of `parts` devices holds an equal part of everything; 1: a copy of the whole."""
        return cls(1 / parts, 1 / parts, 1 / parts)


class Strategy(Ruled, frozen=True, kw_only=True):
    """A strategy's options. Importing the file loads no torch; `prepare` does."""

    framework: ClassVar[str] = "torch"
    """What it trains with: a key of `parallelbench.frameworks.FRAMEWORKS`."""
    starts_ranks: ClassVar[bool] = False
    """Whether the suite starts one process per node, which starts the node's ranks itself."""
    places: ClassVar[tuple[str, ...]] = ()
    """Options that say where it runs, or how long: no part of a run's identity."""
    shards_tensors: ClassVar[bool] = False
    """Whether parameters are torch's DTensors, for which torch lacks some fused optimizers."""
    can_be_captured: ClassVar[bool] = False
    """Whether a whole step can be one CUDA graph (`graph=true`)."""
    has_stages: ClassVar[bool] = False
    """Whether a pipeline's stages send each other what they compute."""
    waits_in_steps: ClassVar[str] = ""
    """Why a step on a GPU makes the host wait by design; empty: no step does."""
    evaluates_repeatedly: ClassVar[bool] = False
    """Whether a step can take several gradients, as `optimizer=lbfgs` needs."""
    takes_own_loss: ClassVar[bool] = False
    """Whether each rank that computes a loss has called the whole model for its samples, and takes the loss by
    `numerics_of`: losses of the model's own are then a part of it (`Model.with_own_loss`)."""
    updates_as_asked: ClassVar[bool] = False
    """Whether replicas update by `BaseReplica._update` in every step, which follows `lr_schedule` and
    `clip_norm`."""

    def processes(self, run: RunConfig, device_type: str) -> int:
        """Processes that train: one per device, unless one process drives several devices."""
        return run.devices

    def started(self, run: RunConfig, device_type: str) -> int:
        """Processes that the suite starts."""
        return run.nodes if self.starts_ranks else self.processes(run, device_type)

    def brings(self, model: str) -> dict[str, Any]:
        """Components and settings that a run has by this strategy alone, so that nobody chooses them: key → node.

        `model`: the name of the run's model. All but the model's own are no part of the run's mapping.
        """
        return {}

    def identified(self) -> Strategy:
        """The same, with what identifies the sources that it trains with, where these are no package of Python's.

        Raises `ConfigError` where they can't be read.
        """
        return self

    def require_sources(self) -> None:
        """Raise `ConfigError` where these have changed since the run was asked for."""

    def own_columns(self, run: RunConfig) -> dict[str, Any]:
        """Columns of the `run` table in which it differs from what follows from the configuration."""
        return {}

    @abstractmethod
    def data_parallel_degree(self, run: RunConfig) -> int:
        """Slices that every global batch is cut into."""

    def equals_one_device(self, run: RunConfig) -> bool:
        """Whether training computes the same as on one device, so that parity can be checked."""
        return True

    def reference(self, run: RunConfig) -> Strategy | None:
        """What the author holds the strategy against where `equals_one_device` is false; None: nothing.

        A strategy in one process, on one device, that reads whole global batches. Its replica needs `step`, `evaluate`,
        `full_gradients` and `full_state_dict`.
        """
        return None

    def least_parity_steps(self, run: RunConfig) -> int:
        """Steps of the parity check that show all that the strategy does; at least `measure.parity_steps` are taken."""
        return 1

    def micro_batches_per_step(self, run: RunConfig) -> int:
        """Micro-batches that each data shard's batch is cut into."""
        return 1

    def draws_alike(self, run: RunConfig) -> int:
        """How many neighbouring ranks compute the same values, and so must draw the same random numbers (dropout)."""
        return 1

    def why_not_model(self, run: RunConfig, traits: Traits) -> str:
        """Why it can't train a model that is so, and what to do about it; empty: it can."""
        return ""

    def why_no_recomputation(self, run: RunConfig) -> str:
        """Why backward can't compute layers again (`activation_recomputation`), and what to choose; empty: it can."""
        return ""

    def bubble(self, run: RunConfig) -> float | None:
        """Share of a step, 0 to 1, in which a device must idle by the schedule; None where there is none."""
        return None

    def state_shards(self, run: RunConfig) -> StateShards | None:
        """What each device holds; None where devices hold different parts (stages, servers), or where it is unknown."""
        return None

    def state_bytes(self, run: RunConfig, parameters: int, *, frozen: int = 0) -> int | None:
        """Bytes of parameters, gradients and optimizer state on each device, without activations and buffers: section 3
        of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054). `parameters`: those of the whole model that are trained;
        `frozen`: the others, which have nothing besides.
        """
        shards, states = self.state_shards(run), run.optimizer.states_per_parameter()
        if shards is None or states is None:
            return None
        size_bytes = 8 if run.precision == "fp64" else 4  # autocast keeps parameters in fp32
        trained = parameters * (shards.parameters + shards.gradients + states * shards.states)
        return round(size_bytes * (trained + frozen * shards.parameters))

    def parity_tolerance(self) -> float:
        """Largest relative difference from one device that the parity check allows, in fp64."""
        return EXACT

    def rounds_messages(self, run: RunConfig) -> bool:
        """Whether gradients or parameters are sent in a coarser format than they are kept in, on purpose: a run whose
        strategy does so and doesn't say it fails the closing check.
        """
        return self.parity_tolerance() > EXACT

    @abstractmethod
    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Turn a model on the CPU, identical on every rank, into this rank's replica. `model` is consumed.

        The suite's own strategies get its transformers without values, which `to_device` gives them child by child.
        """


class Optimizer(Ruled, frozen=True, kw_only=True):
    """An optimizer's options. Importing the file loads no torch."""

    lr: Annotated[float, Meta(gt=0)]
    """Learning rate at the configured batch size (of `Lbfgs`: the first step length that is tried)."""
    lr_rule: Literal["constant", "linear", "sqrt"]
    """Under weak scaling the global batch grows with the devices; the rate is multiplied by 1, their number, or its
    square root (Goyal et al. 2017, arXiv 1706.02677; Krizhevsky 2014, arXiv 1404.5997)."""

    def scaled_lr(self, run: RunConfig) -> float:
        """Learning rate as used in `run`."""
        growth = run.global_batch_size / run.batch_size
        factor: float = {"constant": 1.0, "linear": growth, "sqrt": growth**0.5}[self.lr_rule]
        return self.lr * factor

    def states_per_parameter(self) -> int | None:
        """Numbers that it keeps for each parameter; None where the number is not fixed."""
        return None

    can_be_captured: ClassVar[bool] = False
    """Whether an update can be part of a CUDA graph (`graph=true`)."""
    can_be_compiled: ClassVar[bool] = False
    """Whether `torch.compile` takes an update (`compile_scope=step`), and all that it keeps begins as zeros: the steps
    that compile are undone so."""

    @abstractmethod
    def build(self, parameters: Iterable[nn.Parameter], run: RunConfig, device_type: str) -> torch.optim.Optimizer:
        """Build the optimizer of `parameters`, which already are on their devices."""


class LrSchedule(Component, frozen=True, kw_only=True):
    """How the learning rate changes from step to step. Importing the file loads no torch."""

    changes: ClassVar[bool] = True
    """False where every step has the optimizer's own rate."""

    @abstractmethod
    def factor(self, step: int, run: RunConfig) -> float:
        """What the optimizer's rate is multiplied by in this step of all epochs, counted from 1; above 0, at most 1."""

    def check(self, run: RunConfig) -> None:
        """Raise `ConfigError` with the fix where the schedule means nothing in this run; before anything starts."""

    def shortened(self, step: float) -> LrSchedule:
        """The same kind of schedule for training that takes few steps, so that a check sees its rates change.

        `step`: the length of one of these steps, in epochs.
        """
        return self
