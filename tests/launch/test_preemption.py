"""How a job tells the SIGTERM of a preemption with a grace time from any other."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from launch.attempt.signals import heed
from launch.attempt.supervise import Interrupted, stoppable
from launch.slurm.preemption import heeding_preemption
from parallelbench.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path

IN_GRACE = "JobId=7 JobState=RUNNING PreemptTime=2026-11-23T12:26:05 Reason=None"


def terminated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> list[str]:
    """Get a SIGTERM where `scontrol` is this script; returns what became of the job."""
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    told: list[str] = []

    def save() -> None:
        told.append("saves")
        raise StorageError("the disk is full")

    with stoppable(), heeding_preemption("7", save=save, preempted=lambda: told.append("preempted")):
        os.kill(os.getpid(), signal.SIGTERM)
        assert told == [], "a handler asks nobody"
        heed()
    return told


def test_a_grace_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminated(tmp_path, monkeypatch, f"echo '{IN_GRACE}'") == ["saves", "preempted"]


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
