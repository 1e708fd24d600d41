"""Which linear layers and embeddings of a built model a plan means."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from parallelbench.config.components import Split


def matching(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Names of modules that any of the patterns means: a `*` is no dot."""
    paths = list(patterns)
    return [
        name
        for name, _ in model.named_modules()
        if any(name.count(".") == path.count(".") and fnmatchcase(name, path) for path in paths)
    ]


def planned(model: nn.Module, plan: Mapping[str, Split]) -> dict[str, Split]:
    """The plan with every `*` replaced by the matching names, in the model's order; `assert`s that all can be cut."""
    found = {name: split for pattern, split in plan.items() for name in matching(model, [pattern])}
    splits = {name: found[name] for name, _ in model.named_modules() if name in found}
    for name in splits:
        assert isinstance(model.get_submodule(name), (nn.Linear, nn.Embedding)), f"{name} is no linear layer"
    return splits
