"""Parameters, FLOPs and bytes of a decoder-only transformer by formula, per layer and micro-batch.

A layer has attention and an MLP four times as wide as the residual stream (Vaswani et al. 2017). Products count two
FLOPs per multiply-add. Backward does twice the forward's work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.advisor.layouts import Layouts, Values

HALF = 2.0
"""Bytes of an activation, a gathered parameter or a reduced gradient in fp16 or bf16."""


def layer_parameters(layouts: Layouts) -> Values:
    """Parameters of one layer: 12·h² in matrices, 13·h in biases and norms."""
    return 12.0 * layouts.hidden**2 + 13.0 * layouts.hidden


def embedding_parameters(layouts: Layouts) -> Values:
    """Parameters of tokens and learned positions."""
    return (layouts.vocabulary + layouts.sequence) * layouts.hidden


def parameters(layouts: Layouts) -> Values:
    """Parameters of the whole model, the last layer sharing the embedding's, and the last norm."""
    return layouts.layers * layer_parameters(layouts) + embedding_parameters(layouts) + 2.0 * layouts.hidden


def matrix_flops(layouts: Layouts) -> Values:
    """Forward FLOPs of one layer's products with weights, for one micro-batch, on one device: 24·b·s·h² ÷ t."""
    return 24.0 * tokens(layouts) * layouts.hidden**2 / layouts.tensor


def attention_flops(layouts: Layouts) -> Values:
    """Forward FLOPs of one layer's scores and their product with the values: 4·b·s²·h ÷ t, half of it where causal.

    Only a fused kernel leaves out what the causal mask hides.
    """
    full = 4.0 * tokens(layouts) * layouts.sequence * layouts.hidden / layouts.tensor
    return np.where(layouts.fused_attention > 0, 0.5 * full, full)


def score_bytes(layouts: Layouts) -> Values:
    """Forward traffic of one layer's scores where they are written: 13 bytes per score.

    Written by the product, read and written by softmax, read and written by dropout beside a mask, read by the product.
    """
    scores = tokens(layouts) * layouts.sequence * layouts.heads / layouts.tensor
    return np.where(layouts.fused_attention > 0, 0.0, 13.0 * scores)


def elementwise_bytes(layouts: Layouts) -> Values:
    """Forward traffic of norms, residuals and dropout (on every device of a tensor group), and of what is cut by it.

    Counted per element of the residual stream: two norms (read, write), two sums with dropout (two reads, a write, a
    mask) make 22 bytes; GELU on four times the width, and the transposition of queries, keys and values make 28.
    """
    return tokens(layouts) * layouts.hidden * (22.0 + 28.0 / layouts.tensor)


def logit_flops(layouts: Layouts) -> Values:
    """Forward FLOPs of the product with the vocabulary, on one device of the last stage."""
    return 2.0 * tokens(layouts) * layouts.hidden * layouts.vocabulary / layouts.tensor


def logits(layouts: Layouts) -> Values:
    """Logits of one micro-batch on one device of the last stage."""
    return tokens(layouts) * layouts.vocabulary / layouts.tensor


def odd_vocabulary(layouts: Layouts) -> NDArray[np.bool_]:
    """Whether the vocabulary is no multiple of 8 and nothing pads it: tensor cores then don't work at full speed.

    NVIDIA, "Matrix multiplication background", §2.2. A tensor group's shares are padded to be equal.
    """
    result: NDArray[np.bool_] = (layouts.vocabulary % 8 != 0) & (layouts.tensor == 1)
    return result


def unfused_softmax(layouts: Layouts) -> Values:
    """1 where scores are written but Megatron-LM's fused softmax can't take them: it needs 4 matrices or a multiple."""
    matrices = layouts.samples_per_micro_batch * layouts.heads / layouts.tensor
    return np.where((layouts.fused_attention > 0) | (matrices % 4 == 0), 0.0, 1.0)


def tokens(layouts: Layouts) -> Values:
    """Tokens of one micro-batch."""
    return layouts.samples_per_micro_batch * layouts.sequence


def boundary_bytes(layouts: Layouts) -> Values:
    """Activations of one micro-batch between two layers."""
    return HALF * tokens(layouts) * layouts.hidden


def device_parameters(layouts: Layouts) -> Values:
    """Parameters that one device of the fullest stage computes with: its layers, and the embedding."""
    deep = layouts.layers / layouts.pipeline * layer_parameters(layouts)
    return (deep + embedding_parameters(layouts)) / layouts.tensor


def model_flops(layouts: Layouts) -> Values:
    """FLOPs of a step that the model itself needs, without recomputation, of all devices: what MFU counts.

    Attention is counted in full, as PaLM's appendix B does (Chowdhery et al. 2022, arXiv 2204.02311).
    """
    products = 24.0 * layouts.hidden**2 + 4.0 * layouts.sequence * layouts.hidden
    per_token = layouts.layers * products + 2.0 * layouts.hidden * layouts.vocabulary
    return 3.0 * layouts.global_batch * layouts.sequence * per_token
