"""Shapes of jobs take turns, so that what is compared runs close in time."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

import conf
from launch.launcher import Prepared, SubmitOptions
from launch.slurm import scheduler, submit
from launch.slurm.launcher import OnSlurm
from launch.slurm.order import in_turns, interleaving, out_of_turn
from launch.slurm.record import Submission
from launch.slurm.sbatch import Shape, job_groups, job_of_runs
from launch.slurm.scheduler import NoJob, SchedulerError, SubmissionError
from launch.slurm.submit import device_type_of
from launch.sweep import expand
from parallelbench.results.folder import RunFolder
from tests.launch.fake_slurm import MISSING, SINFO, FakeSlurm, prepared

WIDE = ("strategy=ddp", "devices=1,2")
SHIPPED = sorted(path.stem for path in Path(next(iter(conf.__path__)), "sweep").glob("*.yaml"))
ON_SLURM = ("launcher=slurm", "site=asu_sol")


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
    assert [devices for devices, _ in found] == [first, second, second, first, first, second]
    one_by_one = [turns(tmp_path, *WIDE, "model=mlp,logistic_regression", f"repeat={repeat}") for repeat in range(3)]
    assert [devices for each in one_by_one for devices, _ in each] == [first, second, second, first, first, second]


@pytest.mark.parametrize(("rounds", "each"), [(8, 1), (9, 2), (16, 2), (20, 4)])
def test_many_rounds_share_turns_in_whole_pairs_and_none_is_lost(rounds: int, each: int, tmp_path: Path) -> None:
    found = turns(tmp_path, *WIDE, f"sweep.repeats={rounds}")
    expected = [list(range(first, min(first + each, rounds))) for first in range(0, rounds, each)]
    assert [repeats for devices, repeats in found if devices == 2] == expected
    assert [repeats for devices, repeats in found if devices == 1] == expected


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_sweep_goes_in_turns(name: str, tmp_path: Path) -> None:
    """All arrays of a round are submitted before those of the next one, and no shape comes before another in all."""
    plan = expand([*ON_SLURM, f"sweep={name}", f"results={tmp_path}"])
    runs = [replace(each, run=msgspec.structs.replace(each.run, device=device_type_of(each.run))) for each in plan]
    groups = job_groups([Prepared(each, RunFolder.of(each.run)) for each in runs])
    found = in_turns(groups)
    assert sorted(item.folder.path for turn in found for item in turn.group.runs) == sorted(
        item.folder.path for group in groups for item in group.runs
    ), "each run once"
    if len(groups) == 1:
        assert len(found) == 1, "in the order of the plan"
        return
    rounds = [(min(own), max(own)) for turn in found if (own := {item.planned.run.repeat for item in turn.group.runs})]
    assert all(last <= first for (_, last), (first, _) in pairwise(rounds))
    repeats = {item.planned.run.repeat for group in groups for item in group.runs}
    places = [[place for place, turn in enumerate(found) if turn.shape == shape] for shape in range(len(groups))]
    for one, other in combinations(places, 2):
        ahead = [first < second for first, second in zip(one, other, strict=True)]
        assert abs(2 * sum(ahead) - len(repeats)) == len(repeats) % 2


def test_a_throttle_holds_back_no_job_behind_a_later_turn(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three runs of each shape in a round, of which two run at a time; the third has to start before the next round."""
    fake.answers["sinfo"] = SINFO
    asked: list[tuple[int, str]] = []

    def sbatch(path: Path, submission: Submission, shape: Shape) -> str:
        script = job_of_runs(submission, shape, path.parent).script(len(submission.tasks))
        found = re.search("^#SBATCH --dependency=(.*)$", script, re.MULTILINE)
        asked.append((len(submission.tasks), found[1] if found else ""))
        return str(len(asked))

    monkeypatch.setattr(submit, "sbatch", sbatch)
    three = (*WIDE, "seed=0,1,2", "sweep.repeats=3")
    submit.submit(prepared(tmp_path / "2", *three, "launcher.array_parallelism=2"), SubmitOptions(), lambda _: None)
    assert asked == [(3, ""), (3, ""), (3, "after:1:2"), (3, "after:1:2"), (3, "after:3:4"), (3, "after:3:4")]
    asked.clear()
    submit.submit(prepared(tmp_path / "3", *three, "launcher.array_parallelism=3"), SubmitOptions(), lambda _: None)
    assert asked == [(3, "")] * 6


def test_a_later_turn_waits_also_where_the_one_before_it_is_not_held_back(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.answers["sinfo"] = SINFO
    waited: list[list[str]] = []

    def sbatch(_: Path, submission: Submission, __: object) -> str:
        waited.append(submission.after)
        return str(len(waited))

    monkeypatch.setattr(submit, "sbatch", sbatch)
    items = prepared(tmp_path, *WIDE, "seed=0,1", "sweep.repeats=3", "launcher.array_parallelism=1")
    of_first = [item for item in items if item.planned.run.repeat == 0 or item.planned.run.seed == 0]
    submit.submit(of_first, SubmitOptions(), lambda _: None)
    assert waited == [[], [], ["1", "2"], ["1", "2"], ["1", "2"], ["1", "2"]]


def test_the_plan_says_where_shapes_take_no_turns(tmp_path: Path) -> None:
    two = (*WIDE, "seed=0,1,2", "sweep.repeats=2")
    both = {0, 1}
    in_turn = job_groups(prepared(tmp_path, *two))
    assert interleaving(in_turn) == "2 rounds, 2 shapes in turn"
    assert list(out_of_turn(in_turn, repeats=both)) == []
    in_pack = job_groups(prepared(tmp_path, *two, "launcher.pack=true"))
    (packed,) = out_of_turn(in_pack, repeats=both)
    assert "not interleaved: choose launcher.pack=false" in packed
    assert interleaving(in_pack) == ""
    once = job_groups(prepared(tmp_path, *WIDE))
    (single,) = out_of_turn(once, repeats={0})
    assert "choose sweep.repeats=6" in single
    assert list(out_of_turn(once, repeats=both)) == [], "the rest of a sweep that took turns"
    assert list(out_of_turn(job_groups(prepared(tmp_path)), repeats={0})) == [], "of one shape nothing is compared"
    shared = job_groups(prepared(tmp_path, *WIDE, "sweep.repeats=12"))
    assert interleaving(shared) == "12 rounds in 6 turns, 2 shapes in turn"


@pytest.mark.parametrize(
    ("options", "arrays"),
    [
        (["sweep.repeats=3"], 1),  # one shape
        ([*WIDE], 2),  # one repeat
        ([*WIDE, "sweep.repeats=3", "launcher.pack=true"], 2),  # one job each
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
    assert [devices for devices, _ in sizes[:4]] == [devices for devices, _ in reversed(sizes[4:])]
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
