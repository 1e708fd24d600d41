"""One row per configuration: medians over its repeats, and what it gains over one device."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis.comparison.baseline import against_one_device, gain, is_baseline
from analysis.comparison.exclusions import excluded
from analysis.comparison.groups import labels
from analysis.comparison.policy import BASELINE
from analysis.metrics import PER_RUN, accuracy_target, energy_to_accuracy, per_run, time_to_accuracy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from analysis.load import Runs

MOST_POINTS, FEWEST_EPOCHS = 6_000, 10
"""Of all curves over epochs together, on each side; of each curve at least so many."""

SUMMARY: dict[str, tuple[type[pl.DataType], str]] = {
    "group": (pl.String, "runs of the same work: only within it are runs compared"),
    "configuration": (pl.String, "strategy × devices"),
    "variant": (pl.String, "strategy, and the options in which it differs from others of its name"),
    "strategy": (pl.String, "strategy"),
    "devices": (pl.Int32, "devices over all nodes"),
    "nodes": (pl.Int32, "nodes"),
    "scaling": (pl.String, "strong: the global batch is fixed; weak: the batch per device is"),
    "outcomes": (pl.String, "what became of the runs of this configuration"),
    "runs": (pl.Int32, "runs of this configuration that were found"),
    "repeats": (pl.Int32, "runs that all numbers of this row rest on: those not excluded"),
    "steady_epoch_time_s": (pl.Float64, "median over repeats"),
    "first_epoch_time_s": (pl.Float64, "median over repeats"),
    "second_epoch_time_s": (pl.Float64, "median over repeats"),
    "startup_without_parity_s": (pl.Float64, "median over repeats"),
    "total_training_time_s": (pl.Float64, "median over repeats"),
    "total_time_s": (pl.Float64, "median over repeats"),
    "throughput_samples_per_s": (pl.Float64, "median over repeats"),
    "speed_up": (
        pl.Float64,
        "over one device, steady state: median over paired repeats of t_1 ÷ t_n (strong scaling) or of the "
        "ratio of throughputs (weak scaling); not the ratio of the medians",
    ),
    "speed_up_low": (pl.Float64, "lower end of its 95 % interval"),
    "speed_up_high": (pl.Float64, "upper end of its 95 % interval"),
    "speed_up_pairs": (pl.Int32, "repeats that were paired"),
    "verdict": (
        pl.String,
        "faster or slower than one device; indistinguishable where the interval holds 1; too few repeats to have one; "
        "not comparable where the environments differ in what must match",
    ),
    "efficiency": (pl.Float64, "speed_up ÷ devices, 1 = ideal"),
    "efficiency_with_startup": (
        pl.Float64,
        "the same with start-up: from total_time_s; throughput_with_startup_samples_per_s under weak scaling",
    ),
    "memory_kind": (pl.String, "device or host memory"),
    "peak_memory_max_bytes": (pl.Float64, "median over repeats of the largest rank's peak"),
    "peak_memory_sum_bytes": (pl.Float64, "median over repeats of the sum of all ranks' peaks"),
    **{metric.name: (pl.Float64, "median over repeats") for metric in PER_RUN if "_per_step_" in metric.name},
    "theoretical_bubble": (
        pl.Float64,
        "share of a step in which a device must idle by the schedule, were all stages equally long and nothing else in "
        "the way; by formula, not measured; null: no schedule",
    ),
    "theoretical_state_bytes": (
        pl.Int64,
        "parameters, gradients and optimizer state on each device, by formula, not measured, without activations and "
        "buffers; null: devices hold different things, or no formula",
    ),
    "gpu_energy_per_epoch_j": (pl.Float64, "median over repeats"),
    "gpu_energy_per_sample_j": (pl.Float64, "median over repeats"),
    "gpu_power_mean_w": (pl.Float64, "median over repeats"),
    "gpu_power_max_w": (pl.Float64, "highest of any repeat"),
    "energy_ratio": (
        pl.Float64,
        "energy per sample ÷ that of one device: median over paired repeats; below 1 is thriftier",
    ),
    "energy_ratio_low": (pl.Float64, "lower end of its 95 % interval"),
    "energy_ratio_high": (pl.Float64, "upper end of its 95 % interval"),
    "energy_to_accuracy_j": (pl.Float64, "median over repeats of the GPUs' training energy to accuracy_target"),
    "cpu_energy_per_epoch_j": (pl.Float64, "median over repeats"),
    "gpu_hours": (pl.Float64, "median over repeats"),
    "energy_flags": (
        pl.String,
        "what to know of the energies of any repeat: short, sparse, from_power, reset, incomplete",
    ),
    "staleness_mean": (pl.Float64, "median over repeats of the mean over all pushes to parameter servers"),
    "staleness_max": (pl.Int32, "largest staleness of any push in any repeat"),
    "final_test_accuracy": (pl.Float64, "median over repeats"),
    "best_test_accuracy": (pl.Float64, "median over repeats"),
    "accuracy_target": (
        pl.Float64,
        "highest step of the ladder that all runs of the group reach; chosen afterwards",
    ),
    "time_to_accuracy_s": (pl.Float64, "median over repeats of the training time to accuracy_target"),
    "parity": (pl.String, "runs that passed the parity check of those that were checked, and how many were not"),
    "parity_difference": (pl.Float64, "largest difference from one device in any checked run"),
}
"""The columns of `summary`: type, and meaning or how it aggregates."""

_MEDIANS = [name for name, (_, doc) in SUMMARY.items() if doc.startswith("median over repeats")]
_LARGEST = ["theoretical_bubble", "theoretical_state_bytes", "staleness_max", "gpu_power_max_w"]


@lru_cache(maxsize=8)
def facts(runs: Runs) -> pl.DataFrame:
    """One row per run: the run table, its group and configuration, its metrics, and its `exclusion` or null."""
    joined = (
        runs.run.join(labels(runs), on="run_id")
        .join(per_run(runs), on="run_id")
        .join(excluded(runs), on="run_id", how="left")
    )
    baseline_first = (pl.col("strategy") == BASELINE[0]) & (pl.col("devices") == BASELINE[1])
    order = (pl.col("group"), ~baseline_first, pl.col("devices"), pl.col("configuration"), pl.col("repeat"))
    return _with_targets(runs, joined).sort(*order, maintain_order=True)


def _with_targets(runs: Runs, rows: pl.DataFrame) -> pl.DataFrame:
    """Add the accuracy target of each run's group, and the run's time and energy to it."""
    usable = rows.filter(pl.col("exclusion").is_null())
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
    return facts(runs).filter(pl.col("exclusion").is_null())


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

    Columns: group, configuration, variant, strategy, devices, kind (steady, with_startup), repeat, value.
    """
    rows = []
    pairings = against_one_device(runs)
    for configuration in _members(runs):
        if pairing := pairings.get((configuration["group"], configuration["configuration"])):
            row = [configuration[name] for name in ("group", "configuration", "variant", "strategy", "devices")]
            for kind, with_startup in (("steady", False), ("with_startup", True)):
                ratio = pairing.speed_up(with_startup=with_startup)
                rows += [(*row, kind, *pair) for pair in (ratio.pairs if ratio else ())]
    names = ("group", "configuration", "variant", "strategy", "devices", "kind", "repeat", "value")
    kinds = (*[pl.String] * 4, pl.Int32, pl.String, pl.Int32, pl.Float64)
    table = pl.DataFrame(rows, schema=dict(zip(names, kinds, strict=True)), orient="row")
    return table.sort("group", pl.col("kind") != "steady", maintain_order=True)


