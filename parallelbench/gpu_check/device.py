"""Clocks, memory, arithmetic and speeds of one device. On a CPU the same holds, where it means something there."""

from __future__ import annotations

import math
import time
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn import functional as F

from parallelbench.config.components import Batch
from parallelbench.gpu_check.results import FailedError, SkippedError, at_most, between
from parallelbench.gpu_check.training import group_of_one
from parallelbench.measure.bandwidth import collectives
from parallelbench.measure.calibration import device_work, sharded_layers
from parallelbench.measure.clock import StepClock, TimedWindow
from parallelbench.measure.machine_probe import probe, times_s
from parallelbench.measure.memory import MemoryProbe, release
from parallelbench.world.numerics import set_precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from parallelbench.measure.bandwidth import Operation
    from parallelbench.world.world import World

BLOCK_BYTES = 256 * 2**20
"""A multiple of what torch's allocator and the driver hand out memory in."""
_STEPS = 50
_TF32_SINCE = (8, 0)
"""The compute capability that has TF32 (Ampere's)."""
_EXACT, _ROUNDED = 2e-5, 5e-5
"""Relative errors of products over 1,024 terms: fp32's 24 significant bits make less, TF32's 11 make more."""


def work_for(world: World, *, size: int | None = None) -> Callable[[], Tensor]:
    """A matrix product that keeps the device busy for some milliseconds."""
    length = size or (4096 if world.device_type == "cuda" else 512)
    matrix = torch.randn(length, length, device=world.device)
    return lambda: matrix @ matrix


def clocks(world: World) -> str:
    """The steps' durations, by events on CUDA, add up to the whole window's time by a stopwatch."""
    work = work_for(world)
    work()
    clock, window = StepClock(world, steps=_STEPS, sampled=_STEPS), TimedWindow(world)
    with window:
        for _ in clock.timed(Batch(None, None, 0) for _ in range(_STEPS)):
            work()
    durations = [seconds for _, seconds in clock.durations()]
    if len(durations) != _STEPS or min(durations) <= 0:
        raise FailedError(f"{len(durations)} durations of {_STEPS} steps, the shortest {min(durations, default=0)} s")
    return between("sum of the steps ÷ stopwatch", sum(durations) / window.length_s, 0.95, 1.02)


_PIECES = 20
_COLLECTIVES: tuple[Operation, ...] = ("all_reduce", "all_gather", "all_to_all")
_MESSAGE_BYTES = (2**10, 2**24)


def calibration(world: World) -> str:
    """The device's own time of a piece of work is that of a stopwatch; what `calibrate` and the probe find is a number.

    Messages and shards are those of one rank, which shows that they are timed, and not how fast they are.
    """
    work = work_for(world)
    of_device_s = median(times_s([work], world))
    start = time.perf_counter()
    for _ in range(_PIECES):
        work()
    world.synchronize()
    stopwatch_s = (time.perf_counter() - start) / _PIECES
    # Clocks may have changed between the two; a wrong stream or a launch that counts would show by more.
    ratio = between("a product by the device's clock ÷ stopwatch", of_device_s / stopwatch_s, 0.8, 1.25)
    rows = list(device_work(world))
    with group_of_one(world):
        messages = [
            found
            for operation in _COLLECTIVES
            for found in collectives(operation, world.device, sizes_bytes=_MESSAGE_BYTES, rounds=3)
        ]
        assert dist.group.WORLD is not None
        shards = list(sharded_layers(world.device, dist.group.WORLD))
    times = {(row["operation"], row.get("precision"), row.get("size_bytes")): row["time_s"] for row in rows}
    # The rest of a step, and of a shard, is a difference of two times; a message to oneself may take none.
    wrong = [key for key, time_s in times.items() if not (0 < time_s < math.inf) and key[0] != "step"]
    wrong += [(each.operation, None, each.size_bytes) for each in messages if not (0 <= each.time_s < math.inf)]
    if wrong:
        raise FailedError(f"no time of {wrong}")
    probed = probe(world, "start")
    if None in probed.values():
        raise FailedError(f"the probe found {probed}")
    fastest = {row["precision"]: row["flop"] / row["time_s"] for row in rows if row["operation"] == "matmul"}
    products = ", ".join(f"{precision} {speed / 1e12:.3g}" for precision, speed in fastest.items())
    host = ", ".join(f"{row['operation']} {row['time_s'] * 1e6:.3g}" for row in rows if "launch" in row["operation"])
    found = f"probe: {', '.join(f'{value:.3g}' for value in probed.values())}"
    return f"{ratio}; TFLOP/s: {products}; µs: {host}; {found}; {len(rows) + len(messages) + len(shards)} rows"


