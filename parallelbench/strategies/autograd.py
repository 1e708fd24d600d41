"""What ranks send each other within a forward pass, and its counterpart in backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Way = Callable[[Tensor], Tensor]


def exchanged(values: Tensor, *, there: Way, back: Way) -> Tensor:
    """What `there` makes of values; backward, `back` makes their gradient of that of the result."""
    result: Tensor = _Exchanged.apply(values, there, back)
    return result


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, there: Way, back: Way) -> Tensor:
        ctx.back = back
        return there(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None
