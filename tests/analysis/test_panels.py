"""Which panels of a figure are drawn, and what stands above them."""

from __future__ import annotations

import polars as pl
import pytest

from analysis.comparison.issues import Blocker, Issue
from analysis.figures import chart
from analysis.figures.curves import coinciding
from parallelbench.errors import ConfigError

WORKS = [
    f"{data} · {model} · epochs {epochs}"
    for data in ("cifar10", "cifar100")
    for model in ("cnn", "logistic_regression", "resnet50", "vit")
    for epochs in (10, 30, 50, 100)
]
SIDES = ("Test set", "Training set, while training")


def rows(works: list[str]) -> pl.DataFrame:
    """A row of each panel, as the accuracy of these works has them."""
    names = [f"{work}{chart.BETWEEN}{side}" for work in works for side in SIDES]
    return pl.DataFrame({"panel": names, "value": range(len(names))})


def test_of_too_many_panels_every_model_and_data_set_is_among_the_drawn() -> None:
    data = rows(WORKS)
    drawn = chart.drawn_panels(data)
    assert len(drawn) == chart.MOST_PANELS
    assert (drawn[0], drawn[-1]) == (data["panel"][0], data["panel"][-1])
    works = {name.partition(chart.BETWEEN)[0].rpartition(" · epochs ")[0] for name in drawn}
    assert works == {work.rpartition(" · epochs ")[0] for work in WORKS}
    assert all(sum(name.startswith(f"{work} —") for name in drawn) in (0, 2) for work in WORKS), "a work's two sides"
    assert chart.shown(data)["panel"].to_list() == drawn


def test_few_panels_are_all_drawn() -> None:
    data = rows(WORKS[: chart.MOST_PANELS // 2])
    assert chart.drawn_panels(data) == data["panel"].to_list()


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("cifar100 vit 100 test", ["cifar100 · vit · epochs 100 — Test set"]),
        ("cifar10 · cnn · epochs 10, Test set", ["cifar10 · cnn · epochs 10 — Test set"]),
        ("Epochs 30 cifar10 vit", [f"cifar10 · vit · epochs 30 — {side}" for side in SIDES]),
    ],
)
def test_words_name_the_panels_that_have_all_of_them(asked: str, found: list[str]) -> None:
    with chart.only(asked):
        assert chart.drawn_panels(rows(WORKS)) == found
    assert len(chart.drawn_panels(rows(WORKS))) == chart.MOST_PANELS


def test_words_that_no_panel_has_are_answered_by_the_nearest_headings() -> None:
    with chart.only("cifar100 vit 70"), pytest.raises(ConfigError, match="no panel's heading holds") as refused:
        chart.drawn_panels(rows(WORKS))
    assert str(refused.value) == (
        "no panel's heading holds cifar100 vit 70: choose words of one of these: "
        + "; ".join(f"cifar100 · vit · epochs {epochs}, {side}" for epochs in (10, 30, 50) for side in SIDES)
        + "; and 58 more"
    )


def test_no_line_of_a_heading_is_wider_than_its_panel() -> None:
    work = "mnist · cnn_small · device name Imaginary CPU · device type cpu · scaling strong"
    assert chart._heading(f"{work} — Later epochs (median)") == [
        "mnist · cnn_small ·",
        "device name Imaginary CPU ·",
        "device type cpu · scaling strong",
        "Later epochs (median)",
    ]


def test_a_heading_is_broken_between_words_alone() -> None:
    assert chart._heading("cifar10 · vit — Device memory (allocated), sum of all processes") == [
        "cifar10 · vit",
        "Device memory (allocated), sum of all",
        "processes",
    ]
    (first, second) = chart._heading("m" * 50)
    assert first + second == "m" * 50, "a word that is longer than a line has no other place"


def test_lines_that_hide_each_other_are_named() -> None:
    lines = {"single × 1": [1.0, 9.0], "ddp × 2": [1.001, 9.0], "fsdp × 2": [1.0, 8.0], "late × 2": [9.0]}
    points = [(name, x, value) for name, values in lines.items() for x, value in enumerate(values, 3 - len(values))]
    data = pl.DataFrame(points, ["configuration", "x", "median"], orient="row").with_columns(first=True)
    one, two = data.with_columns(panel=pl.lit("one")), data.with_columns(panel=pl.lit("two"))
    assert coinciding(one, own_axes=False) == "The lines of single × 1 and ddp × 2 coincide."
    assert coinciding(pl.concat([one, two]), own_axes=True) == "The lines of single × 1 and ddp × 2 coincide."
    apart = two.with_columns(median=pl.col("median") * pl.when(configuration="ddp × 2").then(1.1).otherwise(1.0))
    assert coinciding(pl.concat([one, apart]), own_axes=False).endswith(" coincide in one.")
    assert coinciding(data.filter(pl.col("x") == 2).with_columns(panel=pl.lit("")), own_axes=True) == ""


def test_why_works_are_not_ranked_is_said_once_where_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Issue, "__str__", lambda self: f"{self.differences['packages.torch'][1]} differs")
    versions = {"a": "2", "b": "2", "c": "3", "d": "2"}
    unlike = {of: Issue(Blocker.ENVIRONMENT, {"packages.torch": ("1", version)}) for of, version in versions.items()}
    monkeypatch.setattr(chart, "unlike_groups", lambda runs: unlike)
    names = {"group": ["a", "b", "c"], "configuration": ["x", "y", "z"], "disturbed": [False] * 3}
    told = chart.Sentence(
        rows=lambda runs: pl.DataFrame(names),
        each=lambda row: row["configuration"],
        whole="it is {}",
        nothing="nothing",
    )
    assert told(None).splitlines() == [  # type: ignore[arg-type]
        "a: it is x.",
        "b: it is y.",
        "c: it is z; this does not rank them, since 3 differs.",
        "Of a; and b, this does not rank them, since 2 differs.",
    ]
