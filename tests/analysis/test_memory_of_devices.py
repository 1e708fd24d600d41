"""Memory per GPU: claims compare one quantity on both sides, and nobody whose runs others disturbed is the leanest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from analysis import load
from analysis.claims import judge
from analysis.claims.table import effect_of
from analysis.figures import draw
from analysis.report.claims import table
from tests.analysis.factory import MIB, Fake, config, published
from tests.analysis.test_claims import REPEATS, claim
from tests.analysis.test_compact import rewrite
from tests.analysis.test_machine import lost

if TYPE_CHECKING:
    from pathlib import Path

    from analysis.claims.verdict import Judgement
    from parallelbench.results.folder import RunFolder

pytestmark = pytest.mark.slow

NEW, OLD = "peak_memory_device_bytes", "gpu_memory_used_max_bytes"
LEANER: dict[str, Any] = {
    "metric": NEW,
    "contrasts": [{"from": {"strategy": "single", "devices": 1}, "to": {"strategy": "model_parallel"}}],
    "expect": {"below": 1, "by": 0.02},
}
WIDE = {"single": "100", "model_parallel": "60,40"}
"""MiB of tensors on each GPU: the fullest has 0.6 of what one GPU alone has."""
DRIVER_MIB = {"single": 1000, "model_parallel": 900}
"""What the driver says of the fullest GPU, with what CUDA itself takes: 0.9."""


def one(root: Path, strategy: str, repeat: int) -> RunFolder:
    """One process that drives all GPUs of its strategy; each holds a little more in later repeats."""
    each = [(int(mib) + repeat) * MIB for mib in WIDE[strategy].split(",")]
    fake = Fake(
        device_type="cuda",
        processes=1,
        peak_allocated_bytes=lambda epoch, rank: sum(each),
        peak_allocated_bytes_by_device=lambda epoch, rank: ",".join(map(str, each)),
    )
    return published(config(root, strategy=strategy, devices=len(each), repeat=repeat, device="cuda"), fake)


def with_driver(folder: RunFolder, strategy: str, *, old: bool) -> None:
    """What the driver said stands in the tables, too; `old`: what each GPU held does not."""

    def changed(tables: dict[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
        said = pl.lit(DRIVER_MIB[strategy] * MIB).cast(pl.Int64).alias(OLD)
        ranks = tables["ranks"].drop("peak_allocated_bytes_by_device") if old else tables["ranks"]
        return tables | {"epochs": tables["epochs"].with_columns(said), "ranks": ranks}

    rewrite(folder, 8 if old else 9, changed)


def judged(root: Path, *, old_repeats: set[int]) -> Judgement:
    for repeat in REPEATS:
        for strategy in WIDE:
            with_driver(one(root, strategy, repeat), strategy, old=repeat in old_repeats)
    return judge(load(root), claim(**LEANER), seed="000")


@pytest.mark.exhaustive
def test_what_tensors_hold_on_the_fullest_gpu_decides(tmp_path: Path) -> None:
    finding = judged(tmp_path, old_repeats=set())
    (case,) = finding.cases
    assert (finding.verdict, case.metric) == ("reproduced", NEW)
    assert case.effects == tuple((repeat, (60 + repeat) / (100 + repeat)) for repeat in REPEATS)
    assert ", by " not in effect_of(case, finding.claim)
    assert table([finding])["metric"].to_list() == [NEW]


@pytest.mark.cases("all")
@pytest.mark.parametrize("old", [{0, 1, 2, 3, 4, 5}, {3}], ids=["all", "one"])
def test_older_results_are_compared_by_what_the_driver_said_of_both_sides(old: set[int], tmp_path: Path) -> None:
    """One device is a process, whose peak is known of old results, too: never that against the driver's word."""
    finding = judged(tmp_path, old_repeats=old)
    (case,) = finding.cases
    assert (finding.verdict, case.metric) == ("reproduced", OLD)
    assert [effect for _, effect in case.effects] == [0.9] * 6
    assert effect_of(case, finding.claim).endswith(f", by {OLD}")
    assert table([finding])["metric"].to_list() == [OLD]


@pytest.mark.exhaustive
def test_without_either_there_is_no_case(tmp_path: Path) -> None:
    for repeat in REPEATS:
        for strategy in WIDE:
            folder = one(tmp_path, strategy, repeat)
            rewrite(folder, 8, lambda t: t | {"ranks": t["ranks"].drop("peak_allocated_bytes_by_device")})
    finding = judge(load(tmp_path), claim(**LEANER), seed="000")
    assert (finding.verdict, finding.cases) == ("inconclusive", ())


def test_nobody_whose_runs_others_disturbed_takes_the_least_memory(tmp_path: Path) -> None:
    held = {("single", 1): 100, ("ddp", 2): 90, ("fsdp", 2): 50}
    for (strategy, devices), mib in held.items():
        for repeat in range(2):
            fake = Fake(
                host_peak_rss_bytes=lambda epoch, rank, mib=mib: mib * MIB,  # type: ignore[misc]
                others_time_s=lost(0.48, {1, 2, 3, 4}) if strategy == "fsdp" else lambda epoch, rank: 0.0,
            )
            published(config(tmp_path, strategy=strategy, devices=devices, repeat=repeat, epochs=4), fake)
    (memory,) = draw(load(tmp_path), ["memory"])
    first, rest = memory.finding.split("; apart from these, ")
    assert first.startswith("The largest process takes 90.0 MiB with ddp × 2")
    assert "single × 1" in first
    assert rest.startswith("the largest process takes 50.0 MiB with fsdp × 2")
    assert "this does not rank them, since others disturbed runs of fsdp × 2" in rest
