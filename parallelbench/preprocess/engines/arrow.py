"""Arrow's own compute functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from parallelbench.config.task import HASH_FACTOR, HASH_MASK, HASH_TERM, SUBSET_BOUND
from parallelbench.preprocess.engines import Engine
from parallelbench.preprocess.recipes import per_pixel
from parallelbench.preprocess.tables import addresses

if TYPE_CHECKING:
    from parallelbench.config.task import Task


class WithArrow(Engine):
    """Arrow tables; no form of its own. Elementwise functions have one thread, whatever they are allowed."""

    package = "pyarrow"

    def __init__(self, task: Task, threads: int) -> None:
        super().__init__(task, threads)
        pa.set_cpu_count(threads)

    def take_in(self, table: pa.Table) -> pa.Table:
        """The table itself."""
        return table

    def compute(self, data: pa.Table) -> pa.Table:
        """Carry out the recipe."""
        match self.task.recipe:
            case "normalise":
                return pa.Table.from_batches([self._normalised(batch) for batch in data.to_batches()])
            case "filter":
                return data.filter(pc.less(data["label"], self.task.kept_labels))
            case "subset":
                hashes = pc.bit_wise_and(pc.add(pc.multiply(data["sample"], HASH_FACTOR), HASH_TERM), HASH_MASK)
                return data.filter(pc.less(hashes, SUBSET_BOUND))
            case "statistics":
                return self._statistics(data)
            case "join":
                # Its hash join takes no lists, so labels are looked up instead.
                place = pc.index_in(data["label"], value_set=pa.array(range(self.task.classes), pa.int64()))
                return data.append_column("group", pc.take(pa.array(self.task.groups, pa.int64()), place))
            case "sort":
                return data.sort_by([("label", "ascending"), ("sample", "ascending")])
        raise AssertionError(self.task.recipe)

    def _normalised(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        values = pc.divide(pc.list_flatten(batch["pixels"]).cast(pa.float32()), _real(255))
        mean, deviation = (self._per_value(each, batch.num_rows) for each in (self.task.mean, self.task.deviation))
        values = pc.divide(pc.subtract(values, mean), deviation)
        pixels = pa.FixedSizeListArray.from_arrays(values, self.task.pixels)
        return pa.record_batch({"sample": batch["sample"], "label": batch["label"], "pixels": pixels})

    def _per_value(self, channels: tuple[float, ...], rows: int) -> Any:
        """One number, or as many as there are values where channels have their own."""
        if len(channels) == 1:
            return _real(channels[0])
        import numpy as np

        return pa.array(np.tile(per_pixel(self.task, channels), rows))

    def _statistics(self, data: pa.Table) -> pa.Table:
        """Arrow has no sum within a list: the values are flattened, batch by batch, beside their labels."""
        parts = []
        for batch in data.to_batches():
            values = pc.list_flatten(batch["pixels"]).cast(pa.int64())
            labels = pc.take(batch["label"], pc.list_parent_indices(batch["pixels"]))
            flat = pa.table({"label": labels, "value": values, "square": pc.multiply(values, values)})
            parts.append(_summed(flat, count="value_count"))
        sums = pa.concat_tables(parts).group_by("label").aggregate([(name, "sum") for name in ("n", "value", "square")])
        sums = sums.sort_by("label")
        number = sums["n_sum"].cast(pa.float64())
        mean = pc.divide(sums["value_sum"].cast(pa.float64()), number)
        variance = pc.subtract(pc.divide(sums["square_sum"].cast(pa.float64()), number), pc.multiply(mean, mean))
        count = pc.divide(sums["n_sum"], self.task.pixels)
        return pa.table({"label": sums["label"], "count": count, "mean": mean, "deviation": pc.sqrt(variance)})

    def give_out(self, result: pa.Table) -> pa.Table:
        """The table itself."""
        return result

    def shared(self, data: pa.Table) -> set[int]:
        """The table's own buffers."""
        return set(addresses(data))


def _summed(flat: pa.Table, *, count: str) -> pa.Table:
    wanted = [("value", "count"), ("value", "sum"), ("square", "sum")]
    names = {count: "n", "value_sum": "value", "square_sum": "square"}
    summed = flat.group_by("label").aggregate(wanted)
    return summed.rename_columns([names.get(name, name) for name in summed.column_names])


def _real(value: float) -> pa.Scalar:
    return pa.scalar(value, pa.float32())
