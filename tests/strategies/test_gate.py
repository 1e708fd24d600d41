"""The parity gate lets each strategy pass as it is, and stops it where a fault is planted in its machinery."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import RowwiseParallel

from parallelbench.config.components import Shard
from parallelbench.config.run import RunConfig
from parallelbench.models.gpt_layers import CausalAttention, TokenEmbed, attended
from parallelbench.strategies.autograd import exchanged
from parallelbench.strategies.context.attention import Ring
from parallelbench.strategies.context.tokens import ContextGroup
from parallelbench.strategies.data_parallel import ring
from parallelbench.strategies.data_parallel.ring import ring_average
from parallelbench.strategies.expert import dispatch
from parallelbench.strategies.expert.dispatch import GroupSums, TokenExchange, expert_mesh
from parallelbench.strategies.fsdp import shards as fsdp_shards
from parallelbench.strategies.lbfgs import sandblaster
from parallelbench.strategies.lbfgs.sandblaster import ShardedVector
from parallelbench.strategies.mesh import device_mesh
from parallelbench.strategies.pipeline import stages
from parallelbench.strategies.pipeline.stages import PipelineReplica
from parallelbench.strategies.servers.servers import SyncServer
from parallelbench.strategies.tensor import sequence, vocabulary
from parallelbench.strategies.tensor import shards as tensor_shards
from parallelbench.training.checks.parity import as_checked
from parallelbench.world.numerics import Numerics
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.test_parity import run_of
from tests.test_parity_gate import gate

pytestmark = pytest.mark.slow

Plant = Callable[[RunConfig, World], AbstractContextManager[Any]]
"""Within it a rank does something else."""


def in_code(owner: Any, name: str, other: Callable[[World], Any], *, on_last: bool = False) -> Plant:
    """Something else in the place of a function or class; `on_last`: on the last rank only."""
    return lambda _, world: (
        nullcontext() if on_last and world.rank < world.size - 1 else mock.patch.object(owner, name, other(world))
    )


def with_gradient(owner: Any, wrong: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Plant:
    """Another gradient of what a module's layers exchange, from the values and the gradient of the result."""

    def other(values: torch.Tensor, *, there: Any, back: Any) -> torch.Tensor:
        return exchanged(values, there=there, back=lambda gradient: wrong(values, gradient))

    return in_code(owner, "exchanged", lambda _: other)


def in_replicas(change: Callable[[Any, World], None], *, on_last: bool = False) -> Plant:
    """The strategy's replicas are changed."""

    def plant(run: RunConfig, world: World) -> AbstractContextManager[Any]:
        kind = type(run.strategy)
        prepare = kind.prepare

        def prepared(self: Any, model: Any, run: RunConfig, world: World) -> Any:
            replica = prepare(self, model, run, world)
            if world.rank == world.size - 1 or not on_last:
                change(replica, world)
            return replica

        return mock.patch.object(kind, "prepare", prepared)

    return plant


# --- data parallel strategies, and clipping


def rank_1_sends_zeros(world: World) -> Any:
    return lambda values, traffic: ring_average(values.zero_() if world.rank == 1 else values, traffic)


def idles(replica: Any, _: World) -> None:
    optimizer = replica._optimizer
    getattr(optimizer, "optim", optimizer).step = lambda: None


def reads_as_the_other_copy(replica: Any, world: World) -> None:
    replica.data_shard = Shard(world.rank % 2, world.size)


def averages_over_two_only(replica: Any, _: World) -> None:
    for layer in replica.trained()[0].modules():
        if isinstance(layer, FSDPModule):
            layer.set_gradient_divide_factor(2.0)


def shard_without_averaging(module: Any, **options: Any) -> Any:
    sharded: Any = fully_shard(module, **options)
    sharded.set_gradient_divide_factor(1.0)
    return sharded


def doubles_what_it_clips(replica: Any, _: World) -> None:
    """Clipping hides that from the parameters."""
    clip = replica._clip

    def double(clipping: Any) -> None:
        for parameter in replica._module.parameters():
            parameter.grad.mul_(2)
        clip(clipping)

    replica._clip = double


