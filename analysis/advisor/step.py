"""Time of a training step from what its layers do, how the work is laid over devices, and what the machine can do.

One model for all: of the suite's own models torch counts the layers (`analysis.advisor.strategies`), of transformers
formulas say the same columns (`analysis.advisor.transformer`). Products take FLOPs ÷ rate, elementwise work bytes ÷
bandwidth, every operation its launch. Collectives take what α and β of their tier say. Pipelines are replayed. Terms of
a degree that is 1 are 0. Pollux' γ joins what overlaps: T = (a^γ + b^γ)^(1/γ) (Qiao et al. 2021, OSDI).

Arrays are [candidate], those of layers [candidate, layer]. Parameters are numbers, or columns [parameters, 1] that are
broadcast against the candidates: so a fit gets all its derivatives in one call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from analysis.advisor.links import (
    Group,
    Links,
    all_reduce_s,
    all_to_all_s,
    broadcast_s,
    chain_crossing,
    gather_s,
    group_of,
    send_s,
)
from analysis.advisor.replay import pipeline_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from analysis.advisor.layouts import Plan
    from analysis.advisor.machine import Machines
    from analysis.advisor.replay import Kind

Values = NDArray[np.float64]
T = TypeVar("T", float, Values)
G = TypeVar("G", Links, Group)

BACKWARD = 2.0
"""Backward's work ÷ forward's."""
EVENLY = -1.0
"""Stage of layers that are spread over all stages alike."""
FIRST_BUCKET_BYTES = 2.0**20
"""DDP's first bucket, so that sending begins early (torch's default)."""
UPDATE_HANDLING = 0.07
"""What an optimizer's operation takes longer on sharded tensors ÷ what a linear layer's forward pass does: 10 of 140 µs
(torch 2.11 on a processor).
"""
SHARDING_MESSAGES = 3.0
"""Of a layer whose parameters are gathered for each pass, and whose gradients are scattered."""


@dataclass(frozen=True, kw_only=True)
class Phases(Generic[T]):
    """Parts of a step, seconds, that add up to it; of the device that works longest."""

    compute_s: T
    """Forward and backward."""
    communication_s: T
    """Collectives and messages that no computation hides."""
    bubble_s: T
    """Waiting for other stages, and handing over to them."""
    optimizer_s: T
    """Updating parameters."""
    data_s: T
    """Fetching the batch."""
    other_s: T
    """What every step costs."""

    @property
    def step_s(self) -> T:
        """The whole step."""
        first, *rest = vars(self).values()
        result: T = sum(rest, start=first)
        return result

    def stretched(self, factor: T) -> Phases[T]:
        """All parts longer alike."""
        return type(self)(**{name: factor * part for name, part in vars(self).items()})

    def at(self, place: int) -> Phases[float]:
        """Those of one candidate."""
        return Phases(**{name: float(part[..., place]) for name, part in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one device has to do for one micro-batch, layer by layer: its part where a tensor group shares a layer.

    Columns are of the forward pass, [candidate, layer], where nothing else is said; what there is not is 0.
    """

    count: Values
    """Layers that are alike."""
    stage: Values
    """Stage of a pipeline that has the layer; `EVENLY`: each has as many."""
    device: Values
    """Device that has the stage; like it."""
    product_flop: Values
    """Of matrix products, two per multiply-add, and what idles meanwhile where that is known."""
    kernels_s: Values | float = 0.0
    """Time of what a calibration measures by its shape: all but products, of the suite's own models."""
    kernels_backward_s: Values | float = 0.0
    """The same of backward."""
    attention_flop: Values | float = 0.0
    """Of attention's own products, where a kernel of their own does them."""
    odd_flop: Values
    """Of products whose sizes tensor cores can't take at full speed."""
    traffic_bytes: Values | float = 0.0
    """Moved by elementwise work."""
    logits: Values
    """At the loss."""
    operations: Values
    """Launched by the host."""
    tensor_operations: Values
    """Parts that a tensor group shares, whose shards and collectives cost the host besides."""
    softmax_operations: Values | float = 0.0
    """1: softmax takes several kernels instead of one."""
    backward: Values
    """Backward's work ÷ forward's: 2, without the gradient of an input 1."""
    repeats: Values
    """Share of the forward pass that backward repeats."""
    parameters: Values
    """Of one layer."""
    expert_parameters: Values | float = 0.0
    """That part of them which is cut over the expert group; already divided by it."""
    tensors: Values | float = 0.0
    """Parameters, as tensors."""
    exchanges: Values
    """All-reduces of the tensor group in each pass."""
    exchanged_bytes: Values
    """Of one of them."""
    routed_bytes: Values | float = 0.0
    """That go to experts, and back, in each pass."""
    ring_bytes: Values | float = 0.0
    """Keys and values that all of a context group have in the end of each pass."""
    eight_bit: Values | float = 0.0
    """1: products with weights are in 8 bits."""
    eager: Values
    """[candidate] 1: kernels are torch's own, not Megatron-LM's fused ones."""
    boundary_bytes: Values
    """[candidate] Handed from stage to stage."""
    gathered_bytes: Values
    """[candidate] Of a parameter that is sent."""
    gradient_bytes: Values
    """[candidate] Of a gradient that is sent."""
    update_bytes: Values
    """[candidate] Moved by the optimizer per parameter."""
    update_operations: Values | float = 0.0
    """[candidate] Launched by the optimizer per tensor."""
    sharded_updates: Values | float = 0.0
    """[candidate] 1: of shards, which cost the host besides (torch's DTensor); 0: of plain tensors."""
    input_bytes: Values | float = 0.0
    """[candidate] Moved to fetch a device's part of the batch."""
    again: Work | None = None
    """What selective recomputation repeats besides; None: nothing."""


