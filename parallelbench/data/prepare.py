"""Downloads a data set, verifies it, converts it once and publishes it, whole or not at all.

Everything is written into a folder with a unique name beside its destination, flushed to disk, and renamed. A
process that is killed leaves such a folder, which nothing reads and a later `prepare` removes; of two
processes at once the second finds the data there.
"""

from __future__ import annotations

import errno
import hashlib
import secrets
import shlex
import shutil
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from parallelbench.config.sites import prepare_line
from parallelbench.data.content import CONTENT_DIGITS, OwnFiles, is_name
from parallelbench.data.text import OwnText, Text, is_text_name, write_text
from parallelbench.data.torchvision import (
    MANIFEST,
    PREPARED_VERSION,
    ArrayEntry,
    DatasetManifest,
    PreparedData,
    RawFile,
    fingerprint_of,
    read_manifest,
)
from parallelbench.errors import ConfigError, FormatError, StorageError
from parallelbench.results.files import sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from parallelbench.config.components import Arrays, Data


STALE_AGE_S = 24 * 3600
"""Older temporary folders are removed; younger ones may belong to a living process on another machine."""
NETWORK_TIMEOUT_S = 30.0
"""After this long without an answer from a mirror, the next one is tried."""


def prepare(data: Data, data_dir: Path, *, progress: Callable[[str], None] = print) -> None:
    """Make a data set ready to load below `data_dir`; does nothing where it is ready already.

    Raw files that lie in `data_dir/raw` (torchvision's layout) are used, the others downloaded; both are
    verified. `progress` is called with a line before each part of the work. Raises `ConfigError` where a file
    can't be downloaded, is damaged, or is missing and not made here, and `StorageError` where the disk refuses. Then
    nothing is published.
    """
    root = Path(data_dir).expanduser()
    if isinstance(data, Text) and data.path is not None:
        _prepare_text(data.path, root, progress=progress)
        return
    if not isinstance(data, PreparedData):
        data.require_files(root)
        progress(f"{data.name}: needs no preparation")
        return
    if data.files is not None and not is_name(data.files):
        _prepare_own(data, Path(data.files).expanduser(), root, progress=progress)
        return
    if is_complete(data, root):
        progress(f"{data.name}: ready in {data.prepared_dir(root)}")
        return
    if data.own:
        raise ConfigError(
            f"data.files={data.files} is not prepared in {root}: name the folder that holds these files, with "
            f"`{prepare_line(data.name, root, 'data.files=FOLDER')}`"
        )
    with storage_errors(root):
        (root / "raw").mkdir(parents=True, exist_ok=True)
        for folder in (root, root / "raw"):
            remove_stale(folder)
        _obtain_raw(data, root / "raw", progress=progress)
        progress(f"{data.name}: reading the raw files")
        arrays = parsed(data, root / "raw", f"delete the file and run `{prepare_line(data.name, root)}` again")
        with temporary_folder(root, data.folder) as temporary:
            write(data, arrays, temporary, md5={raw.path: raw.md5 for raw in data.raw_files}, progress=progress)
            progress(f"{data.name}: publishing {data.prepared_dir(root)}")
            _publish(data, temporary, root=root)
    progress(f"{data.name}: ready in {data.prepared_dir(root)}")


def _prepare_own(data: PreparedData, source: Path, root: Path, *, progress: Callable[[str], None]) -> None:
    """Convert a user's own files, into a folder that is named after their content; says how runs name them."""
    paths = data.raw_paths(source)
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ConfigError(
            f"data.files={source} has no {', '.join(missing)}: name the folder that holds "
            f"{', '.join(path.name for path in paths)}"
        )
    md5 = {raw.path: file_digest(path, "md5") for raw, path in zip(data.raw_files, paths, strict=True)}
    if md5 == {raw.path: raw.md5 for raw in data.raw_files}:
        raise ConfigError(f"data.files={source} holds exactly what is published: leave data.files out")
    progress(f"{data.name}: reading {source}")
    arrays = parsed(data, source, "replace the file by a whole one, or name another folder with data.files")
    with storage_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        remove_stale(root)
        with temporary_folder(root, data.folder) as temporary:
            sized = with_sizes(data, arrays)
            content = fingerprint_of(write(sized, arrays, temporary, md5=md5, progress=progress))
            named = with_sizes(data, arrays, content)
            _publish(named, temporary, root=root)
    progress(f"{data.name}: ready in {named.prepared_dir(root)}, as files of your own")
    progress(f"{data.name}: train on them with data={data.name} data.files={named.files}")


