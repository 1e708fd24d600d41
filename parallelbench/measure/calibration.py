"""Pieces of work of one device by size, precision and shape: products, copies, all other kernels, launches."""

from __future__ import annotations

import functools
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from parallelbench.config.build import from_mapping
from parallelbench.measure.bandwidth import OPERATIONS, collectives
from parallelbench.measure.environment import capture
from parallelbench.measure.layer_records import ELEMENTWISE, IMAGES
from parallelbench.measure.machine_probe import fastest_s
from parallelbench.measure.memory import release
from parallelbench.processes import die_with_parent
from parallelbench.results.calibration import BACKWARD, write_calibration
from parallelbench.world.affinity import pin
from parallelbench.world.machine import device_name, host_memory_bytes, others_running
from parallelbench.world.numerics import set_precision
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
KERNELS = {"cpu": ("fp32",), "cuda": ("fp32", "bf16")}
"""Precisions of convolutions and attention; what they take in others follows from these."""
COPIED_BYTES = {"cpu": tuple(4**k * 2**14 for k in range(7)), "cuda": tuple(4**k * 2**20 for k in range(6))}
"""16 KiB to 64 MiB; 1 MiB to 1 GiB."""
SEQUENCES = {"cpu": (16, 64, 256), "cuda": (64, 256, 1024, 4096)}
HEADS, HEAD_WIDTH = 8, 64
TOKENS = {"cpu": 256, "cuda": 65536}
"""Measured at once, at least, in several samples."""
CONVOLUTIONS = {
    IMAGES: ((1, 32, 1), (3, 64, 1)),
    "convolution": ((16, 16, 1), (64, 64, 1), (128, 128, 1)),
    "grouped": ((32, 32, 32), (64, 128, 64), (64, 64, 16)),
}
"""Channels in, channels out, groups, of 3×3 kernels. Images need no gradient."""
SHAPES = {"cpu": (16, 14), "cuda": (64, 56)}
"""How many samples, and their side; images' is twice as long."""
GIVEN_BYTES = {"cpu": (2**20, 2**22, 2**24, 2**26), "cuda": (2**25, 2**28)}
"""Taken by elementwise operations; the first of them by others that write. On GPUs none is as short as a launch."""
FREED_BYTES = 2**25 - 2**14
"""C's library hands blocks back to the system unless it has freed one that is as large, up to this; after its first
step a training has, and finds its memory mapped.
"""
WIDTH = 256
"""Of the rows that are normalised, and channels."""
LONG_S = 0.25
"""Larger sizes of a kind are left out once one piece takes longer than this."""
UNALIGNED = 4095
"""Side of a product that tensor cores can't take at full speed."""
LAUNCHES = 2000


def device_work(world: World) -> Iterator[Row]:
    """Rows of the calibration without ranks, nodes and busy; sizes that don't fit into memory are left out."""
    torch.ones(FREED_BYTES, dtype=torch.uint8)
    kind = world.device_type
    with torch.no_grad():
        for precision, dtype in DTYPES[kind].items():
            product = functools.partial(_product, precision=precision, dtype=dtype)
            yield from _growing(SIDES[kind], product, world)
            if kind == "cuda":
                yield from _growing((UNALIGNED,), functools.partial(product, operation="unaligned"), world)
        yield from _growing(COPIED_BYTES[kind], _copy, world)
    yield from _of_host(world)
    for precision in KERNELS[kind]:
        set_precision(precision)
        for convolution, each in CONVOLUTIONS.items():
            for channels in each:
                yield from _convolution(convolution, *channels, world, precision=precision)
        yield from _growing(SEQUENCES[kind], functools.partial(_attention, precision=precision), world)
    yield from _growing(GIVEN_BYTES[kind], functools.partial(_writing, kind=ELEMENTWISE), world)
    for written in [each for each in WRITING if each != ELEMENTWISE]:
        yield from _writing(GIVEN_BYTES[kind][0], world, kind=written)


def _growing(sizes: Sequence[int], measure: Callable[[int, World], list[Row]], world: World) -> Iterator[Row]:
    for size in sizes:
        try:
            rows = measure(size, world)
        except torch.OutOfMemoryError:
            return
        finally:
            release()
        yield from rows
        if rows[0]["time_s"] > LONG_S:
            return


