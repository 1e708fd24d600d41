"""What Slurm knows of runs, combined with what their folders say."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from launch.slurm import launcher, record, scheduler
from launch.slurm.job import Job
from launch.slurm.queue import JobStatus, Tracker, by_run, track
from launch.slurm.record import Submission
from launch.slurm.sbatch import slurm
from launch.slurm.scheduler import QueuedJob, tasks_of
from launch.slurm.submit import not_submitted
from launch.states import RunStatus
from parallelbench import cli
from parallelbench.errors import ConfigError, StorageError
from parallelbench.results import liveness
from parallelbench.results.attempt import OUTCOMES, Attempt, Outcome, OutcomeName
from parallelbench.results.files import fill
from parallelbench.results.folder import RunFolder, State
from parallelbench.results.journal import Journal
from tests.faults import fault
from tests.launch.fake_slurm import DONE, MISSING, FakeSlurm, run_of, submission

FAILED = State("failed", Outcome(outcome="oom", reason="out of memory", finished_at=2.0), 1)
KILLED = State("failed", Outcome(outcome="killed", reason="vanished", finished_at=0.0), 1)
TIMEOUT = State("failed", Outcome(outcome="timeout", reason="too slow", finished_at=2.0), 1)


def test_a_job_knows_its_own_attempts_although_ids_are_given_out_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    own, other = submission(), submission()
    mine = Job(own, id="5", restarts=1, task=0)
    first = folder.claim(job=Job(own, id="5", restarts=0, task=0).start)
    second = folder.claim(job=Job(other, id="5", restarts=0, task=0).start)
    assert first is not None
    assert second is not None
    assert (mine.began(first), mine.began(second)) == (True, False)


@pytest.mark.parametrize(
    ("state", "job_state", "label", "wanted"),
    [
        (MISSING, None, "missing", True),
        (MISSING, "PENDING", "queued", False),
        (MISSING, "RUNNING", "running", False),
        (KILLED, None, "killed", True),
        (KILLED, "REQUEUED", "queued", False),
        (KILLED, "RUNNING", "running", False),
        (FAILED, None, "oom", False),
        (FAILED, "COMPLETING", "oom", False),
        (DONE, "COMPLETING", "ok", False),
        (DONE, None, "ok", False),
    ],
)
def test_the_folder_comes_before_the_queue(
    state: State, job_state: str | None, label: str, wanted: bool, tmp_path: Path
) -> None:
    mine = submission(job="17")
    RunFolder(tmp_path / "a").claim(job=f"{mine.token}.17.0")
    jobs = {"17_0": QueuedJob("17_0", job_state, "Resources", "", mine.name)} if job_state else {}
    tracker = Tracker({"a": [(mine, 0)]}, jobs)
    status = tracker.status(RunFolder(tmp_path / "a"), state)
    assert (status.label, status.starts(frozenset())) == (label, wanted)


def test_outcomes_are_tried_again_where_that_is_asked_for() -> None:
    assert JobStatus(FAILED).starts(frozenset({"oom"}))
    assert not JobStatus(FAILED).starts(frozenset({"nan"}))
    assert not JobStatus(DONE).starts(frozenset({"ok"}))


def test_what_is_not_submitted_is_counted_and_how_to_try_failed_runs_again() -> None:
    queued = JobStatus(MISSING, "17", QueuedJob("17", "PENDING", "None", "", "x"))
    statuses = [JobStatus(DONE), JobStatus(FAILED), JobStatus(KILLED), JobStatus(MISSING), queued]
    text = "not submitted: 1 done, 1 oom, 1 queued (--retry oom tries again); 2 runs to submit"
    assert not_submitted(statuses, frozenset()) == text
    assert not_submitted(statuses, frozenset({"oom"})) == "not submitted: 1 done, 1 queued; 3 runs to submit"
    assert not_submitted([JobStatus(MISSING)], frozenset()) == ""


def test_a_submission_without_a_known_job_is_not_repeated() -> None:
    tracker = Tracker({"a": [(submission(), 0)]}, {})
    status = tracker.status(RunFolder(Path("sweep/a")), MISSING)
    assert (status.label, status.starts(frozenset())) == ("unknown", False)


@pytest.mark.parametrize("outcome", ["oom", "killed", "timeout", "storage"])
@pytest.mark.parametrize(("own", "label"), [(False, "unknown"), (True, "")])
@pytest.mark.parametrize("job", [None, "17"])
def test_a_retry_of_which_slurm_says_nothing_is_not_repeated_unless_it_has_ended(
    outcome: OutcomeName, own: bool, label: str, job: str | None, tmp_path: Path
) -> None:
    failed = State("failed", Outcome(outcome=outcome, reason="so it was", finished_at=2.0), 1)
    first, again = submission(job="5"), submission(job=job)
    tracker = Tracker({"a": [(first, 0), (again, 0)]}, {}, answered=job is None)
    RunFolder(tmp_path / "a").claim(job=f"{(again if own else first).token}.5.0")
    status = tracker.status(RunFolder(tmp_path / "a"), failed)
    if job is not None and outcome != "oom":  # it may wait for its next start, and nobody can be asked
        label = "unknown"
    assert status.label == (label or outcome)
    assert status.starts(frozenset(OUTCOMES)) == (not label)
    assert ("before that: " + outcome in status.reason) == bool(label)


def test_the_job_of_an_earlier_submission_counts_while_it_is_in_the_queue() -> None:
    first, second = submission(job="5"), submission(job="6", tasks=[["a"]])
    waiting = QueuedJob("5_0", "PENDING", "Resources", "", first.name)
    tracker = Tracker({"a": [(first, 0), (second, 0)], "b": [(first, 1)]}, {"5_0": waiting})
    assert tracker.status(RunFolder(Path("sweep/a")), MISSING).queued == waiting
    assert tracker.in_queue() == [waiting], "so `cancel` ends it"
    assert [each.token for each in tracker.submissions] == [first.token, second.token]


@pytest.mark.parametrize(
    ("state", "job_state", "own", "label", "reason"),
    [
        (MISSING, "RUNNING", True, "queued", "waits in its packed job"),
        (State("running"), "RUNNING", True, "running", ""),
        (KILLED, "RUNNING", True, "queued", "waits in its packed job"),
        (FAILED, "RUNNING", False, "queued", "waits in its packed job"),
        (FAILED, "RUNNING", True, "oom", "out of memory"),
        (TIMEOUT, "RUNNING", True, "timeout", "too slow"),
        (MISSING, "PENDING", True, "queued", "Resources"),
    ],
)
@pytest.mark.parametrize("created_at", [1.0, 3.0])
def test_runs_of_a_packed_job_run_one_by_one(
    state: State, job_state: str, own: bool, label: str, reason: str, created_at: float, tmp_path: Path
) -> None:
    """Which attempt is whose, its job says; the clock of a node may differ from that of the login node."""
    packed = submission(created_at=created_at, job="17", tasks=[["a", "b"]])
    queue = {"17": QueuedJob("17", job_state, "Resources", "", packed.name)}
    RunFolder(tmp_path / "a").claim(job=f"{packed.token if own else 'another'}.17.0")
    status = Tracker({"a": [(packed, 0)]}, queue).status(RunFolder(tmp_path / "a"), state)
    assert (status.label, status.reason) == (label, reason)
    assert not status.starts(frozenset()), "its job may still come to it"


def test_a_run_that_was_started_as_often_as_it_may_be_is_over_although_its_packed_job_runs(tmp_path: Path) -> None:
    packed = submission(job="17", tasks=[["a", "b"]])
    folder = RunFolder(tmp_path / "a")
    for restarts in range(packed.launcher.attempts):
        assert folder.claim(job=f"{packed.token}.17.{restarts}") is not None
    queue = {"17": QueuedJob("17", "RUNNING", "n1", "", packed.name)}
    status = Tracker({"a": [(packed, 0)]}, queue).status(folder, TIMEOUT)
    assert (status.label, status.live, status.starts(frozenset())) == ("timeout", False, True)


def test_a_job_that_left_nothing_is_named() -> None:
    mine = submission(job="17")
    status = Tracker({"a": [(mine, 0)]}, {}).status(RunFolder(Path("sweep/a")), MISSING)
    reason = "its job 17_0 left no outcome; `parallelbench logs` shows what it printed"
    assert status.shown() == RunStatus(MISSING, "missing", reason, "17_0")


def test_cancel_ends_all_jobs_and_says_how_runs_begin_again(
    tmp_path: Path, fake: FakeSlurm, told: list[list[str]]
) -> None:
    first, second = submission(job="5", tasks=[["a"], ["b"]]), submission(job="6", tasks=[["a"]])
    lost = submission(created_at=time.time(), tasks=[["b"]])
    for each in (first, second, lost):
        record.write(tmp_path, each)
    for name in "ab":
        (tmp_path / name).mkdir()
        RunFolder(tmp_path / name).claim()
    saved = tmp_path / "b" / "checkpoints" / "attempt-1-epoch-1" / "manifest.json"
    saved.parent.mkdir(parents=True)
    saved.touch()
    fake.answers["squeue"] = (
        "".join(f"5|{task}|{5 + task}|RUNNING|n1|N/A|{first.name}\n" for task in range(2))
        + f"N/A|N/A|6|PENDING|None|N/A|{second.name}\n"
    )
    console = Console(width=300, file=io.StringIO())
    launcher.cancel_sweeps([tmp_path], console)
    assert told == [["scancel", "5", "6"]]
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3 jobs cancelled" in text
    assert "1 run resumes after the last saved epoch; 1 run starts over because nothing was saved" in text
    assert "it is not known yet whether Slurm has 1 more array" in text


@pytest.mark.parametrize(
    ("state", "reason", "again", "said"),
    [
        ("PENDING", "None", False, "just submitted"),
        ("PENDING", "None", True, "just queued again"),
        ("REQUEUED", "None", True, "just queued again"),
        ("PENDING", "Resources", True, "Resources"),
        ("PENDING", "JobHeldUser", False, "JobHeldUser: held until `scontrol release 17_0`"),
        ("PENDING", "JobHeldAdmin", False, "JobHeldAdmin: only the cluster's operators can release it"),
        ("PENDING", "launch failed requeued held", True, "requeued held: held until `scontrol release 17_0`"),
        ("REQUEUE_HOLD", "job requeued in held state", True, "state: held until `scontrol release 17_0`"),
    ],
)
def test_a_job_that_waits_says_what_for(state: str, reason: str, again: bool, said: str, tmp_path: Path) -> None:
    mine = submission(job="17")
    RunFolder(tmp_path / "a").claim(job=f"{mine.token if again else 'another'}.17.0")
    tracker = Tracker({"a": [(mine, 0)]}, {"17_0": QueuedJob("17_0", state, reason, "", mine.name)})
    status = tracker.status(RunFolder(tmp_path / "a"), KILLED)
    assert (status.label, status.reason.endswith(said)) == ("queued", True), status.reason


def test_all_sweeps_are_asked_about_at_once(tmp_path: Path, fake: FakeSlurm) -> None:
    now = time.time()
    queued, over, cut_off = (
        submission(created_at=now, job="1"),
        submission(created_at=now, job="2"),
        submission(created_at=now),
    )
    sweeps = {tmp_path / mine.token: [mine] for mine in (queued, over, cut_off)}
    record.write(tmp_path / cut_off.token, cut_off)
    fake.answers["squeue"] = f"1|0|1|PENDING|Resources|N/A|{queued.name}\n"
    fake.answers["sacct"] = f"2_0|TIMEOUT|{over.name}\n2_1|RUNNING|{over.name}\n3_0|FAILED|{cut_off.name}\n"
    looks = {sweep: [(RunFolder(sweep / name), MISSING) for name in "ab"] for sweep in sweeps}
    trackers = track(sweeps, looks)
    assert fake.asked == ["squeue", "sacct"]
    found = {
        mine.token: [tracker.status(folder, state) for folder, state in looks[sweep]]
        for (sweep, tracker), mine in zip(trackers.items(), (queued, over, cut_off), strict=True)
    }
    assert [status.label for status in found[queued.token]] == ["queued", "missing"]
    assert [status.ended for status in found[over.token]] == ["TIMEOUT", ""], "RUNNING, and not in the queue: it lags"
    assert [(status.job, status.ended) for status in found[cut_off.token]] == [("3_0", "FAILED"), ("3_1", "")]
    assert record.submissions(tmp_path / cut_off.token)[0].job == "3", "adopted"


def test_a_submission_that_is_withdrawn_while_others_are_read_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another shell's `submit` does where sbatch refuses."""
    stays, goes = submission(), submission()
    for each in (stays, goes):
        record.write(tmp_path, each)
    read = record.read

    def racing(path: Path) -> Submission:
        if goes.token in path.parts:
            record.withdraw(tmp_path, goes)
        return read(path)

    monkeypatch.setattr(record, "read", racing)
    assert record.submissions(tmp_path) == [stays]
    damaged = record.folder_of(tmp_path, stays.token) / "submission.json"
    damaged.write_text("{")
    with pytest.raises(ConfigError, match="is no submission"):
        record.submissions(tmp_path)


