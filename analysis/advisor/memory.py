"""What a device holds while it trains, and the most at once: of the suite's own models by a walk through one step.

Of transformers it is a formula of what an allocator reserves: it keeps what is freed, so the parts add up. Activations
after Korthikanti et al. 2022 (arXiv 2205.05198), without dropout; parameters, gradients and Adam's states are in fp32,
products and what is kept in 16 bits. State and shards after Rajbhandari et al. 2020 (arXiv 1910.02054). What libraries
take comes on top and is not in here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from analysis.advisor import transformer
from analysis.advisor.strategies import stages_of
from parallelbench.config.components import StateShards
from parallelbench.strategies.data_parallel import DataParallel, DdpStrategy, Zero1
from parallelbench.strategies.fsdp import ShardedStrategy
from parallelbench.strategies.pipeline import ModelParallel, PipelineStrategy
from parallelbench.strategies.servers import ParameterServer
from parallelbench.strategies.tensor import DpTp, TensorParallel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from analysis.advisor.layouts import Layouts, Values
    from analysis.advisor.strategies import SuiteJob
    from parallelbench.measure.layer_records import LayerMemory, ModelMemory
    from parallelbench.strategies.pipeline.schedules import Pipeline


WHOLE = StateShards.even(1)
"""A copy of everything."""


class Left(NamedTuple):
    """Shares of a layer, 0 to 1."""

    parameters: float
    activations: float


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What a device has of a job: layers, samples, and the shares of their state that it keeps."""

    layers: Sequence[LayerMemory]
    samples: float
    """Of a micro-batch."""
    input_bytes: float
    """Of all the input that it holds at once."""
    loss: LayerMemory | None
    """None where another device computes it."""
    states: int
    """States of the optimizer per parameter."""
    sent_bytes: float = 0.0
    """Of the output that it sends on, and of the gradient that comes back: held until its backward pass ends."""
    in_flight: float = 1
    """Micro-batches whose activations it keeps at once."""
    shares: StateShards = WHOLE
    """Shares of the layers' parameters, gradients and optimizer states that stay."""
    update_bytes: float = 0.0
    """The most that an update allocates for a moment."""
    gradients_stay: bool = False
    """Whether gradients keep their memory between steps, in buckets."""
    buckets_apart: bool = False
    """Whether buckets keep memory of their own beside the gradients."""
    averages: bool = False
    """Whether all gradients are there when new ones are made of them: a vector to be averaged over copies of a stage,
    or the sums over a process's GPUs.
    """
    gathers: bool = False
    """Whether a layer's parameters are whole only while it works."""
    gathered_stay: bool = False
    """Whether they stay whole from forward to backward."""
    left: Mapping[str, Left] = field(default_factory=dict)
    """Layer → what a tensor group leaves of it to each device; layers that it does not cut are missing."""

    @property
    def peak_bytes(self) -> float:
        """Forward layer by layer, the loss, backward layer by layer, the update: the most that is held at once."""
        return max(*self._forward(), *self._backward(), self._average(), self._update())

    def _left(self, layer: LayerMemory) -> Left:
        """All of it where no tensor group cuts it."""
        return self.left.get(layer.name, Left(1.0, 1.0))

    def _parameters(self, layer: LayerMemory) -> float:
        """Bytes of a layer's parameters, as they are computed with."""
        return self._left(layer).parameters * layer.parameter_bytes

    def _kept(self, layer: LayerMemory) -> float:
        return self._left(layer).activations * layer.kept.at(self.samples)

    @property
    def _whole(self) -> float:
        return float(sum(map(self._parameters, self.layers)))

    @property
    def _between_steps(self) -> float:
        """Parameters, buffers, states, gradients that stay, and the batch."""
        gradients = self.shares.gradients if self.gradients_stay or self.buckets_apart else 0.0
        state = self.shares.parameters + self.shares.states * self.states + gradients
        return state * self._whole + sum(layer.buffer_bytes for layer in self.layers) + self.input_bytes

    def _average(self) -> float:
        return self._between_steps + 2.0 * self.shares.gradients * self._whole if self.averages else 0.0

    def _update(self) -> float:
        gradients = 0.0 if self.gradients_stay else self.shares.gradients * self._whole
        return self._between_steps + gradients + self.update_bytes

    @property
    def _others_kept(self) -> float:
        """Activations of the other micro-batches in flight."""
        return (self.in_flight - 1) * sum(map(self._kept, self.layers))

    def _forward(self) -> Iterator[float]:
        """While each layer's forward pass works, and the loss. What a layer gathers arrives in a buffer first."""
        held = self._between_steps + self._others_kept
        for layer in self.layers:
            own = self._parameters(layer) if self.gathers else 0.0
            yield held + 2.0 * own + self._left(layer).activations * layer.forward_peak.at(self.samples)
            held += self._kept(layer) + (own if self.gathered_stay else 0.0)
        if self.loss is not None:
            kept, backward = self.loss.kept.at(self.samples), self.loss.backward_peak.at(self.samples)
            yield held + max(self.loss.forward_peak.at(self.samples), kept + backward)

    def _backward(self) -> Iterator[float]:
        """While each layer's backward pass works, from the last to the first."""
        return self._backward_of_shards() if self.gathers else self._backward_of_copies()

    def _backward_of_copies(self) -> Iterator[float]:
        """In a pipeline, gradients of earlier micro-batches are there already."""
        held = self._between_steps + self._others_kept + sum(map(self._kept, self.layers)) + self.sent_bytes
        there = self.in_flight > 1
        if there:
            held += self.shares.gradients * self._whole
        for layer in reversed(self.layers):
            own = self._parameters(layer)
            yield held + max(self._values(layer) + own, 0.0) - (own if self.gradients_stay else 0.0)
            held -= self._kept(layer)
            if not self.gradients_stay and not there:
                held += self.shares.gradients * own

    def _backward_of_shards(self) -> Iterator[float]:
        """A layer is gathered while the one behind it works. Its gradient is copied into what is scattered, which is
        held until the next layer's is; then a shard of it stays.
        """
        held = self._between_steps + sum(map(self._kept, self.layers))
        held += self._whole if self.gathered_stay else 0.0
        scattered = 0.0
        for place, layer in reversed([*enumerate(self.layers)]):
            own = self._parameters(layer)
            ahead = 0.0 if self.gathered_stay or place == 0 else self._parameters(self.layers[place - 1])
            if not self.gathered_stay:
                yield held + scattered + 2.0 * own
                held += own
            yield held + scattered + ahead + max(self._values(layer) + own, 0.0)
            held -= self._kept(layer) + own
            yield held + ahead + 2.0 * own
            held += self.shares.gradients * own
            yield held + ahead + own
            scattered = own

    def _values(self, layer: LayerMemory) -> float:
        """What its backward pass holds beyond what was kept and the gradients of its parameters."""
        return self._left(layer).activations * (layer.backward_peak.at(self.samples) - layer.parameter_bytes)


