"""DDP leaves running statistics to each rank, by whatever name torch has for that, and without a warning."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from parallelbench.config.run import RunConfig
from parallelbench.strategies.data_parallel import ddp
from parallelbench.strategies.replica import share_buffers
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.training import configure, loader_of, prepared

SMALL = ["data=synthetic", "data.image_size=16", "data.train_samples=96", "data.test_samples=10", "model=resnet_tiny"]


class Before213(nn.Module):
    def __init__(self, module: nn.Module, broadcast_buffers: bool = True) -> None:
        super().__init__()


class Since213(nn.Module):
    def __init__(self, module: nn.Module, broadcast_buffers: Any = None, forward_sync_buffers: Any = None) -> None:
        super().__init__()


def test_the_option_goes_by_the_name_that_torch_has_for_it() -> None:
    assert ddp.keep_buffers_local(Before213) == {"broadcast_buffers": False}
    assert ddp.keep_buffers_local(Since213) == {"forward_sync_buffers": False}


def _trained(rank: int, size: int, run: RunConfig) -> list[dict[str, torch.Tensor]]:
    """This rank's parameters and buffers after one epoch, and after one with the option's older name."""
    found = []
    for options in (ddp.keep_buffers_local, lambda _: {"broadcast_buffers": False}):
        with mock.patch.object(ddp, "keep_buffers_local", options), warnings.catch_warnings():
            if not found:
                warnings.simplefilter("error", FutureWarning)
            replica = prepared(run, rank, size)
            for batch in loader_of(replica, run).train(epoch=1):
                replica.step(batch)
            found.append(replica.local_state()["tensors"])
    return found


@pytest.mark.slow
def test_training_is_that_of_the_older_name_bit_for_bit(tmp_path: Path) -> None:
    run = configure(*SMALL, "strategy=ddp", "devices=2")
    new, old = zip(*run_ranks(_trained, 2, tmp_path, run), strict=True)
    for rank in range(2):
        assert new[rank].keys() == old[rank].keys()
        assert all(torch.equal(new[rank][name], old[rank][name]) for name in new[rank])
    means = [name for name in new[0] if name.endswith("running_mean")]
    assert any(not torch.equal(new[0][name], new[1][name]) for name in means), "each rank keeps its own"


def _messages_of_sharing(rank: int, size: int) -> tuple[int, list[torch.Tensor]]:
    """Messages that this rank begins to share its buffers, which are its own, and the buffers afterwards."""
    world = World(rank=rank, size=size, local_rank=rank)
    module = build_model(configure(*SMALL, "strategy=ddp", "devices=2"))
    for buffer in module.buffers():
        buffer.fill_(rank)
    module.register_buffer("mixed", torch.full((2, 3, 4, 5), float(rank)).to(memory_format=torch.channels_last))
    begun = world.exchange_counter()
    before = begun()
    share_buffers(module)
    return begun() - before, [*module.buffers()]


@pytest.mark.slow
def test_all_buffers_of_a_type_are_shared_in_one_message(tmp_path: Path) -> None:
    for messages, buffers in run_ranks(_messages_of_sharing, 2, tmp_path):
        assert messages == len({buffer.dtype for buffer in buffers}) == 2
        assert len(buffers) > 10
        assert not any(buffer.any() for buffer in buffers), "all are those of rank 0"
