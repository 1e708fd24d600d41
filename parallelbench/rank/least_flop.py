"""The floating-point operations that training a model takes at least, whatever algorithms the libraries choose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallelbench.models.inputs import blank
from parallelbench.models.modules import built

if TYPE_CHECKING:
    from parallelbench.spec.config import RunConfig

WINOGRAD = 4.0
"""By how much the fastest algorithm in use multiplies less in a convolution of 3×3: F(4×4, 3×3) of Lavin and Gray 2016
(arXiv 1509.09308). Larger kernels may be transformed by FFT, which saves no more than all values of a kernel but one.
"""
_SAVED = {1: 1.0, 9: WINOGRAD}
"""Values of a kernel → by how much fewer multiplications there may be."""
LEFT = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Matrix products → which argument is the left matrix."""


def least_flop_per_sample(run: RunConfig) -> float | None:
    """Forward, and backward for weights and inputs, counted while one sample passes on the CPU. None where none counts.

    Only matrix products and convolutions count. The input of the first of them needs no gradient.
    """
    # Meta tensors would need no memory, but load sympy, for seconds.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = built(run, torch.float32).eval()
        with _Counter() as counted:
            model(blank(run.data, 1))
    return 3 * sum(counted.flop) - counted.flop[0] if counted.flop else None


class _Counter(TorchDispatchMode):
    """Counts what is multiplied and added."""

    def __init__(self) -> None:
        super().__init__()
        self.flop: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the operation happen, and count it."""
        result, name = func(*args, **(kwargs or {})), func._schema.name
        if name in LEFT:
            self.flop.append(2.0 * result.numel() * args[LEFT[name]].shape[-1])
        elif name == "aten::convolution":
            kernel = args[1]
            values = kernel[0, 0].numel()
            self.flop.append(2.0 * result.numel() * kernel[0].numel() / _SAVED.get(values, values))
        return result
