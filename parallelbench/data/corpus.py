"""Text as bytes: the source of Python's standard library, or files of one's own, prepared once and memory-mapped."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from parallelbench.config.sites import prepare_line
from parallelbench.data.own_files import CONTENT_DIGITS
from parallelbench.errors import ConfigError
from parallelbench.results.files import read_record, write_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

TOKENS, MANIFEST = "tokens.bin", "text.json"
"""Names of the files in a prepared folder."""
_NAME = re.compile(rf"([0-9a-f]{{{CONTENT_DIGITS}}})-([1-9][0-9]{{0,14}})")
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
"""Folders of the standard library whose text some installations lack, or which is not the library's."""


class TextManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a prepared folder holds."""

    sha256: str
    """Of the tokens."""
    size_bytes: int
    files: int


class OwnText(NamedTuple):
    """Text of one's own that was prepared; part of the run's id, which other text therefore changes."""

    content: str
    """The first digits of the tokens' sha256."""
    size_bytes: int

    @property
    def name(self) -> str:
        """What `data.path` is in a run."""
        return f"{self.content}-{self.size_bytes}"

    @classmethod
    def named(cls, name: str) -> OwnText:
        """What a name says; raises `ConfigError` for anything else, such as the path that only `prepare` takes."""
        if (found := _NAME.fullmatch(name)) is None:
            raise ConfigError(
                f"data.path={name} is no name of prepared text: run `parallelbench prepare data=text data.path={name}` "
                "first, with the file or folder that holds it; it prints the name that runs take"
            )
        return cls(found[1], int(found[2]))

    def folder(self, data_dir: Path) -> Path:
        """Where it lies."""
        return Path(data_dir).expanduser() / f"text-{self.name}"

    def manifest(self, data_dir: Path) -> TextManifest:
        """What was prepared; `ConfigError` with the `prepare` line where it is not there, or is damaged."""
        folder = self.folder(data_dir)
        fix = prepare_line("text", data_dir, "data.path=PATH")
        try:
            found = msgspec.json.decode(read_record(folder / MANIFEST), type=TextManifest)
            size_bytes = (folder / TOKENS).stat().st_size
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"data.path={self.name} is not prepared in {data_dir} ({error}). Run `{fix}`") from None
        if not found.size_bytes == size_bytes == self.size_bytes or not found.sha256.startswith(self.content):
            raise ConfigError(f"{folder} does not hold what its name says: delete the folder and run `{fix}`")
        return found

    def tokens(self, data_dir: Path) -> NDArray[np.uint8]:
        """The text, memory-mapped; likewise."""
        import numpy as np

        self.manifest(data_dir)
        return np.memmap(self.folder(data_dir) / TOKENS, dtype=np.uint8, mode="r")


def is_text_name(text: str) -> bool:
    """Whether `data.path` is the name of prepared text, not a path."""
    return _NAME.fullmatch(text) is not None


def library_files() -> list[Path]:
    """The sources of this Python's standard library, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts[:-1])]
    if not found:
        raise ConfigError(f"data=text finds no sources of the standard library in {root}: give files with data.path")
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def own_files(source: Path) -> list[Path]:
    """A file, or all files below a folder, by name; without hidden ones."""
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise ConfigError(f"data.path={source} is no file and no folder: name the text to train on")
    found = [path for path in source.rglob("*") if path.is_file()]
    shown = [path for path in found if not any(part.startswith(".") for part in path.relative_to(source).parts)]
    return sorted(shown, key=lambda path: path.relative_to(source).as_posix())


def joined(files: Iterable[Path]) -> bytes:
    """All files' bytes, one after the other."""
    return b"".join(path.read_bytes() for path in files)


def write_text(source: Path, folder: Path) -> OwnText:
    """Write the text of a file or folder, and what it is; `ConfigError` where there is none."""
    files = own_files(source)
    content = joined(files)
    if not content:
        raise ConfigError(f"data.path={source} holds no text: name a file or a folder that does")
    digest = hashlib.sha256(content).hexdigest()
    write_file(folder / TOKENS, content)
    manifest = TextManifest(sha256=digest, size_bytes=len(content), files=len(files))
    write_file(folder / MANIFEST, msgspec.json.encode(manifest))
    return OwnText(digest[:CONTENT_DIGITS], len(content))
