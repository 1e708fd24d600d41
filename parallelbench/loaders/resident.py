"""The data set on the device, as uint8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.loaders.loader import Loader

if TYPE_CHECKING:
    from typing import Unpack

    from parallelbench.data.dataset import Arrays, Data
    from parallelbench.loaders.batch import LoaderArgs
    from parallelbench.loaders.batch_loader import BatchLoader


class Resident(Loader, frozen=True, kw_only=True):
    """The whole data set lies on the device; batches are cut out, normalised and augmented there."""

    def build(self, arrays: Arrays, data: Data, **arguments: Unpack[LoaderArgs]) -> BatchLoader:
        """Move the data set to the device."""
        from parallelbench.loaders.resident_loader import ResidentLoader

        return ResidentLoader(arrays, data, **arguments)
