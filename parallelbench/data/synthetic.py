"""Made-up images of any size and shape: a pattern per class and noise over it, from a seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from parallelbench.config.components import Arrays, Data
from parallelbench.data.content import fingerprint_of

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

GENERATOR = "synthetic-1"
"""Names how images are made: options and this give the same bytes on every machine."""
CELLS = 4
"""A pattern is a grid of 4×4 cells of one colour each, so that pooling doesn't destroy it."""
CHUNK_BYTES = 1 << 22
"""Noise is made in pieces of this size, which stay in the cache."""


class Synthetic(Data, frozen=True, kw_only=True):
    """Learnable images: a random pattern per class, blended with noise that differs for every image.

    Labels are balanced (sample i has label i modulo `num_classes`). All randomness is the raw bit stream of
    PCG64, which NumPy keeps stable over its versions; there is no rounding that could differ between
    machines. The test set has the same patterns and other noise.
    """

    mean: ClassVar[tuple[float, ...]] = (0.5,)
    std: ClassVar[tuple[float, ...]] = (0.25,)
    flip: ClassVar[bool] = False

    channels: Annotated[int, Meta(ge=1, le=64)]
    """Channels of an image."""
    image_size: Annotated[int, Meta(ge=4, le=1024)]
    """Height and width in pixels."""
    num_classes: Annotated[int, Meta(ge=2, le=10_000)]
    """Number of labels."""
    train_samples: Annotated[int, Meta(ge=1, le=10_000_000)]
    """Training samples in one epoch."""
    test_samples: Annotated[int, Meta(ge=1, le=10_000_000)]
    """Test samples."""
    noise: Annotated[float, Meta(ge=0, le=1)]
    """Share of noise in every pixel; 0: patterns only, 1: noise only."""
    data_seed: Annotated[int, Meta(ge=0, lt=2**31)]
    """Seed of patterns and noise, apart from the run's seed: repeats see the same images."""

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.image_size, self.image_size

    @property
    def loaded_bytes(self) -> int:
        return self.stored_bytes

    def fingerprint(self, data_dir: Path) -> str:
        """sha256 of the options and of GENERATOR, which must change with the images."""
        return fingerprint_of(self, GENERATOR)

    def load(self, data_dir: Path) -> Arrays:
        """Make the arrays, at several hundred megabytes per second."""
        import numpy as np

        patterns = self._patterns()
        train_labels = np.arange(self.train_samples, dtype=np.int64) % self.num_classes
        test_labels = np.arange(self.test_samples, dtype=np.int64) % self.num_classes
        return Arrays(
            train_images=self._images(patterns, labels=train_labels, stream=1),
            train_labels=train_labels,
            test_images=self._images(patterns, labels=test_labels, stream=2),
            test_labels=test_labels,
        )

    def _patterns(self) -> NDArray[np.uint8]:
        import numpy as np

        shape = (self.num_classes, self.channels, CELLS, CELLS)
        cells = _bits(np.random.PCG64([self.data_seed, 0]), int(np.prod(shape))).reshape(shape)
        cell_of = np.arange(self.image_size) * CELLS // self.image_size
        return cells[:, :, cell_of[:, np.newaxis], cell_of]

    def _images(self, patterns: NDArray[np.uint8], *, labels: NDArray[np.int64], stream: int) -> NDArray[np.uint8]:
        """Blend in 1/256ths: (256 − a)·pattern + a·noise, rounded down; never above 255."""
        import numpy as np

        share = round(self.noise * 256)
        images = np.empty((len(labels), *self.shape), dtype=np.uint8)
        source = np.random.PCG64([self.data_seed, stream])
        shaded = patterns.astype(np.uint16) * np.uint16(256 - share)
        step = max(1, CHUNK_BYTES // images[0].size)
        for start in range(0, len(labels), step):
            chunk = images[start : start + step]
            blend = _bits(source, chunk.size).reshape(chunk.shape).astype(np.uint16)
            blend *= np.uint16(share)
            blend += shaded[labels[start : start + step]]
            blend >>= 8
            chunk[...] = blend
        return images


def _bits(source: np.random.PCG64, count: int) -> NDArray[np.uint8]:
    """The next `count` bytes of a bit stream, little-endian."""
    return source.random_raw(-(-count // 8)).astype("<u8").view("u1")[:count]
