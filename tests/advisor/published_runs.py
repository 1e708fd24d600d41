"""Runs whose layout and speed others published, beside what the advisor says; no fit has seen any of them.

`python -m tests.advisor.published_runs` prints the table of docs/advisor-errors.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from analysis.advisor.fit import published_fit
from analysis.advisor.layouts import Layouts, layouts_of
from analysis.advisor.machine import machines_of
from analysis.advisor.rows import half_widths
from analysis.advisor.transformer import model_flops
from tests.advisor.machine import hardware_of

MEGATRON = "Megatron-LM 2021"
"""Narayanan et al., arXiv 2104.04473, table 1."""
SELECTIVE = "Megatron-LM 2022"
"""Korthikanti et al., arXiv 2205.05198, tables 3 and 5."""
TURING = "MT-NLG"
"""Smith et al. 2022, arXiv 2201.11990, section 2.4."""
LLAMA = "Llama 3"
"""Llama Team 2024, arXiv 2407.21783, table 4."""
TITAN = "torchtitan"
"""pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3 to 5."""
MICRO_BATCHES, CHUNKS = (1.0, 2.0, 4.0, 8.0), (1.0, 2.0, 3.0, 4.0)
"""What a publication does not say is taken as the advisor would choose it: the fastest of these."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One published run."""

    source: str
    name: str
    site: str
    layout: Mapping[str, float]
    hardware: tuple[str, ...] = ()
    """What the publication says of its GPUs that the site file does not."""
    step_s: float | None = None
    hardware_tflops: float | None = None
    """Of a GPU, recomputation included, by Narayanan et al.'s formula."""
    model_tflops: float | None = None
    """Of a GPU, without recomputation."""
    tokens_per_s: float | None = None
    """Of a GPU."""
    free: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """What the publication does not say."""

    def measured_s(self) -> float:
        """Time of a step."""
        layouts = self.layouts({name: values[0] for name, values in self.free.items()})
        devices, h, s = (float(each[0]) for each in (layouts.devices, layouts.hidden, layouts.sequence))
        batch, deep, words = (float(each[0]) for each in (layouts.global_batch, layouts.layers, layouts.vocabulary))
        if self.step_s is not None:
            return self.step_s
        if self.tokens_per_s is not None:
            return batch * s / devices / self.tokens_per_s
        if self.model_tflops is not None:
            return float(model_flops(layouts)[0]) / devices / self.model_tflops / 1e12
        assert self.hardware_tflops is not None
        flop = 96 * batch * s * deep * h**2 * (1 + s / (6 * h) + words / (16 * deep * h))
        return flop / devices / self.hardware_tflops / 1e12

    def layouts(self, chosen: Mapping[str, float]) -> Layouts:
        """With what was not published chosen."""
        return layouts_of({**USUAL, **self.layout, **chosen})

    def predicted(self) -> tuple[float, float]:
        """Seconds of the fastest of what the publication leaves open, and half of its interval of log time."""
        hardware = hardware_of(self.site, *self.hardware)
        machines, fit = machines_of([hardware]), published_fit()
        known, found = np.array([hardware.accelerator in fit.accelerators]), []
        for values in itertools.product(*self.free.values()):
            layouts = self.layouts(dict(zip(self.free, values, strict=True)))
            if layouts.chunks[0] > 1 and layouts.micro_batches[0] % layouts.pipeline[0]:
                continue  # no schedule interleaves these
            width = half_widths(layouts, fit, per_node=machines.devices_per_node, known=known)
            found.append((float(fit.phases(layouts, machines).step_s[0]), float(width[0])))
        return min(found)