Fitted = dict[str, float]
NEUTRAL: Fitted = {
    **dict.fromkeys(("kernel_scale", "attention_scale", "traffic_scale", "gradient_scale"), 1.0),
    **dict.fromkeys(("fp8_speed", "eager_slower", "alone", "overlap", "sharded_overlap"), 1.0),
    **dict.fromkeys(("tensor_launch_s", "softmax_launch_s"), 0.0),
    "loss_bytes": 40.0,  # what the fits of transformers begin with
    **dict.fromkeys(("message_s", "handover_s", "sharding_scale", "server_copies"), 0.0),
    **dict.fromkeys(("shard_copies", "shard_launch_s"), 0.0),
    "launch_overlap": 6.0,  # whichever is slower decides, smoothly near the crossing
}
"""What parameters that a fit does not have are: so that they change nothing, where nothing else is said."""


def completed(fitted: Mapping[str, Values | float]) -> dict[str, Values | float]:
    """All parameters; where links were not told apart, the node's holds for both tiers, and for turns as for bytes.

    Products of odd sides are fitted like others where nothing else is said.
    """
    turns = 1.0 if "network_scale" in fitted else fitted["link_scale"]
    like = {"network_scale": fitted["link_scale"], "odd_scale": fitted.get("product_scale", 1.0)}
    return {**NEUTRAL, **like, "turn_scale": turns, **fitted}


def overlapped(first: Values, second: Values, gamma: Values | float) -> Values:
    """Time of two things of which one hides a part of the other; γ=1: none, γ→∞: all."""
    larger = np.maximum(np.maximum(first, second), 1e-12)
    return larger * ((first / larger) ** gamma + (second / larger) ** gamma) ** (1.0 / gamma)


def links_of(machines: Machines, fitted: Mapping[str, Values | float]) -> Links:
    """What the links deliver by the fitted factors."""
    known = completed(fitted)
    return Links(
        link_bytes_per_s=machines.link_bytes_per_s / known["link_scale"],
        network_bytes_per_s=machines.network_bytes_per_s / known["network_scale"],
        link_latency_s=machines.link_latency_s * known["turn_scale"],
        network_latency_s=machines.network_latency_s * known["turn_scale"],
        trees=not machines.host_computes,
        measured=machines.messages,
    )


