"""Time of a training step: of the suite's own models from their counted layers, of transformers from formulas.

Products take FLOPs ÷ rate, elementwise work bytes ÷ bandwidth, every operation its launch. Collectives take what α and
β of their tier say. Pipelines are replayed. What cannot be predicted is refused with the reason. Pollux' γ joins what
overlaps: T = (a^γ + b^γ)^(1/γ) (Qiao et al. 2021, OSDI). The formulas of transformers take parameters as numbers, or as
columns that are broadcast against the candidates, which is how a fit gets all its derivatives in one call.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from analysis.advisor import transformer
from analysis.advisor.links import (
    Links,
    all_reduce_s,
    all_to_all_s,
    chain_crossing,
    gather_s,
    group_of,
    ring_turn_s,
    send_s,
)
from analysis.advisor.schedules import pipeline_s
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from analysis.advisor.layouts import Layouts, Values
    from analysis.advisor.machine import MachineFigures, Machines
    from parallelbench.config.run import RunConfig
    from parallelbench.measure.counting import LayerCount


BACKWARD = 2.0
"""Backward's work ÷ forward's."""
LAUNCH_OVERLAP = 6.0
"""γ of the host's launches and the device's work: whichever is slower decides, smoothly near the crossing."""
READ_AND_WRITTEN = 3.0
"""Bytes that elementwise work moves ÷ the bytes that it writes: it reads about two values for each."""


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Parts of a step, seconds, that add up to it; of the device that works longest."""

    compute_s: float = 0.0
    """Forward and backward."""
    communication_s: float = 0.0
    """Collectives and messages that no computation hides."""
    bubble_s: float = 0.0
    """Waiting for other stages."""
    optimizer_s: float = 0.0
    """Updating parameters."""
    data_s: float = 0.0
    """Fetching the batch."""
    other_s: float = 0.0
    """What every step costs."""

    @property
    def step_s(self) -> float:
        """The whole step."""
        return float(sum(getattr(self, each.name) for each in fields(self)))

    def stretched(self, factor: float) -> Phases:
        """All parts longer alike."""
        return Phases(**{each.name: factor * getattr(self, each.name) for each in fields(self)})


