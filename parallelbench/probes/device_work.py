"""Pieces of work of one device by size and precision: products, copies, attention, launches."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import torch

from parallelbench.probes.machine_probe import fastest_s
from parallelbench.probes.memory_probe import release

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

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
