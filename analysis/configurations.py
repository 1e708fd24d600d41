"""One row per configuration: medians over its repeats, and what it gains over one device."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis.metrics import accuracy_target, efficiency, energy_to_accuracy, per_run, summary_columns, time_to_accuracy
from analysis.metrics.aggregates import aggregate
from analysis.metrics.schema import repeated_columns
from analysis.published import TYPES
from analysis.work import labels, left_out, ratio_of
from parallelbench.store.columns import Over

if TYPE_CHECKING:
    from collections.abc import Mapping

    from analysis.reader import Runs
    from analysis.stats import Ratio
    from parallelbench.store.columns import Column

MOST_POINTS, FEWEST_EPOCHS = 6_000, 10
"""Of all curves over epochs together, on each side; of each curve at least so many."""
BASELINE = ("single", 1)
"""Strategy and devices of what every other configuration of a group is compared with."""


@lru_cache(maxsize=8)
def facts(runs: Runs) -> pl.DataFrame:
    """One row per run: the run table, its group and configuration, its metrics, and why it is left out (or
    null).
    """
    joined = (
        runs.run.join(labels(runs), on="run_id")
        .join(per_run(runs), on="run_id")
        .join(left_out(runs).rename({"reason": "left_out"}), on="run_id", how="left")
    )
    baseline_first = (pl.col("strategy") == BASELINE[0]) & (pl.col("devices") == BASELINE[1])
    order = (pl.col("group"), ~baseline_first, pl.col("devices"), pl.col("configuration"), pl.col("repeat"))
    return _with_targets(runs, joined).sort(*order, maintain_order=True)


def _with_targets(runs: Runs, rows: pl.DataFrame) -> pl.DataFrame:
    """Add the accuracy target of each run's group, and the run's time and energy to it."""
    usable = rows.filter(pl.col("left_out").is_null())
    best = usable.group_by("group").agg("best_test_accuracy").rows()
    targets = {group: accuracy_target(accuracies) for group, accuracies in best}
    rows = rows.with_columns(
        accuracy_target=pl.col("group").replace_strict(targets, default=None, return_dtype=pl.Float64)
    )
    of_run = dict(rows.select("run_id", "accuracy_target").rows())
    for how_much in (time_to_accuracy(runs, of_run), energy_to_accuracy(runs, of_run)):
        rows = rows.join(how_much, on="run_id", how="left", maintain_order="left")
    return rows


def counted(runs: Runs) -> pl.DataFrame:
    """The rows of `facts` that may enter comparisons of time and memory."""
    return facts(runs).filter(pl.col("left_out").is_null())


def learning(runs: Runs, *, test: str, training: str) -> pl.DataFrame:
    """One row per run that trained to its end, epoch and side (test, training), for lines over epochs.

    Columns: group, configuration, variant, strategy, repeat, side, x (the epoch), value. Of very many points, every
    second or so is left out, but never a run's first and last.
    """
    columns = ("run_id", "group", "configuration", "variant", "strategy", "repeat")
    trained = facts(runs).filter((pl.col("outcome") == "ok") & (pl.col("state") == "done")).select(columns)
    epochs = runs.select("epochs", "run_id", "epoch", test, training)
    every = -(-epochs.height // MOST_POINTS)
    if every > 1:
        epoch, last = pl.col("epoch"), pl.col("epoch").max().over("run_id")
        step = pl.min_horizontal(pl.lit(every), (last // FEWEST_EPOCHS).clip(1))
        epochs = epochs.filter(((epoch - 1) % step == 0) | (epoch == last))
    epochs = trained.join(epochs, on="run_id", maintain_order="left_right")
    sides = [
        epochs.select(*columns, side=pl.lit(side), x="epoch", value=name)
        for side, name in (("test", test), ("training", training))
    ]
    return pl.concat(sides).sort("group", maintain_order=True).drop_nulls("value")


def gains(runs: Runs) -> pl.DataFrame:
    """Paired speed-ups over one device, one row per pair of repeats, steady and with start-up.

    Columns: group, configuration, variant, strategy, devices, kind (steady state, including start-up), repeat, value.
    """
    rows = []
    for configuration in _members(runs):
        for kind in ("steady state", "including start-up"):
            ratio = _speed_up(runs, configuration, with_startup=kind != "steady state")
            row = [configuration[name] for name in ("group", "configuration", "variant", "strategy", "devices")]
            rows += [(*row, kind, *pair) for pair in (ratio.pairs if ratio else ())]
    names = ("group", "configuration", "variant", "strategy", "devices", "kind", "repeat", "value")
    kinds = (*[pl.String] * 4, pl.Int32, pl.String, pl.Int32, pl.Float64)
    found = pl.DataFrame(rows, schema=dict(zip(names, kinds, strict=True)), orient="row")
    return found.sort("group", pl.col("kind") != "steady state", maintain_order=True)


def _speed_up(runs: Runs, configuration: Mapping[str, Any], *, with_startup: bool = False) -> Ratio | None:
    """Paired speed-up of one configuration's runs over one device's: by time, under weak scaling by throughput."""
    one, many = configuration["baseline_ids"], configuration["run_ids"]
    if configuration["scaling"] == "weak":  # an epoch need not hold the same samples: compare samples per second
        name = "throughput_with_startup_samples_per_s" if with_startup else "throughput_samples_per_s"
        return ratio_of(runs, name, numerator=many, denominator=one)
    name = "total_time_s" if with_startup else "steady_epoch_time_s"
    return ratio_of(runs, name, numerator=one, denominator=many)


@lru_cache(maxsize=8)
def summary(runs: Runs) -> pl.DataFrame:
    """One row per configuration, baseline first; the columns are those of `summary_columns`."""
    rows = [configuration | _row(runs, configuration) for configuration in _members(runs)]
    return pl.DataFrame(rows, schema={column.name: TYPES[column.type] for column in summary_columns()}, orient="row")


@lru_cache(maxsize=8)
def _members(runs: Runs) -> list[dict[str, Any]]:
    """Of each configuration what follows from its runs alone, as in `summary`, and besides: `run_ids` of those that
    count, `baseline_ids` of those on one device, `labels`, and how many passed the parity check or were not checked.
    """
    usable, passed = pl.col("left_out").is_null(), pl.col("parity_passed")
    known = facts(runs)
    keys = ("group", "configuration")
    found = known.group_by(keys, maintain_order=True).agg(
        *(_over_repeats(column, usable) for column in repeated_columns() if column.name not in keys),
        pl.len().alias("runs"),
        usable.sum().alias("repeats"),
        pl.col("run_id").filter(usable).alias("run_ids"),
        pl.coalesce("outcome", "state").alias("labels"),
        passed.sum().alias("passed"),
        passed.count().alias("checked"),
        # A run that ended before its check says nothing either way.
        ((pl.col("state") == "done") & passed.is_null()).sum().alias("unchecked"),
    )
    rows = found.to_dicts()
    baselines = {row["group"]: row["run_ids"] for row in rows if _is_baseline(row)}
    return [row | {"baseline_ids": baselines.get(row["group"], [])} for row in rows]


def _over_repeats(column: Column, usable: pl.Expr) -> pl.Expr:
    every = column.excluded_too or column.repeats is Over.SAME
    return aggregate(pl.col(column.name) if every else pl.col(column.name).filter(usable), column.repeats)


def _is_baseline(row: Mapping[str, Any]) -> bool:
    return (row["strategy"], row["devices"]) == BASELINE


def _row(runs: Runs, configuration: dict[str, Any]) -> dict[str, Any]:
    outcomes, parity = _counts(configuration["labels"]), _parity(configuration)
    return {"outcomes": outcomes, "parity": parity, **_gain(runs, configuration)}


def _gain(runs: Runs, configuration: dict[str, Any]) -> dict[str, Any]:
    """The columns that compare with one device."""
    is_baseline, devices = _is_baseline(configuration), configuration["devices"]
    steady = _speed_up(runs, configuration)
    whole = _speed_up(runs, configuration, with_startup=True)
    sides = {"numerator": configuration["run_ids"], "denominator": configuration["baseline_ids"]}
    energy = ratio_of(runs, "gpu_energy_per_sample_j", **sides)
    return {
        "energy_ratio": energy and energy.median,
        "energy_ratio_low": energy.low if energy and not is_baseline else None,
        "energy_ratio_high": energy.high if energy and not is_baseline else None,
        "speed_up": steady and steady.median,
        # Against itself every ratio is 1 by construction: an interval would say nothing.
        "speed_up_low": steady.low if steady and not is_baseline else None,
        "speed_up_high": steady.high if steady and not is_baseline else None,
        "speed_up_pairs": steady.n if steady else 0,
        "verdict": "baseline" if is_baseline else _verdict(steady),
        "efficiency": efficiency(steady.median if steady else None, devices=devices),
        "efficiency_with_startup": efficiency(whole.median if whole else None, devices=devices),
    }


def _verdict(ratio: Ratio | None) -> str | None:
    words = {"above 1": "faster", "below 1": "slower"}
    return words.get(ratio.verdict, ratio.verdict) if ratio else None


def _counts(names: list[str]) -> str:
    return ", ".join(
        f"{count} {name}" for name, count in sorted(Counter(names).items(), key=lambda c: (c[0] != "ok", c[0]))
    )


def _parity(configuration: Mapping[str, Any]) -> str:
    checked, unchecked = configuration["checked"], configuration["unchecked"]
    if not checked:
        return "reference" if configuration["strategy"] == BASELINE[0] else "not checked"
    return f"{configuration['passed']} of {checked}" + (f", {unchecked} not checked" if unchecked else "")
