"""`status --watch` and `logs --follow`: what they print while runs go on, and how they end."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from launch.slurm import record, scheduler
from launch.states import RunStatus, SweepStatus
from launch.verbs import status
from parallelbench import cli
from parallelbench.results.attempt import Outcome, OutcomeName
from parallelbench.results.folder import RunFolder, State
from tests.launch.fake_slurm import DONE, MISSING, submission

RUNNING = RunStatus(State("running"), "running")
QUEUED = RunStatus(MISSING, "queued", "Resources", "17")
OK = RunStatus(DONE, "ok")


def ended(label: OutcomeName) -> RunStatus:
    outcome = Outcome(outcome=label, reason="out of it", finished_at=2.0)
    return RunStatus(State("failed", outcome, 1), label, outcome.reason)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses, none of which is made."""
    pauses: list[float] = []
    monkeypatch.setattr(status.time, "sleep", pauses.append)
    return pauses


def views(*states: tuple[RunStatus, ...]) -> Callable[[], SweepStatus]:
    """SweepStatuss of the runs a, b, …, one after the other."""
    folders = [RunFolder(Path("sweep", name)) for name in "abc"]
    waiting = [SweepStatus(dict(zip(folders, each, strict=False))) for each in states]
    return lambda: waiting.pop(0)


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ((OK, OK), 0),
        ((OK, ended("killed")), 1),
        ((OK, RunStatus(MISSING, "missing")), 0),
        ((OK, RunStatus(MISSING, "missing", "its job 5_0 ended before the run began: FAILED", "5_0")), 1),
    ],
)
def test_watch_ends_with_1_if_runs_failed(
    last: tuple[RunStatus, ...], code: int, slept: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status.watch_states(views((RUNNING, RUNNING), last), every=False) == code
    shown = capsys.readouterr().out
    first, ends = shown.split(" run  ")[1:]
    assert (first.count("running"), ends.count("running")) == (2, 0), "a pipe gets the first table and the last"
    assert shown.endswith("\n")
    assert status.watch_states(views(last), every=False) == code


def test_watch_leaves_the_table_where_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("TERM", "xterm")
    terminal = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(status, "console", lambda: terminal)
    monkeypatch.setattr(status.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        status.watch_states(views((RUNNING, OK)), every=False)
    erased, _, left = terminal.file.getvalue().rpartition("\x1b[2K")  # type: ignore[attr-defined]
    assert "running" in erased
    assert "running" in left


def test_what_can_not_be_known_from_here_is_not_waited_for(
    slept: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    hidden = RunStatus(MISSING, "unknown", "it may be queued", hidden=True)
    assert status.watch_states(views((hidden, RUNNING), (hidden, OK)), every=False) == 1
    assert slept == [5.0]
    assert "not waited for: 1 run that can't be known from here" in capsys.readouterr().out


def test_follow_ends_where_the_run_can_not_be_known(
    tmp_path: Path, slept: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here is no Slurm that could be asked."""
    run = RunFolder(tmp_path / "a")
    record.write(tmp_path, submission(job="5", tasks=[["a"]]))

    def nowhere(*_: object, **__: object) -> str:
        raise scheduler.NoSlurmError("there is no squeue here: run this on the cluster's login node")

    monkeypatch.setattr(scheduler, "ask", nowhere)
    assert status.follow_output(run, list) == 1
    assert not slept
    assert "a: unknown: it may be queued, but there is no squeue here: run this on" in capsys.readouterr().out


class Growing:
    """A run whose log grows by a line with each look, and that ends after the last."""

    def __init__(self, run: RunFolder, lines: list[bytes], last: State) -> None:
        self.run, self.lines, self.last, self.log = run, lines, last, run.path / "log.txt"

    def files(self) -> list[Path]:
        return [self.log]

    def glance(self, _: RunFolder) -> State:
        if not self.lines:
            return self.last
        with self.log.open("ab") as file:
            file.write(self.lines.pop(0))
        return State("running") if self.lines else self.last


@pytest.mark.parametrize(("last", "code"), [(DONE, 0), (ended("oom").state, 1)])
def test_follow_prints_each_byte_once(
    tmp_path: Path,
    slept: list[float],
    last: State,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also a letter of two bytes that is written in two parts, and what comes with the end."""
    growing = Growing(RunFolder(tmp_path), [b"one\n", b"tw\xc3", b"\xb6\n", b"last\n"], last)
    monkeypatch.setattr(status, "glance", growing.glance)
    assert status.follow_output(growing.run, growing.files) == code
    out = capsys.readouterr().out
    assert out.startswith(f"==> {growing.log} <==\none\ntwö\nlast\n{tmp_path.name}: {last.label}")
    assert len(slept) == 3


def test_a_file_that_is_replaced_is_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, printed = tmp_path / "log.txt", status._Printed()
    printed.print_new([log])  # not there yet
    log.write_text("one\n")
    printed.print_new([log])
    new = tmp_path / "new.txt"
    new.write_text("one\ntwo\n")
    new.replace(log)
    printed.print_new([log])
    assert capsys.readouterr().out == f"==> {log} <==\none\ntwo\n"


def test_follow_waits_for_a_queued_run_and_asks_seldom(
    tmp_path: Path, slept: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, asked = [0.0], []

    def ask(look: list[tuple[RunFolder, State]]) -> SweepStatus:
        asked.append(clock[0])
        over = RunStatus(MISSING, "missing", "its job was cancelled")
        return SweepStatus({look[0][0]: QUEUED if clock[0] < 30 else over})

    def sleep(pause_s: float) -> None:
        clock[0] += pause_s

    monkeypatch.setattr(status.time, "sleep", sleep)
    monkeypatch.setattr(status.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(status, "glance", lambda _: MISSING)
    monkeypatch.setattr(status, "overview", ask)
    assert status.follow_output(RunFolder(tmp_path), list) == 0
    assert asked == [0.0, 5.0, 12.5, 24.0, 41.0]
    text = capsys.readouterr().out
    assert text == f"queued: Resources\n{tmp_path.name}: missing: its job was cancelled\n"


def test_logs_follow_a_run_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "sweep" / "a"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    attempt = RunFolder(run).claim()
    assert attempt is not None
    (attempt.path / "log.txt").write_text("it was here\n")
    (attempt.path / "outcome.json").write_bytes(bytes(1000))
    attempt.finish("nan", "not a number")
    assert cli.main(["logs", str(run), "--follow"]) == 1
    out = capsys.readouterr().out
    assert "it was here" in out
    assert out.endswith("a: nan: not a number\n")
