"""A data set whose training rows an engine has chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.config.components import Arrays, Data

if TYPE_CHECKING:
    from pathlib import Path


class PreparedRows(Data, frozen=True, kw_only=True):
    """Another data set with another number of samples; its arrays exist in memory only."""

    stored: Data
    """The data set that was prepared."""
    train_samples: int
    """Training samples that were prepared."""
    test_samples: int
    """Test samples that belong to them."""

    @property
    def mean(self) -> tuple[float, ...]:  # type: ignore[override]
        """As of the data set."""
        return self.stored.mean

    @property
    def std(self) -> tuple[float, ...]:  # type: ignore[override]
        """As of the data set."""
        return self.stored.std

    @property
    def flip(self) -> bool:  # type: ignore[override]
        """As of the data set."""
        return self.stored.flip

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of an image."""
        return self.stored.shape

    @property
    def num_classes(self) -> int:
        """As of the data set, also where some labels don't occur any more."""
        return self.stored.num_classes

    def missing_files(self, data_dir: Path) -> list[Path]:
        """Those of the data set."""
        return self.stored.missing_files(data_dir)

    def load(self, data_dir: Path) -> Arrays:
        """Never: the rank that prepared the rows has the arrays."""
        raise AssertionError("prepared rows lie in no file")