def clips_by_its_own_shard(replica: Any, _: World) -> None:
    replica._clipping.sum_over_ranks = lambda squares: sum(squares.values())


def clips_nothing(replica: Any, _: World) -> None:
    replica._clip = lambda clipping: None


def has_the_runs_loss_alone(_: World) -> Any:
    return lambda self, logits, labels: torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


# --- tensors and vocabularies


class Unsummed(RowwiseParallel):
    """Each rank goes on with its own part of the sum."""

    @staticmethod
    def _prepare_output_fn(_layouts: Any, _use_local: Any, _module: Any, outputs: Any, _mesh: Any) -> torch.Tensor:
        return outputs.to_local()


def unreduced(how: str) -> Callable[[World], Any]:
    genuine = vocabulary._reduced
    return lambda _: lambda values, asked, mesh: values if asked == how else genuine(values, asked, mesh)


def takes_the_first_part(_: World) -> Any:
    return lambda tokens, width, _mesh: (tokens.clamp(0, width - 1), tokens >= width)


# --- parts of sequences


def layers_of(replica: Any, *kinds: type) -> list[Any]:
    return [layer for layer in replica.trained()[0].modules() if isinstance(layer, kinds)]


def counts_positions_from_zero(replica: Any, _: World) -> None:
    for layer in layers_of(replica, TokenEmbed, CausalAttention):
        layer.places = None


def attends_to_own_tokens_only(replica: Any, _: World) -> None:
    for layer in layers_of(replica, CausalAttention):
        layer.join = attended


def halves_a_gradient(replica: Any, _: World) -> None:
    for layer in layers_of(replica, CausalAttention):
        layer.join = lambda q, k, v, attend=layer.join: attend(q, (k + k.detach()) / 2, v)


def averages_no_gradients(replica: Any, _: World) -> None:
    replica._forward.require_backward_grad_sync = False


def reads_the_same_part(replica: Any, _: World) -> None:
    replica._tokens.places = torch.arange(len(replica._tokens.places))


def counts_its_tokens_twice(replica: Any, _: World) -> None:
    sums = replica._owned_sums
    replica._owned_sums = lambda loss, logits, labels: sums(loss * 2, logits, labels)


def reads_the_same_slice(replica: Any, _: World) -> None:
    replica.data_shard = Shard(0, 2)


def attends_to_another_slice(replica: Any, _: World) -> None:
    """In training, in rings of the data dimension's ranks, which hold the same parts of as many other samples."""
    mesh = device_mesh(replica._world, data=2, context=2)
    across = Ring(ContextGroup(mesh.get_local_rank("data"), 2, group=mesh.get_group("data")), replica.traffic)
    for layer in layers_of(replica, CausalAttention):
        layer.join = lambda q, k, v, own=layer.join: (across if torch.is_grad_enabled() else own)(q, k, v)


PARTS = {
    each.__name__: in_replicas(each)
    for each in (
        *(counts_positions_from_zero, attends_to_own_tokens_only, halves_a_gradient, reads_the_same_part),
        counts_its_tokens_twice,
    )
}
SLICES = {
    each.__name__: in_replicas(each)
    for each in (averages_over_two_only, reads_the_same_slice, attends_to_another_slice)
}


# --- experts


def scaled_hooks(_: World) -> Any:
    """As if a group of two were all four ranks."""
    genuine = DTensor.register_hook
    return lambda self, hook: genuine(self, lambda gradient: 2 * hook(gradient))


def rows_one_place_further(_: World) -> Any:
    genuine = TokenExchange.__call__
    return lambda *given: genuine(*given).roll(1, 0)


def added_up_within_the_group(world: World) -> Any:
    """Over ranks that hold other experts."""
    begin = GroupSums.begin

    def wrong(self: GroupSums, parameter: torch.Tensor) -> None:
        self._group = expert_mesh(world, 2).get_group("expert")
        begin(self, parameter)

    return wrong


