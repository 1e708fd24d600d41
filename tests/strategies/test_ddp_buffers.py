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
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.training import configure, loader_of

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
            replica = run.strategy.prepare(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
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
