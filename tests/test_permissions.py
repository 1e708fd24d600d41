"""Results of other people, which one may not read: they are named, and taken neither for damaged nor for missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from analysis import load
from launch.states import glance, states_below
from parallelbench import cli
from parallelbench.results.folder import RunFolder
from tests.analysis.factory import config, failed, published

ADVICE = ": ask its owner for chmod -R g+rX"


@pytest.mark.parametrize(
    ("verb", "below"),
    [("status", ""), ("status", "demo"), ("report", "demo"), ("claims", ""), ("logs", "demo"), ("compare", "")],
)
def test_a_folder_that_may_not_be_read_is_one_line_and_code_2(
    tmp_path: Path, lock: Callable[[Path], None], capsys: pytest.CaptureFixture[str], verb: str, below: str
) -> None:
    published(config(tmp_path / "mine"))
    published(config(tmp_path / "theirs"))
    lock(tmp_path / "theirs")
    first = ["--fail-if-slower=3%", str(tmp_path / "mine")] if verb == "compare" else []
    assert cli.main([verb, *first, str(tmp_path / "theirs" / below)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert f"no permission for {tmp_path / 'theirs'}" in line
    assert line.endswith(ADVICE)


@pytest.mark.parametrize("part", [".", "attempts", "result", "result/manifest.json"])
def test_a_run_that_may_not_be_read_is_named_with_the_reason(
    tmp_path: Path, lock: Callable[[Path], None], capsys: pytest.CaptureFixture[str], part: str
) -> None:
    published(config(tmp_path))
    run = published(config(tmp_path, repeat=1))
    lock(run.path / part)
    assert cli.main(["status", str(tmp_path)]) == 0
    text = "".join(capsys.readouterr().out.split())
    if part == "attempts":
        assert text.startswith("2ok"), "the result is there, which is all that counts"
        assert run.state().state == "done"
        assert not load(tmp_path).skipped
        return
    assert text.startswith("1ok,1storage")
    (skipped,) = load(tmp_path).skipped
    assert skipped.path == run.path
    assert skipped.reason.startswith(f"no permission for {run.path}")
    assert skipped.reason.endswith(ADVICE)
    assert f"nopermissionfor{run.path}" in text


def test_what_a_run_left_that_may_not_be_read_is_no_missing_run(tmp_path: Path, lock: Callable[[Path], None]) -> None:
    run = failed(config(tmp_path), "oom", "out of memory", epochs=1)
    lock(run.path / "attempts")
    state = glance(run)
    assert state == run.state()
    assert (state.state, state.label) == ("failed", "storage")
    assert state.outcome is not None
    assert ADVICE in state.outcome.reason


def test_tables_that_may_not_be_read_are_not_damaged(tmp_path: Path, lock: Callable[[Path], None]) -> None:
    run = published(config(tmp_path))
    lock(run.result / "epochs.parquet")
    state = run.state()
    assert state.outcome is not None
    assert state.outcome.reason == f"no permission for {run.result}/epochs.parquet{ADVICE}"
    (skipped,) = load(tmp_path).skipped
    assert skipped.reason == state.outcome.reason


def test_a_sweep_that_may_not_be_read_is_named_once_and_submissions_are_nobodys_business(
    tmp_path: Path, lock: Callable[[Path], None]
) -> None:
    mine = published(config(tmp_path))
    published(config(tmp_path, sweep_name="theirs"))
    (tmp_path / "demo" / "submissions").mkdir()
    lock(tmp_path / "demo" / "submissions")
    lock(tmp_path / "theirs")
    named = published(config(tmp_path, sweep_name="report", repeat=1))
    found = {folder: state.label for folder, state in states_below(tmp_path)}
    assert found == {mine: "ok", named: "ok", RunFolder(tmp_path / "theirs"): "storage"}
    assert [skipped.path for skipped in load(tmp_path).skipped] == [tmp_path / "theirs"]


def test_whatever_the_system_refuses_is_one_line_and_not_the_gates_code(
    tmp_path: Path, lock: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run = failed(config(tmp_path), "oom", "out of memory", epochs=1)
    log = run.attempts()[-1].log
    log.write_text("mine")
    lock(log)
    assert cli.main(["logs", str(run.path)]) == 2
    assert capsys.readouterr().err == f"parallelbench: no permission for {log}{ADVICE}\n"


@pytest.mark.slow
def test_a_report_on_a_folder_that_can_not_be_written_goes_elsewhere(
    tmp_path: Path, lock: Callable[[Path], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("analysis.report.page.drawn", lambda runs: [])
    published(config(tmp_path / "theirs"))
    lock(tmp_path / "theirs")
    (tmp_path / "theirs").chmod(0o555)
    assert cli.main(["report", str(tmp_path / "theirs")]) == 2
    assert "no permission: choose another folder with --out DIR" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "theirs"), "--out", str(tmp_path / "mine")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "mine" / "index.html")
    assert (tmp_path / "mine" / "index.html").is_file()
    assert not (tmp_path / "theirs" / "report").exists()
