"""The phases of a step under each strategy of the suite: how it divides the work, what it sends. Loads no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.advisor.links import Group, Links, all_reduce_s, chain_crossing, gather_s, group_of, send_s
from analysis.advisor.schedules import pipeline_s, replayed_interleaved
from analysis.advisor.step import overlapped
from parallelbench.errors import ConfigError
from parallelbench.optim.optimizers import Lbfgs
from parallelbench.strategies.context import FsdpCp
from parallelbench.strategies.data_parallel import AccumulatingDdp, DataParallel, Zero1
from parallelbench.strategies.fsdp import ShardedStrategy
from parallelbench.strategies.pipeline import ModelParallel, PipelineStrategy
from parallelbench.strategies.pipeline.partition import balance
from parallelbench.strategies.servers import ParameterServer
from parallelbench.strategies.single import Single
from parallelbench.strategies.tensor import DpTp, TensorParallel, divides_sequence, divides_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable

    from analysis.advisor.layouts import Values
    from analysis.advisor.step import Phases, SuiteJob
    from parallelbench.config.run import RunConfig


FIRST_BUCKET_BYTES = 2.0**20
"""DDP's first bucket, so that sending begins early (torch's default)."""


def suite_phases(job: SuiteJob) -> Phases:
    """Predicted phases of a run's step; raises `ConfigError` where no formula knows the strategy or the optimizer."""
    check_formula(job.run)
    for kind, phases in _PHASES:
        if isinstance(job.run.strategy, kind):
            return phases(job)
    raise ConfigError(f"no formula knows strategy={job.run.strategy.name}")


