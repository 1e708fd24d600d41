"""One row per configuration: medians over its repeats, and what it gains over one device."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis import text
from analysis.comparison.baseline import gain
from analysis.comparison.campaign import campaign
from analysis.comparison.exclusions import TIMING_ONLY, Exclusion, excluded
from analysis.comparison.notes import MOST_NAMED, Code, Note
from analysis.comparison.work import REFERENCE, labels, natural
from analysis.metrics.columns import aggregate, of_site, repeated_columns, summary_columns
from analysis.metrics.epochs import AS_TEXT, numbered
from analysis.metrics.runs import accuracy_target, co2_to_accuracy, energy_to_accuracy, per_run, time_to_accuracy
from analysis.runs.published import TYPES
from analysis.runs.reader import once
from parallelbench.results.declaration import Over

if TYPE_CHECKING:
    from collections.abc import Mapping

    from analysis.comparison.campaign import Configuration
    from analysis.runs.reader import Runs
    from parallelbench.results.declaration import Column


MOST_POINTS, FEWEST_EPOCHS = 6_000, 10
"""Most points of all curves over epochs on each side; fewest points of one curve."""


@once
def facts(runs: Runs) -> pl.DataFrame:
    """One row per run: the run table, its group and configuration, its metrics, and its `exclusion` or null."""
    joined = (
        runs.run.join(labels(runs), on="run_id")
        .join(per_run(runs), on="run_id")
        .join(excluded(runs), on="run_id", how="left")
        .with_columns(displayed=_is_displayed())
    )
    places = {run.run_id: each.place for each in campaign(runs).configurations for run in each.every}
    place = pl.col("run_id").replace_strict(places, return_dtype=pl.Int32)
    rows = _with_targets(runs, joined).with_columns(configuration_place=place)
    return rows.sort("configuration_place", "repeat", maintain_order=True)


def _is_displayed() -> pl.Expr:
    """Whether a configuration's numbers are computed from a run: others may have disturbed it, where none counts."""
    counts: pl.Expr = pl.col("exclusion").is_null()
    disturbed: pl.Expr = (pl.col("exclusion") == Exclusion.DISTURBED.value).fill_null(False)
    alone: pl.Expr = disturbed & ~counts.any().over("group", "configuration")
    return counts | alone


def _with_targets(runs: Runs, rows: pl.DataFrame) -> pl.DataFrame:
    """Add the accuracy target of each run's group, and what the run took to it."""
    usable = rows.filter("displayed")
    best: dict[str, list[list[float | None]]] = defaultdict(list)
    for group, accuracies in (
        usable.group_by("group", "configuration").agg("best_test_accuracy").drop("configuration").rows()
    ):
        best[group].append(accuracies)
    targets = {group: runs.target or accuracy_target(accuracies) for group, accuracies in best.items()}
    rows = rows.with_columns(
        accuracy_target=pl.col("group").replace_strict(targets, default=None, return_dtype=pl.Float64)
    )
    of_run = dict(rows.select("run_id", "accuracy_target").rows())
    # A median over those that arrive would leave out the slowest: where one repeat does not, none has a time.
    arrives = (pl.col("best_test_accuracy") >= pl.col("accuracy_target")) | ~pl.col("displayed")
    all_arrive = arrives.fill_null(False).all().over("group", "configuration")
    for how_much in (f(runs, of_run) for f in (time_to_accuracy, energy_to_accuracy, co2_to_accuracy)):
        (name,) = set(how_much.columns) - {"run_id"}
        rows = rows.join(how_much, on="run_id", how="left", maintain_order="left")
        rows = rows.with_columns(pl.when(all_arrive).then(name))
    hours = pl.col("devices") * pl.col("time_to_accuracy_s") / 3600
    price = of_site("price_per_device_hour")
    return rows.with_columns(device_hours_to_accuracy=hours, cost_to_accuracy=hours * price)


@once
def counted(runs: Runs) -> pl.DataFrame:
    """The rows of `facts` that may enter comparisons of time and memory."""
    return facts(runs).filter(pl.col("exclusion").is_null())


def prepared(runs: Runs) -> pl.DataFrame:
    """The rows of `facts` whose preprocessing counts: an engine's process starts anew in packed runs, too."""
    allowed = pl.col("exclusion").is_null() | (pl.col("exclusion") == Exclusion.PACKED.value)
    return facts(runs).filter(allowed, pl.col("preprocess_cold_time_s").is_not_null())


def attempted(runs: Runs) -> pl.DataFrame:
    """The rows of `facts` whose engine has prepared, or failed to: a failed run counts here, and nowhere else."""
    again = (pl.col("exclusion") == Exclusion.DUPLICATE.value).fill_null(False)
    return facts(runs).filter(pl.col("preprocess_failed").is_not_null(), ~again)


