"""What a strategy is: a torch-free specification, and the replica that the training loop drives on every rank."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from parallelbench.spec.config import Component

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from parallelbench.data.loader import Batch
    from parallelbench.probes.communication import Traffic
    from parallelbench.probes.spans import Phase, Spanned
    from parallelbench.rank.world import World
    from parallelbench.spec.config import RunConfig


@dataclass(frozen=True)
class Shard:
    """Which part of every global batch a rank reads: the `index`-th of `count` equal slices."""

    index: int = 0
    count: int = 1
    images: bool = True
    """False where this rank never looks at images (a later stage)."""
    labels: bool = True
    """False where this rank never looks at labels (an earlier stage)."""


@dataclass(frozen=True)
class Push:
    """One update that a worker sent to a parameter server, at `step` of the epoch, counted from 1."""

    step: int
    staleness: int
    """Updates by other workers between the parameters that the push's first gradient comes from and its use."""


class StateShards(NamedTuple):
    """Parts, 0 to 1, of what there is to hold of a model: on every device alike, but for rounding."""

    parameters: float
    gradients: float
    states: float
    """Of the optimizer."""

    @classmethod
    def even(cls, parts: int) -> StateShards:
        """Each of so many devices holds one part of everything; 1: a copy of the whole."""
        return cls(1 / parts, 1 / parts, 1 / parts)


class Replica(Protocol):
    """One rank's part of a training job."""

    data_shard: Shard
    traffic: Traffic
    """Bytes sent to other ranks; the training loop reads it after each epoch's training window."""

    @property
    def waiting(self) -> Phase:
        """What a step's waiting for other ranks is, outside of `spanned`: communication, or a schedule's bubble."""

    @property
    def hides_communication(self) -> bool:
        """Whether waiting for other ranks can't be told from computing: then it counts as the phase it happens in."""

    @property
    def whole_epochs(self) -> bool:
        """Whether training may end with an epoch only, as its end is agreed on among the ranks."""

    def spanned(self) -> Iterable[Spanned]:
        """The methods whose calls are phases of a step, for `measure.attribution_steps`; the innermost one counts."""

    def step(self, batch: Batch) -> Tensor | None:
        """Train on one batch without synchronising host and device.

        Returns float64 of shape (2,), detached and on the device: the
        summed loss and the number of correct predictions of the samples whose loss this rank owns; None where it
        owns none.
        """

    def compile_warmup(self, batch: Batch) -> None:
        """Forward and backward on one batch, then everything as before: what is compiled lazily is compiled here."""

    def evaluate(self, batches: Iterable[Batch]) -> Tensor | None:
        """The same two sums over all `batches`, in evaluation mode, without training; None where it owns none."""

    def full_state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers as one device would hold them, on the CPU; a collective. Empty except on rank 0."""

    def full_gradients(self) -> dict[str, Tensor]:
        """Gradients of the last step as one device would hold them, on the CPU; a collective. Empty but on rank 0."""

    def local_state(self) -> dict[str, Any]:
        """What this rank must keep between two epochs: tensors, numbers, and dicts and lists of them.

        No collective. Tensors may be those that training goes on with.
        """

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from what a replica of the same run and rank has saved; this one has not trained yet."""

    def take_pushes(self) -> list[Push]:
        """This worker's pushes since the last call; empty but for parameter servers."""

    def close(self) -> None:
        """Release what the replica holds besides memory (process groups, hooks)."""


class Strategy(Component, frozen=True, kw_only=True):
    """A strategy's options. Importing the file loads no torch; `prepare` does."""

    shards_tensors: ClassVar[bool] = False
    """Whether parameters are torch's DTensors, for which torch lacks some fused optimizers."""
    waits_in_steps: ClassVar[str] = ""
    """Why a step on a GPU makes the host wait by design; empty: no step does."""
    evaluates_repeatedly: ClassVar[bool] = False
    """Whether a step can take several gradients, as `optimizer=lbfgs` needs."""

    @abstractmethod
    def processes(self, run: RunConfig, device_type: str) -> int:
        """Processes that train: one per device, or fewer where one process drives several devices."""

    @abstractmethod
    def data_parallel_degree(self, run: RunConfig) -> int:
        """Slices that every global batch is cut into."""

    def check(self, run: RunConfig, device_type: str) -> None:
        """Raise `ConfigError` with the fix where the strategy can't do this run; before anything starts."""

    def equals_one_device(self, run: RunConfig) -> bool:
        """Whether training is the same computation as on one device, so that parity can be checked."""
        return True

    def micro_batches_per_step(self, run: RunConfig) -> int:
        """Pieces that each data shard's batch goes through the layers in."""
        return 1

    def bubble(self, run: RunConfig) -> float | None:
        """Share of a step, 0 to 1, in which a device must idle by the schedule; None where there is none."""
        return None

    def held(self, run: RunConfig) -> StateShards | None:
        """What each device holds; None where devices hold different things (stages, servers), or nobody has said."""
        return None

    def state_bytes(self, run: RunConfig, parameters: int) -> int | None:
        """Bytes of parameters, gradients and optimizer state on each device, without activations and buffers: section 3
        of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054). `parameters`: of the whole model.
        """
        held, states = self.held(run), run.optimizer.states_per_parameter()
        if held is None or states is None:
            return None
        size_bytes = 8 if run.precision == "fp64" else 4  # autocast keeps parameters in fp32
        return round(parameters * size_bytes * (held.parameters + held.gradients + states * held.states))

    def parity_tolerance(self) -> float:
        """Largest relative difference from one device that the parity check, in fp64, allows."""
        return 1e-9

    @abstractmethod
    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Turn a model on the CPU, identical on every rank, into this rank's replica. `model` is consumed."""
