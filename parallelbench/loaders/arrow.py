"""A memory-mapped Arrow file, for data that don't fit on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from parallelbench.loaders.base import Loader, LoaderArgs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Unpack

    from parallelbench.data.base import Arrays, Data
    from parallelbench.data.loader import BatchLoader


class Arrow(Loader, frozen=True, kw_only=True):
    """Images stay in a file; a thread gathers each batch as uint8, and the device augments and normalises it."""

    writes_files: ClassVar[bool] = True

    prefetch: Annotated[int, Meta(ge=1, le=1000)]
    """Batches that are gathered and moved to the device ahead."""

    def prepare(self, data: Data, data_dir: Path, *, progress: Callable[[str], None] = print) -> None:
        """Convert the data set, once per data folder."""
        from parallelbench.data.arrow import convert

        convert(data, data_dir, progress=progress)

    def load(self, data: Data, data_dir: Path) -> Arrays:
        """Map the converted files into memory."""
        from parallelbench.data.arrow import open_arrays

        return open_arrays(data, data_dir)

    def build(self, arrays: Arrays, data: Data, **feed: Unpack[LoaderArgs]) -> BatchLoader:
        """Build what gathers; its thread starts with the first batch."""
        from parallelbench.data.streamed import StreamedLoader

        return StreamedLoader(arrays, data, prefetch=self.prefetch, **feed)