def test_a_plan_knows_the_job_of_a_cut_off_submission_and_writes_nothing(tmp_path: Path, fake: FakeSlurm) -> None:
    mine = submission()
    record.write(tmp_path, mine)
    before = snapshot(tmp_path)
    fake.answers["squeue"] = f"3|0|3|PENDING|Resources|N/A|{mine.name}\n"
    tracker = track({tmp_path: [mine]}, writes=False)[tmp_path]
    assert tracker.status(RunFolder(tmp_path / "a"), MISSING).job == "3_0"
    assert snapshot(tmp_path) == before


def snapshot(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Every file: when it was written, and what is in it."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_accounting_is_asked_only_where_folders_and_queue_leave_something_open(tmp_path: Path, fake: FakeSlurm) -> None:
    mine = submission(job="1")
    fake.answers["squeue"] = f"1|0|1|RUNNING|n1|N/A|{mine.name}\n"
    looks = {tmp_path: [(RunFolder(tmp_path / "a"), MISSING), (RunFolder(tmp_path / "b"), DONE)]}
    track({tmp_path: [mine]}, looks)
    assert fake.asked == ["squeue"]
    track({tmp_path: []}, looks)
    assert fake.asked == ["squeue"], "nothing went to Slurm"
    done = track({tmp_path: [mine]}, {tmp_path: [(RunFolder(tmp_path / "a"), DONE)]})[tmp_path]
    assert fake.asked == ["squeue"], "nothing is open"
    assert done.status(RunFolder(tmp_path / "a"), DONE).label == "ok"


@pytest.mark.parametrize(
    ("age_s", "locked", "label", "kept"),
    [(0, True, "unknown", True), (61, False, "missing", True), (61, True, "missing", False)],
)
def test_what_slurm_never_got_is_forgotten_after_a_while_by_who_holds_the_lock(
    tmp_path: Path, fake: FakeSlurm, age_s: float, locked: bool, label: str, kept: bool
) -> None:
    mine = submission(created_at=time.time() + 3600)  # on another login node, whose clock is ahead
    written = record.write(tmp_path, mine)
    os.utime(written, (written.stat().st_mtime - age_s,) * 2)
    tracker = track({tmp_path: [mine]}, locked=locked)[tmp_path]
    assert fake.asked == ["squeue", "sacct"]
    assert tracker.status(RunFolder(tmp_path / "a"), MISSING).label == label
    assert bool(record.submissions(tmp_path)) == kept


@pytest.mark.parametrize(("patient", "tries"), [(False, 1), (True, 5)])
def test_only_who_would_lose_something_asks_again(monkeypatch: pytest.MonkeyPatch, patient: bool, tries: int) -> None:
    calls = []

    def down(command: list[str], **_: object) -> str:
        calls.append(command)
        raise scheduler.SchedulerError("Unable to contact slurm controller")

    monkeypatch.setattr(scheduler, "_run", down)
    monkeypatch.setattr(scheduler, "PAUSES_S", (0.0,) * 4)
    with pytest.raises(scheduler.SchedulerError, match="Unable to contact"):
        scheduler.queue(patient=patient)
    assert len(calls) == tries


def test_a_machine_without_slurm_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(scheduler.time, "sleep", lambda _: pytest.fail("there is nothing to wait for"))
    with pytest.raises(scheduler.SchedulerError, match="there is no squeue here: run this on the cluster's login node"):
        scheduler.queue(patient=True)


def test_who_only_looks_adopts_in_mind_where_nothing_can_be_written(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = submission()
    fake.answers["squeue"] = f"3|0|3|PENDING|Resources|N/A|{mine.name}\n"

    def full(*_: object) -> None:
        raise StorageError("can't write: no space is left")

    monkeypatch.setattr(record, "write", full)
    tracker = track({tmp_path: [mine]})[tmp_path]
    assert tracker.status(RunFolder(tmp_path / "a"), MISSING).job == "3_0"
    with pytest.raises(StorageError):
        track({tmp_path: [mine]}, locked=True)


def test_tasks_that_were_cancelled_before_they_began_have_their_word(tmp_path: Path, fake: FakeSlurm) -> None:
    """What sacct of Slurm 22.05 shows of an array of eight, two at a time, whose last tasks were cancelled."""
    mine = submission(job="30", tasks=[[name] for name in "abcdefgh"], created_at=time.time())
    fake.answers["sacct"] = (
        f"30_[3,6-7%8]|CANCELLED by 0|{mine.name}\n30_0|COMPLETED|{mine.name}\n30_1|FAILED|{mine.name}\n"
    )
    looks = [(RunFolder(tmp_path / name), MISSING) for name in "abcdefgh"]
    tracker = track({tmp_path: [mine]}, {tmp_path: looks})[tmp_path]
    ended = [tracker.status(folder, state).ended for folder, state in looks]
    assert ended == ["COMPLETED", "FAILED", "", "CANCELLED", "", "", "CANCELLED", "CANCELLED"]
    assert "ended before the run began: CANCELLED" in tracker.status(*looks[6]).reason


def test_a_list_of_tasks_that_slurm_has_cut_off_gives_those_that_are_whole() -> None:
    assert tasks_of("30_[0-6:3,9,11-1...]") == ["30_0", "30_3", "30_6", "30_9"]
    assert tasks_of("30_6") == ["30_6"]
    assert tasks_of("30") == ["30"]


# --- attempts that only their locks show alive


def locked(sweep: Path, mine: Submission, *, beat_s: float, machine: str = "a node that has died") -> Attempt:
    """The attempt of a run whose lock is seen from here, which has not been heard of for so long."""
    record.write(sweep, mine)
    attempt = RunFolder(sweep / "a").claim(job=f"{mine.token}.17.0")
    assert attempt is not None
    supervisor = msgspec.structs.replace(attempt.supervisor(), machine=machine)
    (attempt.path / "supervisor.json").write_bytes(msgspec.json.encode(supervisor))
    os.utime(attempt.heartbeat, (time.time() - beat_s,) * 2)
    return attempt


@fault(
    "lifecycle",
    "A node dies, and the file server keeps its lock",
    injection="a lock that is seen, of another machine, on a heartbeat of an hour ago; squeue has no such job",
    outcome="the run is killed, also for who does not ask Slurm, and submit starts it again",
)
def test_a_lock_that_outlived_its_job_does_not_keep_its_run(
    tmp_path: Path, fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = submission(job="17", created_at=1.0)
    attempt = locked(tmp_path, mine, beat_s=3600.0)
    fake.answers["sacct"] = f"17_0|NODE_FAIL|{mine.name}\n"
    folder = RunFolder(tmp_path / "a")
    look = {tmp_path: [(folder, folder.state())]}
    assert look[tmp_path][0][1].label == "running"
    planned = track({tmp_path: [mine]}, look, writes=False)[tmp_path].status(*look[tmp_path][0])
    assert (planned.label, planned.ended, planned.starts(frozenset())) == ("killed", "NODE_FAIL", True)
    assert folder.state().label == "running", "who plans writes nothing"
    seen = launcher.sweep_status(look).runs[folder]
    assert (seen.label, seen.live) == ("killed", False)
    assert (folder.state().label, attempt.outcome() is not None) == ("killed", True)
    (folder.path / "config.yaml").touch()
    assert cli.main(["forget", str(folder.path)]) == 0
    assert str(tmp_path / ".forgotten") in capsys.readouterr().out


@pytest.mark.parametrize("why", ["fresh", "queued", "here", "not Slurm's", "no answer"])
def test_a_lock_is_believed_otherwise(why: str, tmp_path: Path, fake: FakeSlurm) -> None:
    mine, beat_s = submission(job="17", created_at=1.0), 60.0 if why == "fresh" else 3600.0
    machine = liveness.boot() if why == "here" else "another"
    attempt = locked(tmp_path, mine, beat_s=beat_s, machine=machine)
    if why == "queued":
        fake.answers["squeue"] = f"17|0|17|RUNNING|n1|N/A|{mine.name}\n"
    known = [submission(job="18")] if why == "not Slurm's" else [mine]
    folder = RunFolder(tmp_path / "a")
    look = {tmp_path: [(folder, folder.state())]}
    tracker = Tracker.unanswered(known) if why == "no answer" else track({tmp_path: known}, look)[tmp_path]
    assert tracker.status(*look[tmp_path][0]).label == "running"
    assert attempt.outcome() is None


# --- killed runs whose job would end the same way again


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


_ONE_HOUR = ("launcher.time_limit_min=60",)


def asked_again(folder: RunFolder, *overrides: str) -> JobStatus:
    """What submitting the run with these overrides knows of it; as before, it asks for an hour."""
    sweep = folder.path.parent
    tracker = track({sweep: record.submissions(sweep)}, {sweep: [(folder, folder.state())]})[sweep]
    return tracker.status(folder, run=run_of(*_ONE_HOUR, *overrides))


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


@pytest.mark.parametrize(
    ("ran_s", "left_s", "starts"), [(60 * 60 - 90, None, False), (600, None, True), (600, 700, False)]
)
def test_a_run_that_stopped_at_its_time_limit_with_nothing_saved_waits_for_more_time(
    ran_s: float, left_s: float | None, starts: bool, tmp_path: Path
) -> None:
    """One that somebody else stopped earlier does not. `left_s`: what its job's set-up left of the time, if known."""
    mine = submission(job="30", tasks=[["a"], ["b"]])
    record.write(tmp_path, mine)
    folder = RunFolder(tmp_path / "a")
    attempt = folder.claim(job=f"{mine.token}.31.0")
    assert attempt is not None
    attempt.describe(processes=1, device_type="cpu", oversubscribed=False)
    info = attempt.info()
    assert info is not None
    if left_s is not None:
        described = msgspec.structs.replace(info, job_ends_at=info.launched_at + left_s)
        (attempt.path / "attempt.json").write_bytes(msgspec.json.encode(described))
    attempt.finish("timeout", "stopped when it was warned")
    outcome = attempt.outcome()
    assert outcome is not None
    fill(
        attempt.path / "outcome.json",
        msgspec.json.encode(msgspec.structs.replace(outcome, finished_at=info.launched_at + ran_s)),
    )
    status = Tracker(by_run([mine])).status(folder, run=run_of(*_ONE_HOUR))
    assert status.starts(frozenset()) is starts
    needs = "" if starts else " (nothing was saved within launcher.time_limit_min=60: raise it)"
    assert status.reason == f"stopped when it was warned{needs}"
    for more in ("launcher.time_limit_min=90", "launcher.time_limit_min=auto"):
        assert Tracker(by_run([mine])).status(folder, run=run_of(more)).starts(frozenset())
    all_there_is = run_of("launcher.time_limit_min=auto", "site.max_time_min=60")
    assert Tracker(by_run([mine])).status(folder, run=all_there_is).starts(frozenset()) is starts
    by_rule = msgspec.structs.replace(mine, auto=True)
    assert "nothing was saved" not in Tracker(by_run([by_rule])).status(folder).reason, "the next one gets more"


def test_a_time_limit_after_nothing_could_be_saved_is_no_lack_of_time(tmp_path: Path, fake: FakeSlurm) -> None:
    """It is the disk that must change, and that may have happened."""
    folder, _ = killed(tmp_path, fake, "TIMEOUT")
    journal = Journal(folder.attempts()[-1].path / "journal-rank0.jsonl")
    journal.event("unsaved", epoch=1, reason="can't write x: the disk is full")
    assert asked_again(folder).starts(frozenset())
    assert "raise it" not in asked_again(folder).reason
    journal.event("checkpoint", epoch=2, save_s=1.0)
    journal.close()
    assert not asked_again(folder).starts(frozenset())


def test_a_time_limit_after_a_saved_epoch_is_no_obstacle(tmp_path: Path, fake: FakeSlurm) -> None:
    folder, _ = killed(tmp_path, fake, "TIMEOUT")
    saved = folder.path / "checkpoints" / "attempt-1-epoch-3"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    assert asked_again(folder).starts(frozenset())


@pytest.mark.parametrize(
    ("job", "step", "ended"),
    [
        ("FAILED", "OUT_OF_MEMORY", "OUT_OF_MEMORY"),
        ("FAILED", "FAILED", "FAILED"),
        ("TIMEOUT", "OUT_OF_MEMORY", "TIMEOUT"),
    ],
)
def test_a_step_that_was_out_of_memory_tells_why_its_job_failed(
    job: str, step: str, ended: str, tmp_path: Path, fake: FakeSlurm
) -> None:
    """What sacct shows where a cgroup holds jobs to their memory; of another start and another job before."""
    folder, mine = killed(tmp_path, fake, "FAILED")
    fake.answers["sacct"] = (
        f"29|FAILED|x\n29.0|OUT_OF_MEMORY|python3\n30_0|REQUEUED|{mine.name}\n30_0.0|OUT_OF_MEMORY|python3\n"
        f"30_0|{job}|{mine.name}\n30_0.batch|FAILED|batch\n30_0.extern|COMPLETED|extern\n30_0.0|{step}|python3\n"
        f"30_1|FAILED|{mine.name}\n30_1.0|FAILED|python3\n"
    )
    status = asked_again(folder)
    assert status.ended == ended
    assert status.starts(frozenset()) == (ended == "FAILED")
    assert ("raise launcher.memory_gib_per_device above" in status.reason) == (ended == "OUT_OF_MEMORY")


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
