"""Declared aggregates as polars expressions: the only place that says what `Over` computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from parallelbench.results.tables import Over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from parallelbench.results.tables import Column


def aggregates(pairs: Iterable[tuple[Column, Column]], *, steady: pl.Expr | None = None) -> list[pl.Expr]:
    """Each pair's second column out of the first one, for a `group_by`; `steady` keeps the rows of steady columns."""

    def values(source: Column, column: Column) -> pl.Expr:
        every = pl.col(source.name)
        return every.filter(steady) if column.steady and steady is not None else every

    return [aggregate(values(source, column), column.over).alias(column.name) for source, column in pairs]


def aggregate(values: pl.Expr | str, over: Over | None) -> pl.Expr:
    """One value out of several."""
    assert over is not None
    return _EXPRESSIONS[over](pl.col(values) if isinstance(values, str) else values)


def _whole(values: pl.Expr, result: pl.Expr) -> pl.Expr:
    return pl.when(values.null_count() == 0, values.len() > 0).then(result)


def _bits(values: pl.Expr) -> pl.Expr:
    return pl.when(values.count() > 0).then(values.drop_nulls().bitwise_or())


def _flags(values: pl.Expr) -> pl.Expr:
    # Unique texts first: there are few of them, and many rows.
    flags = values.drop_nulls().unique().str.split(" ").explode().unique().sort()
    return pl.when(values.count() > 0).then(flags.str.join(" "))


_EXPRESSIONS: dict[Over, Callable[[pl.Expr], pl.Expr]] = {
    Over.SUM: lambda values: _whole(values, values.sum()),
    Over.MEAN: lambda values: _whole(values, values.mean()),
    Over.MEDIAN: pl.Expr.median,
    Over.MAX: pl.Expr.max,
    Over.MIN: pl.Expr.min,
    Over.LAST: lambda values: values.drop_nulls().last(),
    Over.BITS: _bits,
    Over.FLAGS: _flags,
    Over.FIRST: lambda values: values.drop_nulls().first(),
    Over.SAME: pl.Expr.first,
}
