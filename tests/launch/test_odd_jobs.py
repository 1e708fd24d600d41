"""What `status` says of jobs that are suspended, resumed, or another user's."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from launch.slurm import record, scheduler, submit
from launch.slurm.queue import JobStatus
from launch.slurm.scheduler import NoJob, QueuedJob, SubmissionError
from launch.states import RunStatus
from launch.verbs.run import busy_programs
from launch.verbs.status import overview, progress, rendered
from parallelbench.results.attempt import Outcome, OutcomeName
from parallelbench.results.folder import RunFolder, State
from tests.launch.fake_slurm import MISSING, FakeSlurm, group, programs, submission

HOUR_S = 3600.0


def ended(label: OutcomeName, ago_s: float) -> State:
    outcome = Outcome(outcome=label, reason="x", finished_at=time.time() - ago_s)
    return State("done" if label == "ok" else "failed", outcome, 1)


@pytest.mark.parametrize("state", ["SUSPENDED", "STOPPED"])
def test_a_suspended_job_is_not_shown_as_running(state: str) -> None:
    status = JobStatus(State("running"), "5", QueuedJob("5", state, "None", "", "x"))
    assert (status.label, status.reason) == ("queued", "suspended: it has begun, and Slurm goes on with it later")
    assert not status.starts(frozenset())


@pytest.mark.parametrize("kept_first", [True, False])
def test_the_time_left_after_a_resumption_counts_the_epochs_of_this_attempt(kept_first: bool, tmp_path: Path) -> None:
    """Epochs 8 and 9 of 10 took 100 s each; 1 to 7 are an earlier attempt's, an hour ago, of a second each."""
    run = RunFolder(tmp_path / "a")
    run.path.mkdir()
    attempt = run.claim()
    assert attempt is not None
    began = time.time() - 200
    phase: dict[str, Any] = {"event": "phase", "phase": "train", "epochs": 10, "time": began}
    kept = [epoch_row(epoch, began - HOUR_S + epoch) for epoch in range(1, 8)]
    own = [epoch_row(7 + number, began + 100 * number) for number in (1, 2)]
    journal = attempt.path / "journal-rank0.jsonl"
    status = RunStatus(State("running"), "running")

    def write(*lines: dict[str, Any]) -> None:
        journal.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    before = [*kept, phase] if kept_first else [phase, *kept]
    write(*before)
    assert progress(run, status) == "epoch 8/10"
    write(*before, *own)
    assert progress(run, status) == "epoch 9/10, about 1 min 40 s left"


def epoch_row(epoch: int, finished_at: float) -> dict[str, Any]:
    return {"table": "epochs", "row": {"run_id": "x", "attempt": 1, "epoch": epoch, "finished_at": finished_at}}


def test_another_users_queued_runs_are_not_called_missing(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = submission(job="5", tasks=[["a"]])
    record.write(tmp_path, mine)
    monkeypatch.setattr(record.os, "geteuid", lambda: os.getuid() + 4242)
    monkeypatch.setattr(record, "require_own", lambda path: record_refusal(path))
    looks = [(RunFolder(tmp_path / "a"), MISSING), (RunFolder(tmp_path / "b"), ended("oom", 600.0))]
    view = overview(looks)
    labels = [status.label for status in view.runs.values()]
    assert labels == ["unknown", "oom"]
    console = Console(width=300, file=io.StringIO())
    console.print(rendered(view))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"{tmp_path} was submitted by another user: who knows its jobs" in text
    assert "it may be queued: its submission can't be read" in text


def record_refusal(path: Path) -> None:
    from parallelbench.errors import ConfigError

    raise ConfigError(f"{path} belongs to another user, and jobs would execute it: use your own folder")


ODD = r"caf\351 | \377"
"""What printf writes as bytes that are no UTF-8."""


def test_jobs_whose_names_are_no_utf_8_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm keeps the bytes that sbatch was given, and shows them to all commands."""
    queue = rf"printf '5|N/A|5|RUNNING|n1|N/A|{ODD}\n6|N/A|6|PENDING|None|N/A|parallelbench-x\n'"
    programs(tmp_path / "bin", monkeypatch, squeue=queue, scancel=f"printf '{ODD}' >&2; exit 1")
    known = scheduler.queue()
    assert (known["5"].state, known["6"].name) == ("RUNNING", "parallelbench-x")
    with pytest.raises(scheduler.SchedulerError, match=r"^scancel: caf. | "):
        scheduler.tell(["scancel", "5"])


def test_an_sbatch_that_prints_no_utf_8_may_have_made_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path / "bin", monkeypatch, sbatch=f"printf '{ODD}'; echo Submitted batch job 17", srun="true")
    one = group(tmp_path / "results")
    mine = one.submission(one.tasks(), record.new_token())
    path = record.write(tmp_path / "results" / "adhoc", mine)
    with pytest.raises(SubmissionError) as raised:
        submit.sbatch(path, mine, one.shape)
    assert raised.value.why is NoJob.LOST, "it is looked for by its name"


def test_a_busy_program_is_named_whatever_its_bytes(tmp_path: Path) -> None:
    """Else whoever prints it fails."""
    odd = os.path.join(os.fsencode(tmp_path), b"caf\xe9")
    os.symlink(os.path.realpath(sys.executable), odd)
    with subprocess.Popen([odd, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout is not None
            busy.stdout.readline()
            (line,) = (each for each in busy_programs() if f"(process {busy.pid}," in each)
            assert line.encode().startswith(b"caf?")
        finally:
            busy.kill()
