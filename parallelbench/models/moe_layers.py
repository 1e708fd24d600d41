"""The layers of transformers with experts, what they leave of losses of their own, and how many tokens experts had."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch.nn import functional as F

from parallelbench.models.gpt_layers import STD, CausalAttention, new_norm

if TYPE_CHECKING:
    from parallelbench.config.components import MeanLoss
    from parallelbench.models.gpt import Gpt
    from parallelbench.models.gpt_layers import Rotary
    from parallelbench.models.moe import GptMoe


class Computing(Protocol):
    """Who computes what was routed."""

    def __call__(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows in the order of their experts, and how many each expert has → results in the same order."""


class Experts(nn.Module):
    """Perceptrons of one shape, stacked: dimension 0 of every parameter is the expert."""

    def __init__(self, options: Gpt, count: int) -> None:
        super().__init__()
        width, hidden = options.width, options.hidden_units
        self.fc1 = nn.Parameter(torch.empty(count, hidden, width).normal_(std=STD))
        self.fc2 = nn.Parameter(torch.empty(count, width, hidden).normal_(std=STD / math.sqrt(2 * options.layers)))
        gate: nn.Parameter | None = None
        biases: list[nn.Parameter | None] = [None, None]
        if options.mlp == "swiglu":
            gate = nn.Parameter(torch.empty(count, hidden, width).normal_(std=STD))
        if options.positions == "learned":
            biases = [nn.Parameter(torch.zeros(count, size)) for size in (hidden, width)]
        self.register_parameter("gate", gate)
        self.register_parameter("bias1", biases[0])
        self.register_parameter("bias2", biases[1])

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """(rows, width) in the order of the experts that are here, of which each has `counts` → the same shape."""
        # Each parameter is taken apart once: the gradient of `weight[i]` would be as large as all experts'.
        stacked: list[Tensor | None] = [self.fc1, self._parameters["bias1"], self._parameters["gate"]]
        stacked += [self.fc2, self._parameters["bias2"]]
        nothing = (None,) * len(counts)
        per_expert = [nothing if each is None else here(each).unbind(0) for each in stacked]
        parts = zip(rows.split(counts), *per_expert, strict=True)
        return torch.cat([_perceptron(*part) for part in parts])


def _perceptron(rows: Tensor, fc1: Tensor, bias1: Tensor | None, gate: Tensor | None, *last: Tensor | None) -> Tensor:
    hidden = F.linear(rows, fc1, bias1)
    hidden = F.gelu(hidden) if gate is None else F.silu(F.linear(rows, gate)) * hidden
    fc2, bias2 = last
    assert fc2 is not None
    return F.linear(hidden, fc2, bias2)


def here(tensor: Tensor) -> Tensor:
    """The part of a tensor that is on this rank: of a `DTensor` its shard, differentiable."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def all_here(experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
    """Compute on this device, which has all experts."""
    result: Tensor = experts(rows, known(counts, total=len(rows)))
    return result


def known(counts: Tensor, *, total: int) -> list[int]:
    """Counts on the host, which waits for the device. Of tensors without values: as equal as can be."""
    if has_no_values(counts):
        size = counts.numel()
        return [total // size + (index < total % size) for index in range(size)]
    values: list[int] = counts.tolist()
    return values


class SharedExpert(nn.Module):
    """A perceptron that computes all tokens."""

    def __init__(self, options: Gpt, hidden: int) -> None:
        super().__init__()
        width, biases = options.width, options.positions == "learned"
        self.fc1 = nn.Linear(width, hidden, bias=biases)
        self.gate = nn.Linear(width, hidden, bias=False) if options.mlp == "swiglu" else None
        self.fc2 = nn.Linear(hidden, width, bias=biases)

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) → the same shape."""
        hidden = F.gelu(self.fc1(x)) if self.gate is None else F.silu(self.gate(x)) * self.fc1(x)
        result: Tensor = self.fc2(hidden)
        return result


