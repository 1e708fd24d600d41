"""DuckDB: one SQL query in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import duckdb

from parallelbench.config.task import HASH_FACTOR, HASH_MASK, HASH_TERM, SUBSET_BOUND
from parallelbench.preprocess.engines import Engine

if TYPE_CHECKING:
    import pyarrow as pa

    from parallelbench.config.task import Task


class WithDuckdb(Engine):
    """It scans the Arrow table while the query runs: taking in is registering."""

    package = "duckdb"

    def __init__(self, task: Task, threads: int) -> None:
        super().__init__(task, threads)
        self._connection = duckdb.connect(config={"threads": threads})
        rows = ", ".join(f"({label}, {group})" for label, group in enumerate(task.groups))
        self._connection.execute("create table labels (label bigint, grp bigint)")
        self._connection.execute(f"insert into labels values {rows}")

    def take_in(self, table: pa.Table) -> str:
        """The name that the query reads the table by."""
        self._connection.register("stored", table)
        return "stored"

    def compute(self, data: str) -> pa.Table:
        """Run the query to its end; DuckDB builds the Arrow table as it goes, so that is part of it."""
        return self._connection.sql(self.query(data)).to_arrow_table()

    def give_out(self, result: pa.Table) -> pa.Table:
        """The table itself."""
        return result

    def query(self, table: str) -> str:
        """The recipe as SQL."""
        match self.task.recipe:
            case "normalise":
                return f"select sample, label, {self._normalised()} as pixels from {table}"
            case "filter":
                return f"select * from {table} where label < {self.task.kept_labels}"
            case "subset":
                hashes = f"(sample * {HASH_FACTOR} + {HASH_TERM}) & {HASH_MASK}"
                return f"select * from {table} where ({hashes}) < {SUBSET_BOUND}"
            case "statistics":
                values = f"(count(*) * {self.task.pixels})"
                mean, squares = f"sum(total) / {values}", f"sum(squares) / {values}"
                return (
                    f"select label, count(*) as count, {mean} as mean, sqrt({squares} - ({mean}) ** 2) as deviation "
                    "from (select label, list_sum(pixels::bigint[]) as total, "
                    f"list_sum(list_transform(pixels::bigint[], lambda x: x * x)) as squares from {table}) "
                    "group by label order by label"
                )
            case "join":
                return f'select stored.*, grp as "group" from {table} as stored join labels using (label)'
            case "sort":
                return f"select * from {table} order by label, sample"
        raise AssertionError(self.task.recipe)

    def _normalised(self) -> str:
        """The channels' slices, each with its own numbers; in float32, as literals are decimals otherwise."""
        size = self.task.pixels // len(self.task.mean)
        parts = [
            f"list_transform(pixels[{place * size + 1}:{(place + 1) * size}], "
            f"lambda x: (x::float / 255::float - '{mean!r}'::float) / '{deviation!r}'::float)"
            for place, (mean, deviation) in enumerate(zip(self.task.mean, self.task.deviation, strict=True))
        ]
        whole = parts[0]
        for part in parts[1:]:
            whole = f"list_concat({whole}, {part})"
        return whole
