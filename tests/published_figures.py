"""Every figure and table of the four publications, and what draws it here: docs/seed-figures.md. Its pictures:
`tests.published_pictures`.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

FOLDER = "images/publications"
"""Of the pictures, below docs/."""
TABLES = Path(__file__).parent / "published_tables"
"""Of the tables as they stand on the page."""
COLUMN_MM, PAGE_MM = 85, 175
"""Widths of a figure; the first is that of a command that names none."""


@dataclass(frozen=True)
class Picture:
    """A figure of a sweep, or panels of it."""

    sweep: str
    figure: str
    panel: str = ""
    """Words of the panels' headings; empty: all."""
    width_mm: int = PAGE_MM
    repeats: int = 2
    """Of the made-up runs that the page's picture is drawn from."""

    @property
    def shows(self) -> str:
        """In words, for who can't see it."""
        return f"{self.figure.replace('_', ' ')}{f', {self.panel}' if self.panel else ''}"

    @property
    def command(self) -> str:
        """What draws it from real runs."""
        panel = f' --panel "{self.panel}"' if self.panel else ""
        width = "" if self.width_mm == COLUMN_MM else f" --width {self.width_mm}"
        return f"parallelbench report results/{self.sweep} --figure {self.figure} \\\n   {panel}{width}"


@dataclass(frozen=True)
class Tabled:
    """A table of a sweep's report."""

    sweep: str
    table: str
    """Its file's name, as CSV."""
    repeats: int
    """Of the made-up runs that the page's table is made from."""

    @property
    def lead(self) -> str:
        """What stands above it."""
        file = f"`tables/{self.table}.csv`"
        return f"Made-up numbers. From real runs: `parallelbench report results/{self.sweep}`, on the page, {file}."


@dataclass(frozen=True)
class Published:
    """A figure or table of a publication."""

    number: str
    shows: str
    here: str = ""
    """What answers it here, where that is no picture."""
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Tabled, ...] = ()

    def texts(self, publication: str) -> list[tuple[str, Tabled]]:
        """The tables, each after its file's name."""
        return [(f"{self._stem(publication)}-{place}.md", table) for place, table in enumerate(self.tables, start=1)]

    def _stem(self, publication: str) -> str:
        return "-".join([publication[:3], *re.findall(r"\w+", self.number.lower())])

    def files(self, publication: str) -> list[tuple[str, Picture]]:
        """The pictures, each after its file's name."""
        stem = self._stem(publication)
        return [(f"{stem}-{place}.png", picture) for place, picture in enumerate(self.pictures, start=1)]


_DATA, _MODEL, _TWO, _UW = "asu_data_parallel_faithful", "asu_model_parallel", "mnist_two_devices", "uw_frameworks"
_NO_NUMBERS = "A drawing, no measurement: there is nothing to run."


def _accuracy(sweep: str, model: str) -> tuple[Picture, ...]:
    longest = " epochs 100" if sweep == _DATA else ""
    return tuple(
        Picture(sweep, "accuracy", f"{data} {model}{longest} test", COLUMN_MM, 1 if sweep == _DATA else 2)
        for data in ("cifar10", "cifar100")
    )