def _deep(value: Values | float) -> Values:
    """A number of each candidate beside those of its layers."""
    return np.asarray(value, dtype=np.float64)[..., None]


def _of_layers(each: G) -> G:
    """Links or groups beside layers' messages."""
    deep: dict[str, Any] = {name: _deep(value) for name, value in vars(each).items() if isinstance(value, np.ndarray)}
    return replace(each, **deep)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step's time follows from."""

    work: Work
    plan: Plan
    machines: Machines
    fitted: Mapping[str, Values | float]
    """All parameters (`completed`)."""

    def deep(self, name: str) -> Values:
        """A parameter beside numbers of layers."""
        return _deep(self.fitted[name])

    @cached_property
    def links(self) -> Links:
        """What the links deliver by the fitted factors."""
        return links_of(self.machines, self.fitted)

    @cached_property
    def forward(self) -> tuple[Values, Values]:
        """Kernels of each layer's forward pass, and their launches, seconds."""
        return _kernels_s(self, 1.0, self.work.kernels_s), _launches_s(self, 1.0)

    @cached_property
    def backward(self) -> tuple[Values, Values]:
        """The same of its backward pass, without what that computes again."""
        times = self.work.backward
        return _kernels_s(self, times, self.work.kernels_backward_s), _launches_s(self, times)

    @property
    def passes(self) -> tuple[tuple[Values, Values], tuple[Values, Values]]:
        """Of forward, as often as it is computed, and of backward."""
        often = 1.0 + self.work.repeats
        return (often * self.forward[0], often * self.forward[1]), self.backward

    @cached_property
    def ahead(self) -> Values:
        """Time of a device's layers ÷ the sum of what each takes alone, [candidate, layer].

        The host launches layers while others are computed, and catches up while a device has work for long: so all of a
        device's kernels stand beside all of its launches.
        """
        work, gamma, (forward, backward) = self.work, self.fitted["launch_overlap"], self.passes
        alone = overlapped(*forward, _deep(gamma)) + overlapped(*backward, _deep(gamma))
        result = np.ones_like(alone)
        for device in np.unique(work.device):
            own = np.where(work.device == device, work.count, 0.0)
            kernels, launches = (
                ((one + other) * own).sum(axis=-1) for one, other in zip(forward, backward, strict=True)
            )
            ratio = overlapped(kernels, launches, gamma) / np.maximum((alone * own).sum(axis=-1), 1e-12)
            result = np.where(work.device == device, ratio[..., None], result)
        return result

    def fullest(self, values: Values | float) -> Values:
        """Sums over the layers of a pipeline's device that has most; layers' values are [..., candidate, layer]."""
        work, pipeline = self.work, self.plan.pipeline
        values = np.broadcast_to(values, np.broadcast_shapes(np.shape(values), work.count.shape))
        result = (values * work.count).sum(axis=-1)
        for size in np.unique(pipeline[pipeline > 1]).tolist():
            rows = pipeline == size
            result[..., rows] = self.parts(values, rows, work.device, int(size)).max(axis=0)
        return np.asarray(result, dtype=np.float64)

    def parts(self, values: Values, rows: NDArray[np.bool_], owners: Values, parts: int) -> Values:
        """Sums of each part's layers, of some candidates, [part, ..., candidate]; `owners`: who has which layer."""
        numbers = np.arange(parts, dtype=np.float64)[None, :, None]
        count, owner = self.work.count[rows][:, None, :], owners[rows][:, None, :]
        held = np.where(owner == EVENLY, count / parts, np.where(owner == numbers, count, 0.0))
        sums = np.einsum("...cl,cpl->...pc", values[..., rows, :], held)
        return np.asarray(np.moveaxis(sums, -2, 0), dtype=np.float64)

    def group(self, size: Values, stride: Values) -> Group:
        """Groups of so many ranks, `stride` apart."""
        return group_of(size, stride, self.machines.devices_per_node, self.plan.devices)

    def sent_s(
        self,
        cost_s: Callable[[Values, Group, Links], Values],
        message_bytes: Values,
        size: Values,
        stride: Values,
        messages: Values | float,
    ) -> Values:
        """So many bytes altogether, in so many messages of a collective, such as `all_reduce_s`."""
        once = cost_s(message_bytes / np.maximum(messages, 1.0), self.group(size, stride), self.links)
        return np.where(size > 1, messages * (once + self.fitted["message_s"]), 0.0)


