"""Tensor parallelism: every device holds a shard of the linear layers (Shoeybi et al. 2019, arXiv 1909.08053).

dp_tp: within a group of devices, the groups' copies kept by FSDP. Loads no torch.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar

from parallelbench.config.build import package_of
from parallelbench.config.components import Shard, Strategy
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.optim.losses import CrossEntropy
from parallelbench.optim.metrics import NoMetric
from parallelbench.strategies.mesh import Mesh, device_mesh
from parallelbench.strategies.shared_refusals import (
    SCALES_ALONE,
    first_of,
    no_fp16,
    two_devices,
    why_complex,
    why_shared,
    why_uncut,
    why_untouched,
)

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.config.components import Split, Traits
    from parallelbench.config.replica import Replica
    from parallelbench.config.rule import Rules
    from parallelbench.config.run import RunConfig
    from parallelbench.measure.traffic import Traffic
    from parallelbench.world.world import World


class TensorParallel(Strategy, frozen=True, kw_only=True):
    """Tensor parallelism: every device holds a shard of the linear layers (Shoeybi et al. 2019, arXiv 1909.08053).

    Linear layers in pairs, the first cut by outputs and the second by inputs, as the model's own plan says.

    All ranks compute on the whole batch; one sum per pair and direction makes the values whole again. Every rank
    computes the other layers (convolutions, norms) itself.
    """

    shards_tensors: ClassVar[bool] = True
    takes_own_loss: ClassVar[bool] = True
    updates_as_asked: ClassVar[bool] = True

    vocabulary_parallel: bool = False
    """Divide embedding and head by vocabulary too, and compute the cross entropy from divided logits."""
    sequence_parallel: bool = False
    """Norms and residuals on parts of the sequence (Korthikanti et al. 2022, arXiv 2205.05198)."""

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One: every rank reads the whole batch."""
        return 1

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        yield from two_devices(run)
        yield from even_shards(run, shards=run.devices, option="devices")

    def draws_alike(self, run: RunConfig) -> int:
        """All: they compute on the same values."""
        return run.devices

    def why_not_model(self, run: RunConfig, traits: Traits) -> str:
        """Messages hold real numbers."""
        return first_of(why_complex(traits), why_half_planned(run, traits), why_drawn_in_parts(run, traits))

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        from parallelbench.strategies.tensor.shards import new_replica, place_shards
        from parallelbench.strategies.tensor.traffic import exchanged_bytes

        mesh = device_mesh(world, tensor=world.size)
        exchanged = exchanged_bytes(model, run, world.device, samples=run.global_batch_size)
        place_shards(model, run, world.device, mesh)
        return new_replica(
            model,
            mesh,
            run=run,
            world=world,
            data_shard=Shard(),
            count_step=lambda traffic: exchanged.count(traffic, world.size),
        )


class DpTp(Strategy, frozen=True, kw_only=True):
    """Data × tensor parallelism: linear layers sharded within a group of devices, the groups' copies kept by FSDP.

    Tensor parallel over neighbouring ranks, fully sharded data parallel over the others.

    Shoeybi et al. 2019 (arXiv 1909.08053) for the tensor dimension, Zhao et al. 2023 (arXiv 2304.11277) for the data
    dimension. DDP would train as well, but loses the tensor-sharded parameters from `state_dict`.
    """

    shards_tensors: ClassVar[bool] = True
    takes_own_loss: ClassVar[bool] = True
    updates_as_asked: ClassVar[bool] = True

    tensor: Count
    """Devices that share each linear layer; the data dimension is the number of devices ÷ this."""
    reshard_after_forward: bool
    """Free each layer's gathered parameters after its forward and gather them again for its backward."""
    vocabulary_parallel: bool = False
    """Divide embedding and head by vocabulary too, and compute the cross entropy from divided logits."""
    sequence_parallel: bool = False
    """Norms and residuals on parts of the sequence (Korthikanti et al. 2022, arXiv 2205.05198)."""

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One per group of tensor ranks, which read the same samples."""
        return self._mesh(run).data

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        yield from self._mesh(run).rules(run, least_data=2)
        yield from even_shards(run, shards=self.tensor, option="strategy.tensor")

    def why_not_model(self, run: RunConfig, traits: Traits) -> str:
        """Layers are cut one by one, each parameter along its first dimension."""
        return first_of(
            why_untouched(traits),
            why_uncut(traits),
            why_complex(traits),
            why_half_planned(run, traits),
            why_drawn_in_parts(run, traits),
            why_shared(run, traits),
        )

    def draws_alike(self, run: RunConfig) -> int:
        """Those that share a group's linear layers."""
        return self.tensor

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Shard the linear layers over the tensor dimension, then every layer over the data dimension."""
        from parallelbench.models.norms import synchronize_norms
        from parallelbench.strategies.fsdp.shards import shard_one_by_one
        from parallelbench.strategies.replica import share_buffers
        from parallelbench.strategies.tensor.shards import new_replica, sharding
        from parallelbench.strategies.tensor.traffic import exchanged_bytes

        mesh = device_mesh(world, data=self._mesh(run).data, tensor=self.tensor)
        tensor, data = mesh["tensor"], mesh["data"]
        shard = Shard(data.get_local_rank(), data.size())
        exchanged = exchanged_bytes(model, run, world.device, samples=run.global_batch_size // shard.count)
        synchronize_norms(model, data.get_group())
        padded = shard_one_by_one(
            model,
            run,
            world.device,
            data,
            reshard_after_forward=self.reshard_after_forward,
            first=sharding(model, run, tensor),
        )

        def count_step(traffic: Traffic) -> None:
            exchanged.count(traffic, tensor.size())
            traffic.all_gather("parameter", padded.gathered, shard.count)
            traffic.reduce_scatter("gradient", padded.gradients, shard.count)

        return new_replica(
            model,
            tensor,
            run=run,
            world=world,
            data_shard=shard,
            before_evaluation=lambda: share_buffers(model),
            count_step=count_step,
        )

    def _mesh(self, run: RunConfig) -> Mesh:
        return Mesh(run.devices, {"tensor": self.tensor})


def even_shards(run: RunConfig, *, shards: int, option: str) -> Rules:
    """Refuses models whose linear layers can't be cut into `shards`, the number that the key `option` asks for."""
    who, model, linears = f"strategy={run.strategy.name}", run.model, run.model.anatomy().linears
    yield from no_fp16(run, SCALES_ALONE)
    if not linears.plan:
        own = package_of(type(model)) != "parallelbench"
        hint = "; a model of your own names what is cut in the `linears` of its `anatomy` (docs/adding-a-model.md)"
        yield (
            True,
            f"{who} finds nothing to shard in model={model.name}: only pairs of linear layers are sharded, as "
            f"DTensor's convolutions are not to be trusted{hint if own else ''}",
            ("model", "strategy"),
        )
        return
    because = f" ({linears.limits})" if linears.limits else ""
    yield (
        linears.units % shards,
        f"{who} can't cut model={model.name} into {shards} equal shards ({option}={shards}): its layers consist of "
        f"{linears.units} equal parts{because}",
        (option, "model", "strategy"),
    )
    yield from _parts_of_vocabulary(run, shards=shards)
    yield from _parts_of_samples(run, shards=shards)


