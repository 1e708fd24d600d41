"""Which panels of a figure are drawn, and what stands above them."""

from __future__ import annotations

import polars as pl
import pytest

from analysis.figures import chart
from analysis.figures.curves import coinciding

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


def test_of_too_many_panels_those_of_the_works_that_the_page_tells_of_first_are_drawn() -> None:
    data = rows(WORKS).with_columns(disturbed=pl.lit(value=False))
    for foremost in (WORKS[3:5], [*WORKS[3:5], "of no panel"]):
        token = chart._FOREMOST.set(tuple(foremost))
        try:
            drawn, title = chart.drawn_panels(data), chart._title("", data, "").to_dict()
        finally:
            chart._FOREMOST.reset(token)
        assert len(drawn) == chart.MOST_PANELS
        assert {f"{work} — {side}" for work in WORKS[3:5] for side in SIDES} <= set(drawn)
        assert ("the largest and the smallest speed-up" in str(title)) == (len(foremost) == 2), "only where both are"


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


def test_lines_that_hide_each_other_are_named() -> None:
    lines = {"single × 1": [1.0, 9.0], "ddp × 2": [1.001, 9.0], "fsdp × 2": [1.0, 8.0], "late × 2": [9.0]}
    points = [(name, x, value) for name, values in lines.items() for x, value in enumerate(values, 3 - len(values))]
    data = pl.DataFrame(points, ["configuration", "x", "median"], orient="row").with_columns(first=True)
    one, two = data.with_columns(panel=pl.lit("one")), data.with_columns(panel=pl.lit("two"))
    assert coinciding(one, own_axes=False) == "As drawn, the lines of single × 1 and ddp × 2 cover each other."
    assert (
        coinciding(pl.concat([one, two]), own_axes=True)
        == "As drawn, the lines of single × 1 and ddp × 2 cover each other."
    )
    apart = two.with_columns(median=pl.col("median") * pl.when(configuration="ddp × 2").then(1.1).otherwise(1.0))
    assert coinciding(pl.concat([one, apart]), own_axes=False).endswith(" cover each other in one.")
    assert coinciding(data.filter(pl.col("x") == 2).with_columns(panel=pl.lit("")), own_axes=True) == ""
