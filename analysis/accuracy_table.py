"""Accuracy after 10, 30, 50 and 100 epochs side by side, as publications tabulate it, with what repeats differ by."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from analysis import latex, text
from analysis.comparison.groups import component_labels, groups_across, natural, works
from analysis.comparison.policy import IS_BASELINE
from analysis.configurations import learned
from parallelbench.errors import count_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from analysis.reader import Runs

EPOCHS = (10, 30, 50, 100)
"""Those of publication 000; the last epoch of each run is always among them."""
ENDLESS = ("constant", "linear_warmup", "step")
"""Schedules of the learning rate that are the same however many epochs follow."""
MOST_COLUMNS = 4
"""Numbers of epochs beside each other that fit on a page of a paper."""
CAPTION = "test accuracy in per cent after so many epochs, mean ± standard deviation over the repeats (how many)"
_KEYS = ("work", "model", "configuration", "devices", "epochs")
_SIDES = ("test_accuracy", "train_accuracy")


class Reached(NamedTuple):
    """A row: what one configuration of one model reaches."""

    model: str
    configuration: str
    groups: tuple[str, ...]
    """Those of its runs."""
    cells: list[str]
    """By number of epochs; a dash where no run trained so long."""


class Accuracies(NamedTuple):
    """A table: what was trained on the same data, and alike but for model, strategy, devices and epochs."""

    work: str
    epochs: list[int]
    rows: list[Reached]


@lru_cache(maxsize=8)
def accuracies(runs: Runs) -> pl.DataFrame:
    """One row per work, model, configuration and number of epochs, over the runs that trained to their end.

    Columns: work, model, configuration, devices, epochs, repeats, groups (of these runs), and of test_accuracy and
    train_accuracy, shares, mean, sd (standard deviation; null for one repeat), min and max. A repeat counts once: by
    the run of so many epochs, or else by the shortest of the longer ones, if its learning rate does not depend on the
    end.
    """
    of_run = _trained(runs)
    last = of_run.select("work", epoch="epochs").unique()
    asked = pl.concat([last, last.select("work").unique().join(_usual(), how="cross")]).unique()
    epochs = runs.select("epochs", "run_id", "epoch", *_SIDES)
    rows = of_run.join(epochs, on="run_id").join(asked, on=("work", "epoch"), how="semi")
    repeat = ("work", "model", "configuration", "repeat", "epoch")
    rows = rows.sort("epochs", maintain_order=True).unique(repeat, keep="first", maintain_order=True)
    measures = [
        getattr(pl.col(name), how)().alias(f"{name}_{shown}")
        for name in _SIDES
        for how, shown in (("mean", "mean"), ("std", "sd"), ("min", "min"), ("max", "max"))
    ]
    rows = rows.drop("epochs").rename({"epoch": "epochs"})
    own = (pl.col("parameters").min(), pl.col("baseline").any(), pl.len().cast(pl.Int32).alias("repeats"))
    found = rows.group_by(_KEYS).agg(*own, pl.col("group").unique().sort().alias("groups"), *measures)
    order = (natural("work"), "parameters", "model", ~pl.col("baseline"), "devices", natural("configuration"), "epochs")
    return found.sort(*order, maintain_order=True).drop("parameters", "baseline")


def _usual() -> pl.DataFrame:
    return pl.DataFrame({"epoch": EPOCHS}, schema={"epoch": pl.Int32})


def _trained(runs: Runs) -> pl.DataFrame:
    """The runs that trained to their end, with what tells their row and their table."""
    whole, any_length = groups_across(runs, ("model",)), groups_across(runs, ("model", "epochs"))
    endless = {run_id for run_id, work in works(runs).items() if work["lr_schedule.name"] in ENDLESS}
    table = {run_id: any_length[run_id] if run_id in endless else whole[run_id] for run_id in whole}
    models = component_labels(runs, "model")
    return learned(runs).select(
        *("run_id", "group", "configuration", "devices", "repeat", "parameters"),
        pl.col("epochs").cast(pl.Int32),
        baseline=IS_BASELINE,
        work=pl.col("run_id").replace_strict(table, return_dtype=pl.String),
        model=pl.col("run_id").replace_strict(models, return_dtype=pl.String),
    )


def as_csv(rows: pl.DataFrame) -> pl.DataFrame:
    """The same with names of groups as text, of which each has commas at most."""
    return rows.with_columns(pl.col("groups").list.join("; "))


def side_by_side(rows: pl.DataFrame) -> list[Accuracies]:
    """The same as tables: a row per model and configuration, a column per number of epochs."""
    tables = []
    for (work,), members in rows.group_by("work", maintain_order=True):
        epochs = sorted(members["epochs"].unique())
        lines = members.group_by("model", "configuration", maintain_order=True)
        tables.append(Accuracies(str(work), epochs, [_line(key, epochs, own) for key, own in lines]))
    return tables


def _line(key: tuple[object, ...], epochs: list[int], own: pl.DataFrame) -> Reached:
    model, configuration = map(str, key)
    cells = {row["epochs"]: _spread(row) for row in own.iter_rows(named=True)}
    groups = dict.fromkeys(group for several in own["groups"] for group in several)
    return Reached(model, configuration, tuple(groups), [cells.get(each, text.MISSING) for each in epochs])


def _spread(row: dict[str, Any]) -> str:
    mean, deviation = row["test_accuracy_mean"], row["test_accuracy_sd"]
    if mean is None:
        return text.MISSING
    spread = "" if deviation is None else f" ± {100 * deviation:.2f}"
    return f"{100 * mean:.2f}{spread} ({row['repeats']})"


def as_latex(rows: pl.DataFrame) -> str:
    """The same for a paper: where there are many numbers of epochs, several tables beside each other."""
    captioned = ((f"{each.work}: {CAPTION}", _tabulars(each)) for each in side_by_side(rows))
    return latex.floats(captioned, name="accuracy")


def _tabulars(each: Accuracies) -> Iterator[latex.Rows]:
    for start in range(0, len(each.epochs), MOST_COLUMNS):
        some = slice(start, start + MOST_COLUMNS)
        head = ["Model", "Configuration", *(count_of(epochs, "epoch") for epochs in each.epochs[some])]
        body = [[row.model, row.configuration, *row.cells[some]] for row in each.rows]
        shown = [[latex.escape(cell) for cell in row] for row in body]
        yield latex.Rows("ll" + "r" * (len(head) - 2), head, shown)
