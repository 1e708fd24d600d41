"""Which linear layers and embeddings of a built model a plan means."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parallelbench.spec.model import Split


def planned(model: nn.Module, plan: Mapping[str, Split]) -> dict[str, Split]:
    """The plan with every `*` replaced by the matching names; `assert`s that all can be cut."""
    splits: dict[str, Split] = {}
    for name, module in model.named_modules():
        for pattern, split in plan.items():
            if name.count(".") == pattern.count(".") and fnmatchcase(name, pattern):
                assert isinstance(module, (nn.Linear, nn.Embedding)), f"{name} is no linear layer"
                splits[name] = split
    return splits
