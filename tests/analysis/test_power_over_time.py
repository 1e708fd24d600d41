"""Power over time: planted watts come out of the stored samples, of one run per configuration that is drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from analysis import load
from analysis.figures import Figure, draw, specification, svg
from analysis.figures.power_over_time import lines, means, power_over_time
from tests.analysis.factory import Fake, config, published
from tests.analysis.made_up import rows_of

pytestmark = pytest.mark.slow

EPOCHS, EVERY_S, TRAINED_S, IDLE_W = 4, 10.0, 8.0, 60.0
"""Epochs begin every 10 s and train for 8 s: 38 s from the first one's start to the last one's end."""
LENGTH_S = 38.0


def sampled(root: Path, watts: tuple[float | None, ...], *, fake: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A published run of a device per power."""
    of_gpus = {
        "device_type": "cuda",
        "device_name": "GPU",
        "gpu_power_w": lambda epoch, rank: watts[rank],
        "epoch_time_s": lambda epoch, rank: TRAINED_S,
        "epoch_every_s": EVERY_S,
        "sample_every_s": 0.5,
        "idle_w": IDLE_W,
    }
    strategy = {"strategy": "ddp", "devices": len(watts)} if len(watts) > 1 else {}
    return published(config(root, **({"epochs": EPOCHS} | strategy | changes)), Fake(**(of_gpus | (fake or {})))).path


def drawn(root: Path) -> Figure:
    (figure,) = draw(load(root), ["power_over_time"])
    return figure


def lines_of(figure: Figure) -> pl.DataFrame:
    return pl.DataFrame(rows_of(figure.chart), infer_schema_length=None)


def test_planted_watts_of_all_gpus_are_drawn_against_the_seconds_of_the_training(tmp_path: Path) -> None:
    sampled(tmp_path, (100.0,))
    sampled(tmp_path, (100.0, 150.0))
    figure = drawn(tmp_path)
    rows = lines_of(figure)
    one, two = (rows.filter(pl.col("configuration") == name) for name in ("single × 1", "ddp × 2"))
    for line, training_w, idle_w in ((one, 100.0, IDLE_W), (two, 250.0, 2 * IDLE_W)):
        assert line.height == 82, "a GPU's samples: one before, 80, one behind"
        assert (line["value"].max(), line["value"].min()) == pytest.approx((training_w, idle_w))
        first = LENGTH_S / 82 / 2
        assert (line["x"][0], line["x"][-1]) == pytest.approx((first, LENGTH_S - first), abs=1e-3)
        steady = line.filter(pl.col("x") < TRAINED_S - 0.5)["value"]
        assert steady.len() > 10
        assert steady.to_list() == pytest.approx([training_w] * steady.len())
    # By hand: 8 s of training, 0.5 s down, 1 s idle, 0.5 s up, thrice; and 8 s.
    assert one["value"].mean() == pytest.approx((3 * (800 + 40 + 60 + 40) + 800) / LENGTH_S, abs=0.01)
    assert two["value"].mean() == pytest.approx((3 * (2000 + 92.5 + 120 + 92.5) + 2000) / LENGTH_S, abs=0.01)
    assert figure.finding == (
        "From the first epoch's start to the last one's end, the GPUs draw 95.3 W on average for 38.0\u202fs with "
        "single × 1; and 235 W on average for 38.0\u202fs with ddp × 2."
    )
    image = svg(specification(figure.chart))
    assert all(words in image for words in ("Seconds since the first epoch began", "Power of all GPUs (W)", "ddp × 2"))


def test_nothing_is_drawn_between_samples_that_lie_far_apart(tmp_path: Path) -> None:
    sampled(tmp_path, (100.0,), fake={"sample_every_s": None, "idle_w": None, "epoch_every_s": 1000.0})
    figure = drawn(tmp_path)
    assert figure.chart is None
    assert figure.finding.startswith("The samples of the GPUs' power can't be read or lie too far apart")
    times = np.array([*range(11), *range(40, 51)], dtype=float)
    found = means(times, np.full(len(times), 5.0), np.linspace(0.0, 60.0, 7))
    assert np.isnan(found).tolist() == [False, True, True, True, False, True], "nor before or behind all samples"
    assert found[[0, 4]].tolist() == [5.0, 5.0]


def test_a_run_whose_samples_were_damaged_is_left_out(tmp_path: Path) -> None:
    sampled(tmp_path, (100.0,))
    table = sampled(tmp_path, (90.0, 90.0)) / "result" / "telemetry.parquet"
    table.write_bytes(bytes(table.stat().st_size))
    figure = drawn(tmp_path)
    assert set(lines_of(figure).drop_nulls("value")["configuration"]) == {"single × 1"}
    assert "ddp" not in figure.finding


def test_of_a_resumed_run_the_last_attempt_is_drawn(tmp_path: Path) -> None:
    sampled(tmp_path, (100.0,), fake={"resumed_after": 2})
    rows = lines(load(tmp_path))
    assert rows["value"].null_count() == 0
    assert rows["length_s"].unique().to_list() == [EVERY_S + TRAINED_S]
    assert "single × 1 (after its last interruption)" in drawn(tmp_path).finding
    sampled(tmp_path, (100.0,), repeat=1)
    assert lines(load(tmp_path))["repeat"].unique().to_list() == [1], "which was not interrupted"


def test_all_gpus_of_a_process_are_drawn(tmp_path: Path) -> None:
    sampled(tmp_path, (100.0, 100.0), fake={"processes": 1}, strategy="data_parallel", device="cuda")
    assert lines_of(drawn(tmp_path))["value"].max() == pytest.approx(200.0)


@pytest.mark.parametrize("column", ["attempt", "training_started_at", "device_uuid"])
def test_results_without_a_column_that_says_what_to_draw_are_not_drawn(tmp_path: Path, column: str) -> None:
    sampled(tmp_path, (100.0,))
    runs = load(tmp_path)
    ranks = runs.ranks.with_columns(pl.lit(None, runs.ranks.schema[column]).alias(column))
    older = replace(runs, tables={**runs.tables, "ranks": ranks})
    assert power_over_time.figure(runs) is not None
    assert power_over_time.figure(older) is None
    assert power_over_time.finding(older).startswith("The samples of the GPUs' power can't be read")


@pytest.mark.parametrize("watts", [(), (100.0, None)], ids=["no GPU", "a GPU was lost"])
def test_without_power_of_all_gpus_there_is_no_figure(tmp_path: Path, watts: tuple[float | None, ...]) -> None:
    if watts:
        sampled(tmp_path, watts)
    else:
        published(config(tmp_path), Fake())
    figure = drawn(tmp_path)
    assert figure.chart is None
    assert figure.finding == "No run that counts measured the power of its GPUs."
