"""Measured steps from CSV files, in the two published formats, recognised by their columns; with their machines."""

from __future__ import annotations

import csv
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from analysis.advisor.layouts import layouts_of
from parallelbench.errors import ConfigError, choices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from analysis.advisor.layouts import Layouts, Values
    from analysis.advisor.machine import Machines


Source = Literal["vtrain", "llm_foundry"]
Columns = Mapping[str, tuple[str | None, str]]
_GPU = "GPU"
_VTRAIN: Columns = {
    "# GPUs": ("devices", "GPUs of the job"),
    "global batch": ("global_batch", "samples of a step"),
    "micro batch": ("micro_batch", "samples that a replica takes at a time"),
    "hidden size": ("hidden", "the width of the residual stream"),
    "attention heads": ("heads", "heads of attention"),
    "# layers": ("layers", "blocks of attention and MLP"),
    "sequence length": ("sequence", "tokens of a sample"),
    "tensor parallelism": ("tensor", "GPUs that share a layer's matrices"),
    "data parallelism": ("data", "replicas of the model"),
    "pipeline parallelism": ("pipeline", "stages"),
    "iteration time (ms)": ("time_ms", "time of a step, to compare with"),
}
"""Column → its name here, and what it is needed for."""
_VTRAIN_IGNORED = {"Parameters (billion)", _GPU}
_FOUNDRY: Columns = {
    "SeqLen (T)": ("sequence", "tokens of a sample"),
    "# GPUs": ("devices", "GPUs of the job"),
    "MicroBatchSize": ("micro_batch", "samples that a replica takes at a time"),
    "GlobalBatchSize": ("global_batch", "samples of a step"),
    "Throughput (T/s)": ("tokens_per_s", "tokens of all GPUs per second, to compare with"),
    "Model": (None, "which of MPT's sizes it is"),
    _GPU: (None, "what it ran on"),
    "Activation Checkpointing": (None, "whether forward passes are repeated: True or False"),
    "Precision": (None, "arithmetic of the products, e.g. bf16"),
    "Sharding Strategy": (None, "FULL_SHARD or SHARD_GRAD_OP"),
    "Activation CPUOffload": (None, "False, since no formula knows the other"),
}
"""The same; None: words."""
_FOUNDRY_IGNORED = {
    *("MFU", "HFU", "Model TFLOP", "GradAccum", "Throughput (S/s)", "Throughput (T/s/GPU)", "GlobalBatchSize (T)"),
    *("MP Mode", "NumParams", "section"),
}
VTRAIN_VOCABULARY, VTRAIN_PER_NODE = 50_257, 8
VOCABULARY_MULTIPLE = 128
"""Megatron-LM pads each tensor rank's share of the vocabulary to a multiple of it (`--make-vocab-size-divisible-by`).
Runs on several nodes are taken to do so."""
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
class FileStep:
    """One measured step, as a file has it."""

    layout: Mapping[str, float]
    time_s: float
    model: str
    """Its name."""
    accelerator: str | None = None
    """What it ran on, where the file says so."""
    network_gbit_per_s: float | None = None
    """Network of a node, where the file says so."""
    line: int = 0
    """Where it stands in the file."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured steps."""

    source: Source
    steps: list[FileStep]
    refused: dict[str, list[int]]
    """Why rows can't be predicted → their lines."""
    unused: list[str]
    """Columns that nothing is known of."""

    @property
    def layouts(self) -> Layouts:
        """One row per step."""
        names = self.steps[0].layout
        return layouts_of({name: [step.layout[name] for step in self.steps] for name in names})

    @property
    def time_s(self) -> Values:
        """Seconds of each step."""
        return np.array([step.time_s for step in self.steps])


