"""Polars; its threads are set before it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from parallelbench.config.task import HASH_FACTOR, HASH_MASK, HASH_TERM, SUBSET_BOUND
from parallelbench.preprocess.engines import Engine
from parallelbench.preprocess.recipes import per_pixel
from parallelbench.preprocess.tables import addresses

if TYPE_CHECKING:
    import pyarrow as pa


class WithPolars(Engine):
    """Lazy frames, collected at the end of the recipe."""

    package = "polars"

    def take_in(self, table: pa.Table) -> pl.DataFrame:
        """A frame over the table's buffers, where polars can."""
        frame = pl.from_arrow(table)
        assert isinstance(frame, pl.DataFrame)
        return frame

    def compute(self, data: pl.DataFrame) -> pl.DataFrame:
        """Carry out the recipe."""
        lazy, column = data.lazy(), pl.col
        match self.task.recipe:
            case "normalise":
                planned = lazy.with_columns(pixels=self._normalised())
            case "filter":
                planned = lazy.filter(column("label") < self.task.kept_labels)
            case "subset":
                hashes = (column("sample") * HASH_FACTOR + HASH_TERM) & HASH_MASK
                planned = lazy.filter(hashes < SUBSET_BOUND)
            case "statistics":
                planned = self._statistics(lazy)
            case "join":
                planned = lazy.join(self._labels().lazy(), on="label", how="inner", maintain_order="left")
            case "sort":
                planned = lazy.sort("label", "sample")
            case _:
                raise AssertionError(self.task.recipe)
        return planned.collect()

    def _normalised(self) -> pl.Expr:
        kind = pl.Array(pl.Float32, self.task.pixels)

        def row(channels: tuple[float, ...]) -> pl.Expr:
            return pl.lit(pl.Series([per_pixel(self.task, channels)], dtype=kind)).first()

        scaled = pl.col("pixels").cast(kind) / pl.lit(255.0, pl.Float32)
        return (scaled - row(self.task.mean)) / row(self.task.deviation)

    def _statistics(self, lazy: pl.LazyFrame) -> pl.LazyFrame:
        pixels = pl.col("pixels").cast(pl.Array(pl.Int64, self.task.pixels))
        values = pl.col("count") * self.task.pixels
        mean = pl.col("total") / values
        return (
            lazy.select("label", total=pixels.arr.sum(), squares=(pixels * pixels).arr.sum())
            .group_by("label")
            .agg(count=pl.len().cast(pl.Int64), total=pl.col("total").sum(), squares=pl.col("squares").sum())
            .sort("label")
            .select("label", "count", mean=mean, deviation=(pl.col("squares") / values - mean.pow(2)).sqrt())
        )

    def _labels(self) -> pl.DataFrame:
        return pl.DataFrame({"label": range(self.task.classes), "group": self.task.groups})

    def give_out(self, result: pl.DataFrame) -> pa.Table:
        """An Arrow table over the frame's buffers, where Arrow has the types."""
        return result.to_arrow()

    def shared(self, data: pl.DataFrame) -> set[int]:
        """Where the frame's buffers lie."""
        return set(addresses(data.to_arrow()))
