"""What others disturbed is shown, marked, and compared with nothing: in tables, figures, sentences and on the page."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from rich.console import Console

from analysis import load, summary_table
from analysis.comparison.exclusions import excluded, format_exclusions
from analysis.comparison.summary import displayed, summary
from analysis.figures import draw
from analysis.figures.chart import DISTURBED
from analysis.metrics.columns import page_columns, summary_columns
from analysis.metrics.disturbance import is_disturbed, undisturbed_epochs
from analysis.report import warnings
from analysis.report.page import render
from analysis.report.tables import cells
from analysis.runs.reader import Runs
from analysis.text import DISTURBED_MARK
from tests.analysis.factory import as_words, config, published, steady, words_of
from tests.analysis.made_up import IN_TWO, altered, disturbed, rows_of


def terminal(runs: Runs) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(summary_table(runs))
    return out.getvalue()


@pytest.mark.parametrize("both", [False, True])
def test_times_are_shown_and_marked(both: bool, usual: Runs) -> None:
    """That nothing is compared: `test_every_room_gives_the_answers`."""
    runs = disturbed(usual, 3, 4)
    if both:
        runs = altered(runs, others_time_s=pl.when(pl.col("epoch") > 2).then(5.0).otherwise(0.0))
    rows = summary(runs).sort("devices")
    assert rows["disturbed"].to_list() == [both, True]
    shown, page = terminal(runs), render(runs, [], {})
    for time, found in (("12.5", both), ("7.86", True)):
        for room in (shown, page):
            assert (f"{time}{DISTURBED_MARK}" in room) == found
            assert time in room
    first = format_exclusions(runs)[0].partition(" When ")[0]
    assert words_of(page).count(as_words(first)) == 2, "in the headline, and among the warnings"
    (runtime,) = draw(runs, ["runtime"])
    assert DISTURBED in runtime.finding
    labels = {(row["configuration"], row["label"][-1] == DISTURBED_MARK) for row in rows_of(runtime.chart)}
    assert labels == {("single × 1", both), ("ddp × 2", True)}


def drawn(runs: Runs, name: str) -> list[dict[str, Any]]:
    (figure,) = draw(runs, [name])
    return rows_of(figure.chart)


def test_times_of_disturbed_epochs_are_marked_though_the_run_counts(usual: Runs) -> None:
    """Of its first two epochs, and of what they are part of; of the steady ones, together, others took 3 %."""
    runs = disturbed(usual, 1, 2, share=0.09)
    single, ddp = summary(runs).sort("devices").rows(named=True)
    resting = {"first_epoch_time_s", "second_epoch_time_s", "total_training_time_s", "total_time_s", "device_hours"}
    resting |= {
        "device_hours_to_accuracy",
        "throughput_with_startup_samples_per_s",
        "time_to_accuracy_s",
        "energy_to_accuracy_j",
    }
    assert (ddp["disturbed"], ddp["verdict"]) == (False, "faster")
    flags = [f"{window}_disturbed" for window in ("first", "second", "steady", "whole")]
    assert [single[flag] for flag in flags] == [False] * 4
    assert [ddp[flag] for flag in flags] == [True, True, False, True]
    marked = {each.column.name for each in cells(ddp, page_columns("energy")) if each.shown.endswith(DISTURBED_MARK)}
    assert marked == {"energy_to_accuracy_j", "device_hours"}
    marked = {each.column.name for each in cells(ddp, summary_columns()) if each.shown.endswith(DISTURBED_MARK)}
    assert marked == resting & {column.name for column in summary_columns()}
    assert not [each for each in cells(single, summary_columns()) if each.shown.endswith(DISTURBED_MARK)]
    labels = {
        (name, row["panel"].partition(",")[0].partition(" (")[0])
        for name in ("runtime", "time_to_accuracy", "energy")
        for row in drawn(runs, name)
        if row["configuration"] == "ddp × 2" and row["label"].endswith(DISTURBED_MARK)
    }
    assert labels == {
        ("runtime", "First epoch"),
        ("time_to_accuracy", "To 90\u202f% test accuracy"),
        ("energy", "To the target"),
    }
    assert any("the training as a whole of 6 runs of ddp × 2" in line for line in warnings.warnings(runs))


def test_the_training_time_of_a_model_is_marked_where_others_disturbed_it(tmp_path: Path) -> None:
    for model in ("mlp", "cnn_small"):
        taken = lambda epoch, rank, model=model: 10.0 if (epoch, model) == (1, "mlp") else 0.0  # noqa: E731
        published(config(tmp_path, model=model), steady(10.0, others_time_s=taken))
    rows = drawn(load(tmp_path), "models")
    found = {(row["model"], row["panel"].partition(" ")[0]): row["disturbed"] for row in rows}
    assert found == {
        ("mlp", "Training"): True,
        ("mlp", "Host"): False,
        ("cnn_small", "Training"): False,
        ("cnn_small", "Host"): False,
    }


def test_hours_of_gpus_are_marked_as_the_times_that_they_are_made_of() -> None:
    (column,) = (each for each in page_columns("energy") if each.name == "gpu_hours")
    for found, shown in ((True, f"0.250{DISTURBED_MARK}"), (False, "0.250")):
        assert [each.shown for each in cells({"gpu_hours": 0.25, "disturbed": found}, [column])] == [shown]


@pytest.mark.parametrize(("share", "verdict"), [(0.04, "faster"), (0.5, "disturbed")])
def test_ranks_that_stood_still_were_disturbed(share: float, verdict: str, usual: Runs) -> None:
    """Nobody took their cores meanwhile. They stood still in two of three steady epochs, of about 7 s."""
    where = IN_TWO & pl.col("epoch").is_in([2, 3])
    runs = altered(usual, "epochs", suspended_s=pl.when(where).then(share * 7.0).otherwise(0.0))
    assert summary(runs).filter(configuration="ddp × 2")["verdict"].item() == verdict
    words = "ranks stood still for up to 3.5 s (SIGSTOP, a suspended job, a frozen machine)"
    found = verdict == "disturbed"
    assert any(words in line for line in format_exclusions(runs)) == found
    assert [detail for detail in excluded(runs)["exclusion_detail"] if words not in detail] == []
    whole = is_disturbed(runs, "total_training_time_s")
    assert whole == (set(excluded(runs)["run_id"]) if found else set())
    unmeasured = altered(runs, others_time_s=pl.lit(None, pl.Float64))
    assert (displayed(unmeasured)["exclusion"] == "disturbed").any() == found, "that alone is enough"


STOOD = "ranks stood still for up to 3.5 s (SIGSTOP, a suspended job, a frozen machine)"
TOOK = "took up to 48.0\u202f% of a core"


@pytest.mark.parametrize(
    ("taken", "suspended_s", "processes", "what"),
    [
        (0.48, 0.01, 1, f"{{}} {TOOK}"),
        (0.01, 0.01, 3, "{} computed on its GPU"),
        (0.48, 0.01, 3, f"{{}} {TOOK} and computed on its GPU"),
        (0.01, 3.5, 1, STOOD),
        (0.48, 3.5, 3, f"{STOOD}, and {{}} {TOOK} and computed on its GPU"),
    ],
)
def test_the_cause_is_the_one_whose_limit_was_exceeded(
    taken: float, suspended_s: float, processes: int, what: str, usual: Runs
) -> None:
    """10 ms of standing still and 1 % of a core are within the limits, and one process on a GPU is the run's own."""
    runs = altered(
        disturbed(usual, 2, 3, 4, share=taken),
        "epochs",
        suspended_s=pl.when(IN_TWO).then(suspended_s).otherwise(0.0),
        gpu_processes_max=pl.when(IN_TWO).then(processes).otherwise(1).cast(pl.Int64),
    )
    found = excluded(runs)
    assert len(found) == 6
    for detail in found["exclusion_detail"]:
        assert detail.startswith(f"in its steady epochs {what.format('others')}: when the machine is free")
    assert f"Others disturbed 6 runs of ddp × 2: {what.format('they')}. " in format_exclusions(runs)[0]


