"""Data parallel training from one process with torch's `nn.DataParallel`: older, simpler and slower than ddp.

Every step copies the model from the first GPU to the others, runs one thread per GPU, and sums the gradients on the
first, which alone holds the optimizer (Li et al. 2020, arXiv 2006.15704, section 2.2, on why ddp replaced it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from parallelbench.config.components import Shard, Strategy
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.measure.traffic import Traffic
    from parallelbench.world.world import World


class DataParallel(Strategy, frozen=True, kw_only=True):
    """One process and one thread per GPU. Evaluation runs on the first GPU."""

    updates_as_asked: ClassVar[bool] = True

    def processes(self, run: RunConfig, device_type: str) -> int:
        """One process drives all GPUs."""
        return 1

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One: the module itself scatters the batch."""
        return 1

    def micro_batches_per_step(self, run: RunConfig) -> int:
        """One per GPU. No process group joins the GPUs, so each normalises its own piece, under norm=sync too."""
        return run.devices

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse CPUs, where `nn.DataParallel` is silently the bare module, several nodes, and compiling."""
        if device_type != "cuda" or run.devices < 2:
            where = "a CPU" if device_type != "cuda" else f"devices={run.devices}"
            raise ConfigError(
                f"strategy=data_parallel needs two CUDA devices or more, and on {where} would train on one device: "
                "choose strategy=ddp with devices=2 or more"
            )
        if run.nodes > 1:
            raise ConfigError(
                f"strategy=data_parallel drives all GPUs from one process and so needs nodes=1, not nodes={run.nodes}: "
                "choose strategy=ddp"
            )
        batch = run.global_batch_size
        if batch % run.devices:
            advice = max(1, batch // run.devices) * run.devices
            raise ConfigError(
                f"batch_size={batch} can't be scattered evenly over devices={run.devices}: choose batch_size={advice}"
            )
        if run.compile:
            raise ConfigError(
                "compile=true with strategy=data_parallel is refused: the module is copied anew in every step; "
                "choose strategy=ddp"
            )

    def why_no_recomputation(self, run: RunConfig) -> str:
        """The threads' backward passes would restore the one state of random numbers under each other."""
        return "the GPUs' threads share one state of random numbers, which each would restore: choose strategy=ddp"

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Put the model on the first GPU; each forward scatters the batch over all, and gathers the logits there."""
        from torch import nn

        from parallelbench.strategies.parts.replicas import ModuleReplica, gradient_bytes, to_device

        module = to_device(model, run, world.device)
        wrapped = nn.DataParallel(_autocasting(module, run, world), device_ids=list(world.devices))
        tensors = [*module.parameters(), *module.buffers()]
        model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        others, size_bytes = run.devices - 1, gradient_bytes(module)
        seen = _BatchBytes()
        wrapped.register_forward_hook(seen)

        def count_step(traffic: Traffic) -> None:
            # Between the devices of the one process: from the first device to the others, and back.
            traffic.send("parameter", others * model_bytes)
            traffic.send("gradient", others * size_bytes)
            traffic.send("activation", others / run.devices * seen.batch_bytes)

        return ModuleReplica(module, run=run, world=world, data_shard=Shard(), wrapped=wrapped, count_step=count_step)


def _autocasting(module: nn.Module, run: RunConfig, world: World) -> nn.Module:
    """Wrap a module so that it enters autocast itself.

    Autocast belongs to a thread, and `nn.DataParallel` hands its own threads no dtype: bf16 would become fp16.
    """
    from torch import nn

    from parallelbench.world.numerics import Numerics

    class Autocasting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self._numerics = module, Numerics(run.precision, world.device_type)

        def forward(self, images: Tensor) -> Tensor:
            with self._numerics.autocast():
                logits: Tensor = self.module(images)
            return logits

    return Autocasting()


class _BatchBytes:
    """Bytes of a global batch's samples, of its logits and of their gradients, as the last forward pass had them."""

    batch_bytes = 0

    def __call__(self, _module: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> None:
        """Hook of the module that scatters and gathers."""
        self.batch_bytes = inputs[0].nbytes + 2 * logits.nbytes
