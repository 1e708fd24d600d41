"""Ways to lay a transformer over devices: degrees of parallelism, sharding, recomputation, micro-batches."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from analysis.advisor.advice import Impossible
from analysis.advisor.layouts import layouts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from analysis.advisor.gpt_shape import GptShape
    from analysis.advisor.layouts import Layouts

MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Samples per micro-batch that are tried."""
MOST_STAGES = 64
"""Longer pipelines are not tried."""
KEPT: Mapping[str, Mapping[str, float]] = {
    "none": {"recompute": 0.0, "selective": 0.0},
    "selective": {"recompute": 0.0, "selective": 1.0},
    "full": {"recompute": 1.0, "selective": 0.0},
}
"""What of the activations is recomputed."""


@dataclass(frozen=True)
class Degrees:
    """Devices in each dimension."""

    tensor: int
    pipeline: int
    context: int
    data: int

    @property
    def devices(self) -> int:
        """Of the whole job."""
        return self.tensor * self.pipeline * self.context * self.data


def gpt_layouts(
    shape: GptShape, devices: Sequence[int], *, batch_size: int, per_node: int, recomputation: Sequence[str]
) -> tuple[Layouts | None, list[Impossible]]:
    """All layouts that can be, as columns, and the degrees that can't be, with the reason. None where none can be."""
    rows: list[dict[str, float]] = []
    impossible: list[Impossible] = []
    for count in devices:
        for degrees in _degrees(count, shape):
            why = _why_not(degrees, shape, batch_size=batch_size, per_node=per_node)
            if why is None:
                rows += _of_degrees(degrees, shape, batch_size, per_node=per_node, recomputation=recomputation)
            elif _is_simple(degrees):
                impossible.append(_refused(degrees, why))
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
            yield Degrees(tensor, pipeline, context, rest // context)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _why_not(degrees: Degrees, shape: GptShape, *, batch_size: int, per_node: int) -> str | None:
    """Why a layout can't be; None where it can."""
    tensor, pipeline, context = degrees.tensor, degrees.pipeline, degrees.context
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
        f"data={degrees.data} does not divide batch_size={batch_size}": batch_size % degrees.data > 0,
        f"pipeline={pipeline} has more stages than micro-batches: batch_size={batch_size} over data={degrees.data}": (
            batch_size // degrees.data < pipeline
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _is_simple(degrees: Degrees) -> bool:
    """Whether a layout has one dimension: others are refused for the same reasons."""
    sizes = (degrees.tensor, degrees.pipeline, degrees.context, degrees.data)
    return sum(size > 1 for size in sizes) <= 1


def _refused(degrees: Degrees, why: str) -> Impossible:
    name = _strategy(degrees, sharded=False, copies=1, owners=False)
    return Impossible(strategy=name, options=(), devices=degrees.devices, why=why)


def _of_degrees(
    degrees: Degrees, shape: GptShape, batch_size: int, *, per_node: int, recomputation: Sequence[str]
) -> Iterator[dict[str, float]]:
    """Sharding × recomputation × micro-batches × interleaving, whose stages have equally many layers."""
    interleaved = degrees.pipeline > 1 and shape.layers % (2 * degrees.pipeline) == 0
    own = batch_size // degrees.data
    sizes = [size for size in MICRO_BATCHES if own % size == 0 and own // size >= degrees.pipeline]
    shardings = [
        sharding | {"expert": float(expert)}
        for expert in _expert_sizes(degrees, shape)
        for sharding in _shardings(degrees, per_node)
        # HSDP's copies of experts have no formula.
        if shape.experts == 1 or sharding["copies"] == 1
    ]
    for sharding, kept, micro_batch in itertools.product(shardings, recomputation, sizes or [1]):
        for chunks in (1, 2) if interleaved else (1,):
            yield {
                "tensor": degrees.tensor,
                "pipeline": degrees.pipeline,
                "context": degrees.context,
                "data": degrees.data,
                "micro_batch": micro_batch,
                "chunks": chunks,
                "sequence_parallel": float(degrees.tensor > 1),
                **sharding,
                **KEPT[kept],
            }


def _expert_sizes(degrees: Degrees, shape: GptShape) -> list[int]:
    """Devices over which the experts of a layer may be cut: those of its replicas, as many as divide both."""
    return [size for size in _divisors(shape.experts) if (degrees.data * degrees.context) % size == 0]


def _shardings(degrees: Degrees, per_node: int) -> list[dict[str, float]]:
    """Copied, with a sharded optimizer, sharded over all, and sharded within nodes."""
    plain = {"sharded": 0.0, "owners": 0.0, "copies": 1.0}
    replicas = degrees.data * degrees.context
    if replicas == 1:
        return [plain]
    found = [plain, plain | {"owners": 1.0}, plain | {"sharded": 1.0}]
    inside = max(1, per_node // degrees.tensor)
    if 1 < inside < replicas and replicas % inside == 0:
        found.append(plain | {"sharded": 1.0, "copies": float(replicas // inside)})
    return found


def strategy_name(layouts: Layouts, row: int) -> str:
    """The name that the suite's strategies have, or their product."""
    values = {name: int(getattr(layouts, name)[row]) for name in ("tensor", "pipeline", "context", "data", "copies")}
    degrees = Degrees(values["tensor"], values["pipeline"], values["context"], values["data"])
    sharded, owners = bool(layouts.sharded[row]), bool(layouts.owners[row])
    name = _strategy(degrees, sharded=sharded, copies=values["copies"], owners=owners)
    return f"{name}×ep" if layouts.expert[row] > 1 else name


def _strategy(degrees: Degrees, *, sharded: bool, copies: int, owners: bool) -> str:
    parts = []
    if degrees.data * degrees.context > 1:
        kind = ("hsdp" if copies > 1 else "fsdp") if sharded else "zero1" if owners else "ddp"
        parts.append(kind)
    names = (("tp", degrees.tensor), ("pp", degrees.pipeline), ("cp", degrees.context))
    parts += [name for name, size in names if size > 1]
    return "×".join(parts) or "single"


def options_of(layouts: Layouts, row: int) -> tuple[str, ...]:
    """A layout's degrees and choices, those that say something."""
    values = layouts.row(row)
    names = ("tensor", "pipeline", "context", "data", "expert")
    degrees = [f"{name}={values[name]:g}" for name in names if values[name] > 1]
    kept = "full" if values["recompute"] else "selective" if values["selective"] else "none"
    micro = [f"micro_batch={values['micro_batch']:g}"]
    chunks = [f"interleaved={values['chunks']:g}"] if values["chunks"] > 1 else []
    shard = [f"copies={values['copies']:g}"] if values["copies"] > 1 else []
    return (*degrees, *shard, *micro, *chunks, f"recompute={kept}")
