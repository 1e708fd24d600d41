"""Which linear layers of a built model its tensor plan means."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parallelbench.spec.model import Split


def planned(model: nn.Module, plan: Mapping[str, Split]) -> dict[str, Split]:
    """The plan with every `*` replaced by the matching names; `assert`s that all of them are linear layers."""
    splits: dict[str, Split] = {}
    for name, module in model.named_modules():
        for pattern, split in plan.items():
            if name.count(".") == pattern.count(".") and fnmatchcase(name, pattern):
                assert isinstance(module, nn.Linear), f"{name} is no linear layer"
                splits[name] = split
    return splits
