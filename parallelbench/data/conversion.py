"""From raw files to arrays and a manifest: what `prepare` publishes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from parallelbench.data.own_files import CONTENT_DIGITS, OwnFiles
from parallelbench.data.prepared import MANIFEST, PREPARED_VERSION, ArrayEntry, DatasetManifest
from parallelbench.errors import ConfigError, FormatError
from parallelbench.results.files import sync

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from parallelbench.config.components import Arrays
    from parallelbench.data.prepared import PreparedData


def with_sizes(data: PreparedData, arrays: Arrays, content: str = "0" * CONTENT_DIGITS) -> PreparedData:
    """The data set of files of one's own, by what they hold."""
    own = OwnFiles(content[:CONTENT_DIGITS], len(arrays.train_images), len(arrays.test_images))
    return msgspec.structs.replace(data, files=own.name)


def parsed(data: PreparedData, raw_dir: Path, fix: str) -> Arrays:
    """What the raw files hold; `ConfigError` with the fix where one is damaged or of another data set."""
    try:
        arrays = data.parse(raw_dir)
    except FormatError as error:
        raise ConfigError(f"{error}; {fix}") from None
    _check(with_sizes(data, arrays) if data.files else data, arrays, fix)
    return arrays


def _check(data: PreparedData, arrays: Arrays, fix: str) -> None:
    """Refuse raw files that are intact but of another data set: wrong sizes or labels."""
    for name, (shape, dtype) in data.layout().items():
        array = getattr(arrays, name)
        if array.shape != shape or array.dtype != dtype:
            raise ConfigError(
                f"the raw files of data={data.name} hold {name} {array.dtype} {array.shape}, "
                f"expected {dtype} {shape}: {fix}"
            )
        if name.endswith("labels") and array.size and not 0 <= array.min() <= array.max() < data.num_classes:
            raise ConfigError(
                f"the raw files of data={data.name} hold {name} from {array.min()} to {array.max()}, "
                f"expected 0 … {data.num_classes - 1}: {fix}"
            )


def write(
    data: PreparedData, arrays: Arrays, folder: Path, *, md5: dict[str, str], progress: Callable[[str], None]
) -> list[str]:
    """Write arrays and manifest and flush them; returns the arrays' checksums, taken from what is read back."""
    import numpy as np

    entries = {}
    for name, (shape, dtype) in data.layout().items():
        progress(f"{data.name}: writing {name}.npy")
        path = folder / f"{name}.npy"
        np.save(path, getattr(arrays, name), allow_pickle=False)
        sync(path)
        entries[name] = ArrayEntry(shape=shape, dtype=dtype, size_bytes=path.stat().st_size, sha256=file_digest(path))
    manifest = DatasetManifest(
        version=PREPARED_VERSION,
        dataset=data.folder,
        raw_md5=md5,
        arrays=entries,
    )
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    sync(folder / MANIFEST)
    sync(folder)
    return [entry.sha256 for entry in entries.values()]


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """The checksum of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
