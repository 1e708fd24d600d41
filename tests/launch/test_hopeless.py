"""Killed runs whose job would end the same way again: told by accounting, and not submitted until something changed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from launch.slurm import record
from launch.slurm.jobs import slurm
from launch.slurm.queue import JobStatus, track
from launch.slurm.record import Submission
from launch.slurm.submit import not_submitted
from parallelbench.results.folder import RunFolder
from tests.launch.fake_slurm import FakeSlurm, run_of, submission


def killed(sweep: Path, fake: FakeSlurm, ended: str, **changes: object) -> tuple[RunFolder, Submission]:
    """A run whose first job was killed by Slurm, which says how it ended."""
    mine = submission(job="30", **{"tasks": [["a"], ["b"]], **changes})
    record.write(sweep, mine)
    folder = RunFolder(sweep / "a")
    attempt = folder.claim(job=f"{mine.token}.31.0")
    assert attempt is not None
    (attempt.path / "outcome.json").write_text(" " * 500)
    attempt.finish("killed", "interrupted by SIGTERM")
    fake.answers["sacct"] = f"30_0|{ended}|{mine.name}\n"
    return folder, mine


def asked_again(folder: RunFolder, *overrides: str) -> JobStatus:
    """What submitting the run with these overrides knows of it."""
    sweep = folder.path.parent
    tracker = track({sweep: record.submissions(sweep)}, {sweep: [(folder, folder.state())]})[sweep]
    return tracker.status(folder, run=run_of(*overrides))


@pytest.mark.parametrize(
    ("ended", "word", "enough", "beside"),
    [
        (
            "OUT_OF_MEMORY",
            "out of host memory: raise launcher.memory_gib_per_device above 2.5",
            "launcher.memory_gib_per_device=4",
            "launcher.time_limit_min=90",
        ),
        (
            "TIMEOUT",
            "nothing was saved within launcher.time_limit_min=60: raise it",
            "launcher.time_limit_min=90",
            "launcher.memory_gib_per_device=4",
        ),
    ],
)
def test_a_run_that_would_end_the_same_way_waits_for_a_change(
    tmp_path: Path, fake: FakeSlurm, ended: str, word: str, enough: str, beside: str
) -> None:
    folder, _ = killed(tmp_path, fake, ended)
    same, other, changed = (asked_again(folder, *more) for more in ([], [beside], [enough]))
    assert [status.starts(frozenset()) for status in (same, other, changed)] == [False, False, True]
    assert same.starts(frozenset({"killed"})), "whoever asks for it gets it"
    assert same.reason == f"interrupted by SIGTERM ({ended}; {word})"
    said = not_submitted([same], frozenset())
    assert "1 killed (--retry killed tries again)" in said
    assert word in said


@pytest.mark.parametrize("ended", ["CANCELLED by 0", "NODE_FAIL", "PREEMPTED", "FAILED"])
def test_other_ends_are_tried_again(ended: str, tmp_path: Path, fake: FakeSlurm) -> None:
    folder, _ = killed(tmp_path, fake, ended)
    assert asked_again(folder).starts(frozenset())
    assert asked_again(folder).reason == f"interrupted by SIGTERM ({ended.split()[0]})"


def test_a_time_limit_after_a_saved_epoch_is_no_obstacle(tmp_path: Path, fake: FakeSlurm) -> None:
    folder, _ = killed(tmp_path, fake, "TIMEOUT")
    saved = folder.path / "checkpoints" / "attempt-1-epoch-3"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    assert asked_again(folder).starts(frozenset())


def test_runs_that_share_a_job_are_not_blamed_for_its_end(tmp_path: Path, fake: FakeSlurm) -> None:
    folder, _ = killed(tmp_path, fake, "TIMEOUT", tasks=[["a", "c"], ["b"]])
    assert asked_again(folder).starts(frozenset())


def test_what_ended_elsewhere_since_is_judged_by_that(tmp_path: Path, fake: FakeSlurm) -> None:
    folder, _ = killed(tmp_path, fake, "OUT_OF_MEMORY")
    later = folder.claim(job="")
    assert later is not None
    (later.path / "outcome.json").write_text(" " * 500)
    later.finish("killed", "interrupted by SIGINT")
    assert asked_again(folder).starts(frozenset())


def test_a_submission_with_more_memory_is_held_against_its_own(tmp_path: Path, fake: FakeSlurm) -> None:
    launcher = msgspec.structs.replace(slurm(run_of()), memory_gib_per_device=8.0)
    folder, _ = killed(tmp_path, fake, "OUT_OF_MEMORY", launcher=launcher)
    assert not asked_again(folder, "launcher.memory_gib_per_device=8").starts(frozenset())
    assert asked_again(folder, "launcher.memory_gib_per_device=9").starts(frozenset())
