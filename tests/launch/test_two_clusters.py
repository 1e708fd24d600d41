"""Two clusters that share one file system: each sees only its own jobs, and leaves the other's runs alone."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from launch.launcher import Prepared, SubmitOptions
from launch.slurm import launcher, record, submit
from launch.slurm.queue import SILENT_S, UNSEEN_S, Tracker, track
from launch.slurm.record import Submission
from parallelbench import cli
from parallelbench.errors import ConfigError
from parallelbench.results.folder import RunFolder, State
from tests.faults import fault
from tests.launch.fake_slurm import MISSING, FakeSlurm, prepared, submission

OLD_S = 1000.0


@pytest.fixture
def items(tmp_path: Path) -> list[Prepared]:
    """Two runs that wait in an array of cluster a."""
    items = prepared(tmp_path, "seed=0,1")
    for item in items:
        item.write_intent()
        os.utime(item.folder.path, (time.time() - OLD_S,) * 2)
    array = submission(cluster="a", job="17", tasks=[[item.folder.path.name] for item in items])
    record.write(tmp_path / "adhoc", array)
    return items


def at(fake: FakeSlurm, cluster: str, *jobs: str) -> None:
    """On a login node of the cluster, whose queue has these jobs."""
    fake.answers |= {"scontrol": f"ClusterName = {cluster}\n", "squeue": "".join(jobs)}


def known(sweep: Path, *, locked: bool = False) -> Tracker:
    return track({sweep: record.submissions(sweep)}, locked=locked)[sweep]


def never(*_: object) -> str:
    raise AssertionError("sbatch was called")


@fault(
    "submission",
    "Another cluster that sees the same files is asked",
    injection="a sweep's jobs wait on one cluster; status, submit, forget and cancel on another, whose queue is empty",
    outcome="its runs are unknown there, and stay as they are; the cluster to go to is named",
)
def test_runs_that_went_to_another_cluster_are_left_alone(
    items: list[Prepared],
    tmp_path: Path,
    fake: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(submit, "sbatch", never)
    at(fake, "b")
    sweep, folders = tmp_path / "adhoc", [item.folder for item in items]
    seen = launcher.sweep_status({sweep: [(folder, MISSING) for folder in folders]})
    assert [(status.label, status.hidden, status.live) for status in seen.runs.values()] == [
        ("unknown", True, False)
    ] * 2
    assert seen.runs[folders[0]].reason == "submitted to the cluster a, and its job is known only there"
    assert any(note.startswith("2 runs went to the cluster a, ") for note in seen.notes)
    planned = submit.not_submitted([known(sweep).status(folders[0], MISSING)], frozenset())
    assert planned.startswith("not submitted: 1 unknown; 0 runs to submit; submitted to the cluster a, ")
    with pytest.raises(ConfigError, match=rf"^2 runs of {sweep} went to the cluster a, .*cancel {sweep}` there first"):
        submit.submit(items, SubmitOptions(), lambda _: None)
    assert cli.main(["forget", str(folders[0].path)]) == 2
    assert f"(submitted to the cluster a, and its job is known only there): `parallelbench cancel {sweep}`" in (
        capsys.readouterr().err
    )
    assert all((folder.path / "config.yaml").exists() for folder in folders)
    text = Console(file=io.StringIO(), width=200)
    launcher.cancel_sweeps([sweep], text)
    launcher.cancel_runs(folders[:1], text)
    said = text.file.getvalue()  # type: ignore[attr-defined]
    assert "2 runs went to the cluster a, whose jobs are known only there: submit or cancel there" in said
    assert f"{folders[0].path.name} went to the cluster a: cancel it there" in said
    assert not any(each.cancelled for each in record.submissions(sweep))


def test_what_was_cancelled_where_it_waited_may_go_elsewhere(
    items: list[Prepared], tmp_path: Path, fake: FakeSlurm, told: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = tmp_path / "adhoc"
    (first,) = record.submissions(sweep)
    at(fake, "a", *(f"17|{task}|{18 + task}|PENDING|None|N/A|{first.name}\n" for task in range(2)))
    launcher.cancel_sweeps([sweep], Console(file=io.StringIO()))
    assert told == [["scancel", "17"]]
    at(fake, "b")
    monkeypatch.setattr(submit, "sbatch", lambda *_: "5")
    (again,) = submit.submit(items, SubmitOptions(), lambda _: None)
    assert (again.cluster, len(again.tasks)) == ("b", 2)
    at(fake, "a")
    assert known(sweep).status(items[0].folder, MISSING).elsewhere == "b"


def test_a_run_that_was_cancelled_where_it_waited_may_go_elsewhere_alone(
    items: list[Prepared], tmp_path: Path, fake: FakeSlurm, told: list[list[str]]
) -> None:
    sweep, folders = tmp_path / "adhoc", [item.folder for item in items]
    (first,) = record.submissions(sweep)
    at(fake, "a", *(f"17|{task}|{18 + task}|PENDING|None|N/A|{first.name}\n" for task in range(2)))
    launcher.cancel_runs(folders[1:], Console(file=io.StringIO()))
    assert told == [["scancel", "17_1"]]
    at(fake, "b")
    assert [known(sweep).status(folder, MISSING).elsewhere for folder in folders] == ["a", ""]
    at(fake, "a", f"17|0|18|PENDING|None|N/A|{first.name}\n")
    launcher.cancel_runs(folders[:1], Console(file=io.StringIO()))
    at(fake, "b")
    assert [known(sweep).status(folder, MISSING).elsewhere for folder in folders] == ["", ""]


def test_what_an_older_release_has_cancelled_may_go_elsewhere(
    items: list[Prepared], tmp_path: Path, fake: FakeSlurm
) -> None:
    (first,) = record.submissions(tmp_path / "adhoc")
    record.write(tmp_path / "adhoc", msgspec.structs.replace(first, cancelled=True))
    at(fake, "b")
    assert [known(tmp_path / "adhoc").status(item.folder, MISSING).elsewhere for item in items] == ["", ""]


@pytest.mark.parametrize(
    ("here", "recorded", "label"), [("a", "a", "missing"), ("a", "", "missing"), ("", "a", "missing")]
)
def test_jobs_of_this_cluster_and_of_older_releases_are_judged_by_its_queue(
    here: str, recorded: str, label: str, tmp_path: Path, fake: FakeSlurm
) -> None:
    """Also where Slurm does not say what it is called."""
    at(fake, here)
    record.write(tmp_path, submission(job="17", cluster=recorded))
    assert known(tmp_path).status(RunFolder(tmp_path / "a"), MISSING).label == label


def test_the_name_is_asked_for_only_where_a_job_is_not_in_the_queue(tmp_path: Path, fake: FakeSlurm) -> None:
    mine = submission(job="17", cluster="a", tasks=[["a"]])
    record.write(tmp_path, mine)
    at(fake, "b", f"N/A|N/A|17|PENDING|None|N/A|{mine.name}\n")
    assert known(tmp_path).status(RunFolder(tmp_path / "a"), MISSING).label == "queued"
    assert fake.asked == ["squeue"]


def test_an_answer_that_another_cluster_owes_is_waited_for_there(tmp_path: Path, fake: FakeSlurm) -> None:
    at(fake, "b")
    written = record.write(tmp_path, submission(cluster="a"))
    os.utime(written, (time.time() - 2 * UNSEEN_S,) * 2)
    assert known(tmp_path, locked=True).status(RunFolder(tmp_path / "a"), MISSING).elsewhere == "a"
    assert len(record.submissions(tmp_path)) == 1, "not withdrawn"


def failed(sweep: Path, mine: Submission, outcome: str) -> tuple[RunFolder, State]:
    folder = RunFolder(sweep / "a")
    attempt = folder.claim(job=f"{mine.token}.17.0")
    assert attempt is not None
    attempt.finish(outcome, "so it was")  # type: ignore[arg-type]
    return folder, folder.state()


@pytest.mark.parametrize(("outcome", "elsewhere"), [("oom", ""), ("killed", "a")])
def test_a_run_that_is_over_elsewhere_may_be_tried_here(
    outcome: str, elsewhere: str, tmp_path: Path, fake: FakeSlurm
) -> None:
    """One that was killed may be queued again there."""
    first, second = submission(job="17", cluster="a", created_at=1.0), submission(job="5", cluster="b", created_at=2.0)
    at(fake, "b")
    record.write(tmp_path, first)
    folder, state = failed(tmp_path, first, outcome)
    assert known(tmp_path).status(folder, state).elsewhere == elsewhere
    record.write(tmp_path, second)
    folder, state = failed(tmp_path, second, "killed")
    assert known(tmp_path).status(folder, state).starts(frozenset()), "this cluster's job has tried it since"


def test_an_attempt_on_another_cluster_is_not_taken_for_dead(tmp_path: Path, fake: FakeSlurm) -> None:
    """Its job is not in this queue, whatever its heartbeat does."""
    mine = submission(job="17", cluster="a")
    record.write(tmp_path, mine)
    folder = RunFolder(tmp_path / "a")
    attempt = folder.claim(job=f"{mine.token}.17.0")
    assert attempt is not None
    (attempt.path / "supervisor.json").write_text(
        (attempt.path / "supervisor.json").read_text().replace('"machine":"', '"machine":"another')
    )
    os.utime(attempt.heartbeat, (time.time() - 2 * SILENT_S,) * 2)
    state = folder.state()
    at(fake, "b")
    assert track({tmp_path: [mine]}, {tmp_path: [(folder, state)]})[tmp_path].status(folder, state).label == "running"
    assert attempt.outcome() is None
    at(fake, "a")
    assert track({tmp_path: [mine]}, {tmp_path: [(folder, state)]})[tmp_path].status(folder, state).label == "killed"
