"""What a loader is: its options, and how they build one rank's batches. Nothing here loads torch."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from parallelbench.spec.dataset import Kind  # noqa: TC001 - msgspec reads the annotations
from parallelbench.spec.structure import Component

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Unpack

    from parallelbench.loaders.batch_loader import BatchLoader
    from parallelbench.spec.batch import LoaderArgs
    from parallelbench.spec.dataset import Arrays, Data


class Loader(Component, frozen=True, kw_only=True):
    """A loader's options. With every loader, a rank gets the same samples in the same order."""

    feeds: ClassVar[tuple[Kind, ...]] = ("images",)
    """Kinds of samples that it can feed; labels at positions go with tokens."""
    writes_files: ClassVar[bool] = False
    """Whether `prepare` writes anything."""

    def prepare(self, data: Data, data_dir: Path, *, progress: Callable[[str], None] = print) -> None:
        """Write the files that this loader needs besides the prepared data set, unless they exist; most need none."""

    def load(self, data: Data, data_dir: Path) -> Arrays:
        """Open the arrays that batches are taken from; `ConfigError` where they are missing or damaged."""
        return data.load(data_dir)

    def arrays(self, data: Data, data_dir: Path) -> Arrays:
        """What `load` opens, held against what the data set declares: `ConfigError` where they differ."""
        from parallelbench.spec.dataset_check import checked

        return checked(data, self.load(data, data_dir))

    @abstractmethod
    def build(self, arrays: Arrays, data: Data, **arguments: Unpack[LoaderArgs]) -> BatchLoader:
        """Build the batches of one rank."""


class TorchLoader(Loader, frozen=True, kw_only=True):
    """The options of torch's `DataLoader`."""

    feeds: ClassVar[tuple[Kind, ...]] = ("images", "vectors", "tokens")

    workers: Annotated[int, Meta(ge=0, le=256)]
    """Worker processes per rank and split; 0: the rank itself makes the batches. On a CPU, workers share the cores of
    the rank's device."""
    prefetch_factor: Annotated[int, Meta(ge=1, le=1000)]
    """Batches that each worker makes in advance; without workers there are none."""
    persistent_workers: bool
    """Keep the workers from one epoch to the next; false: start them anew in each epoch."""
    pin_memory: bool
    """On CUDA, copy batches to page-locked memory first, so that the GPU fetches them while the host continues."""
