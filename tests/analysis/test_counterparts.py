"""Every run is held against one device of the same seed; more than the ideal speed-up is not believed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest
import torch

from analysis import by, compare, format_exclusions, load
from analysis.comparison.counterparts import (
    COARSE_SATURATED,
    GROWTH_PER_STEP,
    NO_COUNTERPART,
    NOT_ALIKE,
    OTHER_DATA,
    SATURATED,
    SPREAD,
    allowed,
    held_against_one_device,
    mean_loss,
)
from analysis.comparison.exclusions import Exclusion, excluded
from analysis.comparison.summary import summary
from analysis.comparison.verdict import SpeedVerdict
from analysis.report.warnings import warnings
from analysis.runs.reader import Runs
from parallelbench.config.components import Shard
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.training.checks.comparability import UNIT_ROUNDOFF
from parallelbench.training.torch_session import build_model
from parallelbench.world.numerics import Numerics, sums
from tests.analysis.factory import Fake, config, one_and_two, published
from tests.analysis.made_up import IN_TWO, SPEED_UP, SWEEPS, WOBBLE, altered, in_environments, slower
from tests.strategies.training import configure, shard_loader

pytestmark = pytest.mark.slow

DDP: dict[str, Any] = {"strategy": "ddp", "devices": 2}


def two_sides(root: Path, fake: Fake, *, repeats: int = 2, **changes: Any) -> Runs:
    """Single × 1 that takes 10 s per epoch, and ddp × 2."""
    one_and_two(root, [(Fake(epoch_time_s=lambda epoch, rank: 10.0), fake)] * repeats, **changes)
    return load(root)


def of_ddp(runs: Runs) -> dict[str, Any]:
    rows = held_against_one_device(runs)
    return rows.sort("excess", descending=True, nulls_last=True).row(0, named=True)


def six_seconds(**changes: Any) -> Fake:
    return Fake(epoch_time_s=lambda epoch, rank: 6.0 + epoch / 100, **changes)


def test_equal_losses_pass_and_others_exclude_a_run_everywhere(usual: Runs) -> None:
    assert of_ddp(usual)["excess"] == 0.0
    assert excluded(usual).is_empty()
    unlike = altered(usual, "epochs", train_loss=pl.col("train_loss") + pl.when(IN_TWO).then(0.01).otherwise(0.0))
    gone = excluded(unlike)
    assert gone["exclusion"].to_list() == [Exclusion.UNLIKE_ONE_DEVICE.value] * 6
    assert "2.01" in gone["exclusion_detail"][0]
    assert format_exclusions(unlike) == ["ddp × 2: 6 of 6 runs do not count (6 unlike one device)."]
    assert summary(unlike).filter(pl.col("strategy") == "ddp")["speed_up"].to_list() == [None]
    with pytest.raises(ConfigError):
        by(unlike, "strategy", "single", "ddp")
    with pytest.raises(ConfigError):
        compare(unlike, unlike.only(set(gone["run_id"])))


def test_the_difference_may_be_as_large_as_rounding_explains(usual: Runs, tmp_path: Path) -> None:
    steps = config(tmp_path).steps_per_epoch
    limit = SPREAD * UNIT_ROUNDOFF["fp32"] * math.exp(GROWTH_PER_STEP * (steps + 1))  # it comes after the update
    for share, excluded_runs in ((0.9, 0), (1.1, 6)):
        off = pl.when(IN_TWO).then(1 + share * limit).otherwise(1.0)
        runs = altered(usual, "epochs", test_loss=pl.col("test_loss") * off)
        assert of_ddp(runs)["excess"] == pytest.approx(share, rel=1e-3)
        assert excluded(runs).height == excluded_runs


@pytest.mark.parametrize(("kind", "excluded_runs"), [("test_loss", 0), ("train_loss", 2)])
def test_after_a_single_step_only_the_loss_before_the_update_is_rounding(
    kind: str, excluded_runs: int, tmp_path: Path
) -> None:
    """Adam's first update makes whole steps of last bits."""
    whole = config(tmp_path).data.train_samples
    of_one = Fake(epoch_time_s=lambda epoch, rank: 10.0)
    other: Any = {kind: lambda epoch: getattr(of_one, kind)(epoch) * (1 + 1e-4)}
    runs = two_sides(tmp_path, six_seconds(**other), batch_size=whole, optimizer="adam")
    assert excluded(runs).height == excluded_runs


