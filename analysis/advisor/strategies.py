"""What a run of the suite does and how it is laid over devices, as the step model takes it. Loads no torch.

Strategies whose devices do unlike things have terms of their own: naive splits, servers, threads of one process. What
cannot be predicted is refused with the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from analysis.advisor.layouts import ALONE, Plan
from analysis.advisor.links import chain_crossing, send_s
from analysis.advisor.machine import SLOWER, UNALIGNED, machine_of_job
from analysis.advisor.step import (
    BACKWARD,
    EVENLY,
    Phases,
    Step,
    Work,
    backward_s,
    besides_s,
    completed,
    forward_s,
    step_phases,
    updated_s,
)
from parallelbench.errors import ConfigError
from parallelbench.measure.layer_records import ELEMENTWISE, IMAGES, Kernels
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
    from collections.abc import Callable, Mapping, Sequence

    from analysis.advisor.machine import MachineFigures, Machines
    from analysis.advisor.step import Values
    from parallelbench.config.run import RunConfig
    from parallelbench.measure.layer_records import LayerCount


NOTHING = Kernels(operations=0, work=0.0)
FP32 = 4.0
"""Bytes of a number."""
NORMS = ("layer_norm", "batch_norm")
"""Kinds of operations whose two parameters autocast leaves as they are."""
INSIDE = ("attention", "gelu")
"""Kinds of operations between a column layer and a row layer: a tensor group shares them."""


@dataclass(frozen=True, kw_only=True)
class SuiteJob:
    """One run, what its layers have to do, and where; raises `ConfigError` where no formula knows it."""

    run: RunConfig
    layers: Sequence[LayerCount]
    figures: MachineFigures

    @property
    def value_bytes(self) -> int:
        """Bytes of a parameter or a gradient."""
        return 8 if self.run.precision == "fp64" else 4

    @property
    def activation_share(self) -> float:
        """Bytes of an activation ÷ of one in fp32."""
        return {"fp64": 2.0, "bf16": 0.5, "fp16": 0.5}.get(self.run.precision, 1.0)

    @cached_property
    def casts(self) -> Values:
        """Operations by which autocast brings each layer's weights, and what goes into products, to 16 bits."""
        if self.run.precision not in ("bf16", "fp16"):
            return np.zeros(len(self.layers))
        counted = [_counted(layer) for layer in self.layers]
        norms = np.array([sum(each[kind].operations for kind in NORMS if kind in each) for each in counted])
        others = np.array([sum(kind.operations for kind in each.values()) for each in counted])
        products = np.maximum(self.columns["operations"] - others, 0.0)
        casts: Values = np.maximum(self.columns["tensors"] - 2.0 * norms, 0.0) + products
        return casts

    @cached_property
    def columns(self) -> Mapping[str, Values]:
        """The layers' counts as arrays."""
        names = [name for name in self.layers[0].__struct_fields__ if name not in ("name", "kernels")]
        return {name: np.array([getattr(each, name) for each in self.layers], dtype=np.float64) for name in names}

    @cached_property
    def plan(self) -> Plan:
        """How the work is laid over devices; of strategies with terms of their own what each device computes alone."""
        return _plan(self.run)

    @cached_property
    def machines(self) -> Machines:
        """What the machine can do while the job runs."""
        return machine_of_job(self.figures, self.run)

    @cached_property
    def work(self) -> Work:
        """What a device does for one micro-batch."""
        return _work(self)


def forward_flop(run: RunConfig, layers: Sequence[LayerCount]) -> float:
    """Of a step, of all devices."""
    of_sample = sum(each.product_flop + each.convolution_flop + each.grouped_flop for each in layers)
    return run.global_batch_size * of_sample


def suite_phases(job: SuiteJob, scales: Mapping[str, Values | float]) -> Phases[Values]:
    """Predicted phases of a run's step, as one candidate; raises `ConfigError` where no formula knows it."""
    check_formula(job.run)
    for kind, phases in _APART:
        if isinstance(job.run.strategy, kind):
            return phases(job, Step(work=job.work, plan=job.plan, machines=job.machines, fitted=completed(scales)))
    return step_phases(job.work, job.plan, job.machines, scales)