CUT_ACTIVATIONS = 0.75
"""Share of what a sharded layer keeps that a tensor group cuts: all but norms and inputs, 24 of 32 values per token in
a transformer's block (Korthikanti et al. 2022)."""


def suite_peak_bytes(job: SuiteJob, memory: ModelMemory) -> float:
    """The fullest device's peak in a step after the first."""
    run = job.run
    if isinstance(run.strategy, PipelineStrategy):
        return max(each.peak_bytes for each in _stages(job, memory))
    if isinstance(run.strategy, ModelParallel):
        return max(each.peak_bytes for each in _parts(job, memory))
    if isinstance(run.strategy, ParameterServer):
        return max(_worker(job, memory).peak_bytes, _server_bytes(job, memory))
    return _equal_one(job, memory).peak_bytes


def _held(job: SuiteJob, memory: ModelMemory, layers: Sequence[LayerMemory], **more: Any) -> DeviceMemory:
    """A device that holds these layers; as any other of `single` where nothing else is said."""
    left = _left(job)
    held: dict[str, Any] = {"shares": WHOLE, "loss": memory.loss, "left": left} | more
    held.setdefault("input_bytes", memory.input_bytes * held["samples"])
    held.setdefault("update_bytes", held["shares"].parameters * _update_bytes(job, memory, layers, left))
    return DeviceMemory(layers=layers, states=job.run.optimizer.states_per_parameter() or 0, **held)


