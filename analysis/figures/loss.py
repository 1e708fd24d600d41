"""Loss against epoch, while training and on the test set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import altair as alt
import msgspec
import polars as pl

from analysis import text
from analysis.comparison.configurations import learned, learning
from analysis.figures._chart import EPOCHS, SIDE, lines, panel, per_group
from parallelbench.config.build import LATER_COMPONENTS
from parallelbench.config.identity import canonical_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from analysis.runs.reader import Runs

ORDER = 5
TITLE = "Loss against epoch"


def figure(runs: Runs) -> alt.FacetChart | None:
    """Mean loss of each epoch; None where no run trained to its end."""
    data = learning(runs, test="test_loss", training="train_loss")
    if data.is_empty():
        return None
    x = alt.X("x:Q", title="Epoch", axis=EPOCHS, scale=alt.Scale(nice=False, padding=8))
    return lines(
        panel(data, SIDE),
        title=TITLE,
        x=x,
        y=alt.Y("median:Q", title=loss_label(learned(runs)["config_json"]), scale=alt.Scale(nice=True)),
    )


def loss_label(configs: Iterable[str]) -> str:
    """What the axis shows of runs with these configurations; runs from before there was a choice had cross entropy."""
    losses = (msgspec.json.decode(each, type=_Chosen).loss for each in configs)
    found = {canonical_json(each or LATER_COMPONENTS["loss"]) for each in losses}
    if len(found) > 1:
        return "Loss"
    options: dict[str, Any] = msgspec.json.decode(found.pop())
    if options["_target_"] != LATER_COMPONENTS["loss"]["_target_"]:
        return f"Loss ({options['name']})"
    smoothing = options.get("label_smoothing", 0)
    return f"Loss ({options['name']}, label_smoothing={smoothing})" if smoothing else "Cross entropy (nats)"


class _Chosen(msgspec.Struct):
    """What the axis is labelled by, of a configuration."""

    loss: dict[str, Any] | None = None


def finding(runs: Runs) -> str:
    """From where to where the test loss went."""
    data = learning(runs, test="test_loss", training="train_loss").filter(pl.col("side") == "test")
    return per_group(data, _course, every=True) or "No run trained to its end."


def _course(rows: pl.DataFrame) -> str:
    last = pl.col("x").max().over("configuration", "repeat")
    begun, ended = (
        rows.filter(pl.col("x") == epoch).group_by("configuration").agg(pl.col("value").median())["value"]
        for epoch in (1, last)
    )
    of = "" if max(begun.len(), ended.len()) == 1 else ", by configuration"
    return f"median test loss is {_span(begun)} after epoch 1 and {_span(ended)} after the last{of}"


def _span(values: pl.Series) -> str:
    """The least and the largest of some medians; one number where no printed digit tells them apart."""
    ends = (values.min(), values.max())
    return " to ".join(dict.fromkeys(text.number(end) for end in ends if isinstance(end, float))) or text.MISSING
