"""Transformers and how they are laid over devices: one array per quantity, one element per candidate."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Values = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Candidates, as columns of equal length; all sizes are per step and, where nothing else is said, of the whole job.

    `devices` = `tensor` × `pipeline` × `data`. Ranks are numbered as Megatron-LM does: the tensor group is innermost,
    then data, then pipeline (Narayanan et al. 2021, arXiv 2104.04473).
    """

    hidden: Values
    """Width of the residual stream."""
    layers: Values
    """Transformer layers."""
    heads: Values
    """Attention heads."""
    vocabulary: Values
    """Entries of the embedding, whose weights the last layer shares."""
    sequence: Values
    """Tokens of a sample."""
    global_batch: Values
    """Samples per step over all devices."""
    micro_batch: Values
    """Samples that one data-parallel rank takes at a time."""
    tensor: Values
    """Devices that share each layer's matrices."""
    pipeline: Values
    """Stages, one per device."""
    data: Values
    """Data-parallel replicas."""
    recompute: Values
    """1: the forward pass of each layer is repeated in backward; 0: its activations are kept."""
    sharded: Values
    """1: parameters, gradients and optimizer state are cut over the data-parallel ranks (FSDP, ZeRO 3); 0: copied."""
    fused_attention: Values
    """1: causal attention that never writes the matrix of scores (FlashAttention); 0: matrices of scores in memory."""
    fp8: Values
    """1: the layers' products with weights are in 8 bits; 0: in 16."""

    def __len__(self) -> int:
        return len(self.hidden)

    @property
    def devices(self) -> Values:
        """Devices of the whole job."""
        return self.tensor * self.pipeline * self.data

    @property
    def micro_batches(self) -> Values:
        """Micro-batches that one data-parallel rank takes per step."""
        return self.global_batch / (self.data * self.micro_batch)

    @property
    def samples_per_micro_batch(self) -> Values:
        """The same as `micro_batch`, or fewer where a rank's share of the batch is smaller."""
        return np.minimum(self.micro_batch, self.global_batch / self.data)

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> Layouts:
        """Only these rows."""
        return replace(self, **{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def row(self, index: int) -> dict[str, float]:
        """One candidate as plain numbers."""
        return {field.name: float(getattr(self, field.name)[index]) for field in fields(self)}


def layouts_of(columns: Mapping[str, object]) -> Layouts:
    """Layouts from arrays or single numbers, which are repeated to the common length."""
    names = [field.name for field in fields(Layouts)]
    arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(columns[name], dtype=np.float64)) for name in names))
    return Layouts(**{name: np.array(array) for name, array in zip(names, arrays, strict=True)})
