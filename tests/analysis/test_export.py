"""`export`: what trackers read from their folders is what the tables hold.

Runs where the trackers are installed: CONTRIBUTING.md says how.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import facts, load, per_epoch
from analysis.export import exported_runs
from launch.verbs.export import TRACKERS
from parallelbench import cli
from parallelbench.errors import ConfigError
from tests.analysis.factory import EPOCH_EVERY_S, Fake, config, failed, published
from tests.analysis.made_up import altered
from tests.test_cli import here, refused

__all__ = ["here"]

INSTALLED = {name for name, tracker in TRACKERS.items() if find_spec(tracker.module)}
NUMERIC = (pl.Int32, pl.Int64, pl.Float64)


def needs(tracker: str) -> Any:
    """Skip where the tracker is not installed."""
    return pytest.mark.skipif(tracker not in INSTALLED, reason=f"{tracker} is not installed: see CONTRIBUTING.md")


@pytest.fixture
def sweep(here: Path) -> Path:
    """Two runs that count, one that does not, and one without a result."""
    results = here / "results"
    loss = {"train_loss": lambda epoch: 2 / 7 / epoch}
    published(config(results), Fake(epoch_time_s=lambda epoch, rank: 1 / 3 + epoch / 7, **loss))
    published(config(results, strategy="ddp", devices=2), Fake(sent=lambda epoch, rank: (2**40 + 1, 0, 0), **loss))
    published(config(results, strategy="ddp", devices=2, repeat=1), Fake(oversubscribed=True, **loss))
    failed(config(results, strategy="ddp", devices=4), "oom", "out of memory", epochs=1)
    return results / "demo"


def numbers_of(row: dict[str, Any], frame: pl.DataFrame) -> dict[str, float]:
    return {c: row[c] for c, kind in frame.schema.items() if kind in NUMERIC and row[c] is not None}


def run_numbers(sweep: Path) -> dict[str, dict[str, float]]:
    """Run id → the numbers of its row in the table of runs."""
    frame = facts(load(sweep)).filter(pl.col("state") == "done")
    return {row["run_id"]: numbers_of(row, frame) for row in frame.iter_rows(named=True)}


def epoch_numbers(sweep: Path) -> dict[tuple[str, int], dict[str, float]]:
    """Run id and epoch → the numbers of its row in the table of epochs."""
    frame = per_epoch(load(sweep))
    return {(row["run_id"], row["epoch"]): numbers_of(row, frame) for row in frame.iter_rows(named=True)}


@pytest.mark.exhaustive
def test_only_finished_runs_are_exported_with_the_tables_numbers(sweep: Path) -> None:
    exported = {run.run_id: run for run in exported_runs(load(sweep))}
    assert len(exported) == 3
    assert {run_id: run.numbers for run_id, run in exported.items()} == run_numbers(sweep)
    epochs = epoch_numbers(sweep)
    assert {(run.run_id, e.epoch): e.numbers for run in exported.values() for e in run.epochs} == {
        key: numbers for key, numbers in epochs.items() if key[0] in exported
    }
    assert all("slowest_epoch_time_s" in numbers for numbers in epochs.values())
    assert all("gpu_energy_j" not in numbers for numbers in epochs.values()), "not measured is left out, not 0"


def test_parameters_are_keys_and_what_does_not_count_is_marked(sweep: Path) -> None:
    exported = exported_runs(load(sweep))
    one = exported[0]
    assert (one.parameters["strategy.name"], one.parameters["optimizer.lr"]) == ("single", 0.1)
    assert (one.tags["outcome"], "parity_passed" in one.tags, one.tags["counts"]) == ("ok", False, "true")
    assert "true" in [run.tags.get("parity_passed") for run in exported]
    (marked,) = [run for run in exported if run.tags["counts"] == "false"]
    assert marked.tags["exclusion"] == "oversubscribed"
    assert marked.name.endswith(" (oversubscribed)")
    assert not any(key.endswith("_json") for key in one.tags)


def test_a_run_begins_when_it_was_launched_or_with_what_an_earlier_attempt_left(tmp_path: Path) -> None:
    """Of a resumed run the first epoch's end is known; of one that only preprocesses, the launch alone."""
    published(config(tmp_path, epochs=0, preprocess={"engine": "duckdb", "recipe": "sort"}), Fake(parity_passed=None))
    published(config(tmp_path, epochs=3))
    end = Fake.started_at + EPOCH_EVERY_S + 500
    for launched_at, begins in ((end - 100, end - 100), (end + 100, end), (None, end)):
        runs = altered(load(tmp_path), "run", launched_at=pl.lit(launched_at, pl.Float64))
        found = {run.parameters["epochs"]: run.started_at for run in exported_runs(runs)}
        assert found == {0: launched_at or 0.0, 3: begins}


