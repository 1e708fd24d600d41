"""What the suite asks of `torch.cuda` while it trains and measures. Tests put a scripted device in its place.

Each function imports torch itself: ranks of other frameworks, on processors, get by without it.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor


def choose(device: torch.device) -> None:
    """Make it this thread's device; a thread that chooses none opens a context on the first GPU."""
    import torch

    torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    """Let the host wait until the device is idle."""
    import torch

    torch.cuda.synchronize(device)


def occupy(device: torch.device) -> None:
    """Keep the device from what is launched next for about a millisecond, while the host launches it."""
    import torch

    with torch.cuda.device(device):
        torch.cuda._sleep(_CYCLES)


_CYCLES = 2_000_000


def timing_event() -> torch.cuda.Event:
    """An event whose time can be read later."""
    import torch

    return torch.cuda.Event(enable_timing=True)


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Another stream of the device."""
    import torch

    return torch.cuda.Stream(device)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that work is launched on."""
    import torch

    return torch.cuda.current_stream(device)


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Launch on this stream within the context; None: nothing changes."""
    import torch

    return torch.cuda.stream(stream)


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Launch on a new stream within the context, after what was launched before it, and before what follows."""
    here, side = current_stream(device), new_stream(device)
    side.wait_stream(here)
    with on_stream(side):
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


def device_name(device: torch.device) -> str:
    """E.g. NVIDIA A100-SXM4-80GB."""
    import torch

    return torch.cuda.get_device_name(device)


def device_uuid(device: torch.device) -> str:
    """As NVML writes it: GPU-…"""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def reset_peaks(device: torch.device) -> None:
    """Forget earlier peaks of the allocator's memory."""
    import torch

    torch.cuda.reset_peak_memory_stats(device)


def peak_allocated_bytes(device: torch.device) -> int:
    """Most memory that tensors have held since the peaks were reset."""
    import torch

    return torch.cuda.max_memory_allocated(device)


def peak_reserved_bytes(device: torch.device) -> int:
    """Most memory that torch's allocator has held since the peaks were reset."""
    import torch

    return torch.cuda.max_memory_reserved(device)


def used_bytes(device: torch.device) -> int:
    """Memory in use on a device by all processes, by the driver's account."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return total - free


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


def rng_state(device: torch.device) -> Tensor:
    """The state of the device's random numbers."""
    import torch

    return torch.cuda.get_rng_state(device)


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Go on with that."""
    import torch

    torch.cuda.set_rng_state(state, device)


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
