"""What a rank reads: its shard of every global batch. Nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """Which part of every global batch a rank reads: the `index`-th of `count` equal slices."""

    index: int = 0
    count: int = 1
    images: bool = True
    """False where this rank never looks at images (a later stage)."""
    labels: bool = True
    """False where this rank never looks at labels (an earlier stage)."""


@dataclass(slots=True)
class Batch:
    """This rank's slice of a global batch."""

    images: Tensor | None
    """Normalised, shape (size, channels, height, width); None where the rank never looks at images."""
    labels: Tensor | None
    """int64, shape (size,); None where the rank never looks at labels."""
    size: int
    """Samples in the slice."""


class LoaderArgs(TypedDict):
    """Which batches a rank is fed, and what they are."""

    device: torch.device | str
    dtype: torch.dtype
    """Of the images."""
    seed: int
    """Permutation and augmentation follow from it and the epoch."""
    global_batch_size: int
    shard: Shard
    channels_last: bool
    steps_per_epoch: int
