"""Slurm without Slurm: shapes, limits, records, and how states are laid over each other."""

from __future__ import annotations

import contextlib
import io
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launch.doctor import file_system
from launch.local import Prepared
from launch.slurm import record, scheduler
from launch.slurm.hours import Hours
from launch.slurm.job import Job
from launch.slurm.queue import RunStatus, Tracker, track
from launch.slurm.record import Submission
from launch.slurm.scheduler import Partition, QueuedJob
from launch.slurm.shape import batch_parameters, shape_of, slurm
from launch.slurm.site import gpus_in, refusals, warnings
from launch.slurm.submit import batch_script, batches, not_wanted, prepare_for_site
from launch.slurm.verbs import cancel, show_plan
from launch.sweep import PlannedRun, expand, one_run
from parallelbench.attempt import OUTCOMES, Outcome, OutcomeName
from parallelbench.config import RunConfig
from parallelbench.errors import ConfigError, StorageError
from parallelbench.folder import RunFolder, State

ON_SITE = ["launcher=slurm", "site=local_cluster"]


def run_of(*overrides: str) -> RunConfig:
    return one_run([*ON_SITE, *overrides]).run


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59))
def test_slurms_durations_are_read(days: int, hours: int, minutes: int) -> None:
    expected = (days * 24 + hours) * 60 + minutes
    assert scheduler.minutes(f"{days}-{hours:02}:{minutes:02}:00") == expected
    assert scheduler.minutes(f"{hours}:{minutes:02}:00") == hours * 60 + minutes
    assert scheduler.minutes(f"{days}-{hours:02}:{minutes:02}:30") == expected + 1


@pytest.mark.parametrize(("text", "minutes"), [("infinite", None), ("30:00", 30), ("7-00:00:00", 10080), ("45", 45)])
def test_other_durations_are_read(text: str, minutes: int | None) -> None:
    assert scheduler.minutes(text) == minutes


@pytest.mark.parametrize(
    ("gres", "kind", "count"),
    [
        ("gpu:a100:4", "a100", 4),
        ("gpu:a100:4(S:0-1)", None, 4),
        ("gpu:a100:2,gpu:v100:3", "v100", 3),
        ("gpu:a100:2,gpu:v100:3", None, 5),
        ("gpu:8", None, 8),
        ("gpu:8", "a100", 0),
        ("", None, 0),
        ("gpu:h100_80gb:4,lustre:1", "h100_80gb", 4),
    ],
)
def test_gpus_of_a_node_are_counted(gres: str, kind: str | None, count: int) -> None:
    assert gpus_in(gres, kind) == count


def test_a_job_asks_for_what_its_node_needs() -> None:
    shape = shape_of(run_of("devices=8", "nodes=2", "strategy=ddp", "cores_per_device=2"), "cpu")
    assert (shape.nodes, shape.devices_per_node, shape.gpus_per_node, shape.cpus_per_node) == (2, 4, 4, 8)
    assert shape.memory_mib_per_node == 4 * 2.5 * 1024
    run = run_of(
        "devices=2", "strategy=ddp", "device=cuda", "launcher.cpus_per_gpu=3", "launcher.memory_gib_per_device=7"
    )
    shape = shape_of(run, "cuda")
    assert (shape.cpus_per_node, shape.memory_mib_per_node) == (6, 14 * 1024)
    parameters = batch_parameters(shape, slurm(run), run.site, name="x")
    assert parameters["additional_parameters"]["gpus-per-node"] == "a100:2"
    assert (
        "gpus-per-node"
        not in batch_parameters(shape_of(run_of("site.gpus_per_node=0"), "cpu"), slurm(run), run.site, name="x")[
            "additional_parameters"
        ]
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["devices=8"], "8 a node, but site=local_cluster has site.devices_per_node=4: choose nodes=2"),
        (["devices=8", "nodes=2", "site.max_nodes=1"], "nodes=2, but site=local_cluster allows a job site.max_nodes=1"),
        (["site.max_time_min=30"], "time_limit_min=60, but site=local_cluster allows a job site.max_time_min=30"),
        (
            ["launcher.time_limit_min=3"],
            "signal_delay_s=120 with launcher.time_limit_min=3: Slurm's warning can come 60 s",
        ),
        (["device=cuda", "site.gpus_per_node=0"], "gpus_per_node=0: choose device=cpu"),
    ],
)
def test_more_than_the_site_has_is_refused(overrides: list[str], message: str) -> None:
    strategy = ["strategy=ddp"] if any("devices=8" in text for text in overrides) else []
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        prepare_for_site(one_run([*ON_SITE, *strategy, *overrides]))


