"""torch's DataLoader, over a Dataset of single samples or over a TensorDataset. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.config.components import TorchLoader

if TYPE_CHECKING:
    from typing import Unpack

    from parallelbench.config.components import Arrays, Data, LoaderArgs
    from parallelbench.loaders.order import BatchLoader


class DataLoader(TorchLoader, frozen=True, kw_only=True):
    """One sample after the other is cropped, mirrored and normalised on the host, by worker processes."""

    def build(self, arrays: Arrays, data: Data, **arguments: Unpack[LoaderArgs]) -> BatchLoader:
        """Build the data sets; workers start with the first batch."""
        from parallelbench.loaders.torch_loader import SampleLoader

        return SampleLoader(arrays, data, self, **arguments)


class TensorDataset(TorchLoader, frozen=True, kw_only=True):
    """The whole data set lies in host memory as floats, normalised once; batches are augmented on the device."""

    def build(self, arrays: Arrays, data: Data, **arguments: Unpack[LoaderArgs]) -> BatchLoader:
        """Build the data sets; workers start with the first batch."""
        from parallelbench.loaders.torch_loader import TensorLoader

        return TensorLoader(arrays, data, self, **arguments)
