"""Precision: which arithmetic forward and backward use, and what the optimizer's update needs because of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

UNIT_ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Largest relative error of rounding to the format that products are computed in (IEEE 754; 8 bits in bf16)."""
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Numerics:
    """The arithmetic of one replica.

    Parameters and the loss are float64 under fp64, else float32. bf16 and fp16 use `torch.autocast`; fp16 also scales
    the loss (Micikevicius et al. 2018, arXiv 1710.03740), on the device where the optimizer is fused.
    """

    def __init__(self, precision: str, device_type: str) -> None:
        self.dtype = torch.float64 if precision == "fp64" else torch.float32
        self._device_type = device_type
        self._autocast = _AUTOCAST.get(precision)
        self._scaler = torch.amp.GradScaler(device_type) if precision == "fp16" else None

    def autocast(self) -> AbstractContextManager[object]:
        """The context of a forward pass."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._autocast)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy, in the parameters' dtype."""
        return F.cross_entropy(logits.to(self.dtype), labels)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, undoing the scale of the gradients."""
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)
            self._scaler.update()

    def local_state(self) -> dict[str, Any]:
        """The scale, and when it last changed; empty where there is none."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on with that."""
        if self._scaler is not None:
            self._scaler.load_state_dict(state)


def set_precision(precision: str) -> None:
    """Allow or forbid TF32 in matrix products and convolutions: torch's own defaults allow it in convolutions only."""
    tf32 = precision == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def sums(loss: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Summed loss and number of correct predictions of a batch: float64 of shape (2,), on the device."""
    if labels.shape[0] == 0:  # a shard may own none of the last test samples; their mean loss is no number
        return torch.zeros(2, dtype=torch.float64, device=logits.device)
    correct = (logits.detach().argmax(dim=1) == labels).sum()
    return torch.stack([loss.detach().double() * labels.shape[0], correct.double()])
