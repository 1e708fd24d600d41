"""MNIST and CIFAR: what `download.py` reads is converted once into memory-mapped arrays and a manifest.

MNIST: 70,000 handwritten digits of 28×28 pixels (LeCun, Cortes, Burges). CIFAR-10 and CIFAR-100: 60,000 colour images
of 32×32 pixels each (Krizhevsky, 2009). Only `parallelbench prepare` loads torchvision, for `PreparedData.source`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from parallelbench.config.components import Arrays, Data
from parallelbench.config.sites import prepare_line
from parallelbench.data.content import OwnContent, file_digest, own_content
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


MANIFEST = "dataset.json"
"""File of a prepared folder: what its arrays held when they were written, and the files that they were made from."""


class PreparedData(Data, frozen=True, kw_only=True):
    """A data set that `parallelbench prepare` converts into `data_dir/<folder>`; a run only opens it."""

    made_by_prepare: ClassVar[bool] = True
    published: ClassVar[str]
    """Name of torchvision's class."""
    folder: ClassVar[str]
    """Folder below `data_dir`; shared by all options of a data set."""
    published_train_samples: ClassVar[int]
    """Training images in the published files."""
    published_test_samples: ClassVar[int]
    """Test images in them."""

    files: str | None = None
    """Arrays of your own: for `prepare` an .npz file, for a run the name that `prepare` prints, which has their content
    and sizes; null: the published files."""

    @property
    def own(self) -> OwnContent | None:
        """What `files` names; None: the published files. `ConfigError` for a path, which only `prepare` takes."""
        return own_content(self, "files", sizes=2, of="an .npz file")

    @property
    def stored_train_samples(self) -> int:
        """Training images on disk."""
        return self.own.sizes[0] if self.own else self.published_train_samples

    @property
    def train_samples(self) -> int:
        return self.stored_train_samples

    @property
    def test_samples(self) -> int:
        return self.own.sizes[1] if self.own else self.published_test_samples

    def source(self) -> Any:
        """torchvision's class, which downloads, verifies and reads the published files."""
        from torchvision import datasets

        return getattr(datasets, self.published)

    def layout(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every array, by name."""
        train, test = self.stored_train_samples, self.test_samples
        return {
            "train_images": ((train, *self.shape), "uint8"),
            "train_labels": ((train,), "int64"),
            "test_images": ((test, *self.shape), "uint8"),
            "test_labels": ((test,), "int64"),
        }

    def prepared_dir(self, data_dir: Path) -> Path:
        """The folder of the arrays; `~` is expanded."""
        return Path(data_dir).expanduser() / (f"{self.folder}-{self.own.name}" if self.own else self.folder)

    @property
    def prepare_options(self) -> tuple[str, ...]:
        """Arrays of one's own are prepared from a file that no run knows."""
        return ("data.files=FILE.npz",) if self.files else ()

    def missing_files(self, data_dir: Path) -> list[Path]:
        folder = self.prepared_dir(data_dir)
        names = [*(f"{name}.npy" for name in self.layout()), MANIFEST]
        return [folder / name for name in names if not (folder / name).is_file()]

    def fingerprint(self, data_dir: Path) -> str:
        """sha256 of what the arrays' files hold, which are read; `ConfigError` where it is not what a name says."""
        folder = self.prepared_dir(data_dir)
        found = fingerprint_of(file_digest(folder / f"{name}.npy") for name in self.layout())
        if self.own and not found.startswith(self.own.digits):
            raise ConfigError(f"{folder} holds {found[:12]}, another content than its name says: delete the folder")
        return found

    def load(self, data_dir: Path) -> Arrays:
        """Memory-map the arrays; shapes and dtypes are checked, contents are not read.

        Raises `ConfigError` with the `prepare` line where files are missing or hold something else.
        """
        self.require_files(data_dir)
        return Arrays(**{name: self._opened(name, data_dir) for name in self.layout()})

    def _opened(self, name: str, data_dir: Path) -> NDArray[Any]:
        import numpy as np

        path, (shape, dtype) = self.prepared_dir(data_dir) / f"{name}.npy", self.layout()[name]
        try:
            array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(f"it holds {array.dtype} {array.shape}, not {dtype} {shape}")
        except (ValueError, EOFError, TokenError) as error:
            again = prepare_line(self.name, data_dir, *self.prepare_options)
            raise ConfigError(f"{path} is damaged ({error}): run `{again}` again, which replaces it") from None
        return array


def fingerprint_of(arrays_sha256: Iterable[str]) -> str:
    """sha256 of what the arrays hold, from that of each, in the order of `PreparedData.layout`."""
    return hashlib.sha256(" ".join(arrays_sha256).encode()).hexdigest()


class Mnist(PreparedData, frozen=True, kw_only=True):
    """MNIST, once or joined to copies of itself: an epoch has 60,000, 240,000 or 480,000 samples.

    Copies are how Ramkeesoon's report varies the size of the training set. They are not stored: the loader
    takes sample numbers modulo 60,000. The test set is never copied.
    """

    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)
    flip: ClassVar[bool] = False
    published: ClassVar[str] = "MNIST"
    folder: ClassVar[str] = "mnist"
    shape: ClassVar[tuple[int, ...]] = (1, 28, 28)
    num_classes: ClassVar[int] = 10
    published_train_samples: ClassVar[int] = 60_000
    published_test_samples: ClassVar[int] = 10_000

    copies: Literal[1, 4, 8]
    """How often the training set is repeated within one epoch."""

    @property
    def train_samples(self) -> int:
        return self.copies * self.stored_train_samples


class Cifar(PreparedData, frozen=True, kw_only=True):
    """What CIFAR-10 and CIFAR-100 share."""

    flip: ClassVar[bool] = True
    published_train_samples: ClassVar[int] = 50_000
    published_test_samples: ClassVar[int] = 10_000
    shape: ClassVar[tuple[int, ...]] = (3, 32, 32)


class Cifar10(Cifar, frozen=True, kw_only=True):
    """CIFAR-10: ten classes."""

    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)
    published: ClassVar[str] = "CIFAR10"
    folder: ClassVar[str] = "cifar10"
    num_classes: ClassVar[int] = 10


class Cifar100(Cifar, frozen=True, kw_only=True):
    """CIFAR-100 with its 100 fine labels."""

    mean: ClassVar[tuple[float, ...]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, ...]] = (0.2673, 0.2564, 0.2762)
    published: ClassVar[str] = "CIFAR100"
    folder: ClassVar[str] = "cifar100"
    num_classes: ClassVar[int] = 100
