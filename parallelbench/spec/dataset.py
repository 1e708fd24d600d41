"""What a data set is: options, kind and sizes that are known before anything is read, and arrays."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

from parallelbench.errors import ConfigError
from parallelbench.spec.launchers import prepare_line, shipped
from parallelbench.spec.structure import Component

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray


Kind = Literal["images", "vectors", "tokens"]
"""What a sample is. images: squares of bytes. vectors: numbers, float32. tokens: whole numbers, one per position."""


class ModelInput(TypedDict):
    """What a model is told of a sample.

    Of images, channels and side; of vectors, the number of features, and 1; of tokens, the size of the vocabulary, and
    the number of positions.
    """

    in_channels: int
    image_size: int


@dataclass(frozen=True)
class Arrays:
    """The stored samples and labels of a data set; each may be a memory map.

    `…_images`, whatever their kind: uint8 of shape (n, channels, height, width), float32 of shape (n, features), or
    integers of shape (n, positions). `…_labels`: int64 of shape (n,) or, where the data set says so, (n, positions).
    """

    train_images: NDArray[Any]
    train_labels: NDArray[np.int64]
    test_images: NDArray[Any]
    test_labels: NDArray[np.int64]


class Data(Component, frozen=True, kw_only=True):
    """A data set's options and sizes. Nothing here loads torch."""

    mean: ClassVar[tuple[float, ...]]
    """Mean of the training images, on a scale from 0 to 1: one per channel, or one for all channels. Of vectors, one
    per feature, or one for all; of tokens none."""
    std: ClassVar[tuple[float, ...]]
    """Standard deviation of the training samples, like `mean`."""
    flip: ClassVar[bool]
    """Whether an image means the same when it is flipped horizontally: a cat does, a digit doesn't."""

    augment: bool
    """Shift training images by up to `image_size // 8` pixels; flip half of them where `flip` allows it."""

    @property
    def kind(self) -> Kind:
        """What a sample is."""
        return "images"

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of a sample: channels, height and width of an image, which are equal; (features,); or (positions,)."""

    @property
    def vocabulary(self) -> int:
        """Different tokens: 0 … vocabulary − 1; 0 where there are none."""
        return 0

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Of a sample's labels: () for one, (positions,) for one at each position."""
        return ()

    @property
    def labels_per_sample(self) -> int:
        """Predictions that a model makes for a sample."""
        return math.prod(self.label_shape)

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens of a sample, each of which has a label; None where samples are something else."""
        return self.labels_per_sample if self.kind == "tokens" and self.label_shape == self.shape else None

    @property
    def model_input(self) -> ModelInput:
        """What models are told."""
        if self.kind == "images":
            return {"in_channels": self.shape[0], "image_size": self.shape[1]}
        if self.kind == "vectors":
            return {"in_channels": self.shape[0], "image_size": 1}
        return {"in_channels": self.vocabulary, "image_size": self.shape[0]}

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of labels: 0 … num_classes − 1."""

    @property
    @abstractmethod
    def train_samples(self) -> int:
        """Training samples in one epoch (copies of an image count each)."""

    @property
    @abstractmethod
    def test_samples(self) -> int:
        """Test samples; each is evaluated exactly once."""

    @property
    def stored_train_samples(self) -> int:
        """Training images that `load` returns; of `train_samples`, a whole part: an epoch may take each repeatedly."""
        return self.train_samples

    @abstractmethod
    def missing_files(self, data_dir: Path) -> list[Path]:
        """Prepared files that are missing; empty: ready to load."""

    @property
    def made_by_prepare(self) -> bool:
        """Whether `parallelbench prepare` makes its files; if not, whoever owns the class writes them."""
        return False

    def require_files(self, data_dir: Path) -> None:
        """Raise `ConfigError`, with the place of the files and who writes them, where some are missing."""
        missing = self.missing_files(data_dir)
        if not missing:
            return
        names, where = ", ".join(path.name for path in missing), missing[0].parent
        if not self.made_by_prepare:
            raise ConfigError(
                f"data={self.name}: {names} missing in {where.absolute()}; `parallelbench prepare` does not make it: "
                "write it there, or choose the folder that has it with site.data_dir=DIR"
            )
        own = "" if shipped("data", self.name) else " with the --conf and --plugin of this command"
        raise ConfigError(
            f"data={self.name} is not prepared: {names} missing in {where}; "
            f"run `{prepare_line(self.name, data_dir, *self.prepare_options)}`{own}"
        )

    @property
    def prepare_options(self) -> tuple[str, ...]:
        """What `parallelbench prepare data=NAME` needs besides the name, for these arrays."""
        return ()

    def fingerprint(self, data_dir: Path) -> str | None:
        """Hexadecimal digits that identify the arrays without reading them; None: they can't be identified so."""
        return None

    def stored_files(self, data_dir: Path) -> dict[Path, str]:
        """The files that hold the arrays → the sha256 that `fingerprint` says they have; empty: it needs no file."""
        return {}

    @abstractmethod
    def load(self, data_dir: Path) -> Arrays:
        """Open the arrays, never downloading; `ConfigError` with the `prepare` line where any are missing."""
