"""Ten thousand runs of a hundred epochs: loading and summarising them, from their compacted copy and without it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from parallelbench.results.folder import RunFolder, file_sha256
from parallelbench.results.tables import TABLES
from tests.analysis.factory import Fake, component, config, published
from tests.bench.measure import Figure

RUNS, EPOCHS, REPEATS = 10_000, 100, 20
CONFIGURATIONS = (("single", 1), ("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4))
MODELS = ("cnn_small", "mlp", "logistic_regression", "vit_tiny")
ROUNDS = 7
AGED_S = 3600
_LOAD = "from analysis import load; runs = load({path!r}); [runs.tables[table].height for table in runs.tables]"
_WITHOUT_COPY = f"import analysis.runs.copy as compact; compact.FEWEST_RUNS = 10**9; {_LOAD}"
_SUMMARY = "from analysis import load, summary; assert summary(load({path!r}))['repeats'].sum() == " + str(RUNS)
_REPORT = "from analysis import write_report; write_report({path!r})"


def figures() -> list[Figure]:
    """Seconds of fresh processes, from their start to their end, on all cores, as a reader has them."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as folder:
        sweep = make_results(Path(folder))
        scan, with_copy = _seconds(_WITHOUT_COPY, sweep), _seconds(_LOAD, sweep)  # the second one writes the copy
        _seconds(_LOAD, sweep)  # warm
        load, answer, report = ([_seconds(code, sweep) for _ in range(ROUNDS)] for code in (_LOAD, _SUMMARY, _REPORT))
    what = f"{RUNS:,} runs of {EPOCHS} epochs"
    works = RUNS // REPEATS // len(CONFIGURATIONS)
    size = f"{works} kinds of work, {RUNS // REPEATS} configurations of {REPEATS} repeats, 2.6 million rows of ranks"
    page = "the HTML page and its six figures, which a second process draws"
    pays_after = [max(0.0, with_copy - scan) / (scan - once) for once in load]
    return [
        Figure(f"{what}: load and summary, whole process", answer, "s", 2, False, size),
        Figure(f"{what}: load, report with figures, whole process", report, "s", 4, False, page),
        Figure(
            f"{what}: scanning every file ÷ loading the copy, all tables",
            [scan / once for once in load],
            "×",
            20,
            True,
            f"{scan:.1f} s against {sorted(load)[ROUNDS // 2]:.2f} s; scanned once",
        ),
        Figure(
            f"{what}: queries after which writing the copy has paid off",
            pays_after,
            "",
            10,
            False,
            f"scanning and writing it {with_copy:.1f} s",
        ),
    ]


def _seconds(code: str, sweep: Path) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code.format(path=str(sweep))], check=True)
    return time.perf_counter() - start


def make_results(root: Path) -> Path:
    """The sweep's folder: every run with files of its own, in the genuine formats."""
    sweep = root / "many"
    patterns = {
        (strategy, devices): published(
            config(root / "pattern", strategy=strategy, devices=devices, epochs=EPOCHS),
            Fake(test_accuracy=lambda epoch: 1 - 0.5 ** (epoch / 10)),
        )
        for strategy, devices in CONFIGURATIONS
    }
    for number, (of, changes) in enumerate(_runs()):
        _write(
            patterns[of], sweep / f"run-{number:05}", changes, run_id=hashlib.sha256(str(number).encode()).hexdigest()
        )
    return sweep


def _runs() -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
    """Strategy and devices of each run, and what it changes in its configuration."""
    for work in range(RUNS // REPEATS // len(CONFIGURATIONS)):
        model, batch = MODELS[work % len(MODELS)], 32 + 8 * (work // len(MODELS))
        for repeat in range(REPEATS):
            for of in CONFIGURATIONS:
                yield of, {"repeat": repeat, "batch_size": batch, "model": component("model", model)}


def _write(pattern: RunFolder, path: Path, changes: dict[str, Any], *, run_id: str) -> None:
    """A copy of a published run under another id, with another configuration and times of its own."""
    (path / "result").mkdir(parents=True)
    (path / "config.yaml").symlink_to(pattern.path / "config.yaml")
    manifest: dict[str, Any] = pattern.manifest() or {}
    for table in TABLES:
        rows = pq.read_table(pattern.result / f"{table}.parquet")
        content = _replaced(rows, run_id=[run_id] * len(rows))
        if table == "run":
            whole = msgspec.json.decode(rows["config_json"][0].as_py()) | changes
            text = msgspec.json.encode(whole, order="sorted").decode()
            content = _replaced(content, config_json=[text], repeat=[changes["repeat"]], slug=[path.name])
        if table == "ranks":
            slower = 1 + int(run_id[:2], 16) / 5000
            content = _replaced(content, epoch_time_s=[slower * t for t in rows["epoch_time_s"].to_pylist()])
        file = path / "result" / f"{table}.parquet"
        pq.write_table(content, file, row_group_size=max(1, len(rows)))
        manifest["tables"][table] |= {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        os.utime(file, (time.time() - AGED_S,) * 2)
    manifest |= {"run_id": run_id}
    (path / "result" / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    os.utime(path / "result" / "manifest.json", (time.time() - AGED_S,) * 2)


def _replaced(table: pa.Table, **columns: list[Any]) -> pa.Table:
    for name, values in columns.items():
        at = table.schema.get_field_index(name)
        field = table.schema.field(at)
        table = table.set_column(at, field, pa.array(values, field.type))
    return table
