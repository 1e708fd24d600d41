"""Pairwise comparison of all configurations of one work on equally many devices."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis.comparison.baseline import ENERGY
from analysis.comparison.campaign import campaign
from analysis.comparison.speed import columns_of, judged, speed_of
from analysis.comparison.summary import summary
from analysis.metrics.columns import PAIRS
from analysis.runs.published import TYPES
from analysis.runs.reader import once

if TYPE_CHECKING:
    from analysis.comparison.campaign import Configuration
    from analysis.comparison.pairing import Pairing
    from analysis.comparison.speed import Speed
    from analysis.runs.reader import Runs


TAKEN = ("device_hours", "cost", "co2_g")
"""What a configuration took of which each row tells both sides', of `summary`."""
_TO_ACCURACY = ("device_hours_to_accuracy", "cost_to_accuracy", "co2_to_accuracy_g")
"""The same up to the accuracy that was chosen."""


@once
def of_equal_devices(runs: Runs) -> pl.DataFrame:
    """One row per two configurations that count, of one work and equally many devices; the columns are `PAIRS`.

    All its verdicts are one family. A ratio is that of `compare --by configuration=configuration,other`.
    """
    found = campaign(runs)
    couples = [
        (one, other, found.pair(one, other))
        for members in found.groups.values()
        for one, other in combinations([each for each in members if each.counts], 2)
        if one.devices == other.devices
    ]
    speeds, taken = judged([speed_of(pairing) for *_, pairing in couples]), _taken(runs)
    rows = [
        _row(*couple, speed, taken=taken) | {"until_accuracy": runs.target}
        for couple, speed in zip(couples, speeds, strict=True)
    ]
    return pl.DataFrame(rows, schema={column.name: TYPES[column.type] for column in PAIRS}, orient="row")


def _taken(runs: Runs) -> list[dict[str, float | None]]:
    """Of each configuration what it took; null where others disturbed an epoch of any of its runs."""
    names = TAKEN if runs.target is None else _TO_ACCURACY
    quiet = pl.col("whole_disturbed").fill_null(value=False).not_()
    known = (pl.when(quiet).then(name).alias(to) for name, to in zip(names, TAKEN, strict=True))
    return summary(runs).select(*known).to_dicts()


def _row(
    one: Configuration, other: Configuration, pairing: Pairing, speed: Speed, *, taken: list[dict[str, float | None]]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "group": one.group,
        "devices": one.devices,
        "configuration": one.name,
        "other": other.name,
        "verdict": speed.verdict.value,
        "pairs": speed.pairs,
    }
    row |= speed.columns("speed_ratio") | columns_of("energy_ratio", pairing.ratio(ENERGY))
    return row | taken[one.place] | {f"other_{name}": value for name, value in taken[other.place].items()}