def device_memory(world: World) -> str:
    """A tensor of known size raises the allocator's peaks, and the driver's memory in use, by its size."""
    if world.device_type != "cuda":
        raise SkippedError("a CPU has no memory of its own")
    release()
    before, (free_before, _) = torch.cuda.memory_allocated(world.device), torch.cuda.mem_get_info(world.device)
    probe = MemoryProbe(world)
    probe.start()
    block = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=world.device)
    free_with, _ = torch.cuda.mem_get_info(world.device)
    del block
    peaks = probe.stop()
    peak, reserved, used = (peaks[f"{name}_bytes"] for name in ("peak_allocated", "peak_reserved", "device_used"))
    assert peak is not None
    assert reserved is not None
    if peak - before != BLOCK_BYTES:
        raise FailedError(f"a tensor of {BLOCK_BYTES} bytes raised the peak of allocated memory by {peak - before}")
    if reserved < peak:
        raise FailedError(f"{reserved} bytes reserved, fewer than the {peak} allocated")
    if used is None or used < reserved:
        raise FailedError(f"{used} bytes of the device used, fewer than the {reserved} that torch alone reserves")
    if free_before - free_with < BLOCK_BYTES:
        raise FailedError(
            f"a tensor of {BLOCK_BYTES} bytes took {free_before - free_with} bytes of the device's memory"
        )
    return f"a tensor of {BLOCK_BYTES} bytes raised the peak by as much; {used / 2**30:.2f} GiB of the device in use"


def arithmetic(world: World) -> str:
    """fp32 is fp32 in matrix products and convolutions; tf32, where the device has it, is TF32."""
    errors = {precision: _errors(world, precision) for precision in ("fp32", "tf32")}
    set_precision("fp32")
    texts = [at_most(f"error of a {what} in fp32", error, _EXACT) for what, error in errors["fp32"].items()]
    if world.device_type != "cuda" or torch.cuda.get_device_capability(world.device) < _TF32_SINCE:
        return ", ".join([*texts, "this device has no TF32"])
    for what, error in errors["tf32"].items():
        if error < _ROUNDED:
            raise FailedError(f"error of a {what} in tf32 {error:.3g}, so small that it was not computed in TF32")
    return ", ".join([*texts, *(f"of a {what} in tf32 {error:.2g}" for what, error in errors["tf32"].items())])


def _errors(world: World, precision: str) -> dict[str, float]:
    """Largest |difference| from fp64 ÷ largest |value|."""
    set_precision(precision)
    made = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1024, 1024, generator=made).to(world.device) for _ in range(2))
    images = torch.randn(16, 128, 16, 16, generator=made).to(world.device)
    kernels = torch.randn(128, 128, 3, 3, generator=made).to(world.device)
    pairs = {
        "matrix product": (a @ b, a.double() @ b.double()),
        "convolution": (F.conv2d(images, kernels), F.conv2d(images.double(), kernels.double())),
    }
    return {
        what: ((computed.double() - exact).abs().max() / exact.abs().max()).item()
        for what, (computed, exact) in pairs.items()
    }
