"""`prune`: what it lists, what it removes, and all that it leaves alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from launch import leftovers as leftovers_module
from launch.launcher import RunStatus
from launch.leftovers import YOUNG_S, Stale, remove_intent, stale
from launch.local import OnThisMachine
from launch.slurm import record
from launch.sweep import expand
from parallelbench import cli
from parallelbench.results.folder import RunFolder, find_runs
from tests.helpers import TINY
from tests.launch.fake_slurm import DONE, MISSING, ON_SITE, FakeSlurm, submission

OLD = YOUNG_S + 60


def aged(path: Path, age_s: float = OLD) -> Path:
    """A file or folder that was touched so long ago."""
    for each in [*path.rglob("*"), path]:
        os.utime(each, (time.time() - age_s,) * 2)
    return path


def intents(results: Path, *options: str) -> list[RunFolder]:
    """Runs that were written and never begun."""
    folders = []
    for planned in expand([*ON_SITE, f"results={results}", *options]):
        folder = RunFolder.of(planned.run)
        folder.write_intent(planned.run, planned.overrides)
        folders.append(RunFolder(aged(folder.path)))
    return folders


def listed(runs: dict[RunFolder, RunStatus]) -> list[Path]:
    return [each.path for each in stale(runs)]


def test_runs_that_nobody_queued_are_shown_first_and_removed_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results").mkdir()
    first, second = intents(tmp_path / "results", "seed=0,1")
    assert cli.main(["prune", str(tmp_path / "results")]) == 0
    text = capsys.readouterr().out
    assert text.count("nobody queued it") == 2
    assert f"2 folders, 0.0 MB; `parallelbench prune {tmp_path}/results --yes` removes them" in text
    assert (first.path / "config.yaml").exists(), "listing removes nothing"
    assert cli.main(["prune", str(second.path), "--yes"]) == 0
    assert (first.path.exists(), second.path.exists()) == (True, False)
    assert cli.main(["prune", str(tmp_path / "results"), "--yes"]) == 0
    assert "1 folder, 0.0 MB; removed" in capsys.readouterr().out
    assert not first.path.exists()


def test_what_is_queued_or_may_be_stays(tmp_path: Path, fake: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    queued, unknown, over = intents(tmp_path, "seed=0,1,2")
    jobs = [
        submission(job="5", tasks=[[queued.path.name]]),
        submission(tasks=[[unknown.path.name]], created_at=time.time()),
    ]
    for each in (*jobs, submission(job="7", tasks=[[over.path.name]])):
        record.write(queued.path.parent, each)
    fake.answers["squeue"] = f"N/A|N/A|5|PENDING|None|N/A|N/A|{jobs[0].name}\n"
    assert cli.main(["prune", str(tmp_path), "--yes"]) == 0
    assert "its job 7 left no outcome" in " ".join(capsys.readouterr().out.split())
    assert (queued.path.exists(), unknown.path.exists(), over.path.exists()) == (True, True, False)


def test_without_an_answer_of_slurms_nothing_that_was_submitted_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from launch.slurm import scheduler

    (run,) = intents(tmp_path)
    record.write(run.path.parent, submission(job="5", tasks=[[run.path.name]]))

    def down(*_: object, **__: object) -> str:
        raise scheduler.SchedulerError("squeue gave no answer")

    monkeypatch.setattr(scheduler, "ask", down)
    assert cli.main(["prune", str(tmp_path), "--yes"]) == 0
    assert run.path.exists()
    assert "squeue gave no answer" in capsys.readouterr().out


@pytest.mark.parametrize("reason", ["young", "foreign", "begun", "others"])
def test_other_folders_stay(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = intents(tmp_path)
    if reason == "young":
        os.utime(run.path)
    elif reason == "foreign":
        (run.path / "config.yaml").write_text("my: own\n")
        aged(run.path)
    elif reason == "begun":
        (run.path / "attempts" / "1").mkdir(parents=True)
        aged(run.path)
    else:
        monkeypatch.setattr(leftovers_module.os, "geteuid", lambda: os.getuid() + 1)
    assert listed({run: RunStatus(MISSING, "missing")}) == []


def test_runs_that_a_submit_here_has_yet_to_begin_stay(tmp_path: Path) -> None:
    """It writes all of them before the first begins; a job of Slurm's that runs works on its own run only."""
    waiting, other = intents(tmp_path, "seed=0,1")
    runs = {waiting: RunStatus(MISSING, "missing"), other: RunStatus(MISSING, "running")}
    assert listed(runs) == []
    assert listed(runs | {other: RunStatus(MISSING, "running", job="5")}) == [waiting.path]


def test_a_run_that_was_pruned_while_it_waited_is_trained_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launch import local

    planned = expand([*TINY, "device=cpu", f"results={tmp_path}"])[0]
    item = OnThisMachine().prepare(planned)
    seen: list[bool] = []
    monkeypatch.setattr(
        local, "carry_out", lambda folder, *_, **__: seen.append((folder.path / "config.yaml").exists())
    )
    OnThisMachine()._start(item, frozenset(), lambda _: None, submit="x")  # type: ignore[arg-type, return-value]
    assert seen == [True]


