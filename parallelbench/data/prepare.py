"""Converts a data set once and publishes it, whole or not at all; `download.py` gets the published files.

Everything is written into a folder with a unique name beside its destination, flushed to disk, and renamed. A
process that is killed leaves such a folder, which nothing reads and a later `prepare` removes; of two
processes at once the second finds the data there.
"""

from __future__ import annotations

import errno
import json
import secrets
import shutil
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.config.sites import prepare_line
from parallelbench.data.content import OwnContent, file_digest, named
from parallelbench.data.download import published
from parallelbench.data.text import Text, file_of, stored_sha256, write_text
from parallelbench.data.torchvision import MANIFEST, PreparedData, fingerprint_of
from parallelbench.errors import ConfigError, StorageError
from parallelbench.results.files import sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from parallelbench.config.components import Arrays, Data


STALE_AGE_S = 24 * 3600
"""Older temporary folders are removed; younger ones may belong to a living process on another machine."""


def prepare(data: Data, data_dir: Path, *, progress: Callable[[str], None] = print) -> None:
    """Make a data set ready to load below `data_dir`; does nothing where it is ready already.

    Published files that lie in `data_dir/raw` (torchvision's layout) are used, the others downloaded; both are
    verified. `progress` is called with a line before each part of the work. Raises `ConfigError` where a file
    can't be downloaded, is damaged, or is missing and no file that is made here, and `StorageError` where the disk
    refuses. Then nothing is published.
    """
    root = Path(data_dir).expanduser()
    if isinstance(data, Text) and data.path is not None:
        _prepare_text(data.path, root, progress=progress)
        return
    if not isinstance(data, PreparedData):
        data.require_files(root)
        progress(f"{data.name}: needs no preparation")
        return
    if data.files is not None and named(data.files, 2) is None:
        _prepare_own(data, Path(data.files).expanduser(), root, progress=progress)
        return
    if is_complete(data, root):
        progress(f"{data.name}: ready in {data.prepared_dir(root)}")
        return
    if data.own:
        raise ConfigError(
            f"data.files={data.files} is not prepared in {root}: name the file that holds these arrays, with "
            f"`{prepare_line(data.name, root, *data.prepare_options)}`"
        )
    with storage_errors(root):
        (root / "raw").mkdir(parents=True, exist_ok=True)
        with temporary_folder(root / "raw", "download") as own:
            md5, arrays = published(data, root / "raw", own, progress=progress)
        _check(data, arrays, "torchvision.datasets", "install the torchvision that constraints.txt names")
        with temporary_folder(root, data.folder) as temporary:
            write(data, arrays, temporary, md5=md5, progress=progress)
            progress(f"{data.name}: publishing {data.prepared_dir(root)}")
            _publish(data, temporary, root=root)
    progress(f"{data.name}: ready in {data.prepared_dir(root)}")


def _prepare_own(data: PreparedData, source: Path, root: Path, *, progress: Callable[[str], None]) -> None:
    """Convert a user's own arrays, into a folder that is named after their content; says how runs name them."""
    progress(f"{data.name}: reading {source}")
    arrays = _own_arrays(data, source)
    md5 = {source.name: file_digest(source, "md5")}
    with storage_errors(root), temporary_folder(root, data.folder) as temporary:
        sized = with_sizes(data, arrays)
        content = fingerprint_of(write(sized, arrays, temporary, md5=md5, progress=progress))
        own = with_sizes(data, arrays, content)
        _publish(own, temporary, root=root)
    progress(f"{data.name}: ready in {own.prepared_dir(root)}, as arrays of your own")
    progress(f"{data.name}: train on them with data={data.name} data.files={own.files}")


def _own_arrays(data: PreparedData, path: Path) -> Arrays:
    """The four arrays of an .npz file; `ConfigError` where it holds others."""
    import numpy as np

    from parallelbench.config.components import Arrays

    names = list(Arrays.__dataclass_fields__)
    fix = f"write it with numpy.savez(FILE, {', '.join(f'{name}=…' for name in names)})"
    try:
        with np.load(path, allow_pickle=False) as file:
            if lacking := [name for name in names if name not in file.files]:
                raise ValueError(f"it lacks {', '.join(lacking)}, and holds {', '.join(file.files) or 'nothing'}")
            held = {name: file[name] for name in names}
        if empty := [name for name, array in held.items() if not array.size]:
            raise ValueError(f"nothing in {', '.join(empty)}")
    except MemoryError:
        raise
    except Exception as error:  # numpy and zipfile raise eight kinds for what is no .npz file, or a damaged one
        raise ConfigError(f"data.files={path} is no .npz file of a data set ({error}): {fix}") from None
    for name, array in held.items():
        is_integer_label = name.endswith("labels") and array.dtype.kind in "iu"
        held[name] = np.atleast_1d(array.astype(np.int64) if is_integer_label else array)
    arrays = Arrays(**held)
    _check(with_sizes(data, arrays), arrays, f"data.files={path}", fix)
    return arrays


