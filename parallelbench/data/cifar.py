"""CIFAR-10 and CIFAR-100: 60,000 colour images of 32×32 pixels each (Krizhevsky, 2009).

The *binary* version of both archives is used, which holds the same images in the same order as the Python
version that torchvision downloads, but needs no unpickling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from parallelbench.config.components import Arrays
from parallelbench.data.prepared import PreparedData, RawFile

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = "https://www.cs.toronto.edu/~kriz/"
"""The authors' page; it lists the checksums below."""


class Cifar(PreparedData, frozen=True, kw_only=True):
    """What CIFAR-10 and CIFAR-100 share."""

    flip: ClassVar[bool] = True
    published_train_samples: ClassVar[int] = 50_000
    published_test_samples: ClassVar[int] = 10_000
    train_members: ClassVar[tuple[str, ...]]
    """The archive's files of training images, in order."""
    test_members: ClassVar[tuple[str, ...]]
    """The archive's files of test images."""
    label_bytes: ClassVar[int]
    """Bytes before each image; the last of them is the label."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return 3, 32, 32

    def parse(self, raw_dir: Path) -> Arrays:
        """Read the archive."""
        from parallelbench.data.formats import read_cifar

        (archive,) = self.raw_paths(raw_dir)
        train = read_cifar(archive, members=self.train_members, label_bytes=self.label_bytes)
        test = read_cifar(archive, members=self.test_members, label_bytes=self.label_bytes)
        return Arrays(train_images=train[0], train_labels=train[1], test_images=test[0], test_labels=test[1])

    def parse_alone(self, path: Path, index: int) -> None:
        """Read the one archive that there is."""
        from parallelbench.data.formats import read_cifar

        read_cifar(path, members=[*self.train_members, *self.test_members], label_bytes=self.label_bytes)


class Cifar10(Cifar, frozen=True, kw_only=True):
    """CIFAR-10: ten classes."""

    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)
    folder: ClassVar[str] = "cifar10"
    raw_files: ClassVar[tuple[RawFile, ...]] = (
        RawFile(
            "cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            (SOURCE + "cifar-10-binary.tar.gz",),
        ),
    )
    train_members: ClassVar[tuple[str, ...]] = tuple(
        f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6)
    )
    test_members: ClassVar[tuple[str, ...]] = ("cifar-10-batches-bin/test_batch.bin",)
    label_bytes: ClassVar[int] = 1

    @property
    def num_classes(self) -> int:
        """Ten kinds of animals and vehicles."""
        return 10


class Cifar100(Cifar, frozen=True, kw_only=True):
    """CIFAR-100 with its 100 fine labels."""

    mean: ClassVar[tuple[float, ...]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, ...]] = (0.2673, 0.2564, 0.2762)
    folder: ClassVar[str] = "cifar100"
    raw_files: ClassVar[tuple[RawFile, ...]] = (
        RawFile(
            "cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            (SOURCE + "cifar-100-binary.tar.gz",),
        ),
    )
    train_members: ClassVar[tuple[str, ...]] = ("cifar-100-binary/train.bin",)
    test_members: ClassVar[tuple[str, ...]] = ("cifar-100-binary/test.bin",)
    label_bytes: ClassVar[int] = 2

    @property
    def num_classes(self) -> int:
        """The fine labels."""
        return 100
