"""Time: windows between synchronisations, and the durations of sampled steps."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from parallelbench.processes import FORKED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from parallelbench.config.components import Batch
    from parallelbench.frameworks import RankWorld


class TimedWindow:
    """The time between two synchronisations of host and device: `with window: …`, again and again.

    Opening it waits for all ranks, then for this rank's devices; closing it waits for this rank's devices only, so that
    each rank reports its own time and the slowest rank shows.
    """

    def __init__(self, world: RankWorld) -> None:
        self._world = world
        self._started = self._cpu_started_s = self.length_s = 0.0
        self.started_at = self.ended_at = 0.0
        """Unix times of the edges, s, to find other processes' measurements in the window."""
        self.cpu_time_s = 0.0
        """Processor time of this process in the window, all threads, user and system."""

    def __enter__(self) -> None:
        self._world.barrier()
        self._world.synchronize()
        self.started_at, self._cpu_started_s = time.time(), time.process_time()
        self._started = time.perf_counter()

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is not None:  # devices may wait for ever for a rank that has failed
            return
        self._world.synchronize()
        self.length_s = time.perf_counter() - self._started
        self.ended_at, self.cpu_time_s = time.time(), time.process_time() - self._cpu_started_s


class StepClock:
    """Durations of some steps of an epoch, evenly spread, from fetching the batch to the end of the update.

    On CUDA by events that are read after the window: the host never waits inside it. On a CPU by `perf_counter`.
    """

    def __init__(self, world: RankWorld, *, steps: int, sampled: int) -> None:
        self._cuda = world.device_type == "cuda"
        count = min(steps, sampled)
        self._sampled = {round(i * (steps - 1) / max(1, count - 1)) for i in range(count)}
        self._edges: list[tuple[int, Any, Any]] = []

    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass the batches on and time the sampled steps, from fetching the batch to fetching the next."""
        self._edges.clear()
        iterator = iter(batches)
        index = 0
        while True:
            start = self._now() if index in self._sampled else None
            batch = next(iterator, None)
            if batch is None:
                return
            yield batch
            if start is not None:
                self._edges.append((index + 1, start, self._now()))
            index += 1

    def durations(self) -> list[tuple[int, float]]:
        """(step, seconds) of the sampled steps; the device must be synchronised."""
        if self._cuda:
            return [(step, start.elapsed_time(end) / 1000) for step, start, end in self._edges]
        return [(step, end - start) for step, start, end in self._edges]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        import torch  # ranks of other frameworks, on processors, get by without it

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class StartUp:
    """Durations of the parts of the start-up, s, without gaps between them."""

    def __init__(self, launched_at: float, entered_at: float) -> None:
        self.parts: dict[str, float | None] = {
            "startup_launch_s": entered_at - launched_at,
            **dict.fromkeys(f"startup_{part}_s" for part in ("parity", "compile")),
        }
        self._last = entered_at

    def done(self, part: str) -> None:
        """Add the time since the last part to this part."""
        now = time.time()
        name = f"startup_{part}_s"
        self.parts[name] = (self.parts.get(name) or 0.0) + now - self._last
        self._last = now

    def skip(self) -> None:
        """Leave the time since the last part out of the start-up."""
        self._last = time.time()

    def facts(self) -> dict[str, float | bool | None]:
        """All parts and their sum, once the first step is done; of a process that was forked, that it was."""
        if FORKED in os.environ:  # a packed run may have been started cold
            return {"packed": True}
        return {**self.parts, "startup_s": sum(filter(None, self.parts.values())), "packed": False}
