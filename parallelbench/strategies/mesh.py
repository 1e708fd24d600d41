"""Meshes of data × pipeline × tensor: the sizes that a strategy asks for, and where a rank stands in them.

Importing this loads no torch: `Mesh` is checked when a run is planned; `device_mesh` and `position_in` are for ranks.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from parallelbench.config.rule import Rules
    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World


@dataclass(frozen=True)
class Mesh:
    """The dimensions that a strategy asks for; the data dimension follows. Ranks count along the last one first."""

    devices: int
    inner: dict[str, int]
    """Option of the strategy → size of that dimension."""

    @property
    def inner_size(self) -> int:
        """Devices that hold one copy of the model together."""
        return math.prod(self.inner.values())

    @property
    def data(self) -> int:
        """Copies of the model; at least 1, also before `check`."""
        return max(1, self.devices // self.inner_size)

    def rules(self, run: RunConfig, *, least_data: int) -> Rules:
        """Dimensions of size 1, and sizes whose product doesn't divide the devices."""
        who, size = f"strategy={run.strategy.name}", self.inner_size
        for name, part in self.inner.items():
            yield part < 2, f"strategy.{name}={part} leaves {who} without that dimension", (f"strategy.{name}",)
        options = " and ".join(f"strategy.{name}={part}" for name, part in self.inner.items())
        more = f", at least {least_data * size}" if least_data > 1 else ""
        yield (
            self.devices % size or self.data < least_data,
            f"{who} with {options} needs a multiple of {size} devices{more}, not devices={self.devices}",
            ("devices", *(f"strategy.{name}" for name in self.inner)),
        )


def device_mesh(world: World, **sizes: int) -> DeviceMesh:
    """A mesh over all ranks with these dimensions; ranks count along the last one first.

    The parity check and training get the same mesh: DTensor remembers, by a mesh's shape, the groups of the first mesh
    that it saw, and would go on using them after they are destroyed.
    """
    import torch.distributed as dist

    return _new_mesh(dist.group.WORLD, world.device_type, tuple(sizes), tuple(sizes.values()))


@functools.cache
def _new_mesh(_group: object, device_type: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        _set_run_timeout(group)
    return mesh


def _set_run_timeout(group: dist.ProcessGroup) -> None:
    """Give a group the default group's timeout, which is the run's: torch gives groups of meshes half an hour."""
    import torch
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    # Newer versions of torch have a public function; NCCL's newer backend has none of the private methods.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


@dataclass(frozen=True)
class Position:
    """Where this rank is in a mesh of data × pipeline × tensor."""

    ranks: tuple[int, ...]
    """The (global) ranks of its pipeline, in order."""
    pipeline: dist.ProcessGroup | None = None
    """Connects them; None: the group of all ranks."""
    copy: int = 0
    """Index of its pipeline among the `copies`."""
    copies: int = 1
    """Pipelines side by side, which read different samples."""
    data: dist.ProcessGroup | None = None
    """Connects the copies of its stages."""
    tensor: DeviceMesh | None = None
    """The ranks that share the linear layers of its stages."""

    def copy_group(self, rank: int) -> int:
        """The number of what it holds: its place in its pipeline, and among the ranks that share its layers."""
        ways, way = (1, 0) if self.tensor is None else (self.tensor.size(), self.tensor.get_local_rank())
        return self.ranks.index(rank) * ways + way

    @property
    def owns_loss(self) -> bool:
        """Whether it owns the loss among the ranks that share its stages' linear layers."""
        return self.tensor is None or self.tensor.get_local_rank() == 0


def position_in(mesh: Mesh, world: World) -> Position:
    """This rank's position in a mesh with a dimension called stages, and perhaps one called tensor."""
    if mesh.devices == mesh.inner["stages"]:
        return Position(tuple(range(world.size)))  # one pipeline, which the group of all ranks connects
    devices = device_mesh(world, data=mesh.data, **mesh.inner)
    copy, *_ = devices.get_coordinate() or ()
    pipeline = devices.mesh[copy]
    has_tensor = "tensor" in mesh.inner
    return Position(
        ranks=tuple((pipeline[:, devices.get_local_rank("tensor")] if has_tensor else pipeline).tolist()),
        pipeline=devices.get_group("stages"),
        copy=copy,
        copies=mesh.data,
        data=devices.get_group("data"),
        tensor=devices["tensor"] if has_tensor else None,
    )
