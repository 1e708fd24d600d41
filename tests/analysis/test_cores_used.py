"""A rank that uses more cores than its devices have is compared with nothing: report, compare and claims say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import load
from analysis.comparison.issues import beyond_own_cores
from analysis.runs.reader import Runs
from tests.analysis.factory import Fake, config, published
from tests.analysis.made_up import IN_TWO, altered
from tests.analysis.test_machine import in_all, verdict_of


def found(root: Path, fake: Fake, **changes: Any) -> list[tuple[float, float]]:
    published(config(root, **changes), fake)
    return [(pytest.approx(used), own) for used, own in beyond_own_cores(load(root)).values()]


@pytest.mark.parametrize(
    ("used_s", "workers_s", "cores", "is_found"),
    [
        (5.27, None, 1, False),  # 5 % of 5 s, and 30 ms more that the kernel may miscount
        (5.29, None, 1, True),
        (5.00, 0.27, 1, False),
        (5.00, 0.29, 1, True),
        (9.90, None, 2, False),
        (10.54, None, 2, True),
        (0.00, None, 1, False),
    ],
)
def test_the_limit_of_an_epoch(
    tmp_path: Path, used_s: float, workers_s: float | None, cores: int, is_found: bool
) -> None:
    fake = Fake(
        epoch_time_s=lambda epoch, rank: 5.0,
        cpu_time_s=lambda epoch, rank: used_s if epoch == 2 else 4.9,
        loader_cpu_time_s=lambda epoch, rank: workers_s if epoch == 2 else None,
    )
    expected = [((used_s + (workers_s or 0.0)) / 5.0, cores)] if is_found else []
    assert found(tmp_path, fake, cores_per_device=cores) == expected


@pytest.mark.parametrize(("used", "is_found"), [(1.0, False), (1.3, False), (1.5, True), (2.0, True)])
def test_short_epochs_are_judged_together(tmp_path: Path, used: float, is_found: bool) -> None:
    """Of 5 ms each: what ticks of 10 ms may miscount of 80 epochs is 15 ms · √80 of 400 ms."""
    short = Fake(epoch_time_s=lambda epoch, rank: 0.005, cpu_time_s=lambda epoch, rank: 0.005 * used)
    assert found(tmp_path, short, epochs=80) == ([(used, 1)] if is_found else [])


def test_a_rank_has_the_cores_of_all_its_devices(tmp_path: Path) -> None:
    busy = {"epoch_time_s": lambda epoch, rank: 5.0, "cpu_time_s": lambda epoch, rank: 9.9}
    model_parallel = {"strategy": "model_parallel", "devices": 2}
    assert not found(tmp_path / "one process", Fake(**busy, processes=1), **model_parallel)
    assert found(tmp_path / "two", Fake(**busy), strategy="ddp", devices=2) == [(9.9 / 5.0, 1)]


def test_the_host_threads_of_a_gpu_are_not_counted(tmp_path: Path) -> None:
    gpu = Fake(device_type="cuda", cpu_time_s=lambda epoch, rank: 9.0)
    assert not found(tmp_path, gpu, device="cuda")


@pytest.mark.slow
def test_more_cores_than_its_devices_decide_nothing(usual: Runs) -> None:
    own, another = pl.col("epoch_time_s"), pl.when(IN_TWO & (pl.col("rank") == 1)).then(2.0).otherwise(0.9)
    assert verdict_of(altered(usual, cpu_time_s=0.9 * own)) == "faster"
    runs = altered(usual, cpu_time_s=another * own)
    assert in_all(runs, "a rank used more cores than its devices: 2.00 cores of 1") == [True] * 3
    assert verdict_of(runs) == "not comparable"
