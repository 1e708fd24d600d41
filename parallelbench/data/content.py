"""What a data set holds, as a sha256: two data sets of one name may hold different samples."""

from __future__ import annotations

import functools
import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelbench.results.files import read_record, write_file
from parallelbench.results.folder import file_sha256

if TYPE_CHECKING:
    from collections.abc import Callable

    from parallelbench.config.components import Arrays, Data

CACHE = "content-sha256.json"
"""File in the data folder: which memory-mapped files were read already, and their sha256."""
_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def content_sha256(data: Data, data_dir: Path, arrays: Arrays) -> str:
    """sha256 of what a data set holds: its fingerprint, or else of all its arrays, which takes about 1 s per GiB.

    Files behind a fingerprint are read as well: where one has changed since, what they hold now is the content. A file
    that has the same size and time of change as before is not read again.
    """
    path = data_dir.expanduser() / CACHE
    if fingerprint := data.fingerprint(data_dir):
        said = data.stored_files(data_dir)
        found = [_once(path, _file(file), functools.partial(file_sha256, file)) for file in said]
        return fingerprint if found == [*said.values()] else hashlib.sha256(" ".join(found).encode()).hexdigest()
    return _once(path, _files(arrays), lambda: digest(arrays))


def _once(path: Path, key: str, compute: Callable[[], str]) -> str:
    """What was computed for a key before, by the file at `path`; an empty key is computed each time."""
    if not key:
        return compute()
    known = _known(path)
    if key not in known:
        known[key] = compute()
        with suppress(OSError):  # the folder may be another user's: then it is read each time
            write_file(path, json.dumps(known).encode())
    return known[key]


def digest(arrays: Arrays) -> str:
    """sha256 of all arrays, with their shapes."""
    import numpy as np

    digested = hashlib.sha256()
    for name in _ARRAYS:
        array = np.ascontiguousarray(getattr(arrays, name))
        digested.update(f"{name} {array.dtype} {array.shape}".encode())
        digested.update(array.data.cast("B"))
    return digested.hexdigest()


def _files(arrays: Arrays) -> str:
    """The files behind memory-mapped arrays, with size and time of change; empty where an array is no such map."""
    import numpy as np

    parts = []
    for name in _ARRAYS:
        array = getattr(arrays, name)
        if not isinstance(array, np.memmap) or array.filename is None:
            return ""
        parts.append(f"{name} {_file(Path(array.filename))} {array.offset} {array.shape}")
    return "; ".join(parts)


def _file(path: Path) -> str:
    stat = path.stat()
    return f"{path} {stat.st_size} {stat.st_mtime_ns}"


def _known(path: Path) -> dict[str, str]:
    try:
        known: Any = json.loads(read_record(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return {str(key): str(value) for key, value in known.items()} if isinstance(known, dict) else {}
