"""Text, byte by byte: the source of Python's standard library, or text of one's own, prepared once."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from parallelbench.config.components import Arrays
from parallelbench.config.sites import prepare_line
from parallelbench.data.content import OwnContent, file_digest, named, own_content
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

    made_by_prepare: ClassVar[bool] = True
    vocabulary: ClassVar[int] = 256
    num_classes: ClassVar[int] = 256

    train_samples: Annotated[int, Meta(ge=1, le=100_000_000)]
    """Windows in one epoch."""
    test_samples: Annotated[int, Meta(ge=1, le=100_000_000)]
    """Windows that are held out."""
    path: str | None = None
    """Text of your own: for `prepare` a file or folder, for a run the name that `prepare` prints, which has content and
    size; null: the source of Python's standard library."""

    def __post_init__(self) -> None:
        """Refuse more windows than prepared text has; of the library's, that is known when it is read."""
        if self.path is not None and (own := named(self.path, 1)):
            self._require(own.sizes[0])

    @property
    def own(self) -> OwnContent | None:
        """What `path` names; None: the library's text. `ConfigError` for a path, which only `prepare` takes."""
        return own_content(self, "path", sizes=1, of="a file or folder")

    @property
    def prepare_options(self) -> tuple[str, ...]:
        """Text of one's own is prepared from its file or folder, which no run knows."""
        return ("data.path=PATH",) if self.path else ()

    def missing_files(self, data_dir: Path) -> list[Path]:
        """Of text of one's own, what was prepared; the library is always there."""
        if self.own is None:
            return []
        path = file_of(self.own, data_dir)
        return [] if path.is_file() else [path]

    def fingerprint(self, data_dir: Path) -> str | None:
        """sha256 of all bytes of text of one's own, which is read; None: the library's windows are."""
        return stored_sha256(self.own, data_dir) if self.own else None

    def load(self, data_dir: Path) -> Arrays:
        """Cut the text into windows, which copies nothing but the labels."""
        import numpy as np

        if self.own:
            tokens: NDArray[np.uint8] = np.memmap(stored(self.own, data_dir), dtype=np.uint8, mode="r")
        else:
            tokens = np.frombuffer(joined(library_files()), dtype=np.uint8)
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


TOKENS = "tokens.bin"
"""Name of the file in a prepared folder."""
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
"""Folders of the standard library whose text some installations lack, or which is not the library's."""


def stored(own: OwnContent, data_dir: Path) -> Path:
    """The file of text of one's own; `ConfigError` with the `prepare` line where it is missing, or another's."""
    path = file_of(own, data_dir)
    if not path.is_file() or (path.stat().st_size,) != own.sizes:
        raise _damaged(own, data_dir)
    return path


def stored_sha256(own: OwnContent, data_dir: Path) -> str:
    """sha256 of that file, which is read; likewise where it holds something else than its name says."""
    if not (found := file_digest(stored(own, data_dir))).startswith(own.digits):
        raise _damaged(own, data_dir)
    return found


def file_of(own: OwnContent, data_dir: Path) -> Path:
    """Where it lies."""
    return Path(data_dir).expanduser() / f"text-{own.name}" / TOKENS


def _damaged(own: OwnContent, data_dir: Path) -> ConfigError:
    return ConfigError(
        f"data.path={own.name} is not prepared in {data_dir}, or its file there holds something else: delete "
        f"{file_of(own, data_dir).parent} and run `{prepare_line('text', data_dir, 'data.path=PATH')}`"
    )


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


def write_text(source: Path, folder: Path) -> OwnContent:
    """Write the text of a file or folder; `ConfigError` where there is none."""
    content = joined(own_files(source))
    if not content:
        raise ConfigError(f"data.path={source} holds no text: name a file or a folder that does")
    write_file(folder / TOKENS, content)
    return OwnContent(hashlib.sha256(content).hexdigest(), (len(content),))