class MixtureOfExperts(nn.Module):
    """Each token's most probable experts, with their probabilities as weights; beside them the shared one.

    `compute` is who computes what was routed: strategies that divide the experts among devices replace it.
    """

    def __init__(self, options: GptMoe, *, block: int = 0) -> None:
        super().__init__()
        self.router = nn.Linear(options.width, options.experts, bias=False)
        self.experts = Experts(options, options.experts)
        self.shared = None if options.shared_width is None else SharedExpert(options, options.shared_width)
        self.compute: Computing = all_here
        self.expert_tokens = ExpertTokens(block)
        self._top_k, self._balance = options.top_k, options.balance

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same shape; leaves the balance loss."""
        probabilities = self._probabilities(x)
        chosen, choices = probabilities.topk(self._top_k, dim=-1)
        weights = chosen / chosen.sum(-1, keepdim=True)
        if self._balance and self.training:
            leave(self._balance * unbalance(probabilities, choices).mean())
        y = self._routed(x.flatten(0, 1), choices.flatten(), weights.reshape(-1, 1)).view_as(x)
        return y if self.shared is None else y + self.shared(x)

    def _probabilities(self, x: Tensor) -> Tensor:
        """(batch, tokens, experts), in fp32 or better: roundings would choose other experts (Switch, section 2.4)."""
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            logits: Tensor = self.router(x.to(self.router.weight.dtype))
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)

    def _routed(self, x: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        """(tokens, width), (tokens × top_k) experts and (tokens × top_k, 1) weights → (tokens, width).

        Rows are sorted by expert and back, each once, so that no sum depends on the order of threads.
        """
        order = choices.argsort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = torch.zeros(self.router.out_features, dtype=choices.dtype, device=choices.device)
        counts = counts.scatter_add(0, choices, torch.ones_like(choices))
        if self.training and torch.is_grad_enabled() and not computes_once_more():
            self.expert_tokens.note(counts)
        rows = x.repeat_interleave(self._top_k, dim=0)[order]
        results = self.compute(self.experts, rows, counts)[places]
        return (results * weights).view(len(x), self._top_k, x.shape[-1]).sum(1).to(x.dtype)


def unbalance(probabilities: Tensor, choices: Tensor) -> Tensor:
    """Eq. 4 of Switch Transformer without its coefficient, for each sample: (batch,); 1 where experts are equal.

    `probabilities`: (batch, tokens, experts); `choices`: (batch, tokens, top_k).
    """
    experts = probabilities.shape[-1]
    fallen = torch.zeros_like(probabilities[:, 0]).scatter_add(
        1, choices.flatten(1), torch.ones_like(choices.flatten(1), dtype=probabilities.dtype)
    )
    share = fallen / (choices.shape[1] * choices.shape[2])
    return experts * (share.detach() * probabilities.mean(1)).sum(-1)


class RoutedBlock(nn.Module):
    """Attention and a mixture of experts, each behind a norm and beside a shortcut."""

    def __init__(self, options: GptMoe, rotary: Rotary | None, *, block: int) -> None:
        super().__init__()
        self.norm1, self.attention = new_norm(options), CausalAttention(options, rotary)
        self.norm2, self.moe = new_norm(options), MixtureOfExperts(options, block=block)
        self._is_first = block == 0

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → (batch, tokens, width)."""
        if self._is_first:
            begin(collects=self.training and torch.is_grad_enabled())
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.moe(self.norm2(x))
        return result


class _Left(threading.local):
    """What the layers of the model that this thread last called have left."""

    def __init__(self) -> None:
        self.collects = False
        self.terms: list[Tensor] = []


_left = _Left()


def begin(*, collects: bool) -> None:
    """A forward pass begins: what an earlier one has left is dropped. In evaluations nothing is collected."""
    if not computes_once_more():
        _left.collects, _left.terms = collects, []


def leave(term: Tensor) -> None:
    """Leave a number to be minimised: the mean over the samples of this pass."""
    if _left.collects and not computes_once_more():
        _left.terms.append(term)


def with_own_losses(mean: MeanLoss) -> MeanLoss:
    """A loss to which the terms are added that the forward pass before it has left, each once."""

    def with_terms(logits: Tensor, labels: Tensor) -> Tensor:
        terms, _left.collects, _left.terms = _left.terms, False, []
        return sum(terms, mean(logits, labels))

    return with_terms


def computes_once_more() -> bool:
    """Whether this is within a backward pass, where activation checkpointing calls layers a second time."""
    return torch._C._current_graph_task_id() != -1


_MOST_HELD = 64
"""Counts on a device that wait for being added up."""


class ExpertTokens:
    """One block's: kept on the devices, which nobody waits for, until they are taken."""

    def __init__(self, block: int) -> None:
        self.block = block
        self._held: dict[torch.device, list[Tensor]] = defaultdict(list)
        """By device: threads of one process may each have their own."""

    def note(self, counts: Tensor) -> None:
        """Tokens of each expert in a forward pass, in memory that nobody writes again."""
        if has_no_values(counts):
            return
        held = self._held[counts.device]
        held.append(counts)
        if len(held) == _MOST_HELD:
            held[:] = [torch.stack(held).sum(0)]

    def take(self) -> list[int]:
        """Of the passes since the last call, over all devices, for which it waits; empty where there were none."""
        sums = [torch.stack(held).sum(0).tolist() for held in self._held.values()]
        self._held.clear()
        return [sum(each) for each in zip(*sums, strict=True)]


def take_expert_tokens(module: nn.Module) -> dict[int, list[int]]:
    """Block → tokens of each of its experts, of the blocks in this module that have had any since the last call."""
    found: dict[int, list[int]] = {}
    for each in module.modules():
        kept = getattr(each, "expert_tokens", None)
        if isinstance(kept, ExpertTokens) and (counts := kept.take()):
            found[kept.block] = counts
    return found


def has_no_values(tensor: Tensor) -> bool:
    """Whether it is a shape only, as where the memory or the operations of a model are counted."""
    return tensor.is_meta or _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None