def _product(side: int, world: World, *, precision: str, dtype: torch.dtype, operation: str = "matmul") -> list[Row]:
    # Not of ones: they would switch fewer bits, so a GPU would hold clocks that no training has.
    one, other, product = (torch.randn(side, side, dtype=dtype, device=world.device) for _ in range(3))
    set_precision(precision)
    time_s = fastest_s([lambda: torch.mm(one, other, out=product)], world)
    return [{"operation": operation, "precision": precision, "flop": 2.0 * side**3, "time_s": time_s}]


def _copy(size_bytes: int, world: World) -> list[Row]:
    source, copy = (torch.ones(size_bytes, dtype=torch.uint8, device=world.device) for _ in range(2))
    return [{"operation": "copy", "size_bytes": size_bytes, "time_s": fastest_s([lambda: copy.copy_(source)], world)}]


def _convolution(kind: str, inputs: int, outputs: int, groups: int, world: World, *, precision: str) -> list[Row]:
    count, side = SHAPES[world.device_type]
    side *= 2 if kind == IMAGES else 1
    where: dict[str, Any] = {"device": world.device, "dtype": DTYPES[world.device_type][precision]}
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, groups=groups, bias=False, **where)
    values = torch.randn(count, inputs, side, side, requires_grad=kind != IMAGES, **where)
    sizes = {"flop": 2.0 * count * side**2 * layer.weight.numel(), "size_bytes": 4 * layer.weight.numel() // groups}
    return _both_ways(kind, lambda given, _: layer(given), (values, layer.weight), world, precision=precision, **sizes)


WRITING: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    ELEMENTWISE: torch.relu,
    "gelu": nn.functional.gelu,
    "layer_norm": lambda values: nn.functional.layer_norm(values, values.shape[-1:]),
    "batch_norm": lambda values: nn.functional.batch_norm(values, None, None, training=True),
    "max_pool": lambda values: nn.functional.max_pool2d(values, 2),
}
"""Kinds of operations whose work is what they write, on images of `WIDTH` channels and as wide."""


