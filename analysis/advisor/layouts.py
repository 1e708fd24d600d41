"""How work is laid over devices, as columns; of transformers which layouts can be, and why others can't."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from analysis.advisor.transformer import GptShape

    Values = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a step's work is laid over devices, as columns of equal length; sizes are per step and of the whole job.

    `devices` = `tensor` × `context` × `data` × `pipeline`. Ranks are numbered as Megatron-LM does: the tensor group is
    innermost, then context and data, then pipeline (Narayanan et al. 2021, arXiv 2104.04473).
    """

    global_batch: Values
    """Samples per step over all devices."""
    micro_batch: Values
    """Samples that one data-parallel rank takes at a time."""
    tensor: Values
    """Devices that share each layer's matrices."""
    pipeline: Values
    """Devices of a pipeline."""
    data: Values
    """Data-parallel replicas."""
    context: Values
    """Devices that share each sequence (ring attention, Liu et al. 2023, arXiv 2310.01889)."""
    expert: Values
    """Devices over which the experts are cut, out of those that share a replica's gradients."""
    chunks: Values
    """Stages of a pipeline that each of its devices has: 1, or more where they are interleaved or looped."""
    sharded: Values
    """1: parameters, gradients and optimizer state are cut over the data-parallel ranks (FSDP, ZeRO 3); 0: copied."""
    copies: Values
    """Copies of the model under `sharded`: 1 under FSDP, more under HSDP."""
    owners: Values
    """1: each data-parallel rank updates its share of the copied parameters (ZeRO 1); 0: all update all."""
    stays_gathered: Values
    """1: sharded parameters stay whole from forward to backward (FSDP's SHARD_GRAD_OP, ZeRO 2); 0: they don't."""
    bucket_bytes: Values
    """Of gradients that are reduced together while backward goes on; 0: all after backward."""
    gpipe: Values
    """1: all forward passes, then all backward ones; 0: one of each in turn (1F1B)."""
    bubble: Values
    """Idle share of a pipeline's step by its schedule's formula; -1: the schedule is replayed."""
    stages_inside: Values
    """1: neighbouring stages are neighbouring tensor groups, and replicas lie outside of them; 0: the opposite."""

    def __len__(self) -> int:
        return len(self.data)

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
    def data_stride(self) -> Values:
        """How far replicas are apart, in ranks."""
        return self.tensor * np.where(self.stages_inside > 0, self.pipeline, 1.0)

    @property
    def stage_stride(self) -> Values:
        """How far neighbouring stages are apart, in ranks."""
        return self.tensor * np.where(self.stages_inside > 0, 1.0, self.replicas)


@dataclass(frozen=True, kw_only=True)
class Layouts(Plan):
    """Transformers, and how their work is laid over devices: candidates, as columns of equal length."""

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
    recompute: Values
    """1: the forward pass of each layer is repeated in backward; 0: its activations are kept."""
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
    sequence_parallel: Values
    """1: norms and residuals are cut along the sequence within a tensor group; 0: copied."""
    selective: Values
    """1: attention's scores are recomputed, or where it is fused every other product and elementwise work; 0: not."""

    experts: Values
    """MLPs of a layer (Switch Transformer, Fedus et al. 2022, arXiv 2101.03961); 1: a dense layer."""
    top_k: Values
    """Experts that each token visits."""
    capacity: Values
    """Tokens that an expert has room for ÷ its even share of them; the room is computed, filled or not."""

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
        return Layouts(**{name: values[rows] for name, values in vars(self).items()})

    def row(self, index: int) -> dict[str, float]:
        """One candidate as plain numbers."""
        return {name: float(values[index]) for name, values in vars(self).items()}


