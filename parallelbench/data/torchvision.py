"""MNIST and CIFAR: what torchvision reads is converted once into memory-mapped arrays and a manifest.

MNIST: 70,000 handwritten digits of 28×28 pixels (LeCun, Cortes, Burges). CIFAR-10 and CIFAR-100: 60,000 colour images
of 32×32 pixels each (Krizhevsky, 2009). Only `parallelbench prepare` loads torchvision, for `PreparedData.source`.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from parallelbench.config.components import Arrays, Data
from parallelbench.config.sites import prepare_line
from parallelbench.data.content import OwnFiles
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


MANIFEST = "dataset.json"
"""Name of the manifest in a prepared folder."""
PREPARED_VERSION = 1
"""Version of the prepared layout."""


class ArrayEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest's entry for one array."""

    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    sha256: str


class DatasetManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a prepared folder, and the files that it was made from."""

    version: int
    dataset: str
    raw_md5: dict[str, str]
    """File → MD5."""
    arrays: dict[str, ArrayEntry]
    """Name of the array → its entry; the file is `<name>.npy`."""


class PreparedData(Data, frozen=True, kw_only=True):
    """A data set that `parallelbench prepare` converts into `data_dir/<folder>`; a run only opens it."""

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
    def own(self) -> OwnFiles | None:
        """What `files` names; None: the published files. Raises `ConfigError` for a path."""
        return None if self.files is None else OwnFiles.named(self.files, self.name)

    @property
    def stored_train_samples(self) -> int:
        """Training images on disk."""
        return self.own.train_samples if self.own else self.published_train_samples

    @property
    def train_samples(self) -> int:
        """Training samples in one epoch."""
        return self.stored_train_samples

    @property
    def test_samples(self) -> int:
        """Test samples; each is evaluated exactly once."""
        return self.own.test_samples if self.own else self.published_test_samples

    @abstractmethod
    def source(self) -> Any:
        """torchvision's class, which downloads, verifies and reads the published files."""

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
    def made_by_prepare(self) -> bool:
        """Always."""
        return True

    @property
    def prepare_options(self) -> tuple[str, ...]:
        """Arrays of one's own are prepared from a file that no run knows."""
        return ("data.files=FILE.npz",) if self.files else ()

    def _again(self, data_dir: Path) -> str:
        return prepare_line(self.name, data_dir, *self.prepare_options)

    def missing_files(self, data_dir: Path) -> list[Path]:
        """Prepared files that are missing; empty: ready to load."""
        folder = self.prepared_dir(data_dir)
        names = [*(f"{name}.npy" for name in self.layout()), MANIFEST]
        return [folder / name for name in names if not (folder / name).is_file()]

    def fingerprint(self, data_dir: Path) -> str:
        """sha256 of the arrays' own, which the manifest has; `ConfigError` where the data set is not prepared."""
        found = fingerprint_of(self.stored_files(data_dir).values())
        if self.own and not found.startswith(self.own.content):
            folder = self.prepared_dir(data_dir)
            raise ConfigError(f"{folder} holds {found[:12]}, another content than its name says: delete the folder")
        return found

    def stored_files(self, data_dir: Path) -> dict[Path, str]:
        """By the manifest; likewise."""
        self._require_files(data_dir)
        folder = self.prepared_dir(data_dir)
        manifest = read_manifest(folder / MANIFEST, fix=self._again(data_dir))
        return {folder / f"{name}.npy": manifest.arrays[name].sha256 for name in self.layout()}

    def load(self, data_dir: Path) -> Arrays:
        """Memory-map the arrays; sizes, shapes and dtypes are checked, contents are not read.

        Raises `ConfigError` with the `prepare` line where files are missing or not what the manifest says.
        """
        self._require_files(data_dir)
        folder = self.prepared_dir(data_dir)
        manifest = read_manifest(folder / MANIFEST, fix=self._again(data_dir))
        return Arrays(
            train_images=self._open(folder, name="train_images", manifest=manifest),
            train_labels=self._open(folder, name="train_labels", manifest=manifest),
            test_images=self._open(folder, name="test_images", manifest=manifest),
            test_labels=self._open(folder, name="test_labels", manifest=manifest),
        )

    def _require_files(self, data_dir: Path) -> None:
        if missing := self.missing_files(data_dir):
            names = ", ".join(path.name for path in missing)
            raise ConfigError(
                f"{self.name} is not prepared: {names} not found in {self.prepared_dir(data_dir)}. "
                f"Run `{self._again(data_dir)}` where there is a network, or choose another site.data_dir"
            )

    def _open(self, folder: Path, *, name: str, manifest: DatasetManifest) -> NDArray[Any]:
        import numpy as np

        path = folder / f"{name}.npy"
        shape, dtype = self.layout()[name]
        entry = manifest.arrays.get(name)
        size = path.stat().st_size
        if entry is None or (entry.shape, entry.dtype, entry.size_bytes) != (shape, dtype, size):
            recorded = f"{entry.dtype} {entry.shape} in {entry.size_bytes} bytes" if entry else "nothing"
            raise self._damaged(path, f"has {size} bytes; expected: {dtype} {shape}; in {MANIFEST}: {recorded}")
        try:
            array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, TokenError) as error:
            raise self._damaged(path, f"can't be read ({error})") from None
        if array.shape != shape or array.dtype != dtype:
            raise self._damaged(path, f"holds {array.dtype} {array.shape}, expected {dtype} {shape}")
        return array

    def _damaged(self, path: Path, problem: str) -> ConfigError:
        return ConfigError(f"{path} {problem}. Run `{self._again(path.parents[1])}` again: it replaces damaged files")


