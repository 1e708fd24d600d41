"""A GPU that does what a test says, in the place of `torch.cuda` and `world.cuda`: a clock, streams, memory, a graph.

Tensors stay on the CPU. A test that uses it sees the suite's CUDA branches at work: `World(device_type="cuda")`.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from parallelbench.world import cuda
from parallelbench.world.world import World

CPU = torch.device("cpu")
WORLD = World(device_type="cuda", devices=(CPU,))


class Event:
    """Records when the work that is launched so far ends."""

    def __init__(self, device: ScriptedCuda) -> None:
        self._device, self._at_s = device, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._at_s = (stream or self._device.here).ends_s

    def query(self) -> bool:
        return self._at_s <= self._device.now_s

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds, as torch's."""
        return 1000 * (other._at_s - self._at_s)


class Stream:
    """Notes what it is asked, and does one piece of work after the other, while the host goes on."""

    def __init__(self, device: ScriptedCuda, name: str) -> None:
        self._device, self.name, self._busy_until_s = device, name, 0.0

    @property
    def ends_s(self) -> float:
        """When all its work is done."""
        return max(self._busy_until_s, self._device.now_s)

    def launch(self, took_s: float) -> None:
        self._busy_until_s = self.ends_s + took_s

    def synchronize(self) -> None:
        self._device.calls.append(f"{self.name}: synchronize")
        self._device.now_s = self.ends_s

    def wait_stream(self, other: Stream) -> None:
        self._device.calls.append(f"{self.name}: wait for {other.name}")
        self._busy_until_s = max(self._busy_until_s, other.ends_s)

    def wait_event(self, event: Event) -> None:
        self._device.calls.append(f"{self.name}: wait for an event")
        self._busy_until_s = max(self._busy_until_s, event._at_s)

    def record_event(self) -> Event:
        event = Event(self._device)
        event.record()
        return event


@dataclass
class Held:
    """Memory of a device that tensors hold."""

    allocated_bytes: int = 0
    peak_bytes: int = 0
    retries: int = 0


@dataclass
class ScriptedCuda:
    """One clock, and the memory of several devices.

    `install` puts it in the place of all of `world.cuda`, and of what the suite takes of `torch.cuda` itself.
    """

    now_s: float = 0.0
    """The host's time."""
    held: dict[torch.device, Held] = field(default_factory=lambda: defaultdict(Held))
    others_bytes: int = 0
    """Memory of other processes."""
    calls: list[str] = field(default_factory=list)
    random: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.uint8))
    seeds: dict[torch.device, int] = field(default_factory=dict)
    captured: int = 0
    """Graphs."""
    replayed: int = 0

    def __post_init__(self) -> None:
        self._main = Stream(self, "main")
        self.streams = [self._main]
        self._of_thread = threading.local()

    @property
    def here(self) -> Stream:
        """The current stream, which each thread has for itself."""
        return getattr(self._of_thread, "stream", self._main)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install_beside_torch(monkeypatch)
        for name in OF_TORCH:
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)

    def install_beside_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Only in the place of `world.cuda`."""
        for name in functions():
            monkeypatch.setattr(cuda, name, getattr(self, name))

    def allocate(self, size_bytes: int, device: torch.device = CPU) -> None:
        held = self.held[device]
        held.allocated_bytes += size_bytes
        held.peak_bytes = max(held.peak_bytes, held.allocated_bytes)

    def set_device(self, device: torch.device) -> None:
        self.calls.append(f"choose {device}")

    def launch(self, took_s: float) -> None:
        """Give the current stream work of so many seconds."""
        self.here.launch(took_s)

    def synchronize(self, device: torch.device | None = None) -> None:
        self.calls.append("synchronize")
        self.now_s = max(stream.ends_s for stream in self.streams)

    def occupy(self, device: torch.device) -> None:
        self.here.launch(1e-3)

    def event(self, *, enable_timing: bool = False) -> Event:
        return Event(self)

    def new_stream(self, device: torch.device | None = None, priority: int = 0) -> Stream:
        self.streams.append(Stream(self, "side"))
        return self.streams[-1]

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self.here

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before = self.here
        self._of_thread.stream = stream or before
        yield
        self._of_thread.stream = before

    @contextlib.contextmanager
    def aside(self, device: torch.device) -> Iterator[None]:
        self.calls.append("aside")
        yield

    @contextlib.contextmanager
    def waits_are_errors(self) -> Iterator[None]:
        self.calls.append("waits: error")
        yield
        self.calls.append("waits: allowed")

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name="Scripted GPU", uuid="scripted", total_memory=1_000_000)

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.held[device].peak_bytes = self.held[device].allocated_bytes

    def reset_accumulated_memory_stats(self, device: torch.device) -> None:
        self.held[device].retries = 0

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {"num_alloc_retries": self.held[device].retries}

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.held[device].peak_bytes

    def max_memory_reserved(self, device: torch.device) -> int:
        return 2 * self.max_memory_allocated(device)

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        """Free bytes, and all."""
        return -self.max_memory_reserved(device) - self.others_bytes, 0

    def release(self) -> None:
        self.calls.append("release")

    def seed(self, seed: int, device: torch.device) -> None:
        self.seeds[device] = seed

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.random.clone()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.random = state

    def capture(
        self, work: Callable[[], None], device: torch.device, *, warm_up: Callable[[], None]
    ) -> Callable[[], None]:
        """Like a graph, it executes nothing when it is made, and the same work on the same memory when replayed.

        Nothing that listens to torch's operations hears a replay.
        """
        warm_up()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            with _disable_current_modes():
                work()

        return replay


def functions() -> list[str]:
    """The public functions of the module that the script replaces."""
    return [
        name
        for name, value in vars(cuda).items()
        if inspect.isfunction(value) and value.__module__ == cuda.__name__ and not name.startswith("_")
    ]


OF_TORCH = (
    *("set_device", "synchronize", "current_stream", "stream", "get_device_properties"),
    *("reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved", "mem_get_info"),
    *("reset_accumulated_memory_stats", "memory_stats"),
    *("get_rng_state", "set_rng_state"),
)
"""Functions of `torch.cuda` that the suite calls."""
