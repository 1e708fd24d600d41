"""Types that several model specifications share, and the checks of image sizes; loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from parallelbench.config.structure import Count
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parallelbench.config.components import Split

Norm = Literal["batch", "sync", "group"]
"""batch: BatchNorm over the samples of one process. sync: over those of all replicas. group: GroupNorm."""
Counts = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=1000)]
"""One or more whole numbers of at least 1, in the order of the layers."""


def halved(image_size: int, *, times: int, model: str) -> int:
    """Return the side of an image after `times` poolings by 2; raises `ConfigError` if nothing is left."""
    needed = 1 << times
    if image_size < needed:
        raise ConfigError(
            f"image_size={image_size} is too small for model={model}, which halves images {times} times: "
            f"choose data with image_size={needed} or more, or model=mlp"
        )
    return image_size // needed


def patches_per_side(image_size: int, *, patch_size: int, model: str) -> int:
    """Return how many patches fit along one side; raises `ConfigError` where they don't fit exactly."""
    if image_size % patch_size:
        valid = [str(size) for size in range(1, image_size + 1) if image_size % size == 0]
        raise ConfigError(
            f"image_size={image_size} of model={model} is no multiple of patch_size={patch_size}: "
            f"choose data of another image_size, or model=vit with a patch_size of {', '.join(valid)}"
        )
    return image_size // patch_size


def dense_plan(names: Sequence[str]) -> dict[str, Split]:
    """Tensor plan of consecutive `Dense` layers: in pairs, by outputs and then by inputs; an odd one stays whole."""
    plan: dict[str, Split] = {}
    for first, second in zip(names[::2], names[1::2], strict=False):
        plan[f"{first}.linear"], plan[f"{second}.linear"] = "column", "row"
    return plan