def kind(**changes: Any) -> Partition:
    plain: dict[str, Any] = {
        "name": "normal",
        "default": True,
        "state": "up",
        "limit_min": None,
        "nodes": 2,
        "cpus_per_node": 8,
        "memory_mib": 11_000,
        "gres": "gpu:a100:4",
        "features": "",
    }
    return Partition(**plain | changes)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"state": "drain"}, "takes no jobs now (sinfo says drain)"),
        ({"state": "inact"}, "takes no jobs now"),
        ({"limit_min": 59}, "allows 59"),
        ({"nodes": 1}, "has 1 of a kind"),
        ({"cpus_per_node": 3}, "have 3"),
        ({"memory_mib": 10_000}, "lower launcher.memory_gib_per_device"),
        ({"gres": "gpu:a100:3"}, "have 3"),
        ({"gres": "gpu:v100:4"}, "have 0"),
        ({"name": "other", "default": False}, "is none of this cluster's"),
    ],
)
def test_what_the_cluster_refuses_is_said(changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    plan = [one_run([*ON_SITE, "strategy=ddp", "devices=8", "nodes=2", f"results={tmp_path}"])]
    (batch,) = batches([prepare_for_site(planned) for planned in plan])
    assert refusals(batch, [kind()]) == refusals(batch, [kind(state="down")]) == []
    assert warnings(batch, [kind(), kind(name="other", default=False, state="down")]) == []
    assert warnings(batch, [kind(state="down")]) == ["the partition normal is down: jobs wait until it is up"]
    (text,) = refusals(batch, [kind(**changes)])
    assert word in text
    assert refusals(batch, [kind(**changes), kind()]) == [], "one kind of node that suits is enough"


def test_runs_of_one_shape_make_up_one_array(tmp_path: Path) -> None:
    plan = expand([*ON_SITE, "model=mlp,logistic_regression", "devices=1,2", "strategy=ddp", f"results={tmp_path}"])
    groups = batches([prepare_for_site(planned) for planned in plan])
    assert [len(group.tasks()) for group in groups] == [2, 2]
    assert "#SBATCH --array=0-1%2" in batch_script(groups[0], 2)
    assert "--array" not in batch_script(groups[0], 1)
    three_starts = Hours(gpu=3 * (2 * 1 + 2 * 2))
    assert sum((group.most_hours for group in groups), Hours()) == three_starts, "of an hour each"
    assert not list(tmp_path.iterdir()), "planning writes nothing"


def submission(**changes: Any) -> Submission:
    run = run_of()
    plain: dict[str, Any] = {
        "token": record.new_token(),
        "created_at": 1.0,
        "job": None,
        "tasks": [["a"], ["b"]],
        "devices": 1,
        "device_type": "cpu",
        "launcher": slurm(run),
        "site": run.site,
        "plugin": [],
    }
    return Submission(**plain | changes)


def test_a_submission_survives_the_disk(tmp_path: Path) -> None:
    mine = submission(job="17")
    record.write(tmp_path, mine)
    assert record.submissions(tmp_path) == [mine]
    assert (mine.job_of(1), submission(job="17", tasks=[["a"]]).job_of(0), submission().job_of(0)) == (
        "17_1",
        "17",
        None,
    )


def test_what_others_may_have_written_is_not_executed(tmp_path: Path) -> None:
    path = record.write(tmp_path, submission())
    path.chmod(0o666)
    with pytest.raises(ConfigError, match=r"may be written by others.*chmod go-w"):
        record.read(path)
    path.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        with pytest.raises(ConfigError, match="belongs to another user"):
            record.read(path)


def test_one_process_at_a_time_submits(tmp_path: Path) -> None:
    with record.lock(tmp_path), pytest.raises(ConfigError, match=f"process {os.getpid()} on "), record.lock(tmp_path):
        pass
    with record.lock(tmp_path):
        pass
    assert not list((tmp_path / "submissions").iterdir())


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "submissions" / "lock"
    with record.lock(tmp_path):
        host, pid, started_at, _ = path.read_text().split()
    path.write_text(f"{host} {os.getpid()} {psutil.Process().create_time() - 100} x\n")
    with record.lock(tmp_path):
        assert path.read_text().split()[:3] == [host, pid, started_at]


def test_the_lock_of_another_host_is_believed_while_it_is_fresh(tmp_path: Path) -> None:
    path = tmp_path / "submissions" / "lock"
    with record.lock(tmp_path):
        pass
    path.write_text("elsewhere 1 1.0 x\n")
    with pytest.raises(ConfigError, match="process 1 on elsewhere"), record.lock(tmp_path):
        pass
    os.utime(path, (0, 0))
    with record.lock(tmp_path):
        path.write_text("taken over by somebody else meanwhile\n")
    assert path.exists(), "nobody removes another's lock"


def test_a_full_disk_is_a_message(small_disk: Path) -> None:
    sweep = small_disk / "sweep"
    sweep.mkdir(mode=0o755)
    (sweep / "submissions").mkdir(mode=0o700)
    _fill(small_disk / "full")
    with pytest.raises(StorageError, match="disk is full"), record.lock(sweep):
        pass


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def test_only_like_runs_share_a_job(tmp_path: Path) -> None:
    plan = [
        one_run([*ON_SITE, f"results={tmp_path}", *more])
        for more in (
            [],
            ["repeat=1"],
            ["launcher.time_limit_min=5"],
            ["site.partition=b"],
            ["launcher.oversubscribe=true"],
        )
    ]
    assert [len(group.runs) for group in batches([prepare_for_site(planned) for planned in plan])] == [2, 1, 1, 1]


def test_a_cpu_run_leaves_a_sites_gpus_to_others() -> None:
    run = one_run(["launcher=slurm", "site=asu_sol", "device=cpu"]).run
    assert shape_of(run, "cpu").gpus_per_node == 0
    assert shape_of(run, "cuda").gpus_per_node == 1
    for device_type in ("cpu", "cuda"):
        (batch,) = batches([Prepared(PlannedRun(run, []), RunFolder(Path("a")), device_type, False)])
        hours = run.devices * 3 * 1.0
        assert batch.most_hours == (Hours(gpu=hours) if device_type == "cuda" else Hours(cpu=hours))
        assert submission(site=run.site, device_type=device_type).asks_for_gpus == (device_type == "cuda")


def test_a_job_knows_its_own_attempts_although_ids_are_given_out_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    mine = Job("token", id="5", restarts=1, task=0, node=0)
    first = folder.claim(job=Job("token", id="5", restarts=0, task=0, node=0).start)
    second = folder.claim(job=Job("other", id="5", restarts=0, task=0, node=0).start)
    assert first is not None
    assert second is not None
    assert (mine.began(first), mine.began(second)) == (True, False)


MISSING, DONE = State("missing"), State("done", Outcome(outcome="ok", reason="trained", finished_at=2.0), 1)
FAILED = State("failed", Outcome(outcome="oom", reason="out of memory", finished_at=2.0), 1)
KILLED = State("failed", Outcome(outcome="killed", reason="vanished", finished_at=0.0), 1)
TIMEOUT = State("failed", Outcome(outcome="timeout", reason="too slow", finished_at=2.0), 1)


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
def test_the_folder_comes_before_the_queue(state: State, job_state: str | None, label: str, wanted: bool) -> None:
    mine = submission(job="17")
    jobs = {"17_0": QueuedJob("17_0", job_state, "Resources", "", mine.name)} if job_state else {}
    tracker = Tracker({"a": [(mine, 0)]}, jobs)
    status = tracker.status(RunFolder(Path("sweep/a")), state)
    assert (status.label, status.wanted(frozenset())) == (label, wanted)


def test_outcomes_are_tried_again_where_that_is_asked_for() -> None:
    assert RunStatus(FAILED).wanted(frozenset({"oom"}))
    assert not RunStatus(FAILED).wanted(frozenset({"nan"}))
    assert not RunStatus(DONE).wanted(frozenset({"ok"}))


def test_what_is_not_submitted_is_counted_and_how_to_try_failed_runs_again() -> None:
    queued = RunStatus(MISSING, "17", QueuedJob("17", "PENDING", "None", "", "x"))
    statuses = [RunStatus(DONE), RunStatus(FAILED), RunStatus(KILLED), RunStatus(MISSING), queued]
    text = "not submitted: 1 done, 1 oom, 1 queued (--retry oom tries again); 2 run(s) to submit"
    assert not_wanted(statuses, frozenset()) == text
    assert not_wanted(statuses, frozenset({"oom"})) == "not submitted: 1 done, 1 queued; 3 run(s) to submit"
    assert not_wanted([RunStatus(MISSING)], frozenset()) == ""


def test_a_submission_without_a_known_job_is_not_repeated() -> None:
    tracker = Tracker({"a": [(submission(), 0)]}, {})
    status = tracker.status(RunFolder(Path("sweep/a")), MISSING)
    assert (status.label, status.wanted(frozenset())) == ("unknown", False)


@pytest.mark.parametrize("outcome", ["oom", "killed", "timeout", "storage"])
@pytest.mark.parametrize(("created_at", "label"), [(3.0, "unknown"), (1.0, "")])
@pytest.mark.parametrize("job", [None, "17"])
def test_a_retry_of_which_slurm_says_nothing_is_not_repeated_unless_it_has_ended(
    outcome: OutcomeName, created_at: float, label: str, job: str | None
) -> None:
    failed = State("failed", Outcome(outcome=outcome, reason="so it was", finished_at=2.0), 1)
    again = submission(created_at=created_at, job=job)
    tracker = Tracker({"a": [(submission(job="5"), 0), (again, 0)]}, {}, answered=job is None)
    status = tracker.status(RunFolder(Path("sweep/a")), failed)
    assert status.label == (label or outcome)
    assert status.wanted(frozenset(OUTCOMES)) == (not label)
    assert ("before that: " + outcome in status.reason) == bool(label)


def test_the_job_of_an_earlier_submission_counts_while_it_is_in_the_queue() -> None:
    first, second = submission(job="5"), submission(job="6", tasks=[["a"]])
    waiting = QueuedJob("5_0", "PENDING", "Resources", "", first.name)
    tracker = Tracker({"a": [(first, 0), (second, 0)], "b": [(first, 1)]}, {"5_0": waiting})
    assert tracker.status(RunFolder(Path("sweep/a")), MISSING).queued == waiting
    assert tracker.in_queue() == [waiting], "so `cancel` ends it"
    assert [each.token for each in tracker.submissions] == [first.token, second.token]


@pytest.mark.parametrize(
    ("state", "job_state", "created_at", "label", "reason"),
    [
        (MISSING, "RUNNING", 1.0, "queued", "waits in its packed job"),
        (State("running"), "RUNNING", 1.0, "running", ""),
        (KILLED, "RUNNING", 1.0, "queued", "waits in its packed job"),
        (FAILED, "RUNNING", 3.0, "queued", "waits in its packed job"),
        (FAILED, "RUNNING", 1.0, "oom", "out of memory"),
        (TIMEOUT, "RUNNING", 1.0, "timeout", "too slow"),
        (MISSING, "PENDING", 1.0, "queued", "Resources"),
    ],
)
def test_runs_of_a_packed_job_run_one_by_one(
    state: State, job_state: str, created_at: float, label: str, reason: str
) -> None:
    packed = submission(created_at=created_at, job="17", tasks=[["a", "b"]])
    queue = {"17": QueuedJob("17", job_state, "Resources", "", packed.name)}
    status = Tracker({"a": [(packed, 0)]}, queue).status(RunFolder(Path("sweep/a")), state)
    assert (status.label, status.reason) == (label, reason)
    assert not status.wanted(frozenset()), "its job may still come to it"


def test_a_run_that_was_started_as_often_as_it_may_be_is_over_although_its_packed_job_runs(tmp_path: Path) -> None:
    packed = submission(job="17", tasks=[["a", "b"]])
    folder = RunFolder(tmp_path / "a")
    for restarts in range(packed.launcher.attempts):
        assert folder.claim(job=f"{packed.token}.17.{restarts}") is not None
    queue = {"17": QueuedJob("17", "RUNNING", "n1", "", packed.name)}
    status = Tracker({"a": [(packed, 0)]}, queue).status(folder, TIMEOUT)
    assert (status.label, status.live, status.wanted(frozenset())) == ("timeout", False, True)


def test_a_job_that_left_nothing_is_named() -> None:
    mine = submission(job="17")
    status = Tracker({"a": [(mine, 0)]}, {}).status(RunFolder(Path("sweep/a")), MISSING)
    assert status.reason == "its job 17_0 left no word; `parallelbench logs` shows what it printed"


def test_cancel_ends_all_jobs_and_says_how_runs_begin_again(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[str]] = []
    monkeypatch.setattr(scheduler, "tell", told.append)
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
    cancel([tmp_path], console)
    assert told == [["scancel", "5", "6"]]
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3 job(s) cancelled" in text
    assert "1 run(s) go on after the last saved epoch; 1 run(s) that had begun start over" in text
    assert "whether Slurm has got 1 more array(s) can't be said yet" in text


@dataclass
class FakeSlurm:
    """Prints what a test says, and remembers which programs were asked."""

    answers: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def ask(self, command: list[str], **_: object) -> str:
        self.asked.append(command[0])
        return self.answers.get(command[0], "")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr(scheduler, "ask", fake.ask)
    return fake


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
    mine = submission(created_at=time.time() - age_s)
    record.write(tmp_path, mine)
    tracker = track({tmp_path: [mine]}, locked=locked)[tmp_path]
    assert fake.asked == ["squeue", "sacct"]
    assert tracker.status(RunFolder(tmp_path / "a"), MISSING).label == label
    assert bool(record.submissions(tmp_path)) == kept


@pytest.mark.parametrize(("patient", "tries"), [(False, 1), (True, 5)])
def test_only_who_would_lose_something_asks_again(monkeypatch: pytest.MonkeyPatch, patient: bool, tries: int) -> None:
    calls = []

    def down(command: list[str], *_: object) -> str:
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


def test_the_plan_shows_the_arrays_that_are_submitted(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "available", lambda: True)
    fake.answers["sinfo"] = "normal|normal*|down|infinite|2|8|11000|gpu:a100:4|(null)\n"
    fake.answers["scontrol"] = "MaxArraySize            = 2\n"
    plan = expand([*ON_SITE, "sweep.repeats=5", f"results={tmp_path}"])
    console = Console(width=200, file=io.StringIO())
    prepared = [prepare_for_site(planned) for planned in plan]
    assert show_plan(prepared, [DONE, *[MISSING] * 4], console), "a partition that is down takes jobs"
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "not submitted: 1 done; 4 run(s) to submit" in text
    assert "4 job(s) in arrays of 2, 2 (the first is shown)" in text
    assert "#SBATCH --array=0-1%2" in text
    assert "note: the partition normal is down" in text
    assert "at most 12.00 GPU-hours in all" in text


def test_a_jobs_environment_does_not_leak_into_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CPU_BIND", "SLURM_JOB_ID", "SBATCH_PARTITION", "SUBMITIT_EXECUTOR"):
        monkeypatch.setenv(name, "leaked")
    monkeypatch.setenv("SLURM_CONF", "kept")
    with scheduler.clean_environment():
        assert "leaked" not in os.environ.values()
        assert os.environ["SLURM_CONF"] == "kept"
    assert os.environ["SLURM_JOB_ID"] == "leaked"


def test_the_file_system_of_a_folder_is_that_of_its_nearest_mount(small_disk: Path) -> None:
    assert file_system(small_disk / "not" / "there") == "tmpfs"
    assert file_system(Path("/proc/self")) == "proc"
