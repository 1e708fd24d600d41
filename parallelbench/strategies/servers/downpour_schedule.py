"""When an asynchronous worker (`strategy=downpour`) fetches parameters and pushes gradients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The steps of an epoch, counted from 1, in which an asynchronous worker fetches and pushes."""

    steps: int
    n_push: int
    n_fetch: int

    def fetches_before(self, step: int) -> bool:
        """Whether parameters are fetched before the step; an epoch starts with the last epoch's final ones."""
        return step > 1 and (step - 1) % self.n_fetch == 0

    def pushes_after(self, step: int) -> bool:
        """Whether gradients are pushed after the step."""
        return step % self.n_push == 0 or step == self.steps

    def starts_push(self, step: int) -> bool:
        """Whether the step's gradient is the first of a push."""
        return step == 1 or self.pushes_after(step - 1)

    @property
    def push_steps(self) -> list[int]:
        """The steps that end in a push."""
        return [step for step in range(1, self.steps + 1) if self.pushes_after(step)]

    @property
    def requests(self) -> int:
        """Pushes and fetches of one worker in an epoch."""
        return sum(self.fetches_before(step) + self.pushes_after(step) for step in range(1, self.steps + 1))