def _prepare_text(path: str, root: Path, *, progress: Callable[[str], None]) -> None:
    """Join a user's own text in a folder that is named after its content; says how runs name it."""
    if is_text_name(path):
        OwnText.named(path).manifest(root)
        progress(f"text: ready in {OwnText.named(path).folder(root)}")
        return
    progress(f"text: reading {path}")
    with storage_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        remove_stale(root)
        with temporary_folder(root, "text") as temporary:
            own = write_text(Path(path).expanduser(), temporary)
            with suppress(OSError):  # refused where it is there already
                temporary.rename(own.folder(root))
        sync(root)
    own.manifest(root)
    progress(f"text: ready in {own.folder(root)}, {own.size_bytes:,} bytes of your own")
    progress(f"text: train on them with data=text data.path={own.name}")


def is_complete(data: PreparedData, data_dir: Path) -> bool:
    """Whether the prepared files are there with the checksums of the manifest; reads them all."""
    try:
        data.load(data_dir)
        folder = data.prepared_dir(data_dir)
        manifest = read_manifest(folder / MANIFEST, fix=prepare_line(data.name, data_dir))
        return all(file_digest(folder / f"{name}.npy") == entry.sha256 for name, entry in manifest.arrays.items())
    except (ConfigError, OSError):
        return False


def _obtain_raw(data: PreparedData, raw_dir: Path, *, progress: Callable[[str], None]) -> None:
    for raw in data.raw_files:
        path = raw_dir / raw.path
        if not path.is_file():
            progress(f"{data.name}: downloading {path.name}")
            _download(data, raw, raw_dir=raw_dir)
        if (md5 := file_digest(path, "md5")) != raw.md5:
            raise ConfigError(_not_published(data, raw, raw_dir=raw_dir, md5=md5))


def _not_published(data: PreparedData, raw: RawFile, *, raw_dir: Path, md5: str) -> str:
    """The message for a raw file with another checksum: what is wrong with it, or that it is whole."""
    path, again = raw_dir / raw.path, prepare_line(data.name, raw_dir.parent)
    differs = f"its MD5 is {md5}, published is {raw.md5}"
    try:
        data.parse_alone(path, data.raw_files.index(raw))
    except FormatError as error:
        return f"{error} ({differs}). Delete the file and run `{again}` again"
    own = prepare_line(data.name, raw_dir.parent, shlex.quote(f"data.files={path.parent}"))
    return (
        f"{path} is a whole file of this format, but not the published one ({differs}). Delete it and run `{again}` "
        f"again; to train on it as a data set of your own, run `{own}`"
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
    """The message for machines without a network: every missing file, its source and its path."""
    missing = [raw for raw in data.raw_files if not (raw_dir / raw.path).is_file()]
    lines = [f"  {raw.urls[0]}\n    → {raw_dir / raw.path}  (MD5 {raw.md5})" for raw in missing]
    failed = "\n".join(f"  {error}" for error in errors)
    return (
        f"data={data.name} can't be downloaded:\n{failed}\n"
        f"Fetch these files where there is a network and put them here:\n" + "\n".join(lines) + "\n"
        f"Then run `{prepare_line(data.name, raw_dir.parent)}` again"
    )


def _publish(data: PreparedData, temporary: Path, *, root: Path) -> None:
    """Rename the folder to its final name, unless another process was faster; replace a damaged folder.

    Others may do the same at any moment, and what they publish is the same. So whoever finds the name taken by a whole
    folder is done, and whoever finds it free, or has made it free, tries again.
    """
    final = data.prepared_dir(root)
    while not _renamed(temporary, final):
        if is_complete(data, root):
            return
        with temporary_folder(root, data.folder) as aside, suppress(FileNotFoundError):
            final.rename(aside / "damaged")
    sync(root)


def _renamed(folder: Path, final: Path) -> bool:
    """Whether the folder got its name; not where a folder with files in it, or a file, has it."""
    try:
        folder.rename(final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        return False
    return True


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
    """Remove folders that killed processes left."""
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
            "free space, correct the permissions, or choose another folder with site.data_dir"
        ) from error


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