@lru_cache(maxsize=8)
def summary(runs: Runs) -> pl.DataFrame:
    """One row per configuration, baseline first; the columns are those of `SUMMARY`."""
    rows = [_row(runs, configuration) for configuration in _members(runs)]
    return pl.DataFrame(rows, schema={name: kind for name, (kind, _) in SUMMARY.items()}, orient="row")


@lru_cache(maxsize=8)
def _members(runs: Runs) -> list[dict[str, Any]]:
    """Of each configuration what follows from its runs alone, as in `SUMMARY`, and besides: `labels`, `flags`, and how
    many passed the parity check or were not checked.
    """
    usable, passed = pl.col("exclusion").is_null(), pl.col("parity_passed")
    known = facts(runs)
    firsts = [name for name in SUMMARY if name in known.columns and name not in (*_MEDIANS, *_LARGEST)]
    found = known.group_by("group", "configuration", maintain_order=True).agg(
        pl.col(firsts).exclude("group", "configuration", "memory_kind", "parity_difference").first(),
        pl.col(_MEDIANS).filter(usable).cast(pl.Float64).median(),
        pl.col(_LARGEST).filter(usable).max(),
        pl.col("memory_kind").filter(usable).drop_nulls().first(),
        pl.col("parity_difference").max(),
        pl.len().alias("runs"),
        usable.sum().alias("repeats"),
        pl.coalesce("outcome", "state").alias("labels"),
        pl.col("energy_flags").filter(usable).drop_nulls().alias("flags"),
        passed.sum().alias("passed"),
        passed.count().alias("checked"),
        # A run that ended before its check says nothing either way.
        ((pl.col("state") == "done") & passed.is_null()).sum().alias("unchecked"),
    )
    return found.to_dicts()


def _row(runs: Runs, configuration: dict[str, Any]) -> dict[str, Any]:
    row = {name: configuration.get(name) for name in SUMMARY}
    row |= {
        "outcomes": _counts(configuration["labels"]),
        "energy_flags": _flags(configuration["flags"]),
        "parity": _parity(configuration),
    }
    pairing = against_one_device(runs).get((configuration["group"], configuration["configuration"]))
    baseline = is_baseline(configuration["strategy"], configuration["devices"])
    return row | gain(pairing, devices=configuration["devices"], baseline=baseline)


def _flags(flagged: list[str]) -> str | None:
    """All that is flagged of any of the runs."""
    return " ".join(sorted({flag for flags in flagged for flag in flags.split()})) or None


def _counts(names: list[str]) -> str:
    return ", ".join(
        f"{count} {name}" for name, count in sorted(Counter(names).items(), key=lambda c: (c[0] != "ok", c[0]))
    )


def _parity(configuration: Mapping[str, Any]) -> str:
    checked, unchecked = configuration["checked"], configuration["unchecked"]
    if not checked:
        return "reference" if configuration["strategy"] == BASELINE[0] else "not checked"
    return f"{configuration['passed']} of {checked}" + (f", {unchecked} not checked" if unchecked else "")
