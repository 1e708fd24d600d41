"""Readers of the two raw formats that data sets are published in: IDX (MNIST) and CIFAR's binary records."""

from __future__ import annotations

import gzip
import io
import math
import tarfile
import zlib
from typing import TYPE_CHECKING

import numpy as np

from parallelbench.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

GZIP_MAGIC = b"\x1f\x8b"
"""The first bytes of every gzip file."""
IDX_UINT8 = 0x08
"""The IDX type code of unsigned bytes, the only one that MNIST uses."""
CIFAR_PIXELS = 3 * 32 * 32
"""Bytes of one CIFAR image: the red, the green and the blue plane, row by row."""


def read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """Read a gzipped IDX file of unsigned bytes with so many dimensions; raises `FormatError` where it is none.

    Layout (http://yann.lecun.com/exdb/mnist): two zero bytes, type code, number of dimensions, each dimension
    as a big-endian 32-bit integer, then the values, the last dimension fastest.
    """
    raw = _gunzipped(path)
    if raw[:2] != b"\0\0":
        raise FormatError(path, f"is foreign: it starts with {raw[:4].hex(' ')}, so it is no IDX file")
    expected = bytes([0, 0, IDX_UINT8, dimensions])
    if raw[: len(expected)] != expected[: len(raw)]:
        raise FormatError(
            path,
            f"has the wrong magic number {raw[:4].hex(' ')}: expected is {expected.hex(' ')}, unsigned bytes in "
            f"{dimensions} dimension{'s' if dimensions > 1 else ''}",
        )
    header = 4 + 4 * dimensions
    if len(raw) < header:
        raise FormatError(path, "is truncated: it ends within its header")
    shape = tuple(int.from_bytes(raw[at : at + 4], "big") for at in range(4, header, 4))
    values = len(raw) - header
    if values != math.prod(shape):
        state = "truncated" if values < math.prod(shape) else "corrupted"
        raise FormatError(path, f"is {state}: it announces {math.prod(shape)} values and holds {values}")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def read_cifar(
    archive: Path, *, members: Sequence[str], label_bytes: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read `members` of a CIFAR archive in its binary version, in their order; raises `FormatError`.

    A record is `label_bytes` bytes (CIFAR-10: the label; CIFAR-100: the coarse, then the fine label; the last
    one is used) and 3,072 bytes of image (https://www.cs.toronto.edu/~kriz/cifar.html). Nothing is extracted
    to disk and nothing unpickled, so the archive's own paths never matter. Returns images (n, 3, 32, 32) and
    labels (n,).
    """
    unzipped = io.BytesIO(_gunzipped(archive))
    try:
        with tarfile.open(fileobj=unzipped, mode="r:") as tar:
            blocks = [_member(tar, member, archive) for member in members]
    except tarfile.TarError as error:
        raise FormatError(archive, f"is foreign or corrupted: it holds no whole tar archive ({error})") from None
    record = label_bytes + CIFAR_PIXELS
    for member, block in zip(members, blocks, strict=True):
        if not block or len(block) % record:
            raise FormatError(archive, f"is corrupted: {member} has {len(block)} bytes, not a multiple of {record}")
    records = np.frombuffer(b"".join(blocks), np.uint8).reshape(-1, record)
    images = np.ascontiguousarray(records[:, label_bytes:]).reshape(-1, 3, 32, 32)
    return images, records[:, label_bytes - 1].astype(np.int64)


def _gunzipped(path: Path) -> bytes:
    """The content of a gzip file, whose length and checksum are right."""
    compressed = path.read_bytes()
    if not compressed:
        raise FormatError(path, "is truncated: it is empty")
    if not compressed.startswith(GZIP_MAGIC):
        raise FormatError(path, f"is foreign: it starts with {compressed[:4].hex(' ')}, so it is no gzip file")
    try:
        return gzip.decompress(compressed)
    except EOFError:
        raise FormatError(path, f"is truncated: its gzip stream does not end within {len(compressed)} bytes") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise FormatError(path, f"is corrupted: its gzip stream can't be unpacked ({error})") from None


def _member(tar: tarfile.TarFile, member: str, archive: Path) -> bytes:
    try:
        stream = tar.extractfile(member)
    except KeyError:
        stream = None
    if stream is None:  # missing, or a folder
        raise FormatError(archive, f"is foreign: it has no file {member} in it")
    return stream.read()
