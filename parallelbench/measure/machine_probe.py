"""How fast a rank's own devices are, by two fixed pieces of work: the last line of defence against unlike machines."""

from __future__ import annotations

import functools
import math
import os
import time
from dataclasses import replace
from itertools import cycle, islice, pairwise
from statistics import median
from typing import TYPE_CHECKING, Literal

import torch

from parallelbench.measure.memory import release
from parallelbench.world import cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from parallelbench.world.world import World


Moment = Literal["start", "end"]

PIECE_S = 0.06
"""How long each of the two pieces of work is repeated."""
MOST_RANKS = 8
"""Ranks of a node that are measured, since they are measured one after the other."""
_SIDES = {"cpu": 256, "cuda": 4096}
"""Rows and columns of the matrices. On a GPU they are fp16: that speed depends on no setting of TF32. On a CPU they are
for a device of one core; with more cores a product is longer, or handing it out to them would be most of its time."""
_LARGEST_SIDE = 2048
_COPIED_BYTES = {"cpu": 2 * 2**20, "cuda": 256 * 2**20}
"""On a CPU both pieces of work take less than a scheduler's slice: on a busy core some of them are not interrupted."""
_PLACES = {"cpu": 32, "cuda": 1}
"""How many such pieces of memory are copied in turn, so that caches don't hold them."""
_MOST_QUEUED = 32
"""Pieces that a GPU is given at once; with so many of the probe's it is kept waiting for a sixth of the time."""


def probe(world: World, moment: Moment) -> dict[str, float | None]:
    """Columns of the `run` table, equal on every rank; a collective.

    Ranks of a node are measured in turn: together they would share the memory's bandwidth and the cores' clocks, and
    a run on two devices would seem to have a slower machine than a run on one.
    """
    speeds = torch.zeros(world.size, 2, dtype=torch.float64)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", str(world.size)))
    for local_rank in range(min(ranks_here, MOST_RANKS)):
        if local_rank == world.local_rank:
            of_each = zip(*(_measured(world, device) for device in world.devices), strict=True)
            speeds[world.rank] = torch.tensor([_slowest(each) or 0.0 for each in of_each], dtype=torch.float64)
        world.barrier()
    world.sum(speeds)
    slowest = [_slowest(column) for column in speeds.T.tolist()]
    names = ("matmul_flop_per_s", "memory_bytes_per_s")
    return {f"probed_{moment}_{name}": speed for name, speed in zip(names, slowest, strict=True)}


def _slowest(speeds: Iterable[float]) -> float | None:
    """Of those that were measured; None: none was."""
    return min((speed for speed in speeds if speed > 0), default=None)


def _measured(world: World, device: torch.device) -> tuple[float, float]:
    """Floating-point operations per second of a matrix product, and bytes per second that copying reads and writes.

    Both are 0 where the device has no memory left for it.
    """
    side, size, alone = _side(world.device_type), _COPIED_BYTES[world.device_type], replace(world, devices=(device,))
    dtype = torch.float16 if world.device_type == "cuda" else torch.float32
    # Not the training's random numbers. Ones would switch fewer bits, so a GPU would hold clocks that no training has.
    values = torch.Generator(device).manual_seed(0)
    try:
        with torch.no_grad():
            one, other, product = (
                torch.randn(side, side, dtype=dtype, device=device, generator=values) for _ in range(3)
            )
            product_s = fastest_s([lambda: torch.mm(one, other, out=product)], alone)
            shape = (_PLACES[world.device_type], size)
            source, copy = (torch.ones(shape, dtype=torch.uint8, device=device) for _ in range(2))
            copies = [functools.partial(into.copy_, out_of) for into, out_of in zip(copy, source, strict=True)]
            copy_s = median(times_s(copies, alone))  # the fastest one found more of its memory in a cache
    except torch.OutOfMemoryError:
        return 0.0, 0.0
    finally:
        one = other = product = source = copy = copies = None  # type: ignore[assignment]
        release()
    return 2 * side**3 / product_s, 2 * size / copy_s


def _side(device_type: str) -> int:
    """Rows and columns for a device of this kind, with the threads that this process has."""
    grown = 1.0 if device_type == "cuda" else math.sqrt(torch.get_num_threads())
    return min(_LARGEST_SIDE, 16 * round(_SIDES[device_type] * grown / 16)) if grown > 1 else _SIDES[device_type]


def fastest_s(pieces: Sequence[Callable[[], object]], world: World) -> float:
    """The shortest time of a piece of work, s: an interruption lengthens only some of them."""
    return min(times_s(pieces, world))


def times_s(pieces: Sequence[Callable[[], object]], world: World) -> list[float]:
    """How long each piece of work took the world's one device, in turn for `PIECE_S`, s; at least one is measured.

    On a GPU a piece's time is the device's own: short ones take less than launching them and waiting for them.
    """
    for piece in pieces:  # the first time loads libraries and touches the memory
        piece()
    world.synchronize()
    found, waiting, queued = list[float](), cycle(pieces), 1
    end = time.perf_counter() + PIECE_S
    while not found or time.perf_counter() <= end:
        if world.device_type == "cuda":
            found += _queued_s(islice(waiting, queued), world.device)
            queued = min(2 * queued, _MOST_QUEUED)  # long pieces are measured a few times only
        else:
            start = time.perf_counter()
            next(waiting)()
            found.append(time.perf_counter() - start)
    return found


def _queued_s(pieces: Iterable[Callable[[], object]], device: torch.device) -> list[float]:
    """Seconds of each piece, between events of the device, which is kept busy until the first ones are launched.

    They follow each other as in training: after each pause a GPU would have higher clocks.
    """
    stream = torch.cuda.current_stream(device)
    cuda.occupy(device)
    edges = [torch.cuda.Event(enable_timing=True)]
    edges[0].record(stream)
    for piece in pieces:
        piece()
        edges.append(torch.cuda.Event(enable_timing=True))
        edges[-1].record(stream)
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1000.0 for before, after in pairwise(edges)]