def read_measured(path: Path) -> Measured:
    """The measured steps of a CSV file; rows that can't be predicted are left out, with the reason.

    Raises `ConfigError` where the file is no table, lacks a column, or has no row that can be predicted.
    """
    refused: dict[str, list[int]] = defaultdict(list)
    steps = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            source, unused = _source(path, list(reader.fieldnames or []))
            for row in reader:
                try:
                    steps.append(replace(_ROWS[source](row), line=reader.line_num))
                except ConfigError as error:
                    refused[str(error)].append(reader.line_num)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} can't be read as CSV: {error}") from None
    if not steps:
        why = next(reasons(refused), "it has no rows: give a file with at least one measured step")
        raise ConfigError(f"{path}: nothing can be predicted: {why}")
    return Measured(source=source, steps=steps, refused=refused, unused=unused)


def reasons(refused: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """A line for each reason, with the rows that it holds for."""
    for why, lines in refused.items():
        where = ", ".join(map(str, lines[:3])) + (f" and {len(lines) - 3} more" if len(lines) > 3 else "")
        yield f"line {where}: {why}"


def _source(path: Path, columns: Sequence[str]) -> tuple[Source, list[str]]:
    """Which format the columns are of, and those that it does not know; raises `ConfigError` for a missing one."""
    formats: dict[Source, tuple[Columns, set[str]]] = {
        "vtrain": (_VTRAIN, _VTRAIN_IGNORED),
        "llm_foundry": (_FOUNDRY, _FOUNDRY_IGNORED),
    }
    if not columns:
        raise ConfigError(f"{path} is empty: give a table with a line of columns")
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        raise ConfigError(f"{path} has the column {twice[0]!r} twice: keep one of them")
    nearest = max(formats, key=lambda name: len(formats[name][0].keys() & set(columns)))
    needed, rest = formats[nearest]
    unknown = [column for column in columns if column not in {*needed, *rest}]
    if missing := sorted(needed.keys() - set(columns)):
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        has = f"; not recognised: {', '.join(repr(each[:30]) for each in unknown[:3])}" if unknown else ""
        raise ConfigError(
            f"{path}: its columns look most like {nearest}'s format, which needs {missing[0]!r} "
            f"({needed[missing[0]][1]}){more}: name the column and its unit so{has}"
        )
    return nearest, unknown


_MOST = 1_000_000
"""Of whatever is counted."""
_TIMES = ("time_ms", "tokens_per_s")
"""What is measured, not counted."""


def _numbers(row: Mapping[str, str | None], columns: Columns) -> dict[str, float]:
    """By their names here."""
    return {name: _number(row, column, counted=name not in _TIMES) for column, (name, _) in columns.items() if name}


def _number(row: Mapping[str, str | None], column: str, *, counted: bool) -> float:
    try:
        value = float(row[column] or "")
    except ValueError:
        value = math.nan
    if counted and not (1 <= value <= _MOST and value.is_integer()):
        raise ConfigError(f"{column}={row[column]!r} is not valid: expected a whole number from 1 to {_MOST:,}")
    if not (1e-6 <= value <= 1e12):
        raise ConfigError(f"{column}={row[column]!r} is not valid: expected a number above 0, from 1e-6 to 1e12")
    return value


def _choice(row: Mapping[str, str | None], column: str, valid: Mapping[str, float]) -> float:
    value = row[column] or ""
    if value not in valid:
        raise ConfigError(f"{column}={value!r} can't be predicted: {choices(value, valid)}")
    return valid[value]


def _vtrain(row: Mapping[str, str | None]) -> FileStep:
    """Assumed: gradients are reduced after backward, scores written to memory; several nodes recompute every layer."""
    layout: dict[str, Any] = _numbers(row, _VTRAIN)
    devices, time_ms = layout.pop("devices"), layout.pop("time_ms")
    if layout["tensor"] * layout["data"] * layout["pipeline"] != devices:
        raise ConfigError(f"tensor × data × pipeline is not # GPUs={devices:g}")
    if layout["global_batch"] % (layout["data"] * layout["micro_batch"]):
        raise ConfigError("global batch is no multiple of data × micro batch")
    for share, whole in (("tensor", "heads"), ("pipeline", "layers")):
        if layout[whole] % layout[share]:
            raise ConfigError(f"{share} parallelism={layout[share]:g} does not divide {whole}={layout[whole]:g}")
    across = devices > VTRAIN_PER_NODE
    group = VOCABULARY_MULTIPLE * layout["tensor"] if across else 1
    layout |= {"vocabulary": group * math.ceil(VTRAIN_VOCABULARY / group), "recompute": float(across)}
    fixed = {"sharded": 0, "fused_attention": 0, "fp8": 0}
    return FileStep(
        layout=layout | fixed,
        time_s=time_ms / 1e3,
        model=f"h{layout['hidden']:g}-l{layout['layers']:g}",
        accelerator=row.get(_GPU) or None,
    )


def _foundry(row: Mapping[str, str | None]) -> FileStep:
    """Assumed: causal FlashAttention; parameters cut over all devices, gathered for forward and for backward of each
    micro-batch, under SHARD_GRAD_OP once for both.
    """
    layout: dict[str, Any] = _numbers(row, _FOUNDRY)
    model = row["Model"] or ""
    if model not in SHAPES:
        raise ConfigError(f"Model={model!r} is not known: {choices(model, SHAPES)}")
    if not row["GPU"]:
        raise ConfigError("GPU is empty: name what the step ran on, such as a100_40gb")
    layout["stays_gathered"] = _choice(row, "Sharding Strategy", {"FULL_SHARD": 0.0, "SHARD_GRAD_OP": 1.0})
    _choice(row, "Activation CPUOffload", {"False": 0.0})  # nothing else is predicted
    layout["recompute"] = _choice(row, "Activation Checkpointing", _YES_NO)
    layout["fp8"] = _choice(row, "Precision", _PRECISIONS)
    layout |= dict(zip(("layers", "hidden", "heads"), SHAPES[model], strict=True))
    layout |= {"vocabulary": FOUNDRY_VOCABULARY, "tensor": 1, "pipeline": 1, "sharded": 1, "fused_attention": 1}
    layout["data"] = layout.pop("devices")
    tokens_per_s = layout.pop("tokens_per_s")
    if layout["global_batch"] % (layout["data"] * layout["micro_batch"]):
        raise ConfigError("GlobalBatchSize is no multiple of # GPUs × MicroBatchSize")
    network = _NETWORK.search(row.get("section") or "")
    return FileStep(
        layout=layout,
        time_s=layout["global_batch"] * layout["sequence"] / tokens_per_s,
        model=model,
        accelerator=row["GPU"],
        network_gbit_per_s=float(network[1]) if network else None,
    )


_ROWS = {"vtrain": _vtrain, "llm_foundry": _foundry}
_FILES: dict[Source, tuple[str, ...]] = {
    "vtrain": ("vtrain_single_node.csv", "vtrain_multi_node.csv"),
    "llm_foundry": ("llm_foundry_a100_40gb.csv",),
}


def shipped_files(source: Source) -> list[Path]:
    """The published measurements that come with the suite."""
    return [Path(__file__).parent / "data" / name for name in _FILES[source]]


def shipped(source: Source) -> Measured:
    """Their steps."""
    files = [read_measured(file) for file in shipped_files(source)]
    return Measured(source=source, steps=[step for file in files for step in file.steps], refused={}, unused=[])


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Steps that were measured, with what they ran on."""

    layouts: Layouts
    machines: Machines
    accelerators: list[str]
    models: list[str]
    time_s: Values

    def __len__(self) -> int:
        return len(self.layouts)

    def take(self, rows: NDArray[np.bool_]) -> Evidence:
        """Only these rows."""
        kept = np.flatnonzero(rows).tolist()
        return Evidence(
            layouts=self.layouts.take(rows),
            machines=self.machines.take(rows),
            accelerators=[self.accelerators[place] for place in kept],
            models=[self.models[place] for place in kept],
            time_s=self.time_s[rows],
        )


def layout_keys(layouts: Layouts) -> list[tuple[float, ...]]:
    """Equal for equal rows."""
    return list(zip(*(values.tolist() for values in vars(layouts).values()), strict=True))