@dataclass(frozen=True, kw_only=True)
class SuiteJob:
    """One run, what its layers have to do, where, and by which fitted numbers."""

    run: RunConfig
    layers: Sequence[LayerCount]
    figures: MachineFigures
    scales: Mapping[str, float]

    @property
    def value_bytes(self) -> int:
        """Bytes of a parameter or a gradient."""
        return 8 if self.run.precision == "fp64" else 4

    @property
    def activation_share(self) -> float:
        """Bytes of an activation ÷ of one in fp32."""
        return {"fp64": 2.0, "bf16": 0.5, "fp16": 0.5}.get(self.run.precision, 1.0)

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(layer.parameters for layer in self.layers)

    def crowding(self, busy: int) -> float:
        """Compute time where so many devices of a node work at once ÷ where as many do as were measured."""
        most = max(self.figures.busy_devices or self.figures.devices_per_node, 2)
        alone = self.scales["alone"]
        return alone + (1.0 - alone) * (min(busy, most) - 1) / (most - 1)

    @cached_property
    def columns(self) -> Mapping[str, Values]:
        """The layers' counts as arrays."""
        names = (
            *("product_flop", "convolution_flop", "grouped_flop", "output_bytes", "operations", "shardable_flop"),
            *("boundary_bytes", "parameters", "shardable_parameters", "exchanged_bytes", "tensors"),
        )
        return {name: np.array([getattr(each, name) for each in self.layers], dtype=np.float64) for name in names}

    def forward_s(self, samples: float, *, tensor: int = 1) -> Values:
        """Each layer's forward pass on one device among busy ones; `tensor` devices share what the plan shards."""
        curve = self.figures.matmul(self.run.precision)
        if curve is None:
            raise ConfigError(
                f"no speed of products in precision={self.run.precision} is known for {self.figures.accelerator}: "
                "calibrate this machine, or choose another precision"
            )
        counts = self.columns
        shared = counts["shardable_flop"] * (1.0 - 1.0 / tensor)
        flop = {
            "product_scale": samples * (counts["product_flop"] - shared),
            "convolution_scale": samples * counts["convolution_flop"],
            "grouped_scale": samples * counts["grouped_flop"],
        }
        fitted = self.scales
        kernels = np.sum([fitted[name] * each / curve.at(each) for name, each in flop.items()], axis=0)
        moved = READ_AND_WRITTEN * self.activation_share * samples * counts["output_bytes"]
        kernels = kernels + fitted["traffic_scale"] * moved / self.figures.memory_bytes_per_s.value
        launches = fitted["launch_scale"] * self.figures.launch_s.value * counts["operations"]
        together: Values = (
            kernels + launches if self.figures.device_type == "cpu" else overlapped(kernels, launches, LAUNCH_OVERLAP)
        )
        return together

    def backward_s(self, forward_s: Values) -> Values:
        """Each layer's backward pass, with what it computes again; the first layer's input needs no gradient."""
        factors = np.full(len(forward_s), BACKWARD)
        factors[0] = 1.0
        result: Values = (factors + self._repeated) * forward_s
        return result

    @property
    def _repeated(self) -> Values:
        """Shares of each layer's forward pass that backward repeats; of attention its products outside of the plan."""
        counts, chosen = self.columns, self.run.activation_recomputation
        shares = np.zeros(len(self.layers))
        if chosen == "full":
            shares[:-1] = 1.0
        elif chosen == "selective":
            block = self.run.model.attention.partition(".")[0]
            attends = np.array([fnmatchcase(layer.name, block) for layer in self.layers])
            inner = counts["product_flop"] - counts["shardable_flop"]
            shares = np.where(attends, inner / np.maximum(counts["product_flop"], 1.0), 0.0)
        return shares

    def update_s(self, parameters: float, tensors: float) -> float:
        """The optimizer's update of so many parameters: gradient, parameter and states read, the latter two written."""
        states = self.run.optimizer.states_per_parameter() or 0
        moved = parameters * self.value_bytes * (3.0 + 2.0 * states)
        launches = tensors * (3.0 + 4.0 * states) * self.figures.launch_s.value
        time_s = moved / self.figures.memory_bytes_per_s.value
        if self.figures.device_type == "cpu":
            return self.scales["update_scale"] * (time_s + launches)
        return self.scales["update_scale"] * max(time_s, self.figures.launch_s.value)

    def data_s(self, samples: float) -> float:
        """Taking a batch from memory: one byte read and one number written and read per value."""
        values = float(np.prod(self.run.data.shape))
        return samples * values * (1.0 + 2.0 * self.value_bytes) / self.figures.memory_bytes_per_s.value

    def phases(self, **parts: float) -> Phases:
        """Phases with what every step costs."""
        return Phases(other_s=self.scales["step_s"], **parts)


UPDATE_BYTES = 34.0
"""Traffic of Adam per parameter in mixed precision: master copy and two moments read and written in single precision,
the gradient read and cleared, the half-precision copy written, the norm of gradients."""


@dataclass(frozen=True)
class StepTime:
    """Predicted phases of one step, seconds; they add up to the step."""

    compute_s: Values
    """The busiest stage's kernels, and what its host's launches add."""
    tensor_s: Values
    """All-reduces of the tensor group and all-to-alls of experts, which nothing hides, and what attention does not hide
    of a context ring."""
    gather_s: Values
    """What compute does not hide of gathering and reducing sharded parameters."""
    bubble_s: Values
    """What the pipeline's stages wait, sends included."""
    reduce_s: Values
    """All-reduce of the copied parameters' gradients after backward."""
    update_s: Values
    """The optimizer."""
    fixed_s: Values
    """What every step costs."""

    @property
    def step_s(self) -> Values:
        """The whole step."""
        parts = (self.compute_s, self.tensor_s, self.gather_s, self.bubble_s, self.reduce_s, self.update_s)
        result: Values = sum(parts, start=self.fixed_s)
        return result


def overlapped(first: Values, second: Values, gamma: Values | float) -> Values:
    """Time of two things of which one hides a part of the other; γ=1: none, γ→∞: all."""
    larger = np.maximum(np.maximum(first, second), 1e-12)
    result: Values = larger * ((first / larger) ** gamma + (second / larger) ** gamma) ** (1.0 / gamma)
    return result


