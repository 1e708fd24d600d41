"""One rank of a calibration: `python -m parallelbench.rank.calibrate FILE DEVICE CONFIGURATION`, or of several.

Rank 0 writes the table. The first rank is measured alone, then all ranks of all nodes at once.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.die_with_parent import die_with_parent
from parallelbench.rank.worker import pin
from parallelbench.spec.mapping import from_mapping
from parallelbench.world.devices import others_running

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch.distributed as dist

    from parallelbench.world.world import World

Row = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Measure, and write the table on rank 0."""
    path, device_type, run = Path(arguments[0]), arguments[1], from_mapping(msgspec.json.decode(arguments[2]))
    die_with_parent()
    pin(run, device_type)
    from parallelbench.probes.environment import capture
    from parallelbench.rank.provenance import device_name
    from parallelbench.rank.torch_settings import configure_torch
    from parallelbench.store.calibration_table import write_calibration
    from parallelbench.world.world import join

    configure_torch(run, device_type)
    world = join(device_type, devices=run.devices, timeout_s=run.launcher.collective_timeout_s, nccl=run.nccl)
    world.wake()
    here = run.devices // run.nodes
    others = max(0, others_running() - here)
    rows = [*_device_rows(world, here), *_message_rows(world, here)]
    if world.rank == 0:
        facts = {
            "device_type": device_type,
            "device_name": device_name(world),
            "devices": run.devices,
            "devices_per_node": here,
            "nodes": run.nodes,
            "cores_per_device": run.cores_per_device if device_type == "cpu" else None,
            "memory_bytes": _memory_bytes(world, here),
            "others_running": others,
            "measured_at": time.time(),
            "environment": capture(),
        }
        write_calibration(path, rows, facts)
    world.barrier()
    world.leave()
    return 0


def _memory_bytes(world: World, ranks_here: int) -> int:
    """Of one device: a GPU's, or an equal part of the host's."""
    if world.device_type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(world.device).total_memory)
    import psutil

    return int(psutil.virtual_memory().total // ranks_here)


def _device_rows(world: World, ranks_here: int) -> list[Row]:
    """Work of single devices: of the first rank while all others wait, and of all ranks at once."""
    from parallelbench.probes.device_work import device_work

    alone = list(device_work(world)) if world.rank == 0 else []
    world.barrier()
    rows = [_whole(row, world, busy=1) for row in alone]
    if ranks_here > 1:
        rows += [_whole(row, world, busy=ranks_here) for row in _slowest(list(device_work(world)), world)]
    return rows


def _slowest(rows: list[Row], world: World) -> list[Row]:
    """Each row with the slowest rank's time; sizes that a rank left out are left out. A collective."""
    import torch.distributed as dist

    every: list[list[Row]] = [[] for _ in range(world.size)]
    dist.all_gather_object(every, rows)
    keyed = [{_key(row): row["time_s"] for row in each} for each in every]
    common = [row for row in rows if all(_key(row) in each for each in keyed)]
    return [row | {"time_s": max(each[_key(row)] for each in keyed)} for row in common]


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("operation", "precision", "size_bytes", "flop"))


def _whole(row: Row, world: World, *, busy: int) -> Row:
    empty = {"precision": None, "tier": None, "ranks": 1, "nodes": 1, "size_bytes": None, "flop": None}
    return empty | row | {"busy": busy}


def _message_rows(world: World, ranks_here: int) -> list[Row]:
    """Messages inside the first node, and between all devices of all nodes."""
    import torch.distributed as dist

    if world.size == 1:
        return []
    nodes = world.size // ranks_here
    groups = {"link": range(ranks_here), "network": range(world.size if nodes > 1 else 0)}
    rows: list[Row] = []
    for tier, ranks in groups.items():
        if len(ranks) > 1:
            group = dist.new_group(list(ranks))
            if world.rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                rows += _of_group(world, tier, nodes if tier == "network" else 1, group)
                rows += _of_shards(world, group) if tier == "link" else ()
            world.barrier()
    return rows


def _of_group(world: World, tier: str, nodes: int, group: dist.ProcessGroup) -> Iterator[Row]:
    """Between nodes each device of the first sends to one of the second: together they show a node's bandwidth."""
    from parallelbench.probes.link_bandwidth import OPERATIONS, SIZES_BYTES, collectives

    here = group.size() // nodes
    apart = 1 if nodes == 1 else here
    for operation in OPERATIONS:
        for each in collectives(operation, world.device, sizes_bytes=SIZES_BYTES, group=group, apart=apart):
            row = {"operation": operation, "tier": tier, "ranks": each.ranks, "nodes": nodes}
            yield _whole(row | {"size_bytes": each.size_bytes, "time_s": each.time_s}, world, busy=here)


def _of_shards(world: World, group: dist.ProcessGroup) -> Iterator[Row]:
    """Layers that the devices of a node share."""
    from parallelbench.probes.sharded_work import sharded_layers

    for each in sharded_layers(world.device, group):
        row = {"operation": "shard", "tier": "link", "ranks": group.size(), "precision": "fp32"}
        yield _whole(row | {"size_bytes": each.size_bytes, "time_s": each.time_s}, world, busy=group.size())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
