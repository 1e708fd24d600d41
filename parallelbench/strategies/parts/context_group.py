"""The ranks that hold the parts of the same sequences, and this rank's place among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from parallelbench.strategies.parts.meshes import device_mesh

if TYPE_CHECKING:
    import torch.distributed as dist

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
