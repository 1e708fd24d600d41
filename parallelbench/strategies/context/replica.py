"""The replicas of context parallelism: a part of every sequence, and the sums of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from parallelbench.config.components import Batch
from parallelbench.measure.spans import waits_are_hidden
from parallelbench.models.gpt_layers import CausalAttention, TokenEmbed
from parallelbench.strategies.context.attention import Gathering, HeadExchange, Ring
from parallelbench.strategies.fsdp.shards import ShardedReplica
from parallelbench.strategies.mesh import device_mesh
from parallelbench.strategies.replica import ModuleReplica

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from parallelbench.config.run import RunConfig
    from parallelbench.world.numerics import Sums
    from parallelbench.world.world import World


class ContextGroup(NamedTuple):
    """Neighbouring ranks; others beside them share other sequences."""

    rank: int
    """Among them."""
    size: int
    copy: int = 0
    """Which of the groups it is."""
    group: dist.ProcessGroup | None = None
    """What connects them; None: the group of all ranks."""


def context_group(world: World, size: int) -> ContextGroup:
    """This rank's group, where each has `size` ranks."""
    if size == world.size:
        return ContextGroup(world.rank, size)
    mesh = device_mesh(world, data=world.size // size, context=size)
    return ContextGroup(
        mesh.get_local_rank("context"), size, copy=mesh.get_local_rank("data"), group=mesh.get_group("context")
    )


class ContextReplica(ModuleReplica):
    """The whole model on this rank's tokens of its samples, which the first rank of a sequence counts for all."""

    def __init__(
        self, module: nn.Module, *, run: RunConfig, world: World, exchange: str, context: ContextGroup, **options: Any
    ) -> None:
        """`module`: in whose layers positions and attention are replaced. `options`: those of `ModuleReplica`."""
        super().__init__(module, run=run, world=world, **options)
        self.hides_communication = waits_are_hidden(world.device_type, compiled=run.compile)
        self._context = context
        (tokens,) = run.data.shape
        places = own_places(tokens, rank=context.rank, ranks=context.size, zig_zag=exchange != "all_to_all")
        self._places = places.to(world.device)
        attend = {"ring": Ring, "all_gather": Gathering, "all_to_all": HeadExchange}[exchange](context, self.traffic)
        for layer in module.modules():
            if isinstance(layer, CausalAttention):
                layer.join = torch.compiler.disable(attend)  # its messages are no part of a graph
            if isinstance(layer, (CausalAttention, TokenEmbed)):
                layer.places = self._places

    def _forward_backward(self, batch: Batch) -> Sums:
        return super()._forward_backward(self._own(batch))

    def evaluate(self, batches: Iterable[Batch]) -> Tensor | None:
        """Sums over all tokens of its samples, on the first rank of their sequences; a collective."""
        total = super().evaluate(map(self._own, batches))
        if total is not None:
            dist.all_reduce(total, group=self._context.group)
        return total if self._context.rank == 0 else None

    def _own(self, batch: Batch) -> Batch:
        """This rank's tokens of all samples."""
        assert batch.images is not None
        assert batch.labels is not None
        images, labels = (values.index_select(1, self._places) for values in (batch.images, batch.labels))
        return Batch(images, labels, batch.size)

    def _owned_sums(self, loss: Tensor, logits: Tensor, labels: Tensor) -> Sums:
        """This rank's share of the mean over all tokens, which are as many on each rank."""
        owned = logits if self._context.rank == 0 else logits.detach()
        return self._numerics.sums(loss / self._context.size, owned, labels)


def own_places(tokens: int, *, rank: int, ranks: int, zig_zag: bool) -> Tensor:
    """The places in the sequence of a rank's tokens: consecutive ones, or two pieces that balance each other."""
    if not zig_zag:
        return torch.arange(tokens).chunk(ranks)[rank]
    pieces = torch.arange(tokens).chunk(2 * ranks)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])


class ShardedContextReplica(ContextReplica, ShardedReplica):
    """A part of every sequence, and a shard of every layer, which gathers it when it needs it."""
