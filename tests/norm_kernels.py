"""What torch's kernels of synchronised norms compute, by their definitions, on CPUs, for which torch has none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor


@contextmanager
def kernels_on_cpus() -> Iterator[None]:
    """Tensors say that they are on CUDA, and torch finds kernels of CPUs."""
    kernels = torch.library.Library("aten", "IMPL")
    for name, definition in _DEFINITIONS.items():
        kernels.impl(name, definition, "CPU")
    try:
        with mock.patch.object(Tensor, "is_cuda", True):
            yield
    finally:
        kernels._destroy()


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(x.float(), dim=(0, 2, 3), correction=0)
    return mean, (var + eps).rsqrt()


def _gathered(
    x: Tensor, mean: Tensor, deviation: Tensor, means: Tensor, variances: Tensor, momentum: float, eps: float, n: Tensor
) -> tuple[Tensor, Tensor]:
    shares, total = (n / n.sum())[:, None], n.sum()
    middle = (shares * mean).sum(0)
    var = (shares * (deviation**-2 - eps + (mean - middle) ** 2)).sum(0)
    means.lerp_(middle, momentum)
    variances.lerp_(var * total / (total - 1), momentum)
    return middle, (var + eps).rsqrt()


def _normalised(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, deviation: Tensor, eps: float) -> Tensor:
    return (_wide(weight * deviation) * (x - _wide(mean)) + _wide(bias)).to(x.dtype)


def _reduced(
    grad: Tensor, x: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor, *wanted: bool
) -> tuple[Tensor, ...]:
    total, products = (each.sum((0, 2, 3)) for each in (grad.float(), grad * (x - _wide(mean))))
    return total, products, products * deviation, total.clone()


def _of_input(grad: Tensor, x: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
    total, products, count = rest
    assert count.dtype == torch.int32
    n = count.sum()
    centred = grad - _wide(total / n) - (x - _wide(mean)) * _wide(deviation**2 * products / n)
    return (centred * _wide(deviation * weight)).to(x.dtype)


def _wide(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)


_DEFINITIONS = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _gathered,
    "batch_norm_elemt": _normalised,
    "batch_norm_backward_reduce": _reduced,
    "batch_norm_backward_elemt": _of_input,
}
