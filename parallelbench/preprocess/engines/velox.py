"""Velox, by the bindings of pyvelox, in an environment of its own.

What was found out about pyvelox 0.2.0: bytes without a sign are no type of it, and importing them ends the process, so
pixels become lists of int16. A plan that is freed before the process ends takes the next one with it ("pure virtual
method called"), so all are kept. It can't read Parquet ("ReaderFactory is not registered for format parquet").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyvelox.arrow import to_arrow, to_velox
from pyvelox.plan_builder import PlanBuilder
from pyvelox.runner import LocalRunner

from parallelbench.config.task import HASH_FACTOR, HASH_MASK, HASH_TERM, SUBSET_BOUND
from parallelbench.preprocess.engines import Engine
from parallelbench.preprocess.tables import addresses, cut

if TYPE_CHECKING:
    from parallelbench.config.task import Task


class WithVelox(Engine):
    """One plan per execution; expressions in the SQL of Presto."""

    package = "pyvelox"

    def __init__(self, task: Task, threads: int) -> None:
        super().__init__(task, threads)
        self._kept: list[Any] = []

    def take_in(self, table: pa.Table) -> Any:
        """Vectors, with the pixels as int16: a vector per record batch."""
        batches = [part for batch in table.to_batches() for part in cut(batch, values=self.task.pixels)]
        imported = pa.Table.from_batches([_signed(batch) for batch in batches])
        vectors = [to_velox(batch) for batch in imported.to_batches()]
        self._kept += [imported, vectors]
        return imported, vectors

    def compute(self, data: Any) -> list[pa.Array]:
        """Run the plan; the result's vectors are handed over one by one, while it runs."""
        planned = self._planned(PlanBuilder().values(data[1]))
        runner = LocalRunner(planned.get_plan_node())
        self._kept += [planned, runner]
        return [to_arrow(vector) for vector in runner.execute(self.threads)]

    def give_out(self, result: list[pa.Array]) -> pa.Table:
        """An Arrow table over the vectors' buffers; pixels that are still int16 become bytes again."""
        table = pa.Table.from_batches([pa.RecordBatch.from_struct_array(part) for part in result])
        table = table.rename_columns(["group" if name == "grp" else name for name in table.column_names])
        place = table.schema.get_field_index("pixels")
        if place >= 0 and table.schema.field(place).type.value_type == pa.int16():
            table = table.set_column(place, "pixels", table["pixels"].cast(pa.list_(pa.uint8())))
        return table

    def shared(self, data: Any) -> set[int]:
        """What was handed to Velox as it was: it imports Arrow's buffers without a copy."""
        return set(addresses(data[0]))

    def _planned(self, plan: Any) -> Any:
        task = self.task
        match task.recipe:
            case "normalise":
                return plan.project(["sample", "label", f"{self._normalised()} as pixels"])
            case "filter":
                return plan.filter(f"label < {task.kept_labels}")
            case "subset":
                hashes = f"bitwise_and(sample * {HASH_FACTOR} + {HASH_TERM}, {HASH_MASK})"
                return plan.filter(f"{hashes} < {SUBSET_BOUND}")
            case "statistics":
                return self._statistics(plan)
            case "join":
                labels = pa.record_batch({"known": pa.array(range(task.classes)), "grp": pa.array(task.groups)})
                self._kept.append(to_velox(labels))
                known = plan.new_builder().values([self._kept[-1]]).get_plan_node()
                return plan.hash_join(["label"], ["known"], known, output=["sample", "label", "pixels", "grp"])
            case "sort":
                return plan.order_by(["label", "sample"])
        raise AssertionError(task.recipe)

    def _normalised(self) -> str:
        """The channels' slices, each with its own numbers, in float32."""
        size = self.task.pixels // len(self.task.mean)
        parts = []
        for place, (mean, deviation) in enumerate(zip(self.task.mean, self.task.deviation, strict=True)):
            pixels = "pixels" if len(self.task.mean) == 1 else f"slice(pixels, {place * size + 1}, {size})"
            shifted = f"cast(x as real) / cast(255.0 as real) - cast({mean!r} as real)"
            parts.append(f"transform({pixels}, x -> ({shifted}) / cast({deviation!r} as real))")
        return parts[0] if len(parts) == 1 else f"concat({', '.join(parts)})"

    def _statistics(self, plan: Any) -> Any:
        value = "cast(x as bigint)"
        sums = {"total": value, "squares": f"{value} * {value}"}
        rows = [f"reduce(pixels, cast(0 as bigint), (s, x) -> s + {each}, s -> s) as {n}" for n, each in sums.items()]
        number = f"cast(count * {self.task.pixels} as double)"
        mean, squares = (f"cast({name} as double) / {number}" for name in sums)
        return (
            plan.project(["label", *rows])
            .aggregate(["label"], ["count(1) as count", *(f"sum({name}) as {name}" for name in sums)])
            .project(["label", "count", f"{mean} as mean", f"sqrt({squares} - ({mean}) * ({mean})) as deviation"])
        )


def _signed(batch: pa.RecordBatch) -> pa.RecordBatch:
    size = batch["pixels"].type.list_size
    offsets = pa.array(np.arange(batch.num_rows + 1, dtype=np.int32) * np.int32(size))
    pixels = pa.ListArray.from_arrays(offsets, pc.list_flatten(batch["pixels"]).cast(pa.int16()))
    return pa.record_batch({"sample": batch["sample"], "label": batch["label"], "pixels": pixels})
