"""A decoder-only transformer as options describe it (model=gpt model.layers=…), and what it takes by formula.

Parameters, FLOPs and bytes are per layer and micro-batch. A layer has attention and an MLP (Vaswani et al. 2017), in
the shape of GPT-2 or of Llama. Products count two FLOPs per multiply-add. Backward does twice the forward's work.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from analysis.advisor.step import BACKWARD, EVENLY, T, Work
from parallelbench.config.structure import Count, Node, structure
from parallelbench.errors import ConfigError
from parallelbench.models.gpt import check_heads, hidden_units

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from analysis.advisor.layouts import Layouts, Values
    from analysis.advisor.machine import Machines


class GptShape(Node, frozen=True, kw_only=True):
    """Its options; the defaults are GPT-2's smallest model."""

    layers: Count = 12
    """Blocks of attention and MLP."""
    width: Count = 768
    """Width of the residual stream; a multiple of `heads`."""
    heads: Count = 12
    """Attention heads."""
    kv_heads: Count | None = None
    """Heads of keys and values; divides `heads`. null: as many."""
    sequence: Count = 1024
    """Tokens of a sample."""
    vocabulary: Count = 50_257
    """Entries of the embedding."""
    positions: Literal["learned", "rope"] = "learned"
    """learned: an embedding, and biases in all linear layers; rope: rotary, no biases."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """gelu: two matrices; swiglu: three, with a gate."""
    mlp_width: Count | None = None
    """Hidden units; null: 4 × width, under swiglu two thirds of that in multiples of 256."""
    tied: bool = True
    """Whether the last layer shares the embedding's weights."""
    experts: Count = 1
    """MLPs of every layer, of which a router chooses; 1: a dense model."""
    top_k: Count = 1
    """Experts that each token visits; at most `experts`."""
    capacity: float = 1.25
    """Tokens that an expert has room for ÷ its even share, from 1 on; without experts it says nothing."""

    def __post_init__(self) -> None:
        """Check what single fields can't say."""
        if self.top_k > self.experts:
            raise ConfigError(f"model.top_k={self.top_k} is more than model.experts={self.experts}: choose fewer")
        if not 1.0 <= self.capacity <= self.experts / self.top_k and self.experts > 1:
            raise ConfigError(
                f"model.capacity={self.capacity:g} is no room for tokens: choose from 1 to "
                f"{self.experts / self.top_k:g}, where every expert has room for all"
            )
        check_heads(self.width, heads=self.heads, kv_heads=self.kv_heads)

    @property
    def hidden_units(self) -> int:
        """Of an MLP."""
        return hidden_units(self.width, mlp=self.mlp, mlp_width=self.mlp_width)

    def columns(self) -> dict[str, float]:
        """As the formulas name it."""
        return {
            "hidden": self.width,
            "layers": self.layers,
            "heads": self.heads,
            "kv_heads": self.kv_heads or self.heads,
            "mlp_width": self.hidden_units,
            "gated": float(self.mlp == "swiglu"),
            "tied": float(self.tied),
            "learned": float(self.positions == "learned"),
            "vocabulary": self.vocabulary,
            "sequence": self.sequence,
            "experts": self.experts,
            "top_k": self.top_k,
            "capacity": self.capacity,
            "fused_attention": 1.0,
            "fp8": 0.0,
        }


def gpt_shape(options: Mapping[str, object]) -> GptShape:
    """From `model.…` overrides; raises `ConfigError` that names the key, its value and what is valid."""
    shape: GptShape = structure(dict(options), GptShape, "model")
    return shape


HALF = 2.0
"""Bytes of an activation, a gathered parameter or a reduced gradient in fp16 or bf16."""


def attention_matrices(layouts: Layouts) -> Values:
    """Parameters of one layer's queries and outputs, keys and values, and of the router that chooses experts."""
    grouped = layouts.kv_heads / layouts.heads
    router = np.where(layouts.experts > 1, layouts.experts * layouts.hidden, 0.0)
    return (2.0 + 2.0 * grouped) * layouts.hidden**2 + router


def mlp_matrices(layouts: Layouts) -> Values:
    """Parameters of one MLP's matrices."""
    return (2.0 + layouts.gated) * layouts.hidden * layouts.mlp_width


