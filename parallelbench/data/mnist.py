"""MNIST: 70,000 handwritten digits of 28×28 pixels (LeCun, Cortes, Burges)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from parallelbench.config.components import Arrays
from parallelbench.data.prepared import PreparedData, RawFile

if TYPE_CHECKING:
    from pathlib import Path

MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
"""As in torchvision.datasets.MNIST."""
DIMENSIONS = (3, 1, 3, 1)
"""Of the four files: images, labels, and again."""


def _raw(name: str, md5: str) -> RawFile:
    return RawFile(f"MNIST/raw/{name}", md5, tuple(mirror + name for mirror in MIRRORS))


class Mnist(PreparedData, frozen=True, kw_only=True):
    """MNIST, once or joined to copies of itself: an epoch has 60,000, 240,000 or 480,000 samples.

    Copies are how Ramkeesoon's report varies the size of the training set. They are not stored: the loader
    takes sample numbers modulo 60,000. The test set is never copied.
    """

    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)
    flip: ClassVar[bool] = False
    folder: ClassVar[str] = "mnist"
    published_train_samples: ClassVar[int] = 60_000
    published_test_samples: ClassVar[int] = 10_000
    raw_files: ClassVar[tuple[RawFile, ...]] = (
        _raw("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        _raw("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
        _raw("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
        _raw("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
    )

    copies: Literal[1, 4, 8]
    """How often the training set is repeated within one epoch."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return 1, 28, 28

    @property
    def num_classes(self) -> int:
        """Ten digits."""
        return 10

    @property
    def train_samples(self) -> int:
        """Training samples in one epoch: copies count each."""
        return self.copies * self.stored_train_samples

    def parse(self, raw_dir: Path) -> Arrays:
        """Read the four IDX files."""
        import numpy as np

        from parallelbench.data.formats import read_idx

        train_images, train_labels, test_images, test_labels = (
            read_idx(path, dimensions=dimensions)
            for path, dimensions in zip(self.raw_paths(raw_dir), DIMENSIONS, strict=True)
        )
        return Arrays(
            train_images=train_images[:, np.newaxis],
            train_labels=train_labels.astype(np.int64),
            test_images=test_images[:, np.newaxis],
            test_labels=test_labels.astype(np.int64),
        )

    def parse_alone(self, path: Path, index: int) -> None:
        """Read an IDX file of images or labels."""
        from parallelbench.data.formats import read_idx

        read_idx(path, dimensions=DIMENSIONS[index])
