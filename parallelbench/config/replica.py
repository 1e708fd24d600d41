"""The replica: what the training loop drives on every rank, under every strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from parallelbench.config.components import Batch, Shard
    from parallelbench.measure.traffic import Traffic
    from parallelbench.world.numerics import Sums
    from parallelbench.world.spans import Phase


@dataclass(frozen=True)
class Push:
    """One update that a worker sent to a parameter server, at `step` of the epoch, counted from 1."""

    step: int
    staleness: int
    """Updates by other workers between the parameters that the push's first gradient comes from and its use."""


class Replica(Protocol):
    """One rank's part of a training job."""

    data_shard: Shard
    traffic: Traffic
    """Bytes sent to other ranks; the training loop reads it after each epoch's training window."""

    shares_at_evaluation: bool
    """Whether `evaluate` changes what `copied` returns, to make copies equal to the last bit."""

    @property
    def waiting(self) -> Phase:
        """The phase of a step's waiting outside of all phases: communication, or a schedule's bubble."""

    @property
    def hides_communication(self) -> bool:
        """Whether waiting cannot be told apart from computing. It then counts in the phase in which it happens."""

    @property
    def whole_epochs(self) -> bool:
        """Whether training must end with an epoch, because the ranks agree on its end there."""

    def step(self, batch: Batch) -> Sums | None:
        """Train on one batch without synchronising host and device; parts of it are each a `phase` of the step.

        Returns the summed loss and the number of correct predictions of the samples whose loss this rank owns, as
        `parallelbench.world.numerics.sums` makes them before backward; None where it owns none. Over all ranks every
        sample must be owned once, which is checked. The caller adds others to what is returned.
        """

    def compile_warmup(self, batch: Batch) -> None:
        """Compile what is compiled lazily, by forward and backward on one batch, or capture a step; the state stays as
        it was.
        """

    def evaluate(self, batches: Iterable[Batch]) -> Tensor | None:
        """The same two sums over all `batches`, in evaluation mode, without training: float64 of shape (2,), on the
        device; None where this rank owns none. The sums of the run's metric follow them, where it has one.
        """

    def full_state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers as one device would hold them, on the CPU; a collective. Empty except on rank 0.

        Before the first step these are the bits that the seed gives.
        """

    def full_gradients(self) -> dict[str, Tensor]:
        """Gradients of the last step as one device would hold them before it clips them, on the CPU; a collective.
        Empty but on rank 0.
        """

    def full_optimizer_state(self, key: str) -> dict[str, Tensor] | None:
        """What the optimizer keeps of each parameter under `key`, likewise; zeros where it keeps nothing. A number
        fills a tensor of the parameter's shape. None, on every rank alike, where it is not gathered: the closing check
        then sees that a step moves the parameters, not how far.
        """

    def copied(self) -> Mapping[int, Iterable[Tensor]]:
        """Parameters of this rank, or shards, that others hold with the same bits between two epochs, in one order.

        Under a number that all ranks give which hold the same; two numbers at most. The tensors must not change between
        the end of an epoch and that of its evaluation, unless `shares_at_evaluation`.
        """

    def local_state(self) -> dict[str, Any]:
        """This rank's state between two epochs: tensors, numbers, and dicts and lists of them.

        No collective. The tensors may be the live ones.
        """

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Load the state that a replica of the same run and rank has saved; this one has not trained yet."""

    def take_pushes(self) -> list[Push]:
        """This worker's pushes since the last call; empty but for parameter servers."""

    def take_norms(self) -> dict[str, float]:
        """Under `clip_norm`, columns of `ranks` about the norms of the gradients that this rank's steps have clipped
        since the last call; empty where it clips none. Asked for with `clip_norm` only.
        """

    def take_expert_tokens(self) -> dict[int, list[int]]:
        """Block, from 0 → tokens that each of its experts has had in forward passes of training on this rank since the
        last call; only of blocks that are on this rank. Asked for with `RoutedExperts.blocks` only.
        """

    def close(self) -> None:
        """Release what the replica holds besides memory (process groups, hooks)."""