@once
def displayed(runs: Runs) -> pl.DataFrame:
    """The rows of `facts` whose times are shown, with `disturbed`: such a run is compared with nothing."""
    return facts(runs).filter("displayed").with_columns(disturbed=pl.col("exclusion").is_not_null())


def learned(runs: Runs) -> pl.DataFrame:
    """The rows of `facts` whose losses, accuracies and bytes count: also those of which the times alone are invalid."""
    trained = (pl.col("outcome") == "ok") & (pl.col("state") == "done")
    allowed = pl.col("exclusion").is_null() | (trained & pl.col("exclusion").is_in(TIMING_ONLY))
    return facts(runs).filter(allowed)


@once
def learning(runs: Runs, *, test: str, training: str) -> pl.DataFrame:
    """One row per run that trained to its end, epoch and side (test, training), for lines over epochs.

    Columns: group, configuration, variant, strategy, repeat, side, x (the epoch), value. Of very many points, every
    second or so is left out, but never a run's first and last.
    """
    epochs = _epochs_for_lines(runs)
    sides = [
        epochs.select(*_OF_LINES, "place", side=pl.lit(side), x="epoch", value=name)
        for side, name in (("test", test), ("training", training))
    ]
    return pl.concat(sides).drop_nulls("value").sort("place", maintain_order=True).drop("place")


_OF_LINES = ("run_id", "group", "configuration", "variant", "strategy", "repeat")


