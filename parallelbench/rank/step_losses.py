"""Losses of single steps, and of blocks of steps, for the table `losses`: cheap, since sums are kept by step anyway."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from parallelbench.world.numerics import Sums

BLOCK = 64
"""Steps of a run whose losses have a row each, and steps of a later row: within about as many, right runs drift apart.
"""


def by_step(total: Sums | None, steps: int) -> list[float]:
    """The summed loss of each step of an epoch on this rank: zeros where it owns none, NaN where steps can't be told
    apart. Waits for the device.
    """
    if total is None:
        return [0.0] * steps
    losses: list[float] = total.losses().tolist()
    pieces, rest = divmod(len(losses), steps)
    return [math.nan] * steps if rest else [math.fsum(losses[i * pieces : (i + 1) * pieces]) for i in range(steps)]


def rows_of(losses: Sequence[float], *, before: int, samples: int) -> Iterator[dict[str, Any]]:
    """The columns `step`, `steps` and `train_loss` of an epoch; none where a loss is not finite.

    `losses`: summed over all ranks, of each step. `before`: steps of earlier epochs. `samples`: of a step.
    """
    if not all(map(math.isfinite, losses)):
        return
    first = 0
    while first < len(losses):
        end = first + 1 if before + first < BLOCK else min(len(losses), (first // BLOCK + 1) * BLOCK)
        mean = math.fsum(losses[first:end]) / (end - first) / samples
        yield {"step": first + 1, "steps": end - first, "train_loss": mean}
        first = end
