"""Accuracy against epoch, while training and on the test set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import altair as alt
import polars as pl

from analysis import text
from analysis.comparison.configurations import learned, learning
from analysis.figures._chart import EPOCHS, SIDE, lines, panel, per_group

if TYPE_CHECKING:
    from analysis.runs.reader import Runs

ORDER = 4
TITLE = "Accuracy against epoch"


def figure(runs: Runs) -> alt.FacetChart | None:
    """Accuracy in per cent after each epoch; None where no run trained to its end."""
    data = learning(runs, test="test_accuracy", training="train_accuracy").with_columns(pl.col("value") * 100)
    if data.is_empty():
        return None
    x = alt.X("x:Q", title="Epoch", axis=EPOCHS, scale=alt.Scale(nice=False, padding=8))
    y = alt.Y("median:Q", title="Accuracy (%)", scale=alt.Scale(zero=False))
    return lines(panel(data, SIDE), title=TITLE, x=x, y=y)


def finding(runs: Runs) -> str:
    """How far apart the configurations end, among runs of the same seed."""
    trained = learned(runs).select("group", "configuration", "repeat", "final_test_accuracy")
    return per_group(trained.drop_nulls("final_test_accuracy"), _spread, every=True) or "No run trained to its end."


def _spread(rows: pl.DataFrame) -> str:
    final = pl.col("final_test_accuracy")
    low, high = rows.select(low=final.min(), high=final.max()).row(0)
    several = pl.col("configuration").n_unique().over("repeat") > 1
    spread = rows.filter(several).group_by("repeat").agg(spread=final.max() - final.min())
    ends = list(dict.fromkeys(map(text.percent, (low, high))))  # one where no printed digit tells them apart
    sentence = f"final test accuracy {'is' if len(ends) == 1 else 'lies between'} {' and '.join(ends)}"
    if spread.height:
        apart = 100 * float(spread["spread"].max())  # type: ignore[arg-type]
        gap = f"differ by at most {apart:.2g} percentage points" if apart else "end exactly alike"
        sentence += f"; with equal seeds, configurations {gap}"
    return sentence
