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

    `devices` = `tensor` × `context` × `data` × `pipeline`. Ranks are numbered as Megatron-LM does: the tensor group is
    innermost, then context and data, then pipeline (Narayanan et al. 2021, arXiv 2104.04473).
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
    kv_heads: Values
    """Heads of keys and values, which groups of queries share (Ainslie et al. 2023, arXiv 2305.13245)."""
    mlp_width: Values
    """Width of a layer's hidden units."""
    gated: Values
    """1: the MLP has a gate, and three matrices (SwiGLU, Shazeer 2020, arXiv 2002.05202); 0: two (GELU)."""
    tied: Values
    """1: the last layer shares the embedding's weights; 0: it has its own."""
    learned: Values
    """1: positions are learned, and linear layers and norms have biases; 0: rotary positions, no biases (Llama)."""
    context: Values
    """Devices that share each sequence (ring attention, Liu et al. 2023, arXiv 2310.01889)."""
    copies: Values
    """Copies of the model under `sharded`: 1 under FSDP, more under HSDP."""
    owners: Values
    """Where not sharded: 1: every data-parallel rank updates its part of the parameters (ZeRO 1); 0: all of them."""
    sequence_parallel: Values
    """1: norms and residuals are cut along the sequence within a tensor group; 0: copied."""
    chunks: Values
    """Stages per device of a pipeline: 1: 1F1B; more: interleaved 1F1B."""
    selective: Values
    """1: attention's scores are recomputed, or where it is fused every other product and elementwise work; 0: not."""

    experts: Values
    """MLPs of a layer (Switch Transformer, Fedus et al. 2022, arXiv 2101.03961); 1: a dense layer."""
    top_k: Values
    """Experts that each token visits."""
    capacity: Values
    """Tokens that an expert has room for ÷ its even share of them; the room is computed, filled or not."""
    expert: Values
    """Devices over which the experts are cut, out of those that share a replica's gradients."""

    def __len__(self) -> int:
        return len(self.hidden)

    @property
    def devices(self) -> Values:
        """Devices of the whole job."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def replicas(self) -> Values:
        """Devices over which gradients of the same parameters are reduced."""
        return self.data * self.context

    @property
    def micro_batches(self) -> Values:
        """Micro-batches that one data-parallel rank takes per step."""
        return self.global_batch / (self.data * self.micro_batch)

    @property
    def samples_per_micro_batch(self) -> Values:
        """The same as `micro_batch`, or fewer where a rank's share of the batch is smaller."""
        return np.minimum(self.micro_batch, self.global_batch / self.data)

    @property
    def visits(self) -> Values:
        """MLPs that compute each token, empty room included."""
        return np.where(self.experts > 1, self.top_k * self.capacity, 1.0)

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> Layouts:
        """Only these rows."""
        return replace(self, **{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def row(self, index: int) -> dict[str, float]:
        """One candidate as plain numbers."""
        return {field.name: float(getattr(self, field.name)[index]) for field in fields(self)}


_ONES = ("tied", "learned", "context", "copies", "chunks", "experts", "top_k", "capacity", "expert")
_ZEROS = ("gated", "owners", "sequence_parallel", "selective")
_USUAL = dict.fromkeys(_ONES, np.float64(1.0)) | dict.fromkeys(_ZEROS, np.float64(0.0))
"""What holds of a layout that says nothing else: GPT-2's kind of model, under data, tensor and pipeline parallelism."""


def layouts_of(columns: Mapping[str, object]) -> Layouts:
    """Layouts from arrays or single numbers, which are repeated to the common length."""
    names = [field.name for field in fields(Layouts)]
    given = {name: np.asarray(value, dtype=np.float64) for name, value in columns.items()}
    values = {"kv_heads": given["heads"], "mlp_width": 4.0 * given["hidden"]} | _USUAL | given
    arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(values[name], dtype=np.float64)) for name in names))
    return Layouts(**{name: np.array(array) for name, array in zip(names, arrays, strict=True)})
