"""Training and evaluation of one step in plain PyTorch on one device, from a state that is given.

It shares no code with the strategies and their replicas, so it can judge them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from parallelbench.world.numerics import dtype_of, in_arithmetic, wide

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from parallelbench.spec.batch import Batch
    from parallelbench.spec.mean_loss import MeanLoss

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precisions whose forward passes are autocast."""


class PlainStep(NamedTuple):
    """What one step from a given state must leave."""

    loss: float
    """Mean over the global batch."""
    gradients: dict[str, Tensor]
    """On the CPU, in fp64, real and imaginary parts beside each other."""
    buffers: dict[str, Tensor]
    """After the step, as the first data shard has them; likewise. Counters are left out."""


class PlainModel:
    """The run's model on one device.

    `pieces`: slices of a global batch that are computed one after the other, each by its own batch statistics.
    """

    def __init__(self, model: nn.Module, loss: MeanLoss, *, device: torch.device, pieces: int) -> None:
        self._model, self._mean_loss, self._device, self._pieces = model, loss, device, pieces

    def step(self, state: Mapping[str, Tensor], batch: Batch, *, precision: str, scale: float = 1.0) -> PlainStep:
        """Loss and gradients of a global batch at `state`; nothing is updated but buffers.

        `scale`: factor of the loss in backward, which gradients are divided by afterwards (fp16).
        """
        model = self._at(state, precision)
        model.train()
        model.zero_grad(set_to_none=True)
        images, labels = self._inputs(batch, precision)
        loss_sum, buffers = 0.0, dict[str, Tensor]()
        for piece, targets in zip(images.chunk(self._pieces), labels.chunk(self._pieces), strict=True):
            self._load(model, state, buffers_only=True)
            loss = self._mean_loss(_logits(model, piece, precision), targets) * len(targets)
            (loss * (scale / len(labels))).backward()
            loss_sum += loss.item()
            buffers = buffers or {
                name: _wide(each)
                for name, each in model.named_buffers()
                if each.is_floating_point() or each.is_complex()
            }
        gradients = {name: _wide(p.grad) / scale for name, p in model.named_parameters() if p.grad is not None}
        return PlainStep(loss_sum / len(labels), gradients, buffers)

    @torch.no_grad()
    def evaluate(self, state: Mapping[str, Tensor], batches: Iterable[Batch], *, precision: str) -> tuple[float, float]:
        """Mean loss over these batches at `state`, and the share of correct predictions."""
        model = self._at(state, precision)
        model.eval()
        loss_sum, correct, samples, predictions = 0.0, 0, 0, 0
        for batch in batches:
            images, labels = self._inputs(batch, precision)
            logits = _logits(model, images, precision)
            if not len(labels):
                continue
            loss_sum += self._mean_loss(logits, labels).item() * len(labels)
            correct += int((logits.argmax(dim=-1) == labels).sum().item())
            samples += len(labels)
            predictions += labels.numel()
        return loss_sum / samples, correct / predictions

    def _at(self, state: Mapping[str, Tensor], precision: str) -> nn.Module:
        model = in_arithmetic(self._model, dtype_of(precision), self._device)
        self._load(model, state)
        return model

    @torch.no_grad()
    def _load(self, model: nn.Module, state: Mapping[str, Tensor], *, buffers_only: bool = False) -> None:
        own = dict(model.named_buffers()) if buffers_only else model.state_dict()
        for name in own.keys() & state.keys():  # a buffer that is not persistent is in no state
            own[name].copy_(state[name])

    def _inputs(self, batch: Batch, precision: str) -> tuple[Tensor, Tensor]:
        assert batch.images is not None
        assert batch.labels is not None
        dtype = dtype_of(precision)
        kept = batch.images.dtype if not batch.images.is_floating_point() else dtype  # tokens are whole numbers
        # Copies: a model may change them in place, and a batch is computed in two formats.
        return batch.images.to(self._device, kept, copy=True), batch.labels.to(self._device, copy=True)


def _logits(model: nn.Module, images: Tensor, precision: str) -> Tensor:
    """Logits, in fp64 or fp32."""
    if precision not in HALF:
        return model(images)  # type: ignore[no-any-return]
    with torch.autocast(images.device.type, dtype=HALF[precision]):
        return model(images).to(torch.float32)  # type: ignore[no-any-return]


def _wide(tensor: Tensor) -> Tensor:
    return wide(tensor.detach().to("cpu", copy=True))
