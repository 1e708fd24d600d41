"""A new number takes its declaration, its probe and its figure: tables, pages and documents follow by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest

from analysis import load, per_epoch, per_run, summary
from analysis.metrics import columns as columns_module
from analysis.metrics.columns import PER_FACT, Metric, per_epoch_columns, per_run_columns, summary_columns
from analysis.report import page as page_module
from parallelbench.results.declaration import Column, Over, count, table_of
from parallelbench.results.tables import TABLES, schema
from tests.analysis import factory

WAITED = table_of(
    Column("waited_s", "time that this rank waited", null="not measured"),
    Column(
        "waited_sum_s",
        "time that the ranks waited in an epoch, summed",
        over=Over.SUM,
        of="waited_s",
        null="not measured on every rank",
    ),
    Column(
        "steady_waited_s",
        "waited_sum_s: median over the epochs without each attempt's first one",
        over=Over.MEDIAN,
        of="waited_sum_s",
        steady=True,
        repeats=Over.MEDIAN,
        heading="Waited",
        brief="waited",
    ),
)
"""Declared in a table; everything else here only looks at what follows."""


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three repeats of two ranks and three epochs, in whose journals there is a column more."""
    monkeypatch.setitem(TABLES, "ranks", (*TABLES["ranks"], *WAITED))
    monkeypatch.setattr(page_module, "drawn", lambda runs: [])
    row = factory._rank
    for repeat in range(3):

        def probed(*args: Any, repeat: int = repeat) -> dict[str, Any]:
            measured = row(*args)
            return measured | {"waited_s": measured["epoch"] + 10.0 * measured["rank"] + 100.0 * repeat}

        with monkeypatch.context() as probe:
            probe.setattr(factory, "_rank", probed)
            factory.published(factory.config(tmp_path, strategy="ddp", devices=2, repeat=repeat))
    return tmp_path


def test_a_declared_column_is_in_every_table(results: Path) -> None:
    runs = load(results)
    field = pq.read_schema(next(results.rglob("ranks.parquet"))).field("waited_s")
    assert field.metadata == {b"doc": WAITED[0].doc.encode(), b"unit": b"s", b"null": b"not measured"}
    epochs, metrics, configurations = per_epoch(runs), per_run(runs), summary(runs)
    # Ranks 0 and 1: e + (e + 10), and 200 more per repeat.
    assert epochs["waited_sum_s"].to_list() == [2 * e + 10 + 200 * r for r in range(3) for e in (1, 2, 3)]
    assert metrics["steady_waited_s"].to_list() == [15.0, 215.0, 415.0], "epochs 2 and 3"
    assert configurations["steady_waited_s"].to_list() == [215.0]


def test_a_declared_formula_is_computed(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = Metric("last_waited_s", "…", epochs=pl.col("waited_sum_s").last(), row=pl.col("last_waited_s") / 2)
    each = Metric("waited_by_rank_s", "…", repeats=Over.MEDIAN, row=pl.col("last_waited_s") / pl.col("processes"))
    monkeypatch.setattr(columns_module, "PER_RUN", (*columns_module.PER_RUN, last, each))
    runs = load(results)
    assert per_run(runs)["last_waited_s"].to_list() == [8.0, 108.0, 208.0]
    assert summary(runs)["waited_by_rank_s"].to_list() == [54.0]


def test_formulas_are_in_the_order_in_which_they_build_on_each_other() -> None:
    """What a formula takes of the epochs has its final name already, so a wrong order would not fail, but be wrong."""
    columns = per_run_columns()
    for place, column in enumerate(columns):
        taken = column.row.meta.root_names() if isinstance(column, Metric) and column.row is not None else []
        later = {each.name for each in columns[place + 1 :] if isinstance(each, Metric)}
        assert not later & set(taken), column.name


IDENTITY = {column.name for column in TABLES["run"] if column.repeats}
"""What `summary` takes from the table `run`."""


def declared() -> list[Column]:
    """Every derived column of an epoch, a run or a configuration."""
    return [*per_epoch_columns(), *per_run_columns(), *PER_FACT, *summary_columns()]


def test_what_follows_has_the_type_unit_and_null_of_its_source() -> None:
    (waited,) = WAITED
    ((_, steady),) = waited.derived(2)
    assert (steady.type, steady.unit, steady.null) == ("float64", "s", "not measured on every rank")
    pushes, peak = table_of(
        count("pushes", "…", null="none"),
        Column("peak_bytes", "…"),
        Column("most_pushes", "…", over=Over.MAX, of="pushes"),
        Column("usual_pushes", "…", over=Over.MEDIAN, of="pushes"),
        Column("usual_peak", "…", over=Over.MEAN, of="peak_bytes"),
    )
    of_pushes, of_peak = ([each for _, each in column.derived()] for column in (pushes, peak))
    assert [(each.type, each.unit, each.null) for each in of_pushes] == [
        ("int32", None, "none"),
        ("float64", None, "none"),
    ]
    assert [(each.type, each.unit, each.null) for each in of_peak] == [("float64", "bytes", None)]
    with pytest.raises(AssertionError, match="elsewhere"):
        table_of(Column("most_pushes", "…", over=Over.MAX, of="elsewhere"))


UNITS = {"_s": "s", "_bytes": "bytes", "_samples_per_s": "samples/s", "_bytes_per_s": "bytes/s", "_j": "J", "_w": "W"}
UNITS |= {"_flop_per_s": "flop/s", "tokens_per_s": "tokens/s", "_hz": "Hz", "_c": "°C"}


def test_units_are_those_of_the_names() -> None:
    for column in [*(column for columns in TABLES.values() for column in columns), *declared()]:
        ends = [end for end in UNITS if column.name.endswith(end)]
        if ends and column.type in ("float64", "int64"):
            assert column.unit == UNITS[max(ends, key=len)], column.name


def test_only_measured_columns_are_published() -> None:
    fields = [field for table in TABLES for field in schema(table)]
    assert not {column.name for column in declared()} & {field.name for field in fields} - IDENTITY
    assert all(field.nullable == (b"null" in field.metadata) for field in fields)
