"""The published files of a data set: found, or downloaded by torchvision, verified, and then read."""

from __future__ import annotations

import errno
import socket
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelbench.config.sites import prepare_line
from parallelbench.data.content import file_digest
from parallelbench.errors import ConfigError
from parallelbench.results.files import sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from parallelbench.config.components import Arrays
    from parallelbench.data.torchvision import PreparedData


NETWORK_TIMEOUT_S = 30.0
"""After this long without an answer, a mirror is given up."""


def published(
    data: PreparedData, raw_dir: Path, own: Path, *, progress: Callable[[str], None]
) -> tuple[dict[str, str], Arrays]:
    """The MD5 of the published files by their paths, and what torchvision reads from them.

    Files that lie in `raw_dir` are used; the others are downloaded into `own`, where all are unpacked, so that of two
    processes none reads what the other unpacks, and those that are whole are kept in `raw_dir`.
    """
    kind = data.source()
    md5 = {f"{kind.__name__}/raw/{name}": md5 for name, md5 in getattr(kind, "resources", ())}
    md5 = md5 or {kind.filename: kind.tgz_md5}
    absent = [path for path in md5 if not (raw_dir / path).is_file()]
    for path in md5:
        if path not in absent and (found := file_digest(raw_dir / path, "md5")) != md5[path]:
            raise ConfigError(
                f"{raw_dir / path} is not the published file: its MD5 is {found}, published is {md5[path]}. Delete it "
                f"and run `{prepare_line(data.name, raw_dir.parent)}` again; arrays of your own: data.files=FILE.npz"
            )
    for path in absent:
        progress(f"{data.name}: downloading {Path(path).name}")
    with _network_timeout():
        for path in md5:
            (own / path).parent.mkdir(parents=True, exist_ok=True)
            (raw_dir / path).parent.mkdir(parents=True, exist_ok=True)
            if path not in absent:
                (own / path).symlink_to((raw_dir / path).absolute())
        progress(f"{data.name}: reading the raw files")
        try:
            try:
                train, test = (kind(own, train=part, download=True) for part in (True, False))
            finally:
                for path in absent:  # one that is whole need not be downloaded again
                    if (own / path).is_file() and file_digest(own / path, "md5") == md5[path]:
                        sync(own / path)
                        (own / path).replace(raw_dir / path)
        except (RuntimeError, OSError, HTTPException) as error:
            missing = {path: md5[path] for path in absent if not (raw_dir / path).is_file()}
            if not missing or (isinstance(error, OSError) and _is_storage(error)):
                raise
            raise ConfigError(_by_hand(data, kind, missing, raw_dir, error)) from None
        return md5, _arrays(train, test)


def _arrays(train: Any, test: Any) -> Arrays:
    """From torchvision's layout: without channels, or with them last."""
    import numpy as np

    from parallelbench.config.components import Arrays

    images = [np.asarray(part.data) for part in (train, test)]
    images = [each[:, np.newaxis] if each.ndim == 3 else each.transpose(0, 3, 1, 2) for each in images]
    labels = [np.asarray(part.targets, np.int64) for part in (train, test)]
    return Arrays(images[0], labels[0], images[1], labels[1])


def _by_hand(data: PreparedData, kind: Any, missing: dict[str, str], raw_dir: Path, error: Exception) -> str:
    """The message for machines without a network: every missing file, its source and its path."""
    source = kind.mirrors[0] if hasattr(kind, "mirrors") else kind.url.removesuffix(kind.filename)
    lines = [f"  {source}{Path(path).name}\n    → {raw_dir / path}  (MD5 {md5})" for path, md5 in missing.items()]
    return (
        f"data={data.name} can't be downloaded:\n  {error}\n"
        f"Fetch these files where there is a network and put them here:\n" + "\n".join(lines) + "\n"
        f"Then run `{prepare_line(data.name, raw_dir.parent)}` again"
    )


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
