"""Pieces of work of one device by size and precision: products, copies, attention, launches."""

from __future__ import annotations

import functools
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from parallelbench.config.build import from_mapping
from parallelbench.measure.bandwidth import OPERATIONS, SIZES_BYTES, collectives
from parallelbench.measure.environment import capture
from parallelbench.measure.machine_probe import fastest_s
from parallelbench.measure.memory import release
from parallelbench.processes import die_with_parent
from parallelbench.results.calibration import write_calibration
from parallelbench.world import cuda
from parallelbench.world.machine import device_name, others_running, pin
from parallelbench.world.settings import configure_torch
from parallelbench.world.world import join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from parallelbench.world.world import World


Row = dict[str, Any]
SIDES = {"cpu": (16, 32, 64, 128, 256, 512, 1024), "cuda": (64, 256, 512, 1024, 2048, 4096, 8192)}
"""Rows and columns of the matrices."""
DTYPES = {
    "cpu": {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16},
    "cuda": {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16},
}
COPIED_BYTES = {"cpu": tuple(4**k * 2**14 for k in range(7)), "cuda": tuple(4**k * 2**20 for k in range(6))}
"""16 KiB to 64 MiB; 1 MiB to 1 GiB."""
SEQUENCES = {"cpu": (64, 256, 1024), "cuda": (256, 1024, 4096)}
HEADS, HEAD_WIDTH = 8, 64
LONG_S = 0.25
"""Larger sizes of a kind are left out once one piece takes longer than this."""
LAUNCHES = 2000


def device_work(world: World) -> Iterator[Row]:
    """Rows of the calibration without ranks, nodes and busy; sizes that don't fit into memory are left out."""
    with torch.no_grad():
        for precision, dtype in DTYPES[world.device_type].items():
            yield from _growing(SIDES, functools.partial(_product, precision=precision, dtype=dtype), world)
        yield from _growing(COPIED_BYTES, _copy, world)
        yield from _growing(SEQUENCES, _attention, world)
        yield {"operation": "launch", "time_s": launch_s(world)}


def _growing(sizes: Mapping[str, tuple[int, ...]], measure: Callable[[int, World], Row], world: World) -> Iterator[Row]:
    for size in sizes[world.device_type]:
        try:
            row = measure(size, world)
        except torch.OutOfMemoryError:
            return
        finally:
            release()
        yield row
        if row["time_s"] > LONG_S:
            return


def _product(side: int, world: World, *, precision: str, dtype: torch.dtype) -> Row:
    one, other, product = (torch.ones(side, side, dtype=dtype, device=world.device) for _ in range(3))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        time_s = fastest_s([lambda: torch.mm(one, other, out=product)], world)
    finally:
        torch.set_float32_matmul_precision(before)
    return {"operation": "matmul", "precision": precision, "flop": 2.0 * side**3, "time_s": time_s}


def _copy(size_bytes: int, world: World) -> Row:
    source, copy = (torch.ones(size_bytes, dtype=torch.uint8, device=world.device) for _ in range(2))
    return {"operation": "copy", "size_bytes": size_bytes, "time_s": fastest_s([lambda: copy.copy_(source)], world)}


def _attention(sequence: int, world: World) -> Row:
    """Forward, of one sample with 8 heads 64 wide: 4·heads·s²·width operations."""
    precision = "fp32" if world.device_type == "cpu" else "bf16"
    dtype = DTYPES[world.device_type][precision]
    shape = (1, HEADS, sequence, HEAD_WIDTH)
    query, key, value = (torch.ones(shape, dtype=dtype, device=world.device) for _ in range(3))
    time_s = fastest_s([lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value)], world)
    flop = 4.0 * HEADS * sequence**2 * HEAD_WIDTH
    return {"operation": "attention", "precision": precision, "flop": flop, "time_s": time_s}


