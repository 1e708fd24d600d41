"""Precision: which arithmetic forward and backward use, and what the optimizer's update needs because of it."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MetricSums(NamedTuple):
    """What evaluations add up besides loss and correct predictions."""

    size: int
    of: Callable[[Tensor, Tensor], Tensor]
    """The sums over a batch, of shape (size,), from logits and labels."""

    def over(self, logits: Tensor, labels: Tensor) -> Tensor:
        """In float64; zeros over no labels, for which a metric may not be defined."""
        return self.of(logits, labels).double() if len(labels) else logits.new_zeros(self.size, dtype=torch.float64)


class Numerics:
    """The arithmetic of one replica.

    Parameters and the loss are float64 under fp64, else float32. bf16 and fp16 use `torch.autocast`; fp16 also scales
    the loss (Micikevicius et al. 2018, arXiv 1710.03740), on the device where the optimizer is fused.
    """

    def __init__(
        self,
        precision: str,
        device_type: str,
        *,
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
        metric: MetricSums | None = None,
        compiles_loss: bool = False,
    ) -> None:
        """`loss`: the mean over a batch, of logits and labels."""
        self.dtype = dtype_of(precision)
        self._device_type, self._mean_loss, self._metric = device_type, loss, metric
        self._autocast = _AUTOCAST.get(precision)
        self._scaler = torch.amp.GradScaler(device_type, enabled=precision == "fp16")
        self.training_loss: Callable[[Tensor, Tensor], Tensor] = (
            torch.compile(self.loss, dynamic=False) if compiles_loss else self.loss
        )
        """`loss` as training steps compute it: evaluations, whose batches differ in size, compile nothing."""

    def autocast(self) -> AbstractContextManager[object]:
        """The context of a forward pass."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._autocast)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean loss, in the parameters' dtype."""
        return self._mean_loss(logits.to(self.dtype), labels)

    def sums(self, loss: Tensor, logits: Tensor, labels: Tensor) -> Sums:
        """Like `sums`, after this loss of these logits; a loss of parts of the logits knows what was correct.

        Where no gradient is taken, as in evaluations, the metric's sums follow them.
        """
        both = sums(loss, logits, labels, correct=getattr(self._mean_loss, "correct_from_parts", None))
        if self._metric is None or torch.is_grad_enabled():
            return both
        return Sums([], torch.cat([both.tensor(), self._metric.over(logits.to(self.dtype), labels)]))

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale of the loss, before anybody looks at them."""
        self._scaler.unscale_(optimizer)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, undoing the scale of the gradients."""
        self._scaler.step(optimizer)
        self._scaler.update()

    def local_state(self) -> dict[str, Any]:
        """The scale, and when it last changed; empty where there is none."""
        return self._scaler.state_dict()

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on with that."""
        self._scaler.load_state_dict(state)


def dtype_of(precision: str) -> torch.dtype:
    """Of parameters and of the loss."""
    return torch.float64 if precision == "fp64" else torch.float32


def matching(held: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """What a tensor of type `held` has in an arithmetic: whole numbers stay, complex ones are as wide as real ones."""
    return dtype.to_complex() if held.is_complex else dtype if held.is_floating_point else held


def in_arithmetic(module: nn.Module, dtype: torch.dtype, device: torch.device | str | None = None) -> nn.Module:
    """Move a module, in place, to an arithmetic and to a device; `Module.to` would drop imaginary parts."""
    held = (*module.parameters(), *module.buffers())
    there = device is None or all(each.device == torch.device(device) for each in held)
    if there and all(each.dtype == matching(each.dtype, dtype) for each in held):
        return module  # also one without values, which torch can't move
    module._apply(lambda tensor: tensor.to(device, matching(tensor.dtype, dtype)))
    return module


def as_real(tensor: Tensor) -> Tensor:
    """Real and imaginary parts as numbers beside each other; a real tensor as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def wide(tensor: Tensor) -> Tensor:
    """In fp64, real and imaginary parts beside each other."""
    return as_real(tensor.detach()).double()


def set_precision(precision: str) -> None:
    """Allow or forbid TF32 in matrix products and convolutions: torch's own defaults allow it in convolutions only."""
    tf32 = precision == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