def to_the_other_groups(world: World) -> Any:
    """Half of their ranks hold other experts."""
    genuine = TokenExchange.__init__
    return lambda self, _group, traffic: genuine(self, expert_mesh(world, 2).get_group("replicate"), traffic)


# --- stages, servers, vectors


def swaps_labels_of_micro_batches(replica: Any, _: World) -> None:
    step = replica.step

    def swapped(batch: Any) -> Any:
        if batch.labels is not None:
            first, second, *rest = batch.labels.chunk(4)
            batch.labels = torch.cat([second, first, *rest])
        return step(batch)

    replica.step = swapped


def sums_micro_batches(replica: Any, _: World) -> None:
    replica._schedule._loss_fn = lambda logits, labels: replica._loss(logits, labels) * 4


def ignores_the_last_worker(replica: Any, _: World) -> None:
    if isinstance(replica, SyncServer):
        average = replica._average

        def deaf() -> torch.Tensor:
            replica._received[-1].copy_(replica._received[0])
            return average()

        replica._average = deaf  # type: ignore[method-assign]


class ForgottenPart(ShardedVector):
    """A part that is left out of all dot products."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.dot:
            args = (args[0] * 0, args[1])
        return super().__torch_function__(func, types, args, kwargs)


BY_VOCABULARY, BY_TOKENS = (f"strategy.{cut}_parallel=true" for cut in ("vocabulary", "sequence"))
FAULTS: dict[tuple[str, str, int, str], dict[str, Plant]] = {
    ("mlp", "ring_ddp", 2, ""): {"zeros go round": in_code(ring, "ring_average", rank_1_sends_zeros)},
    ("mlp", "zero1", 2, ""): {"an owner idles": in_replicas(idles, on_last=True)},
    ("mlp", "fsdp", 2, ""): {
        "a shard idles": in_replicas(idles, on_last=True),
        "copies are summed": in_code(fsdp_shards, "fully_shard", lambda _: shard_without_averaging),
    },
    ("mlp", "hsdp", 4, ""): {"copies read the same": in_replicas(reads_as_the_other_copy)},
    ("mlp", "ddp", 2, "clip_norm=1000.0"): {
        each.__name__: in_replicas(each) for each in (doubles_what_it_clips, clips_nothing)
    },
    ("mlp", "fsdp", 2, "clip_norm=1000.0"): {"clips by its own shard": in_replicas(clips_by_its_own_shard)},
    ("moe", "ddp", 2, ""): {"no balance": in_code(Numerics, "loss", has_the_runs_loss_alone, on_last=True)},
    ("deep_mlp", "tensor_parallel", 2, ""): {
        "rows are not summed": in_code(tensor_shards, "RowwiseParallel", lambda _: Unsummed)
    },
    ("deep_mlp", "dp_tp", 4, ""): {
        "rows are not summed": in_code(tensor_shards, "RowwiseParallel", lambda _: Unsummed),
        "copies are summed": in_code(fsdp_shards, "fully_shard", lambda _: shard_without_averaging),
    },
    ("deep_mlp", "dp_pp_tp", 4, ""): {
        "rows are not summed": in_code(tensor_shards, "RowwiseParallel", lambda _: Unsummed)
    },
    ("deep_mlp", "dp_pp", 4, ""): {
        "copies go their own ways": in_code(PipelineReplica, "_average", lambda _: lambda _replica: None)
    },
    ("gpt", "tensor_parallel", 2, BY_VOCABULARY): {
        "each rank has its own greatest logit": in_code(vocabulary, "_reduced", unreduced("max")),
        "parts are not summed": in_code(vocabulary, "_reduced", unreduced("sum")),
        "gradients are not summed": with_gradient(vocabulary, lambda _, gradient: gradient),
        "each rank takes the first part": in_code(vocabulary, "_own", takes_the_first_part),
    },
    **{
        ("gpt", strategy, devices, BY_TOKENS): {
            "norms' gradients are not summed": in_code(owner, "parameters_of_parts", lambda _: lambda *_: []),
            "the embedding's gradient is that of a part": with_gradient(
                sequence, lambda values, gradient: gradient.repeat(1, values.shape[1] // gradient.shape[1], 1)
            ),
        }
        for strategy, devices, owner in (("tensor_parallel", 2, tensor_shards), ("dp_pp_tp", 4, stages))
    },
    **{
        ("gpt_32", "context_parallel", 2, f"strategy.exchange={exchange} {model}".strip()): PARTS
        | {"averages no gradients": in_replicas(averages_no_gradients)}
        for exchange, model in (("ring", ""), ("ring", "llama"), ("all_gather", ""), ("all_to_all", "llama"))
    },
    **{
        ("gpt_32", "fsdp_cp", 4, f"strategy.exchange={exchange}"): PARTS | SLICES if exchange == "ring" else SLICES
        for exchange in ("ring", "all_to_all")
    },
    ("moe", "expert_parallel", 2, ""): {
        "gradients are summed": in_code(DTensor, "register_hook", lambda _: lambda *_: None),
        "rows come back further on": in_code(TokenExchange, "__call__", rows_one_place_further),
        "gradients of rows don't travel back": with_gradient(dispatch, lambda values, _: torch.zeros_like(values)),
    },
    ("moe", "expert_parallel", 4, "strategy.expert_ranks=2"): {
        "groups apart": in_code(GroupSums, "begin", lambda _: lambda *_: None),
        "divided by the group's ranks": in_code(DTensor, "register_hook", scaled_hooks),
        "added up within the group": in_code(GroupSums, "begin", added_up_within_the_group),
        "tokens leave the group": in_code(TokenExchange, "__init__", to_the_other_groups),
    },
    ("deep_mlp", "pipeline", 2, "strategy.micro_batches=4"): {
        "labels are swapped": in_replicas(swaps_labels_of_micro_batches),
        "the last stage idles": in_replicas(idles, on_last=True),
        "micro-batches are summed": in_replicas(sums_micro_batches),
    },
    ("cnn_small", "parameter_server", 3, ""): {"the server is deaf": in_replicas(ignores_the_last_worker)},
    ("mlp", "sandblaster_lbfgs", 2, "precision=fp32"): {
        "a part is forgotten": in_code(sandblaster, "ShardedVector", lambda _: ForgottenPart, on_last=True)
    },
}
"""Model, strategy, devices, options, as in the table of trainings → what is planted."""
RIGHT = "as it is"


def planted(case: tuple[str, str, int, str]) -> dict[str, Plant]:
    """Nothing last: a fault that stays would make the next one seen, whatever it is."""
    return {**FAULTS[case], RIGHT: lambda *_: nullcontext()}


def gates(rank: int, size: int, cases: list[tuple[str, str, int, str]]) -> dict[tuple[str, str, str], bool]:
    """Whether the gate lets each pass; one after the other in the same processes, which take long to start."""
    world, found = World(rank=rank, size=size, local_rank=rank), {}
    for case in cases:
        run = run_of(*case)
        for name, plant in planted(case).items():
            with plant(run, world):
                found[case[1], case[3], name] = all(row["passed"] for row in gate(rank, size, run))
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.cases("3")
def test_every_fault_is_seen_and_nothing_else(size: int, tmp_path: Path) -> None:
    cases = [case for case in FAULTS if case[2] == size]
    expected = {(*case[1::2], name): name == RIGHT for case in cases for name in planted(case)}
    assert run_ranks(gates, size, tmp_path, cases)[0] == expected


def test_what_is_checked_is_clipped_and_lbfgs_is_compared_in_fp64() -> None:
    assert as_checked(run_of("mlp", "ddp", 2, "clip_norm=1000.0")).clip_norm == 1e-4, "so that something is clipped"
    assert as_checked(run_of("mlp", "sandblaster_lbfgs", 2, "precision=fp32")).precision == "fp64"
