"""The run's metric in an evaluation: a rank's sums, and the number that follows over all ranks. Loads no framework."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from parallelbench.errors import ConfigError, raised_at
from parallelbench.store.metric_columns import METRIC

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parallelbench.spec.config import RunConfig


def metric_sums(evaluated: Any, run: RunConfig) -> list[float]:
    """What a rank's evaluation gives besides summed loss and correct predictions; zeros where it owns no sample.

    Raises `ConfigError` where a replica leaves them out.
    """
    size = run.metric_size
    if not size or evaluated is None:
        return [0.0] * size
    if evaluated.shape != (2 + size,):
        raise ConfigError(
            f"metric={run.metric.name} with strategy={run.strategy.name} is refused: evaluate of its replica returns "
            f"{math.prod(evaluated.shape)} sums, not 2 and the metric's {size}: return those of numerics_of(run, "
            "device_type).sums(loss, logits, labels), without gradients, or choose metric=none"
        )
    sums: list[float] = evaluated[2:].tolist()
    return sums


def metric_value(run: RunConfig, sums: Sequence[float]) -> float | None:
    """The metric after these sums over all ranks; None where there is none, or they or it are no finite numbers."""
    if not sums or not all(map(math.isfinite, sums)):
        return None
    try:
        found = float(run.metric.value(sums))
    except (Exception, SystemExit) as error:  # a user's metric may raise anything
        raise ConfigError(
            f"metric={run.metric.name}: {type(run.metric).__qualname__}.value fails: {raised_at(error)}"
        ) from None
    return found if math.isfinite(found) else None


def metric_column(run: RunConfig, sums: Sequence[float]) -> dict[str, float | None]:
    """The column of `epochs`, from the sums over all ranks."""
    (column,) = METRIC
    return {column.name: metric_value(run, sums)}
