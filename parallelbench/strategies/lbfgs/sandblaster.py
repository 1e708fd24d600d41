"""Training by L-BFGS: on one device by `torch.optim.LBFGS`, on several with sharded vectors and a coordinator.

The arithmetic of the second is that of `torch.optim.LBFGS` with one iteration per step, term by term.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelbench.config.components import Shard
from parallelbench.measure.spans import Spanned
from parallelbench.models.norms import synchronize_norms
from parallelbench.strategies.lbfgs.wolfe import TOLERANCE_CHANGE, Point, strong_wolfe
from parallelbench.strategies.replica import ModuleReplica, share_buffers, to_device
from parallelbench.strategies.state import FlatParameters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from parallelbench.config.components import Batch
    from parallelbench.config.run import RunConfig
    from parallelbench.optim.optimizers import Lbfgs
    from parallelbench.strategies.lbfgs.wolfe import Search
    from parallelbench.world.numerics import Sums
    from parallelbench.world.world import World


TOLERANCE_GRADIENT = 1e-7
LEAST_CURVATURE = 1e-10
"""Pairs with a dot product at or below this would spoil the approximation; as in torch."""


class FullBatchReplica(ModuleReplica):
    """A module on one device, whose optimizer asks for losses and gradients at several points per step."""

    def spanned(self) -> Iterable[Spanned]:
        """The optimizer's are directions, and the search along them: all that is neither forward nor backward."""
        return [Spanned(self, "step", "optimizer"), *super().spanned()]

    def step(self, batch: Batch) -> Sums | None:
        """One iteration; the sums are those at the point where it starts."""
        results: list[Sums] = []

        def closure() -> float:
            results.append(self._forward_backward(batch))
            return results[-1][0].item() / batch.size

        self._optimizer.step(closure)
        return results[0]


@dataclass(frozen=True)
class CurvaturePair:
    """What an iteration has shown about the curvature."""

    moved: Tensor
    """Change of the parameters: this rank's shard."""
    change: Tensor
    """Change of the gradient: this rank's shard."""
    inverse: float
    """1 ÷ their dot product, over all shards."""


class History:
    """The last pairs, in shards; they approximate the inverse Hessian, which `direction` multiplies by a vector."""

    def __init__(self, size: int, world: World) -> None:
        self._pairs: deque[CurvaturePair] = deque(maxlen=size)
        self._scale = 1.0
        self._world = world

    def add(self, moved: Tensor, change: Tensor) -> None:
        """Remember an iteration, unless it shows no positive curvature."""
        product = self.dot(change, moved)
        if product > LEAST_CURVATURE:
            self._pairs.append(CurvaturePair(moved, change, 1 / product))
            self._scale = product / self.dot(change, change)

    def direction(self, gradient: Tensor) -> Tensor:
        """Minus the approximate inverse Hessian times the gradient: the two-loop recursion of Nocedal 1980."""
        result = gradient.neg()
        factors: list[float] = []
        for pair in reversed(self._pairs):
            factors.append(self.dot(pair.moved, result) * pair.inverse)
            result.add_(pair.change, alpha=-factors[-1])
        result.mul_(self._scale)
        for pair, factor in zip(self._pairs, reversed(factors), strict=True):
            result.add_(pair.moved, alpha=factor - self.dot(pair.change, result) * pair.inverse)
        return result

    def local_state(self) -> dict[str, Any]:
        """This rank's shards of the pairs, oldest first."""
        return {"scale": self._scale, "pairs": [[pair.moved, pair.change, pair.inverse] for pair in self._pairs]}

    def load_local_state(self, state: dict[str, Any], like: Tensor) -> None:
        """Restore them, on the device of the vector `like`."""
        self._scale = state["scale"]
        self._pairs.extend(
            CurvaturePair(moved.to(like), change.to(like), inverse) for moved, change, inverse in state["pairs"]
        )

    def dot(self, a: Tensor, b: Tensor) -> float:
        """Dot product of two sharded vectors; the same number on every rank."""
        return self.total(torch.dot(a, b))

    def total(self, value: Tensor) -> float:
        """Sum over the ranks of one number each."""
        # A copy, since the sum is made in place.
        return self._world.sum(value.detach().reshape(1).to("cpu", torch.float64, copy=True)).item()


