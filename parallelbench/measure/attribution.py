"""Divides the time of steps among phases, in a pass of its own after the last epoch.

Steps and loaders name their phases themselves (`parallelbench.world.spans.phase`); while epochs are timed, that does
nothing. For the pass, torch's ways to wait for other ranks are wrapped besides; afterwards they are unwrapped. On CUDA
each edge of a span waits for the devices' current streams, so that host and device agree on the time; work on other
streams (all-reduces during backward) continues meanwhile, as in training.
"""

from __future__ import annotations

import functools
import threading
import time
from contextlib import ExitStack, contextmanager
from itertools import chain, count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from parallelbench.measure.bandwidth import collectives
from parallelbench.results.files import storage_errors
from parallelbench.world.spans import PHASES, Spans, Step, divided_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from parallelbench.config.components import Batch
    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.loaders.order import BatchLoader
    from parallelbench.world.spans import Phase
    from parallelbench.world.world import World


Row = dict[str, Any]

RING_SIZES_BYTES = (2**10, 2**24)
TRACED_STEPS = 3
"""Steps in a Chrome trace: every operation of every step is in it."""


class AttributionPass:
    """Further steps after a replica's last epoch; they change its parameters, but no measurement."""

    def __init__(self, replica: Replica, loader: BatchLoader, *, run: RunConfig, world: World) -> None:
        self._replica, self._loader, self._world = replica, loader, world
        self._epoch_steps = run.steps_per_epoch
        self._batches = iter(chain.from_iterable(map(loader.train, count(run.epochs + 1))))
        self._begun = 0

    @property
    def steps(self) -> int:
        """How many the replica has taken here."""
        return self._begun

    def attribute(self, steps: int) -> list[Row]:
        """Time `steps` steps by phase: columns of `phases`. Phases that did not occur on this rank are null.

        One step before them does not count: it follows a barrier, the others don't.
        """
        spans = Spans(self._now, waits=self._waits())
        self._world.barrier()
        measured = self._train(spans, 1 + steps)[1:]
        self._finish_epoch()
        return [{"step": number, **_columns(step, spans.seen)} for number, step in enumerate(measured, start=1)]

    def _waits(self) -> bool:
        """Whether there are other ranks, and waiting for them is distinguishable from computing."""
        return self._world.size > 1 and not self._replica.hides_communication

    def trace(self, path: Path) -> None:
        """Write a Chrome trace of `TRACED_STEPS` steps, in which the phases are ranges."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._world.device_type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._world.barrier()
        with torch.profiler.profile(activities=activities) as profiler:
            # On CUDA the profiler itself sees each collective's kernel, and autograd has threads of its own.
            waits = self._world.size > 1 and self._world.device_type == "cpu"
            self._train(Spans(time.perf_counter, label=_range, waits=waits), TRACED_STEPS)
            self._world.synchronize()
        self._finish_epoch()
        with storage_errors(path):
            profiler.export_chrome_trace(str(path))  # it writes to another name first, and a full disk raises nothing
            path.stat()

    def _train(self, spans: Spans, steps: int) -> list[Step]:
        with installed(spans, outside=self._replica.waiting):
            return [self._step(spans) for _ in range(steps)]

    def _step(self, spans: Spans) -> Step:
        with spans.step() as step:
            with spans.span("data_wait"):
                batch = self._next()
            self._replica.step(batch)
        return step

    def _next(self) -> Batch:
        self._begun += 1
        return next(self._batches)

    def _finish_epoch(self) -> None:
        """Train on to the end of the epoch where ranks agree on something only there."""
        while self._replica.whole_epochs and self._begun % self._epoch_steps:
            self._replica.step(self._next())

    def _now(self) -> float:
        if self._world.device_type == "cuda":
            for device in self._world.devices:
                torch.cuda.current_stream(device).synchronize()
        return time.perf_counter()


def _columns(step: Step, seen: set[Phase]) -> Row:
    phases = {f"{phase}_s": step.phases[phase] if phase in seen else None for phase in PHASES}
    return {"step_time_s": step.step_time_s, **phases}


def _range(phase: Phase) -> Callable[[], None]:
    """Begin a profiler's range; returns the function that ends it."""
    entered = torch.profiler.record_function(f"parallelbench: {phase}")
    entered.__enter__()
    return lambda: entered.__exit__(None, None, None)


def ring(world: World) -> Row:
    """Latency and bandwidth of all-reduces over all ranks, by the formula of a ring: columns of `run`.

    The time of a small one gives the latency; the further time of a large one gives the bandwidth.
    """
    if world.size == 1:
        return {}
    small, large = collectives("all_reduce", world.device, sizes_bytes=RING_SIZES_BYTES)
    further_bytes, longer_s = large.sent_bytes - small.sent_bytes, large.time_s - small.time_s
    return {
        "probed_latency_s": small.time_s / (2 * (world.size - 1)),
        "probed_bandwidth_bytes_per_s": further_bytes / longer_s if longer_s > 0 else None,
    }


@contextmanager
def installed(spans: Spans, *, outside: Phase) -> Iterator[None]:
    """Let each phase of steps and batches count in `spans`, and afterwards in none.

    With `Spans.waits`, put spans around waiting for other ranks, too: `outside` where a step itself waits.
    """
    with ExitStack() as stack:
        stack.enter_context(divided_by(spans))
        for owner, name in ((dist.Work, "wait"), (torch.ops._c10d_functional, "wait_tensor")) if spans.waits else ():
            stack.enter_context(_replaced(owner, name, _waiting(getattr(owner, name), spans, outside)))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _waiting(wait: Callable[..., Any], spans: Spans, outside: Phase) -> Callable[..., Any]:
    """Waiting for other ranks: `outside` where a step itself waits, communication where a phase of it does."""
    thread = threading.get_ident()

    @functools.wraps(wait)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:  # a strategy's own thread: the step does not wait here
            return wait(*args, **kwargs)
        with spans.span(outside if spans.innermost == "other" else "communication"):
            return wait(*args, **kwargs)

    return call
