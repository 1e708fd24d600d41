"""What a loader's worker processes use is counted apart from the rank, and null where there are none."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.sweep.compose import group_choices
from parallelbench.config.components import Shard
from parallelbench.loaders.order import BatchLoader
from parallelbench.loaders.torch_loader import _Samples
from parallelbench.measure.processor import WorkerProbe
from parallelbench.training.torch_session import build_loader
from parallelbench.world.world import World
from tests.helpers import TINY, configured

BUSY_S = 0.02
KEPT_BYTES = 16 << 20
NOTHING = {"loader_cpu_time_s": None, "loader_memory_bytes": None}


def built(*overrides: str, shard: Shard | None = None) -> BatchLoader:
    run = configured(*TINY, *overrides)
    return build_loader(run.data.load(Path("nowhere")), run, World(), shard or Shard())


@pytest.mark.exhaustive
@pytest.mark.parametrize("stay", ["true", "false"])
def test_the_use_of_workers_is_counted_whether_they_stay_or_not(stay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 samples of 20 ms of processor time each, by two workers that fill 16 MiB each."""
    kept: list[bytes] = []

    def busy(*_: Any) -> torch.Tensor:
        end = time.process_time() + BUSY_S
        if not kept:
            kept.append(b"x" * KEPT_BYTES)
        while time.process_time() < end:
            pass
        return torch.zeros(1, 8, 8)

    monkeypatch.setattr(_Samples, "_image", busy)
    with closing(built("loader=dataloader", "loader.workers=2", f"loader.persistent_workers={stay}")) as loader:
        probe = WorkerProbe(loader)
        for epoch in (1, 2):
            probe.start()
            list(loader.train(epoch))
            used = probe.stop()
            assert used["loader_cpu_time_s"] == pytest.approx(64 * BUSY_S, rel=0.5, abs=0.3)
            assert used["loader_cpu_time_s"] > 64 * BUSY_S * 0.95
            if stay == "true":
                assert 2 * KEPT_BYTES < used["loader_memory_bytes"] < 2 * KEPT_BYTES + (128 << 20)
            else:
                assert used["loader_memory_bytes"] is None, "they are gone"
        probe.start()
        assert probe.stop()["loader_cpu_time_s"] < 0.1, "idle"
    assert kept == []


@pytest.mark.parametrize("name", group_choices()["loader"])
def test_without_workers_their_use_is_null_not_zero(name: str) -> None:
    none = ["loader.workers=0"] if name in ("dataloader", "tensor_dataset") else []
    loader = built(f"loader={name}", *none)
    probe = WorkerProbe(loader)
    probe.start()
    list(loader.train(1))
    assert probe.stop() == NOTHING


def test_a_rank_that_looks_at_nothing_has_no_workers() -> None:
    loader = built("loader=dataloader", shard=Shard(images=False, labels=False))
    probe = WorkerProbe(loader)
    probe.start()
    assert [batch.size for batch in loader.train(1)] == [32, 32]
    assert probe.stop() == NOTHING
