"""Only runs of the same work are compared, one device first, repeat by repeat."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from rich.console import Console

from analysis import UnlikeWork, by, compare, excluded, labels, load, summary, summary_table
from analysis.metrics.columns import summary_columns
from analysis.runs.published import TYPES
from analysis.runs.reader import Runs
from launch.sweep import expand
from parallelbench.config.build import from_mapping, to_mapping
from tests.analysis.factory import Fake, component, config, failed, one_and_two, published, steady
from tests.helpers import interval

LATER = Fake(started_at=1.8e9)


def pair(root: Path, times: list[tuple[float, float]], **changes: Any) -> Runs:
    """Repeats of single × 1 and ddp × 2 that take these times."""
    one_and_two(root, ((steady(one, first_s=9.0), steady(two, first_s=9.0)) for one, two in times), **changes)
    return load(root)


def row_of(runs: Runs, configuration: str) -> dict[str, Any]:
    return summary(runs).row(by_predicate=pl.col("configuration") == configuration, named=True)


@pytest.mark.slow
def test_strong_scaling_compares_times_pair_by_pair(tmp_path: Path) -> None:
    times = [(10.0, 8.0), (20.0, 10.0), (30.0, 20.0), (18.0, 12.0)]
    runs = pair(tmp_path, times, measure={"parity": False})
    row = row_of(runs, "ddp × 2")
    # Ratios 1.25, 2, 1.5, 1.5: their median is 1.5; the ratio of the medians would be 19 ÷ 11.
    assert row["speed_up"] == 1.5
    assert row["efficiency"] == 0.75
    assert (row["speed_up_low"], row["speed_up_high"]) == pytest.approx(interval((1.25, 2.0, 1.5, 1.5)))
    assert (row["speed_up_pairs"], row["verdict"]) == (4, "no difference shown")
    assert row["steady_epoch_time_s"] == 11.0
    # start-up 2.4 − 0.2, first epoch 9, two later ones: (31.2 ÷ 27.2, 51.2 ÷ 31.2, 71.2 ÷ 51.2, 47.2 ÷ 35.2)
    assert row["efficiency_with_startup"] == pytest.approx(math.sqrt(71.2 / 51.2 * 47.2 / 35.2) / 2)


def test_weak_scaling_compares_throughput(tmp_path: Path) -> None:
    # 4 steps of 100 on one device, of 200 on two: twice the samples in 1.25 times the time.
    changes = {"scaling": "weak", "batch_size": 100, "measure": {"steps_per_epoch": 4, "parity": False}}
    runs = pair(tmp_path, [(4.0, 5.0)], **changes)
    row = row_of(runs, "ddp × 2")
    assert row["throughput_samples_per_s"] == 160.0
    assert row["speed_up"] == pytest.approx(1.6)
    assert row["efficiency"] == pytest.approx(0.8)
    one, two = 1200 / (2.2 + 9 + 8), 2400 / (2.2 + 9 + 10)
    assert row["efficiency_with_startup"] == pytest.approx(two / one / 2)


def test_a_single_repeat_says_so(tmp_path: Path) -> None:
    row = row_of(pair(tmp_path, [(10.0, 8.0)]), "ddp × 2")
    assert (row["speed_up"], row["speed_up_low"], row["verdict"]) == (1.25, None, "too few repeats")


def test_without_a_baseline_there_is_no_speed_up(tmp_path: Path) -> None:
    published(config(tmp_path, strategy="ddp", devices=2))
    row = row_of(load(tmp_path), "ddp × 2")
    assert [row[name] for name in ("speed_up", "verdict", "efficiency", "efficiency_with_startup")] == [None] * 4


@pytest.mark.slow
def test_a_repeat_without_its_partner_is_no_pair(tmp_path: Path) -> None:
    runs = pair(tmp_path, [(10.0, 8.0), (10.0, 5.0)])
    published(config(tmp_path, repeat=2, strategy="ddp", devices=2), steady(1.0))
    runs = load(tmp_path)
    row = row_of(runs, "ddp × 2")
    assert (row["repeats"], row["speed_up_pairs"], row["speed_up"]) == (3, 2, pytest.approx(math.sqrt(1.25 * 2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"batch_size": 64}, "batch_size: 128 and 64"),
        ({"precision": "bf16"}, "precision: fp32 and bf16"),
        ({"model": "cnn_large"}, "model: cnn_small and cnn_large"),
        ({"data": {"name": "digits", "augment": True}}, "data.augment: false and true"),
        ({"optimizer": {"name": "sgd", "lr": 0.5}}, "optimizer.lr: 0.1 and 0.5"),
        ({"epochs": 4}, "epochs: 3 and 4"),
        ({"measure": {"steps_per_epoch": 5}}, "measure.steps_per_epoch: null and 5"),
        ({"cores_per_device": 2}, "cores_per_device: 1 and 2"),
        ({"channels_last": True}, "channels_last: false and true"),
        ({"loader": "streamed"}, "loader: resident and streamed"),
        ({"compile": True}, "compile: false and true"),
        ({"seed": 5}, "seed: 0 and 5"),
        ({"scaling": "weak", "batch_size": 64}, "scaling: strong and weak"),
    ],
)
def test_unlike_work_is_no_group_and_refused_with_what_differs(
    tmp_path: Path, changes: dict[str, Any], difference: str
) -> None:
    published(config(tmp_path / "a"))
    published(config(tmp_path / "b", **changes), LATER)
    with pytest.raises(UnlikeWork) as error:
        compare(load(tmp_path / "a"), load(tmp_path / "b"))
    assert difference in str(error.value)
    published(config(tmp_path / "a", strategy="ddp", devices=2, **changes))
    runs = load(tmp_path / "a")
    assert summary(runs)["group"].n_unique() == 2
    assert summary(runs).filter(pl.col("verdict").is_not_null())["configuration"].to_list() == ["single × 1"]


def test_options_of_a_strategy_make_variants_and_other_work_makes_groups(tmp_path: Path) -> None:
    published(config(tmp_path, strategy="ddp", devices=2))
    published(config(tmp_path, strategy={"name": "ddp", "bucket_mib": 1.0}, devices=2))
    published(config(tmp_path, batch_size=64))
    found = labels(load(tmp_path)).sort("group", "configuration").select("group", "configuration").rows()
    assert found == [
        ("digits · cnn_small · batch size 128", "ddp × 2, bucket mib 1.0"),
        ("digits · cnn_small · batch size 128", "ddp × 2, bucket mib 25.0"),
        ("digits · cnn_small · batch size 64", "single × 1"),
    ]


@pytest.mark.slow
def test_untrustworthy_runs_are_excluded_with_the_reason(tmp_path: Path) -> None:
    published(config(tmp_path))
    published(config(tmp_path, repeat=1), Fake(parity_passed=False))
    published(config(tmp_path, repeat=2), Fake(oversubscribed=True))
    published(config(tmp_path, repeat=3, measure={"deterministic": True}))
    published(config(tmp_path, repeat=4, measure={"detect_anomaly": True}))
    failed(config(tmp_path, repeat=5), "oom", "out of memory", epochs=1)
    published(from_mapping(to_mapping(config(tmp_path, repeat=6)) | {"launcher": component("launcher", "inline")}))
    published(config(tmp_path, repeat=7), Fake(resumed_after=1, resumed_elsewhere="device_name: A and B"))
    runs = load(tmp_path)
    rows = excluded(runs).join(runs.run.select("run_id", "repeat"), on="run_id").sort("repeat")
    assert rows.select("exclusion", "exclusion_detail").rows() == [
        ("parity_failed", "loss differs by 0.5"),
        ("oversubscribed", None),
        ("deterministic", None),
        ("anomaly detection", None),
        ("oom", "out of memory"),
        ("inline", None),
        ("resumed elsewhere", "device_name: A and B"),
    ]


def test_a_configuration_without_a_counted_run_has_a_row_of_nulls_and_its_outcomes(tmp_path: Path) -> None:
    published(config(tmp_path))
    failed(config(tmp_path, strategy="ddp", devices=2), "oom", "out of memory", epochs=1)
    failed(config(tmp_path, strategy="ddp", devices=2, repeat=1), "killed", "signal 9", epochs=0)
    runs = load(tmp_path)
    row = row_of(runs, "ddp × 2")
    assert (row["repeats"], row["outcomes"], row["exclusions"]) == (0, "1 killed, 1 oom", "1 killed, 1 oom")
    measured = ("steady_epoch_time_s", "throughput_samples_per_s", "speed_up", "peak_memory_max_bytes", "efficiency")
    assert [row[name] for name in measured] == [None] * len(measured)
    assert row["group"] == "digits · cnn_small"  # it never said where it ran, and belongs with the others all the same


def test_time_to_accuracy_uses_the_highest_target_that_all_counted_runs_reach(tmp_path: Path) -> None:
    for strategy, devices, accuracy in (("single", 1, [0.8, 0.96, 0.97]), ("ddp", 2, [0.9, 0.94, 0.955])):
        fake = Fake(epoch_time_s=lambda e, r: float(e), test_accuracy=lambda e, a=accuracy: a[e - 1])
        published(config(tmp_path, strategy=strategy, devices=devices), fake)
    runs = load(tmp_path)
    assert summary(runs)["accuracy_target"].to_list() == [0.95, 0.95]
    assert summary(runs)["time_to_accuracy_s"].to_list() == [3.0, 6.0]


@pytest.mark.slow
def test_the_summary_has_its_documented_columns_and_the_terminal_its_numbers(tmp_path: Path) -> None:

    runs = pair(tmp_path, [(10.0, 8.0), (10.0, 8.1), (10.0, 7.9)])
    failed(config(tmp_path, strategy="model_parallel", devices=2), "oom", "out of memory", epochs=1)
    runs = load(tmp_path)
    assert dict(summary(runs).schema) == {column.name: TYPES[column.type] for column in summary_columns()}
    console = Console(width=80, record=True)
    console.print(summary_table(runs))
    text = console.export_text()
    assert "1.25 (1.19–1.31)" in text
    assert "62.5" in text
    assert "1 oom" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_what_was_sent_planned_and_stale_of_a_configuration(tmp_path: Path) -> None:
    for repeat, (sent, staleness) in enumerate([(11, [0, 1]), (33, [2, 2]), (22, [0, 0])]):
        fake = Fake(
            sent=lambda e, r, sent=sent: (sent, 0, 0),
            staleness=lambda e, r, staleness=staleness: staleness,
            theoretical_bubble=0.2,
        )
        published(config(tmp_path, strategy="model_parallel", devices=2, repeat=repeat), fake)
    row = row_of(load(tmp_path), "model_parallel × 2")
    assert (row["bytes_sent_per_step_sum"], row["gradient_bytes_sent_per_step_busiest"]) == (4.0, 2.0)
    assert row["theoretical_bubble"] == 0.2
    assert (row["staleness_mean"], row["staleness_max"]) == (0.5, 2)  # median of 0.5, 2 and 0; largest of all


@pytest.mark.parametrize(
    ("passed", "shown"),
    [
        ([True, True], "2 of 2"),
        ([True, False], "1 of 2"),
        ([None, None], "reference"),
        ([True, None], "1 of 1, 1 not checked"),
    ],
)
def test_runs_that_passed_are_told_from_those_that_nobody_checked(
    tmp_path: Path, passed: list[bool | None], shown: str
) -> None:
    """One device is what others are checked against."""
    way = {"strategy": "single"} if shown == "reference" else {"strategy": "ddp", "devices": 2}
    for repeat, one in enumerate(passed):
        published(config(tmp_path, repeat=repeat, **way), Fake(parity_passed=one))
    failed(config(tmp_path, repeat=9, **way), "oom", "out of memory", epochs=0, fake=Fake(parity_passed=None))
    assert summary(load(tmp_path))["parity"].item() == shown


@pytest.mark.slow
def test_a_sweep_over_loaders_labels_each_and_compares_them_where_asked(tmp_path: Path) -> None:
    for name, time_s in (("resident", 2.0), ("streamed", 3.0), ("dataloader", 8.0)):
        published(config(tmp_path, loader=name), steady(time_s))
    published(config(tmp_path, loader={"name": "dataloader", "workers": 7}, batch_size=64), steady(1.0))
    runs = load(tmp_path)
    frame = labels(runs).join(runs.run, on="run_id")
    groups = frame.select("loader", "batch_size", "group")
    assert sorted(groups.rows()) == [
        ("dataloader", 64, "digits · cnn_small · batch size 64 · loader dataloader · workers 7"),
        ("dataloader", 128, "digits · cnn_small · batch size 128 · loader dataloader · workers 2"),
        ("resident", 128, "digits · cnn_small · batch size 128 · loader resident"),
        ("streamed", 128, "digits · cnn_small · batch size 128 · loader streamed"),
    ]
    (row,) = by(runs, "loader", "resident", "streamed").rows
    assert (row.time.median, row.group) == (1.5, "digits · cnn_small")


@pytest.mark.slow
def test_the_shipped_sweep_over_settings_is_answered_key_by_key(tmp_path: Path) -> None:
    """Half the time in bf16, a quarter more channels last, four fifths fused, twice with a DataLoader."""
    for planned in expand(["sweep=tune", "device=cpu", "epochs=3", f"results={tmp_path}"]):
        run = planned.run
        time_s = 8.0 * (0.5 if run.precision == "bf16" else 1.0) * (1.25 if run.channels_last else 1.0)
        time_s *= (0.8 if run.optimizer.implementation == "fused" else 1.0) * (1 + (run.loader.name == "dataloader"))
        published(run, steady(time_s, started_at=1.7e9 + 1e5 * run.repeat))
    runs = load(tmp_path)
    for key, usual, other, ratio, pairs in (
        ("precision", "fp32", "bf16", 0.5, 2),
        ("channels_last", "false", "true", 1.25, 3),
        ("optimizer.implementation", "auto", "fused", 0.8, 1),
        ("loader", "resident", "dataloader", 2.0, 1),
    ):
        rows = by(runs, key, usual, other).rows
        assert ({row.time.median for row in rows}, len(rows)) == ({ratio}, pairs), key