def shared_parameters(layouts: Layouts) -> Values:
    """Parameters of one layer without its MLPs: 13·h vectors in GPT-2 with them, two norms without biases in Llama."""
    grouped = layouts.kv_heads / layouts.heads
    vectors = np.where(layouts.learned > 0, (6.0 + 2.0 * grouped) * layouts.hidden, 2.0 * layouts.hidden)
    return attention_matrices(layouts) + vectors


def mlp_parameters(layouts: Layouts) -> Values:
    """Parameters of one MLP: of a dense layer's, or of one expert."""
    return mlp_matrices(layouts) + np.where(layouts.learned > 0, layouts.mlp_width + layouts.hidden, 0.0)


def layer_parameters(layouts: Layouts) -> Values:
    """Parameters of one layer with all its experts; 12·h² and 13·h in GPT-2."""
    return shared_parameters(layouts) + layouts.experts * mlp_parameters(layouts)


def embedding_parameters(layouts: Layouts) -> Values:
    """Parameters of tokens and learned positions."""
    return (layouts.vocabulary + layouts.learned * layouts.sequence) * layouts.hidden


def head_parameters(layouts: Layouts) -> Values:
    """Parameters of the last layer, where it has its own."""
    return (1.0 - layouts.tied) * layouts.vocabulary * layouts.hidden


def parameters(layouts: Layouts) -> Values:
    """Parameters of the whole model, and the last norm."""
    ends = embedding_parameters(layouts) + head_parameters(layouts) + (1.0 + layouts.learned) * layouts.hidden
    return layouts.layers * layer_parameters(layouts) + ends


TILES = ((256.0, 128.0, 1.0), (128.0, 256.0, 1.0), (128.0, 128.0, 0.93), (128.0, 64.0, 0.8), (64.0, 64.0, 0.6))
"""Rows and columns of a tile, and its speed ÷ that of large ones, which read less per FLOP: an assumption."""


def tiled_flops(layouts: Layouts, processors: Values) -> Values:
    """The same FLOPs, and those that could have been done meanwhile on what tiles leave idle.

    A product's result is cut into tiles, and they are computed in waves, one tile on each of a GPU's streaming
    multiprocessors, of which the last wave is rarely full; the fastest tile is taken (NVIDIA, "Matrix multiplication
    background", tile and wave quantization).
    """

    outside, mlps = _of_products(layouts, partial(_tiled, processors=processors))
    routed = 2.0 * tokens(layouts) * layouts.hidden * layouts.experts / layouts.tensor
    return outside + np.where(layouts.experts > 1, routed, 0.0) + mlps


def _of_products(layouts: Layouts, of: Callable[[Values, Values, Values], Values]) -> tuple[Values, Values]:
    """Sums over one layer's products, by their rows, columns and depth: of attention's, and of the MLPs'."""
    rows, width, units = tokens(layouts), layouts.hidden, layouts.mlp_width / layouts.tensor
    queries = (1.0 + 2.0 * layouts.kv_heads / layouts.heads) * width / layouts.tensor
    # Experts share the tokens of their group.
    visits = rows * layouts.visits * layouts.expert / layouts.experts
    mlp = (1.0 + layouts.gated) * of(visits, units, width) + of(visits, width, units)
    return of(rows, queries, width) + of(rows, width, width / layouts.tensor), layouts.experts / layouts.expert * mlp


def _tiled(rows: Values, columns: Values, depth: Values, processors: Values) -> Values:
    """Of rows × depth by depth × columns: the mean of its forward and its two backward products."""
    sizes = ((rows, columns, depth), (rows, depth, columns), (columns, depth, rows))
    return np.asarray(sum(_fastest(*each, processors) for each in sizes) / 3.0)


def _fastest(rows: Values, columns: Values, depth: Values, processors: Values) -> Values:
    taken = []
    for high, wide, speed in TILES:
        waves = np.ceil(np.ceil(rows / high) * np.ceil(columns / wide) / processors)
        taken.append(waves * processors * 2.0 * high * wide * depth / speed)
    return np.asarray(np.min(taken, axis=0))


def cast_bytes(layouts: Layouts) -> Values:
    """Traffic of one layer, per pass, that products with weights in 8 bits add."""
    outside, mlps = _of_products(layouts, casts)
    return (outside + mlps) / (1.0 + BACKWARD)


