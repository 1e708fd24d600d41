"""Experts divided among ranks: their shards, and the all-to-alls by which tokens reach them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Sharded
from torch.nn.parallel import DistributedDataParallel

from parallelbench.models.initial import fill
from parallelbench.models.moe_layers import Experts, MixtureOfExperts
from parallelbench.strategies.autograd import exchanged
from parallelbench.strategies.mesh import device_mesh
from parallelbench.strategies.state import local
from parallelbench.strategies.tensor.shards import optimizer_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from parallelbench.config.run import RunConfig
    from parallelbench.measure.traffic import Traffic
    from parallelbench.strategies.replica import ModuleReplica
    from parallelbench.world.world import World


def expert_mesh(world: World, ranks: int) -> DeviceMesh:
    """Groups of `ranks` neighbouring ranks that have all experts together; the groups hold copies of each other."""
    groups = {} if ranks == world.size else {"replicate": world.size // ranks}
    return device_mesh(world, **groups, expert=ranks)


def divide_experts(model: nn.Module, world: World, ranks: int) -> None:
    """Keep this rank's rows of all stacked experts, still as plain tensors, and let DDP leave them alone.

    `ranks`: neighbouring ones, which have all experts together.
    """
    divided = []
    for path, name, experts in _stacked(model):
        fill(experts)
        whole = getattr(experts, name)
        setattr(experts, name, nn.Parameter(whole.detach().chunk(ranks)[world.rank % ranks].clone()))
        divided.append(f"{path}.{name}")
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, divided)


def _stacked(model: nn.Module) -> Iterator[tuple[str, str, Experts]]:
    """Each parameter of stacked experts: path of the experts, name of the parameter, the experts."""
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            for name in [name for name, _ in module.named_parameters()]:
                yield path, name, module


def with_shards(module: nn.Module, run: RunConfig, world: World, *, ranks: int) -> dict[str, Any]:
    """Make `DTensor`s of experts that were divided before DDP wrapped their model; returns its replica's options.

    The gradient of a rank's loss is that of the mean over its slice of the batch. DDP averages the others; experts get
    the sum over the tokens of all ranks, of their own group and of the others, and so are divided by the number of all.
    """
    mesh = expert_mesh(world, ranks)
    groups = GroupSums(mesh.get_group("replicate")) if mesh.ndim > 1 else None
    for _, name, experts in _stacked(module):
        part = getattr(experts, name).detach()
        placements = [*[Replicate()] * (mesh.ndim - 1), Sharded(0)]
        stacked = nn.Parameter(DTensor.from_local(part, mesh, placements, run_check=False))
        stacked.register_hook(lambda gradient: gradient / world.size)
        if groups is not None:
            stacked.register_post_accumulate_grad_hook(groups.begin)
        setattr(experts, name, stacked)
    trained = [each for each in module.parameters() if each.requires_grad]
    copied_bytes = sum(each.nbytes for each in trained if not isinstance(each, DTensor))
    return {
        "optimizer": optimizer_of(module.parameters(), run, world.device_type),
        "count_step": lambda traffic: traffic.all_reduce("gradient", copied_bytes, world.size),
        "after_backward": None if groups is None else groups.wait,
    }


class GroupSums:
    """Adds up gradients over the ranks that hold the same experts, one of each group.

    Each sum begins as soon as backward has the gradient, as DDP's do, and goes on beside the rest of backward.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._begun: list[tuple[dist.Work, int]] = []
        """What has begun, and the bytes of each message."""

    def begin(self, parameter: Tensor) -> None:
        """Begin to add up a parameter's gradient."""
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        work = dist.all_reduce(gradient, group=self._group, async_op=True)
        assert work is not None, "this rank is one of the group"
        self._begun.append((work, gradient.nbytes))

    def wait(self, traffic: Traffic) -> None:
        """Wait for all that has begun; a GPU's stream waits, not the host."""
        while self._begun:
            work, sent_bytes = self._begun.pop(0)
            work.wait()
            traffic.all_reduce("gradient", sent_bytes, self._group.size())


def exchange_tokens(replica: ModuleReplica, world: World, ranks: int) -> ModuleReplica:
    """Let tokens travel to the ranks of their experts, within a group; the bytes count in the replica's traffic."""
    group = expert_mesh(world, ranks).get_group("expert")
    for module in replica.trained()[0].modules():
        if isinstance(module, MixtureOfExperts):
            module.compute = TokenExchange(group, replica.traffic)
    return replica


class TokenExchange:
    """Computes the rows that a rank has routed where their experts are.

    Each of two all-to-alls, there and back, has its counterpart in backward. How many rows each expert gets travels
    ahead, and the host waits for it once; like other shapes, these few numbers are not counted as bytes sent.
    """

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic) -> None:
        self._group, self._traffic = group, traffic

    def __call__(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows in the order of the group's experts, and how many each has → results in the same order."""
        ranks = self._group.size()
        arriving = counts.clone()
        dist.all_to_all_single(arriving, counts, group=self._group)
        leaving_rows, arriving_rows = torch.stack([counts, arriving]).view(2, ranks, -1).tolist()
        leaving, came = [sum(each) for each in leaving_rows], [sum(each) for each in arriving_rows]
        if torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))  # as experts would round them
        there = self._exchange(rows, leaving, came)
        # What came is in the order of the ranks, and of each rank's in that of the experts.
        own = torch.arange(len(arriving), device=rows.device) % (len(arriving) // ranks)
        order = own.repeat_interleave(arriving, output_size=sum(came)).argsort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=rows.device))
        per_expert = [sum(each) for each in zip(*arriving_rows, strict=True)]
        results: Tensor = experts(there[order], per_expert)
        return self._exchange(results[places], came, leaving)

    def _exchange(self, rows: Tensor, leaving: Sequence[int], came: Sequence[int]) -> Tensor:
        return exchanged(
            rows,
            there=lambda own: self._send(own, leaving, came),
            back=lambda gradient: self._send(gradient, came, leaving),
        )

    def _send(self, rows: Tensor, leaving: Sequence[int], came: Sequence[int]) -> Tensor:
        """Hand each rank its rows, of which there are `leaving`, and return what `came`."""
        received = rows.new_empty(sum(came), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), list(came), list(leaving), group=self._group)
        others = sum(leaving) - leaving[self._group.rank()]
        self._traffic.send("activation", others * rows.shape[1] * rows.element_size())
        return received