def test_runs_that_nobody_disturbed_decide_alone(usual: Runs) -> None:
    runs = altered(
        disturbed(usual, 3, 4), others_time_s=pl.when(pl.col("repeat") < 2).then("others_time_s").otherwise(0.0)
    )
    row = summary(runs).filter(configuration="ddp × 2").row(0, named=True)
    assert (row["disturbed"], row["repeats"], row["speed_up_pairs"]) == (False, 4, 4)
    assert row["steady_epoch_time_s"] == pytest.approx((13 * 1.02 + 14 * 0.98) / 1.6 / 2)
    assert row["verdict"] == "faster"
    assert not displayed(runs)["disturbed"].any()
    assert f"8.43{DISTURBED_MARK}" not in terminal(runs)
    assert "Others disturbed 2 runs of ddp × 2" in format_exclusions(runs)[0]
    assert "Other runs of the same count" in format_exclusions(runs)[0]


def test_disturbed_epochs_are_left_out_of_what_is_asked_of_epochs(usual: Runs) -> None:
    """Where a claim is about a time of an epoch; its accuracy is not in doubt."""
    runs, last = disturbed(usual, 1), int(usual.epochs["epoch"].max())  # type: ignore[arg-type]
    all_epochs = set(range(1, last + 1))
    for metric, of_two in (
        ("slowest_epoch_time_s", all_epochs - {1}),
        ("training_time_s", set()),  # of 20 s and three times about 8 s others took 9.6 s
        ("test_accuracy", all_epochs),
    ):
        kept = undisturbed_epochs(runs, metric).with_columns(pl.col("run_id").cast(pl.String))
        kept = kept.join(usual.run.select("run_id", "devices"), on="run_id")
        found = {devices: set(kept.filter(pl.col("devices") == devices)["epoch"]) for devices in (1, 2)}
        assert found == {1: all_epochs, 2: of_two}, metric