class SandblasterReplica(FullBatchReplica):
    """One rank of `strategy=sandblaster_lbfgs`: a slice of the data, a shard of every vector; rank 0 coordinates."""

    def __init__(self, model: nn.Module, options: Lbfgs, *, run: RunConfig, world: World) -> None:
        module = to_device(model, run, world.device)
        synchronize_norms(module, dist.group.WORLD)
        self._flat = FlatParameters(module, multiple=world.size)
        shard = Shard(world.rank, world.size)
        super().__init__(
            module, run=run, world=world, data_shard=shard, before_evaluation=lambda: share_buffers(module)
        )
        self._lr, self._evaluations = run.optimizer.scaled_lr(run), options.line_search_evaluations
        self._history = History(options.history_size, world)
        self._values = self._flat.values.chunk(world.size)[world.rank]
        self._gradient = torch.empty_like(self._values)
        self._last: tuple[Tensor, Tensor] | None = None
        """Gradient and movement of the iteration before, this rank's shards."""

    def step(self, batch: Batch) -> Sums | None:
        """One iteration; the sums are those at the point where it starts."""
        result, loss = self._evaluate(batch)
        gradient = self._gradient.clone()
        if self._largest(gradient) <= TOLERANCE_GRADIENT:
            return result
        if self._last is None:
            direction = gradient.neg()
            first = min(1.0, 1 / self._history.total(gradient.abs().sum())) * self._lr
        else:
            before, moved = self._last
            self._history.add(moved, gradient - before)
            direction, first = self._history.direction(gradient), self._lr
        start = Point(0.0, loss, self._history.dot(gradient, direction))
        if start.slope <= -TOLERANCE_CHANGE:
            first = self._search(batch, start, first, direction)
        self._last = (gradient, direction * first)
        return result

    def full_gradients(self) -> dict[str, Tensor]:
        """At the last point that the last step evaluated."""
        dist.all_gather_into_tensor(self._flat.gradient, self._gradient)
        return self._copy(self._flat.named_views(self._flat.gradient, self._module))

    def local_state(self) -> dict[str, Any]:
        """Parameters, buffers, and what earlier iterations have shown about the curvature."""
        return {**super().local_state(), "history": self._history.local_state(), "last": list(self._last or ())}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Restore them."""
        super().load_local_state(state)
        self._history.load_local_state(state["history"], self._values)
        self._last = tuple(vector.to(self._values) for vector in state["last"]) or None

    def _search(self, batch: Batch, start: Point, first: float, direction: Tensor) -> float:
        """Move to a better point along the direction; returns how far, in multiples of it.

        The coordinator chooses step lengths, which all ranks evaluate, until it says where to stay.
        """
        origin, here, largest = self._values.clone(), 0.0, self._largest(direction)
        search = strong_wolfe(start, first, direction_max=largest, evaluations=self._evaluations)
        measured: tuple[float, float] | None = None
        while True:
            t, final = self._next_step_length(search, measured)
            if t != here:
                torch.add(origin, direction, alpha=t, out=self._values)
                self._gather_values()
                here = t
            if final:
                return t
            _, loss = self._evaluate(batch)
            measured = (loss, self._history.dot(self._gradient, direction))

    def _next_step_length(self, search: Search, measured: tuple[float, float] | None) -> tuple[float, bool]:
        """The step length to go to, and whether to stay there; only the coordinator runs the `search`.

        `measured`: loss and slope at the step length before; None at first.
        """
        message = torch.zeros(2, dtype=torch.float64)
        if self._world.rank == 0:
            try:
                message[0] = next(search) if measured is None else search.send(measured)
            except StopIteration as end:
                message[0], message[1] = end.value, 1
        dist.broadcast(message, src=0)
        return message[0].item(), bool(message[1].item())

    def _evaluate(self, batch: Batch) -> tuple[Sums, float]:
        """Sums of this rank's slice, and the mean loss of all; sets `_gradient`, this rank's shard."""
        result = self._forward_backward(batch)
        self._flat.gather_gradient()
        dist.reduce_scatter_tensor(self._gradient, self._flat.gradient)
        self.traffic.reduce_scatter("gradient", self._flat.gradient.nbytes, self._world.size)
        self._gradient /= self._world.size
        return result, self._history.total(result[0]) / (batch.size * self._world.size)

    def _gather_values(self) -> None:
        dist.all_gather_into_tensor(self._flat.values, self._values.clone())
        self.traffic.all_gather("parameter", self._flat.values.nbytes, self._world.size)

    def _largest(self, vector: Tensor) -> float:
        """Largest absolute value over all shards."""
        largest = vector.abs().max().reshape(1).to("cpu", torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.item()
