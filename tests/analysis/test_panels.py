"""Which panels of a figure are drawn, and what stands above them."""

from __future__ import annotations

import polars as pl
import pytest

from analysis.figures import chart

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
