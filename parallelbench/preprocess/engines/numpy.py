"""NumPy: the reference itself, one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.preprocess.engines import Engine
from parallelbench.preprocess.recipes import Columns, prepare
from parallelbench.preprocess.tables import batch, columns_of

if TYPE_CHECKING:
    import pyarrow as pa


class WithNumpy(Engine):
    """Arrays."""

    package = "numpy"

    def take_in(self, table: pa.Table) -> Columns:
        """Arrays over the table's buffers; several batches are joined, which copies them."""
        return columns_of(table)

    def compute(self, data: Columns) -> Columns:
        """Carry out the recipe."""
        return prepare(self.task, data)

    def give_out(self, result: Columns) -> pa.Table:
        """Arrow arrays over the arrays' memory."""
        import pyarrow as pa

        return pa.Table.from_batches([batch(result)])

    def shared(self, data: Columns) -> set[int]:
        """Where the arrays lie."""
        return {values.ctypes.data for values in data.values()}
