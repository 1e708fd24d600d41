"""How a job tells the SIGTERM of a preemption with a grace time from any other."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from launch.attempt.processes import GRACE_S
from launch.attempt.signals import heed
from launch.attempt.supervisor import Interrupted, stoppable
from launch.slurm import job
from launch.slurm.job import ANSWER_S, end_of_grace
from tests.faults import fault
from tests.launch.fake_slurm import programs, submission

IN_GRACE = "JobId=7 JobState=RUNNING EndTime=2026-11-23T12:28:05 PreemptTime=2026-11-23T12:26:05 Reason=None"


def terminated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> list[str]:
    """Get a SIGTERM where `scontrol` is this script; returns what became of the job."""
    programs(tmp_path, monkeypatch, scontrol=script)
    told: list[str] = []
    monkeypatch.setattr(job.Job, "save", lambda _: told.append("saves"))
    monkeypatch.setattr(job.Job, "preempt", lambda *_: told.append("preempted"))
    with stoppable(), job.handling_signals(job.Job(submission(), id="7")):
        os.kill(os.getpid(), signal.SIGTERM)
        assert told == [], "a handler asks nobody"
        heed()
    return told


@pytest.mark.parametrize("state", ["RUNNING", "SIGNALING", "STOPPED"])
def test_a_grace_is_no_end(state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = IN_GRACE.replace("RUNNING", state)
    assert terminated(tmp_path, monkeypatch, f"echo '{answer}'") == ["saves", "preempted"]


def test_slurm_says_when_a_grace_ends() -> None:
    ends_at = end_of_grace(IN_GRACE)
    assert ends_at is not None
    assert time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(ends_at)) == "2026-11-23T12:28:05"


@pytest.mark.parametrize("answer", [IN_GRACE.replace("RUNNING", "COMPLETING"), "JobState=RUNNING PreemptTime=None"])
def test_any_other_end_is_one(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Interrupted, match="SIGTERM"):
        terminated(tmp_path, monkeypatch, f"echo '{answer}'")


def test_the_question_outlives_a_sigterm_to_all_processes_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"kill -TERM $$\necho '{IN_GRACE}'"
    assert terminated(tmp_path, monkeypatch, script) == ["saves", "preempted"]


def test_a_question_that_slurm_does_not_answer_at_once_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    script = f"test -e {asked} && echo '{IN_GRACE}' && exit\ntouch {asked}\nexit 1"
    assert terminated(tmp_path, monkeypatch, script) == ["saves", "preempted"]


@fault(
    "lifecycle",
    "Slurm is silent while it ends a job",
    injection="a SIGTERM, and a scontrol that never answers",
    outcome="the ranks are asked to save at once, and the attempt ends as killed long before Slurm's SIGKILL",
)
def test_a_silent_slurm_does_not_hold_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "ANSWER_S", 0.1)
    with pytest.raises(Interrupted):
        terminated(tmp_path, monkeypatch, "exec sleep 1000")
    assert ANSWER_S + 2 * GRACE_S < 30
