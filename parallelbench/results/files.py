"""Files on disk: written whole or not at all."""

from __future__ import annotations

import errno
import os
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from parallelbench.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO
    from pathlib import Path


_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space, then run again",
    errno.EDQUOT: "the quota is used up: free some space, then run again",
    errno.EACCES: "no permission: choose another folder with {option}, or change the folder's mode",
    errno.EPERM: "no permission: choose another folder with {option}, or change the folder's mode",
    errno.EROFS: "the file system is read-only: choose another folder with {option}",
    errno.ENOTDIR: "a part of the path is a file: choose another folder with {option}",
}


@contextmanager
def storage_errors(path: Path, *, option: str = "results=DIR", verb: str = "write") -> Iterator[None]:
    """Turn an `OSError` on `path` into a `StorageError` that names the fix; `option` chooses the folder, and `verb` is
    what could not be done.
    """
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "").format(option=option) or error.strerror or str(error)
        raise StorageError(f"can't {verb} {path}: {advice}") from error


def is_there(path: Path) -> bool:
    """Whether something is there. What can't be known is an error here; for `Path.exists` of Python 3.14 it is a no."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def write_file(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write `path` atomically and durably; after a crash it holds its old content or the new, never a part.

    `private`: only the user can read and write it, whatever the umask and the folder's access control lists say.
    """
    with new_file(path) as file:
        if private:
            os.fchmod(file.fileno(), 0o600)
        file.write(content)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open what becomes `path`, atomically and durably, at the end of the `with`; nothing remains of it on an error."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with storage_errors(path):
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(file: FileIO, content: bytes) -> None:
    """Write to an unbuffered file, whose writes may be partial, e.g. on a disk that fills up."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def reserve(path: Path, size_bytes: int) -> None:
    """Create `path`, filled with spaces, so that `fill` succeeds later even on a full disk."""
    with storage_errors(path):
        try:
            with path.open("wb") as file:
                file.write(b" " * size_bytes)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def fill(path: Path, content: bytes) -> None:
    """Overwrite the start of a reserved file in place, padding with spaces; needs no free space."""
    with storage_errors(path), path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        assert len(content) <= size, f"{path}: {len(content)} bytes don't fit the {size} reserved"
        file.write(content.ljust(size))
        file.flush()
        os.fsync(file.fileno())