def _prepare_text(path: str, root: Path, *, progress: Callable[[str], None]) -> None:
    """Join a user's own text in a folder that is named after its content; says how runs name it."""
    if own := named(path, 1):
        stored_sha256(own, root)
        progress(f"text: ready in {file_of(own, root).parent}")
        return
    progress(f"text: reading {path}")
    with storage_errors(root), temporary_folder(root, "text") as temporary:
        own = write_text(Path(path).expanduser(), temporary)
        with suppress(OSError):  # another process was faster: its folder holds the same
            temporary.rename(file_of(own, root).parent)
        sync(root)
    stored_sha256(own, root)
    progress(f"text: ready in {file_of(own, root).parent}, {own.sizes[0]:,} bytes of your own")
    progress(f"text: train on them with data=text data.path={own.name}")


def is_complete(data: PreparedData, data_dir: Path) -> bool:
    """Whether the prepared files are there with the checksums of the manifest; reads them all."""
    folder = data.prepared_dir(data_dir)
    try:
        data.load(data_dir)
        written = json.loads((folder / MANIFEST).read_bytes())["arrays"]
        return all(file_digest(folder / f"{name}.npy") == written[name]["sha256"] for name in data.layout())
    except (ConfigError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _publish(data: PreparedData, temporary: Path, *, root: Path) -> None:
    """Rename the folder to its final name, unless another process was faster; replace a damaged folder.

    Others may do the same at any moment, and what they publish is the same. So whoever finds the name taken by an
    undamaged folder is done, and whoever finds it free, or has made it free, tries again.
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
    """A new hidden folder in `parent`, removed at the end unless it was renamed. Its mode obeys the umask.

    Those that killed processes have left there are removed first.
    """
    parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(parent)
    path = parent / f".{stem}.{secrets.token_hex(8)}.tmp"
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_stale(parent: Path) -> None:
    for path in parent.glob(".*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > STALE_AGE_S:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:  # removed by another process meanwhile
            continue


@contextmanager
def storage_errors(root: Path) -> Iterator[None]:
    """Turn an `OSError` below a data folder into a `StorageError` that names the file and the fix."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{error.filename or root} can't be read or written ({error.strerror or error}): "
            "free space, correct the permissions, or choose another folder with site.data_dir"
        ) from error


def with_sizes(data: PreparedData, arrays: Arrays, content: str = "0" * 64) -> PreparedData:
    """The data set with `files` set to the name of the user's arrays: their sizes and the hash of their content.

    `content`: zeros while the hash is not known.
    """
    own = OwnContent(content, (len(arrays.train_images), len(arrays.test_images)))
    return msgspec.structs.replace(data, files=own.name)


def _check(data: PreparedData, arrays: Arrays, source: str, fix: str) -> None:
    """Refuse arrays of another data set: of wrong shapes or labels."""
    for name, (shape, dtype) in data.layout().items():
        array = getattr(arrays, name)
        if array.shape != shape or array.dtype != dtype:
            raise ConfigError(f"{source} holds {name} {array.dtype} {array.shape}, expected {dtype} {shape}: {fix}")
        if name.endswith("labels") and array.size and not 0 <= array.min() <= array.max() < data.num_classes:
            raise ConfigError(
                f"{source} holds {name} from {array.min()} to {array.max()}, expected 0 … {data.num_classes - 1}: {fix}"
            )


def write(
    data: PreparedData, arrays: Arrays, folder: Path, *, md5: dict[str, str], progress: Callable[[str], None]
) -> list[str]:
    """Write arrays and manifest and flush them; returns the arrays' checksums, taken from what is read back."""
    import numpy as np

    entries = dict[str, dict[str, Any]]()
    for name, (shape, dtype) in data.layout().items():
        progress(f"{data.name}: writing {name}.npy")
        path = folder / f"{name}.npy"
        np.save(path, getattr(arrays, name), allow_pickle=False)
        sync(path)
        entries[name] = {"shape": shape, "dtype": dtype, "sha256": file_digest(path)}
    manifest = {"dataset": data.folder, "raw_md5": md5, "arrays": entries}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2))
    sync(folder / MANIFEST)
    sync(folder)
    return [entry["sha256"] for entry in entries.values()]
