"""Memory of a device that trains a transformer, by formula: state, activations, the loss, and what is gathered.

Activations after Korthikanti et al. 2022 (arXiv 2205.05198), without dropout; state after Rajbhandari et al. 2020
(arXiv 1910.02054). Parameters, gradients and Adam's states are in fp32, products and what is kept in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from analysis.advisor import transformer

if TYPE_CHECKING:
    from analysis.advisor.layouts import Layouts, Values

RESERVED = 1.05
"""What the allocator reserves ÷ the sum of the parts; from torchtitan's Llama 3.1 8B on 8 and on 128 GPUs."""
LOGIT_BYTES = 14.0
"""Per logit at the loss: in 16 bits, in fp32, the logarithm of softmax, and a gradient of the same size."""
STATE_BYTES = 16.0
"""Per parameter: itself, its gradient and Adam's two states."""


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of the fullest device; they add up to the peak, since what is freed between them stays reserved."""

    state: Values
    """Parameters, gradients, and the optimizer's states."""
    gathered: Values
    """Parameters and gradients that are whole while they are needed, and copies in 16 bits."""
    activations: Values
    """Kept for backward, of all micro-batches in flight, and those of a layer that is recomputed."""
    loss: Values
    """Logits, and what the loss makes of them."""

    @property
    def peak(self) -> Values:
        """What the allocator reserves."""
        result: Values = RESERVED * sum((getattr(self, each.name) for each in fields(self)), start=np.zeros(()))
        return result


def memory_parts(layouts: Layouts) -> MemoryParts:
    """Each layout's memory on its fullest device: the first stage of a pipeline, or the last, which has the loss."""
    kept, working = _kept_per_layer(layouts)
    first = _in_flight(layouts) * layouts.layers / layouts.pipeline * kept + working
    loss = LOGIT_BYTES * transformer.logits(layouts)
    last = layouts.layers / layouts.pipeline * kept + working
    apart = layouts.pipeline > 1
    has_loss = ~apart | (last + loss > first)
    return MemoryParts(
        state=_state(layouts),
        gathered=_gathered(layouts),
        activations=np.where(apart & has_loss, last, first),
        loss=np.where(has_loss, loss, 0.0),
    )


def _kept_per_layer(layouts: Layouts) -> tuple[Values, Values]:
    """What a layer keeps of a micro-batch, and what the layer at work needs more in backward.

    Selective recomputation under fused attention keeps every other product and attention's output, as torchtitan does.
    """
    tokens, tensor = transformer.tokens(layouts), layouts.tensor
    copied_by = np.where(layouts.sequence_parallel > 0, tensor, 1.0)
    keys = layouts.hidden * layouts.kv_heads / layouts.heads
    hidden, width = layouts.hidden, layouts.mlp_width
    per_unit = 4.0 + 4.0 * layouts.gated
    # Experts keep what they take and what they give, beside their hidden units.
    width = width * layouts.visits
    sent = np.where(layouts.experts > 1, 4.0 * hidden * layouts.visits, 0.0)
    cut = 4.0 * hidden + 4.0 * keys + per_unit * width + sent
    scores = np.where(layouts.fused_attention > 0, 0.0, 5.0 * layouts.heads * layouts.sequence)
    everything = 8.0 * hidden / copied_by + (cut + scores) / tensor
    inputs = 2.0 * hidden / copied_by
    every_other = inputs + 2.0 * hidden / copied_by + (4.0 * hidden + 2.0 * keys + 2.0 * width + sent) / tensor
    without_scores = everything - scores / tensor
    selective = np.where(layouts.fused_attention > 0, every_other, without_scores)
    kept = np.where(layouts.recompute > 0, inputs, np.where(layouts.selective > 0, selective, everything))
    repeated = np.where(kept < everything, everything - kept, 0.0)
    # A tensor group that cuts the sequence gathers the inputs of both its blocks; gradients pass the widest products.
    gathered = np.where((layouts.sequence_parallel > 0) & (tensor > 1), 4.0 * hidden * (1.0 - 1.0 / tensor), 0.0)
    gradients = 4.0 * hidden + 4.0 * width / tensor
    return tokens * kept, tokens * (repeated + gathered + gradients)


def _in_flight(layouts: Layouts) -> Values:
    """Micro-batches whose activations the first stage keeps at once, in units of all of a device's layers."""
    count, stages, chunks = np.maximum(layouts.micro_batches, 1.0), layouts.pipeline, layouts.chunks
    interleaved = np.minimum((chunks - 1.0) * stages + 2.0 * (stages - 1.0) + 1.0, count * chunks) / chunks
    result: Values = np.where(chunks > 1, interleaved, np.minimum(stages, count))
    return result


def _state(layouts: Layouts) -> Values:
    shards = np.where(layouts.sharded > 0, layouts.replicas / layouts.copies, 1.0)
    owners = np.where(layouts.owners > 0, layouts.replicas, shards)
    of_adam = 0.5 * STATE_BYTES
    held, owned = (transformer.parameters_per_shard(layouts, each) for each in (shards, owners))
    return held * (STATE_BYTES - of_adam) + owned * of_adam


def _gathered(layouts: Layouts) -> Values:
    """Copies in 16 bits; under FSDP two layers and the ends, in pipelines whole stages with their summed gradients."""
    held = transformer.device_parameters(layouts)
    of_experts = layouts.experts / layouts.expert * transformer.mlp_parameters(layouts)
    layer = (transformer.shared_parameters(layouts) + of_experts) / layouts.tensor
    embedding = transformer.embedding_parameters(layouts) / layouts.tensor
    head = np.where(layouts.tied > 0, 0.0, embedding)
    by_layer = 2.0 * (2.0 * layer + embedding + head) + 6.0 * np.maximum(layer, embedding)
    by_stage = 6.0 * held
    sharded = np.where(layouts.pipeline > 1, by_stage, by_layer)
    result: Values = np.where(layouts.sharded > 0, sharded, 2.0 * held)
    return result