def _kernels_s(step: Step, times: Values | float, measured_s: Values | float) -> Values:
    """One pass of each layer on the device, without launches: `times` what forward computes, and measured kernels."""
    work, machines = step.work, step.machines
    faster = np.where(work.eight_bit > 0, step.deep("fp8_speed"), 1.0)
    time = step.deep("product_scale") * work.product_flop / machines.rates(work.product_flop) / faster
    others: dict[str, Any] = {"attention_scale": work.attention_flop, "odd_scale": work.odd_flop}
    for name, flop in others.items():
        if np.any(flop):
            time = time + step.deep(name) * flop / machines.rates(flop)
    moved = work.traffic_bytes + step.deep("loss_bytes") / (1.0 + BACKWARD) * work.logits
    time = time + step.deep("traffic_scale") * moved / _deep(machines.memory_bytes_per_s)
    time = times * time + step.deep("kernel_scale") * measured_s
    return np.where(_deep(work.eager) > 0, step.deep("eager_slower"), 1.0) * time


def _launches_s(step: Step, times: Values | float) -> Values:
    """What the host takes to launch one pass of each layer."""
    work = step.work
    launches = step.deep("launch_scale") * _deep(step.machines.launch_s) * work.operations
    launches = launches + step.deep("tensor_launch_s") * work.tensor_operations
    return times * (launches + step.deep("softmax_launch_s") * work.softmax_operations)


def _pass_s(step: Step, kernels_s: Values, launches_s: Values) -> Values:
    """One pass of each layer on a device among busy ones."""
    machines, alone = step.machines, step.fitted["alone"]
    if machines.host_computes:
        both = kernels_s + launches_s
    else:
        both = overlapped(kernels_s, launches_s, step.deep("launch_overlap"))
        if machines.runs_ahead:
            both = step.ahead * both
    # Beside neighbours that are as busy as in the calibration, a device takes the calibrated time.
    return _deep(alone + (1.0 - alone) * machines.crowded) * both


def forward_s(step: Step) -> Values:
    """One forward pass of each layer, launches included."""
    return _pass_s(step, *step.forward)


def backward_s(step: Step, forward: Values) -> Values:
    """One backward pass of each layer, with what it computes again."""
    result, again = _pass_s(step, *step.backward) + step.work.repeats * forward, step.work.again
    return result if again is None else result + _kernels_s(replace(step, work=again), 1.0, again.kernels_s)


def besides_s(step: Step) -> Values:
    """What the host takes for a step besides its layers, as far as no kernels hide it."""
    if not step.machines.runs_ahead:
        return step.machines.step_s
    gamma, count = step.fitted["launch_overlap"], np.maximum(step.plan.micro_batches, 1.0)
    kernels, launches = (count * step.fullest(one + other) for one, other in zip(*step.passes, strict=True))
    return overlapped(kernels, launches + step.machines.step_s, gamma) - overlapped(kernels, launches, gamma)


