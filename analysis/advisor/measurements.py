"""Measured steps from CSV files, in the two published formats, recognised by their columns; with their machines."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from analysis.advisor.layouts import Layouts, layouts_of
from analysis.advisor.machine import Machines
from parallelbench.errors import ConfigError, choices

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from analysis.advisor.layouts import Values


Source = Literal["vtrain", "llm_foundry"]

_VTRAIN = {
    "# GPUs": "devices",
    "global batch": "global_batch",
    "micro batch": "micro_batch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "sequence",
    "tensor parallelism": "tensor",
    "data parallelism": "data",
    "pipeline parallelism": "pipeline",
    "iteration time (ms)": "time_ms",
}
_VTRAIN_REST = {"Parameters (billion)"}
_FOUNDRY = {
    "SeqLen (T)": "sequence",
    "# GPUs": "devices",
    "MicroBatchSize": "micro_batch",
    "GlobalBatchSize": "global_batch",
    "Throughput (T/s)": "tokens_per_s",
}
_FOUNDRY_WORDS = {"Model", "GPU", "Activation Checkpointing", "Precision", "Sharding Strategy", "Activation CPUOffload"}
_FOUNDRY_REST = {
    *("MFU", "HFU", "Model TFLOP", "GradAccum", "Throughput (S/s)", "Throughput (T/s/GPU)", "GlobalBatchSize (T)"),
    *("MP Mode", "NumParams", "section"),
}
VTRAIN_VOCABULARY = 50_257
FOUNDRY_VOCABULARY = 50_368
SHAPES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
"""Layers, width and heads of llm-foundry's MPT models, from its scripts/train/yamls/pretrain (Apache 2.0)."""
_YES_NO = {"True": 1.0, "False": 0.0}
_PRECISIONS = {"bf16": 0.0, "amp_bf16": 0.0, "fp16": 0.0, "amp_fp16": 0.0, "fp8": 1.0, "amp_fp8": 1.0}
_NETWORK = re.compile(r"(\d+(?:\.\d+)?) ?Gbps", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured steps."""

    source: Source
    layouts: Layouts
    time_s: Values
    """Seconds of one step."""
    models: list[str]
    """The name of each row's model."""
    accelerators: list[str | None]
    """What each row ran on, where the file says so."""
    network_gbit_per_s: list[float | None]
    """Network of a node, where the file says so."""

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> Measured:
        """Only these rows."""
        chosen = np.arange(len(self.layouts))[rows].tolist()
        return Measured(
            source=self.source,
            layouts=self.layouts.take(rows),
            time_s=self.time_s[rows],
            models=[self.models[i] for i in chosen],
            accelerators=[self.accelerators[i] for i in chosen],
            network_gbit_per_s=[self.network_gbit_per_s[i] for i in chosen],
        )


def read_measured(path: Path) -> Measured:
    """The measured steps of a CSV file.

    Raises `ConfigError` where the file has no rows, columns of neither format, or a value that can't be.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            rows, columns = list(reader), list(reader.fieldnames or [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} can't be read as CSV: {error}") from None
    source = _source(path, columns)
    if not rows:
        raise ConfigError(f"{path} has no rows: give a file with at least one measured step")
    return (_vtrain if source == "vtrain" else _foundry)(path, rows)


def _source(path: Path, columns: Sequence[str]) -> Source:
    """Which format the columns are of; raises `ConfigError` that names missing and unknown ones."""
    formats: dict[Source, tuple[set[str], set[str]]] = {
        "vtrain": (set(_VTRAIN), _VTRAIN_REST),
        "llm_foundry": (set(_FOUNDRY) | _FOUNDRY_WORDS, _FOUNDRY_REST),
    }
    nearest = max(formats, key=lambda name: len(formats[name][0] & set(columns)))
    needed, rest = formats[nearest]
    where = f"{path}: read as {nearest}'s format"
    if unknown := [column for column in columns if column not in needed | rest]:
        raise ConfigError(f"{where}, {unknown[0]!r} is no column of it: {choices(unknown[0], needed | rest)}")
    if missing := sorted(needed - set(columns)):
        raise ConfigError(f"{where}, it lacks the column {missing[0]!r}: name it and its unit exactly so")
    return nearest


def _number(path: Path, line: int, row: Mapping[str, str | None], column: str) -> float:
    try:
        value = float(row[column] or "")
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise ConfigError(f"{path}, line {line}: {column}={row[column]!r} is not valid: expected a number above 0")
    return value


def _choice(
    path: Path, row: int, values: Mapping[str, str | None], column: str, *, valid: Mapping[str, float]
) -> float:
    value = values[column] or ""
    if value not in valid:
        raise ConfigError(f"{path}, line {row + 2}: {column}={value!r} can't be predicted: {choices(value, valid)}")
    return valid[value]


def _columns(path: Path, rows: Sequence[Mapping[str, str | None]], names: Mapping[str, str]) -> dict[str, Values]:
    return {
        name: np.array([_number(path, line, row, column) for line, row in enumerate(rows, start=2)])
        for column, name in names.items()
    }


def _refuse(path: Path, wrong: NDArray[np.bool_], describe: Callable[[int], str]) -> None:
    """Raise `ConfigError` for the first row that is wrong."""
    if wrong.any():
        first = int(np.argmax(wrong))
        raise ConfigError(f"{path}, line {first + 2}: {describe(first)}")


def _vtrain(path: Path, rows: Sequence[Mapping[str, str | None]]) -> Measured:
    columns = _columns(path, rows, _VTRAIN)
    devices, time_ms = columns.pop("devices"), columns.pop("time_ms")
    layouts = layouts_of(
        columns | {"vocabulary": VTRAIN_VOCABULARY, "recompute": 1, "sharded": 0, "fused_attention": 0, "fp8": 0}
    )
    _refuse(path, layouts.devices != devices, lambda i: f"tensor × data × pipeline is not # GPUs={devices[i]:g}")
    _refuse(path, layouts.micro_batches % 1 > 0, lambda i: "global batch is no multiple of data × micro batch")
    models = [f"h{h:g}-l{n:g}" for h, n in zip(layouts.hidden, layouts.layers, strict=True)]
    none: list[None] = [None] * len(rows)
    return Measured(
        source="vtrain",
        layouts=layouts,
        time_s=time_ms / 1e3,
        models=models,
        accelerators=[*none],
        network_gbit_per_s=[*none],
    )


def _foundry(path: Path, rows: Sequence[Mapping[str, str | None]]) -> Measured:
    columns = _columns(path, rows, _FOUNDRY)
    models = [row["Model"] or "" for row in rows]
    unknown = np.array([model not in SHAPES for model in models])
    _refuse(path, unknown, lambda i: f"Model={models[i]!r} is not known: {choices(models[i], SHAPES)}")
    layers, hidden, heads = (np.array([SHAPES[model][i] for model in models], dtype=float) for i in range(3))
    sections = [_NETWORK.search(row.get("section") or "") for row in rows]
    for i, row in enumerate(rows):
        _choice(path, i, row, "Sharding Strategy", valid={"FULL_SHARD": 1.0})
        _choice(path, i, row, "Activation CPUOffload", valid={"False": 0.0})
    devices, tokens_per_s = columns.pop("devices"), columns.pop("tokens_per_s")
    layouts = layouts_of(
        columns
        | {"layers": layers, "hidden": hidden, "heads": heads, "vocabulary": FOUNDRY_VOCABULARY}
        | {"tensor": 1, "pipeline": 1, "data": devices, "sharded": 1, "fused_attention": 1}
        | {
            "recompute": [
                _choice(path, i, row, "Activation Checkpointing", valid=_YES_NO) for i, row in enumerate(rows)
            ]
        }
        | {"fp8": [_choice(path, i, row, "Precision", valid=_PRECISIONS) for i, row in enumerate(rows)]}
    )
    return Measured(
        source="llm_foundry",
        layouts=layouts,
        time_s=layouts.global_batch * layouts.sequence / tokens_per_s,
        models=models,
        accelerators=[row["GPU"] for row in rows],
        network_gbit_per_s=[float(each[1]) if each else None for each in sections],
    )


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