def _update_bytes(job: SuiteJob, memory: ModelMemory, layers: Sequence[LayerMemory], left: dict[str, Left]) -> float:
    kind = job.figures.device_type
    peaks = [left.get(layer.name, Left(1, 1)).parameters * layer.update_peaks[kind] for layer in layers] or [0.0]
    return sum(peaks) if memory.updates_at_once[kind] else max(peaks)


def _left(job: SuiteJob) -> dict[str, Left]:
    """What a tensor group leaves of the layers that the model's plan shards."""
    strategy = job.run.strategy
    gone = 1.0 - 1.0 / getattr(strategy, "tensor", job.run.devices if isinstance(strategy, TensorParallel) else 1)
    return {
        each.name: Left(1.0 - gone * each.shardable_parameters / each.parameters, 1.0 - gone * CUT_ACTIVATIONS)
        for each in job.layers
        if each.shardable_parameters
    }


def _equal_one(job: SuiteJob, memory: ModelMemory) -> DeviceMemory:
    """One of the devices that hold alike; under `zero1` the one that owns most."""
    run = job.run
    strategy, samples = run.strategy, run.global_batch_size / run.strategy.data_parallel_degree(run)
    held = partial(_held, job, memory, memory.layers, samples=samples)
    if isinstance(strategy, ShardedStrategy | DpTp):
        split = strategy.ranks_per_copy if isinstance(strategy, ShardedStrategy) else strategy.data_parallel_degree
        return held(shares=StateShards.even(split(run)), gathers=True, gathered_stay=not strategy.reshard_after_forward)
    if isinstance(strategy, DataParallel):  # the first GPU has the whole batch and all outputs, and computes a share
        whole, loss = memory.input_bytes * samples, _of_more(memory.loss, run.devices)
        return held(samples=samples / run.devices, input_bytes=whole, loss=loss, averages=True)
    shares = strategy.state_shards(run) or WHOLE
    if isinstance(strategy, Zero1):
        shares = StateShards(1.0, 1.0, _largest_share(memory.layers, run.devices))
    in_buckets = isinstance(strategy, DdpStrategy)
    stay = in_buckets and getattr(strategy, "gradient_as_bucket_view", True)
    return held(shares=shares, gradients_stay=stay, buckets_apart=in_buckets and not stay)


def _of_more(layer: LayerMemory, times: int) -> LayerMemory:
    """A layer that gets so many times the samples that are said of its device."""
    lines = {name: getattr(layer, name) for name in ("kept", "forward_peak", "backward_peak")}
    more = {name: msgspec.structs.replace(line, per_sample=times * line.per_sample) for name, line in lines.items()}
    return msgspec.structs.replace(layer, **more)


def _largest_share(layers: Sequence[LayerMemory], owners: int) -> float:
    """Of the bytes, where each tensor, the largest first, goes whole to who owns least (ZeroRedundancyOptimizer)."""
    owned = [0] * owners
    for size in sorted((size for layer in layers for size in layer.tensors), reverse=True):
        owned[owned.index(min(owned))] += size
    return max(owned) / max(1, sum(owned))


