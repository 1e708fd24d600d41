"""Divides one thread's time among nested spans; each instant belongs to the innermost one.

Steps say themselves what is which phase (`phase`). That costs nothing worth naming but where their time is divided.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor


Phase = Literal["data_wait", "host_to_device", "forward", "backward", "communication", "bubble", "optimizer", "other"]
"""What a rank does at one instant of a step; `other`: outside all spans."""
PHASES: tuple[Phase, ...] = get_args(Phase)


def waits_are_hidden(device_type: str, *, compiled: bool) -> bool:
    """Whether waiting for other ranks within a layer can't be told from computing.

    On CUDA, streams wait for each other during forward and backward; compiled code contains its own waits.
    """
    return device_type == "cuda" or compiled


@dataclass
class Step:
    """One step's time, s, and how it divides."""

    step_time_s: float = 0.0
    phases: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Sums to `step_time_s`: each instant belongs to one phase."""


class Spans:
    """Divides steps among phases. `now` returns seconds, after the devices have finished all work so far.

    `label` is called at the start of each span; it returns the function that ends the label (a profiler's range).
    `waits`: whether waiting for other ranks can be told from computing. If not, what can be is only a part of it, and
    counts in the phase in which it happens, too.
    """

    def __init__(
        self,
        now: Callable[[], float],
        *,
        label: Callable[[Phase], Callable[[], None]] | None = None,
        waits: bool = True,
    ) -> None:
        self.waits = waits
        self._now, self._label = now, label
        self._stack: list[tuple[Phase, Callable[[], None] | None]] = []
        self._current = Step()
        self._since = 0.0
        self.seen: set[Phase] = {"other"}
        """Phases that have occurred in any step."""

    @property
    def innermost(self) -> Phase | None:
        """The phase that time now counts for; None outside of steps."""
        return self._stack[-1][0] if self._stack else None

    @contextmanager
    def step(self) -> Iterator[Step]:
        """A step; what it yields is complete afterwards."""
        assert not self._stack, "steps don't nest"
        self._current = step = Step()
        with self._within("other"):
            start = self._since
            yield step
        step.step_time_s = self._since - start

    @contextmanager
    def span(self, phase: Phase) -> Iterator[None]:
        """Count time for a phase, without the spans inside it; outside of steps nothing is counted."""
        if not self._stack or (phase == "communication" and not self.waits):
            yield
            return
        with self._within(phase):
            yield

    def expect_end_of_graph(self, loss: Tensor) -> None:
        """Count what follows the graph of a backward pass that begins from `loss` as waiting for other ranks.

        DDP's reducer waits for its all-reduces, in C++, in a callback that the autograd engine calls after the graph.
        One that was queued earlier is called earlier: ours is queued when backward begins.
        """
        if not self._stack or not self.waits:
            return
        from torch.autograd import Variable

        def begun(_gradient: Tensor) -> None:
            Variable._execution_engine.queue_callback(lambda: self.enter("communication"))

        loss.register_hook(begun)

    @contextmanager
    def _within(self, phase: Phase) -> Iterator[None]:
        depth = len(self._stack)
        self.enter(phase)
        try:
            yield
        finally:
            while len(self._stack) > depth:  # phases that `enter` has begun inside end here too
                self._leave()

    def enter(self, phase: Phase) -> None:
        """Count time for a phase from now to the end of the enclosing span."""
        self._count()
        self.seen.add(phase)
        self._stack.append((phase, self._label(phase) if self._label else None))

    def _leave(self) -> None:
        self._count()
        _, end = self._stack.pop()
        if end is not None:
            end()

    def _count(self) -> None:
        now = self._now()
        if self._stack:
            self._current.phases[self._stack[-1][0]] += now - self._since
        self._since = now


class _Division:
    """The spans by which this process's steps are divided now; None: their time is not."""

    spans: Spans | None = None


_UNDIVIDED = nullcontext()


def phase(name: Phase) -> AbstractContextManager[None]:
    """What happens within is a phase of the step; of nested ones the innermost counts."""
    return _UNDIVIDED if _Division.spans is None else _Division.spans.span(name)


def backward_phase(loss: Tensor) -> AbstractContextManager[None]:
    """That of a backward pass from `loss`, after whose graph the autograd engine may wait for other ranks."""
    if _Division.spans is not None:
        _Division.spans.expect_end_of_graph(loss)
    return phase("backward")


@contextmanager
def divided_by(spans: Spans) -> Iterator[None]:
    """Let each `phase` of this process count in these spans."""
    assert _Division.spans is None, "one at a time"
    _Division.spans = spans
    try:
        yield
    finally:
        _Division.spans = None
