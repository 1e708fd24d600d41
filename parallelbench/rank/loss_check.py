"""Whether a loss is what all strategies take it for: the mean over a batch, as one number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from parallelbench.spec.config import RunConfig

_SAMPLES = 8
_ROUNDING = 1e-4
"""Largest relative difference of two means: of a sum it would be a half."""


def check_mean(run: RunConfig, device: torch.device | str) -> None:
    """Raise `ConfigError` unless the loss of random outputs is one number, and the mean of that of their halves.

    Losses that such outputs have no finite loss of are taken as they are.
    """
    mean = run.loss.build()
    draw = torch.Generator().manual_seed(0)
    shape, classes = (_SAMPLES, *run.data.label_shape), run.data.num_classes
    dtype = torch.float64 if run.precision == "fp64" else torch.float32
    logits = torch.rand((*shape, classes), generator=draw, dtype=torch.float64).to(device, dtype)
    labels = torch.randint(classes, shape, generator=draw).to(device)
    built = f"loss={run.loss.name}: the function that loss.build returns must give the mean over a batch as one number"
    whole = mean(logits, labels)
    if not isinstance(whole, torch.Tensor) or whole.shape != ():
        found = f"a tensor of shape {tuple(whole.shape)}" if isinstance(whole, torch.Tensor) else type(whole).__name__
        raise ConfigError(f'{built}, but it gives {found}: average over all labels, e.g. by reduction="mean"')
    if not whole.isfinite():
        return
    halves = torch.stack([mean(*half) for half in zip(logits.chunk(2), labels.chunk(2), strict=True)]).mean().item()
    if not abs(whole.item() - halves) <= _ROUNDING * max(abs(whole.item()), abs(halves)):
        raise ConfigError(
            f"{built}, but of a batch it is {whole.item():.4g} and the mean of its two halves' is {halves:.4g}: divide "
            'by the number of labels, e.g. by reduction="mean" without weights of classes'
        )
