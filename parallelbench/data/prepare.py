"""Downloads a data set, verifies it, converts it once and publishes it, whole or not at all.

Everything is written into a folder with a unique name beside its destination, flushed to disk, and renamed. A
process that is killed leaves such a folder, which nothing reads and a later `prepare` removes; of two
processes at once the second finds the data there.
"""

from __future__ import annotations

import errno
import hashlib
import secrets
import shutil
import socket
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from parallelbench.data.prepared import (
    MANIFEST,
    PREPARED_VERSION,
    ArrayEntry,
    DatasetManifest,
    PreparedData,
    RawFile,
    read_manifest,
)
from parallelbench.errors import ConfigError, StorageError
from parallelbench.spec.launchers import prepare_line
from parallelbench.store.durable import sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from parallelbench.data.dataset import Arrays, Data

STALE_AGE_S = 24 * 3600
"""Older temporary folders are removed; younger ones may belong to a living process on another machine."""
NETWORK_TIMEOUT_S = 30.0
"""After this long without an answer from a mirror, the next one is tried."""


def prepare(data: Data, data_dir: Path, *, progress: Callable[[str], None] = print) -> None:
    """Make a data set ready to load below `data_dir`; does nothing where it is ready already.

    Raw files that lie in `data_dir/raw` (torchvision's layout) are used, the others downloaded; both are
    verified. `progress` is called with a line before each part of the work. Raises `ConfigError` where a file
    can't be downloaded or is damaged, and `StorageError` where the disk refuses. Then nothing is published.
    """
    if not isinstance(data, PreparedData):
        progress(f"{data.name}: needs no preparation")
        return
    root = Path(data_dir).expanduser()
    if is_complete(data, root):
        progress(f"{data.name}: ready in {data.prepared_dir(root)}")
        return
    with storage_errors(root):
        (root / "raw").mkdir(parents=True, exist_ok=True)
        for folder in (root, root / "raw"):
            remove_stale(folder)
        _obtain_raw(data, root / "raw", progress=progress)
        progress(f"{data.name}: reading the raw files")
        arrays = data.parse(root / "raw")
        _check(data, arrays, prepare_line(data.name, root))
        with temporary_folder(root, data.folder) as temporary:
            _write(data, arrays, temporary, progress=progress)
            progress(f"{data.name}: publishing {data.prepared_dir(root)}")
            _publish(data, temporary, root=root)
    progress(f"{data.name}: ready in {data.prepared_dir(root)}")


def is_complete(data: PreparedData, data_dir: Path) -> bool:
    """Whether the prepared files are there with the checksums of the manifest; reads them all."""
    try:
        data.load(data_dir)
        folder = data.prepared_dir(data_dir)
        manifest = read_manifest(folder / MANIFEST, fix=prepare_line(data.name, data_dir))
        return all(_digest(folder / f"{name}.npy") == entry.sha256 for name, entry in manifest.arrays.items())
    except (ConfigError, OSError):
        return False


def _obtain_raw(data: PreparedData, raw_dir: Path, *, progress: Callable[[str], None]) -> None:
    for raw in data.raw_files:
        path = raw_dir / raw.path
        if not path.is_file():
            progress(f"{data.name}: downloading {path.name}")
            _download(data, raw, raw_dir=raw_dir)
        md5 = _digest(path, "md5")
        if md5 != raw.md5:
            raise ConfigError(
                f"{path} is damaged: its MD5 is {md5}, published is {raw.md5}. "
                f"Delete the file and run `{prepare_line(data.name, raw_dir.parent)}` again"
            )


def _download(data: PreparedData, raw: RawFile, *, raw_dir: Path) -> None:
    """Fetch one file with torchvision's downloader, from the first mirror that has it intact."""
    from torchvision.datasets.utils import download_url

    path = raw_dir / raw.path
    path.parent.mkdir(parents=True, exist_ok=True)
    errors = []
    with temporary_folder(raw_dir, "download") as temporary, _network_timeout():
        for url in raw.urls:
            try:
                download_url(url, str(temporary), filename=path.name, md5=raw.md5)
            except (RuntimeError, OSError, ValueError) as error:  # a bad checksum; network and HTTP; a bad URL
                if isinstance(error, OSError) and _is_storage(error):
                    raise
                errors.append(f"{url}: {error}")
                continue
            sync(temporary / path.name)
            (temporary / path.name).replace(path)
            return
    raise ConfigError(_by_hand(data, raw_dir=raw_dir, errors=errors))


