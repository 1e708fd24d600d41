"""What a data set holds, as a sha256: two data sets of one name may hold different samples.

Also how a run names arrays of the user's own, by their content, and data that are made from options alone.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from parallelbench.config.identity import canonical_json
from parallelbench.errors import ConfigError
from parallelbench.results.files import write_file
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
        known: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return {str(key): str(value) for key, value in known.items()} if isinstance(known, dict) else {}


CONTENT_DIGITS = 12
"""Hexadecimal digits of the content's sha256 that a name has."""
_NAME = re.compile(rf"([0-9a-f]{{{CONTENT_DIGITS}}})-([1-9][0-9]{{0,8}})-([1-9][0-9]{{0,8}})")


class OwnFiles(NamedTuple):
    """Arrays of one's own that were prepared; part of the run's id, which others therefore change."""

    content: str
    """The first digits of the sha256 of the arrays."""
    train_samples: int
    test_samples: int

    @property
    def name(self) -> str:
        """What `data.files` is in a run, so that sizes are known before anything is read."""
        return f"{self.content}-{self.train_samples}-{self.test_samples}"

    @classmethod
    def named(cls, name: str, data: str) -> OwnFiles:
        """What a name says; raises `ConfigError` for anything else, such as the file that only `prepare` takes."""
        if (found := _NAME.fullmatch(name)) is None:
            raise ConfigError(
                f"data.files={name} is no name of prepared files: run `parallelbench prepare data={data} "
                f"data.files={name}` first, with an .npz file; it prints the name that runs take"
            )
        return cls(found[1], int(found[2]), int(found[3]))


def is_name(text: str) -> bool:
    """Whether `data.files` is the name of prepared files, not a path."""
    return _NAME.fullmatch(text) is not None


def fingerprint_of(data: Data, generator: str) -> str:
    """sha256 of the options that the data are made from, and of `generator`, which must change with what is made."""
    made_from = {key: value for key, value in msgspec.to_builtins(data).items() if key not in ("name", "augment")}
    return hashlib.sha256(canonical_json([generator, made_from]).encode()).hexdigest()