def _plan(run: RunConfig) -> Plan:
    strategy = run.strategy
    # The module of nn.DataParallel scatters a batch that one process has.
    data = run.devices if isinstance(strategy, DataParallel) else strategy.data_parallel_degree(run)
    batch = run.global_batch_size
    said: dict[str, float] = {"data": data, "global_batch": batch, "micro_batch": batch / data}
    if isinstance(strategy, AccumulatingDdp):
        said |= {"bucket_bytes": strategy.bucket_mib * 2.0**20, "owners": float(isinstance(strategy, Zero1))}
    elif isinstance(strategy, ShardedStrategy):
        copies = run.devices // strategy.ranks_per_copy(run)
        # HSDP reduces each layer's shard between the copies while backward goes on.
        said |= {"sharded": 1.0, "copies": copies, "bucket_bytes": 1.0}
        said["stays_gathered"] = float(not strategy.reshard_after_forward)
    elif isinstance(strategy, TensorParallel):
        said["tensor"] = run.devices
    elif isinstance(strategy, DpTp):
        said |= {"tensor": strategy.tensor, "sharded": 1.0, "stays_gathered": float(not strategy.reshard_after_forward)}
    elif isinstance(strategy, PipelineStrategy):
        pipeline, inner = strategy.pipeline(run), strategy.mesh(run).inner
        replays = pipeline.schedule in ("gpipe", "1f1b") or (
            pipeline.schedule == "interleaved_1f1b" and pipeline.micro_batches % pipeline.devices == 0
        )
        said |= {
            "tensor": inner.get("tensor", 1),
            "pipeline": pipeline.devices,
            "chunks": pipeline.stages_per_rank,
            "micro_batch": batch / data / strategy.micro_batches,
            "gpipe": float(pipeline.schedule == "gpipe"),
            "bubble": -1.0 if replays else pipeline.bubble(),
            "stages_inside": 1.0,
        }
    return Plan(**{name: np.array([float(value)]) for name, value in (ALONE | said).items()})