def divides_vocabulary(run: RunConfig) -> bool:
    """Whether tensor ranks hold parts of the vocabulary: of embedding, head and logits."""
    return bool(getattr(run.strategy, "vocabulary_parallel", False))


def divides_sequence(run: RunConfig) -> bool:
    """Whether tensor ranks have parts of the sequence between the layers that they divide."""
    return bool(getattr(run.strategy, "sequence_parallel", False))


def plan_of(run: RunConfig) -> dict[str, Split]:
    """All that a run's tensor ranks cut."""
    anatomy = run.model.anatomy()
    return {**anatomy.linears.plan, **(anatomy.vocabulary.plan if divides_vocabulary(run) else {})}


def why_half_planned(run: RunConfig, traits: Traits) -> str:
    """Why a strategy that cuts the layers of a plan can't; empty: it can."""
    for names in traits.shared:
        modules = [name.rpartition(".")[0] for name in names]
        cut = [any(fnmatchcase(module, path) for path in plan_of(run)) for module in modules]
        if any(cut) and not all(cut):
            return (
                f"{' and '.join(modules)} share a parameter, and the plan of the model's `linears` cuts only some of "
                "them: cut all of them or none, or choose strategy=ddp"
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


def _parts_of_vocabulary(run: RunConfig, *, shards: int) -> Rules:
    """Refuses to divide what isn't there or can't be divided, and losses that need all logits at once."""
    if not divides_vocabulary(run):
        return
    model, key, anatomy = run.model, "strategy.vocabulary_parallel", run.model.anatomy()
    entries, own_loss = anatomy.vocabulary.entries, anatomy.own_loss
    reasons = {
        f"model={model.name} has no vocabulary to divide": (not entries, "model"),
        f"model.vocabulary={entries} can't be divided evenly among {shards} tensor ranks": (
            entries % shards,
            "model.vocabulary",
        ),
        f"loss={run.loss.name} needs all logits at once, only cross entropy is computed from parts": (
            type(run.loss) is not CrossEntropy,
            "loss=cross_entropy",
        ),
        f"metric={run.metric.name} needs all logits at once": (not isinstance(run.metric, NoMetric), "metric=none"),
        f"{own_loss.option} adds to a loss computed from parts": (own_loss.option, own_loss.without),
        "compile=true was never tried with an embedding and a loss that send messages": (run.compile, "compile"),
    }
    for reason, (refuses, other) in reasons.items():
        yield refuses, f"{key}=true is refused: {reason}", (key, other)


def _parts_of_samples(run: RunConfig, *, shards: int) -> Rules:
    """Refuses samples that are no sequences, and sequences that the tensor ranks don't divide."""
    if not divides_sequence(run):
        return
    key = "strategy.sequence_parallel"
    if not run.model.anatomy().sequence_norms:
        why = f"model={run.model.name} names no norms that can have parts of a sequence"
        yield True, f"{key}=true is refused: {why}", (key, "model")
        return
    tokens = run.data.shape[0]
    yield (
        tokens % shards,
        f"{key}=true is refused: samples of {tokens} tokens can't be divided evenly among {shards} tensor ranks",
        (key, "data.sequence"),
    )
    yield (
        run.compile,
        f"{key}=true is refused: compile=true was never tried with norms that send messages",
        (key, "compile"),
    )