USUAL = {"data": 1, "tensor": 1, "pipeline": 1, "recompute": 0, "sharded": 0, "fused_attention": 0, "fp8": 0}
OF_2021 = {"vocabulary": 51_200, "sequence": 2048, "recompute": 1}
BILLIONS = [  # heads, width, layers, tensor, pipeline, GPUs, batch, TFLOP/s of a GPU
    ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
    ("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138),
    ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142),
    ("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135),
    ("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138),
    ("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140),
    ("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148),
    ("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155),
    ("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163),
    ("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 163),
]
OF_2022 = [  # heads, width, layers, pipeline, batch, micro-batch, stages per GPU, all recomputed s, selectively s
    ("22B", 64, 6144, 48, 1, 4, 4, 1, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 64, 1, 3, 18.13, 13.75),
    ("530B", 128, 20480, 105, 35, 280, 1, 3, 49.05, 37.83),
    ("1T", 160, 25600, 128, 64, 512, 1, 1, 94.42, 71.49),
]
OF_LLAMA = {
    "vocabulary": 128_256,
    "kv_heads": 8,
    "gated": 1,
    "tied": 0,
    "learned": 0,
    "fused_attention": 1,
    "sharded": 1,
}
LLAMA_8B = OF_LLAMA | {"hidden": 4096, "layers": 32, "heads": 32, "mlp_width": 14336, "sequence": 8192}
LLAMA_70B = OF_LLAMA | {"hidden": 8192, "layers": 80, "heads": 64, "mlp_width": 28672, "sequence": 8192}
LLAMA_405B = OF_LLAMA | {"hidden": 16384, "layers": 126, "heads": 128, "mlp_width": 53248, "sequence": 8192}
FULL = {"recompute": 1, "tensor": 8, "sequence_parallel": 1, "fp8": 1}


TITANS = {
    "source": TITAN,
    "site": "h100_80gb",
    "hardware": tuple(f"site.hardware.{each}" for each in ("memory_gb_per_s=2400", f"power_share={500 / 700:.4g}")),
}
"""HBM2e, and 500 of 700 W."""


def runs() -> Iterator[Run]:
    """All of them."""
    for name, heads, width, layers, tensor, pipeline, devices, batch, tflops in BILLIONS:
        sizes = {"heads": heads, "hidden": width, "layers": layers, "tensor": tensor, "pipeline": pipeline}
        layout = OF_2021 | sizes | {"global_batch": batch, "data": devices / tensor / pipeline}
        whole = tuple(each for each in CHUNKS if pipeline > 1 and layers % (pipeline * each) == 0) or (1.0,)
        free = {"micro_batch": MICRO_BATCHES, "chunks": whole}
        yield Run(source=MEGATRON, name=name, site="a100_80gb", layout=layout, hardware_tflops=tflops, free=free)
    for name, heads, width, layers, pipeline, batch, micro, chunks, full_s, selective_s in OF_2022:
        sizes = {"heads": heads, "hidden": width, "layers": layers, "tensor": 8, "pipeline": pipeline}
        layout = OF_2021 | sizes | {"global_batch": batch, "micro_batch": micro, "chunks": chunks}
        yield Run(source=SELECTIVE, name=f"{name} recomputed", site="a100_80gb", layout=layout, step_s=full_s)
        kept = layout | {"recompute": 0, "selective": 1, "sequence_parallel": 1}
        yield Run(source=SELECTIVE, name=f"{name} selectively", site="a100_80gb", layout=kept, step_s=selective_s)
    for data, step_s in ((8, 60.1), (10, 50.2), (12, 44.4)):
        sizes = {"heads": 128, "hidden": 20480, "layers": 105, "tensor": 8, "pipeline": 35, "data": data}
        layout = OF_2021 | sizes | {"global_batch": 1920, "micro_batch": 1}
        yield Run(source=TURING, name=f"530B on {280 * data}", site="a100_80gb", layout=layout, step_s=step_s)
    for data, context, sequence, tflops in ((64, 1, 8192, 430), (128, 1, 8192, 400), (8, 16, 131_072, 380)):
        sizes = {"tensor": 8, "pipeline": 16, "data": data, "context": context, "sequence": sequence}
        layout = LLAMA_405B | sizes | {"global_batch": 2**24 / sequence, "micro_batch": 1, "sequence_parallel": 1}
        name = f"405B on {8 * 16 * data * context} × {sequence} tokens"
        free = {"chunks": (1.0, 2.0, 4.0)}  # 126 layers and both ends are 128
        yield Run(source=LLAMA, name=name, site="h100_80gb", layout=layout, model_tflops=tflops, free=free)
    for data, tokens_per_s in ((8, 5762), (128, 5605)):
        layout = LLAMA_8B | {"data": data, "global_batch": 2 * data, "micro_batch": 2, "selective": 1}
        yield Run(**TITANS, name=f"8B on {data}", layout=layout, tokens_per_s=tokens_per_s)
    layout = LLAMA_70B | FULL | {"data": 32, "global_batch": 512, "micro_batch": 16}
    yield Run(**TITANS, name="70B on 256 in fp8", layout=layout, tokens_per_s=829)
    for chunks, tokens_per_s in ((1, 100), (2, 128)):
        sizes = {"data": 8, "pipeline": 8, "global_batch": 256, "chunks": chunks}
        name = f"405B on 512 in fp8{' interleaved' if chunks > 1 else ''}"
        free = {"micro_batch": MICRO_BATCHES}
        layout = LLAMA_405B | FULL | sizes
        yield Run(**TITANS, name=name, layout=layout, tokens_per_s=tokens_per_s, free=free)


class Judged(NamedTuple):
    """One run beside its prediction."""

    name: str
    took_s: float
    said_s: float
    half_width: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.said_s / self.took_s - 1

    @property
    def holds(self) -> bool:
        """Whether the interval has the published time in it."""
        return abs(math.log(self.took_s / self.said_s)) <= self.half_width


def errors() -> dict[str, list[Judged]]:
    """Source → its runs."""
    found: dict[str, list[Judged]] = {}
    for run in runs():
        found.setdefault(run.source, []).append(Judged(run.name, run.measured_s(), *run.predicted()))
    return found


def table() -> Iterator[str]:
    """Lines of Markdown."""
    yield "| source | runs | mean error | in the 90 % interval | each: published s, error |"
    yield "|---|---|---|---|---|"
    for source, rows in errors().items():
        each = [f"{row.name} {row.took_s:.3g} ({100 * row.error:+.0f} %)" for row in rows]
        held = sum(row.holds for row in rows)
        yield f"| {source} | {len(rows)} | {100 * mean_error(rows):.1f} % | {held} | {', '.join(each)} |"


def mean_error(rows: Sequence[Judged]) -> float:
    """Relative, of the times."""
    return float(np.mean([abs(row.error) for row in rows]))


if __name__ == "__main__":
    for line in table():
        print(line)
