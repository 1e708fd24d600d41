"""Figures of the first two epochs against devices: planted rates and times come out, from one device on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis import load
from analysis.claims.figures.uw_benchmark import FIRST, SECOND, epoch_rates, epoch_time_data
from analysis.figures import draw, specification, svg
from analysis.figures.lines import loss_label
from parallelbench.config.identity import canonical_json
from tests.analysis.factory import Fake, config, published
from tests.analysis.made_up import environment, rows_of

pytestmark = pytest.mark.slow


def timed(root: Path, first_s: float, second_s: float, **changes: Any) -> None:
    changes = {"data": {"name": "mnist"}, "epochs": 2} | changes
    published(config(root, **changes), Fake(epoch_time_s=lambda epoch, rank: first_s if epoch == 1 else second_s))


@pytest.mark.exhaustive
def test_rates_are_samples_by_the_time_of_the_epoch_and_lines_begin_at_one_device(tmp_path: Path) -> None:
    """468 steps of 128 images: 59,904 samples an epoch."""
    for repeat, drift in enumerate((1.0, 1.1, 1.2)):
        timed(tmp_path, 20.0 * drift, 10.0 * drift, repeat=repeat)
        for strategy, devices, second_s in (("ddp", 2, 6.0), ("ddp", 4, 4.0), ("fsdp", 2, 8.0)):
            changes = {"strategy": strategy, "devices": devices, "repeat": repeat}
            timed(tmp_path, 2 * second_s * drift, second_s * drift, **changes)
    timed(tmp_path, 1.0, 1.0, model="mlp")  # no other number of devices: nothing to show of it
    runs = load(tmp_path)
    chart = epoch_rates.figure(runs)
    rows = rows_of(chart)
    assert {row["panel"] for row in rows} == {"mnist · cnn_small"}
    ends = {(row["variant"], row["x"], row["which"]): row["median"] for row in rows if row["first"]}
    of = {"single": {1: 11.0}, "ddp": {1: 11.0, 2: 6.6, 4: 4.4}, "fsdp": {1: 11.0, 2: 8.8}}
    second = {
        (name, devices, SECOND): pytest.approx(59_904 / time_s)
        for name, times in of.items()
        for devices, time_s in times.items()
    }
    first = {(*key[:2], FIRST): pytest.approx(rate.expected / 2) for key, rate in second.items()}
    assert ends == second | first
    origins = [row for row in rows if row["configuration"] is None]
    assert {(row["variant"], row["x"], row["repeat"]) for row in origins} == {("ddp", 1, None), ("fsdp", 1, None)}
    assert epoch_rates.finding(runs) == (
        "In the second epoch, samples per second are 13,615 with ddp × 4 (first epoch: 6,807); "
        "9,076 with ddp × 2 (first epoch: 4,538); 6,807 with fsdp × 2 (first epoch: 3,404); and "
        "5,446 with single × 1 (first epoch: 2,723)."
    )
    image = svg(specification(chart))
    assert all(words in image for words in ("Second epoch", "First epoch", "fsdp"))


def test_frameworks_begin_at_their_own_one_device(tmp_path: Path) -> None:
    times = (("single", 1, 10.0), ("ddp", 2, 5.0), ("tf_single", 1, 40.0), ("tf_mirrored", 2, 20.0))
    for strategy, devices, time_s in times:
        framework = "tensorflow" if strategy.startswith("tf_") else "torch"
        fake = Fake(epoch_time_s=lambda epoch, rank, s=time_s: s, environment=environment(framework=framework))  # type: ignore[misc]
        published(config(tmp_path, data={"name": "mnist"}, epochs=2, strategy=strategy, devices=devices), fake)
    rows = rows_of(epoch_rates.figure(load(tmp_path)))
    starts = {row["variant"]: row["median"] for row in rows if row["x"] == 1}
    assert starts["ddp"] == starts["single"] == pytest.approx(5990.4)
    assert starts["tf_mirrored"] == starts["tf_single"] == pytest.approx(1497.6)


@pytest.mark.exhaustive
def test_sizes_of_the_training_set_share_an_axis_and_are_named_once(tmp_path: Path) -> None:
    for copies in (1, 4, 8):
        for strategy, devices in (("single", 1), ("ddp", 2), ("ddp", 4), ("fsdp", 4)):
            data = {"name": "mnist", "copies": copies}
            time_s = 10.0 * copies / devices
            timed(tmp_path, 3 * time_s, time_s, data=data, strategy=strategy, devices=devices)
    runs = load(tmp_path)
    (figure,) = draw(runs, ["epoch_time_data"])
    rows = rows_of(figure.chart)
    assert {row["panel"] for row in rows} == {"mnist · cnn_small"}, "one axis for all sizes"
    lines = {(row["variant"], row["train_samples"], row["x"]): row["median"] for row in rows if row["first"]}
    assert {key[1:]: time_s for key, time_s in lines.items() if key[0] == "ddp"} == {
        (60_000 * copies, devices): 10.0 * copies / devices for copies in (1, 4, 8) for devices in (1, 2, 4)
    }
    labels = sorted(row["label"] for row in rows if row["label"])
    assert labels == ["240,000", "480,000", "60,000"]
    assert figure.finding.replace("\u202f", " ").split("\n")[0] == (
        "A second epoch takes 2.50 to 20.0 s with ddp × 4 (60,000 to 480,000 samples); "
        "2.50 to 20.0 s with fsdp × 4 (60,000 to 480,000 samples); "
        "5.00 to 40.0 s with ddp × 2 (60,000 to 480,000 samples); and "
        "10.0 to 80.0 s with single × 1 (60,000 to 480,000 samples)."
    )
    image = svg(specification(figure.chart))
    assert image.count(">480,000<") == 1


def test_a_disturbed_second_epoch_is_marked_and_not_ranked(tmp_path: Path) -> None:
    """The later epochs were not, so the run counts."""
    for copies in (1, 4):
        for strategy, devices in (("single", 1), ("ddp", 2)):
            run = config(
                tmp_path, data={"name": "mnist", "copies": copies}, strategy=strategy, devices=devices, epochs=4
            )
            taken_s = 5.0 if strategy == "ddp" else 0.0
            fake = Fake(
                epoch_time_s=lambda epoch, rank: 10.0,
                others_time_s=lambda epoch, rank, s=taken_s: s if epoch == 2 else 0.0,
            )
            published(run, fake)
    runs = load(tmp_path)
    marked = {row["configuration"] for row in rows_of(epoch_time_data.figure(runs)) if row["disturbed"]}
    assert marked == {"ddp × 2"}
    assert "apart from these" in epoch_time_data.finding(runs)


def test_one_size_or_one_number_of_devices_makes_no_figure(tmp_path: Path) -> None:
    timed(tmp_path, 2.0, 1.0)
    timed(tmp_path, 2.0, 1.0, epochs=1, strategy="ddp", devices=2)
    runs = load(tmp_path)
    assert epoch_rates.figure(runs) is None
    assert epoch_rates.finding(runs) == "No kind of work that counts has a second epoch on several numbers of devices."
    assert epoch_time_data.figure(runs) is None
    assert "several sizes of the training set" in epoch_time_data.finding(runs)


PLAIN = {"name": "cross_entropy", "label_smoothing": 0.0}


def test_losses_of_ones_own_are_named_and_runs_from_before_losses_could_be_chosen_had_nats() -> None:
    focal = [canonical_json({"loss": {"_target_": "mine.Focal", "name": "focal", "gamma": g}}) for g in (1, 2)]
    assert loss_label(focal[:1] * 2) == "Loss (focal)"
    assert loss_label(focal) == "Loss", "of two gammas they are two losses"
    before, today = "{}", canonical_json({"loss": {"_target_": "parallelbench.optim.losses.CrossEntropy", **PLAIN}})
    assert loss_label([before]) == loss_label([before, today]) == "Cross entropy (nats)"
    own = canonical_json({"loss": {"_target_": "mine.CrossEntropy", "name": "cross_entropy"}})
    assert loss_label([own]) == "Loss (cross_entropy)", "somebody's own may be anything"
