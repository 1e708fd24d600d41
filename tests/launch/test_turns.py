"""Shapes of jobs take turns, so that what is compared runs close in time."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from launch.launcher import SubmitOptions
from launch.slurm import scheduler, submit
from launch.slurm.launcher import OnSlurm
from launch.slurm.order import MOST_TURNS, in_turns
from launch.slurm.record import Submission
from launch.slurm.sbatch import job_groups
from launch.slurm.scheduler import NoJob, SchedulerError, SubmissionError
from tests.launch.fake_slurm import MISSING, SINFO, FakeSlurm, prepared

WIDE = ("strategy=ddp", "devices=1,2", "launcher.array_parallelism=100")


def turns(results: Path, *options: str) -> list[tuple[int, list[int]]]:
    """(devices, repeats of the runs) of each array, in the order of their submission."""
    found = in_turns(job_groups(prepared(results, *options)))
    shapes = [turn.group.shape.devices for turn in found]
    repeats = [sorted(item.planned.run.repeat for item in turn.group.runs) for turn in found]
    return list(zip(shapes, repeats, strict=True))


def test_shapes_take_turns_repeat_by_repeat(tmp_path: Path) -> None:
    found = turns(tmp_path, *WIDE, "model=mlp,logistic_regression", "sweep.repeats=3")
    assert [repeats for _, repeats in found] == [[0, 0], [0, 0], [1, 1], [1, 1], [2, 2], [2, 2]]
    first, second, *_ = (devices for devices, _ in found)
    assert {first, second} == {1, 2}
    assert [devices for devices, _ in found] == [first, second] * 3


def test_many_repeats_share_turns_and_none_is_lost(tmp_path: Path) -> None:
    found = turns(tmp_path, *WIDE, "sweep.repeats=20")
    assert len(found) == 2 * MOST_TURNS
    of_pairs = [repeats for devices, repeats in found if devices == 2]
    assert [repeat for repeats in of_pairs for repeat in repeats] == list(range(20))
    assert {len(repeats) for repeats in of_pairs} == {2, 3}
    assert [repeats for devices, repeats in found if devices == 1] == of_pairs


@pytest.mark.parametrize(
    ("options", "arrays"),
    [
        (["sweep.repeats=3"], 1),  # one shape
        ([*WIDE], 2),  # one repeat
        ([*WIDE, "sweep.repeats=3", "launcher.pack=true"], 2),  # one job each
        ([*WIDE, "sweep.repeats=3", "launcher.array_parallelism=2"], 2),  # held back
    ],
)
def test_what_does_not_take_turns_is_one_array_for_each_shape(options: list[str], arrays: int, tmp_path: Path) -> None:
    assert len(turns(tmp_path, *options)) == arrays


def test_the_plan_shows_what_is_submitted(tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "available", lambda: True)
    fake.answers["sinfo"] = SINFO
    fake.answers["scontrol"] = "MaxArraySize            = 2\n"
    items = prepared(tmp_path, *WIDE, "seed=0,1,2", "sweep.repeats=2")
    console = Console(width=200, file=io.StringIO())
    assert OnSlurm().show_plan(items, [MISSING] * 12, console)[0]
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("6 jobs in arrays of 2, 1, 2, 1 (the first is shown) of ") == 2
    assert text.count(", in turn with the other shapes: at most ") == 2
    sizes: list[tuple[int, int]] = []

    def sbatch(_: Path, submission: Submission, __: object) -> str:
        sizes.append((submission.devices, len(submission.tasks)))
        return str(len(sizes))

    monkeypatch.setattr(submit, "sbatch", sbatch)
    submissions = submit.submit(items, SubmitOptions(), lambda _: None)
    assert [size for _, size in sizes] == [2, 1] * 4
    assert [devices for devices, _ in sizes[:4]] == [devices for devices, _ in sizes[4:]]
    assert len({each.submit for each in submissions}) == 1, "measured together"


def test_a_limit_in_a_later_turn_counts_all_of_the_shape(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.answers["sinfo"] = SINFO
    given: list[str] = []

    def sbatch(*_: object) -> str:
        if len(given) == 3:
            raise SubmissionError("too many", NoJob.LIMIT)
        given.append("job")
        return str(len(given))

    monkeypatch.setattr(submit, "sbatch", sbatch)
    with pytest.raises(SchedulerError, match=r"too many \(1 of 3 tasks of this shape submitted\)"):
        submit.submit(prepared(tmp_path, *WIDE, "sweep.repeats=3"), SubmitOptions(), lambda _: None)
