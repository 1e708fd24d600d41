"""Tokens per second of language models, and how much of the devices' peak they compute with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from analysis import text
from analysis.comparison.configurations import summary
from analysis.figures._chart import bars, ranked, timed

if TYPE_CHECKING:
    import altair as alt

    from analysis.runs.reader import Runs

ORDER = 13
TITLE = "Tokens per second by strategy and device count"


def figure(runs: Runs) -> alt.FacetChart | None:
    """Tokens per second in steady state, with the MFU where a peak is known; None where no run's data are tokens."""
    data = timed(runs, {"tokens_per_s": "Tokens per second"}, mfu=pl.col("mfu"))
    if data.is_empty():
        return None
    rate, used = (
        column.map_elements(written, return_dtype=pl.String)
        for column, written in (
            (pl.col("median"), text.number),
            (pl.col("mfu").median().over("panel", "configuration"), text.percent),
        )
    )
    labels = pl.concat_str(rate, pl.format(" · MFU {}", used).fill_null(""))
    return bars(
        data, columns=["tokens_per_s"], title=TITLE, unit="Tokens per second, steady state", labels=labels, room=1.6
    )


def finding(runs: Runs) -> str:
    """The rate of each configuration, with its MFU and the perplexity that it reached."""
    measured = summary(runs).drop_nulls("tokens_per_s")
    return ranked(runs, measured, _rates) or "No run that counts trains on tokens and has a steady state."


def _rates(rows: pl.DataFrame) -> str:
    shown = [_rate(row) for row in rows.sort("tokens_per_s", descending=True).iter_rows(named=True)]
    peak_flop_per_s = rows["peak_flop_per_s"].max()
    peak = "" if peak_flop_per_s is None else "; MFU is the share of a device's fastest matrix product, as probed here"
    return f"in steady state {text.listed(shown, sep='; ')}{peak}"


def _rate(row: dict[str, Any]) -> str:
    """Tokens per second of a configuration, and what else is known of it."""
    more = [f"MFU {text.percent(row['mfu'])}"] * (row["mfu"] is not None)
    more += [f"perplexity {text.number(row['final_perplexity'])} in the end"] * (row["final_perplexity"] is not None)
    beside = f" ({', '.join(more)})" if more else ""
    return f"{row['configuration']} trains on {text.number(row['tokens_per_s'])} tokens per second{beside}"