@once
def _epochs_for_lines(runs: Runs) -> pl.DataFrame:
    """Of the runs that trained to their end the epochs that are drawn, with what they learned, and the `place` of the
    group.
    """
    learnt = ("test_accuracy", "train_accuracy", "test_loss", "train_loss")
    trained = learned(runs).select(*_OF_LINES, place=natural("group").rank("dense"))
    epochs = numbered(runs, "epochs", "epoch", *learnt)
    every = -(-epochs.height // MOST_POINTS)
    if every > 1:
        epoch, last = pl.col("epoch"), pl.col("epoch").max().over("run_id")
        step = pl.min_horizontal(pl.lit(every), (last // FEWEST_EPOCHS).clip(1))
        epochs = epochs.filter(((epoch - 1) % step == 0) | (epoch == last))
    return trained.join(epochs.with_columns(AS_TEXT), on="run_id", maintain_order="left_right")


def gains(runs: Runs) -> pl.DataFrame:
    """Paired speed-ups over the baseline, one row per pair of repeats, steady and with start-up.

    Columns: group, configuration, variant, strategy, devices, nodes, baseline, baseline_devices, kind (steady,
    with_startup), repeat, value, tells_scaling (`Campaign.tells_scaling`).
    """
    rows, found = [], campaign(runs)
    for each in found.counted:
        if pairing := found.against_baseline(each):
            label, baseline = each.label, found.baseline_of(each)
            of_baseline = (baseline.name, baseline.devices) if baseline else (None, None)
            row = (each.group, each.name, label.variant, label.strategy, label.devices, label.nodes, *of_baseline)
            for kind, with_startup in (("steady", False), ("with_startup", True)):
                ratio = pairing.speed_up(with_startup=with_startup)
                rows += [(*row, kind, *pair, found.tells_scaling(each)) for pair in (ratio.pairs if ratio else ())]
    names = (
        *("group", "configuration", "variant", "strategy", "devices", "nodes"),
        *("baseline", "baseline_devices", "kind", "repeat", "value", "tells_scaling"),
    )
    kinds = (*[pl.String] * 4, *[pl.Int32] * 2, pl.String, pl.Int32, pl.String, pl.Int32, pl.Float64, pl.Boolean)
    table = pl.DataFrame(rows, schema=dict(zip(names, kinds, strict=True)), orient="row")
    return table.sort(natural("group"), pl.col("kind") != "steady", maintain_order=True)


@once
def summary(runs: Runs) -> pl.DataFrame:
    """One row per configuration, baseline first; the columns are those of `summary_columns`."""
    every = campaign(runs).configurations
    rows = [numbers | _row(runs, each, numbers) for each, numbers in zip(every, _members(runs), strict=True)]
    return pl.DataFrame(rows, schema={column.name: TYPES[column.type] for column in summary_columns()}, orient="row")


@once
def _members(runs: Runs) -> list[dict[str, Any]]:
    """Of each configuration what follows from its runs alone, as in `summary`, and besides: `labels`, `reasons`, and
    how many passed the parity check or were not checked.
    """
    usable, taken, passed = pl.col("exclusion").is_null(), pl.col("displayed"), pl.col("parity_passed")
    known = facts(runs)
    rows = known.group_by("configuration_place", maintain_order=True).agg(
        *(_over_repeats(column, taken) for column in repeated_columns() if column.name != "configuration_place"),
        pl.len().alias("runs"),
        usable.sum().alias("repeats"),
        (taken & ~usable).any().alias("disturbed"),
        (pl.col("exclusion") == Exclusion.OOM.value).sum().alias("oom_runs"),
        pl.coalesce("outcome", "state").alias("labels"),
        pl.col("exclusion").drop_nulls().alias("reasons"),
        passed.sum().alias("passed"),
        passed.count().alias("checked"),
        pl.col("parity_reference").drop_nulls().unique(maintain_order=True).alias("references"),
        # A run that ended before its check says nothing either way.
        ((pl.col("state") == "done") & passed.is_null()).sum().alias("unchecked"),
        (~pl.col("closed")).sum().alias("unclosed"),
        pl.col("parity_small_only").sum().alias("small_only"),
        pl.col("config_json").first().alias("config"),
    )
    return rows.to_dicts()


def _over_repeats(column: Column, taken: pl.Expr) -> pl.Expr:
    every = column.excluded_too or column.repeats is Over.SAME
    return aggregate(pl.col(column.name) if every else pl.col(column.name).filter(taken), column.repeats)


def _row(runs: Runs, configuration: Configuration, numbers: dict[str, Any]) -> dict[str, Any]:
    outcomes, exclusions = _counts(numbers["labels"]), _counts(numbers["reasons"]) or None
    compared = gain(runs, configuration)
    compared["framework"] = configuration.framework  # known also where no run came as far as to record it
    fits = False if numbers["oom_runs"] else True if configuration.counts else None
    return {"outcomes": outcomes, "exclusions": exclusions, "parity": _parity(numbers), "fits": fits, **compared}


def _counts(names: list[str]) -> str:
    return ", ".join(
        f"{count} {name}" for name, count in sorted(Counter(names).items(), key=lambda c: (c[0] != "ok", c[0]))
    )


def _parity(configuration: Mapping[str, Any]) -> str:
    checked, unchecked, unclosed = (configuration[name] for name in ("checked", "unchecked", "unclosed"))
    if checked:
        words = f"{configuration['passed']} of {checked}" + (f", {unchecked} not checked" if unchecked else "")
        words += ", by the author's own reference" if configuration["references"] else ""
        words += f", {small} on a smaller model only" if (small := configuration["small_only"]) else ""
    else:
        asked_for = json.loads(configuration["config"])["measure"].get("parity")
        is_reference = configuration["strategy"] == REFERENCE and asked_for and configuration["repeats"]
        words = "reference" if is_reference else "not checked"
    return words + (f", {unclosed} not checked after training" if unclosed else "")


def unreached(runs: Runs) -> list[Note]:
    """The configurations of which not every run reaches the chosen accuracy, with the best that they reach; one note
    where nobody does. Empty where none was chosen.
    """
    rows = facts(runs).filter("displayed")
    if runs.target is None or rows.is_empty():
        return []
    several = rows["group"].n_unique() > 1
    best = rows.group_by("group", "configuration", maintain_order=True).agg(
        best=pl.col("best_test_accuracy").max(),
        reached=(pl.col("best_test_accuracy") >= runs.target).fill_null(value=False).sum(),
        of=pl.len(),
    )
    best = best.with_columns(name=pl.format("{} ({})", "configuration", "group") if several else "configuration")
    target = text.accuracy(runs.target)
    if best["reached"].sum() == 0:
        return [Note(Code.NOBODY_REACHES, {"target": target, "best": _best_of_all(best)})]
    missed = best.filter(pl.col("reached") < pl.col("of")).rows(named=True)
    shown = [f"{row['name']} ({row['reached']} of {row['of']} runs, best {_exactly(row['best'])})" for row in missed]
    values = {"target": target, "best": text.listed(shown, most=MOST_NAMED)}
    return [Note(Code.NOT_ALL_REACH, values)] if shown else []


def _best_of_all(best: pl.DataFrame) -> str:
    known = best.drop_nulls("best").sort("best", descending=True, maintain_order=True)
    if known.is_empty():
        return "none was tested"
    return f"the best is {_exactly(known['best'][0])}, of {known['name'][0]}"


def _exactly(share: float | None) -> str:
    """To four digits of the share: what was reached must not be rounded up to a target that was not."""
    return text.MISSING if share is None else f"{int(share * 10_000 + 1e-9) / 100:.2f}\u202f%"
