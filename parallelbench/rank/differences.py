"""How far gradients, buffers and updates are from those that were expected, as torch's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from parallelbench.world.numerics import wide

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_NOISE = 1e-9
"""A gradient in fp64 that is this much smaller than the largest is rounding: in truth it may be zero, as an attention's
key bias's is, and a strategy that rounds gradients leaves such a tensor where it began."""
_LEAST_SHARE = 0.01
"""A tensor counts at least as this share of all gradients: one that is zero in truth holds nothing but rounding."""


def relative_difference(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Over all tensors the largest ‖value − expected‖ ÷ ‖expected‖; infinite where names or shapes differ.

    A tensor smaller than 1 % of all together counts as 1 %. NaN where any value is NaN.
    """
    values, expected = _wide(values), _wide(expected)
    if not _alike(values, expected):
        return float("inf")
    norms = torch.stack([tensor.norm() for tensor in expected.values()])
    errors = torch.stack([(values[name] - expected[name]).norm() for name in expected])
    return (errors / norms.clamp(min=max(_LEAST_SHARE * norms.norm().item(), 1e-300))).max().item()


def size_difference(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """|⟨values, expected⟩ ÷ ⟨expected, expected⟩ − 1| of all tensors together: of noise, little lies along `expected`.

    Infinite where names or shapes differ; NaN where any value is NaN.
    """
    values, expected = _wide(values), _wide(expected)
    if not _alike(values, expected):
        return float("inf")
    along = sum((values[name] * expected[name]).sum().item() for name in expected)
    square = sum(each.square().sum().item() for each in expected.values())
    return abs(along - square) / max(square, 1e-300)


def update_difference(updates: Mapping[str, tuple[Tensor, Tensor, Tensor]], *, limit: float) -> float:
    """Over all tensors the largest ‖after − expected‖ ÷ (‖expected − before‖ + 2ε ‖after‖ ÷ limit).

    `updates`: of each tensor its values before and after a step, and those expected after it, in fp64. ε, the unit
    roundoff of what is stored, bounds what rounding does to `after`. So it alone never makes a difference of more than
    half of `limit`, however small the step. NaN where any value is NaN.
    """
    differences = []
    for before, after, expected in updates.values():
        unseen = torch.finfo(after.dtype).eps * wide(after).norm() / limit
        size = (expected - wide(before)).norm() + unseen
        differences.append((wide(after) - expected).norm() / size.clamp(min=1e-300))
    return torch.stack(differences).max().item() if differences else 0.0


def unmoved(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float
) -> int:
    """Tensors that a step left as they were, though the rate times their gradient is far above their last bit."""
    filled = {name: gradient for name, gradient in gradients.items() if gradient.numel()}
    stayed, largest = 0, max((gradient.abs().max().item() for gradient in filled.values()), default=0.0)
    for name, gradient in filled.items():
        if gradient.abs().max().item() <= _NOISE * largest:
            continue
        visible = 1024 * torch.finfo(before[name].dtype).eps * before[name].abs().max().item()
        if lr * gradient.abs().max().item() > visible:
            stayed += torch.equal(before[name], after[name])
    return stayed


def _wide(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: wide(tensor) for name, tensor in tensors.items()}


def _alike(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return values.keys() == expected.keys() and all(values[name].shape == expected[name].shape for name in expected)
