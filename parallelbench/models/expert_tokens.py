"""How many tokens the experts of each block have had in training, kept where they were counted."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey

if TYPE_CHECKING:
    from torch import Tensor, nn

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
