"""Whether a metric is what evaluations take it for: sums that add up, and a number that follows from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from parallelbench.errors import ConfigError, raised_at
from parallelbench.rank.metric_value import metric_value

if TYPE_CHECKING:
    from parallelbench.spec.config import RunConfig

_SAMPLES = 8
_ROUNDING = 1e-4
"""Largest relative difference of two sums: of a mean it would be a half."""


def check_sums(run: RunConfig, device: torch.device | str) -> None:
    """Raise `ConfigError` unless the sums over random outputs are those of their halves, and give a finite number.

    So must outputs that all predict one class, as a model may in its first epochs.
    """
    if not run.metric_size:
        return
    draw = torch.Generator().manual_seed(0)
    shape, classes = (_SAMPLES, *run.data.label_shape), run.logits_per_label
    dtype = torch.float64 if run.precision == "fp64" else torch.float32
    logits = torch.rand((*shape, classes), generator=draw, dtype=torch.float64).to(device, dtype)
    labels = torch.randint(run.data.num_classes, shape, generator=draw).to(device)
    whole = _sums(run, logits, labels)
    first, second = (_sums(run, *half) for half in zip(logits.chunk(2), labels.chunk(2), strict=True))
    both = first + second
    off = (whole - both).abs().nan_to_num(torch.inf)
    if not (off <= _ROUNDING * torch.maximum(whole.abs(), both.abs())).all():
        place = int(off.argmax())
        raise ConfigError(
            f"{_built(run)} must give sums, but number {place + 1} of a batch is {whole[place].item():.4g}, and of its "
            f"two halves together {both[place].item():.4g}: add up over labels, and divide in value"
        )
    alike = torch.zeros_like(logits).index_fill_(-1, torch.zeros(1, dtype=torch.int64, device=device), 1.0)
    for sums, predictions in ((whole, "random predictions"), (_sums(run, alike, labels), "equal predictions")):
        if metric_value(run, sums.tolist()) is None:
            raise ConfigError(
                f"metric={run.metric.name}: {type(run.metric).__qualname__}.value gives no finite number for "
                f"{predictions}: return a number for any sums"
            )


def _sums(run: RunConfig, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    size = run.metric_size
    try:
        found: Any = run.metric.build()(logits, labels)
    except (Exception, SystemExit) as error:  # a user's metric may raise anything
        raise ConfigError(f"{_built(run)} fails: {raised_at(error)}") from None
    if not isinstance(found, torch.Tensor) or found.shape != (size,):
        kind = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise ConfigError(f"{_built(run)} must give a tensor of shape ({size},), as size says, but it gives {kind}")
    return found.double()


def _built(run: RunConfig) -> str:
    return f"metric={run.metric.name}: the function that metric.build returns"