def test_what_dead_attempts_left_goes_and_what_counts_stays(tmp_path: Path) -> None:
    (run,) = intents(tmp_path)
    inside = ("attempts/1/preprocess/a", "attempts/2/reference/b", "attempts/.3.x.tmp/c", ".result.x.tmp/d")
    whole, part = "checkpoints/attempt-1-epoch-2/manifest.json", "checkpoints/attempt-1-epoch-3/rank0.pt"
    kept = ("attempts/1/log.txt", "attempts/1/outcome.json", "attempts/2/journal-rank0.jsonl", "result/manifest.json")
    for name in (*inside, whole, part, *kept):
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_bytes(bytes(1_000_000))
    older = run.path / "attempts/1/prepared-images.npy"
    older.write_bytes(bytes(1_000_000))
    aged(run.path)
    leftovers = {older} | {run.path / name.rpartition("/")[0] for name in inside}
    killed = {run: RunStatus(MISSING, "killed")}
    assert set(listed(killed)) == leftovers | {run.path / "checkpoints" / "attempt-1-epoch-3"}
    done = {run: RunStatus(DONE, "ok")}
    assert set(listed(done)) == leftovers | {run.path / "checkpoints"}
    assert listed({run: RunStatus(MISSING, "running")}) == []
    found = list(stale(done))
    assert sum(each.size_bytes for each in found) == 7_000_000
    assert all(each.remove() for each in found)
    assert all((run.path / name).exists() for name in kept)


def test_what_was_submitted_again_after_the_look_stays(tmp_path: Path) -> None:
    (run,) = intents(tmp_path)
    (found,) = stale({run: RunStatus(MISSING, "missing")})
    planned = expand([*ON_SITE, f"results={tmp_path}"])[0]
    run.write_intent(planned.run, planned.overrides)
    assert not found.remove()
    assert (run.path / "config.yaml").exists()
    aged(run.path)
    assert found.remove()


def test_nobody_submits_between_the_look_and_the_removal(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = intents(tmp_path)
    sweep = run.path.parent
    record.write(sweep, submission(job="7", tasks=[[run.path.name]]))
    locked: list[bool] = []

    def remove(_: Stale) -> bool:
        locked.append((sweep / record.FOLDER / "lock").exists())
        return True

    monkeypatch.setattr(Stale, "remove", remove)
    assert cli.main(["prune", str(tmp_path), "--yes"]) == 0
    assert locked == [True]
    with record.lock(sweep):
        assert cli.main(["prune", str(tmp_path)]) == 0, "listing needs no lock"
        assert cli.main(["prune", str(tmp_path), "--yes"]) == 2
    assert "another process is submitting this sweep" in capsys.readouterr().err
    assert not (sweep / record.FOLDER / "lock").exists()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_that_is_begun_while_it_is_removed_stays_whole(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its folder gets another name, or after that: then its configuration comes to where it began."""
    (run,) = intents(tmp_path)
    rename, renamed = os.rename, []

    def begun(source: Path, target: Path) -> None:
        first = not renamed and source == run.path
        if first and when == "before":
            (run.path / "attempts" / "1").mkdir(parents=True)
        rename(source, target)
        renamed.append(source)
        if first and when == "after":
            (run.path / "attempts" / "1").mkdir(parents=True)

    monkeypatch.setattr(leftovers_module.os, "rename", begun)
    remove_intent(run)
    monkeypatch.undo()
    assert sorted(os.listdir(run.path)) == ["attempts", "config.yaml", "overrides.txt"]
    assert os.listdir(run.path / "attempts") == ["1"]
    assert os.listdir(tmp_path / "adhoc") == [run.path.name]


def test_a_link_to_a_run_is_left_alone(tmp_path: Path) -> None:
    (run,) = intents(tmp_path / "archive")
    link = RunFolder(tmp_path / "link")
    link.path.symlink_to(run.path)
    os.utime(link.path, (0, 0), follow_symlinks=False)
    assert listed({link: RunStatus(MISSING, "missing")}) == []
    remove_intent(link)
    assert (link.path / "config.yaml").exists()


def test_what_was_being_removed_is_no_run_and_goes_later(tmp_path: Path) -> None:
    one, other = intents(tmp_path, "seed=0,1")
    left = one.path.rename(one.path.with_name(".forgotten-x.tmp"))
    assert find_runs(tmp_path) == [other]
    os.utime(other.path)
    assert listed({other: RunStatus(MISSING, "missing")}) == [left]


def test_a_clock_that_is_ahead_makes_nothing_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = intents(tmp_path)
    os.utime(run.path)
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 2 * OLD)
    assert listed({run: RunStatus(MISSING, "missing", "", "")}) == []
