"""What a data set is: options, sizes that are known before anything is read, and arrays."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from parallelbench.spec.structure import Component

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Arrays:
    """The stored images and labels of a data set.

    Images are uint8 of shape (n, channels, height, width), labels int64 of shape (n,); either may be a memory
    map.
    """

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]


class Data(Component, frozen=True, kw_only=True):
    """A data set's options and sizes. Nothing here loads torch."""

    mean: ClassVar[tuple[float, ...]]
    """Mean of the training images, on a scale from 0 to 1: one per channel, or one for all channels."""
    std: ClassVar[tuple[float, ...]]
    """Standard deviation of the training images, like `mean`."""
    flip: ClassVar[bool]
    """Whether an image means the same when it is flipped horizontally: a cat does, a digit doesn't."""

    augment: bool
    """Shift training images by up to `image_size // 8` pixels; flip half of them where `flip` allows it."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image; height equals width."""

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of labels: 0 … num_classes − 1."""

    @property
    @abstractmethod
    def train_samples(self) -> int:
        """Training samples in one epoch (copies of an image count each)."""

    @property
    @abstractmethod
    def test_samples(self) -> int:
        """Test samples; each is evaluated exactly once."""

    @property
    def stored_train_samples(self) -> int:
        """Training images that `load` returns; of `train_samples`, a whole part: an epoch may take each repeatedly."""
        return self.train_samples

    @abstractmethod
    def missing_files(self, data_dir: Path) -> list[Path]:
        """Prepared files that are missing; empty: ready to load."""

    @property
    def prepare_options(self) -> tuple[str, ...]:
        """What `parallelbench prepare data=NAME` needs besides the name, for these arrays."""
        return ()

    def fingerprint(self, data_dir: Path) -> str | None:
        """Hexadecimal digits that identify the arrays without reading them; None: they can't be identified so."""
        return None

    def stored_files(self, data_dir: Path) -> dict[Path, str]:
        """The files that hold the arrays → the sha256 that `fingerprint` says they have; empty: it needs no file."""
        return {}

    @abstractmethod
    def load(self, data_dir: Path) -> Arrays:
        """Open the arrays, never downloading; `ConfigError` with the `prepare` line where any are missing."""
