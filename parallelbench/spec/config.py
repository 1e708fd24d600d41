"""One run, and the kinds of component that look at the whole of it: the strategy, the optimizer, and its schedule.

A *component* is a configuration node that names its class in `_target_` (a model, a data set, a strategy, an optimizer,
a schedule, a loss, a metric, a loader); the class is a frozen struct whose fields are the node's keys. Nothing here
imports torch, so that thousands of configurations can be checked on a login node.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from msgspec import Meta

from parallelbench.errors import ConfigError
from parallelbench.spec.launchers import LauncherOptions, expanded
from parallelbench.spec.settings import Settings
from parallelbench.spec.structure import Component, Name

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import torch
    from torch import nn

    from parallelbench.spec.dataset import Data
    from parallelbench.spec.loader import Loader
    from parallelbench.spec.mean_loss import Loss
    from parallelbench.spec.metric import Metric
    from parallelbench.spec.model import Model
    from parallelbench.spec.replica import Replica
    from parallelbench.spec.traits import Traits
    from parallelbench.world.world import World


class RunConfig(Settings, frozen=True, kw_only=True):
    """One run: the content of `config.yaml` in a run folder."""

    model: Model
    data: Data
    strategy: Strategy
    optimizer: Optimizer
    lr_schedule: LrSchedule
    loss: Loss
    metric: Metric
    loader: Loader
    launcher: LauncherOptions
    sweep_name: Name = "adhoc"
    """The sweep it belongs to: the name of the folder above the run folder."""
    plugin_sources: str = ""
    """Whose sources train, as `package@hash`: a part of the run id. Empty: the suite's alone, or not recorded."""
    same_plugin: str = ""
    """Sources that train in place of those, since `--same-plugin` says that they compute the same; empty: none."""

    def __post_init__(self) -> None:
        """Check what involves several fields."""
        if self.devices % self.nodes:
            raise ConfigError(
                f"devices={self.devices} can't be spread evenly over nodes={self.nodes}: "
                f"choose a multiple of {self.nodes}"
            )

    @property
    def effective_seed(self) -> int:
        """Seed of this repetition: all strategies of one repeat share it."""
        return self.seed + self.repeat

    @property
    def logits_per_label(self) -> int:
        """A language model's vocabulary, which may be larger than the data's, or the data's classes."""
        return self.model.vocabulary_entries or self.data.num_classes

    @property
    def metric_size(self) -> int:
        """How many sums the metric has; 0: none is measured."""
        return self.metric.size(self.logits_per_label)

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, over all devices."""
        return self.batch_size * (self.devices if self.scaling == "weak" else 1)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch; the tail that fills no global batch is dropped."""
        full = self.data.train_samples // self.global_batch_size
        return min(full, self.measure.steps_per_epoch or full)

    def rate_factor(self, step: int) -> float:
        """What the learning rate is multiplied by in a training step, counted from 1; 1 in steps after the last epoch.

        The closing check and the attribution take such steps: at rates near 0 nobody could see an update.
        """
        return self.lr_schedule.factor(step, self) if step <= self.epochs * self.steps_per_epoch else 1.0

    @property
    def compiles_step(self) -> bool:
        """Whether the loss and the optimizer's update are compiled, not the model alone."""
        return self.compile and self.compile_scope == "step"

    @property
    def sweep_folder(self) -> Path:
        """The folder of the sweep: the parent of the run's own."""
        return expanded(self.results) / self.sweep_name


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


class Strategy(Component, frozen=True, kw_only=True):
    """A strategy's options. Importing the file loads no torch; `prepare` does."""

    framework: ClassVar[str] = "torch"
    """What it trains with: a key of `parallelbench.frameworks.FRAMEWORKS`."""
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

    @abstractmethod
    def data_parallel_degree(self, run: RunConfig) -> int:
        """Slices that every global batch is cut into."""

    def check(self, run: RunConfig, device_type: str) -> None:
        """Raise `ConfigError` with the fix where the strategy can't do this run; before anything starts."""

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

    def state_bytes(self, run: RunConfig, parameters: int) -> int | None:
        """Bytes of parameters, gradients and optimizer state on each device, without activations and buffers: section 3
        of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054). `parameters`: of the whole model.
        """
        shards, states = self.state_shards(run), run.optimizer.states_per_parameter()
        if shards is None or states is None:
            return None
        size_bytes = 8 if run.precision == "fp64" else 4  # autocast keeps parameters in fp32
        return round(parameters * size_bytes * (shards.parameters + shards.gradients + states * shards.states))

    def parity_tolerance(self) -> float:
        """Largest relative difference from one device that the parity check allows, in fp64."""
        return EXACT

    @abstractmethod
    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Turn a model on the CPU, identical on every rank, into this rank's replica. `model` is consumed."""


def own_reference(run: RunConfig) -> Strategy | None:
    """The reference of the strategy's author, which stands in for one device; None: one device, or nothing, does.

    Raises `ConfigError` where it is no strategy.
    """
    if run.strategy.equals_one_device(run):
        return None
    reference = run.strategy.reference(run)
    if not (reference is None or isinstance(reference, Strategy)):
        raise ConfigError(
            f"strategy={run.strategy.name}: reference returns {type(reference).__name__}: return a Strategy, or None"
        )
    return reference


class Optimizer(Component, frozen=True, kw_only=True):
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
    def check(self, run: RunConfig, device_type: str) -> None:
        """Raise `ConfigError` with the fix where the optimizer can't do this run."""

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
