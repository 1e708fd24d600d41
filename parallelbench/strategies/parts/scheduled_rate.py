"""The rate of each step, as the run's schedule has it, on every rank alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from parallelbench.config.run import RunConfig


class ScheduledRate:
    """Counts training steps, and gives each the rate that the run's schedule has for it.

    A step counts also where fp16 overflowed and nothing was updated.
    """

    def __init__(self, run: RunConfig) -> None:
        self._run, self._taken = run, 0

    def next_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the rate of the next update."""
        self._taken += 1
        factor = self._run.rate_factor(self._taken)
        for group in optimizer.param_groups:
            # Torch's own schedulers keep the full rate here, too: it is saved and loaded with the optimizer's state.
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def local_state(self) -> dict[str, Any]:
        """How many steps there were."""
        return {"taken": self._taken}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._taken = state["taken"]