def casts(rows: T, columns: T, depth: T) -> T:
    """Bytes moved to cast what a product and its two backward products take: inputs, weights, gradients of results.

    Each is read for its largest value, read again, and written in two orders (torchao/float8/README.md, "Derivation",
    and its float8_roofline).
    """
    return 6.0 * (rows * depth + depth * columns + rows * columns)


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
    mask) make 22 bytes; GELU on four times the width makes 16, a gate half as much again; the transposition of queries,
    keys and values makes 12. Sorting tokens by expert, and back, reads and writes each visit twice: 8 bytes.
    """
    grouped = (1.0 + 2.0 * layouts.kv_heads / layouts.heads) / 3.0
    sorting = np.where(layouts.experts > 1, 8.0 * layouts.hidden * layouts.visits, 0.0)
    cut = (4.0 + 2.0 * layouts.gated) * layouts.mlp_width * layouts.visits + 12.0 * grouped * layouts.hidden + sorting
    whole = 22.0 * layouts.hidden / np.where(layouts.sequence_parallel > 0, layouts.tensor, 1.0)
    return tokens(layouts) * (whole + cut / layouts.tensor)


def logit_flops(layouts: Layouts) -> Values:
    """Forward FLOPs of the product with the vocabulary, on one device of the last stage."""
    return 2.0 * tokens(layouts) * layouts.hidden * layouts.vocabulary / layouts.tensor


def logits(layouts: Layouts) -> Values:
    """Logits of one micro-batch on one device of the last stage."""
    return tokens(layouts) * layouts.vocabulary / layouts.tensor


def odd_vocabulary(layouts: Layouts) -> NDArray[np.bool_]:
    """Whether the vocabulary is no multiple of 8 and nothing pads it: tensor cores then don't work at full speed.

    NVIDIA, "Matrix multiplication background", §2.2. Of a tensor group each device's share counts.
    """
    result: NDArray[np.bool_] = layouts.vocabulary // layouts.tensor % 8 != 0
    return result


def unfused_softmax(layouts: Layouts) -> Values:
    """1 where scores are written but Megatron-LM's fused softmax can't take them: it needs 4 matrices or a multiple."""
    matrices = layouts.samples_per_micro_batch * layouts.heads / layouts.tensor
    return np.where((layouts.fused_attention > 0) | (matrices % 4 == 0), 0.0, 1.0)


def tokens(layouts: Layouts) -> Values:
    """Tokens of one micro-batch on one device."""
    return layouts.samples_per_micro_batch * layouts.sequence / layouts.context


def boundary_bytes(layouts: Layouts) -> Values:
    """Activations of one micro-batch between two layers, which every device of a tensor group has."""
    return HALF * tokens(layouts) * layouts.hidden


def device_parameters(layouts: Layouts) -> Values:
    """Parameters that one device of the fullest stage computes with: its layers, and the embedding."""
    deep = layouts.layers / layouts.pipeline * shared_parameters(layouts)
    dense = layouts.layers / layouts.pipeline * np.where(layouts.experts > 1, 0.0, mlp_parameters(layouts))
    # An untied head is on the last stage, the embedding on the first: the fullest one has either.
    ends = embedding_parameters(layouts) + np.where(layouts.pipeline > 1, 0.0, head_parameters(layouts))
    return (deep + dense + ends) / layouts.tensor + expert_parameters(layouts)


def expert_parameters(layouts: Layouts) -> Values:
    """Those of them that belong to experts; 0 in dense models."""
    held = layouts.layers / layouts.pipeline * layouts.experts / layouts.expert * mlp_parameters(layouts)
    return np.where(layouts.experts > 1, held / layouts.tensor, 0.0)


def parameters_per_shard(layouts: Layouts, shards: Values) -> Values:
    """Parameters of a device where each is cut over all devices that have it: `shards`, of experts so many fewer."""
    experts = expert_parameters(layouts)
    return (device_parameters(layouts) - experts) / shards + experts / np.maximum(shards / layouts.expert, 1.0)


def routed_bytes(layouts: Layouts) -> Values:
    """Activations of one micro-batch that a device sends to experts, or back."""
    cut = np.where(layouts.sequence_parallel > 0, layouts.tensor, 1.0)
    return HALF * tokens(layouts) * layouts.hidden * layouts.visits / cut


def model_flops(layouts: Layouts) -> Values:
    """FLOPs of a step that the model itself needs, without recomputation, of all devices: what MFU counts.

    Attention is counted in full, as PaLM's appendix B does (Chowdhery et al. 2022, arXiv 2204.02311).
    """
    matrices = attention_matrices(layouts) + layouts.top_k * mlp_matrices(layouts)
    products = 2.0 * matrices + 4.0 * layouts.sequence * layouts.hidden
    per_token = layouts.layers * products + 2.0 * layouts.hidden * layouts.vocabulary
    return 3.0 * layouts.global_batch * layouts.sequence * per_token


UPDATE_BYTES = 34.0
"""Traffic of Adam per parameter in mixed precision: master copy and two moments read and written in single precision,
the gradient read and cleared, the half-precision copy written, the norm of gradients."""
OPERATIONS = 100.0
"""Launched for one layer, forward: about as many as a counted block has; what it takes is fitted."""


def work_of(layouts: Layouts, machines: Machines) -> Work:
    """What the step model takes: blocks, of which each stage has as many, the embedding on the first, the last layer.

    Selective recomputation repeats what `analysis.advisor.memory` does not keep: where attention is fused, half of the
    products and all elementwise work (torchtitan); where scores are written, these and their products (Korthikanti et
    al. 2022).
    """
    zero = np.zeros(len(layouts))

    def layers(block: Values | float = 0.0, *, first: Values | float = 0.0, last: Values | float = 0.0) -> Values:
        return np.stack(np.broadcast_arrays(block, first, last, zero)[:3], axis=-1)

    experts = np.where(layouts.experts > 1, layouts.experts / layouts.expert * mlp_parameters(layouts), 0.0)
    dense = shared_parameters(layouts) + np.where(layouts.experts > 1, 0.0, mlp_parameters(layouts))
    odd, head = odd_vocabulary(layouts), logit_flops(layouts)
    keys = 2.0 * layouts.hidden * layouts.kv_heads / layouts.heads / layouts.tensor
    made = Work(
        count=layers(layouts.layers, first=1.0, last=1.0),
        stage=layers(EVENLY, last=layouts.pipeline * layouts.chunks - 1.0),
        device=layers(EVENLY, last=layouts.pipeline - 1.0),
        product_flop=layers(tiled_flops(layouts, machines.multiprocessors), last=np.where(odd, 0.0, head)),
        attention_flop=layers(attention_flops(layouts)),
        odd_flop=layers(last=np.where(odd, head, 0.0)),
        traffic_bytes=layers(elementwise_bytes(layouts) + score_bytes(layouts) + layouts.fp8 * cast_bytes(layouts)),
        logits=layers(last=logits(layouts)),
        operations=layers(OPERATIONS),
        tensor_operations=layers(np.where(layouts.tensor > 1, 1.0, 0.0)),
        softmax_operations=layers(unfused_softmax(layouts)),
        backward=layers(BACKWARD, first=BACKWARD, last=BACKWARD),
        repeats=layers(layouts.recompute),
        parameters=layers(
            (dense + experts) / layouts.tensor,
            first=embedding_parameters(layouts) / layouts.tensor,
            last=head_parameters(layouts) / layouts.tensor,
        ),
        expert_parameters=layers(experts / layouts.tensor),
        exchanges=layers(2.0),
        exchanged_bytes=layers(boundary_bytes(layouts)),
        routed_bytes=layers(routed_bytes(layouts)),
        ring_bytes=layers(HALF * tokens(layouts) * keys * layouts.context),
        eight_bit=layers(layouts.fp8),
        eager=layouts.fused_attention,
        # Each device of a tensor group sends a part, and they gather it (Narayanan et al. 2021, §4.1).
        boundary_bytes=boundary_bytes(layouts) / layouts.tensor,
        gathered_bytes=zero + HALF,
        gradient_bytes=zero + HALF,
        update_bytes=zero + UPDATE_BYTES,
    )
    if not layouts.selective.any():
        return made
    fused, chosen = layouts.fused_attention > 0, layouts.selective
    half = layers(0.5 * chosen * fused)
    again = replace(
        made,
        product_flop=half * made.product_flop,
        attention_flop=layers(chosen * np.where(fused, 0.0, attention_flops(layouts))),
        odd_flop=layers(),
        logits=layers(),
        traffic_bytes=layers(chosen * np.where(fused, elementwise_bytes(layouts), score_bytes(layouts))),
    )
    return replace(made, again=again)