def step_phases(work: Work, plan: Plan, machines: Machines, parameters: Mapping[str, Values | float]) -> Phases[Values]:
    """The phases of a step of each candidate."""
    step = Step(work=work, plan=plan, machines=machines, fitted=completed(parameters))
    forward = forward_s(step)
    rings = _rings_s(step, forward)
    backward = backward_s(step, forward) + (work.backward + work.repeats) * rings
    forward = forward + rings
    exchanged = _exchanged_s(step)
    count = np.maximum(plan.micro_batches, 1.0)
    # All-reduces of a repeated forward pass are repeated with it.
    there, back = forward + exchanged, backward + exchanged * (1.0 + np.floor(work.repeats))
    inside = exchanged * (2.0 + np.floor(work.repeats)) + rings * (1.0 + work.backward + work.repeats)
    busy = count * step.fullest(there + back)
    between = count * step.fullest(inside)
    gathered = _sharded_s(step, compute_s=step.fullest(forward + backward))
    reduced = _reduced_s(step, backward_s=step.fullest(backward))
    nothing = np.zeros_like(busy)
    return Phases(
        compute_s=busy - between,
        communication_s=between + gathered + reduced,
        bubble_s=np.maximum(_pipelined_s(step, there, back, busy) - busy, 0.0),
        optimizer_s=_updated_s(step) + nothing,
        data_s=work.input_bytes / machines.memory_bytes_per_s + nothing,
        other_s=step.fitted["step_s"] + besides_s(step) + nothing,
    )


def _exchanged_s(step: Step) -> Values:
    """What each layer's tensor group and its experts exchange in one pass, which nothing hides."""
    work, plan, links = step.work, step.plan, _of_layers(step.links)
    total = np.zeros_like(work.count)
    if (plan.tensor > 1).any():
        group = _of_layers(step.group(plan.tensor, np.ones_like(plan.tensor)))
        once = all_reduce_s(work.exchanged_bytes, group, links) + step.deep("message_s")
        total = np.where((_deep(plan.tensor) > 1) & (work.exchanges > 0), work.exchanges * once, 0.0)
    if (plan.expert > 1).any():
        group = _of_layers(step.group(plan.expert, plan.tensor))
        routed = 2.0 * all_to_all_s(np.asarray(work.routed_bytes), group, links)
        total = total + np.where((_deep(plan.expert) > 1) & (work.routed_bytes > 0), routed, 0.0)
    return total


def _rings_s(step: Step, compute_s: Values) -> Values:
    """What sending keys and values round a context group adds to a layer's pass; computing hides a part of it."""
    work, plan = step.work, step.plan
    if not (plan.context > 1).any():
        return np.zeros_like(work.count)
    # Each turn hands on one device's keys and values: all of them but its own arrive.
    group, links = _of_layers(step.group(plan.context, plan.tensor)), _of_layers(step.links)
    moved = gather_s(np.asarray(work.ring_bytes), group, links)
    exposed = overlapped(compute_s, moved, step.deep("sharded_overlap")) - compute_s
    return np.where((_deep(plan.context) > 1) & (work.ring_bytes > 0), exposed, 0.0)


