"""Peak memory of a device for the suite's own models: what each device of a run holds, by its strategy.

State and shards after Rajbhandari et al. 2020 (arXiv 1910.02054). What libraries take comes on top and is not in here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from analysis.advisor.device_memory import WHOLE, DeviceMemory, Left
from parallelbench.config.components import StateShards
from parallelbench.strategies.data_parallel import DdpStrategy, Zero1
from parallelbench.strategies.fsdp import ShardedStrategy
from parallelbench.strategies.pipeline import ModelParallel, PipelineStrategy
from parallelbench.strategies.servers import ParameterServer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.advisor.suite_step import SuiteJob
    from parallelbench.measure.counting import LayerMemory, ModelMemory


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
    kept: dict[str, Any] = {"shares": WHOLE, "loss": memory.loss, "left": {}} | more
    kept.setdefault("input_bytes", memory.input_bytes * kept["samples"])
    kept.setdefault("update_bytes", kept["shares"].parameters * _update_bytes(job, memory, layers, kept["left"]))
    return DeviceMemory(layers=layers, states=job.run.optimizer.states_per_parameter() or 0, **kept)


def _update_bytes(job: SuiteJob, memory: ModelMemory, layers: Sequence[LayerMemory], left: dict[str, Left]) -> float:
    kind = job.figures.device_type
    peaks = [left.get(layer.name, Left(1, 1)).parameters * layer.update_peaks[kind] for layer in layers] or [0.0]
    return sum(peaks) if memory.updates_at_once[kind] else max(peaks)


def _left(job: SuiteJob) -> dict[str, Left]:
    """What a tensor group leaves of the layers that the model's plan shards."""
    strategy = job.run.strategy
    gone = 1.0 - 1.0 / getattr(strategy, "tensor", job.run.devices if strategy.name == "tensor_parallel" else 1)
    return {
        each.name: Left(1.0 - gone * each.shardable_parameters / each.parameters, 1.0 - gone * CUT_ACTIVATIONS)
        for each in job.layers
        if each.shardable_parameters
    }


def _equal_one(job: SuiteJob, memory: ModelMemory) -> DeviceMemory:
    """One of the devices that hold alike; under `zero1` the one that owns most."""
    run = job.run
    strategy, samples = run.strategy, run.global_batch_size / run.strategy.data_parallel_degree(run)
    if isinstance(strategy, ShardedStrategy):
        shares, stay = StateShards.even(strategy.ranks_per_copy(run)), not strategy.reshard_after_forward
        return _held(job, memory, memory.layers, samples=samples, gathers=True, gathered_stay=stay, shares=shares)
    if strategy.name == "dp_tp":
        shares = StateShards.even(strategy.data_parallel_degree(run))
        return _held(job, memory, memory.layers, samples=samples, gathers=True, shares=shares, left=_left(job))
    shares = strategy.state_shards(run) or WHOLE
    if isinstance(strategy, Zero1):
        shares = StateShards(1.0, 1.0, _largest_share(memory.layers, run.devices))
    stay = isinstance(strategy, DdpStrategy)
    return _held(job, memory, memory.layers, samples=samples, gradients_stay=stay, shares=shares, left=_left(job))


def _largest_share(layers: Sequence[LayerMemory], owners: int) -> float:
    """Of the bytes, where each tensor, the largest first, goes whole to who owns least (ZeroRedundancyOptimizer)."""
    owned = [0] * owners
    for size in sorted((size for layer in layers for size in layer.tensors), reverse=True):
        owned[owned.index(min(owned))] += size
    return max(owned) / max(1, sum(owned))


def _stages(job: SuiteJob, memory: ModelMemory) -> list[DeviceMemory]:
    from analysis.advisor.suite_strategies import stages_of

    run = job.run
    assert isinstance(run.strategy, PipelineStrategy)
    pipeline, mesh = run.strategy.pipeline(run), run.strategy.mesh(run)
    count, left = pipeline.micro_batches, _left(job)
    samples = run.global_batch_size / mesh.data / count
    devices, stages = pipeline.stage_devices(), stages_of(job, pipeline.stages)
    found = []
    for device in range(pipeline.devices):
        own = [layer for layer, stage in zip(memory.layers, stages, strict=True) if devices[stage] == device]
        kept = count if pipeline.schedule in ("gpipe", "looped_bfs") else min(count, pipeline.devices - device)
        if pipeline.stages_per_rank > 1 and pipeline.schedule != "looped_bfs":
            kept = min(count, pipeline.devices + pipeline.devices - device)
        batch = memory.input_bytes * samples * count if devices[0] == device else 0.0
        loss = memory.loss if devices[-1] == device else None
        held = {"samples": samples, "input_bytes": batch, "loss": loss, "in_flight": kept, "left": left}
        found.append(_held(job, memory, own, **held))
    return found


def _parts(job: SuiteJob, memory: ModelMemory) -> list[DeviceMemory]:
    from analysis.advisor.suite_strategies import stages_of

    parts, samples = stages_of(job, job.run.devices), float(job.run.global_batch_size)
    messages = job.figures.device_type == "cpu"  # GPUs have one process, which lets go of what it has copied
    found = []
    for device in range(job.run.devices):
        places = [place for place, part in enumerate(parts) if part == device]
        ends = device == parts[-1]
        held = {
            "samples": samples,
            "input_bytes": memory.input_bytes * samples if device == parts[0] else 0.0,
            "loss": memory.loss if ends else None,
            "sent_bytes": 0.0 if ends or not messages else 2.0 * job.layers[places[-1]].boundary_bytes * samples,
        }
        found.append(_held(job, memory, [memory.layers[place] for place in places], **held))
    return found


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
