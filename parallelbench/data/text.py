"""Text, byte by byte: the source of Python's standard library, or text of one's own, prepared once."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
from msgspec import Meta

from parallelbench.config.components import Arrays
from parallelbench.config.sites import prepare_line
from parallelbench.data.content import CONTENT_DIGITS
from parallelbench.data.tokens import Sequences
from parallelbench.errors import ConfigError, count_of
from parallelbench.results.files import write_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray


class Text(Sequences, frozen=True, kw_only=True):
    """Windows of `sequence` bytes, side by side; the label of each byte is the one after it.

    The first `train_samples` windows are trained on, in an order that the run's seed decides; the `test_samples` after
    them are held out. Versions of Python differ in their library's source: what a run read is in its environment, and
    runs on other bytes are not compared.
    """

    train_samples: Annotated[int, Meta(ge=1, le=100_000_000)]
    """Windows in one epoch."""
    test_samples: Annotated[int, Meta(ge=1, le=100_000_000)]
    """Windows that are held out."""
    path: str | None = None
    """Text of your own: for `prepare` a file or folder, for a run the name that `prepare` prints, which has content and
    size; null: the source of Python's standard library."""

    def __post_init__(self) -> None:
        """Refuse more windows than prepared text has; of the library's, that is known when it is read."""
        if self.path is not None and is_text_name(self.path):
            self._require(OwnText.named(self.path).size_bytes)

    @property
    def vocabulary(self) -> int:
        """Bytes."""
        return 256

    @property
    def num_classes(self) -> int:
        """Labels are bytes."""
        return 256

    @property
    def made_by_prepare(self) -> bool:
        """Always."""
        return True

    @property
    def prepare_options(self) -> tuple[str, ...]:
        """Text of one's own is prepared from its file or folder, which no run knows."""
        return ("data.path=PATH",) if self.path else ()

    def missing_files(self, data_dir: Path) -> list[Path]:
        """Of text of one's own, what was prepared; the library is always there."""
        if self.path is None:
            return []
        path = OwnText.named(self.path).folder(data_dir) / TOKENS
        return [] if path.is_file() else [path]

    def fingerprint(self, data_dir: Path) -> str | None:
        """sha256 of all bytes of text of one's own; None: the library's have to be read."""
        return None if self.path is None else OwnText.named(self.path).manifest(data_dir).sha256

    def stored_files(self, data_dir: Path) -> dict[Path, str]:
        """Likewise."""
        if self.path is None:
            return {}
        own = OwnText.named(self.path)
        return {own.folder(data_dir) / TOKENS: own.manifest(data_dir).sha256}

    def load(self, data_dir: Path) -> Arrays:
        """Cut the text into windows, which copies nothing but the labels."""
        import numpy as np

        if self.path is None:
            tokens = np.frombuffer(joined(library_files()), dtype=np.uint8)
        else:
            tokens = OwnText.named(self.path).tokens(data_dir)
        self._require(len(tokens))
        train = self.train_samples
        inputs, labels = self._windows(tokens), self._windows(tokens[1:])
        return Arrays(
            train_images=inputs[:train],
            train_labels=labels[:train].astype(np.int64),
            test_images=inputs[train:],
            test_labels=labels[train:].astype(np.int64),
        )

    def _windows(self, tokens: NDArray[np.uint8]) -> NDArray[np.uint8]:
        count = self.train_samples + self.test_samples
        return tokens[: count * self.sequence].reshape(count, self.sequence)

    def _require(self, size_bytes: int) -> None:
        """Refuse text that has fewer windows, the byte after the last one included."""
        windows = max(0, size_bytes - 1) // self.sequence
        if windows < self.train_samples + self.test_samples:
            raise ConfigError(
                f"data=text has {size_bytes} bytes, which are {count_of(windows, 'window')} of "
                f"data.sequence={self.sequence} and a byte after them, but data.train_samples={self.train_samples} and "
                f"data.test_samples={self.test_samples} take {self.train_samples + self.test_samples}: choose fewer "
                "samples, a smaller data.sequence, or more text with data.path"
            )


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
            found = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=TextManifest)
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