def fingerprint_of(arrays_sha256: Iterable[str]) -> str:
    """sha256 of what the arrays hold, from that of each, in the order of `PreparedData.layout`."""
    return hashlib.sha256(" ".join(arrays_sha256).encode()).hexdigest()


def read_manifest(path: Path, *, fix: str) -> DatasetManifest:
    """Read a manifest; where it is damaged or of another version, `ConfigError` with the line `fix`."""
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=DatasetManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # ValidationError is one
        raise ConfigError(f"{path} can't be read ({error}). Run `{fix}` again: it replaces damaged files") from None
    if manifest.version != PREPARED_VERSION:
        raise ConfigError(
            f"{path} has version {manifest.version}, this release reads {PREPARED_VERSION}. Run `{fix}` again"
        )
    return manifest


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

    def source(self) -> Any:
        """MNIST's."""
        from torchvision.datasets import MNIST

        return MNIST


class Cifar(PreparedData, frozen=True, kw_only=True):
    """What CIFAR-10 and CIFAR-100 share."""

    flip: ClassVar[bool] = True
    published_train_samples: ClassVar[int] = 50_000
    published_test_samples: ClassVar[int] = 10_000

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return 3, 32, 32


class Cifar10(Cifar, frozen=True, kw_only=True):
    """CIFAR-10: ten classes."""

    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)
    folder: ClassVar[str] = "cifar10"

    @property
    def num_classes(self) -> int:
        """Ten kinds of animals and vehicles."""
        return 10

    def source(self) -> Any:
        """CIFAR-10's."""
        from torchvision.datasets import CIFAR10

        return CIFAR10


class Cifar100(Cifar, frozen=True, kw_only=True):
    """CIFAR-100 with its 100 fine labels."""

    mean: ClassVar[tuple[float, ...]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, ...]] = (0.2673, 0.2564, 0.2762)
    folder: ClassVar[str] = "cifar100"

    @property
    def num_classes(self) -> int:
        """The fine labels."""
        return 100

    def source(self) -> Any:
        """CIFAR-100's."""
        from torchvision.datasets import CIFAR100

        return CIFAR100
