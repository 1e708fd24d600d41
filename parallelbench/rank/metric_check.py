"""Whether a metric is what evaluations take it for: sums that add up, and a number that follows from them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from parallelbench.errors import ConfigError, raised_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parallelbench.spec.config import RunConfig

_SAMPLES = 8
_ROUNDING = 1e-4
"""Largest relative difference of two sums: of a mean it would be a half."""


def check_sums(run: RunConfig, device: torch.device | str) -> None:
    """Raise `ConfigError` unless the sums over random outputs are those of their halves, and give a finite number."""
    if not run.metric.measures:
        return
    draw = torch.Generator().manual_seed(0)
    shape, classes = (_SAMPLES, *run.data.label_shape), run.logits_per_label
    dtype = torch.float64 if run.precision == "fp64" else torch.float32
    logits = torch.rand((*shape, classes), generator=draw, dtype=torch.float64).to(device, dtype)
    labels = torch.randint(run.data.num_classes, shape, generator=draw).to(device)
    whole, *halves = (
        _sums(run, *part) for part in ((logits, labels), *zip(logits.chunk(2), labels.chunk(2), strict=True))
    )
    both = halves[0] + halves[1]
    if not ((whole - both).abs() <= _ROUNDING * torch.maximum(whole.abs(), both.abs())).all():
        place = int((whole - both).abs().nan_to_num(torch.inf).argmax())
        raise ConfigError(
            f"{_built(run)} must give sums, but number {place + 1} of a batch is {whole[place].item():.4g}, and of its "
            f"two halves together {both[place].item():.4g}: add up over labels, and divide in value"
        )
    found = value_of(run, whole.tolist())
    if found is None:
        raise ConfigError(
            f"metric={run.metric.name}: {type(run.metric).__qualname__}.value gives no finite number for random "
            "predictions: return a number for any sums"
        )


def _sums(run: RunConfig, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    size = run.metric_size
    try:
        found: Any = run.metric.build()(logits, labels)
    except Exception as error:  # a user's metric may raise anything
        raise ConfigError(f"{_built(run)} fails: {raised_at(error)}") from None
    if not isinstance(found, torch.Tensor) or found.shape != (size,):
        kind = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise ConfigError(f"{_built(run)} must give a tensor of shape ({size},), as size says, but it gives {kind}")
    return found.double()


def _built(run: RunConfig) -> str:
    return f"metric={run.metric.name}: the function that metric.build returns"


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
            f"{evaluated.numel()} sums, not 2 and the metric's {size}: return those of numerics_of(run, "
            "device_type).sums(loss, logits, labels), without gradients, or choose metric=none"
        )
    sums: list[float] = evaluated[2:].tolist()
    return sums


def value_of(run: RunConfig, sums: Sequence[float]) -> float | None:
    """The metric after these sums over all ranks; None where there is none, or they or it are no finite numbers."""
    if not (run.metric.measures and all(map(math.isfinite, sums))):
        return None
    try:
        found = float(run.metric.value(sums))
    except Exception as error:  # a user's metric may raise anything
        raise ConfigError(
            f"metric={run.metric.name}: {type(run.metric).__qualname__}.value fails: {raised_at(error)}"
        ) from None
    return found if math.isfinite(found) else None
