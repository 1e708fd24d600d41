"""All derived columns: formulas and plain aggregates, by the table that they are in."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from analysis.metrics.configuration_columns import PER_CONFIGURATION, PER_FACT
from analysis.metrics.run_columns import PER_EPOCH, PER_RUN
from parallelbench.results.tables import TABLES, Column, Over, Place

if TYPE_CHECKING:
    from collections.abc import Iterable

_ROWS_OF_RUNS = ("pushes", "steps", "parity", "phases", "preprocess")
"""Tables whose rows are aggregated at once into a run's value."""


def epoch_aggregates() -> list[tuple[Column, Column]]:
    """Columns of `ranks`, each with a column of `per_epoch` that aggregates it over the ranks of an epoch."""
    return [pair for column in TABLES["ranks"] for pair in column.derived()]


def run_aggregates() -> list[tuple[Column, Column]]:
    """Columns of each epoch, each with a column of `per_run` that aggregates it over the epochs of a run."""
    of_ranks = (pair for column in TABLES["ranks"] for pair in column.derived(2))
    return [*of_ranks, *(pair for column in TABLES["epochs"] for pair in column.derived())]


def row_aggregates() -> dict[str, list[tuple[Column, Column]]]:
    """Table → its columns, each with a column of `per_run` that aggregates it over all the run's rows."""
    pairs = {table: [pair for column in TABLES[table] for pair in column.derived()] for table in _ROWS_OF_RUNS}
    return {table: of_table for table, of_table in pairs.items() if of_table}


def per_epoch_columns() -> tuple[Column, ...]:
    """What `per_epoch` adds to the table `epochs`."""
    return (*(column for _, column in epoch_aggregates()), *PER_EPOCH)


def per_run_columns() -> tuple[Column, ...]:
    """The columns of `per_run` besides `run_id`."""
    plain = [*run_aggregates(), *(pair for pairs in row_aggregates().values() for pair in pairs)]
    return (*PER_RUN, *(column for _, column in plain))


def facts_columns() -> tuple[Column, ...]:
    """The columns of `facts` but for `state` and `folder`."""
    return (*TABLES["run"], *PER_FACT, *per_run_columns())


def repeated_columns() -> tuple[Column, ...]:
    """The columns of `facts` that aggregate over the runs of a configuration."""
    return tuple(column for column in facts_columns() if column.repeats)


def summary_columns() -> tuple[Column, ...]:
    """The columns of `summary`; a median's meaning says that it is one."""
    repeated = [_over_repeats(column) for column in repeated_columns()]
    return _ordered((*repeated, *PER_CONFIGURATION), _SUMMARY_FIRST)


def _over_repeats(column: Column) -> Column:
    if column.repeats in (Over.SAME, Over.FIRST):
        return column
    fractional = column.repeats in (Over.MEDIAN, Over.MEAN)
    meaning = f"{column.meaning}; {column.repeats} over repeats"
    return replace(column, meaning=meaning, type="float64" if fractional else column.type)


_SUMMARY_FIRST = (
    *("group", "configuration", "variant", "strategy", "devices", "nodes", "scaling"),
    *("outcomes", "runs", "repeats", "steady_epoch_time_s", "speed_up", "speed_up_low", "speed_up_high"),
    *("speed_up_pairs", "verdict", "efficiency", "efficiency_with_startup"),
)
"""The first columns of `summary`."""
FIRST: dict[Place, tuple[str, ...]] = {
    "configurations": (*_SUMMARY_FIRST, "first_epoch_time_s", "startup_without_parity_s", "throughput_samples_per_s"),
    "energy": (
        *("configuration", "gpu_energy_per_epoch_j", "gpu_energy_per_sample_j", "energy_ratio"),
        *("steady_gpu_power_mean_w", "steady_gpu_power_max_w", "energy_to_accuracy_j", "accuracy_target"),
    ),
    "runs": (
        *("slug", "outcome", "reason", "exclusion", "repeat", "attempt", "epochs_finished"),
        *("first_epoch_time_s", "second_epoch_time_s", "steady_epoch_time_s", "steady_step_time_s"),
        "total_training_time_s",
    ),
}
"""The first columns of the page's tables; the others follow as they are declared."""


def _ordered(columns: Iterable[Column], first: tuple[str, ...]) -> tuple[Column, ...]:
    return tuple(sorted(columns, key=lambda c: first.index(c.name) if c.name in first else len(first)))


def tables_columns() -> dict[str, tuple[Column, ...]]:
    """The columns of the report's files, by table."""
    epochs = (*TABLES["epochs"], *per_epoch_columns())
    return {"configurations": summary_columns(), "runs": facts_columns(), "epochs": epochs}


def page_columns(table: Place) -> tuple[Column, ...]:
    """The columns of a table of the report's page."""
    columns = facts_columns() if table == "runs" else summary_columns()
    return tuple(c for c in _ordered(columns, FIRST[table]) if c.heading and table in c.tables)


def explained_columns() -> tuple[Column, ...]:
    """Each column once that the page explains, as of a run where it is in both tables."""
    columns = (*summary_columns(), *per_run_columns(), *page_columns("runs"))
    return tuple({column.name: column for column in columns}.values())


def brief_columns() -> tuple[Column, ...]:
    """The columns of the terminal's summary."""
    return tuple(column for column in summary_columns() if column.brief)
