"""Transforms of images before the model: padding, cutting out windows, mirroring, normalising."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from parallelbench.spec.dataset import Data


class Normalise:
    """(x / 255 − mean) / std as scale·x + shift: one kernel from uint8 to float, and one more to a half type.

    Half types are computed in float32, since a scale rounded to 8 bits would shift every image.
    """

    def __init__(
        self, data: Data, *, device: torch.device | str, dtype: torch.dtype, channels_last: bool, padding: int = 0
    ) -> None:
        """For images stored in the layout of `laid_out`, with a border of `padding` pixels."""
        self.device, self.dtype, self.channels_last = device, dtype, channels_last
        wide = dtype if dtype == torch.float64 else torch.float32
        channels, height, width = data.shape[0], data.shape[1] + 2 * padding, data.shape[2] + 2 * padding
        shape = (height, width, channels) if channels_last else (channels, height, width)
        per_channel = (1, 1, -1) if channels_last else (-1, 1, 1)
        std = torch.tensor(data.std, dtype=torch.float64).view(per_channel)
        mean = torch.tensor(data.mean, dtype=torch.float64).view(per_channel)
        # One value per element of an image: on a CPU five times as fast as broadcasting three of them
        # channels last.
        self.scale = (1 / (255 * std)).expand(shape).to(device, wide).contiguous()
        self.shift = (-mean / std).expand(shape).to(device, wide).contiguous()

    def __call__(self, images: Tensor) -> Tensor:
        """From uint8 in the stored layout to (n, channels, height, width) in `dtype`."""
        return self.finished(self.values(images))

    def values(self, images: Tensor) -> Tensor:
        """From uint8, one image or several, to floats in the same layout; the same bits either way."""
        return torch.addcmul(self.shift, images, self.scale)

    def finished(self, values: Tensor) -> Tensor:
        """From floats in the stored layout to (n, channels, height, width) in `dtype`."""
        result = values if values.dtype == self.dtype else values.to(self.dtype)
        return result.permute(0, 3, 1, 2) if self.channels_last else result


def laid_out(images: Tensor, *, padding: int, channels_last: bool) -> Tensor:
    """(n, channels, height, width) with a border of zeros, as it is or channels last; contiguous."""
    if padding:
        images = F.pad(images, (padding,) * 4)
    if channels_last:
        images = images.permute(0, 2, 3, 1)
    return images.contiguous()


class Windows:
    """Crops of padded images, smaller by the padding on each side; a batch of crops is one gather."""

    def __init__(self, stored: Tensor, *, padding: int, channels_last: bool) -> None:
        """`stored`: what `laid_out` returns, of any dtype."""
        self._stored, self._channels_last = stored, channels_last
        self._width_axis = -2 if channels_last else -1
        shape = list(stored.shape[1:])
        for axis in (0, 1) if channels_last else (1, 2):
            shape[axis] -= 2 * padding
        # Every place of the padded pixels as the first element of an image: overlapping views, no copies.
        # Gathering rows of this tensor crops, in the one kernel that picks the images anyway.
        strides = stored.stride()[1:]
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        self._windows = stored.as_strided((stored.numel() - extent + 1, *shape), (1, *strides))

    def starts(self, samples: Tensor, *, down: Tensor, right: Tensor) -> Tensor:
        """First elements of the windows `down` and `right` of the padded images' upper left corners."""
        per_image = self._stored.stride(0)
        per_row, per_column = self._stored.stride()[1:3] if self._channels_last else self._stored.stride()[2:4]
        return samples * per_image + down * per_row + right * per_column

    def at(self, starts: Tensor, flip: Tensor | None) -> Tensor:
        """The windows at `starts`, those with a 1 in `flip` (uint8, (n, 1, 1, 1)) mirrored."""
        images = self._windows.index_select(0, starts)
        if flip is None:
            return images
        mirrored = images.flip(self._width_axis)
        if images.is_floating_point():
            return torch.where(flip.bool(), mirrored, images)
        # x ^ ((x ^ mirrored) · flip): on a CPU five times as fast as torch.where.
        return images.bitwise_xor_(mirrored.bitwise_xor_(images).mul_(flip))