@pytest.mark.parametrize(
    ("fake", "single", "why"),
    [
        (six_seconds(rounding=None), {}, NOT_ALIKE),
        (six_seconds(), {"repeat": 5}, NO_COUNTERPART),
        (six_seconds(), {"scaling": "weak"}, f"{NO_COUNTERPART} (expected with scaling=weak)"),
        (six_seconds(data_sha256="1" * 64, train_loss=lambda epoch: 9.0), {}, OTHER_DATA),
    ],
)
def test_what_was_not_held_against_one_device_is_said(
    tmp_path: Path, fake: Fake, single: dict[str, Any], why: str
) -> None:
    published(config(tmp_path, **single), Fake(epoch_time_s=lambda epoch, rank: 10.0))
    published(config(tmp_path, **DDP, **{k: v for k, v in single.items() if k != "repeat"}), fake)
    told = "Losses of the training, which parity does not check, are not held against one device's"
    line = f"{told}: ddp × 2: {why}."
    assert line in format_exclusions(load(tmp_path))
    assert line in warnings(load(tmp_path))


def test_a_run_that_failed_is_no_counterpart(tmp_path: Path) -> None:
    published(config(tmp_path), Fake(parity_passed=False))
    published(config(tmp_path, **DDP), six_seconds())
    assert of_ddp(load(tmp_path))["unchecked"] == NO_COUNTERPART


@pytest.mark.parametrize(("speed_up", "believed"), [(2.04, True), (2.17, False)])
def test_more_than_the_ideal_speed_up_is_not_believed(usual: Runs, speed_up: float, believed: bool) -> None:
    runs = slower(usual, *(SPEED_UP / speed_up / wobble for wobble in WOBBLE))
    row = summary(runs).filter(pl.col("strategy") == "ddp").row(0, named=True)
    assert row["speed_up"] == (pytest.approx(speed_up) if believed else None)
    if not believed:
        assert row["verdict"] == "not comparable"
        with pytest.raises(ConfigError, match="times as fast as 1 device"):
            by(runs, "configuration", "single × 1", "ddp × 2")


# --- the limit itself: right trainings that differ in the order of sums, and wrong ones


class Losses(NamedTuple):
    """What a training has as losses: of each step, and of each epoch in training and on the test set."""

    steps: list[float]
    train: list[float]
    test: list[float]


@pytest.mark.parametrize(
    ("across", "differs", "refused"), [("host", False, True), ("python", False, True), ("python", True, False)]
)
def test_a_key_that_differs_nowhere_makes_no_speed_up_believed(
    usual: Runs, across: str, differs: bool, refused: bool
) -> None:
    """A user may name any key in --across; only what differs can explain the speed-up."""
    runs = in_environments(SWEEPS["too fast"].alter(usual), {}, {"python": "another"} if differs else {})
    asked = ("configuration", "single × 1", "ddp × 2")
    if not refused:
        assert by(runs, *asked, across=[across]).rows[0].verdict is SpeedVerdict.FASTER
        return
    with pytest.raises(ConfigError, match="is not believed"):
        by(runs, *asked, across=[across])


def losses(run: RunConfig, *, pieces: int = 1, fault: str = "") -> Losses:
    """Train; gradients are summed over `pieces` of a batch."""
    numerics, loader = Numerics(run.precision, "cpu"), shard_loader(run, Shard())
    model = build_model(run).to(numerics.dtype)
    optimizer = run.optimizer.build(model.parameters(), run, "cpu")
    taken, found = 0, Losses([], [], [])
    for epoch in range(1, run.epochs + 1):
        model.train()
        for batch in loader.train(epoch):
            taken += 1
            optimizer.zero_grad()
            total = torch.zeros(2, dtype=torch.float64)
            for images, labels in zip(batch.images.chunk(pieces), batch.labels.chunk(pieces), strict=True):
                with numerics.autocast():
                    logits = model(images)
                loss = numerics.loss(logits, labels)
                (loss * len(labels) / batch.size).backward()
                total += sums(loss, logits, labels).tensor()
            found.steps.append(total[0].item() / batch.size)
            if fault == "rate" and taken > 3:
                optimizer.param_groups[0]["lr"] = run.optimizer.lr * 1.01
            if not (fault == "idles" and taken > 5 and taken % 2):
                optimizer.step()
        model.eval()
        evaluated = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for batch in loader.test():
                with numerics.autocast():
                    logits = model(batch.images)
                evaluated += sums(numerics.loss(logits, batch.labels), logits, batch.labels).tensor()
        found.train.append(sum(found.steps[-run.steps_per_epoch :]) / run.steps_per_epoch)
        found.test.append(evaluated[0].item() / run.data.test_samples)
    return found