@pytest.mark.parametrize("column", ["sweep", "slug", "run_id"])
@pytest.mark.parametrize("given", ["../../x", "/etc/x", "..", ".hidden", "a\\b", "a\0b", "a\nb", ""])
def test_a_result_whose_name_leads_out_of_the_export_is_refused(given: str, column: str, sweep: Path) -> None:
    runs = load(sweep)
    if column == "run_id":
        run_id = runs.run["run_id"][0]
        tables = {
            name: frame.with_columns(run_id=pl.col("run_id").replace(run_id, given))
            for name, frame in runs.tables.items()
        }
        renamed = replace(runs, tables=tables)
    else:
        renamed = altered(runs, "run", **{column: pl.lit(given)})
    with pytest.raises(ConfigError, match=f"{column} .* is no file's name"):
        exported_runs(renamed)
    assert {run.sweep for run in exported_runs(runs)} == {"demo"}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_without_the_library_one_line_says_what_to_install(
    tracker: str, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if tracker in INSTALLED:
        pytest.skip(f"{tracker} is installed")
    message = refused(capsys, "export", str(sweep), "--to", tracker)
    assert message.endswith(f"; pip install --upgrade {TRACKERS[tracker].package}")
    assert not (sweep / "exports").exists()


@pytest.mark.parametrize("tracker", [pytest.param(name, marks=needs(name)) for name in TRACKERS])
def test_exports_say_what_they_hold_and_replace_nothing(
    tracker: str, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(sweep), "--to", tracker]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "3 runs exported; 1 run without a result left out; 1 marked, which does not count." in printed
    assert printed[-1] == str(sweep / "exports" / tracker)
    assert TRACKERS[tracker].next_command.format(printed[-1]) in printed[-2]
    assert "is not empty: delete it, or choose another folder" in refused(capsys, "export", str(sweep), "--to", tracker)
    assert cli.main(["status", str(sweep)]) in (0, 1)
    assert "Skipped" not in capsys.readouterr().out, "the export's folder is no run"
    (sweep / "file").touch()
    assert "is not empty" in refused(capsys, "export", str(sweep), "--to", tracker, "--out", str(sweep / "file"))


@needs("mlflow")
def test_mlflow_reads_the_tables_numbers(sweep: Path, tmp_path: Path) -> None:
    assert cli.main(["export", str(sweep), "--to", "mlflow", "--out", str(tmp_path / "out")]) == 0
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "out").as_uri())
    (experiment,) = [each for each in client.search_experiments() if each.name == "demo"]
    found = {run.data.tags["run_id"]: run for run in client.search_runs([experiment.experiment_id])}
    epochs = epoch_numbers(sweep)
    assert found.keys() == run_numbers(sweep).keys()
    for run_id, numbers in run_numbers(sweep).items():
        run = found[run_id]
        of_run = {key: value for key, value in run.data.metrics.items() if key.startswith("run/")}
        assert of_run == {f"run/{name}": value for name, value in numbers.items()}
        assert run.data.params["strategy.name"] in ("single", "ddp")
        assert run.info.status == "FINISHED"
        for name in epochs[run_id, 1]:
            history = client.get_metric_history(run.info.run_id, f"epoch/{name}")
            assert {m.step: m.value for m in history} == {epoch: epochs[run_id, epoch][name] for epoch in (1, 2, 3)}
    assert sorted(run.data.tags["counts"] for run in found.values()) == ["false", "true", "true"]


@needs("wandb")
def test_wandb_reads_the_tables_numbers(sweep: Path, tmp_path: Path) -> None:
    assert cli.main(["export", str(sweep), "--to", "wandb", "--out", str(tmp_path / "out")]) == 0
    files = sorted((tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb"))
    epochs, of_runs = epoch_numbers(sweep), run_numbers(sweep)
    tags = {run.run_id: run.tags for run in exported_runs(load(sweep))}
    assert len(files) == 3
    for file in files:
        records = list(wandb_records(file))
        (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        (run_id,) = [full for full in of_runs if full.startswith(run.run_id)]
        configured = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert configured["strategy.name"] in ("single", "ddp")
        assert configured["tags"] == tags[run_id]
        history = [items(record.history.item) for record in records if record.WhichOneof("record_type") == "history"]
        assert [{k: v for k, v in row.items() if k.startswith("epoch/")} for row in history] == [
            {f"epoch/{name}": value for name, value in epochs[run_id, epoch].items()} for epoch in (1, 2, 3)
        ]
        assert [row["_step"] for row in history] == [1, 2, 3]
        summary: dict[str, Any] = {}
        for record in records:
            if record.WhichOneof("record_type") == "summary":
                summary |= items(record.summary.update)
        assert {k: v for k, v in summary.items() if k.startswith("run/")} == {
            f"run/{name}": value for name, value in of_runs[run_id].items()
        }


def items(updates: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline run: LevelDB's log format, behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    block, content, at, part = 32768, file.read_bytes(), 7, b""
    while at < len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        part += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            record = Record()
            record.ParseFromString(part)
            part = b""
            yield record


def test_numbers_are_finite_or_missing(sweep: Path) -> None:
    """Trackers have no null: what is not measured must not become NaN."""
    for run in exported_runs(load(sweep)):
        assert all(math.isfinite(value) for epoch in run.epochs for value in epoch.numbers.values())
        assert all(math.isfinite(value) for value in run.numbers.values())
