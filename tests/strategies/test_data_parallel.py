"""data_parallel: what can be known of it without two GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from launch.sweep import one_run
from parallelbench.config.run import RunConfig
from parallelbench.training.checks.comparability import local_statistics
from parallelbench.training.checks.parity import as_checked
from tests.strategies.training import drive, one_device, prepared

DATA = ["data=synthetic", "data.channels=1", "data.image_size=32", "data.train_samples=96", "data.test_samples=25"]


def on_gpus(*overrides: str) -> RunConfig:
    return one_run([*DATA, "strategy=data_parallel", "devices=2", "batch_size=24", "precision=fp64", *overrides]).run


@pytest.mark.parametrize("norm", ["batch", "sync"])
def test_each_gpu_normalises_its_own_piece(norm: str) -> None:
    run = on_gpus("model=resnet_tiny", f"model.norm={norm}")
    assert local_statistics(run)
    assert as_checked(run).model.norm == "group"  # type: ignore[attr-defined]
    assert not local_statistics(on_gpus("model=resnet_tiny", "model.norm=group"))


def test_on_one_device_the_replica_trains_like_it_and_counts_what_two_would_copy() -> None:
    """Where there are no GPUs `nn.DataParallel` is the bare module; everything around it is as on GPUs."""
    run = on_gpus("model=logistic_regression")
    replica = prepared(run)
    # Not bitwise: sums over threads may take memory in other blocks.
    torch.testing.assert_close(drive(replica, run), one_device(run), rtol=0, atol=1e-12)
    size_bytes, images, logits = 8 * (1024 + 1) * 10, 8 * 24 * 1024, 8 * 24 * 10
    assert replica.traffic.take() == {
        "parameter_bytes_sent": 3 * size_bytes,
        "gradient_bytes_sent": 3 * size_bytes,
        "activation_bytes_sent": 3 * (images + 2 * logits) / 2,
    }


class OnTwo(nn.Module):
    """What `nn.DataParallel` does with a batch on two GPUs, in pieces on the CPU; counts the bytes that change GPUs."""

    sent = 0

    def __init__(self, module: nn.Module, device_ids: list[int]) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        here, there = batch.chunk(2)
        logits = self.module(there)
        self._count(there)
        self._count(logits)
        logits.register_hook(self._count)
        return torch.cat([self.module(here), logits])

    def _count(self, values: torch.Tensor) -> None:
        OnTwo.sent += values.nbytes


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=logistic_regression"],
        ["model=logistic_regression", "precision=bf16"],
        # As many logits as positions × vocabulary, which is larger than that of the data.
        ["data=tokens", "data.train_samples=96", "data.test_samples=24", "model=gpt_tiny", "model.vocabulary=300"],
    ],
)
def test_what_is_scattered_and_gathered_is_counted_as_it_is(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn, "DataParallel", OnTwo)
    monkeypatch.setattr(OnTwo, "sent", 0)
    data = [] if "data=tokens" in overrides else DATA
    plain = ["strategy=data_parallel", "devices=2", "batch_size=24", "precision=fp64"]
    plain = [each for each in plain if each.partition("=")[0] not in {text.partition("=")[0] for text in overrides}]
    run = one_run([*data, *plain, *overrides]).run
    replica = prepared(run)
    drive(replica, run)
    assert replica.traffic.take()["activation_bytes_sent"] == OnTwo.sent > 0


class Kept:
    """Remembers the dtype that a layer computed in."""

    dtype: Any = None

    def __call__(self, _layer: Any, _inputs: Any, output: torch.Tensor) -> None:
        self.dtype = output.dtype


def test_the_module_sets_its_arithmetic_itself() -> None:
    """Threads inherit no autocast dtype: without that bf16 would be fp16 on all GPUs."""
    run, kept = on_gpus("model=logistic_regression", "precision=bf16"), Kept()
    replica: Any = prepared(run)
    replica._module[-1].register_forward_hook(kept)
    replica._forward(torch.zeros(2, 1, 32, 32))
    assert kept.dtype == torch.bfloat16