def _work(job: SuiteJob) -> Work:
    run, plan, counts = job.run, job.plan, job.columns
    tensor, samples = float(plan.tensor[0]), float(plan.micro_batch[0])
    gone = 1.0 - 1.0 / tensor
    backward = np.full(len(job.layers), BACKWARD)
    backward[0] = 1.0  # the first layer's input needs no gradient
    exchanged = samples * job.activation_share * counts["exchanged_bytes"]
    messages = np.where(counts["exchanges"] > 0, counts["exchanges"], np.where(exchanged > 0, 2.0, 0.0))
    stages, devices = _stages(job)
    boundary = counts["boundary_bytes"][:-1].max(initial=0.0)
    states = run.optimizer.states_per_parameter() or 0
    compressed = getattr(run.strategy, "compression", "none") != "none"
    gathered = float(job.value_bytes)
    if getattr(run.strategy, "gather", None) == "bf16":  # the mean of a layer's messages: gradients travel in fp32
        times = 2.0 if plan.stays_gathered[0] else 3.0
        gathered = (2.0 * (times - 1.0) + gathered) / times
    # A batch is taken from memory: one byte read and one number written and read per value.
    values = float(np.prod(run.data.shape)) * run.global_batch_size
    batch = values if isinstance(run.strategy, DataParallel) else values / plan.data[0]
    kernels = np.array([_kernels_s(job, layer, samples, 1.0 / tensor) for layer in job.layers])
    attention = np.array([(each.kernels or {}).get("attention", NOTHING).work for each in job.layers])
    whole = counts["product_flop"] - attention
    left = samples * (whole - gone * counts["shardable_flop"])
    odd, slower = np.zeros_like(left), (job.figures.unaligned or UNALIGNED).get(run.precision, 1.0)
    if job.figures.device_type != "cpu":
        odd = left * np.minimum(counts["unaligned_flop"] / np.maximum(whole, 1.0), 1.0)
    # A shared linear layer has one exchange, or none where its input needs no gradient.
    shared = np.where((counts["shardable_flop"] > 0) & (tensor > 1), np.maximum(counts["exchanges"], 1.0), 0.0)
    logits = np.zeros(len(job.layers))
    # All outputs of nn.DataParallel come to its first GPU.
    of_loss = run.global_batch_size if isinstance(run.strategy, DataParallel) else samples
    logits[-1] = of_loss * counts["boundary_bytes"][-1] / FP32
    columns = {
        "product_flop": left - odd,
        "odd_flop": slower * odd,
        "logits": logits,
        "kernels_s": kernels[:, 0],
        "kernels_backward_s": kernels[:, 1],
        "parameters": counts["parameters"] - gone * counts["shardable_parameters"],
        # Outputs of row layers forward, inputs of column layers backward: of a pass the mean of both.
        "exchanged_bytes": exchanged / np.maximum(messages, 1.0),
        "exchanges": 0.5 * messages,
        "operations": counts["operations"] + job.casts,
        "tensor_operations": shared,
        "tensors": counts["tensors"],
        "backward": backward,
        "repeats": _repeated(job),
        "count": np.ones(len(job.layers)),
        "stage": stages,
        "device": devices,
    }
    others = {
        "eager": 0.0,
        "boundary_bytes": samples * job.activation_share * boundary,
        "gathered_bytes": gathered,
        "gradient_bytes": 2.0 if compressed else float(job.value_bytes),
        # Gradient, parameter and states are read, the latter two written.
        "update_bytes": job.value_bytes * (3.0 + 2.0 * states),
        "update_operations": 3.0 + 4.0 * states,
        "sharded_updates": float(tensor > 1 or isinstance(run.strategy, ShardedStrategy | DpTp)),
        "input_bytes": batch * (1.0 + 2.0 * job.value_bytes),
    }
    known: dict[str, Any] = {name: np.asarray(value, dtype=np.float64)[None, :] for name, value in columns.items()}
    return Work(**known | {name: np.array([value]) for name, value in others.items()})


def _kernels_s(job: SuiteJob, layer: LayerCount, samples: float, share: float) -> tuple[float, float]:
    """Forward and backward of all that is no product; `share` is left to each device of a tensor group."""
    forward_s = backward_s = 0.0
    for kind, each in _counted(layer).items():
        given = IMAGES if kind == "convolution" and layer is job.layers[0] else kind
        rates, work = job.figures.kernel(given, job.run.precision), samples * each.work
        if kind in INSIDE and layer.shardable_flop:
            work *= share
        if kind in SLOWER:
            size = FP32 * each.extent
        else:
            work *= job.activation_share
            size = work / each.operations
        forward_s += work / float(rates.forward.at(size))
        backward_s += work / float(rates.backward.at(size))
    return forward_s, backward_s


def _counted(layer: LayerCount) -> Mapping[str, Kernels]:
    """All but products; of older results, which have sums alone, what these say."""
    if layer.kernels is not None:
        return layer.kernels
    flops = {"convolution": layer.convolution_flop, "grouped": layer.grouped_flop}
    found = {kind: Kernels(operations=1, work=flop, extent=math.inf) for kind, flop in flops.items() if flop}
    writing = Kernels(operations=max(layer.operations, 1), work=layer.output_bytes)
    return found | ({ELEMENTWISE: writing} if layer.output_bytes else {})


def _repeated(job: SuiteJob) -> Values:
    """Shares of each layer's forward pass that backward repeats; of attention its products outside of the plan."""
    counts, chosen = job.columns, job.run.activation_recomputation
    shares = np.zeros(len(job.layers))
    if chosen == "full":
        shares[:-1] = 1.0
    elif chosen == "selective":
        block = job.run.model.anatomy().attention.partition(".")[0]
        attends = np.array([fnmatchcase(layer.name, block) for layer in job.layers])
        inner = counts["product_flop"] - counts["shardable_flop"]
        shares = np.where(attends, inner / np.maximum(counts["product_flop"], 1.0), 0.0)
    return shares