def _sharded_s(step: Step, *, compute_s: Values) -> Values:
    """What sharing parameters adds to a step: messages that computing hides in part, and copies that nothing hides.

    Every layer is gathered for forward and again for backward, and its gradients are scattered, all per micro-batch
    (ZeRO 3, Rajbhandari et al. 2020). Where it stays gathered (ZeRO 2 as FSDP has it, and stages of pipelines) it is so
    once. Pipelines gather and scatter once per step.
    """
    work, plan, fullest = step.work, step.plan, step.fullest
    size = plan.replicas / plan.copies
    cut = (plan.sharded > 0) & (size > 1)
    if not cut.any():
        return np.zeros_like(size)
    experts = fullest(work.expert_parameters)
    whole = work.gathered_bytes * (fullest(work.parameters) - experts)
    messages = fullest(np.where(work.parameters > 0, 1.0, 0.0))
    once = step.sent_s(gather_s, whole, size, plan.data_stride, messages)
    same, apart = size / plan.expert, plan.data_stride * plan.expert
    of_experts = step.sent_s(gather_s, work.gathered_bytes * experts, same, apart, messages)
    once = once + np.where(experts > 0, of_experts, 0.0)
    times = np.where((plan.stays_gathered > 0) | (plan.pipeline > 1), 2.0, 3.0)
    # HSDP's copies reduce each layer's shard at once where gradients are reduced in buckets.
    shards = work.gradient_bytes * fullest(work.parameters) / size
    between = step.sent_s(all_reduce_s, shards, plan.copies, plan.data_stride * size, messages)
    moved = times * once + np.where(plan.bucket_bytes > 0, between, 0.0)
    exposed = overlapped(compute_s, moved, step.fitted["sharded_overlap"]) - compute_s
    layers = np.where(work.parameters > 0, _deep(work.gathered_bytes) * work.parameters, 0.0)
    besides = times * fullest(_copied_s(step, layers))
    often = np.where(plan.pipeline > 1, 1.0, np.maximum(plan.micro_batches, 1.0))
    return np.where(cut, often * (exposed + besides), 0.0)


def _copied_s(step: Step, layers_bytes: Values) -> Values:
    """What sharing layers of these sizes takes besides each message, of which each layer has so many.

    By the calibration, in which each layer is gathered twice and scattered once; without it copies and host time.
    """
    measured = step.machines.sharding
    if measured is None:
        copied = step.deep("shard_copies") * layers_bytes / _deep(step.machines.memory_bytes_per_s)
        return copied + np.where(layers_bytes > 0, step.deep("shard_launch_s"), 0.0)
    ranks = np.array([[float(measured.ranks)]])
    there = Group(size=ranks, within=ranks, rings=np.ones_like(ranks))
    calibrated = _of_layers(links_of(step.machines, {"link_scale": 1.0}))
    messages = SHARDING_MESSAGES * gather_s(layers_bytes, there, calibrated)
    besides = np.where(layers_bytes > 0, np.maximum(measured.layers_s(layers_bytes) - messages, 0.0), 0.0)
    return step.deep("sharding_scale") / SHARDING_MESSAGES * besides


def _reduced_s(step: Step, *, backward_s: Values) -> Values:
    """What reducing gradients adds: after backward, or in buckets of which it hides a part; of shards between copies.

    Under ZeRO 1 a reduce-scatter, and an all-gather of the updated parameters, which move the same. Torch's all-reduces
    in buckets, and the owners send what they updated one after the other.
    """
    work, plan, fitted = step.work, step.plan, step.fitted
    sharded, bucketed, owned = (each > 0 for each in (plan.sharded, plan.bucket_bytes, plan.owners))
    inside = np.where(sharded, plan.replicas / plan.copies, 1.0)
    size = np.where(sharded, plan.copies, plan.replicas)
    if not (size > 1).any():
        return np.zeros_like(size)
    held, experts = step.fullest(work.parameters), step.fullest(work.expert_parameters)
    parts = (
        (held - experts, size, inside),
        (experts, np.maximum(size / plan.expert, 1.0), inside * plan.expert),
    )
    after, buckets = np.zeros_like(size), np.zeros_like(size)
    for parameters, copies, apart in parts:
        stride = plan.data_stride * apart
        sent_bytes = fitted["gradient_scale"] * work.gradient_bytes * parameters / inside
        rest = np.maximum(0.0, sent_bytes - FIRST_BUCKET_BYTES)
        messages = np.where(bucketed, 1.0 + np.ceil(rest / np.maximum(plan.bucket_bytes, 1.0)), 1.0)
        reduced = step.sent_s(all_reduce_s, sent_bytes, copies, stride, messages)
        scattered = 2.0 * step.sent_s(gather_s, sent_bytes, copies, stride, 1.0)
        updated = step.sent_s(broadcast_s, work.gathered_bytes * parameters, copies, stride, copies)
        there = (parameters > 0) & (copies > 1)
        buckets = buckets + np.where(there & bucketed & ~sharded, reduced, 0.0)
        alone = np.where(owned, scattered, reduced)
        after = after + np.where(there & ~bucketed, alone, np.where(there & bucketed & owned, updated, 0.0))
    hidden = overlapped(backward_s, buckets, fitted["overlap"]) - backward_s
    return after + np.where(bucketed, hidden, 0.0)