def links_of(machines: Machines, fitted: Mapping[str, Values | float]) -> Links:
    """What the links deliver by the fitted shares."""
    return Links(
        link_bytes_per_s=machines.link_bytes_per_s * fitted["link_share"],
        network_bytes_per_s=machines.network_bytes_per_s * fitted["network_share"],
        link_latency_s=fitted["link_latency_s"] * np.ones_like(machines.link_bytes_per_s),
        network_latency_s=fitted["network_latency_s"] * np.ones_like(machines.link_bytes_per_s),
    )


def layer_s(layouts: Layouts, machines: Machines, fitted: Mapping[str, Values | float]) -> Values:
    """One layer's kernels, forward, of one micro-batch, on one device."""
    products = _matrices_s(layouts, machines, fitted) + _attention_s(layouts, machines, fitted)
    traffic = transformer.elementwise_bytes(layouts) + transformer.score_bytes(layouts)
    return _slower(layouts, fitted) * (products + _traffic_s(traffic, machines, fitted))


def _slower(layouts: Layouts, fitted: Mapping[str, Values | float]) -> Values:
    """Published steps that write scores are Megatron-LM's, those that fuse attention are torch's."""
    result: Values = np.where(layouts.fused_attention > 0, fitted["eager_slower"], 1.0)
    return result


def _matrices_s(layouts: Layouts, machines: Machines, fitted: Mapping[str, Values | float]) -> Values:
    """Products with weights."""
    width, rows = layouts.hidden / layouts.tensor, transformer.tokens(layouts)
    narrow = 1.0 + fitted["narrow_width"] / width
    outside = transformer.attention_matrix_flops(layouts) * (narrow + fitted["few_rows"] / rows)
    inside = transformer.mlp_flops(layouts) * (narrow + fitted["few_rows"] / transformer.mlp_rows(layouts))
    faster = np.where(layouts.fp8 > 0, fitted["fp8_speed"], 1.0)
    return (outside + inside) / machines.flops_per_s / fitted["matrix_share"] / faster


def _traffic_s(moved_bytes: Values, machines: Machines, fitted: Mapping[str, Values | float]) -> Values:
    return moved_bytes / machines.memory_bytes_per_s / fitted["memory_share"]


def _repeated_s(layouts: Layouts, machines: Machines, fitted: Mapping[str, Values | float]) -> Values:
    """What selective recomputation repeats of a layer, the same that `transformer_memory` does not keep.

    Where attention is fused its output and every other product are kept: half of the products and all elementwise work
    are repeated (torchtitan). Where scores are written only they and their products are (Korthikanti et al. 2022).
    """
    cheap = 0.5 * _matrices_s(layouts, machines, fitted)
    cheap = cheap + _traffic_s(transformer.elementwise_bytes(layouts), machines, fitted)
    scores = _attention_s(layouts, machines, fitted)
    scores = scores + _traffic_s(transformer.score_bytes(layouts), machines, fitted)
    return np.where(layouts.fused_attention > 0, _slower(layouts, fitted) * cheap, scores)


def _attention_s(layouts: Layouts, machines: Machines, fitted: Mapping[str, Values | float]) -> Values:
    return transformer.attention_flops(layouts) / machines.flops_per_s / fitted["attention_share"]


def _logits_s(layouts: Layouts, machines: Machines, fitted: Mapping[str, Values | float]) -> Values:
    """Forward and backward of the last product and the loss, of one micro-batch."""
    share = np.where(transformer.odd_vocabulary(layouts), fitted["odd_share"], fitted["matrix_share"])
    products = (1.0 + BACKWARD) * transformer.logit_flops(layouts) / machines.flops_per_s / share
    traffic = fitted["loss_bytes"] * transformer.logits(layouts)
    return _slower(layouts, fitted) * (products + traffic / machines.memory_bytes_per_s / fitted["memory_share"])


