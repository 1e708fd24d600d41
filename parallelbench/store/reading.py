"""Reads files that anybody may have put there: only regular ones, and only of a bearable size."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from io import BufferedReader
    from pathlib import Path

LARGEST_BYTES = 64 * 2**20
"""Records are of some kB; the largest that are read."""


def require_regular(path: Path | str) -> None:
    """Raise `OSError` where there is no file of this name, or a device, a pipe or a folder: reading may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; raises `OSError` as `require_regular` does."""
    require_regular(path)
    return path.open("rb")


def read_record(path: Path | str) -> bytes:
    """The content of a small file; raises `OSError` also for a device, a pipe, and more than `LARGEST_BYTES`."""
    require_regular(path)
    # Unbuffered: `status` reads thousands of these.
    with open(path, "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size > LARGEST_BYTES:
            raise OSError(errno.EFBIG, "too large a file", str(path))
        return file.read()
