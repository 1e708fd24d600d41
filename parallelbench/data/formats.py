"""Readers of the two raw formats that data sets are published in: IDX (MNIST) and CIFAR's binary records."""

from __future__ import annotations

import gzip
import math
import tarfile
import zlib
from typing import TYPE_CHECKING

import numpy as np

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

IDX_UINT8 = 0x08
"""The IDX type code of unsigned bytes, the only one that MNIST uses."""
CIFAR_PIXELS = 3 * 32 * 32
"""Bytes of one CIFAR image: the red, the green and the blue plane, row by row."""


def damaged(path: Path, problem: str) -> ConfigError:
    """The error for a damaged raw file."""
    return ConfigError(f"{path} {problem}: delete the file and prepare the data set again")


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read a gzipped IDX file of unsigned bytes, of any shape; raises `ConfigError` where it is damaged.

    Layout (http://yann.lecun.com/exdb/mnist): two zero bytes, type code, number of dimensions, each dimension
    as a big-endian 32-bit integer, then the values, the last dimension fastest.
    """
    try:
        raw = gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise damaged(path, f"is no complete gzip file ({error})") from None
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != IDX_UINT8:
        raise damaged(path, f"starts with {raw[:4].hex(' ')}, which is no IDX file of unsigned bytes")
    header = 4 + 4 * raw[3]
    if len(raw) < header:
        raise damaged(path, "ends within its header")
    shape = tuple(int.from_bytes(raw[at : at + 4], "big") for at in range(4, header, 4))
    if len(raw) != header + math.prod(shape):
        raise damaged(path, f"announces {shape} values and holds {len(raw) - header} bytes of them")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def read_cifar(
    archive: Path, *, members: Sequence[str], label_bytes: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read `members` of a CIFAR archive in its binary version, in their order; raises `ConfigError`.

    A record is `label_bytes` bytes (CIFAR-10: the label; CIFAR-100: the coarse, then the fine label; the last
    one is used) and 3,072 bytes of image (https://www.cs.toronto.edu/~kriz/cifar.html). Nothing is extracted
    to disk and nothing unpickled, so the archive's own paths never matter. Returns images (n, 3, 32, 32) and
    labels (n,).
    """
    try:
        with tarfile.open(archive, "r:gz") as tar:
            blocks = [_member(tar, member, archive) for member in members]
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise damaged(archive, f"is no complete tar.gz file ({error})") from None
    record = label_bytes + CIFAR_PIXELS
    for member, block in zip(members, blocks, strict=True):
        if not block or len(block) % record:
            raise damaged(archive, f"holds {member} of {len(block)} bytes, not a multiple of {record}")
    records = np.frombuffer(b"".join(blocks), np.uint8).reshape(-1, record)
    images = np.ascontiguousarray(records[:, label_bytes:]).reshape(-1, 3, 32, 32)
    return images, records[:, label_bytes - 1].astype(np.int64)


def _member(tar: tarfile.TarFile, member: str, archive: Path) -> bytes:
    try:
        stream = tar.extractfile(member)
    except KeyError:
        stream = None
    if stream is None:  # missing, or a folder
        raise damaged(archive, f"has no file {member} in it")
    return stream.read()
