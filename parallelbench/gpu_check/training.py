"""One device's training: like a CPU's in fp64, without waiting for the device, in every precision and layout."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from parallelbench.gpu_check.results import FailedError, at_most
from parallelbench.gpu_check.variants import loader_of, replica_of, run_of
from parallelbench.models.norms import SyncBatchNorm, has_kernels, synchronize_norms
from parallelbench.strategies.fsdp.shards import shard_layers
from parallelbench.training.checks.parity import as_checked
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World, backends, group_kinds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.loaders.order import BatchLoader


OF_TOKENS = ("gpt_tiny",)
MODELS = ("mlp", "cnn_small", "cnn", "resnet_tiny", "vit_tiny", *OF_TOKENS)
_DATA = {"mlp": ("synthetic", {"channels": 1}), "gpt_tiny": ("tokens", {})}
_STEPS_COMPARED = 3
_TOLERANCE = 1e-9
"""In fp64, as the parity check's."""


def small_run(model: str, **changes: Any) -> RunConfig:
    """A run of one of `MODELS`, on data that it takes."""
    return run_of(model=model, **({"data": _DATA[model]} if model in _DATA else {}) | changes)


def llama_run(**changes: Any) -> RunConfig:
    """A run of a small language model with rotary positions."""
    return run_of(model=("gpt_tiny", {"positions": "rope", "mlp": "swiglu"}), data=_DATA["gpt_tiny"], **changes)


def like_a_cpu(world: World, model: str) -> str:
    """In fp64, training on the device equals training on a CPU, augmented images included."""
    augmented = {} if model in _DATA else {"data": ("synthetic", {"augment": True})}
    run = as_checked(small_run(model, **augmented))
    return at_most("largest relative difference", training_difference(run, world, run, World()), _TOLERANCE)


def waits_are_seen(world: World) -> str:
    """Reading a value waits for the device, and torch must report it; the checks that follow rely on that."""
    value = torch.ones((), device=world.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        value.item()
    except RuntimeError:
        return "reading a value from the device is noticed"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    raise FailedError("torch does not notice that reading a value waits for the device")


def training_difference(run: RunConfig, world: World, other: RunConfig, elsewhere: World) -> float:
    """Of losses and of all parameters and buffers after some steps, relative to the largest of them."""
    one, two = _trained(run, world), _trained(other, elsewhere)
    worst = 0.0
    for name, value in one.items():
        expected = two[name].double()
        worst = max(worst, ((value.double() - expected).abs().max() / expected.abs().max().clamp_min(1.0)).item())
    return worst


def _trained(run: RunConfig, world: World) -> dict[str, Tensor]:
    replica = replica_of(run, world)
    losses = _steps(replica, loader_of(run, world), _STEPS_COMPARED)
    return {"losses": torch.tensor(losses, dtype=torch.float64), **replica.full_state_dict()}


def _steps(replica: Replica, loader: BatchLoader, count: int) -> list[float]:
    """Mean loss of each step."""
    losses = []
    for batch in islice(loader.train(epoch=1), count):
        result = replica.step(batch)
        assert result is not None
        losses.append(result[0].item() / batch.size)
    return losses


OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad")
_STEPS_IN_SHARDS = 3


def sharded(world: World) -> str:
    """In fp64 a model in shards, of which one rank has all, trains like one that is not; captured steps do, too."""
    with group_of_one(world):
        kinds = ", ".join(dict.fromkeys((group_kinds() or {}).values()))
        graphs = (False, True) if world.device_type == "cuda" else (False,)
        worst = max(_difference_in_shards(world, optimizer, graph) for optimizer in OPTIMIZERS for graph in graphs)
    return f"{at_most('largest relative difference of a loss', worst, 1e-9)}, {', '.join(OPTIMIZERS)}, by {kinds}"


@contextmanager
def group_of_one(world: World) -> Iterator[None]:
    """Within the context this process is the only rank of a process group."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder) / 'group'}"
        dist.init_process_group(backends(world.device_type), init_method=meeting, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _difference_in_shards(world: World, optimizer: str, graph: bool) -> float:
    """Of the losses of some steps, which are captured with `graph`."""
    alone = small_run("cnn_small", optimizer=optimizer, precision="fp64")
    strategy = small_run("cnn_small", strategy="fsdp", devices=2).strategy
    run = msgspec.structs.replace(alone, strategy=strategy, graph=graph)
    replica = shard_layers(build_model(run), run, world, shards=1, reshard_after_forward=True, gather="stored")
    reference, worst = replica_of(alone, world), 0.0
    for batch in islice(loader_of(alone, world).train(1), _STEPS_IN_SHARDS):
        found, expected = replica.step(batch), reference.step(batch)
        assert found is not None
        assert expected is not None
        worst = max(worst, abs(found[0].item() / expected[0].item() - 1))
    return worst


_NORM_INPUT = (96, 32, 14, 14)
_NORM_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.02}


def synchronized_norms(world: World) -> str:
    """Norms over all ranks, of which one has all, by torch's kernels: like plain ones in fp64, in both layouts."""
    texts = []
    with group_of_one(world):
        for dtype, tolerance in _NORM_TOLERANCES.items():
            worst = max(
                _difference_of_norms(world, dtype, layout) for layout in (torch.contiguous_format, torch.channels_last)
            )
            texts.append(at_most(f"largest relative difference of {dtype}", worst, tolerance))
    return ", ".join(texts)


def _difference_of_norms(world: World, dtype: torch.dtype, layout: torch.memory_format) -> float:
    """Of outputs, gradients and running statistics of three steps, relative to the largest of each."""
    made = torch.Generator().manual_seed(0)
    shape, worst = _NORM_INPUT, 0.0
    channels = shape[1]
    norm, plain = SyncBatchNorm(channels).to(world.device), torch.nn.BatchNorm2d(channels).double()
    with torch.no_grad():
        for each in (norm, plain):
            each.weight.copy_(torch.linspace(0.5, 2.0, channels))
            each.bias.copy_(torch.linspace(-1.0, 1.0, channels))
    synchronize_norms(norm, dist.group.WORLD)
    assert norm.process_group is not None
    for _ in range(_STEPS_COMPARED):
        images, gradient = (
            torch.randn(shape, generator=made).to(dtype).contiguous(memory_format=layout) for _ in range(2)
        )
        here = (images + 3).to(world.device).requires_grad_()
        there = (images + 3).double().requires_grad_()
        if not has_kernels(here, norm.process_group):
            raise FailedError(f"a norm over all ranks in {dtype} on {world.device} does not take torch's kernels")
        found, expected = norm(here), plain(there)
        found.backward(gradient.to(world.device))
        expected.backward(gradient.double())
        pairs = [(found, expected), (here.grad, there.grad), (norm.weight.grad, plain.weight.grad)]
        pairs += [(norm.bias.grad, plain.bias.grad), *zip(norm.buffers(), plain.buffers(), strict=True)]
        for value, right in pairs:
            assert value is not None
            assert right is not None
            difference = (value.detach().cpu().double() - right.detach()).abs().max() / right.detach().abs().max()
            worst = max(worst, difference.item())
        norm.zero_grad()
        plain.zero_grad()
    return worst
