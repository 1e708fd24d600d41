"""The floating-point operations that training a model takes at least, whatever algorithms the libraries choose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from parallelbench.spec.config import RunConfig

WINOGRAD = 4.0
"""By how much the fastest algorithm in use multiplies less in a convolution: F(4×4, 3×3) of Lavin and Gray 2016
(arXiv 1509.09308)."""
_LEFT = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Matrix products → which argument is the left matrix."""


def least_flop_per_sample(run: RunConfig) -> float | None:
    """Forward, and backward for weights and inputs, counted while one sample passes on the CPU. None where none counts.

    Only matrix products and convolutions count. The first layer's input needs no gradient.
    """
    channels, height, _ = run.data.shape
    total, passes = 0.0, 2
    # Meta tensors would need no memory, but load sympy, for seconds.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = run.model.build(in_channels=channels, image_size=height, num_classes=run.data.num_classes).eval()
        value = torch.zeros(1, *run.data.shape)
        for layer in model:
            with _Counter() as counted:
                value = layer(value)
            total += passes * counted.flop
            passes = 3 if total else 2
    return total or None


class _Counter(TorchDispatchMode):
    """Counts what is multiplied and added."""

    def __init__(self) -> None:
        super().__init__()
        self.flop = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the operation happen, and count it."""
        result, name = func(*args, **(kwargs or {})), func._schema.name
        if name in _LEFT:
            self.flop += 2.0 * result.numel() * args[_LEFT[name]].shape[-1]
        elif name == "aten::convolution":
            self.flop += 2.0 * result.numel() * args[1][0].numel() / WINOGRAD
        return result
