"""The parts of docs/ that follow from the code; `make docs` writes them, a test holds them against the files."""

from __future__ import annotations

import inspect
from pathlib import Path

import msgspec

from launch.compose import group_choices
from launch.sweep import one_run
from parallelbench.errors import ConfigError
from parallelbench.spec.check import check_run
from parallelbench.spec.config import RunConfig
from parallelbench.spec.identity import SCHEMA_VERSION
from parallelbench.store.records import TABLES
from tests.faults import faults

DOCS = Path(__file__).resolve().parents[1] / "docs"

_INTRO = f"""# Results: what the tables hold

This page is generated from `parallelbench/store/records.py` by `make docs`. Schema version {SCHEMA_VERSION}.

A finished run publishes one Parquet file per table in `<results>/<sweep>/<run>/result/`, all at once, with
`manifest.json` last: sha256, bytes and rows of each file, the attempt, the outcome. Ranks write what they measured and
nothing derived; speed-ups, medians and sums over ranks are computed in `analysis/metrics/` only. Durations are
seconds, sizes bytes; epochs and steps count from 1. Null means *not measured*, never 0. The schema, with every column's
meaning, is in each file's metadata too.

| table | one row per |
|---|---|
| `run` | run |
| `epochs` | epoch |
| `ranks` | rank and epoch |
| `steps` | sampled step, rank and epoch |
| `parity` | step of the parity check |
| `pushes` | update sent to a parameter server |
| `telemetry` | sample of a GPU, or of a host |
| `phases` | step of the pass after the last epoch, and rank |
"""


def results_page() -> str:
    """docs/results.md."""
    parts = [_INTRO]
    for table, columns in TABLES.items():
        parts.append(f"## `{table}`\n\n| column | type | null | meaning |\n|---|---|---|---|")
        for column in columns:
            null = "may be" if column.nullable else ""
            parts.append(f"| `{column.name}` | {column.type} | {null} | {column.doc.replace('|', chr(92) + '|')} |")
        parts.append("")
    return "\n".join(parts)


_STRATEGIES_INTRO = """# Strategies: what is possible

This page is generated from the strategies' own `check`s by `make docs`. A cell names the device counts (of 1, 2, 4 and
8) at which a strategy with its default options takes a model; – means refused, for a reason below the table. The data
set is cut down to `data.train_samples=96`, which `batch_size=96` takes as a whole, and the optimizer is Adam, but for
what the first table says a strategy needs. Options may widen or narrow this; `parallelbench show strategy=NAME` lists
them.
"""

_DEVICES = (1, 2, 4, 8)
_NEEDS = {
    "data_parallel": "GPUs",
    "downpour": "`optimizer=adagrad`, as in the paper, or `sgd` with `optimizer.momentum=0.0`",
    "sandblaster_lbfgs": "`optimizer=lbfgs`, and the training set as the batch",
}
_OPTIMIZERS = {"downpour": "adagrad", "sandblaster_lbfgs": "lbfgs"}

_MODELS = {
    "mlp": ["data.channels=1"],
    "cnn_small": ["data.channels=1", "data.image_size=28"],
    "cnn_large": ["data.channels=1", "data.image_size=28"],
    "logistic_regression": [],
    "cnn": [],
    "resnet50": [],
    "vit": [],
    "vit_b_16": [],
}


def strategies_page() -> str:
    """docs/strategies.md."""
    names = group_choices()["strategy"]
    parts = [_STRATEGIES_INTRO, "| strategy | what it does | needs |", "|---|---|---|"]
    parts += [f"| `{name}` | {_summary(name)} | {_NEEDS.get(name, '')} |" for name in names]
    reasons: list[str] = []
    head = ["strategy", *(f"`{model}`" for model in _MODELS)]
    parts += ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in names:
        cells = [_possible(name, model, options, reasons) for model, options in _MODELS.items()]
        parts.append(f"| `{name}` | {' | '.join(cells)} |")
    parts += ["", "## Why not", "", *(f"- {reason}" for reason in dict.fromkeys(reasons)), ""]
    return "\n".join(parts)


def _configured(strategy: str, model: str, options: list[str]) -> RunConfig:
    own = ["batch_size=96", "data.train_samples=96", f"optimizer={_OPTIMIZERS.get(strategy, 'adam')}"]
    return one_run(["data=synthetic", *own, f"model={model}", f"strategy={strategy}", *options]).run


def _possible(strategy: str, model: str, options: list[str], reasons: list[str]) -> str:
    # nn.DataParallel exists on GPUs only.
    device_type = "cuda" if strategy == "data_parallel" else "cpu"
    run, possible = _configured(strategy, model, options), []
    for devices in _DEVICES:
        try:
            check_run(msgspec.structs.replace(run, devices=devices), device_type)
        except ConfigError as error:
            if devices > 1 and strategy != "single":
                reasons.append(f"`{strategy}`: {error}")
        else:
            possible.append(str(devices))
    return ", ".join(possible) or "–"


def _summary(name: str) -> str:
    strategy = type(one_run([f"strategy={name}"]).run.strategy)
    if strategy.__module__.rpartition(".")[2] != name:  # a variant: its own file says in the first comment what it is
        first = (DOCS.parent / "conf" / "strategy" / f"{name}.yaml").read_text().partition("\n")[0]
        assert first.startswith("# "), f"{name}.yaml doesn't say what it is"
        return first.removeprefix("# ")
    return (inspect.getdoc(inspect.getmodule(strategy)) or "").split("\n\n")[0].replace("\n", " ")


_RELIABILITY_INTRO = """# Reliability: what is survived

This page is generated from the tests by `make docs`. Each line is a test that injects the fault, on a real Slurm
cluster or with real processes, and asserts the outcome. `make test-slurm` runs those in `tests/slurm/`, `make test` the
others.
"""
_AREAS = ("submission", "lifecycle", "workers", "storage and input")


def reliability_page() -> str:
    """docs/reliability.md."""
    found = list(faults())
    assert {fault.area for fault in found} <= set(_AREAS), f"areas: {_AREAS}"
    parts = [_RELIABILITY_INTRO]
    for area in _AREAS:
        parts.append(
            f"## {area.capitalize()}\n\n| fault | how it is injected | what comes of it | test |\n|---|---|---|---|"
        )
        own = [fault for fault in found if fault.area == area]
        parts += [f"| {fault.name} | {fault.injection} | {fault.outcome} | `{fault.test}` |" for fault in own]
        parts.append("")
    return "\n".join(parts)


PAGES = {"reliability.md": reliability_page, "results.md": results_page, "strategies.md": strategies_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
