"""What the suite asks of GPUs beyond single functions of `torch.cuda`.

Each function imports torch itself: ranks of other frameworks, on processors, get by without it.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


def occupy(device: torch.device) -> None:
    """Keep the device from what is launched next for about a millisecond, while the host launches it."""
    import torch

    with torch.cuda.device(device):
        torch.cuda._sleep(_CYCLES)


_CYCLES = 2_000_000


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Launch on a new stream within the context, after what was launched before it, and before what follows."""
    import torch

    here, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield
    here.wait_stream(side)


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Within the context torch raises where the host would wait for a device, in each of this process's threads."""
    import torch

    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def release() -> None:
    """Return unused memory to the devices, if any was used."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def seed(seed: int, device: torch.device) -> None:
    """Begin the device's random numbers anew, from this seed."""
    import torch

    with torch.cuda.device(device):
        torch.cuda.manual_seed(seed)


def capture(work: Callable[[], None], device: torch.device, *, warm_up: Callable[[], None]) -> Callable[[], None]:
    """Record what `work` launches as one CUDA graph, without executing it; returns the function that does.

    `warm_up` runs first, on a stream of its own, as torch asks for: https://pytorch.org/docs/stable/notes/cuda.html
    """
    import torch

    with aside(device):
        warm_up()
    graph = torch.cuda.CUDAGraph()
    # A loader's thread may allocate pinned memory meanwhile, which else would end the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    replay: Callable[[], None] = graph.replay
    return replay
