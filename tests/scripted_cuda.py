"""A GPU that does what a test says, in the place of `parallelbench.world.cuda`: a clock, streams, memory, a graph.

Tensors stay on the CPU. A test that uses it sees the suite's CUDA branches at work: `World(device_type="cuda")`.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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
        self._at_s = (stream or self._device.stream).ends_s

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


@dataclass
class ScriptedCuda:
    """One clock, and the memory of several devices; `install` puts it in the place of all of `world.cuda`."""

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
    def stream(self) -> Stream:
        """The current stream, which each thread has for itself."""
        return getattr(self._of_thread, "stream", self._main)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in functions():
            monkeypatch.setattr(cuda, name, getattr(self, name))

    def allocate(self, size_bytes: int, device: torch.device = CPU) -> None:
        held = self.held[device]
        held.allocated_bytes += size_bytes
        held.peak_bytes = max(held.peak_bytes, held.allocated_bytes)

    def choose(self, device: torch.device) -> None:
        self.calls.append(f"choose {device}")

    def launch(self, took_s: float) -> None:
        """Give the current stream work of so many seconds."""
        self.stream.launch(took_s)

    def synchronize(self, device: torch.device) -> None:
        self.calls.append("synchronize")
        self.now_s = max(stream.ends_s for stream in self.streams)

    def occupy(self, device: torch.device) -> None:
        self.stream.launch(1e-3)

    def timing_event(self) -> Event:
        return Event(self)

    def new_stream(self, device: torch.device) -> Stream:
        self.streams.append(Stream(self, "side"))
        return self.streams[-1]

    def current_stream(self, device: torch.device) -> Stream:
        return self.stream

    @contextlib.contextmanager
    def on_stream(self, stream: Stream | None) -> Iterator[None]:
        before = self.stream
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

    def device_name(self, device: torch.device) -> str:
        return "Scripted GPU"

    def device_uuid(self, device: torch.device) -> str:
        return "GPU-scripted"

    def reset_peaks(self, device: torch.device) -> None:
        self.held[device].peak_bytes = self.held[device].allocated_bytes

    def peak_allocated_bytes(self, device: torch.device) -> int:
        return self.held[device].peak_bytes

    def peak_reserved_bytes(self, device: torch.device) -> int:
        return 2 * self.peak_allocated_bytes(device)

    def used_bytes(self, device: torch.device) -> int:
        return self.peak_reserved_bytes(device) + self.others_bytes

    def release(self) -> None:
        self.calls.append("release")

    def seed(self, seed: int, device: torch.device) -> None:
        self.seeds[device] = seed

    def rng_state(self, device: torch.device) -> torch.Tensor:
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
