"""torch's Dataset and DataLoader, one sample at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.config.components import TorchLoader

if TYPE_CHECKING:
    from typing import Unpack

    from parallelbench.config.components import Arrays, Data, LoaderArgs
    from parallelbench.loaders.batch_loader import BatchLoader


class DataLoader(TorchLoader, frozen=True, kw_only=True):
    """One sample after the other is cropped, mirrored and normalised on the host, by worker processes."""

    def build(self, arrays: Arrays, data: Data, **arguments: Unpack[LoaderArgs]) -> BatchLoader:
        """Build the data sets; workers start with the first batch."""
        from parallelbench.loaders.sample_loader import SampleLoader

        return SampleLoader(arrays, data, self, **arguments)