def _by_hand(data: PreparedData, *, raw_dir: Path, errors: list[str]) -> str:
    """The message for machines without a network: every file still wanted, its source and its place."""
    wanted = [raw for raw in data.raw_files if not (raw_dir / raw.path).is_file()]
    lines = [f"  {raw.urls[0]}\n    → {raw_dir / raw.path}  (MD5 {raw.md5})" for raw in wanted]
    failed = "\n".join(f"  {error}" for error in errors)
    return (
        f"data={data.name} can't be downloaded:\n{failed}\n"
        f"Fetch these files where there is a network and put them here:\n" + "\n".join(lines) + "\n"
        f"Then run `{prepare_line(data.name, raw_dir.parent)}` again"
    )


def _check(data: PreparedData, arrays: Arrays, again: str) -> None:
    """Refuse raw files that are intact but of another data set: wrong sizes or labels."""
    for name, (shape, dtype) in data.layout().items():
        array = getattr(arrays, name)
        if array.shape != shape or array.dtype != dtype:
            raise ConfigError(
                f"the raw files of data={data.name} hold {name} {array.dtype} {array.shape}, "
                f"wanted {dtype} {shape}: delete them and run `{again}` again"
            )
        if name.endswith("labels") and array.size and not 0 <= array.min() <= array.max() < data.num_classes:
            raise ConfigError(
                f"the raw files of data={data.name} hold {name} from {array.min()} to {array.max()}, "
                f"wanted 0 … {data.num_classes - 1}: delete them and run `{again}` again"
            )


def _write(data: PreparedData, arrays: Arrays, folder: Path, *, progress: Callable[[str], None]) -> None:
    """Write arrays and manifest and flush them; checksums are taken from what is read back."""
    import numpy as np

    entries = {}
    for name, (shape, dtype) in data.layout().items():
        progress(f"{data.name}: writing {name}.npy")
        path = folder / f"{name}.npy"
        np.save(path, getattr(arrays, name), allow_pickle=False)
        sync(path)
        entries[name] = ArrayEntry(shape=shape, dtype=dtype, size_bytes=path.stat().st_size, sha256=_digest(path))
    manifest = DatasetManifest(
        version=PREPARED_VERSION,
        dataset=data.folder,
        raw_md5={raw.path: raw.md5 for raw in data.raw_files},
        arrays=entries,
    )
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    sync(folder / MANIFEST)
    sync(folder)


def _publish(data: PreparedData, temporary: Path, *, root: Path) -> None:
    """Rename the folder to its place; another process may have been faster, or an old folder be damaged."""
    final = data.prepared_dir(root)
    try:
        temporary.rename(final)  # refused where a folder with files in it is there
    except OSError:
        if not final.exists():
            raise
        if is_complete(data, root):
            return
        with temporary_folder(root, data.folder) as aside:
            try:
                final.rename(aside / "damaged")
                temporary.rename(final)
            except OSError:
                if not is_complete(data, root):  # otherwise another process has replaced it first
                    raise
    sync(root)


def _digest(path: Path, algorithm: str = "sha256") -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


@contextmanager
def temporary_folder(parent: Path, stem: str) -> Iterator[Path]:
    """A new hidden folder in `parent`, removed at the end unless it was renamed. Its mode obeys the umask."""
    path = parent / f".{stem}.{secrets.token_hex(8)}.tmp"
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_stale(parent: Path) -> None:
    """Remove what killed processes have left."""
    for path in parent.glob(".*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > STALE_AGE_S:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:  # removed by another process meanwhile
            continue


@contextmanager
def _network_timeout() -> Iterator[None]:
    """torchvision's downloader sets no timeout of its own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(NETWORK_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _is_storage(error: OSError) -> bool:
    """Whether the disk refused, as against the network: URL errors carry no file name and no such number."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO} or (
        error.filename is not None and error.errno in {errno.EACCES, errno.EPERM}
    )


@contextmanager
def storage_errors(root: Path) -> Iterator[None]:
    """Turn an `OSError` below a data folder into a `StorageError` that names the fix."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{error.filename or root} can't be read or written ({error.strerror or error}): "
            "free space, mend the permissions, or choose another folder with site.data_dir"
        ) from error
