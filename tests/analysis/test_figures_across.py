"""Figures across works: planted rates and curves come out again, in the chart's data and in its sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vl_convert

from analysis import load, summary, text
from analysis.claims.figures.batch_regimes import batch_regimes, fit, steps
from analysis.claims.figures.models import models
from analysis.claims.figures.uw_benchmark import throughput_data
from analysis.figures.lines import context_length, throughput_batch
from analysis.figures.scaling import scaling
from tests.analysis.factory import MIB, Fake, config, one_and_two, published, steady
from tests.analysis.made_up import rows_of

pytestmark = pytest.mark.slow


def rate_of(root: Path, samples_per_s: float, **changes: Any) -> None:
    run = config(root, **changes)
    time_s = run.steps_per_epoch * run.global_batch_size / samples_per_s
    published(run, Fake(epoch_time_s=lambda epoch, rank: 9 * time_s if epoch == 1 else time_s))


@pytest.mark.exhaustive
def test_rates_against_batches_are_paired_by_repeat(tmp_path: Path) -> None:
    for repeat in range(3):
        drift = 1 + repeat / 10
        for batch, one, two in ((64, 100.0, 120.0), (128, 110.0, 150.0), (256, 150.0, 240.0)):
            rate_of(tmp_path, one * drift, repeat=repeat, batch_size=batch)
            rate_of(tmp_path, two * drift, repeat=repeat, batch_size=batch, strategy="ddp", devices=2)
    runs = load(tmp_path)
    assert throughput_batch.finding(runs) == (
        "From batch size 64 to 256, samples per second are 1.50 times as many (1.50–1.50) with single × 1 and "
        "2.00 times as many (2.00–2.00) with ddp × 2."
    )
    chart = throughput_batch.figure(runs)
    assert chart is not None
    assert "ddp × 2" in vl_convert.vegalite_to_svg(chart.to_dict())
    assert throughput_data.figure(runs) is None
    assert throughput_data.finding(runs) == "No two runs that count differ in training samples only."


def test_rates_against_sizes_of_the_training_set(tmp_path: Path) -> None:
    for copies, rate in ((1, 1000.0), (8, 900.0)):
        rate_of(tmp_path, rate, data={"name": "mnist", "copies": copies})
    rate_of(tmp_path, 500.0, data={"name": "mnist", "copies": 8}, batch_size=64)  # other work, at one size only
    runs = load(tmp_path)
    assert throughput_data.finding(runs) == (
        "From training samples 60,000 to 480,000, samples per second are 0.90 times as many with single × 1."
    )
    assert throughput_batch.finding(runs) == (
        "From batch size 64 to 128, samples per second are 1.80 times as many with single × 1."
    )


def test_time_per_token_and_memory_against_the_length_of_the_context(tmp_path: Path) -> None:
    """As in the sweep of lengths: each step has 4,096 tokens, however long a sample is."""
    for length, time_us, held in ((256, 2.0, 100), (1024, 2.0, 110), (4096, 5.0, 200)):
        samples = 4096 // length
        data = {"name": "tokens", "sequence": length, "train_samples": 4 * samples}
        model = {"name": "gpt_tiny", "sequence": length}
        for devices in (1, 2):
            run = config(
                tmp_path,
                data=data,
                model=model,
                batch_size=samples,
                devices=devices,
                strategy=("single", "ddp")[devices > 1],
            )
            time_s = 4 * 4096 * time_us / 1e6 / devices
            fake = Fake(
                epoch_time_s=lambda epoch, rank, time_s=time_s: time_s,  # type: ignore[misc]
                host_peak_rss_bytes=lambda epoch, rank, n=devices, held=held: held * MIB // n,  # type: ignore[misc]
            )
            published(run, fake)
    runs = load(tmp_path)
    rows = rows_of(context_length.figure(runs))
    found: dict[str, dict[tuple[str, int], float]] = {}
    for row in rows:
        found.setdefault(row["panel"].rpartition(" — ")[2], {})[row["configuration"], row["x"]] = row["value"]
    assert found == {
        "Time per token (µs)": pytest.approx(
            {("single × 1", 256): 2, ("single × 1", 1024): 2, ("single × 1", 4096): 5}
            | {("ddp × 2", 256): 1, ("ddp × 2", 1024): 1, ("ddp × 2", 4096): 2.5}
        ),
        "Host memory (RSS), largest process (MiB)": {
            ("single × 1", 256): 100,
            ("single × 1", 1024): 110,
            ("single × 1", 4096): 200,
            ("ddp × 2", 256): 50,
            ("ddp × 2", 1024): 55,
            ("ddp × 2", 4096): 100,
        },
    }
    assert context_length.finding(runs) == (
        "From tokens per sample 256 to 4,096, tokens per second are 0.40 times as many with single × 1 and "
        "0.40 times as many with ddp × 2."
    )
    assert throughput_batch.figure(runs) is None


def test_lengths_at_unlike_batches_are_not_divided_by_each_other(tmp_path: Path) -> None:
    """Twice the samples of a step take twice the time; the largest of both was never measured."""
    for length, batch, tokens_per_s in ((64, 8, 1000.0), (64, 16, 1600.0), (128, 8, 1200.0)):
        data = {"name": "tokens", "sequence": length, "train_samples": 64}
        run = config(tmp_path, data=data, model={"name": "gpt_tiny", "sequence": length}, batch_size=batch)
        time_s = 64 * length / tokens_per_s
        published(run, Fake(epoch_time_s=lambda epoch, rank, time_s=time_s: time_s))  # type: ignore[misc]
    assert context_length.finding(load(tmp_path)) == (
        "From tokens per sample 64 to 128, tokens per second are 1.20 times as many with single × 1."
    )


def test_as_many_devices_of_more_nodes_have_a_line_of_their_own(tmp_path: Path) -> None:
    for repeat, (near, far) in enumerate(((1.5, 1.1), (1.9, 1.3))):
        published(config(tmp_path, repeat=repeat), steady(19.0))
        published(config(tmp_path, repeat=repeat, strategy="ddp", devices=2), steady(19.0 / near))
        published(config(tmp_path, repeat=repeat, strategy="ddp", devices=2, nodes=2), steady(19.0 / far))
    runs = load(tmp_path)
    values = rows_of(scaling.figure(runs))
    rows = {row["variant"]: row for row in values if row.get("label") and row["panel"].endswith("Steady state")}
    table = {row["configuration"]: row for row in summary(runs).to_dicts()}
    for variant, configuration in (("ddp", "ddp × 2"), ("ddp on 2 nodes", "ddp × 2 on 2 nodes")):
        assert rows[variant]["median"] == pytest.approx(table[configuration]["speed_up"])
        assert rows[variant]["label"] == text.percent(table[configuration]["efficiency"])


def test_a_configuration_that_lacks_the_largest_batch_is_told_over_its_own_range(tmp_path: Path) -> None:
    for batch, one, two in ((64, 100.0, 100.0), (128, 150.0, 180.0), (256, 200.0, None)):
        rate_of(tmp_path, one, batch_size=batch)
        if two is not None:
            rate_of(tmp_path, two, batch_size=batch, strategy="ddp", devices=2)
    assert throughput_batch.finding(load(tmp_path)) == (
        "From batch size 64 to 256, samples per second are 2.00 times as many with single × 1; "
        "from batch size 64 to 128, samples per second are 1.80 times as many with ddp × 2."
    )


def test_runs_that_do_not_count_are_in_no_rate(tmp_path: Path) -> None:
    for batch in (64, 128):
        published(config(tmp_path, batch_size=batch), Fake(oversubscribed=batch == 64))
    assert throughput_batch.figure(load(tmp_path)) is None


@pytest.mark.exhaustive
def test_models_are_beside_each_other_by_configuration(tmp_path: Path) -> None:
    for model, one, two in (("mlp", 4.0, 6.0), ("cnn_small", 40.0, 20.0)):
        one_and_two(tmp_path, [(steady(one, first_s=one), steady(two, first_s=two))] * 3, model=model)
    published(config(tmp_path, model="mlp", batch_size=64))  # no other model at this batch
    runs = load(tmp_path)
    assert models.finding(runs) == (
        "Once warm, beside one device of its framework, ddp × 2 is 0.67 (0.67–0.67) [mlp] to 2.00 (2.00–2.00) "
        "[cnn_small] times as fast and takes 2.00 (2.00–2.00) times the memory."
    )
    chart = models.figure(runs)
    values = rows_of(chart)
    rows = [row for row in values if row["panel"].startswith("Training time")]
    medians = {(row["model"], row["configuration"]): row["median"] for row in rows}
    assert medians == {
        ("mlp", "single × 1"): 12.0,
        ("mlp", "ddp × 2"): 18.0,
        ("cnn_small", "single × 1"): 120.0,
        ("cnn_small", "ddp × 2"): 60.0,
    }
    assert "ddp × 2" in vl_convert.vegalite_to_svg(chart.to_dict())
    shapes = chart.to_dict()["spec"]["layer"][1]["encoding"]["shape"]["scale"]
    assert len(dict(zip(shapes["domain"], shapes["range"], strict=True))) == len({*shapes["range"]}) == 2


def test_models_of_one_name_with_other_options_are_not_one(tmp_path: Path) -> None:
    for hidden, seconds in ([64], 3.0), ([4096], 300.0):
        fake = Fake(epoch_time_s=lambda epoch, rank, s=seconds: s)  # type: ignore[misc]
        published(config(tmp_path, model={"name": "mlp", "hidden": hidden}), fake)
    values = rows_of(models.figure(load(tmp_path)))
    times = {row["model"]: row["median"] for row in values if row["panel"].startswith("Training time")}
    assert times == {"mlp, hidden [64]": 9.0, "mlp, hidden [4096]": 900.0}
    assert all(row["group"] for row in values), "the page filters by group and configuration"


def regimes(root: Path, *, least: float, critical: float) -> None:
    """Steps to 90 % as the curve has them, at the better of two learning rates."""
    for batch in (8, 16, 32, 64, 128, 256, 512, 1024):
        for rate, slower in ((0.1, 1.0), (0.2, 2.0)):
            run = config(
                root,
                batch_size=batch,
                epochs=400,
                optimizer={"name": "sgd", "lr": rate},
                measure={"steps_per_epoch": 1, "parity": False},
            )
            needed = round(slower * least * (1 + critical / batch))
            published(run, Fake(test_accuracy=lambda epoch, n=needed: 0.92 if epoch >= n else 0.3, parity_passed=None))


@pytest.mark.exhaustive
def test_the_regimes_of_a_planted_curve(tmp_path: Path) -> None:
    regimes(tmp_path, least=20, critical=72)
    runs = load(tmp_path)
    data = steps(runs)
    assert data["steps_to_accuracy"].to_list() == [
        round(20 * (1 + 72 / b)) for b in (8, 16, 32, 64, 128, 256, 512, 1024)
    ]
    curve = fit(data)
    assert curve.least_steps == pytest.approx(20, rel=0.03)
    assert curve.critical_batch == pytest.approx(72, rel=0.05)
    # Doubling a batch b saves b_c ÷ (2·(b + b_c)) of the steps; slopes of −0.9 and −0.1 lie at b_c ÷ 9 and 9·b_c.
    assert curve.perfect_up_to == pytest.approx(curve.critical_batch / 9)
    assert curve.maximal_from == pytest.approx(curve.critical_batch * 9)
    assert "to 90 % test accuracy" in batch_regimes.finding(runs).lower()
    chart = batch_regimes.figure(runs)
    assert chart is not None
    assert "maximal" in vl_convert.vegalite_to_svg(chart.to_dict())


def test_a_bend_beyond_the_batches_has_no_formula(tmp_path: Path) -> None:
    for batch in (8, 16, 32, 64):
        run = config(tmp_path, batch_size=batch, epochs=200, measure={"steps_per_epoch": 1, "parity": False})
        needed = 1280 // batch  # perfect scaling throughout
        published(run, Fake(test_accuracy=lambda epoch, n=needed: 0.92 if epoch >= n else 0.3, parity_passed=None))
    finding = batch_regimes.finding(load(tmp_path))
    assert "near perfect up to a batch above the largest, 64" in finding
    assert "its bend lies where no batch was measured; the curve fits all runs within a factor of 1.0" in finding
    assert "÷ b" not in finding


def test_steps_that_are_known_once_per_epoch_show_no_regimes(tmp_path: Path) -> None:
    """All batches reach 90 % in their first epoch, of N ÷ b steps: which says nothing about how many they need."""
    for batch in (16, 32, 64, 128):
        published(config(tmp_path, batch_size=batch), Fake(test_accuracy=lambda epoch: 0.92))
    runs = load(tmp_path)
    assert batch_regimes.finding(runs) == (
        "Accuracy was measured too rarely to tell how the steps depend on the batch: a batch of 16 reaches 90 % test "
        "accuracy after 1 to 90 steps, as an epoch is tested at its end; measure again with "
        "measure.steps_per_epoch=1, and as many more epochs."
    )
    chart = batch_regimes.figure(runs)
    rows = rows_of(chart)
    assert [(row["x"], row["least"], row["steps_to_accuracy"]) for row in rows] == [
        (16, 1, 90),
        (32, 1, 45),
        (64, 1, 22),
        (128, 1, 11),
    ]
    vl_convert.vegalite_to_svg(chart.to_dict())


def test_regimes_are_of_one_configuration_and_of_runs_that_trained_alike(tmp_path: Path) -> None:
    for batch in (8, 16, 32, 64):
        for nodes in (1, 2):
            changes = {
                "measure": {"steps_per_epoch": 1, "parity": False},
                "strategy": "ddp",
                "devices": 2,
                "nodes": nodes,
            }
            run = config(tmp_path, batch_size=batch, epochs=20, **changes)
            needed = 2 * nodes + 64 // batch
            fake = Fake(test_accuracy=lambda epoch, n=needed: 0.92 if epoch >= n else 0.3, parity_passed=None)  # type: ignore[misc]
            published(run, fake)
    failed = config(tmp_path, batch_size=8, epochs=20, repeat=1, strategy="ddp", devices=2)
    published(failed, Fake(test_accuracy=lambda epoch: 0.92, parity_passed=False))
    data = steps(load(tmp_path))
    assert data["panel"].n_unique() == 2
    assert sorted(data.filter(x=8)["steps_to_accuracy"]) == [10, 12]