def step_time(layouts: Layouts, machines: Machines, fitted: Mapping[str, Values | float]) -> StepTime:
    """The phases of a step of each candidate."""
    links = links_of(machines, fitted)
    passes = 1.0 + BACKWARD + layouts.recompute
    unfused = fitted["softmax_launch_s"] * transformer.unfused_softmax(layouts)
    launch = fitted["launch_s"] + fitted["tensor_launch_s"] * (layouts.tensor - 1.0) + unfused
    kernels = layer_s(layouts, machines, fitted)
    per_pass = overlapped(kernels, launch, LAUNCH_OVERLAP)
    rings = _ring_s(layouts, machines, links, fitted, compute_s=per_pass)
    per_pass = per_pass + rings
    reductions = _tensor_s(layouts, machines, links) + _routed_s(layouts, machines, links)
    depth = layouts.layers / layouts.pipeline
    forward = (per_pass + reductions) * depth
    exposed = _sharded_s(layouts, machines, links, fitted, compute_s=per_pass * passes * depth)
    backward_passes = BACKWARD + layouts.recompute
    repeated = layouts.selective * _repeated_s(layouts, machines, fitted)
    # Two all-reduces forward, two backward, two more where the forward pass is repeated.
    backward = (per_pass * backward_passes + repeated + reductions * (1.0 + layouts.recompute)) * depth
    logits = _logits_s(layouts, machines, fitted)
    count = np.maximum(layouts.micro_batches, 1.0)
    handover = fitted["handover_s"] * np.ones_like(logits)
    pipelined = _pipelined_s(layouts, machines, links, parts=(forward, backward, logits, handover))
    busy = count * (forward + backward + logits)
    tensor = count * (reductions * (2.0 + layouts.recompute) + rings * passes) * depth
    update, reduced = _update_s(layouts, machines, fitted), _reduced_s(layouts, machines, links, fitted)
    return StepTime(
        compute_s=busy - tensor,
        tensor_s=tensor,
        gather_s=exposed * np.ones_like(busy),
        bubble_s=pipelined - busy,
        reduce_s=reduced,
        update_s=update,
        fixed_s=fitted["step_s"] * np.ones_like(busy),
    )


def _tensor_s(layouts: Layouts, machines: Machines, links: Links) -> Values:
    """Two all-reduces of one layer's activations over the tensor group."""
    group = group_of(layouts.tensor, np.ones_like(layouts.tensor), machines.devices_per_node, layouts.devices)
    each = all_reduce_s(transformer.boundary_bytes(layouts), group, links)
    return np.where(layouts.tensor > 1, 2.0 * each, 0.0)


def _routed_s(layouts: Layouts, machines: Machines, links: Links) -> Values:
    """Two all-to-alls of one layer: tokens to their experts, and back."""
    group = group_of(layouts.expert, layouts.tensor, machines.devices_per_node, layouts.devices)
    return np.where(layouts.expert > 1, 2.0 * all_to_all_s(transformer.routed_bytes(layouts), group, links), 0.0)


def _sharded_s(
    layouts: Layouts, machines: Machines, links: Links, fitted: Mapping[str, Values | float], *, compute_s: Values
) -> Values:
    """What the collectives of sharded parameters add to a step.

    Every layer is gathered for forward and again for backward, and its gradients are scattered, all per micro-batch. In
    pipelines stages stay whole, as `transformer_memory` has it: they are gathered and scattered once per step.
    """
    size = layouts.replicas / layouts.copies
    group = group_of(size, layouts.tensor, machines.devices_per_node, layouts.devices)
    experts = transformer.expert_parameters(layouts)
    whole = transformer.HALF * (transformer.device_parameters(layouts) - experts)
    # One message per layer: all their bytes, and the turns of each. Experts are gathered from those that have the same.
    later = layouts.layers / layouts.pipeline - 1.0
    once = gather_s(whole, group, links) + later * ring_turn_s(group, links)
    same = group_of(size / layouts.expert, layouts.tensor * layouts.expert, machines.devices_per_node, layouts.devices)
    apart = gather_s(transformer.HALF * experts, same, links) + later * ring_turn_s(same, links)
    once = once + np.where((layouts.experts > 1) & (same.size > 1), apart, 0.0)
    moved = np.where(layouts.pipeline > 1, 2.0, 3.0) * once
    exposed = overlapped(compute_s, moved, fitted["overlap"]) - compute_s
    often = np.where(layouts.pipeline > 1, 1.0, np.maximum(layouts.micro_batches, 1.0))
    return np.where((layouts.sharded > 0) & (size > 1), often * exposed, 0.0)


def _ring_s(
    layouts: Layouts, machines: Machines, links: Links, fitted: Mapping[str, Values | float], *, compute_s: Values
) -> Values:
    """What sending keys and values round a context group adds to one layer's pass; attention hides a part of it."""
    group = group_of(layouts.context, layouts.tensor, machines.devices_per_node, layouts.devices)
    width = 2.0 * layouts.hidden * layouts.kv_heads / layouts.heads / layouts.tensor
    # Each turn hands on one device's keys and values: all of them but its own arrive.
    moved = gather_s(transformer.HALF * transformer.tokens(layouts) * width * layouts.context, group, links)
    exposed = overlapped(compute_s, moved, fitted["overlap"]) - compute_s
    return np.where(layouts.context > 1, exposed, 0.0)


