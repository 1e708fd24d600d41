"""What a rank reads: its shard of every global batch. Nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """The part of every global batch that a rank reads: slice `index` of `count` equal slices."""

    index: int = 0
    count: int = 1
    images: bool = True
    """False where this rank uses no images (a later stage)."""
    labels: bool = True
    """False where this rank uses no labels (an earlier stage)."""


@dataclass(slots=True)
class Batch:
    """This rank's slice of a global batch."""

    images: Tensor | None
    """Normalised, shape (size, channels, height, width); None where the rank uses no images."""
    labels: Tensor | None
    """int64, shape (size,); None where the rank uses no labels."""
    size: int
    """Samples in the slice."""


class LoaderArgs(TypedDict):
    """What every loader needs to make a rank's batches."""

    device: torch.device | str
    dtype: torch.dtype
    """dtype of the images."""
    seed: int
    """Determines permutation and augmentation, together with the epoch."""
    global_batch_size: int
    shard: Shard
    channels_last: bool
    steps_per_epoch: int