def _stages(job: SuiteJob, memory: ModelMemory) -> Iterator[DeviceMemory]:
    run = job.run
    assert isinstance(run.strategy, PipelineStrategy)
    pipeline, mesh = run.strategy.pipeline(run), run.strategy.mesh(run)
    count = pipeline.micro_batches
    samples = run.global_batch_size / mesh.data / count
    devices, stages = pipeline.stage_devices(), stages_of(job, pipeline.stages)
    for device in range(pipeline.devices):
        own = [layer for layer, stage in zip(memory.layers, stages, strict=True) if devices[stage] == device]
        yield _held(
            job,
            memory,
            own,
            samples=samples,
            input_bytes=memory.input_bytes * samples * count if devices[0] == device else 0.0,
            loss=memory.loss if devices[-1] == device else None,
            in_flight=kept_at_once(pipeline, device),
            averages=mesh.data > 1,
        )


def kept_at_once(pipeline: Pipeline, device: int) -> float:
    """Micro-batches that a device keeps at most, each of all its stages."""
    count, devices, chunks = pipeline.micro_batches, pipeline.devices, pipeline.stages_per_rank
    if pipeline.schedule in ("gpipe", "looped_bfs"):
        return count
    if pipeline.schedule == "interleaved_1f1b":  # of stages, not of devices: what is forwarded before backward begins
        ahead = (chunks - 1) * devices + 1 + 2 * (devices - 1 - device)
        return min(count * chunks, ahead) / chunks
    return min(count, devices - device if chunks == 1 else 2 * devices - device)


def _parts(job: SuiteJob, memory: ModelMemory) -> Iterator[DeviceMemory]:
    parts, samples = stages_of(job, job.run.devices), float(job.run.global_batch_size)
    messages = job.figures.device_type == "cpu"  # GPUs have one process, which lets go of what it has copied
    for device in range(job.run.devices):
        places = [place for place, part in enumerate(parts) if part == device]
        ends = device == parts[-1]
        yield _held(
            job,
            memory,
            [memory.layers[place] for place in places],
            samples=samples,
            input_bytes=memory.input_bytes * samples if device == parts[0] else 0.0,
            loss=memory.loss if ends else None,
            sent_bytes=0.0 if ends or not messages else 2.0 * job.layers[places[-1]].boundary_bytes * samples,
        )


def _worker(job: SuiteJob, memory: ModelMemory) -> DeviceMemory:
    """Its parameters, a vector of their gradients, and the gradients that make it; it updates nothing."""
    samples = job.run.global_batch_size / job.run.strategy.data_parallel_degree(job.run)
    return _held(job, memory, memory.layers, samples=samples, shares=StateShards(2.0, 1.0, 0.0), update_bytes=0.0)


def _server_bytes(job: SuiteJob, memory: ModelMemory) -> float:
    """Parameters, states, one received gradient of every worker (async: one), and the update; 0 on GPUs: a server
    works on the host.
    """
    run = job.run
    assert isinstance(run.strategy, ParameterServer)
    if job.figures.device_type != "cpu":
        return 0.0
    received = run.devices - run.strategy.servers if run.strategy.mode == "sync" else 1
    largest = max(memory.layers, key=lambda layer: layer.parameter_bytes)
    updates = largest.update_peaks["cpu"] / max(largest.tensors)  # its shard is one tensor
    whole = sum(layer.parameter_bytes for layer in memory.layers)
    return (1 + (run.optimizer.states_per_parameter() or 0) + received + updates) * whole / run.strategy.servers


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
        return RESERVED * sum(vars(self).values(), start=np.zeros(()))


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
    return np.where(chunks > 1, interleaved, np.minimum(stages, count))


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
    # ZeRO 2 keeps the whole model from forward to backward.
    whole = 2.0 * held + 6.0 * np.maximum(layer, embedding)
    by_layer = np.where(layouts.stays_gathered > 0, whole, by_layer)
    sharded = np.where(layouts.pipeline > 1, by_stage, by_layer)
    return np.where(layouts.sharded > 0, sharded, 2.0 * held)