_ONES = ("global_batch", "micro_batch", "tensor", "pipeline", "data", "context", "expert", "chunks", "copies")
_ZEROS = ("sharded", "owners", "stays_gathered", "bucket_bytes", "gpipe", "stages_inside")
ALONE = {**dict.fromkeys(_ONES, 1.0), **dict.fromkeys(_ZEROS, 0.0), "bubble": -1.0}
"""The plan of one device, and of who says nothing else."""
USUAL = {
    **ALONE,
    **dict.fromkeys(("tied", "learned", "experts", "top_k", "capacity"), 1.0),
    **dict.fromkeys(("gated", "sequence_parallel", "selective"), 0.0),
}
"""What holds of a layout that says nothing else: GPT-2's kind of model."""


def layouts_of(columns: Mapping[str, object]) -> Layouts:
    """Layouts from arrays or single numbers, which are repeated to the common length."""
    given = {name: np.asarray(value, dtype=np.float64) for name, value in columns.items()}
    values = {"kv_heads": given["heads"], "mlp_width": 4.0 * given["hidden"]} | USUAL | given
    arrays = np.broadcast_arrays(*map(np.atleast_1d, values.values()))
    return Layouts(**{name: np.array(array, dtype=np.float64) for name, array in zip(values, arrays, strict=True)})


@dataclass(frozen=True, kw_only=True)
class Impossible:
    """A layout that can't be, or that nothing can be said of, and why."""

    strategy: str
    options: tuple[str, ...]
    devices: int
    why: str
    trains: bool = False
    """Whether it can be, and only no formula has it."""


MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Samples per micro-batch that are tried."""
MOST_STAGES = 64
"""Longer pipelines are not tried."""
KEPT = [{"recompute": full, "selective": selective} for full, selective in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0))]
"""What of the activations is recomputed: nothing, a part, or all."""


Degrees = dict[str, int]
"""Devices in each dimension: tensor, pipeline, context, data."""


def gpt_layouts(
    shape: GptShape, devices: Sequence[int], *, batch_size: int, per_node: int
) -> tuple[Layouts | None, list[Impossible]]:
    """All layouts that can be, as columns, and the degrees that can't be, with the reason. None where none can be."""
    rows: list[dict[str, float]] = []
    impossible: list[Impossible] = []
    for count in devices:
        for degrees in _degrees(count, shape):
            why = _why_not(degrees, shape, batch_size=batch_size, per_node=per_node)
            if why is None:
                rows += _of_degrees(degrees, shape, batch_size, per_node=per_node)
            elif sum(size > 1 for size in degrees.values()) <= 1:  # products are refused for the same reasons
                name = strategy_name(ALONE | degrees)
                impossible.append(Impossible(strategy=name, options=(), devices=count, why=why))
    if not rows:
        return None, impossible
    columns: dict[str, object] = {name: [row[name] for row in rows] for name in rows[0]}
    return layouts_of(shape.columns() | {"global_batch": batch_size} | columns), impossible


