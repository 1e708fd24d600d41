"""torch on the CPU."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from parallelbench.config.task import HASH_FACTOR, HASH_MASK, HASH_TERM, SUBSET_BOUND
from parallelbench.preprocess.engines import Engine
from parallelbench.preprocess.recipes import per_pixel
from parallelbench.preprocess.tables import batch, columns_of
from parallelbench.world.threads import require_threads

if TYPE_CHECKING:
    import pyarrow as pa

    from parallelbench.config.task import Task


Tensors = dict[str, torch.Tensor]


class WithTorch(Engine):
    """Tensors in host memory."""

    package = "torch"

    def __init__(self, task: Task, threads: int) -> None:
        super().__init__(task, threads)
        torch.set_num_threads(threads)
        require_threads()

    def take_in(self, table: pa.Table) -> Tensors:
        """Tensors over the table's buffers; several batches are joined, which copies them."""
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nothing writes to them
        return {name: torch.from_numpy(values) for name, values in columns_of(table).items()}

    def compute(self, data: Tensors) -> Tensors:
        """Carry out the recipe."""
        label, sample, pixels = data["label"], data["sample"], data["pixels"]
        match self.task.recipe:
            case "normalise":
                mean, deviation = (
                    torch.from_numpy(per_pixel(self.task, values)) for values in (self.task.mean, self.task.deviation)
                )
                return data | {"pixels": pixels.to(torch.float32).div_(255).sub_(mean).div_(deviation)}
            case "filter":
                return _rows(data, torch.nonzero(label < self.task.kept_labels)[:, 0])
            case "subset":
                hashes = (sample * HASH_FACTOR + HASH_TERM) & HASH_MASK
                return _rows(data, torch.nonzero(hashes < SUBSET_BOUND)[:, 0])
            case "statistics":
                return self._statistics(label, pixels)
            case "join":
                return data | {"group": torch.tensor(self.task.groups)[label]}
            case "sort":
                by_sample = torch.argsort(sample, stable=True)
                return _rows(data, by_sample[torch.argsort(label[by_sample], stable=True)])
        raise AssertionError(self.task.recipe)

    def _statistics(self, label: torch.Tensor, pixels: torch.Tensor) -> Tensors:
        count = torch.bincount(label, minlength=self.task.classes)
        occurs = torch.nonzero(count)[:, 0]
        values = count[occurs] * self.task.pixels
        whole = pixels.to(torch.int32)
        sums = [each.sum(1, dtype=torch.int64).double() for each in (whole, whole * whole)]
        total, squares = (torch.bincount(label, each, minlength=self.task.classes)[occurs] for each in sums)
        mean = total / values
        return {
            "label": occurs,
            "count": count[occurs],
            "mean": mean,
            "deviation": torch.sqrt(squares / values - mean**2),
        }

    def give_out(self, result: Tensors) -> pa.Table:
        """Arrow arrays over the tensors' memory."""
        import pyarrow as pa

        return pa.Table.from_batches([batch({name: values.numpy() for name, values in result.items()})])

    def shared(self, data: Tensors) -> set[int]:
        """Where the tensors lie."""
        return {values.data_ptr() for values in data.values()}


def _rows(data: Tensors, which: torch.Tensor) -> Tensors:
    return {name: values.index_select(0, which) for name, values in data.items()}
