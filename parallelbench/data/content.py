"""What a data set holds, as a sha256: two data sets of one name may hold different samples.

Also how a run names arrays of the user's own, by their content, and data that are made from options alone.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from parallelbench.config.identity import canonical_json
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from parallelbench.config.components import Arrays, Data


def content_sha256(data: Data, data_dir: Path, arrays: Arrays) -> str:
    """sha256 of what a data set holds: its fingerprint, or else of all its arrays. Reading takes about 1 s per GiB."""
    return data.fingerprint(data_dir) or digest(arrays)


def digest(arrays: Arrays) -> str:
    """sha256 of all arrays, with their shapes."""
    import numpy as np

    digested = hashlib.sha256()
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        array = np.ascontiguousarray(getattr(arrays, name))
        digested.update(f"{name} {array.dtype} {array.shape}".encode())
        digested.update(array.data.cast("B"))
    return digested.hexdigest()


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """The checksum of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


_DIGITS = 12
"""Hexadecimal digits of the content's sha256 that a name has."""
_NAME = re.compile(rf"([0-9a-f]{{{_DIGITS}}})((?:-[1-9][0-9]{{0,14}})+)")


class OwnContent(NamedTuple):
    """Files of one's own that were prepared; part of the run's id, which others therefore change."""

    digits: str
    """The first ones of the sha256 of what they hold."""
    sizes: tuple[int, ...]
    """Training and test samples; of text, its bytes. So they are known before anything is read."""

    @property
    def name(self) -> str:
        """What `data.files`, or `data.path`, is in a run."""
        return "-".join([self.digits[:_DIGITS], *map(str, self.sizes)])


def named(text: str, sizes: int) -> OwnContent | None:
    """What a name of so many sizes says; None: it is a path."""
    found = _NAME.fullmatch(text)
    numbers = found[2].split("-")[1:] if found else []
    return OwnContent(found[1], tuple(map(int, numbers))) if found and len(numbers) == sizes else None


def own_content(data: Data, option: str, *, sizes: int, of: str) -> OwnContent | None:
    """What a run's data are by this option; None: none of one's own.

    `of`: what `prepare` takes in the name's place, as text; `ConfigError` where a run is given that.
    """
    if (text := getattr(data, option)) is None:
        return None
    if (own := named(text, sizes)) is None:
        key = f"data.{option}={text}"
        raise ConfigError(
            f"{key} is no name of anything prepared: run `parallelbench prepare data={data.name} {key}` first, with "
            f"{of}; it prints the name that runs take"
        )
    return own


def fingerprint_of(data: Data, generator: str) -> str:
    """sha256 of the options that the data are made from, and of `generator`, which must change with what is made."""
    made_from = {key: value for key, value in msgspec.to_builtins(data).items() if key not in ("name", "augment")}
    return hashlib.sha256(canonical_json([generator, made_from]).encode()).hexdigest()