def excess(run: RunConfig, one: Losses, other: Losses, *, of: Sequence[str] = Losses._fields) -> float:
    """The largest difference ÷ what is allowed."""
    rounding, optimizer = UNIT_ROUNDOFF[run.precision], run.optimizer.name
    worst = 0.0
    for kind in of:
        frame = pl.DataFrame({"one": getattr(one, kind), "other": getattr(other, kind)})
        means = frame.select(
            mean_loss(pl.col("one", "other"), pl.col("one").is_not_null().cast(pl.Float64)),
            row=pl.int_range(1, pl.len() + 1),
        )
        off = (pl.col("other") / pl.col("one") - 1).abs()
        taken = pl.col("row") * (1 if kind == "steps" else run.steps_per_epoch)
        limit = allowed(pl.lit(rounding), taken, pl.lit(optimizer))
        worst = max(worst, means.select((off / limit).max()).item())
    return worst


def digits(*overrides: str) -> RunConfig:
    return configure("data=digits", "epochs=4", "batch_size=128", *overrides)


@pytest.mark.parametrize(
    ("model", "optimizer", "precision"),
    [
        *(("mlp", "sgd", each) for each in ("bf16", "fp64")),
        *(("mlp", "adam", each) for each in ("fp32", "fp64")),
        *(("mlp", "adagrad", each) for each in ("fp32", "bf16")),
        # A larger one with each optimizer and in each precision.
        *(("cnn_small", *each) for each in (("sgd", "fp32"), ("adam", "bf16"), ("adagrad", "fp64"))),
    ],
)
@pytest.mark.cases("mlp-sgd-*", "mlp-adam-fp32")
def test_right_trainings_stay_within_the_limit(model: str, optimizer: str, precision: str) -> None:
    rate = [] if optimizer == "sgd" else ["optimizer.lr=0.001"]
    run = digits(f"model={model}", f"optimizer={optimizer}", f"precision={precision}", *rate)
    one = losses(run)
    assert excess(run, one, losses(run, pieces=4)) <= 1


@pytest.mark.cases("sgd-idles")
@pytest.mark.parametrize(("optimizer", "fault"), [("sgd", "idles"), ("adam", "idles")])
def test_wrong_trainings_exceed_it(optimizer: str, fault: str) -> None:
    """Even where nothing else is looked at; the closing check compares single steps, and finds smaller faults."""
    rate = [] if optimizer == "sgd" else ["optimizer.lr=0.001"]
    run = digits("model=mlp", f"optimizer={optimizer}", "precision=fp32", *rate)
    assert excess(run, losses(run), losses(run, fault=fault)) > 1


@pytest.mark.exhaustive
def test_a_wrong_rate_shows_in_the_first_steps_and_in_no_epoch() -> None:
    """A rate that is 1 % too high from the fourth step on: far below what a mean over 59 steps could tell."""
    run = digits("model=mlp", "optimizer=sgd", "precision=fp32", "epochs=1", "batch_size=24")
    right, wrong = losses(run), losses(run, fault="rate")
    assert excess(run, right, losses(run, pieces=4)) <= 1
    assert excess(run, right, wrong, of=["steps"]) > 1 > excess(run, right, wrong, of=["train", "test"])


def test_the_limit_grows_with_rounding_and_steps_up_to_an_end() -> None:
    def limit(precision: str, steps: int, optimizer: str = "sgd") -> float:
        frame = pl.DataFrame({"rounding": UNIT_ROUNDOFF[precision], "steps": steps, "optimizer": optimizer})
        return float(frame.select(allowed(pl.col("rounding"), pl.col("steps"), pl.col("optimizer"))).item())

    assert limit("fp64", 20) < limit("fp32", 20) < limit("fp32", 40) < limit("bf16", 40) == COARSE_SATURATED
    assert limit("fp64", 10**7) == SATURATED
    assert limit("fp64", 2, optimizer="adagrad") == SATURATED
    assert limit("fp64", 1, optimizer="adagrad") < 1e-10, "no update yet"
