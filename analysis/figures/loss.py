"""Loss against epoch, while training and on the test set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import altair as alt
import polars as pl

from analysis import text
from analysis.configurations import learning
from analysis.figures._chart import EPOCHS, SIDE, lines, panel, per_group

if TYPE_CHECKING:
    from analysis.reader import Runs

ORDER = 5
TITLE = "Loss against epoch"


def figure(runs: Runs) -> alt.FacetChart | None:
    """Mean cross entropy of each epoch; None where no run trained to its end."""
    data = learning(runs, test="test_loss", training="train_loss")
    if data.is_empty():
        return None
    x = alt.X("x:Q", title="Epoch", axis=EPOCHS, scale=alt.Scale(nice=False, padding=8))
    return lines(
        panel(data, SIDE),
        title=TITLE,
        x=x,
        y=alt.Y("median:Q", title="Cross entropy (nats)", scale=alt.Scale(nice=True)),
    )


def finding(runs: Runs) -> str:
    """From where to where the test loss went."""
    sentences = []
    data = learning(runs, test="test_loss", training="train_loss").filter(pl.col("side") == "test")
    for (group,), rows in data.group_by("group", maintain_order=True):
        begun, low, high = rows.select(
            begun=pl.col("value").filter(pl.col("x") == 1).median(),
            low=pl.col("value").filter(pl.col("x") == pl.col("x").max()).min(),
            high=pl.col("value").filter(pl.col("x") == pl.col("x").max()).max(),
        ).row(0)
        ended = text.number(low) if low == high else f"{text.number(low)} to {text.number(high)}"
        sentence = f"median test loss is {text.number(begun)} after epoch 1; after the last it is {ended}"
        sentences.append((str(group), sentence))
    return per_group(sentences) if sentences else "No run trained to its end."