def _stages(job: SuiteJob) -> tuple[Values, Values]:
    """The stage of each layer, and its device."""
    if not isinstance(job.run.strategy, PipelineStrategy):
        alone = np.full(len(job.layers), EVENLY)
        return alone, alone
    pipeline = job.run.strategy.pipeline(job.run)
    stages = np.array(stages_of(job, pipeline.stages))
    return stages.astype(np.float64), np.array(pipeline.stage_devices(), dtype=np.float64)[stages]


def stages_of(job: SuiteJob, parts: int) -> list[int]:
    """The part of each layer, cut as the suite cuts: by counted operations, parameters breaking ties."""
    chosen = getattr(job.run.strategy, "stage_map", None) or getattr(job.run.strategy, "device_map", None)
    if chosen is not None:
        return [chosen[layer.name] for layer in job.layers]
    counts = job.columns
    costs = counts["product_flop"] + counts["convolution_flop"] + counts["grouped_flop"] + 1e-6 * counts["parameters"]
    return balance(costs.tolist(), parts)


def _layer_split(job: SuiteJob, step: Step) -> Phases[Values]:
    """One device works at a time, so none is crowded; at each cut values go on, and their gradients back."""
    run, parts = job.run, np.array(stages_of(job, job.run.devices))
    alone = machine_of_job(job.figures, msgspec.structs.replace(run, devices=1, nodes=1))
    work = _layers_s(replace(step, machines=alone))
    cuts = np.flatnonzero(parts[1:] != parts[:-1])
    boundary = run.global_batch_size * job.activation_share * job.columns["boundary_bytes"][cuts]
    handover_s = step.fitted["handover_s"]
    sent = 2.0 * sum((_hop_s(run, step, float(each)) + handover_s for each in boundary), start=np.zeros(()))
    members = parts[None, :] == np.arange(run.devices)[:, None]
    busiest = np.einsum("...l,pl->...p", work, members).max(axis=-1)
    held, tensors = ((members @ job.columns[name]).max() for name in ("parameters", "tensors"))
    return _phases(
        step,
        compute_s=busiest,
        bubble_s=work.sum(axis=-1) - busiest,
        communication_s=sent,
        optimizer_s=updated_s(step, parameters=held, tensors=tensors),
    )


def _servers(job: SuiteJob, step: Step) -> Phases[Values]:
    """Workers push and fetch all parameters; each server takes every worker's messages one after the other."""
    strategy, fitted = job.run.strategy, step.fitted
    assert isinstance(strategy, ParameterServer)
    workers, parameters = job.run.devices - strategy.servers, job.columns["parameters"].sum()
    compute = _layers_s(step).sum(axis=-1) * strategy.slow_worker_factor
    often = 1.0 if strategy.mode == "sync" else 0.5 * (1.0 / strategy.n_push + 1.0 / strategy.n_fetch)
    part = float(parameters * job.value_bytes) / strategy.servers
    copied = fitted["server_copies"] * part / job.machines.memory_bytes_per_s
    each_way = _exchange_s(job.run, step, part, workers, strategy.servers) + fitted["message_s"]
    served = workers * (2.0 * each_way + copied) * often
    update = updated_s(step, parameters=parameters / strategy.servers, tensors=job.columns["tensors"].sum())
    if strategy.mode == "async":
        # Servers work while workers compute: the slower of the two decides.
        busy_s = served + workers * update * often
        alone_s = compute + (2.0 * each_way + copied + update) * often
        return _phases(step, compute_s=compute, communication_s=np.maximum(busy_s, alone_s) - compute)
    return _phases(step, compute_s=compute, communication_s=served, optimizer_s=update)


