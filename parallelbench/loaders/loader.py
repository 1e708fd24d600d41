"""What a loader is: options, and how it is built beside a rank. Nothing here loads torch."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from parallelbench.spec.structure import Component

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Unpack

    from parallelbench.data.dataset import Arrays, Data
    from parallelbench.loaders.batch import LoaderArgs
    from parallelbench.loaders.batch_loader import BatchLoader


class Loader(Component, frozen=True, kw_only=True):
    """A loader's options. Whatever they are, every rank gets the same samples in the same order."""

    writes_files: ClassVar[bool] = False
    """Whether `prepare` writes anything."""

    def prepare(self, data: Data, data_dir: Path, *, progress: Callable[[str], None] = print) -> None:
        """Write what this loader needs besides the prepared data set, unless it is there; most need nothing."""

    def load(self, data: Data, data_dir: Path) -> Arrays:
        """Open the arrays that batches are taken from; `ConfigError` where they are missing or damaged."""
        return data.load(data_dir)

    @abstractmethod
    def build(self, arrays: Arrays, data: Data, **feed: Unpack[LoaderArgs]) -> BatchLoader:
        """Build what feeds one rank."""


class TorchLoader(Loader, frozen=True, kw_only=True):
    """The options of torch's `DataLoader`."""

    workers: Annotated[int, Meta(ge=0, le=256)]
    """Processes per rank that make training batches, and as many for evaluation; 0: the rank itself does. On a CPU they
    share the cores of the rank's device."""
    prefetch_factor: Annotated[int, Meta(ge=1, le=1000)]
    """Batches that each worker makes ahead; without workers nothing is made ahead."""
    persistent_workers: bool
    """Keep the workers from one epoch to the next; without: start them anew in each epoch."""
    pin_memory: bool
    """On CUDA, copy batches to page-locked memory first, so that the GPU fetches them while the host goes on."""
