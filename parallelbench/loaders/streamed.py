"""Batches from arrays where they lie, for data that don't fit on the device: the options of `stream.py`.

A prepared data set lies in memory-mapped files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from parallelbench.config.components import Loader

if TYPE_CHECKING:
    from typing import Unpack

    from parallelbench.config.components import Arrays, Data, LoaderArgs
    from parallelbench.loaders.order import BatchLoader


class Streamed(Loader, frozen=True, kw_only=True):
    """Images stay where they lie. A thread gathers each batch as uint8; the device augments and normalises it."""

    prefetch: Annotated[int, Meta(ge=1, le=1000)]
    """Batches that are gathered and moved to the device in advance."""

    def build(self, arrays: Arrays, data: Data, **arguments: Unpack[LoaderArgs]) -> BatchLoader:
        """Build the loader; its thread starts with the first batch."""
        from parallelbench.loaders.stream import StreamedLoader

        return StreamedLoader(arrays, data, prefetch=self.prefetch, **arguments)
