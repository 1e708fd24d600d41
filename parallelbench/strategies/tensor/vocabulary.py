"""Embedding, head and cross entropy divided by vocabulary over tensor ranks; none has all logits of a token.

Shoeybi et al. 2019, arXiv 1909.08053, §3.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

from parallelbench.optim.losses import CrossEntropy
from parallelbench.strategies.autograd import exchanged
from parallelbench.strategies.state import local
from parallelbench.strategies.tensor import divides_vocabulary

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from parallelbench.config.run import RunConfig


class DividedEmbedding(nn.Embedding):
    """This rank's rows of an embedding, in place of the whole one; it looks up tokens of the whole vocabulary."""

    _mesh: DeviceMesh

    def __init__(self, whole: nn.Embedding, mesh: DeviceMesh) -> None:
        rows = distribute_tensor(whole.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        super().__init__(whole.num_embeddings, whole.embedding_dim, _weight=rows)
        self._mesh = mesh

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up the tokens that are here, take zeros for the others, and add up over the ranks."""
        rows = local(self.weight)
        here, elsewhere = _own(tokens, len(rows), self._mesh)
        values = F.embedding(here, rows).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        # Backward each rank has the gradient already (Megatron-LM's g).
        return exchanged(values, there=lambda own: _reduced(own, "sum", self._mesh), back=lambda gradient: gradient)


class DividedHead(nn.Linear):
    """This rank's rows of a head without bias, in place of the whole one: it gives this rank's part of the logits."""

    _mesh: DeviceMesh
    _sums_gradient: bool

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh, *, sums_gradient: bool) -> None:
        """`sums_gradient`: add the ranks' gradients of the input up; else who made the input does."""
        assert whole.bias is None
        super().__init__(whole.in_features, whole.out_features, bias=False, device="meta")
        self._mesh, self._sums_gradient = mesh, sums_gradient
        rows = distribute_tensor(whole.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        self.weight = nn.Parameter(rows)

    def forward(self, values: Tensor) -> Tensor:
        """(…, width) → (…, vocabulary ÷ ranks)."""
        if self._sums_gradient:  # Megatron-LM's f
            summed = lambda gradient: _reduced(gradient, "sum", self._mesh)  # noqa: E731
            values = exchanged(values, there=lambda own: own.view_as(own), back=summed)
        return F.linear(values, local(self.weight))


def _own(tokens: Tensor, width: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Tokens as indices of this rank's part of the vocabulary, and which of them are in another rank's part."""
    own = tokens - mesh.get_local_rank() * width
    return own.clamp(0, width - 1), (own < 0) | (own >= width)


class DividedCrossEntropy:
    """The mean cross entropy of logits of which each rank has those of its part of the vocabulary."""

    def __init__(self, mesh: DeviceMesh, *, label_smoothing: float) -> None:
        self.mesh, self.smoothing = mesh, label_smoothing
        self.correct_from_parts: Tensor | None = None
        """Of the last batch: whether the label's logit is the first of the greatest, for every label."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(…, vocabulary ÷ ranks), (…) → (); the same on every rank, which all must call it with the same labels."""
        result: tuple[Tensor, Tensor] = _MeanCrossEntropy.apply(logits, labels, self)
        loss, self.correct_from_parts = result
        return loss


class _MeanCrossEntropy(torch.autograd.Function):
    """Sends two messages: each label's greatest logit; then sums of exponentials, the label's logit, who was first."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, of: DividedCrossEntropy) -> tuple[Tensor, Tensor]:
        mesh, smoothing, width = of.mesh, of.smoothing, logits.shape[-1]
        index, elsewhere = _own(labels, width, mesh)
        best, place = logits.max(dim=-1)
        greatest = _reduced(best, "max", mesh)
        exponentials = (logits - greatest.unsqueeze(-1)).exp_()
        at_label = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        # Of equal logits the first is the prediction, as argmax has it: one here before the label takes it from it.
        before = (best == greatest) & (place < labels - mesh.get_local_rank() * width)
        parts = [exponentials.sum(-1), at_label, before.to(logits.dtype)]
        if smoothing:
            parts.append(logits.sum(-1))
        total, at_label, before, *summed = _reduced(torch.stack(parts), "sum", mesh).unbind()
        losses = total.log() + greatest - (1 - smoothing) * at_label
        if smoothing:
            losses -= smoothing / (width * mesh.size()) * summed[0]
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), index, elsewhere)
        ctx.smoothing, ctx.classes = smoothing, width * mesh.size()
        correct = (at_label == greatest) & (before == 0)
        ctx.mark_non_differentiable(correct)
        return losses.mean(), correct

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        """Softmax minus the target, of this rank's part of the vocabulary; sends nothing."""
        probabilities, index, elsewhere = ctx.saved_tensors
        share = gradient / index.numel()
        result = probabilities * share
        if ctx.smoothing:
            result -= ctx.smoothing / ctx.classes * share
        target = (1 - ctx.smoothing) * share * (~elsewhere).to(result.dtype)
        return result.scatter_add_(-1, index.unsqueeze(-1), -target.unsqueeze(-1)), None, None


def _reduced(values: Tensor, how: str, mesh: DeviceMesh) -> Tensor:
    reduced: Tensor = collectives.wait_tensor(collectives.all_reduce(values, how, mesh.get_group()))
    return reduced


def divided_loss(run: RunConfig, mesh: DeviceMesh | None) -> DividedCrossEntropy | None:
    """The loss of tensor ranks that divide the vocabulary; None: each has all logits."""
    if mesh is None or not divides_vocabulary(run):
        return None
    assert isinstance(run.loss, CrossEntropy), "checked"
    return DividedCrossEntropy(mesh, label_smoothing=run.loss.label_smoothing)


def loss_bytes(run: RunConfig, *, samples: int) -> int:
    """Bytes that tensor ranks all-reduce for the loss of so many samples."""
    if not divides_vocabulary(run):
        return 0
    assert isinstance(run.loss, CrossEntropy), "checked"
    values = 5 if run.loss.label_smoothing else 4
    return values * samples * prod(run.data.label_shape) * (8 if run.precision == "fp64" else 4)


def divide(whole: nn.Module, mesh: DeviceMesh, *, sums_gradient: bool) -> nn.Module:
    """What takes the place of an embedding or a head."""
    if isinstance(whole, nn.Embedding):
        return DividedEmbedding(whole, mesh)
    assert isinstance(whole, nn.Linear), "planned"
    return DividedHead(whole, mesh, sums_gradient=sums_gradient)


Ties = list[tuple[str, str]]
"""Pairs of names of one parameter."""


def ties_of(model: nn.Module) -> Ties:
    """Parameters that have several names; a module that is divided gets others, so their names are kept."""
    first: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return [(first[each], name) for name, each in named if first.setdefault(each, name) != name]


def tie_again(model: nn.Module, ties: Ties) -> None:
    """Give second names the parameters of the first ones."""
    for first, second in ties:
        path, _, leaf = second.rpartition(".")
        setattr(model.get_submodule(path), leaf, model.get_parameter(first))
