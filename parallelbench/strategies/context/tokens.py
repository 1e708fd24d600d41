"""A rank's tokens of the sequences that it shares with others, and the attention that joins them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from parallelbench.config.components import Batch
from parallelbench.models.gpt_layers import CausalAttention, TokenEmbed
from parallelbench.strategies.context.attention import Gathering, HeadExchange, Ring
from parallelbench.strategies.mesh import device_mesh

if TYPE_CHECKING:
    from torch import Tensor

    from parallelbench.config.run import RunConfig
    from parallelbench.strategies.context import Exchange
    from parallelbench.strategies.replica import ModuleReplica
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


class OwnTokens:
    """This rank's tokens of all its samples, and its share of their sums, which the first rank of a sequence counts."""

    def __init__(self, context: ContextGroup, exchange: Exchange, run: RunConfig, world: World) -> None:
        self._context, self._exchange = context, exchange
        (tokens,) = run.data.shape
        places = own_places(tokens, rank=context.rank, ranks=context.size, zig_zag=exchange != "all_to_all")
        self.places = places.to(world.device)

    def join(self, replica: ModuleReplica) -> ModuleReplica:
        """Give the replica's layers their positions, and its attention the exchange, whose bytes its traffic counts."""
        kinds = {"ring": Ring, "all_gather": Gathering, "all_to_all": HeadExchange}
        attend = kinds[self._exchange](self._context, replica.traffic)
        for layer in replica.trained()[0].modules():
            if isinstance(layer, CausalAttention):
                layer.join = torch.compiler.disable(attend)  # its messages are no part of a graph
            if isinstance(layer, (CausalAttention, TokenEmbed)):
                layer.places = self.places
        return replica

    def of(self, batch: Batch) -> Batch:
        """This rank's tokens of all samples."""
        assert batch.images is not None
        assert batch.labels is not None
        images, labels = (values.index_select(1, self.places) for values in (batch.images, batch.labels))
        return Batch(images, labels, batch.size)

    def share(self, loss: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's share of the mean over all tokens, which are as many on each rank; logits that count here."""
        return loss / self._context.size, logits if self._context.rank == 0 else logits.detach()

    def total(self, sums: Tensor) -> Tensor | None:
        """Sums over all tokens, on the first rank of their sequences; a collective."""
        dist.all_reduce(sums, group=self._context.group)
        return sums if self._context.rank == 0 else None


def own_places(tokens: int, *, rank: int, ranks: int, zig_zag: bool) -> Tensor:
    """The places in the sequence of a rank's tokens: consecutive ones, or two pieces that balance each other."""
    if not zig_zag:
        return torch.arange(tokens).chunk(ranks)[rank]
    pieces = torch.arange(tokens).chunk(2 * ranks)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])