class Sums:
    """Summed loss and number of correct predictions of some samples, which are added up when somebody asks for them.

    Adding them up takes a GPU as many launches as a quarter of a small model's step. So sums of many steps are put
    together first (`+=`), and then take a few launches in all.
    """

    def __init__(self, parts: Sequence[_Scored], known: Tensor | None = None, *, samples: int = 0) -> None:
        """`known`: sums of one other part, float64, as `tensor` gives them; a gradient was taken of `samples`."""
        self._parts, self._known = list(parts), [] if known is None else [known]
        self._held_bytes = sum(part.logits.nbytes for part in parts) + (0 if known is None else known.nbytes)
        self._total: Tensor | None = None
        self._losses: list[Tensor] = []
        """Of the parts that `_total` holds, in their order, the summed losses."""
        self._samples = samples

    def __iadd__(self, other: Sums) -> Sums:
        """Add those of other samples; nothing is launched until much waits."""
        if other._losses:
            self.tensor()  # what is added up comes before what waits
            self._losses += other._losses
        if other._total is not None:
            self._total = other._total if self._total is None else self._total + other._total
        self._parts += other._parts
        self._known += other._known
        self._held_bytes += other._held_bytes
        self._samples += other._samples
        if len(self._parts) + len(self._known) >= _MOST_HELD or self._held_bytes > _MOST_HELD_BYTES:
            self.tensor()
        return self

    def tensor(self) -> Tensor:
        """Both sums, and those of a metric: float64 of shape (2 + its size,), on the device."""
        added = [] if self._total is None else [self._total]
        by_size: dict[tuple[int, ...], list[_Scored]] = {}
        for part in self._parts:
            by_size.setdefault(tuple(part.logits.shape), []).append(part)
        found = [_added(parts) for parts in by_size.values()]
        if self._known:
            sums = torch.stack(self._known)
            found.append((sums.sum(0) if len(sums) > 1 else sums[0], sums[:, 0]))
        added += [total for total, _ in found]
        self._samples, self._losses = self.samples, self._losses + [losses for _, losses in found]
        if len(self._losses) >= _MOST_HELD:
            self._losses = [torch.cat(self._losses)]
        self._parts, self._known, self._held_bytes = [], [], 0
        self._total = functools.reduce(torch.add, added)
        return self._total

    @property
    def samples(self) -> int:
        """For how many of these samples a gradient was taken: those whose logits backward has reached until now."""
        return self._samples + sum(part.reached.samples for part in self._parts)

    def losses(self) -> Tensor:
        """The summed loss of each part, in the order in which they were added: float64, on the device."""
        self.tensor()
        return torch.cat(self._losses)

    def tolist(self) -> list[float]:
        """Both sums, on the host."""
        both: list[float] = self.tensor().tolist()
        return both

    def __getitem__(self, index: int) -> Tensor:
        """0: the summed loss; 1: the number of correct predictions."""
        return self.tensor()[index]


_MOST_HELD, _MOST_HELD_BYTES = 64, 2**20
"""Batches whose logits wait for being added up, at most, and their bytes."""
_LARGE_BYTES = _MOST_HELD_BYTES // 16
"""Logits of more are not kept: too few could wait to be worth copying them together."""


class _Reached:
    """Counts the samples whose logits get a gradient. A backward that passes twice (zero bubble) counts once."""

    def __init__(self) -> None:
        self.samples = 0

    def __call__(self, gradient: Tensor) -> None:
        """A hook of the logits."""
        self.samples = gradient.shape[0]


class _Scored(NamedTuple):
    """One batch: its mean loss, detached, and what correct predictions are counted from."""

    loss: Tensor
    logits: Tensor
    """Or, where a rank has a part of them only, whether each label was predicted: bool."""
    labels: Tensor
    reached: _Reached


def sums(loss: Tensor, logits: Tensor, labels: Tensor, *, correct: Tensor | None = None) -> Sums:
    """Summed loss and number of correct predictions of a batch, from its mean loss. Launches nothing for small logits.

    In training it is called before backward, which then counts the samples that a gradient is taken of. `correct`:
    whether each label was predicted, where `logits` are a part of them. Large logits, those of a vocabulary, are not
    kept: those of several micro-batches would be the larger part of a step's memory.
    """
    reached = _Reached()
    if logits.requires_grad:
        logits.register_hook(reached)
    if correct is None and logits.nbytes > _LARGE_BYTES:
        correct = logits.detach().argmax(dim=-1) == labels
    return Sums([_Scored(loss.detach(), logits.detach() if correct is None else correct, labels, reached)])


def _added(parts: Sequence[_Scored]) -> tuple[Tensor, Tensor]:
    """The sums of batches of one size, and the summed loss of each."""
    loss, logits, labels, _ = parts[0]
    size = labels.shape[0]
    if size == 0:  # a shard may own none of the last test samples; their mean loss is no number
        return torch.zeros(2, dtype=torch.float64, device=logits.device), loss.new_zeros(len(parts)).double()
    if len(parts) > 1:
        loss, logits, labels = (
            torch.stack([part.loss for part in parts]),
            torch.cat([part.logits for part in parts]),
            torch.cat([part.labels for part in parts]),
        )
    correct = (logits if logits.dtype == torch.bool else logits.argmax(dim=-1) == labels).sum()
    losses = loss.double().reshape(-1) * size
    return torch.stack([losses.sum() if len(parts) > 1 else losses[0], correct.double()]), losses


_PIECE = 2**18
"""Values that are summed at a time: little memory is needed besides the parameters."""
_WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """A number of 64 bits that depends on all bits of all values of torch's tensors, and on their places."""
    total = torch.tensor(0)
    with torch.no_grad():
        for tensor in filter(torch.numel, tensors):  # a rank may hold no row of a small parameter
            flat = as_real(tensor.detach()).contiguous().view(-1)
            total = total.to(tensor.device)  # one process may drive several devices
            for piece in flat.view(getattr(torch, _WORDS[flat.element_size()])).split(_PIECE):
                # Odd factors lose no bit; sums of integers wrap around, and don't depend on their order.
                factors = torch.arange(1, 2 * len(piece), 2, device=piece.device)
                total = total * 1_000_003 + (piece.to(torch.int64) * factors).sum()
    return int(total)