PUBLICATIONS: dict[str, tuple[Published, ...]] = {
    "000: Benchmarking Data Parallel vs Model Parallel Training with PyTorch and VeloxML": (
        Published("Figure 1", "sequential against data-parallel execution", _NO_NUMBERS),
        Published("Figure 2", "model parallelism of tensors", _NO_NUMBERS),
        Published(
            "Table 1",
            "hardware, framework, models, epochs, GPUs, data sets",
            "Every setting that trains: `tables/hyperparameters.csv`.",
            tables=(Tabled(_DATA, "experiment", 1),),
        ),
        Published(
            "Table 2",
            "strategies compared in words",
            "[Choosing a strategy](choosing-a-strategy.md). Claims ask three of its seven rows: communication "
            "overhead, memory requirements (of data parallelism) and training speed.",
        ),
        Published(
            "Figure 3", "accuracy, logistic regression, data parallel", "", _accuracy(_DATA, "logistic_regression")
        ),
        Published("Figure 4", "accuracy, CNN, data parallel", "", _accuracy(_DATA, "cnn")),
        Published("Figure 5", "accuracy, ResNet-50, data parallel", "", _accuracy(_DATA, "resnet50")),
        Published(
            "Figure 6",
            "memory and runtime by model and GPUs, data parallel",
            "",
            (Picture(_DATA, "models", "cifar10 epochs 100", repeats=1),),
        ),
        Published("Figure 7", "accuracy, CNN, model parallel", "", _accuracy(_MODEL, "cnn")),
        Published("Figure 8", "accuracy, ResNet-50, model parallel", "", _accuracy(_MODEL, "resnet50")),
        Published(
            "Figure 9",
            "memory and runtime by model and GPUs, model parallel",
            "",
            (Picture(_MODEL, "models", "cifar10"),),
        ),
        Published(
            "Section 8, no table",
            "accuracy after 10, 30, 50 and 100 epochs",
            "In data parallel, then in model parallel. One run of 100 epochs answers for all four.",
            tables=(Tabled("asu_data_parallel", "accuracy", 3), Tabled(_MODEL, "accuracy", 2)),
        ),
        Published(
            "Section 8.3, no figure", "ViT, “unable to conduct experiments for all epochs”", "", _accuracy(_DATA, "vit")
        ),
    ),
    "001: Model Parallelism vs Data Parallelism: Examples": (
        Published("Both pictures, unnumbered", "data parallelism, model parallelism", _NO_NUMBERS),
        Published(
            "Table of differences",
            "the two compared in words",
            "Claims ask two of its six rows: communication (`sweep=tutorial_mlp`) and scalability (as there, and of "
            "larger data `sweep=uw_frameworks`).",
        ),
    ),
    "002: Comparison & study of Distributed Deep Learning Training Techniques": (
        Published(
            "Model accuracy and loss, unnumbered",
            "1 GPU against 2",
            "",
            (Picture(_TWO, "accuracy", "weak", repeats=6), Picture(_TWO, "loss", "weak", repeats=6)),
        ),
        Published(
            "Theoretical against real scaling, unnumbered",
            "images per second on 1 GPU and 2, `nb_images/(time/EPOCHS)`, where its axis says per epoch",
            "Here the speed-up: the same rates ÷ that on 1 GPU. Theirs have the whole time in them, as the right "
            "panel has.",
            (Picture(_TWO, "scaling", "weak", repeats=6),),
        ),
        Published(
            "Training time, two logs",
            "78.6 s on 2 GPUs, 109.5 s on 1; 66 to 69 ms and 43 to 44 ms a step",
            "The report's table of runs has both, “Training (s)” and “Step (ms)”: a later epoch's time ÷ 29 or 58 "
            "steps. In the CSV files that is `steady_step_time_s`.",
            (Picture(_TWO, "runtime", "weak", repeats=6),),
        ),
        Published(
            "Power consumption comparison",
            "a heading without a figure",
            "",
            (Picture(_TWO, "power_over_time", "weak", repeats=6), Picture(_TWO, "power", "weak", repeats=6)),
        ),
    ),
    "003: Benchmarking data parallel distributed training of deep learning models on PyTorch and TensorFlow": (
        Published("Figure 1", "model parallelism, parameter server", _NO_NUMBERS),
        Published("Figure 2", "ring all-reduce", _NO_NUMBERS),
        Published(
            "Figure 4", "layers of the two models", "`model=cnn_small`, `cnn_large`; as printed: `cnn_large_dense`."
        ),
        Published(
            "Figure 5a",
            "second epoch's rate by model size and GPUs",
            "The thick lines; a panel per model.",
            (Picture(_UW, "epoch_rates", "batch size 128 copies 1"),),
        ),
        Published(
            "Figure 5b",
            "rate against batch size",
            "",
            (Picture(_UW, "throughput_batch", "cnn_large copies 8", COLUMN_MM),),
        ),
        Published(
            "Figure 5c",
            "second epoch's time by data set size and GPUs",
            "All sizes on one axis: what devices save of a larger set is more.",
            (Picture(_UW, "epoch_time_data", "cnn_large batch size 512", COLUMN_MM),),
        ),
        Published(
            "Figure 5d",
            "first and second epoch's rate, large model",
            "Thin and thick lines.",
            (Picture(_UW, "epoch_rates", "cnn_large batch size 512 copies 1", COLUMN_MM),),
        ),
        Published(
            "Figure 5e",
            "rate against data set size",
            "Which quantity is on its x axis can't be seen in the text; the size is ours.",
            (Picture(_UW, "throughput_data", "cnn_large batch size 512", COLUMN_MM),),
        ),
    ),
}
_INTRO = """# The publications' figures

This page lists every figure and table of [the four publications](experiments.md), and what answers it here. It is
generated from `tests/published_figures.py` by `python -m tests.docs`.

**The pictures are drawn from made-up numbers: they show shapes, not findings.** The made-up runs have the full shape of
each sweep; a simple formula (`tests/analysis/full_sweeps.py`) makes up their times, memory, power and accuracies. Once
a sweep has run (`parallelbench submit sweep=NAME`), the command below a picture draws the same figure from your runs,
as PDF, SVG and PNG. Words after `--panel` choose among its panels; without them all are drawn. Strategies that learn
alike have lines of accuracy that lie on each other, as they should. Tables are made from the same runs.
"""


def pictures() -> dict[str, Picture]:
    """All by the names of their files, in the order of the page."""
    return dict(named for title, figures in PUBLICATIONS.items() for each in figures for named in each.files(title))


def tables() -> dict[str, Tabled]:
    """All by the names of their files, in the order of the page."""
    return dict(named for title, figures in PUBLICATIONS.items() for each in figures for named in each.texts(title))


def page() -> str:
    """docs/seed-figures.md."""
    parts = [_INTRO]
    for title, figures in PUBLICATIONS.items():
        parts.append(f"## {title}\n")
        for each in figures:
            words = f"**{each.number}**: {each.shows}.{f' {each.here}' if each.here else ''}"
            parts.append(textwrap.fill(words, 120, break_on_hyphens=False, break_long_words=False) + "\n")
            for name, picture in each.files(title):
                parts.append(f"![made-up numbers: {picture.shows}]({FOLDER}/{name})\n")
                parts.append(f"```\n{picture.command}\n```\n")
            for name, table in each.texts(title):
                parts.append(textwrap.fill(table.lead, 120, break_on_hyphens=False, break_long_words=False) + "\n")
                parts.append((TABLES / name).read_text(encoding="utf-8"))
    return "\n".join(parts)
