"""The stage: an engine's process is measured, its result compared, its end survived; bad input is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.ipc
import pytest

from launch.checks import check_engine
from parallelbench import environments
from parallelbench.cli import main
from parallelbench.config.components import Arrays
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError, EngineError
from parallelbench.preprocess import stage, tables
from parallelbench.preprocess.recipes import prepare
from parallelbench.preprocess.stage import Preprocessing
from parallelbench.results.attempt import Attempt
from parallelbench.training.failure import classify
from tests.helpers import TINY, configured

SHAPE = (*TINY, "data.train_samples=70000", "data.test_samples=1000", "data.image_size=4", "epochs=0")
ROWS, PIXELS = 70_000, 16
INPUT_BYTES = ROWS * (8 + 8 + PIXELS)


def run_of(*overrides: str) -> RunConfig:
    return configured(*SHAPE, *overrides)


def arrays_of(run: RunConfig) -> Arrays:
    return run.data.load(Path("nowhere"))


@pytest.mark.exhaustive
def test_what_is_measured(tmp_path: Path) -> None:
    """The columns of a real process; those of a clock by what they must add up to."""
    run = run_of("preprocess.engine=arrow", "preprocess.recipe=filter", "preprocess.executions=3")
    rows, facts = stage.preprocess(run, arrays_of(run), tmp_path / "files")
    assert not (tmp_path / "files").exists()
    assert [row["execution"] for row in rows] == [1, 2, 3]
    kept = ROWS // 2
    for row in rows:
        assert (row["input_rows"], row["input_bytes"], row["copied_in_bytes"]) == (ROWS, INPUT_BYTES, 0)
        assert (row["output_rows"], row["output_bytes"]) == (kept, kept * (8 + 8 + PIXELS))
        assert row["execution_time_s"] == pytest.approx(row["take_in_s"] + row["compute_s"] + row["give_out_s"])
        assert 0 < row["cpu_time_s"] < 100
        assert row["peak_memory_bytes"] > INPUT_BYTES
        assert row["process_threads"] >= 1
    first, second, last = rows
    assert first["cold_time_s"] > first["start_s"] + first["read_s"] + first["execution_time_s"]
    assert first["warm_time_s"] is None
    for row in (second, last):
        assert row["warm_time_s"] == row["execution_time_s"]
        assert row["cold_time_s"] is row["start_s"] is row["read_s"] is row["bytes_read"] is None
    assert INPUT_BYTES < first["bytes_read"] < INPUT_BYTES * 1.1
    assert second["write_s"] is second["output_file_bytes"] is None
    for row in (first, last):
        assert row["write_s"] > 0
        assert row["output_file_bytes"] > row["output_bytes"]
    assert first["cold_time_s"] < facts["preprocess_time_s"]
    assert facts["preprocess_version"] == pyarrow.__version__


@pytest.mark.exhaustive
def test_several_batches_are_copied_by_who_needs_them_in_one(tmp_path: Path) -> None:
    """70,000 rows are two record batches."""
    run = run_of("preprocess.engine=numpy", "preprocess.recipe=statistics")
    ((row,), _) = stage.preprocess(run, arrays_of(run), tmp_path / "files")
    assert row["copied_in_bytes"] == INPUT_BYTES
    assert row["output_rows"] == 10


def test_copies_of_the_data_are_rows_of_their_own() -> None:
    run = run_of("preprocess.engine=numpy", "preprocess.recipe=filter")
    arrays = arrays_of(run)
    table = stage.table_of(stage.task_of(run), arrays, rows=2 * ROWS + 3)
    assert table["sample"].to_pylist() == list(range(2 * ROWS + 3))
    assert table["label"].to_pylist() == (arrays.train_labels.tolist() * 3)[: 2 * ROWS + 3]
    assert table["pixels"][ROWS + 1].as_py() == arrays.train_images[1].reshape(-1).tolist()


def request(folder: Path, engine: str = "numpy") -> Any:
    run = configured(*TINY, "epochs=0", f"preprocess.engine={engine}", "preprocess.recipe=sort")
    arrays = run.data.load(folder)
    return run, arrays


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        ("kill -ABRT $$", "error", "its process was killed by SIGABRT"),
        ("kill -KILL $$", "killed", "killed by SIGKILL, by hand or by the kernel for lack of memory"),
        ("echo 'pure virtual method called' >&2; exit 3", "error", "exit code 3: pure virtual method called"),
    ],
)
def test_an_engines_crash_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, kind: str, words: str
) -> None:
    program = tmp_path / "engine"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(stage, "interpreter", lambda engine: program)
    run, arrays = request(tmp_path)
    with pytest.raises(EngineError, match=words) as caught:
        stage.preprocess(run, arrays, tmp_path / "files")
    outcome, reason = classify(caught.value)
    assert outcome == kind
    assert reason.startswith("preprocess.engine=numpy with recipe=sort: its process ")
    assert "\n" not in reason
    assert not (tmp_path / "files").exists()


@pytest.mark.exhaustive
def test_a_crash_after_the_result_was_written_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "engine"
    real = environments.interpreter("numpy")
    program.write_text(f'#!/bin/sh\n{real} "$@"\nkill -SEGV $$\n')
    program.chmod(0o755)
    monkeypatch.setattr(stage, "interpreter", lambda engine: program)
    run, arrays = request(tmp_path)
    assert stage.preprocess(run, arrays, tmp_path / "files")[0][0]["output_rows"] == 64


@pytest.mark.exhaustive
def test_a_result_unlike_numpys_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(task: Any, columns: Any) -> Any:
        expected = prepare(task, columns)
        return expected | {"label": np.roll(expected["label"], 1)}

    monkeypatch.setattr(stage, "prepare", wrong)
    run, arrays = request(tmp_path)
    with pytest.raises(
        EngineError, match=r"prepares something else than NumPy in execution 1: \d+ of 64 values of label"
    ):
        stage.preprocess(run, arrays, tmp_path / "files")


def fake_environment(folder: Path, *, works: bool = True, **versions: str) -> Path:
    """An interpreter that says where its packages are, as Debian's has them; whatever else it is to run, it aborts."""
    packages = folder / "local" / "lib" / "python3.11" / "dist-packages"
    for package, version in versions.items():
        info = packages / f"{package}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    says = f"[ \"$1\" = -c ] && exec echo '{json.dumps([str(packages)])}'\n" if works else ""
    python.write_text(f"#!/bin/sh\n{says}kill -ABRT $$\n")
    python.chmod(0o755)
    return python


VELOX = ("preprocess.engine=velox", "preprocess.recipe=filter", "epochs=0")


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (None, "has none: `make venv-velox` makes it, or name its interpreter in PARALLELBENCH_VELOX_PYTHON"),
        ({}, "needs pyvelox 0.2.0, but .* has none: `make venv-velox`"),
        ({"pyvelox": "0.3.0", "pyarrow": "19.0.1"}, "needs pyvelox 0.2.0, but .* has 0.3.0: `make venv-velox`"),
        ({"PyVelox": "0.2.0", "pyarrow": "26.0.1"}, "needs pyarrow 19.0.1, but .* has 26.0.1: `make venv-velox`"),
    ],
)
def test_without_velox_or_with_another_nothing_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    versions: dict[str, str] | None,
    message: str,
) -> None:
    python = tmp_path / "bin" / "python" if versions is None else fake_environment(tmp_path / "own", **versions)
    monkeypatch.setenv(environments.VELOX_PYTHON, str(python))
    with pytest.raises(ConfigError, match=message):
        check_engine(configured(*TINY, *VELOX))
    results = tmp_path / "results"
    assert main(["run", *TINY, *VELOX, f"results={results}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not results.exists()
    assert "make venv-velox" in dict(environments.engine_states())["preprocess.engine=velox"]


def test_doctors_line_names_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = fake_environment(tmp_path, PyVelox="0.2.0", pyarrow="19.0.1")
    monkeypatch.setenv(environments.VELOX_PYTHON, str(python))
    state = dict(environments.engine_states())["preprocess.engine=velox"]
    assert state == f"{python}: pyvelox 0.2.0, pyarrow 19.0.1"


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments.metadata, "distributions", lambda **_: iter(()))
    with pytest.raises(ConfigError, match=r"engine=duckdb needs duckdb.*pip install 'parallelbench\[duckdb\]'"):
        environments.interpreter("duckdb")
    assert "pip install" in dict(environments.engine_states())["preprocess.engine=duckdb"]


class Alone:
    """A world of one rank."""

    rank, size = 0, 1


@pytest.mark.cases("join")
@pytest.mark.parametrize("recipe", ["filter", "subset", "join", "sort"])
def test_a_run_trains_on_exactly_the_rows_of_the_recipe(tmp_path: Path, recipe: str) -> None:
    run = configured(*TINY, "data.train_samples=200", "preprocess.engine=polars", f"preprocess.recipe={recipe}")
    run = msgspec.structs.replace(run, batch_size=10)
    stored = run.data.load(tmp_path)
    prepared = Preprocessing(run, Attempt(tmp_path / "1"), Alone())  # type: ignore[arg-type]
    prepared.carry_out(stored)
    trained, arrays = prepared.training_set(stored)
    labels, test = stored.train_labels, stored.test_labels
    places, test_places = np.arange(200), np.arange(len(test))
    if recipe == "filter":
        places, test_places = np.flatnonzero(labels < 5), np.flatnonzero(test < 5)
    if recipe == "subset":
        places = np.array([n for n in range(200) if (n * 1_103_515_245 + 12_345) % 2**31 < 2**31 // 10])
    if recipe == "sort":
        places = np.array(sorted(range(200), key=lambda n: (labels[n], n)))
    divisor = 2 if recipe == "join" else 1
    assert np.array_equal(arrays.train_images, stored.train_images[places])
    assert np.array_equal(arrays.train_labels, labels[places] // divisor)
    assert np.array_equal(arrays.test_images, stored.test_images[test_places])
    assert np.array_equal(arrays.test_labels, test[test_places] // divisor)
    assert (trained.data.train_samples, trained.data.test_samples) == (len(places), len(test_places))
    assert (trained.data.mean, trained.data.shape, trained.data.num_classes) == (run.data.mean, run.data.shape, 10)
    assert prepared.facts["dropped_samples"] == len(places) % 10


@pytest.mark.exhaustive
def test_what_a_killed_attempt_has_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    left = [tmp_path / "1" / "preprocess" / "input.arrow", tmp_path / "2" / "preprocess" / "output-1.arrow"]
    kept = [tmp_path / "1" / "journal-rank0.jsonl", tmp_path / "3" / "preprocess" / "input.arrow", tmp_path / "note"]
    for path in (*left, *kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    run = configured(*TINY, "preprocess.engine=numpy", "preprocess.recipe=sort")
    Preprocessing(run, Attempt(tmp_path / "2"), Alone()).carry_out(run.data.load(tmp_path))  # type: ignore[arg-type]
    assert not any(path.exists() for path in left)
    assert not (tmp_path / "1" / "preprocess").exists()
    assert all(path.exists() for path in kept), "a later attempt's are its own"


@pytest.mark.exhaustive
def test_too_few_rows_for_a_batch_are_named(tmp_path: Path) -> None:
    run = configured(*TINY, "preprocess.engine=numpy", "preprocess.recipe=subset")
    stored = run.data.load(tmp_path)
    prepared = Preprocessing(run, Attempt(tmp_path / "1"), Alone())  # type: ignore[arg-type]
    prepared.carry_out(stored)
    with pytest.raises(ConfigError, match=r"subset leaves \d training and 30 test samples .* global batch of 32"):
        prepared.training_set(stored)


@pytest.mark.parametrize(
    ("rows", "size", "sizes"), [(7, 3, [2, 2, 2, 1]), (4, 8, [1, 1, 1, 1]), (2, 3, [2]), (0, 3, [0])]
)
def test_a_batch_is_cut_where_its_values_are_too_many_for_offsets(rows: int, size: int, sizes: list[int]) -> None:
    """Lists of Arrow and Velox begin at offsets of 32 bits."""
    whole = tables.batch({"sample": np.arange(rows), "pixels": np.zeros((rows, size), np.uint8)})
    parts = tables.cut(whole, values=size, most=8)
    assert [part.num_rows for part in parts] == sizes
    assert [n for part in parts for n in part["sample"].to_pylist()] == list(range(rows))
    assert len(tables.cut(whole, values=size)) == 1


def test_the_pinned_versions_are_those_that_are_looked_for() -> None:
    pinned = dict(
        line.split("==")
        for line in Path(__file__).parents[2].joinpath("environments/velox.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    assert environments.VELOX.items() <= pinned.items()
