"""How a job tells the SIGTERM of a preemption with a grace time from any other."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from launch.attempt.processes import GRACE_S
from launch.slurm import preemption
from launch.slurm.preemption import ANSWER_S, heeding_preemption
from tests.faults import fault

if TYPE_CHECKING:
    from pathlib import Path

IN_GRACE = "JobId=7 JobState=RUNNING PreemptTime=2026-11-23T12:26:05 Reason=None"


class Ended(BaseException):
    """What any other SIGTERM does."""


def terminated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> int:
    """Get a SIGTERM where `scontrol` is this script; returns how often the job was told of a preemption."""
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    told: list[int] = []
    saved = tmp_path / "saved"

    def end(*_: object) -> None:
        raise Ended

    before = signal.signal(signal.SIGTERM, end)
    try:
        with heeding_preemption("7", save=saved.touch, preempted=lambda: told.append(7)):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    return len(told)


def test_a_grace_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminated(tmp_path, monkeypatch, f"echo '{IN_GRACE}'") == 1


@pytest.mark.parametrize("answer", [IN_GRACE.replace("RUNNING", "COMPLETING"), "JobState=RUNNING PreemptTime=None"])
def test_any_other_end_is_one(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Ended):
        terminated(tmp_path, monkeypatch, f"echo '{answer}'")


def test_the_question_outlives_a_sigterm_to_all_processes_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"kill -TERM $$\necho '{IN_GRACE}'"
    assert terminated(tmp_path, monkeypatch, script) == 1


def test_a_question_that_slurm_does_not_answer_at_once_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    script = f"test -e {asked} && echo '{IN_GRACE}' && exit\ntouch {asked}\nexit 1"
    assert terminated(tmp_path, monkeypatch, script) == 1


def test_ranks_are_asked_to_save_before_slurm_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"test -e {tmp_path / 'saved'} && echo '{IN_GRACE}'"
    assert terminated(tmp_path, monkeypatch, script) == 1


@fault(
    "lifecycle",
    "Slurm is silent while it ends a job",
    injection="a SIGTERM, and a scontrol that never answers",
    outcome="the ranks are asked to save at once, and the attempt ends as killed long before Slurm's SIGKILL",
)
def test_a_silent_slurm_does_not_hold_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "ANSWER_S", 0.1)
    with pytest.raises(Ended):
        terminated(tmp_path, monkeypatch, "exec sleep 1000")
    assert (tmp_path / "saved").exists()
    assert ANSWER_S + 2 * GRACE_S < 30
