"""Training by `torch.optim.LBFGS`: on one device, and on several over vectors of which each rank holds a part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parallelbench.config.components import Shard
from parallelbench.models.norms import synchronize_norms
from parallelbench.strategies.replica import ModuleReplica, share_buffers, to_device
from parallelbench.strategies.state import FlatParameters
from parallelbench.world.spans import phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parallelbench.config.components import Batch
    from parallelbench.config.run import RunConfig
    from parallelbench.optim.optimizers import Lbfgs
    from parallelbench.world.numerics import Sums
    from parallelbench.world.world import World


class FullBatchReplica(ModuleReplica):
    """A module on one device, whose optimizer asks for losses and gradients at several points per step."""

    def step(self, batch: Batch) -> Sums | None:
        """One iteration; the sums are those at the point where it starts.

        The optimizer's are directions, and the search along them: all that is neither forward nor backward.
        """
        results: list[Sums] = []

        def closure() -> float:
            result, loss = self._evaluate(batch)
            results.append(result)
            return loss

        with phase("optimizer"):
            self._optimizer.step(closure)
        return results[0]

    def _evaluate(self, batch: Batch) -> tuple[Sums, float]:
        """Sums and mean loss at the parameters' present values; leaves the gradient there."""
        result = self._forward_backward(batch)
        return result, result[0].item() / batch.size


class ShardedVector(Tensor):
    """A rank's part of a vector. It is computed with as any tensor is, but its reductions are the whole vector's.

    They are plain numbers in fp64 on the host, the same on every rank. A reduction whose whole isn't known is an error:
    a new torch may use others than `torch.optim.LBFGS` does today.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if not isinstance(result, Tensor) or result.dim():
            return result
        assert func in _OVER_RANKS, f"{func.__name__} of a rank's part is not that of the whole vector"
        number = result.as_subclass(Tensor).to("cpu", torch.float64)
        dist.all_reduce(number, _OVER_RANKS[func])
        return number


_OVER_RANKS = {Tensor.dot: dist.ReduceOp.SUM, Tensor.sum: dist.ReduceOp.SUM, Tensor.max: dist.ReduceOp.MAX}


class SandblasterReplica(FullBatchReplica):
    """One rank of `strategy=sandblaster_lbfgs`: a slice of the data, and its part of every vector."""

    def __init__(self, model: nn.Module, options: Lbfgs, *, run: RunConfig, world: World) -> None:
        module = to_device(model, run, world.device)
        synchronize_norms(module, dist.group.WORLD)
        self._flat = FlatParameters(module, multiple=world.size)
        self._values = self._flat.values.chunk(world.size)[world.rank]
        self._shared = self._values.clone()
        """`_values` as the other ranks have them."""
        self._gradient = torch.empty_like(self._values)
        self._own = nn.Parameter(self._values.as_subclass(ShardedVector))
        super().__init__(
            module,
            run=run,
            world=world,
            data_shard=Shard(world.rank, world.size),
            optimizer=options.build([self._own], run, world.device_type),
            before_evaluation=lambda: share_buffers(module),
        )

    def step(self, batch: Batch) -> Sums | None:
        result = super().step(batch)
        with phase("optimizer"):
            self._share_values()
        return result

    def full_gradients(self) -> dict[str, Tensor]:
        """At the last point that the last step evaluated."""
        dist.all_gather_into_tensor(self._flat.gradient, self._gradient)
        return self._copy(self._flat.named_views(self._flat.gradient, self._module))

    def local_state(self) -> dict[str, Any]:
        """The optimizer's vectors as plain tensors, which can be read without this class."""
        state = super().local_state()
        return {**state, "optimizer": _vectors(lambda each: each.as_subclass(Tensor), state["optimizer"])}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Restore it; unlike torch, which rounds all to the parameters' type, as it was saved."""
        super().load_local_state(state)
        for kept in state["optimizer"]["plain"].values():
            own = _vectors(lambda each: each.to(self._values).as_subclass(ShardedVector), kept)
            self._optimizer.state[self._own].update(own)
        self._shared.copy_(self._values)

    def _forward_backward(self, batch: Batch) -> Sums:
        self._module.zero_grad(set_to_none=True)
        return super()._forward_backward(batch)

    def _evaluate(self, batch: Batch) -> tuple[Sums, float]:
        """Sums of this rank's slice, and the mean loss of all; leaves this rank's part of the mean gradient."""
        self._share_values()
        result = self._forward_backward(batch)
        self._flat.gather_gradient()
        with phase("communication"):
            dist.reduce_scatter_tensor(self._gradient, self._flat.gradient)
        self.traffic.reduce_scatter("gradient", self._flat.gradient.nbytes, self._world.size)
        self._gradient /= self._world.size
        self._own.grad = self._gradient.as_subclass(ShardedVector)
        return result, self._world.total([result[0].item()])[0] / (batch.size * self._world.size)

    def _share_values(self) -> None:
        """Gather the parameters where a rank's part is not what the others have: a search may end where it tried."""
        if not self._world.total([not torch.equal(self._values, self._shared)])[0]:
            return
        self._shared.copy_(self._values)
        with phase("communication"):
            dist.all_gather_into_tensor(self._flat.values, self._shared)
        self.traffic.all_gather("parameter", self._flat.values.nbytes, self._world.size)


def _vectors(change: Callable[[Tensor], Tensor], state: Any) -> Any:
    """An optimizer's state with another kind of vectors; its numbers stay as they are."""
    return tree_map_only(Tensor, lambda each: change(each) if each.dim() else each, state)
