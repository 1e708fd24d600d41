"""What all replicas of torch's strategies have in common: state, updates and their phases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from parallelbench.measure.spans import Phase, Spanned
from parallelbench.measure.traffic import Traffic
from parallelbench.models.expert_tokens import take_expert_tokens
from parallelbench.strategies.parts.clipping import Clipping, Groups
from parallelbench.strategies.parts.scheduled_rate import ScheduledRate
from parallelbench.strategies.parts.state import (
    load_optimizer,
    load_tensors,
    optimizer_state,
    tensors_of,
    unchanged_buffers,
    undone_updates,
    undrawn_numbers,
)
from parallelbench.strategies.parts.step_norms import StepNorms
from parallelbench.world.numerics import MetricSums, Numerics

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch import Tensor, nn

    from parallelbench.config.components import Batch, MeanLoss, Shard
    from parallelbench.config.replica import Push
    from parallelbench.config.run import RunConfig
    from parallelbench.world.numerics import Sums


def numerics_of(run: RunConfig, device_type: str, *, loss: MeanLoss | None = None) -> Numerics:
    """The arithmetic of a run, with its metric and its loss, or one that computes the same in another way."""
    loss = run.model.with_own_loss(loss or run.loss.build())
    metric = MetricSums(run.metric_size, run.metric.build()) if run.metric_size else None
    return Numerics(run.precision, device_type, loss=loss, metric=metric, compiles_loss=run.compiles_step)


class BaseReplica(ABC):
    """What all replicas have in common."""

    waiting: ClassVar[Phase] = "communication"
    hides_communication: bool = False
    whole_epochs: ClassVar[bool] = False
    copy_group: int = 0
    shares_at_evaluation: bool = False
    _compiles_update: bool = False

    def __init__(self, data_shard: Shard, run: RunConfig | None = None) -> None:
        """`run`: whose `lr_schedule` and `clip_norm` updates follow; None: gradients and rate are used as they are."""
        self.data_shard = data_shard
        self.traffic = Traffic()
        self._rate = ScheduledRate(run) if run is not None and run.lr_schedule.changes else None
        self._clip_norm = None if run is None else run.clip_norm
        self._only_clipping: Clipping | None = None
        self._norms = None if self._clip_norm is None else StepNorms(self._clip_norm)

    @abstractmethod
    def trained(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The module with this rank's parameters and buffers, and the optimizer that updates them."""

    @abstractmethod
    def _forward_backward(self, batch: Batch) -> Sums | None:
        """Leave this rank's gradients of a batch; returns the sums that `step` returns."""

    def compile_warmup(self, batch: Batch) -> None:
        """Forward and backward, and whole steps where updates are compiled; all of it is undone, random numbers too."""
        module, optimizer = self.trained()
        undone = undone_updates(module, optimizer) if self._compiles_update else nullcontext()
        with undrawn_numbers(module), unchanged_buffers(module), undone:
            self._forward_backward(batch)
            if self._compiles_update:
                self._update()
                self._forward_backward(batch)
                self._update()
        optimizer.zero_grad(set_to_none=True)

    def local_state(self) -> dict[str, Any]:
        """Parameters, buffers, and the optimizer's state; a replica that keeps more between epochs adds it."""
        module, optimizer = self.trained()
        rate = {} if self._rate is None else {"rate": self._rate.local_state()}
        return {"tensors": tensors_of(module), "optimizer": optimizer_state(optimizer), **rate}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Restore them in place."""
        module, optimizer = self.trained()
        load_tensors(module, state["tensors"])
        load_optimizer(optimizer, state["optimizer"])
        if self._rate is not None:
            self._rate.load_local_state(state["rate"])

    def full_optimizer_state(self, key: str) -> dict[str, Tensor] | None:
        """None, but where a replica gathers it."""
        return None

    def copied(self) -> Iterable[Tensor]:
        """None, but where a replica says so."""
        return ()

    def take_pushes(self) -> list[Push]:
        """None: there is no parameter server."""
        return []

    def take_norms(self) -> dict[str, float]:
        """Of the steps since the last call."""
        return {} if self._norms is None else self._norms.take()

    def take_expert_tokens(self) -> dict[int, list[int]]:
        """Of the blocks of this rank's module."""
        return take_expert_tokens(self.trained()[0])

    def spanned(self) -> Iterable[Spanned]:
        """The update, and what it waits for to clip; replicas add their other phases."""
        yield Spanned(self, "_update", "optimizer")
        if self._clipping is not None and self._clipping.communicates:
            yield Spanned(self._clipping, "sum_over_ranks", "communication")

    def _update(self) -> None:
        """Clip the gradients, set the step's rate, and let the optimizer update this rank's parameters."""
        if self._clipping is not None:
            self._clip(self._clipping)
        if self._rate is not None:
            self._rate.next_step(self.trained()[1])
        self._apply_gradients()

    @property
    def _clipping(self) -> Clipping | None:
        """What clips this rank's gradients; None: nothing does."""
        return None if self._clip_norm is None else self._clipping_to(self._clip_norm)

    def _clipping_to(self, most: float) -> Clipping:
        if self._only_clipping is None:
            parameters, over = self._counted()
            others = self._uncounted()
            self._only_clipping = Clipping(
                most, parameters, over=over, traffic=self.traffic, uncounted=others, norms=self._norms
            )
        return self._only_clipping

    def _counted(self) -> tuple[Iterable[Tensor], Groups]:
        """This rank's parameters that count in the gradient's norm, and groups whose ranks have others."""
        return self.trained()[0].parameters(), ()

    def _uncounted(self) -> Iterable[Tensor]:
        """This rank's other parameters, which count on another rank; all are scaled."""
        return ()

    def _clip(self, clipping: Clipping) -> None:
        clipping.clip()

    def _unclipped(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gradients of the last update as they were before."""
        return gradients if self._clipping is None else self._clipping.unclipped(gradients)

    def _apply_gradients(self) -> None:
        self.trained()[1].step()

    def close(self) -> None:  # noqa: B027 what most replicas do
        """Nothing to release besides memory."""