def _degrees(devices: int, shape: GptShape) -> Iterator[Degrees]:
    """All products of four factors; context parallelism from sequences of 8,192 tokens on."""
    for tensor, pipeline in itertools.product(_divisors(devices), repeat=2):
        if devices % (tensor * pipeline):
            continue
        rest = devices // (tensor * pipeline)
        for context in _divisors(rest) if shape.sequence >= 8192 else [1]:
            yield {"tensor": tensor, "pipeline": pipeline, "context": context, "data": rest // context}


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _why_not(degrees: Degrees, shape: GptShape, *, batch_size: int, per_node: int) -> str | None:
    """Why a layout can't be; None where it can."""
    tensor, pipeline, context, data = degrees.values()
    keys = shape.kv_heads or shape.heads
    reasons = {
        f"tensor={tensor} does not divide model.heads={shape.heads}": shape.heads % tensor > 0,
        f"tensor={tensor} does not divide model.kv_heads={keys}": keys % tensor > 0,
        f"tensor={tensor} reaches beyond a node of {per_node} devices": tensor > per_node,
        f"pipeline={pipeline} does not divide model.layers={shape.layers}": shape.layers % pipeline > 0,
        f"pipeline={pipeline} is longer than {MOST_STAGES} stages": pipeline > MOST_STAGES,
        f"context={context}: twice that does not divide model.sequence={shape.sequence}": (
            context > 1 and shape.sequence % (2 * context) > 0
        ),
        f"data={data} does not divide batch_size={batch_size}": batch_size % data > 0,
        f"pipeline={pipeline} has more stages than micro-batches: batch_size={batch_size} over data={data}": (
            batch_size // data < pipeline
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _of_degrees(degrees: Degrees, shape: GptShape, batch_size: int, *, per_node: int) -> Iterator[dict[str, float]]:
    """Sharding × recomputation × micro-batches × interleaving, whose stages have equally many layers."""
    pipeline, replicas = degrees["pipeline"], degrees["data"] * degrees["context"]
    interleaved = pipeline > 1 and shape.layers % (2 * pipeline) == 0
    own = batch_size // degrees["data"]
    sizes = [size for size in MICRO_BATCHES if own % size == 0 and own // size >= pipeline]
    shardings = [
        sharding | {"expert": float(expert)}
        for expert in _divisors(shape.experts)
        if replicas % expert == 0
        for sharding in _shardings(degrees, per_node)
        # HSDP's copies of experts have no formula.
        if shape.experts == 1 or sharding["copies"] == 1
    ]
    for sharding, kept, micro_batch in itertools.product(shardings, KEPT, sizes or [1]):
        for chunks in (1, 2) if interleaved and own // micro_batch % pipeline == 0 else (1,):
            yield {
                **degrees,
                "micro_batch": micro_batch,
                "chunks": chunks,
                "sequence_parallel": float(degrees["tensor"] > 1),
                **sharding,
                **kept,
            }


def _shardings(degrees: Degrees, per_node: int) -> list[dict[str, float]]:
    """Copied, with a sharded optimizer, sharded over all (ZeRO 3 and 2), and sharded within nodes."""
    plain = {"sharded": 0.0, "owners": 0.0, "copies": 1.0, "stays_gathered": 0.0}
    replicas = degrees["data"] * degrees["context"]
    if replicas == 1:
        return [plain]
    found = [plain, plain | {"owners": 1.0}, plain | {"sharded": 1.0}]
    if degrees["pipeline"] == 1:  # the stages of pipelines stay gathered anyway
        found.append(plain | {"sharded": 1.0, "stays_gathered": 1.0})
    inside = max(1, per_node // degrees["tensor"])
    if 1 < inside < replicas and replicas % inside == 0:
        found.append(plain | {"sharded": 1.0, "copies": float(replicas // inside)})
    return found


def strategy_name(layout: Mapping[str, float]) -> str:
    """The name that the suite's strategies have, or their product."""
    parts = []
    if layout["data"] * layout["context"] > 1:
        sharded = "hsdp" if layout["copies"] > 1 else "fsdp"
        parts.append(sharded if layout["sharded"] else "zero1" if layout["owners"] else "ddp")
    names = {"tp": "tensor", "pp": "pipeline", "cp": "context"}
    parts += [name for name, degree in names.items() if layout[degree] > 1]
    return "×".join(parts or ["single"]) + ("×ep" if layout["expert"] > 1 else "")


def options_of(layout: Mapping[str, float]) -> tuple[str, ...]:
    """A layout's degrees and choices, those that say something."""
    names = ("tensor", "pipeline", "context", "data", "expert", "copies")
    options = [f"{name}={layout[name]:g}" for name in names if layout[name] > 1]
    options += ["gathered=once"] if layout["stays_gathered"] else []
    options.append(f"micro_batch={layout['micro_batch']:g}")
    options += [f"interleaved={layout['chunks']:g}"] if layout["chunks"] > 1 else []
    kept = "full" if layout["recompute"] else "selective" if layout["selective"] else "none"
    return (*options, f"recompute={kept}")
