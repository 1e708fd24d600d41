"""Where a rank stands among pipelines side by side, whose stages may be shared by several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallelbench.strategies.parts.device_meshes import device_mesh

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from parallelbench.rank.world import World
    from parallelbench.strategies.parts.meshes import Mesh


@dataclass(frozen=True)
class Position:
    """Where this rank is in a mesh of data × pipeline × tensor."""

    ranks: tuple[int, ...]
    """The (global) ranks of its pipeline, in order."""
    pipeline: dist.ProcessGroup | None = None
    """Connects them; None: the group of all ranks."""
    copy: int = 0
    copies: int = 1
    """Its pipeline is the `copy`-th of so many, which read different samples."""
    data: dist.ProcessGroup | None = None
    """Connects the copies of its stages."""
    tensor: DeviceMesh | None = None
    """The ranks that share the linear layers of its stages."""

    @property
    def owns_loss(self) -> bool:
        """Whether this is the one, of the ranks that share a stage's linear layers, that owns the loss."""
        return self.tensor is None or self.tensor.get_local_rank() == 0


def position_in(mesh: Mesh, world: World) -> Position:
    """Of this rank in a mesh of stages and, where there is one, a dimension called tensor."""
    if mesh.devices == mesh.inner["stages"]:
        return Position(tuple(range(world.size)))  # one pipeline, which the group of all ranks connects
    devices = device_mesh(world, data=mesh.data, **mesh.inner)
    copy, *_ = devices.get_coordinate() or ()
    pipeline = devices.mesh[copy]
    shared = "tensor" in mesh.inner
    return Position(
        ranks=tuple((pipeline[:, devices.get_local_rank("tensor")] if shared else pipeline).tolist()),
        pipeline=devices.get_group("stages"),
        copy=copy,
        copies=mesh.data,
        data=devices.get_group("data"),
        tensor=devices["tensor"] if shared else None,
    )
