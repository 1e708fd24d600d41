"""Meshes of data × pipeline × tensor: the sizes that a strategy asks for, and where a rank stands in them.

Importing this loads no torch: `Mesh` is checked when a run is planned; `device_mesh` and `position_in` are for ranks.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from parallelbench.config.alternatives import models_that
from parallelbench.errors import ConfigError
from parallelbench.optim.losses import CrossEntropy
from parallelbench.optim.metrics import NoMetric
from parallelbench.strategies.parts.refusals import SCALES_ALONE, check_no_fp16

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from parallelbench.config.components import Split, Traits
    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World


@dataclass(frozen=True)
class Mesh:
    """The dimensions that a strategy asks for; the data dimension follows. Ranks count along the last one first."""

    devices: int
    inner: dict[str, int]
    """Option of the strategy → size of that dimension."""

    @property
    def inner_size(self) -> int:
        """Devices that hold one copy of the model together."""
        return math.prod(self.inner.values())

    @property
    def data(self) -> int:
        """Copies of the model; at least 1, also before `check`."""
        return max(1, self.devices // self.inner_size)

    def check(self, run: RunConfig, *, least_data: int) -> None:
        """Refuse dimensions of size 1, and sizes whose product doesn't divide the devices."""
        who, size = f"strategy={run.strategy.name}", self.inner_size
        for name, part in self.inner.items():
            if part < 2:
                raise ConfigError(
                    f"strategy.{name}={part} leaves {who} without that dimension: choose strategy.{name}=2 or more, or "
                    "a strategy of fewer dimensions"
                )
        if self.devices % size or self.data < least_data:
            options = " and ".join(f"strategy.{name}={part}" for name, part in self.inner.items())
            more = f", at least {least_data * size}" if least_data > 1 else ""
            advice = max(least_data, -(-self.devices // size)) * size
            raise ConfigError(
                f"{who} with {options} needs a multiple of {size} devices{more}, not devices={self.devices}: "
                f"choose devices={advice}, or sizes whose product divides the devices"
            )


def check_tensor_plan(run: RunConfig, *, shards: int, option: str) -> None:
    """Refuse models whose linear layers can't be cut into `shards`, the number that `option` asks for."""
    who, units, limits = f"strategy={run.strategy.name}", run.model.tensor_units, run.model.tensor_limits
    if not run.model.tensor_plan():
        own = type(run.model).__module__.partition(".")[0] != "parallelbench"
        more = "; a model of your own names what is cut in its `tensor_plan` (docs/adding-a-model.md)" if own else ""
        raise ConfigError(
            f"{who} finds nothing to shard in model={run.model.name}: only pairs of linear layers are sharded, as "
            f"DTensor's convolutions are not to be trusted; choose model=mlp, vit or cnn_small, or strategy=fsdp{more}"
        )
    if units % shards:
        valid = [str(n) for n in range(2, min(units, 1024) + 1) if units % n == 0]
        others = models_that(lambda model: bool(model.tensor_plan()) and model.tensor_units % shards == 0, run)
        instead = f"model={others}, or strategy=ddp" if others else "strategy=ddp"
        advice, because = ", ".join(valid) or instead, f" ({limits})" if limits else ""
        raise ConfigError(
            f"{who} can't cut model={run.model.name} into {shards} equal shards ({option}): its layers consist of "
            f"{units} equal parts{because}: choose {advice}"
        )
    check_no_fp16(run, SCALES_ALONE)
    _check_vocabulary(run, shards=shards)
    _check_sequence(run, shards=shards)


def divides_vocabulary(run: RunConfig) -> bool:
    """Whether tensor ranks hold parts of the vocabulary: of embedding, head and logits."""
    return bool(getattr(run.strategy, "vocabulary_parallel", False))


def divides_sequence(run: RunConfig) -> bool:
    """Whether tensor ranks have parts of the sequence between the layers that they divide."""
    return bool(getattr(run.strategy, "sequence_parallel", False))


def plan_of(run: RunConfig) -> dict[str, Split]:
    """All that a run's tensor ranks cut."""
    return run.model.tensor_plan() | (run.model.vocabulary_plan() if divides_vocabulary(run) else {})


def why_half_planned(run: RunConfig, traits: Traits) -> str:
    """Why a strategy that cuts the layers of a plan can't; empty: it can."""
    for names in traits.shared:
        modules = [name.rpartition(".")[0] for name in names]
        cut = [any(fnmatchcase(module, path) for path in plan_of(run)) for module in modules]
        if any(cut) and not all(cut):
            return (
                f"{' and '.join(modules)} share a parameter, and the model's `tensor_plan` cuts only some of them: cut "
                "all of them or none, or choose strategy=ddp"
            )
    return ""


def why_drawn_in_parts(run: RunConfig, traits: Traits) -> str:
    """Why a strategy that divides tokens can't have a model that draws random numbers; empty: it can, or none are.

    Ranks would have to draw apart where they have parts of the tokens, and alike where they have all of them (in the
    first layer, and behind each norm); they have one stream of numbers each.
    """
    if not divides_sequence(run) or not traits.draws:
        return ""
    return (
        "strategy.sequence_parallel=true gives each rank other tokens, and all of them would drop alike, but the model "
        "draws random numbers in training: choose strategy.sequence_parallel=false, or a model without dropout"
    )


def _check_vocabulary(run: RunConfig, *, shards: int) -> None:
    """Refuse to divide what isn't there or can't be divided, and losses that need all logits at once."""
    if not divides_vocabulary(run):
        return
    entries, fix = run.model.vocabulary_entries, "strategy.vocabulary_parallel=false"
    near = -(-entries // shards) * shards
    reasons = {
        f"model={run.model.name} has no vocabulary to divide: choose model=gpt_tiny": not entries,
        f"model.vocabulary={entries} can't be divided evenly among {shards} tensor ranks: choose "
        f"model.vocabulary={near}": entries % shards > 0,
        f"loss={run.loss.name} needs all logits at once, only cross entropy is computed from parts: choose "
        "loss=cross_entropy": type(run.loss) is not CrossEntropy,
        f"metric={run.metric.name} needs all logits at once: choose metric=none": not isinstance(run.metric, NoMetric),
        f"{run.model.own_loss} adds to a loss computed from parts: choose {run.model.without_own_loss}": (
            run.model.own_loss != ""
        ),
        "compile=true was never tried with an embedding and a loss that send messages: choose compile=false": (
            run.compile
        ),
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), ""):
        raise ConfigError(f"strategy.vocabulary_parallel=true is refused: {reason}, or {fix}")


def _check_sequence(run: RunConfig, *, shards: int) -> None:
    """Refuse samples that are no sequences, and sequences that the tensor ranks don't divide."""
    if not divides_sequence(run):
        return
    fix = "strategy.sequence_parallel=false"
    if not run.model.sequence_norms:
        raise ConfigError(
            f"strategy.sequence_parallel=true is refused: model={run.model.name} names no norms that can have parts of "
            f"a sequence: choose model=gpt_tiny, or {fix}"
        )
    tokens = run.data.shape[0]
    if tokens % shards:
        near = -(-tokens // shards) * shards
        raise ConfigError(
            f"strategy.sequence_parallel=true is refused: samples of {tokens} tokens can't be divided evenly among "
            f"{shards} tensor ranks: choose data.sequence={near}, or {fix}"
        )
    if run.compile:
        raise ConfigError(
            "strategy.sequence_parallel=true is refused: compile=true was never tried with norms that send messages: "
            f"choose compile=false, or {fix}"
        )


def device_mesh(world: World, **sizes: int) -> DeviceMesh:
    """A mesh over all ranks with these dimensions; ranks count along the last one first.

    The parity check and training get the same mesh: DTensor remembers, by a mesh's shape, the groups of the first mesh
    that it saw, and would go on using them after they are destroyed.
    """
    import torch.distributed as dist

    return _new_mesh(dist.group.WORLD, world.device_type, tuple(sizes), tuple(sizes.values()))


@functools.cache
def _new_mesh(_group: object, device_type: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        _set_run_timeout(group)
    return mesh


def _set_run_timeout(group: dist.ProcessGroup) -> None:
    """Give a group the default group's timeout, which is the run's: torch gives groups of meshes half an hour."""
    import torch
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    # Newer versions of torch have a public function; NCCL's newer backend has none of the private methods.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


@dataclass(frozen=True)
class Position:
    """Where this rank is in a mesh of data × pipeline × tensor."""

    ranks: tuple[int, ...]
    """The (global) ranks of its pipeline, in order."""
    pipeline: dist.ProcessGroup | None = None
    """Connects them; None: the group of all ranks."""
    copy: int = 0
    """Index of its pipeline among the `copies`."""
    copies: int = 1
    """Pipelines side by side, which read different samples."""
    data: dist.ProcessGroup | None = None
    """Connects the copies of its stages."""
    tensor: DeviceMesh | None = None
    """The ranks that share the linear layers of its stages."""

    def copy_group(self, rank: int) -> int:
        """The number of what it holds: its place in its pipeline, and among the ranks that share its layers."""
        ways, way = (1, 0) if self.tensor is None else (self.tensor.size(), self.tensor.get_local_rank())
        return self.ranks.index(rank) * ways + way

    @property
    def owns_loss(self) -> bool:
        """Whether it owns the loss among the ranks that share its stages' linear layers."""
        return self.tensor is None or self.tensor.get_local_rank() == 0


def position_in(mesh: Mesh, world: World) -> Position:
    """This rank's position in a mesh with a dimension called stages, and perhaps one called tensor."""
    if mesh.devices == mesh.inner["stages"]:
        return Position(tuple(range(world.size)))  # one pipeline, which the group of all ranks connects
    devices = device_mesh(world, data=mesh.data, **mesh.inner)
    copy, *_ = devices.get_coordinate() or ()
    pipeline = devices.mesh[copy]
    has_tensor = "tensor" in mesh.inner
    return Position(
        ranks=tuple((pipeline[:, devices.get_local_rank("tensor")] if has_tensor else pipeline).tolist()),
        pipeline=devices.get_group("stages"),
        copy=copy,
        copies=mesh.data,
        data=devices.get_group("data"),
        tensor=devices["tensor"] if has_tensor else None,
    )
