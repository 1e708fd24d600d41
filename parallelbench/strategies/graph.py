"""Training steps that are replayed as one CUDA graph, for `graph=true`."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from typing import TYPE_CHECKING

import torch

from parallelbench.config.components import Batch
from parallelbench.strategies.replica import ModuleReplica
from parallelbench.strategies.state import undone_updates, undrawn_numbers
from parallelbench.world import cuda
from parallelbench.world.generators import Generators
from parallelbench.world.numerics import Sums

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


LOOK_S = 1.0
"""How often a device is asked how far it has come."""


class Progress:
    """Notices when a device no longer comes forward: within a graph NCCL itself waits for other ranks for ever."""

    def __init__(self, device: torch.device, timeout_s: float, late: Callable[[], None]) -> None:
        """`late` is called, in a thread of its own, once nothing has been completed for so long."""
        self._device, self._timeout_s, self._late = device, timeout_s, late
        self._launched: list[torch.cuda.Event] = []
        self._used: list[torch.cuda.Event] = []
        self._since_s: float | None = None
        """When the oldest event was first seen to be behind; None: none is."""
        self._watches = False

    def launched(self) -> None:
        """A step was launched."""
        event = self._used.pop() if self._used else torch.cuda.Event(enable_timing=True)
        event.record()
        self._launched.append(event)
        if not self._watches:
            self._watches = True
            threading.Thread(target=self._watch, daemon=True).start()

    def is_stuck(self, now_s: float) -> bool:
        """Whether something is launched, and for longer than the timeout nothing was completed."""
        done = bisect_left(self._launched, True, key=lambda event: not event.query())
        self._used += self._launched[:done]
        del self._launched[:done]
        if done or not self._launched:
            self._since_s = None
        if not self._launched:
            return False
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s > self._timeout_s

    def _watch(self) -> None:
        torch.cuda.set_device(self._device)
        while not self.is_stuck(time.monotonic()):
            time.sleep(LOOK_S)
        self._late()


WARM_STEPS = 11
"""Steps before the capture: DDP needs as many to settle its buckets and its communicator."""


class CapturedReplica(ModuleReplica):
    """A module whose step the host launches at once: copy the batch in, replay the graph, copy the sums out.

    The graph is captured before the first step. The steps that warm up for it are undone: parameters, buffers,
    optimizer state and random numbers are then as before, in the same memory, which is the graph's.
    """

    _replay: Callable[[], None] | None = None
    progress: Progress | None = None
    """Of a rank among several."""

    def step(self, batch: Batch) -> Sums:
        """Forward, backward, update, as captured."""
        assert batch.images is not None
        assert batch.labels is not None
        self.compile_warmup(batch)
        assert self._replay is not None
        assert batch.images.shape == self._images.shape, "all batches of a run have one shape"
        self._images.copy_(batch.images, non_blocking=True)
        self._labels.copy_(batch.labels, non_blocking=True)
        self._replay()
        if self.progress is not None:
            self.progress.launched()
        self.traffic.add(self._sent)
        if self._count_step is not None:
            self._count_step(self.traffic)
        return Sums([], self._sums.clone(), samples=self._samples)  # the next replay overwrites them

    def compile_warmup(self, batch: Batch) -> None:
        """Capture the step, once; a run does so before its first window."""
        if self._replay is None:
            assert batch.images is not None
            assert batch.labels is not None
            self._replay = self._captured(batch.images, batch.labels)

    def _captured(self, images: Tensor, labels: Tensor) -> Callable[[], None]:
        device = self._world.device
        self._images, self._labels = images.clone(), labels.clone()
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        batch = Batch(self._images, self._labels, len(labels))

        def work() -> None:
            with self.traffic.apart() as self._sent:  # by layers; a replay sends as much
                result = self._forward_backward(batch)
                self._update()
            self._sums.copy_(result.tensor())
            self._samples = result.samples  # as captured: a replay takes the same gradients

        def warm_up() -> None:
            trained = self._module, self._optimizer
            with Generators([device]).unchanged(), undrawn_numbers(*trained), undone_updates(*trained):
                for _ in range(WARM_STEPS):
                    work()
            torch.cuda.reset_peak_memory_stats(device)  # what the steps are undone by is no part of training's peak

        return cuda.capture(work, device, warm_up=warm_up)
