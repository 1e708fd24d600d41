"""Looking at many runs at once: the same states as one by one, and tables of any length."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.states import glance, states_below, states_of
from launch.sweep import expand
from parallelbench import cli
from parallelbench.results.attempt import OUTCOMES, PUBLISHED
from parallelbench.results.folder import RunFolder, State, find_runs
from tests.analysis.factory import Fake, begin, config, failed, published
from tests.helpers import TINY


def spoil(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], RunFolder]:
    def make(results: Path) -> RunFolder:
        folder = published(config(results))
        path = folder.result / name
        path.write_bytes(change(path.read_bytes()))
        return folder

    return make


def without(name: str) -> Callable[[Path], RunFolder]:
    def make(results: Path) -> RunFolder:
        folder = published(config(results))
        (folder.result / name).unlink()
        return folder

    return make


FOLDERS: dict[str, Callable[[Path], RunFolder]] = {
    "published": lambda results: published(config(results)),
    "published, but unlike one device": lambda results: published(config(results), Fake(parity_passed=False)),
    **{
        f"failed with {name}": lambda results, name=name: failed(config(results), name, "so it was", epochs=1)
        for name in OUTCOMES
        if name not in PUBLISHED
    },
    "trained, but not published": lambda results: failed(config(results), "ok", "so it was", epochs=1),
    "running": lambda results: begin(config(results), Fake())[0],
    "nothing there": lambda results: RunFolder(results / "demo" / "nothing"),
    "a table is missing": without("epochs.parquet"),
    "a table is cut off": spoil("run.parquet", lambda content: content[:-1]),
    "a table is longer": spoil("run.parquet", lambda content: content + b"x"),
    "no manifest": without("manifest.json"),
    "an empty manifest": spoil("manifest.json", lambda _: b""),
    "a manifest that is none": spoil("manifest.json", lambda _: b'{"tables": {"\\u0000": 1}}'),
    "a manifest that is no text": spoil("manifest.json", lambda _: b'{"run_id": "\xff\xfe"}'),
    "a manifest of no run": spoil("manifest.json", lambda content: content.replace(b'"run":', b'"ran":')),
    "a manifest of no tables": spoil("manifest.json", lambda content: re.sub(b'"tables":.*', b'"tables":{}}', content)),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_at_a_glance_every_folder_is_what_it_is_at_a_closer_look(tmp_path: Path, name: str) -> None:
    folder = FOLDERS[name](tmp_path)
    assert glance(folder) == folder.state()
    assert states_of([folder]) == [folder.state()]


def test_only_what_changed_within_a_table_of_the_same_size_needs_the_closer_look(tmp_path: Path) -> None:
    folder = spoil("run.parquet", lambda content: content[:-1] + b"?")(tmp_path)
    assert glance(folder).label == "ok"
    assert folder.state().label == "storage"


def test_the_states_of_all_runs_below_a_folder(tmp_path: Path) -> None:
    folders = [published(config(tmp_path, epochs=1)), failed(config(tmp_path, epochs=2), "nan", "diverged", epochs=1)]
    other = published(config(tmp_path, epochs=1, sweep_name="other"))
    expected = {folder.path: folder.state() for folder in (*folders, other)}
    found = states_below(tmp_path)
    assert {folder.path: state for folder, state in found} == expected
    assert [folder for folder, _ in found] == find_runs(tmp_path)
    assert [state for _, state in states_below(other.path)] == [other.state()]
    (tmp_path / "empty").mkdir()
    assert states_below(tmp_path / "empty") == []


def test_status_names_what_lies_beside_the_runs_without_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(config(tmp_path))
    (tmp_path / "demo" / "half" / "attempts").mkdir(parents=True)
    (tmp_path / "demo" / "report").mkdir()
    for root, name in ((tmp_path, "demo/half"), (tmp_path / "demo", "half")):
        assert cli.main(["status", str(root)]) == 0
        assert f"left out: {name}: no config.yaml" in " ".join(capsys.readouterr().out.split())
        assert cli.main(["status", str(root), "--json"]) == 0
        assert "half" in capsys.readouterr().out


def test_states_of_planned_runs_come_in_their_order(tmp_path: Path) -> None:
    runs = [config(tmp_path, epochs=epochs, sweep_name=name) for name in ("a", "b", "a") for epochs in (1, 2, 3)]
    done = published(runs[1])
    states = states_of(RunFolder.of(run) for run in runs)
    assert [state.label for state in states] == ["missing", "ok", *["missing"] * 5, "ok", "missing"]
    assert states[1] == done.state()
    assert states[0] == State("missing")


# --- tables


# --- runs of a sweep can be told apart


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("parallelbench.world.machine.visible_gpus", lambda: ())
    monkeypatch.chdir(tmp_path)


def test_runs_of_a_plan_differ_in_more_than_their_hash(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *TINY, "seed=0,1", "precision=fp32,bf16"]) == 0
    head, *rows, _ = capsys.readouterr().out.splitlines()
    assert "varying" in head
    assert len({row.partition("cpu")[0].split(" ", 2)[2] for row in rows}) == 4
    assert any("seed=1 precision=bf16" in row for row in rows)
    assert cli.main(["plan", *TINY, "sweep.repeats=2"]) == 0
    assert "varying" not in capsys.readouterr().out


def test_status_says_which_learning_rate_went_out_of_memory_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    for sweep in ("one", "two"):
        for planned in expand([*TINY, "optimizer.lr=0.1,0.2", f"sweep.name={sweep}"]):
            RunFolder.of(planned.run).write_intent(planned.run, planned.overrides)
            if "optimizer.lr=0.2" in planned.overrides:
                failed(planned.run, "oom", "out of memory", epochs=0)
            else:
                published(planned.run)
    assert cli.main(["status", "results"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "lr=" in line]
    assert [(row[0].partition("/")[0], row[1], row[3]) for row in rows] == [
        ("one", "optimizer.lr=0.2", "oom"),
        ("two", "optimizer.lr=0.2", "oom"),
        ("one", "optimizer.lr=0.1", "ok"),
        ("two", "optimizer.lr=0.1", "ok"),
    ]
    assert cli.main(["status", "results/one"]) == 0
    assert "one/" not in capsys.readouterr().out, "one sweep needs no saying"


def test_runs_that_will_not_be_timed_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    many = ["strategy=ddp", "devices=64", "batch_size=64", "data.train_samples=64", "launcher.oversubscribe=true"]
    assert cli.main(["plan", *TINY, *many]) == 0
    text = capsys.readouterr().out
    assert "missing (oversubscribed)" in text
    assert "enter no timing figure" in text
    assert cli.main(["plan", *TINY]) == 0
    assert "oversubscribed" not in capsys.readouterr().out
