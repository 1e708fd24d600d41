"""Device meshes, each made once per process."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from parallelbench.rank.world import World


def device_mesh(world: World, **sizes: int) -> DeviceMesh:
    """A mesh over all ranks with these dimensions, the last one running fastest.

    The parity check and training get the same one: DTensor remembers, by the shape of a mesh, the groups of the first
    that it saw, and would go on using them after their end.
    """
    return _made(dist.group.WORLD, world.device_type, tuple(sizes), tuple(sizes.values()))


@functools.cache
def _made(_group: object, device_type: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        _wait_no_longer_than_all(group)
    return mesh


def _wait_no_longer_than_all(group: dist.ProcessGroup) -> None:
    """Give a group the default group's timeout, which is the run's: torch gives groups of meshes half an hour."""
    assert dist.group.WORLD is not None
    timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    # Newer versions of torch have a public function; NCCL's newer backend has none of the private methods.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)