def _writing(given_bytes: int, world: World, *, kind: str) -> list[Row]:
    side = 2 if kind == "max_pool" else 1
    # Random, since a processor's maximum takes three times as long where it can't guess what comes.
    shape = (given_bytes // (4 * WIDTH * side * WIDTH), WIDTH, side, WIDTH)
    values = torch.randn(shape, device=world.device, requires_grad=True)
    written = 4 * WRITING[kind](values).numel()
    return _both_ways(kind, WRITING[kind], (values,), world, size_bytes=written)


def _attention(sequence: int, world: World, *, precision: str) -> list[Row]:
    """Samples with 8 heads 64 wide: 4·heads·s²·width operations forward of each."""
    dtype = DTYPES[world.device_type][precision]
    count = max(1, TOKENS[world.device_type] // sequence)
    shape = (count, HEADS, sequence, HEAD_WIDTH)
    given = tuple(torch.randn(shape, dtype=dtype, device=world.device, requires_grad=True) for _ in range(3))
    flop = 4.0 * count * HEADS * sequence**2 * HEAD_WIDTH
    sizes = {"precision": precision, "flop": flop, "size_bytes": 4 * sequence * HEAD_WIDTH}
    return _both_ways("attention", nn.functional.scaled_dot_product_attention, given, world, **sizes)


def _both_ways(
    kind: str,
    function: Callable[..., torch.Tensor],
    given: tuple[torch.Tensor, ...],
    world: World,
    **sizes: Any,
) -> list[Row]:
    """Forward, and backward for all that needs a gradient."""
    forward_s = fastest_s([lambda: function(*given)], world)
    output, wanted = function(*given), [each for each in given if each.requires_grad]
    gradient = torch.randn_like(output)
    backward_s = fastest_s([lambda: torch.autograd.grad(output, wanted, gradient, retain_graph=True)], world)
    return [
        {"operation": kind, "time_s": forward_s, **sizes},
        {"operation": kind + BACKWARD, "time_s": backward_s, **sizes},
    ]


def _of_host(world: World) -> Iterator[Row]:
    """What the host takes for one operation and, beside GPUs, for a step that has none.

    Of GPUs an operation of training: a third of the time per operation of forward, of two small stacks' forward and
    backward passes, with all that Python, autograd and views add. Plain additions take a third of it (an H200's host).
    """
    if world.device_type == "cpu":
        with torch.no_grad():
            yield {"operation": "launch", "time_s": launch_s(world)}
        return
    set_precision("fp32")
    samples = torch.randn(STACKED, WIDTH, device=world.device)
    images = samples.view(STACKED, -1, 8, 8)
    channels = images.shape[1]

    def perceptron() -> list[nn.Module]:
        return [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()]

    def convolution() -> list[nn.Module]:
        return [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]

    times_s = []
    for block, given in ((perceptron, samples), (convolution, images)):
        layers = [layer for _ in range(DEEP) for layer in block()]
        stack = nn.Sequential(*layers).to(world.device)
        times_s.append(_step_s(stack, given, world) / (3 * len(layers)))
    yield {"operation": "launch", "time_s": launch_s(world)}
    operation_s = statistics.geometric_mean(times_s)
    yield {"operation": "train_launch", "time_s": operation_s}
    alone = nn.Linear(WIDTH, 16, device=world.device)
    update = torch.optim.Adam(alone.parameters(), fused=True)
    labels = torch.zeros(STACKED, dtype=torch.long, device=world.device)
    whole_s = _step_s(alone, samples, world, labels=labels, update=update)
    yield {"operation": "step", "time_s": max(0.0, whole_s - 3 * operation_s)}


STACKED, DEEP = 16, 8
"""Samples, and blocks of the stacks by which the host is measured: too small to keep a GPU busy."""


def _step_s(
    stack: nn.Module,
    given: torch.Tensor,
    world: World,
    *,
    labels: torch.Tensor | None = None,
    update: torch.optim.Optimizer | None = None,
) -> float:
    """Seconds of a step of training, on average; of the fastest of some series."""
    fastest = float("inf")
    for _ in range(WARM_UP + ROUNDS):
        world.synchronize()
        start = time.perf_counter()
        for _ in range(DEEP):
            output = stack(given)
            (output.sum() if labels is None else nn.functional.cross_entropy(output, labels)).backward()
            if update is None:
                stack.zero_grad(set_to_none=True)
            else:
                update.step()
                update.zero_grad(set_to_none=True)
        world.synchronize()
        fastest = min(fastest, (time.perf_counter() - start) / DEEP)
    return fastest


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
        torch.cuda.synchronize(sample.device)
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
            **_of_device(world, here),
            "others_running": others,
            "measured_at": time.time(),
            "environment": capture(),
        }
        write_calibration(path, rows, facts)
    world.barrier()
    world.leave()
    return 0


def _of_device(world: World, ranks_here: int) -> dict[str, int | None]:
    """Memory of one device, a GPU's or an equal part of the host's; and a GPU's multiprocessors."""
    if world.device_type == "cpu":
        return {"memory_bytes": host_memory_bytes() // ranks_here, "multiprocessors": None}
    gpu = torch.cuda.get_device_properties(world.device)
    return {"memory_bytes": gpu.total_memory, "multiprocessors": gpu.multi_processor_count}


def _device_rows(world: World, ranks_here: int) -> list[Row]:
    """Work of single devices, while all others do the same."""
    return [_whole(row, busy=ranks_here) for row in _slowest(list(device_work(world)), world)]


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
        for each in collectives(operation, world.device, group=group, apart=apart):
            row = {"operation": operation, "tier": tier, "ranks": each.ranks, "nodes": nodes}
            yield _whole(row | {"size_bytes": each.size_bytes, "time_s": each.time_s}, busy=here)


def _of_shards(world: World, group: dist.ProcessGroup) -> Iterator[Row]:
    """Layers that the devices of a node share."""
    row = {"operation": "shard", "tier": "link", "ranks": group.size(), "precision": "fp32"}
    for size_bytes, time_s in sharded_layers(world.device, group):
        yield _whole(row | {"size_bytes": size_bytes, "time_s": time_s}, busy=group.size())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