def _busy(job: SuiteJob) -> int:
    return max(1, job.run.devices // job.run.nodes)


def _whole_pass(job: SuiteJob, samples: float, *, tensor: int = 1) -> tuple[float, float]:
    """Forward and backward of all layers on each of the busy devices."""
    crowding = job.crowding(_busy(job))
    forward = job.forward_s(samples, tensor=tensor)
    return crowding * float(forward.sum()), crowding * float(job.backward_s(forward).sum())


def _update(job: SuiteJob, *, shards: float = 1.0) -> float:
    return job.update_s(job.parameters / shards, float(job.columns["tensors"].sum()))


def _single(job: SuiteJob) -> Phases:
    samples = float(job.run.global_batch_size)
    forward, backward = _whole_pass(job, samples)
    return job.phases(compute_s=forward + backward, optimizer_s=_update(job), data_s=job.data_s(samples))


def _ddp(job: SuiteJob) -> Phases:
    """Buckets are all-reduced while backward goes on; under ZeRO 1 their owners then send what they updated."""
    run, send = job.run, Collectives(job)
    assert isinstance(run.strategy, AccumulatingDdp)
    samples = run.global_batch_size / run.devices
    forward, backward = _whole_pass(job, samples)
    rounded = getattr(run.strategy, "compression", "none") != "none"
    gradients = job.parameters * (2.0 if rounded else job.value_bytes)
    rest = max(0.0, gradients - FIRST_BUCKET_BYTES)
    buckets = 1 + math.ceil(rest / (run.strategy.bucket_mib * 2.0**20))
    reduced = send.all_reduce(gradients, run.devices, messages=buckets)
    exposed = exposed_s(backward, reduced, job.scales["overlap"])
    owned = isinstance(run.strategy, Zero1)
    sent = send.gather(job.parameters * job.value_bytes, run.devices, messages=run.devices) if owned else 0.0
    return job.phases(
        compute_s=forward + backward,
        communication_s=exposed + sent,
        optimizer_s=_update(job, shards=run.devices if owned else 1),
        data_s=job.data_s(samples),
    )


def _gathered(job: SuiteJob, whole_bytes: float, *, size: int, stride: int, keeps: bool) -> tuple[float, float]:
    """FSDP's collectives of a step, which computation may hide, and what each layer takes besides, which none hides.

    Parameters are gathered once or twice, gradients scattered.
    """
    times, layers = 2.0 if keeps else 3.0, job.columns["parameters"]
    held = layers[layers > 0] * whole_bytes / job.parameters
    send = Collectives(job)
    moved = times * send.gather(whole_bytes, size, stride=stride, messages=float(len(held)))
    return moved, send.sharding_s(held, times=times)


def _fsdp(job: SuiteJob) -> Phases:
    run = job.run
    assert isinstance(run.strategy, ShardedStrategy)
    samples, shards = run.global_batch_size / run.devices, run.strategy.ranks_per_copy(run)
    forward, backward = _whole_pass(job, samples)
    size_bytes = 2.0 if run.strategy.gather == "bf16" else float(job.value_bytes)
    keeps = not run.strategy.reshard_after_forward
    moved, besides = _gathered(job, job.parameters * size_bytes, size=shards, stride=1, keeps=keeps)
    if shards < run.devices:
        messages = float((job.columns["parameters"] > 0).sum())
        copies = run.devices // shards
        part = job.parameters * job.value_bytes / shards
        moved += Collectives(job).all_reduce(part, copies, stride=shards, messages=messages)
    compute = forward + backward
    exposed = exposed_s(compute, moved, job.scales["sharded_overlap"]) + besides
    update = _update(job, shards=shards)
    return job.phases(compute_s=compute, communication_s=exposed, optimizer_s=update, data_s=job.data_s(samples))


def _summed(job: SuiteJob, samples: float, tensor: int) -> float:
    """All-reduces of a tensor group, which nothing hides: one per layer that exchanges values, each way."""
    exchanged = job.columns["exchanged_bytes"]
    messages = 2.0 * float((exchanged > 0).sum())
    total = samples * job.activation_share * float(exchanged.sum())
    return Collectives(job).all_reduce(total, tensor, messages=messages)


def _held(job: SuiteJob, tensor: int) -> float:
    """Parameters on each device of a tensor group."""
    shardable = float(job.columns["shardable_parameters"].sum())
    return job.parameters - shardable * (1.0 - 1.0 / tensor)


def _tensor(job: SuiteJob) -> Phases:
    samples, tensor = float(job.run.global_batch_size), job.run.devices
    forward, backward = _whole_pass(job, samples, tensor=tensor)
    return job.phases(
        compute_s=forward + backward,
        communication_s=_summed(job, samples, tensor),
        optimizer_s=job.update_s(_held(job, tensor), float(job.columns["tensors"].sum())),
        data_s=job.data_s(samples),
    )


def _dp_tp(job: SuiteJob) -> Phases:
    run = job.run
    assert isinstance(run.strategy, DpTp)
    tensor, copies = run.strategy.tensor, run.strategy.data_parallel_degree(run)
    samples, held = run.global_batch_size / copies, _held(job, tensor)
    forward, backward = _whole_pass(job, samples, tensor=tensor)
    keeps = not run.strategy.reshard_after_forward
    moved, besides = _gathered(job, held * job.value_bytes, size=copies, stride=tensor, keeps=keeps)
    compute = forward + backward
    exposed = exposed_s(compute, moved, job.scales["sharded_overlap"]) + besides
    return job.phases(
        compute_s=compute,
        communication_s=exposed + _summed(job, samples, tensor),
        optimizer_s=job.update_s(held / copies, float(job.columns["tensors"].sum())),
        data_s=job.data_s(samples),
    )


def stages_of(job: SuiteJob, parts: int) -> list[int]:
    """The part of each layer, cut as the suite cuts: by counted operations, parameters breaking ties."""
    chosen = getattr(job.run.strategy, "stage_map", None) or getattr(job.run.strategy, "device_map", None)
    if chosen is not None:
        return [chosen[layer.name] for layer in job.layers]
    counts = job.columns
    costs = counts["product_flop"] + counts["convolution_flop"] + counts["grouped_flop"] + 1e-6 * counts["parameters"]
    return balance(costs.tolist(), parts)


def _pipeline(job: SuiteJob) -> Phases:
    run = job.run
    assert isinstance(run.strategy, PipelineStrategy)
    strategy, mesh = run.strategy, run.strategy.mesh(run)
    pipeline, tensor = strategy.pipeline(run), mesh.inner.get("tensor", 1)
    samples = run.global_batch_size / mesh.data / strategy.micro_batches
    stages = np.array(stages_of(job, pipeline.stages))
    of_stage, send = np.array(pipeline.stage_devices())[stages], Collectives(job)
    crowding, forward = job.crowding(_busy(job)), job.forward_s(samples, tensor=tensor)
    exchanged = _summed(job, samples, tensor) * job.columns["exchanged_bytes"]
    exchanged = exchanged / max(float(job.columns["exchanged_bytes"].sum()), 1.0)
    parts = (
        crowding * _by_part(forward, stages) + 0.5 * _by_part(exchanged, stages),
        crowding * _by_part(job.backward_s(forward), stages) + 0.5 * _by_part(exchanged, stages),
    )
    boundary = samples * job.activation_share * float(job.columns["boundary_bytes"][:-1].max())
    total = _replayed(job, parts, send_s=send.hop(boundary, pipeline.devices, stride=tensor))
    busiest = strategy.micro_batches * float(_by_part((parts[0] + parts[1]), np.array(pipeline.stage_devices())).max())
    summed = strategy.micro_batches * float(_by_part(exchanged, of_stage).max())
    held = _by_part(job.columns["parameters"], of_stage).max() * _held(job, tensor) / job.parameters
    reduced = send.all_reduce(held * job.value_bytes, mesh.data, stride=mesh.inner_size)
    return job.phases(
        compute_s=busiest - summed,
        communication_s=summed + reduced,
        bubble_s=max(0.0, total - busiest),
        optimizer_s=job.update_s(held, float(_by_part(job.columns["tensors"], of_stage).max())),
        data_s=job.data_s(run.global_batch_size / mesh.data),
    )


def _by_part(values: Values, parts: Values) -> Values:
    """Sums of the values of each part."""
    return np.asarray(np.bincount(parts, weights=values), dtype=np.float64)


def _replayed(job: SuiteJob, parts: tuple[Values, Values], *, send_s: float) -> float:
    """From the first action of a pipeline to its last; schedules that nothing replays, by their formula."""
    strategy = job.run.strategy
    assert isinstance(strategy, PipelineStrategy)
    pipeline, handover = strategy.pipeline(job.run), job.scales["handover_s"]
    forward, backward = ([scalar(each + handover) for each in values] for values in parts)
    sends = scalar(send_s)
    if pipeline.schedule in ("gpipe", "1f1b"):
        return float(pipeline_s(pipeline.schedule, pipeline.micro_batches, forward, backward, send_s=sends))
    if pipeline.schedule == "interleaved_1f1b" and pipeline.micro_batches % pipeline.devices == 0:
        sizes = (pipeline.devices, pipeline.micro_batches)
        return float(replayed_interleaved(*sizes, forward, backward, send_s=sends))
    work = np.array(forward) + np.array(backward)
    busiest = float(_by_part(work, np.array(pipeline.stage_devices())).max())
    return pipeline.micro_batches * busiest / (1.0 - pipeline.bubble())


def _layer_split(job: SuiteJob) -> Phases:
    """One device works at a time, so none is crowded; at each cut values go on, and their gradients back."""
    run, samples = job.run, float(job.run.global_batch_size)
    parts = np.array(stages_of(job, run.devices))
    forward = job.forward_s(samples)
    work = job.crowding(1) * (forward + job.backward_s(forward))
    cuts = np.flatnonzero(parts[1:] != parts[:-1])
    boundary = samples * job.activation_share * job.columns["boundary_bytes"][cuts]
    sent = 2.0 * sum(Collectives(job).hop(float(each), run.devices) + job.scales["handover_s"] for each in boundary)
    busiest = float(_by_part(work, parts).max())
    held = float(_by_part(job.columns["parameters"], parts).max())
    return job.phases(
        compute_s=busiest,
        bubble_s=float(work.sum()) - busiest,
        communication_s=sent,
        optimizer_s=job.update_s(held, float(_by_part(job.columns["tensors"], parts).max())),
        data_s=job.data_s(samples),
    )


def _servers(job: SuiteJob) -> Phases:
    """Workers push and fetch all parameters; each server takes every worker's messages one after the other."""
    run = job.run
    assert isinstance(run.strategy, ParameterServer)
    strategy = run.strategy
    workers = run.devices - strategy.servers
    samples, whole = run.global_batch_size / workers, float(job.parameters * job.value_bytes)
    forward, backward = _whole_pass(job, samples)
    compute = (forward + backward) * strategy.slow_worker_factor
    often = 1.0 if strategy.mode == "sync" else 0.5 * (1.0 / strategy.n_push + 1.0 / strategy.n_fetch)
    send = Collectives(job)
    part = whole / strategy.servers
    copied = job.scales["server_copies"] * part / job.figures.memory_bytes_per_s.value
    each_way = send.exchange(part, workers, strategy.servers) + job.scales["message_s"]
    served = workers * (2.0 * each_way + copied) * often
    update = job.update_s(job.parameters / strategy.servers, float(job.columns["tensors"].sum()))
    if strategy.mode == "async":
        # Servers work while workers compute: the slower of the two decides.
        busy_s = served + workers * update * often
        alone_s = compute + (2.0 * each_way + copied + update) * often
        return job.phases(compute_s=compute, communication_s=max(busy_s, alone_s) - compute, data_s=job.data_s(samples))
    return job.phases(compute_s=compute, communication_s=served, optimizer_s=update, data_s=job.data_s(samples))


def _one_process(job: SuiteJob) -> Phases:
    """`nn.DataParallel`: one thread per GPU, whose launches share one interpreter; all goes through the first GPU."""
    run, send = job.run, Collectives(job)
    samples = run.global_batch_size / run.devices
    forward, backward = _whole_pass(job, samples)
    launches = 3.0 * job.figures.launch_s.value * job.scales["launch_scale"] * float(job.columns["operations"].sum())
    compute = max(forward + backward, run.devices * launches)
    whole = float(job.parameters * job.value_bytes)
    sent = (
        2.0
        * (run.devices - 1)
        * (send.hop(whole, run.devices) + job.scales["message_s"] * float(job.columns["tensors"].sum()))
    )
    return job.phases(
        compute_s=compute,
        communication_s=sent,
        optimizer_s=_update(job),
        data_s=job.data_s(float(run.global_batch_size)),
    )


_PHASES: tuple[tuple[type, Callable[[SuiteJob], Phases]], ...] = (
    (Single, _single),
    (AccumulatingDdp, _ddp),
    (ShardedStrategy, _fsdp),
    (TensorParallel, _tensor),
    (DpTp, _dp_tp),
    (PipelineStrategy, _pipeline),
    (ModelParallel, _layer_split),
    (ParameterServer, _servers),
    (DataParallel, _one_process),
)
"""Which formula a strategy has, the first that fits."""


_SHARDING_MESSAGES = 3.0
"""Of a layer whose parameters are gathered for each pass, and whose gradients are scattered."""


def scalar(value: float) -> Values:
    """A number as the formulas for many candidates take it."""
    return np.asarray(value, dtype=np.float64)


def exposed_s(compute_s: float, moved_s: float, gamma: float) -> float:
    """What messages add to the computation that hides a part of them."""
    return float(overlapped(scalar(compute_s), scalar(moved_s), gamma)) - compute_s


@dataclass(frozen=True)
class Collectives:
    """What messages of a job take; groups are given by their size and by how far neighbours are apart, in ranks."""

    job: SuiteJob

    @property
    def _links(self) -> Links:
        figures = self.job.figures
        network = figures.link if figures.network is None else figures.network
        return Links(
            link_bytes_per_s=scalar(figures.link.bytes_per_s.value),
            network_bytes_per_s=scalar(network.bytes_per_s.value),
            link_latency_s=scalar(figures.link.latency_s.value),
            network_latency_s=scalar(network.latency_s.value),
            trees=figures.device_type == "cuda",
        )

    def _group(self, size: int, stride: int) -> Group:
        job = self.job
        return group_of(scalar(size), scalar(stride), scalar(self._per_node), scalar(job.run.devices))

    @property
    def _per_node(self) -> int:
        run = self.job.run
        return min(self.job.figures.devices_per_node, max(1, run.devices // run.nodes))

    def all_reduce(self, message_bytes: float, size: int, *, stride: int = 1, messages: float = 1) -> float:
        """Sums of `message_bytes` altogether, in so many messages."""
        return self._several(all_reduce_s, message_bytes, size, stride=stride, messages=messages)

    def gather(self, message_bytes: float, size: int, *, stride: int = 1, messages: float = 1) -> float:
        """All-gathers, or reduce-scatters, of `message_bytes` altogether."""
        return self._several(gather_s, message_bytes, size, stride=stride, messages=messages)

    def _several(
        self,
        cost: Callable[[Values, Group, Links], Values],
        message_bytes: float,
        size: int,
        *,
        stride: int,
        messages: float,
    ) -> float:
        if size < 2 or not messages:
            return 0.0
        once = float(cost(scalar(message_bytes / messages), self._group(size, stride), self._links))
        scales = self.job.scales
        return messages * (scales["link_scale"] * once + scales["message_s"])

    def sharding_s(self, layers_bytes: Values, *, times: float) -> float:
        """What sharing layers of these sizes takes besides messages, of which each layer has so many.

        By the calibration, in which each layer is gathered twice and scattered once. Without it only copies are known.
        """
        scales, figures = self.job.scales, self.job.figures
        if figures.sharding is None:
            return scales["shard_copies"] * times * float(layers_bytes.sum()) / figures.memory_bytes_per_s.value
        ranks = scalar(figures.sharding.ranks)
        messages = _SHARDING_MESSAGES * gather_s(
            layers_bytes, Group(size=ranks, within=ranks, rings=scalar(1.0)), self._links
        )
        besides = np.maximum(figures.sharding.layers_s(layers_bytes) - messages, 0.0)
        return scales["sharding_scale"] * times / _SHARDING_MESSAGES * float(besides.sum())

    def hop(self, message_bytes: float, size: int, *, stride: int = 1) -> float:
        """A message from one member of a chain of `size` to the next, `stride` ranks further; a mean over the hops."""
        crossing = float(chain_crossing(scalar(size), scalar(stride), scalar(self._per_node)))
        return self._sent(message_bytes, crossing, at_once=stride)

    def exchange(self, message_bytes: float, workers: int, servers: int) -> float:
        """A message between a worker and a server, which stand behind the workers; a mean over all pairs."""
        near = sum(
            max(0, min(workers, first + self._per_node) - first)
            * max(0, min(workers + servers, first + self._per_node) - max(workers, first))
            for first in range(0, workers, self._per_node)
        )
        # Workers take turns; only servers of one node share its network.
        return self._sent(message_bytes, 1.0 - near / (workers * servers), at_once=servers)

    def _sent(self, message_bytes: float, crossing: float, *, at_once: int) -> float:
        share = scalar(crossing if self.job.run.nodes > 1 else 0.0)
        rings = scalar(min(at_once, self._per_node))
        return self.job.scales["link_scale"] * float(send_s(scalar(message_bytes), share, self._links, rings=rings))


def check_formula(run: RunConfig) -> None:
    """Raise `ConfigError` where what a run's step computes or sends is in no formula."""
    if isinstance(run.optimizer, Lbfgs):
        raise ConfigError("a step of L-BFGS takes as many gradients as its line search needs: no formula has it")
    strategy = run.strategy
    if isinstance(strategy, FsdpCp):  # FSDP's formula knows nothing of what attention sends
        raise ConfigError(f"no formula knows strategy={strategy.name}")
    if getattr(strategy, "micro_batches", 1) > 1 and not strategy.has_stages:
        raise ConfigError(f"no formula knows strategy.micro_batches of strategy={strategy.name}: choose 1")
    divided = {"vocabulary_parallel": divides_vocabulary(run), "sequence_parallel": divides_sequence(run)}
    for option in (name for name, asked in divided.items() if asked):
        raise ConfigError(
            f"no formula knows what strategy.{option}=true sends and saves: choose strategy.{option}=false, or "
            "measure it"
        )
