"""What a model is given while it is counted: samples without contents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from parallelbench.config.components import Data


def blank(
    data: Data, samples: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> torch.Tensor:
    """Zeros of the shape of so many samples; tokens are int64 whatever `dtype` is."""
    kind = torch.int64 if data.kind == "tokens" else dtype
    return torch.zeros(samples, *data.shape, dtype=kind, device=device)
