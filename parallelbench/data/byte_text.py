"""Text, byte by byte: the source of Python's standard library, which every machine has, or text of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from parallelbench.config.components import Arrays
from parallelbench.data.corpus import TOKENS, OwnText, is_text_name, joined, library_files
from parallelbench.data.sequences import Sequences
from parallelbench.errors import ConfigError, count_of

if TYPE_CHECKING:
    from pathlib import Path

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