def _one_process(job: SuiteJob, step: Step) -> Phases[Values]:
    """`nn.DataParallel`: one thread per GPU, whose launches share one interpreter; all goes through the first GPU."""
    devices, parameters, tensors = job.run.devices, job.columns["parameters"].sum(), job.columns["tensors"].sum()
    launches = 3.0 * job.machines.launch_s * step.fitted["launch_scale"] * job.work.operations.sum()
    hop_s = _hop_s(job.run, step, float(parameters * job.value_bytes))
    return _phases(
        step,
        compute_s=np.maximum(_layers_s(step).sum(axis=-1), devices * launches),
        communication_s=2.0 * (devices - 1) * (hop_s + step.fitted["message_s"] * tensors),
        optimizer_s=updated_s(step, parameters=parameters, tensors=tensors),
    )


_APART: tuple[tuple[type, Callable[[SuiteJob, Step], Phases[Values]]], ...] = (
    (ModelParallel, _layer_split),
    (ParameterServer, _servers),
    (DataParallel, _one_process),
)
"""Which strategies have terms of their own."""
_KNOWN = (Single, AccumulatingDdp, ShardedStrategy, TensorParallel, DpTp, PipelineStrategy)
"""All others that there is a formula for."""


def _phases(step: Step, **parts: Values | float) -> Phases[Values]:
    """With the batch, and what every step costs."""
    other_s = step.fitted["step_s"] + besides_s(step)
    every: dict[str, Any] = {"bubble_s": 0.0, "optimizer_s": 0.0, "other_s": other_s, **parts}
    every["data_s"] = step.work.input_bytes / step.machines.memory_bytes_per_s
    shape = np.broadcast_shapes(*(np.shape(each) for each in every.values()))
    return Phases(**{name: np.broadcast_to(each, shape) for name, each in every.items()})


def _layers_s(step: Step) -> Values:
    """Forward and backward of each layer."""
    forward = forward_s(step)
    return forward + backward_s(step, forward)


def _hop_s(run: RunConfig, step: Step, message_bytes: float) -> Values:
    """A message from one device of a chain to the next; a mean over the hops."""
    crossing = chain_crossing(np.array([float(run.devices)]), np.ones(1), step.machines.devices_per_node)
    return _sent_s(run, step, message_bytes, crossing, at_once=1)


def _exchange_s(run: RunConfig, step: Step, message_bytes: float, workers: int, servers: int) -> Values:
    """A message between a worker and a server, which stand behind the workers; a mean over all pairs."""
    per_node = int(step.machines.devices_per_node[0])
    near = sum(
        max(0, min(workers, first + per_node) - first)
        * max(0, min(workers + servers, first + per_node) - max(workers, first))
        for first in range(0, workers, per_node)
    )
    # Workers take turns; only servers of one node share its network.
    crossing = np.array([1.0 - near / (workers * servers)])
    return _sent_s(run, step, message_bytes, crossing, at_once=servers)


def _sent_s(run: RunConfig, step: Step, message_bytes: float, crossing: Values, *, at_once: int) -> Values:
    share = crossing if run.nodes > 1 else np.zeros(1)
    rings = np.minimum(float(at_once), step.machines.devices_per_node)
    return send_s(np.array([message_bytes]), share, step.links, rings=rings)


def check_formula(run: RunConfig) -> None:
    """Raise `ConfigError` where what a run's step computes or sends is in no formula."""
    if isinstance(run.optimizer, Lbfgs):
        raise ConfigError("a step of L-BFGS takes as many gradients as its line search needs: no formula has it")
    strategy = run.strategy
    known = isinstance(strategy, (*_KNOWN, *(kind for kind, _ in _APART)))
    # FSDP's formula knows nothing of what attention sends.
    if isinstance(strategy, FsdpCp) or not known:
        raise ConfigError(f"no formula knows strategy={strategy.name}")
    if getattr(strategy, "micro_batches", 1) > 1 and not strategy.has_stages:
        raise ConfigError(f"no formula knows strategy.micro_batches of strategy={strategy.name}: choose 1")
    divided = {"vocabulary_parallel": divides_vocabulary(run), "sequence_parallel": divides_sequence(run)}
    for option in (name for name, asked in divided.items() if asked):
        raise ConfigError(
            f"no formula knows what strategy.{option}=true sends and saves: choose strategy.{option}=false, or "
            "measure it"
        )