def _reduced_s(layouts: Layouts, machines: Machines, links: Links, fitted: Mapping[str, Values | float]) -> Values:
    """All-reduce of a device's gradients, after backward; of a shard's, between the copies of a sharded model.

    Under ZeRO 1 a reduce-scatter, and an all-gather of the updated parameters, which move the same.
    """
    sharded = layouts.sharded > 0
    inside = np.where(sharded, layouts.replicas / layouts.copies, 1.0)
    size = np.where(sharded, layouts.copies, layouts.replicas)
    experts = transformer.expert_parameters(layouts)
    parts = (
        (transformer.device_parameters(layouts) - experts, size, inside),
        (experts, np.maximum(size / layouts.expert, 1.0), inside * layouts.expert),
    )
    total = np.zeros(())
    for held, copies, stride in parts:
        group = group_of(copies, layouts.tensor * stride, machines.devices_per_node, layouts.devices)
        reduced = fitted["gradient_bytes"] * held / inside
        owned = 2.0 * gather_s(reduced, group, links)
        each = np.where(layouts.owners > 0, owned, all_reduce_s(reduced, group, links))
        total = total + np.where((copies > 1) & (held > 0), each, 0.0)
    return total


def _update_s(layouts: Layouts, machines: Machines, fitted: Mapping[str, Values | float]) -> Values:
    shards = np.where(layouts.sharded > 0, layouts.replicas / layouts.copies, 1.0)
    shards = np.where(layouts.owners > 0, layouts.replicas, shards)
    owned = transformer.parameters_per_shard(layouts, shards)
    return UPDATE_BYTES * owned / machines.memory_bytes_per_s / fitted["update_share"]


def _pipelined_s(
    layouts: Layouts, machines: Machines, links: Links, *, parts: tuple[Values, Values, Values, Values]
) -> Values:
    """All micro-batches through all stages under 1F1B, the last of which has the logits too.

    Interleaving v stages per device leaves a v-th of the bubble and v times the messages (Narayanan et al. 2021, §2.2).
    """
    forward, backward, logits, handover = np.broadcast_arrays(*parts)
    total = np.array(np.maximum(layouts.micro_batches, 1.0) * (forward + backward + logits))
    stages, count = layouts.pipeline.astype(int), np.round(np.maximum(layouts.micro_batches, 1.0)).astype(int)
    neighbours = layouts.tensor * layouts.replicas
    crosses = chain_crossing(layouts.pipeline, neighbours, machines.devices_per_node)
    rings: Values = np.minimum(machines.devices_per_node, neighbours)
    sent = send_s(transformer.boundary_bytes(layouts), crosses, links, rings=rings)
    send = np.broadcast_to(sent, total.shape)
    for p, m in sorted(set(zip(stages.tolist(), count.tolist(), strict=True))):
        rows = (stages == p) & (count == m)
        if p == 1:
            continue
        f, b, last = (
            forward[..., rows] + handover[..., rows],
            backward[..., rows] + handover[..., rows],
            logits[..., rows],
        )
        forwards = [f] * (p - 1) + [f + last / 3.0]
        backwards = [b] * (p - 1) + [b + 2.0 * last / 3.0]
        total[..., rows] = pipeline_s("1f1b", m, forwards, backwards, send_s=send[..., rows])
    return _interleaved_s(layouts, total, parts=(forward, backward, logits, handover), send_s=send)


def _interleaved_s(
    layouts: Layouts, total: Values, *, parts: tuple[Values, Values, Values, Values], send_s: Values
) -> Values:
    """The same where devices have several stages."""
    if (layouts.chunks <= 1).all():
        return total
    forward, backward, logits, handover = parts
    count, others = np.maximum(layouts.micro_batches, 1.0), layouts.pipeline - 1.0
    bubble = others * (forward + backward + 2.0 * send_s) / layouts.chunks
    messages = 2.0 * layouts.chunks * count * handover
    interleaved = count * (forward + backward + logits) + bubble + messages
    result: Values = np.where((layouts.chunks > 1) & (layouts.pipeline > 1), interleaved, total)
    return result
