"""The norms of gradients before they were clipped, step by step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from parallelbench.strategies.parts.state import local

if TYPE_CHECKING:
    from torch import Tensor

_MOST_HELD = 64
"""Numbers on the device that wait for being put together."""


class StepNorms:
    """Keeps the norm of each step on the device, which nobody waits for, until they are taken."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._held: list[Tensor] = []
        self._blocks: list[Tensor] = []

    def note(self, norm: Tensor) -> None:
        """One step's norm, in memory that nobody writes again."""
        self._held.append(local(norm).detach())
        if len(self._held) == _MOST_HELD:
            self._put_together()

    def take(self) -> dict[str, float]:
        """Columns of `ranks` about the steps since the last call; empty where no step has a norm that is a number.

        Under precision=fp16 a gradient may overflow; its step is skipped, and counts here neither as clipped nor not.
        """
        self._put_together()
        norms = [norm for block in self._blocks for norm in block.tolist() if math.isfinite(norm)]
        self._blocks.clear()
        if not norms:
            return {}
        return {
            "gradient_norm_mean": math.fsum(norms) / len(norms),
            "gradient_norm_max": max(norms),
            "clipped_share": sum(norm > self._most for norm in norms) / len(norms),
        }

    def _put_together(self) -> None:
        if self._held:
            self._blocks.append(torch.stack(self._held))
            self._held.clear()
