"""Time of a training step from formulas: compute, launches, collectives, the pipeline, the optimizer.

Pollux' γ joins what overlaps: T = (a^γ + b^γ)^(1/γ) (Qiao et al. 2021, OSDI). All functions take parameters as numbers,
or as columns that are broadcast against the candidates, which is how a fit gets all its derivatives in one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.advisor import transformer
from analysis.advisor.links import Links, all_reduce_s, gather_s, group_of, send_s, turn_s
from analysis.advisor.replay import pipeline_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    from analysis.advisor.layouts import Layouts, Values
    from analysis.advisor.machines import Machines

BACKWARD = 2.0
"""Backward's work ÷ forward's."""
LAUNCH_OVERLAP = 6.0
"""γ of the host's launches and the device's work: whichever is slower decides, smoothly near the crossing."""
UPDATE_BYTES = 34.0
"""Traffic of Adam per parameter in mixed precision: master copy and two moments read and written in single precision,
the gradient read and cleared, the half-precision copy written, the norm of gradients."""


@dataclass(frozen=True)
class StepTime:
    """Predicted phases of one step, seconds; they add up to the step."""

    compute_s: Values
    """The busiest stage's kernels, and what its host's launches add."""
    tensor_s: Values
    """All-reduces of the tensor group, which nothing hides."""
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
    width, rows = layouts.hidden / layouts.tensor, transformer.tokens(layouts)
    slower = 1.0 + fitted["narrow_width"] / width + fitted["few_rows"] / rows
    faster = np.where(layouts.fp8 > 0, fitted["fp8_speed"], 1.0)
    matrices = transformer.matrix_flops(layouts) / machines.flops_per_s / fitted["matrix_share"] * slower / faster
    attention = transformer.attention_flops(layouts) / machines.flops_per_s / fitted["attention_share"]
    traffic = transformer.elementwise_bytes(layouts) + transformer.score_bytes(layouts)
    return matrices + attention + traffic / machines.memory_bytes_per_s / fitted["memory_share"]


def _logits_s(layouts: Layouts, machines: Machines, fitted: Mapping[str, Values | float]) -> Values:
    """Forward and backward of the last product and the loss, of one micro-batch."""
    share = np.where(transformer.odd_vocabulary(layouts), fitted["odd_share"], fitted["matrix_share"])
    products = (1.0 + BACKWARD) * transformer.logit_flops(layouts) / machines.flops_per_s / share
    traffic = fitted["loss_bytes"] * transformer.logits(layouts)
    return products + traffic / machines.memory_bytes_per_s / fitted["memory_share"]


def step_time(layouts: Layouts, machines: Machines, fitted: Mapping[str, Values | float]) -> StepTime:
    """The phases of a step of each candidate."""
    links = links_of(machines, fitted)
    passes = 1.0 + BACKWARD + layouts.recompute
    unfused = fitted["softmax_launch_s"] * transformer.unfused_softmax(layouts)
    launch = fitted["launch_s"] + fitted["tensor_launch_s"] * (layouts.tensor - 1.0) + unfused
    kernels = layer_s(layouts, machines, fitted)
    per_pass = overlapped(kernels, launch, LAUNCH_OVERLAP)
    reductions = _tensor_s(layouts, machines, links)
    depth = layouts.layers / layouts.pipeline
    forward = (per_pass + reductions) * depth
    exposed = _sharded_s(layouts, machines, links, fitted, compute_s=per_pass * passes * depth)
    backward_passes = BACKWARD + layouts.recompute
    # Two all-reduces forward, two backward, two more where the forward pass is repeated.
    backward = (per_pass * backward_passes + reductions * (1.0 + layouts.recompute)) * depth
    logits = _logits_s(layouts, machines, fitted)
    count = np.maximum(layouts.micro_batches, 1.0)
    handover = fitted["handover_s"] * np.ones_like(logits)
    pipelined = _pipelined_s(layouts, machines, links, parts=(forward, backward, logits, handover))
    busy = count * (forward + backward + logits)
    tensor = count * reductions * (2.0 + layouts.recompute) * depth
    update, reduced = _update_s(layouts, machines, fitted), _reduced_s(layouts, machines, links, fitted)
    return StepTime(
        compute_s=busy - tensor,
        tensor_s=tensor,
        gather_s=count * exposed,
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


def _sharded_s(
    layouts: Layouts, machines: Machines, links: Links, fitted: Mapping[str, Values | float], *, compute_s: Values
) -> Values:
    """What the collectives of sharded parameters add to a micro-batch.

    Every layer is gathered for forward and again for backward, and its gradients are scattered, all per micro-batch.
    """
    group = group_of(layouts.data, layouts.tensor, machines.devices_per_node, layouts.devices)
    whole = transformer.HALF * transformer.device_parameters(layouts)
    # One message per layer: all their bytes, and the turns of each.
    moved = 3.0 * (gather_s(whole, group, links) + (layouts.layers / layouts.pipeline - 1.0) * turn_s(group, links))
    exposed = overlapped(compute_s, moved, fitted["overlap"]) - compute_s
    return np.where((layouts.sharded > 0) & (layouts.data > 1), exposed, 0.0)


def _reduced_s(layouts: Layouts, machines: Machines, links: Links, fitted: Mapping[str, Values | float]) -> Values:
    """All-reduce of a device's gradients, after backward."""
    group = group_of(layouts.data, layouts.tensor, machines.devices_per_node, layouts.devices)
    each = all_reduce_s(fitted["gradient_bytes"] * transformer.device_parameters(layouts), group, links)
    return np.where((layouts.sharded > 0) | (layouts.data <= 1), 0.0, each)


def _update_s(layouts: Layouts, machines: Machines, fitted: Mapping[str, Values | float]) -> Values:
    owned = transformer.device_parameters(layouts) / np.where(layouts.sharded > 0, layouts.data, 1.0)
    return UPDATE_BYTES * owned / machines.memory_bytes_per_s / fitted["update_share"]


def _pipelined_s(
    layouts: Layouts, machines: Machines, links: Links, *, parts: tuple[Values, Values, Values, Values]
) -> Values:
    """All micro-batches through all stages under 1F1B, the last of which has the logits too."""
    forward, backward, logits, handover = np.broadcast_arrays(*parts)
    total = np.array(np.maximum(layouts.micro_batches, 1.0) * (forward + backward + logits))
    stages, count = layouts.pipeline.astype(int), np.round(np.maximum(layouts.micro_batches, 1.0)).astype(int)
    neighbours = layouts.tensor * layouts.data
    crosses = (neighbours >= machines.devices_per_node) * 1.0
    rings: Values = np.minimum(machines.devices_per_node, layouts.devices)
    sent = send_s(transformer.boundary_bytes(layouts), np.asarray(crosses, dtype=np.float64), links, rings=rings)
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
    return total