def launch_s(world: World) -> float:
    """The host's time for one small operation: the fastest of some series, without waiting for the device."""
    one, other = (torch.ones(16, device=world.device) for _ in range(2))
    fastest = float("inf")
    for _ in range(5):
        world.synchronize()
        start = time.perf_counter()
        for _ in range(LAUNCHES // 5):
            torch.add(one, other)
        fastest = min(fastest, (time.perf_counter() - start) / (LAUNCHES // 5))
    world.synchronize()
    return fastest


WIDTHS = {"cpu": (16, 64, 256, 1024, 2048), "cuda": (256, 1024, 4096, 8192)}
"""Of square linear layers in fp32: parameters of 1 KiB to 16 MiB; of 256 KiB to 256 MiB."""
LAYERS, SAMPLES = 4, 16
"""A step waits for the first layer's parameters; a stack shows what each further one costs, too."""
ROUNDS, WARM_UP = 10, 3


def sharded_layers(device: torch.device, group: dist.ProcessGroup) -> Iterator[tuple[int, float]]:
    """Measure stacks of growing layers, sharded over a group; a collective, equal on every rank of the group.

    Yields the bytes of a layer's whole parameters, and what its forward and backward take longer than a whole one's on
    the slowest rank, s: the median. Sizes at which sharding is too cheap to be told from nothing are left out.
    """
    mesh = DeviceMesh.from_group(group, device.type)
    for width in WIDTHS[device.type]:
        whole, sharded = _stack(width, device), _stack(width, device)
        for module in (*sharded, sharded):
            fully_shard(module, mesh=mesh)
        sample = torch.ones(SAMPLES, width, device=device)
        rounds = [[_pass_s(stack, sample, group) for stack in (whole, sharded)] for _ in range(WARM_UP + ROUNDS)]
        times = torch.tensor(rounds[WARM_UP:], dtype=torch.float64)
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
        whole_s, sharded_s = (statistics.median(column) for column in times.T.tolist())
        time_s = (sharded_s - whole_s) / LAYERS
        if time_s > 0:
            yield 4 * width**2, time_s
        if time_s > LONG_S:
            return


def _stack(width: int, device: torch.device) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(LAYERS)))


def _pass_s(stack: nn.Module, sample: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Seconds of one forward and backward pass."""
    dist.all_reduce(torch.zeros(1), group=group)  # a barrier on the host
    began_s = time.perf_counter()
    stack(sample).sum().backward()
    if sample.is_cuda:
        cuda.synchronize(sample.device)
    taken_s = time.perf_counter() - began_s
    stack.zero_grad(set_to_none=True)
    return taken_s


def main(arguments: Sequence[str]) -> int:
    """Measure, and write the table on rank 0."""
    path, device_type, run = Path(arguments[0]), arguments[1], from_mapping(msgspec.json.decode(arguments[2]))
    die_with_parent()
    pin(run, device_type)
    configure_torch(run, device_type)
    world = join(device_type, devices=run.devices, timeout_s=run.launcher.collective_timeout_s, nccl=run.nccl)
    world.wake()
    here = run.devices // run.nodes
    world.barrier()  # so that all ranks sleep while each counts, and every process that runs is another's
    others = others_running()
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
        return int(torch.cuda.get_device_properties(world.device).total_memory)
    return int(psutil.virtual_memory().total // ranks_here)


def _device_rows(world: World, ranks_here: int) -> list[Row]:
    """Work of single devices: of the first rank while all others wait, and of all ranks at once."""
    alone = list(device_work(world)) if world.rank == 0 else []
    world.barrier()
    rows = [_whole(row, busy=1) for row in alone]
    if ranks_here > 1:
        rows += [_whole(row, busy=ranks_here) for row in _slowest(list(device_work(world)), world)]
    return rows


def _slowest(rows: list[Row], world: World) -> list[Row]:
    """Each row with the slowest rank's time; sizes that a rank left out are left out. A collective."""
    keyed = [{_key(row): row["time_s"] for row in each} for each in world.gather(rows)]
    common = [row for row in rows if all(_key(row) in each for each in keyed)]
    return [row | {"time_s": max(each[_key(row)] for each in keyed)} for row in common]


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("operation", "precision", "size_bytes", "flop"))


def _whole(row: Row, *, busy: int) -> Row:
    empty = {"precision": None, "tier": None, "ranks": 1, "nodes": 1, "size_bytes": None, "flop": None}
    return empty | row | {"busy": busy}


def _message_rows(world: World, ranks_here: int) -> list[Row]:
    """Messages inside the first node, and between all devices of all nodes."""
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
    here = group.size() // nodes
    apart = 1 if nodes == 1 else here
    for operation in OPERATIONS:
        for each in collectives(operation, world.device, sizes_bytes=SIZES_BYTES, group=group, apart=apart):
            row = {"operation": operation, "tier": tier, "ranks": each.ranks, "nodes": nodes}
            yield _whole(row | {"size_bytes": each.size_bytes, "time_s": each.time_s}, busy=here)


def _of_shards(world: World, group: dist.ProcessGroup) -> Iterator[Row]:
    """Layers that the devices of a node share."""
    row = {"operation": "shard", "tier": "link", "ranks": group.size(), "precision": "fp32"}
    for size_bytes, time_s in sharded_layers(world.device, group):
        yield _whole(row | {"size_bytes": size_bytes, "time_s": time_s}, busy=group.size())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
