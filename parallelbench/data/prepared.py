"""Data sets that are downloaded and converted once: memory-mapped arrays and the manifest beside them."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

from parallelbench.data.dataset import Arrays, Data
from parallelbench.errors import ConfigError
from parallelbench.spec.launchers import prepare_line

if TYPE_CHECKING:
    from numpy.typing import NDArray

MANIFEST = "dataset.json"
"""Name of the manifest in a prepared folder."""
PREPARED_VERSION = 1
"""Version of the prepared layout."""


class RawFile(NamedTuple):
    """A file as it is published."""

    path: str
    """Path below `data_dir/raw`, in torchvision's layout, so that existing copies are used."""
    md5: str
    """Its published checksum."""
    urls: tuple[str, ...]
    """Mirrors, tried in this order."""


class ArrayEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest's entry for one array."""

    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    sha256: str


class DatasetManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a prepared folder, and its raw files."""

    version: int
    dataset: str
    raw_md5: dict[str, str]
    """Raw file → MD5."""
    arrays: dict[str, ArrayEntry]
    """Name of the array → its entry; the file is `<name>.npy`."""


class PreparedData(Data, frozen=True, kw_only=True):
    """A data set that `parallelbench prepare` converts into `data_dir/<folder>`; a run only opens it."""

    folder: ClassVar[str]
    """Folder below `data_dir`; shared by all options of a data set."""
    raw_files: ClassVar[tuple[RawFile, ...]]
    """The published files."""
    stored_train_samples: ClassVar[int]
    """Training images on disk."""
    stored_test_samples: ClassVar[int]
    """Test images on disk."""

    @property
    def train_samples(self) -> int:
        """Training samples in one epoch."""
        return self.stored_train_samples

    @property
    def test_samples(self) -> int:
        """Test samples; each is evaluated exactly once."""
        return self.stored_test_samples

    @abstractmethod
    def parse(self, raw_dir: Path) -> Arrays:
        """Read the raw files, whose checksums are right; raises `ConfigError` where they are damaged."""

    def layout(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every array, by name."""
        train, test = self.stored_train_samples, self.stored_test_samples
        return {
            "train_images": ((train, *self.shape), "uint8"),
            "train_labels": ((train,), "int64"),
            "test_images": ((test, *self.shape), "uint8"),
            "test_labels": ((test,), "int64"),
        }

    def prepared_dir(self, data_dir: Path) -> Path:
        """The folder of the arrays; `~` is expanded."""
        return Path(data_dir).expanduser() / self.folder

    def missing_files(self, data_dir: Path) -> list[Path]:
        """Prepared files that are missing; empty: ready to load."""
        folder = self.prepared_dir(data_dir)
        names = [*(f"{name}.npy" for name in self.layout()), MANIFEST]
        return [folder / name for name in names if not (folder / name).is_file()]

    def fingerprint(self, data_dir: Path) -> str:
        """sha256 of the arrays' own, which the manifest has; `ConfigError` where the data set is not prepared."""
        return hashlib.sha256(" ".join(self.files(data_dir).values()).encode()).hexdigest()

    def files(self, data_dir: Path) -> dict[Path, str]:
        """By the manifest; likewise."""
        self._require_files(data_dir)
        folder = self.prepared_dir(data_dir)
        manifest = read_manifest(folder / MANIFEST, fix=prepare_line(self.name, data_dir))
        return {folder / f"{name}.npy": manifest.arrays[name].sha256 for name in self.layout()}

    def load(self, data_dir: Path) -> Arrays:
        """Memory-map the arrays; sizes, shapes and dtypes are checked, contents are not read.

        Raises `ConfigError` with the `prepare` line where files are missing or not what the manifest says.
        """
        self._require_files(data_dir)
        folder = self.prepared_dir(data_dir)
        manifest = read_manifest(folder / MANIFEST, fix=prepare_line(self.name, data_dir))
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
                f"Run `{prepare_line(self.name, data_dir)}` where there is a network, or choose another site.data_dir"
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
        except (ValueError, EOFError) as error:
            raise self._damaged(path, f"can't be read ({error})") from None
        if array.shape != shape or array.dtype != dtype:
            raise self._damaged(path, f"holds {array.dtype} {array.shape}, expected {dtype} {shape}")
        return array

    def _damaged(self, path: Path, problem: str) -> ConfigError:
        return ConfigError(
            f"{path} {problem}. Run `{prepare_line(self.name, path.parents[1])}` again: it replaces damaged files"
        )


def read_manifest(path: Path, *, fix: str) -> DatasetManifest:
    """Read a manifest; where it is damaged or of another version, `ConfigError` with the line `fix`."""
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=DatasetManifest)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise ConfigError(f"{path} can't be read ({error}). Run `{fix}` again: it replaces damaged files") from None
    if manifest.version != PREPARED_VERSION:
        raise ConfigError(
            f"{path} has version {manifest.version}, this release reads {PREPARED_VERSION}. Run `{fix}` again"
        )
    return manifest