def _updated_s(step: Step) -> Values:
    """The optimizer's update of what a device owns."""
    work, plan = step.work, step.plan
    shards = np.where(plan.sharded > 0, plan.replicas / plan.copies, 1.0)
    shards = np.where(plan.owners > 0, plan.replicas, shards)
    experts = step.fullest(work.expert_parameters)
    owned = (step.fullest(work.parameters) - experts) / shards + experts / np.maximum(shards / plan.expert, 1.0)
    return updated_s(step, parameters=owned, tensors=step.fullest(work.tensors))


def updated_s(step: Step, *, parameters: Values | float, tensors: Values | float) -> Values:
    """An update of so many parameters in so many tensors; a GPU's launches are hidden behind one another."""
    work, machines, fitted = step.work, step.machines, step.fitted
    moved = work.update_bytes * parameters / machines.memory_bytes_per_s
    launches = tensors * work.update_operations * machines.launch_s
    once = moved + launches if machines.host_computes else np.maximum(moved, machines.launch_s)
    result: Values = fitted["update_scale"] * once
    if machines.host_computes:
        handled = UPDATE_HANDLING * work.sharded_updates * work.update_operations * tensors
        result = result + fitted["tensor_launch_s"] * handled
    return result


def _pipelined_s(step: Step, forward: Values, backward: Values, busy: Values) -> Values:
    """All micro-batches through all stages, from each layer's forward and backward pass of one of them.

    Schedules are replayed, or idle by their formula. Interleaving v equal stages per device leaves a v-th of the
    bubble, and sends v times the messages, which others wait for (Narayanan et al. 2021, §2.2).
    """
    work, plan, per_node = step.work, step.plan, step.machines.devices_per_node
    total, handover = np.array(busy), np.broadcast_to(step.fitted["handover_s"], busy.shape)
    if not (plan.pipeline > 1).any():
        return total
    crosses = chain_crossing(plan.pipeline, plan.stage_stride, per_node)
    hops = send_s(work.boundary_bytes, crosses, step.links, rings=np.minimum(per_node, plan.stage_stride))
    hops = np.broadcast_to(hops, busy.shape)
    for rows, size, count, chunks in _alike(plan):
        if plan.bubble[rows][0] >= 0:
            longest = step.parts(forward + backward, rows, work.device, size).max(axis=0)
            longest = longest + 2.0 * chunks * handover[..., rows]
            total[..., rows] = count * longest / (1.0 - plan.bubble[rows])
        else:
            kind: Kind = "interleaved_1f1b" if chunks > 1 else "gpipe" if plan.gpipe[rows][0] else "1f1b"
            there, back = (
                list(step.parts(each, rows, work.stage, size * chunks) + handover[..., rows])
                for each in (forward, backward)
            )
            total[..., rows] = pipeline_s(kind, size, count, there, back, send_s=hops[..., rows])
    return total


def _alike(plan: Plan) -> Iterator[tuple[NDArray[np.bool_], int, int, int]]:
    """Rows whose pipelines have equally many devices, micro-batches, and stages per device, and one schedule."""
    micro = np.round(np.maximum(plan.micro_batches, 1.0))
    keys = np.stack([plan.pipeline, micro, plan.chunks, plan.gpipe, plan.bubble])
    for key in np.unique(keys[:, plan.pipeline > 1], axis=1).T:
        yield (keys == key[:, None]).all(axis=0), int(key[0]), int(key[1]), int(key[2])
