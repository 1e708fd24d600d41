"""Measured steps with their machines, and where the shipped ones are."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from analysis.advisor.layouts import Layouts
from analysis.advisor.machines import Machines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from analysis.advisor.layouts import Values
    from analysis.advisor.measurements import Source

_FILES: dict[Source, tuple[str, ...]] = {
    "vtrain": ("vtrain_single_node.csv", "vtrain_multi_node.csv"),
    "llm_foundry": ("llm_foundry_a100_40gb.csv",),
}


def shipped_files(source: Source) -> list[Path]:
    """The published measurements that come with the suite."""
    folder = Path(str(resources.files("analysis"))) / "advisor" / "data"
    return [folder / name for name in _FILES[source]]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Steps that were measured."""

    layouts: Layouts
    machines: Machines
    time_s: Values

    def __len__(self) -> int:
        return len(self.layouts)

    def take(self, rows: NDArray[np.bool_]) -> Evidence:
        """Only these rows."""
        return Evidence(layouts=self.layouts.take(rows), machines=self.machines.take(rows), time_s=self.time_s[rows])

    def holds(self, layouts: Layouts, machines: Machines) -> NDArray[np.bool_]:
        """Which of these layouts it has on these machines."""
        held = set(_keys(self.layouts, self.machines))
        return np.array([key in held for key in _keys(layouts, machines)], dtype=bool)


def _keys(layouts: Layouts, machines: Machines) -> list[tuple[float, ...]]:
    columns = [getattr(each, field.name).tolist() for each in (layouts, machines) for field in fields(each)]
    return list(zip(*columns, strict=True))


def joined_evidence(parts: Sequence[Evidence]) -> Evidence:
    """The rows of all."""

    def stacked(kind: type[Layouts] | type[Machines], values: Sequence[Layouts | Machines]) -> dict[str, Values]:
        return {each.name: np.concatenate([getattr(v, each.name) for v in values]) for each in fields(kind)}

    return Evidence(
        layouts=Layouts(**stacked(Layouts, [part.layouts for part in parts])),
        machines=Machines(**stacked(Machines, [part.machines for part in parts])),
        time_s=np.concatenate([part.time_s for part in parts]),
    )
