"""Slurm without Slurm: shapes, limits, records, and how states are laid over each other."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launch.launcher import Prepared
from launch.slurm import cluster, launcher, record, scheduler
from launch.slurm.cluster import Cluster, Partition, gpus_in
from launch.slurm.launcher import OnSlurm
from launch.slurm.limits import check_budget
from launch.slurm.sbatch import Hours, job_groups, job_of_runs, shape_of
from launch.slurm.scheduler import minutes as minutes_of
from launch.sweep import PlannedRun, one_run
from launch.sweep.compose import Extension
from launch.verbs import doctor
from launch.verbs.doctor import file_system
from parallelbench.errors import ConfigError
from parallelbench.results.folder import RunFolder
from tests.launch.fake_slurm import MISSING, SINFO, FakeSlurm, group, prepared, programs, run_of, submission


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59))
def test_slurms_durations_are_read(days: int, hours: int, minutes: int) -> None:
    expected = (days * 24 + hours) * 60 + minutes
    assert minutes_of(f"{days}-{hours:02}:{minutes:02}:00") == expected
    assert minutes_of(f"{hours}:{minutes:02}:00") == hours * 60 + minutes
    assert minutes_of(f"{days}-{hours:02}:{minutes:02}:30") == expected + 1
    assert minutes_of(f"{minutes}:00") == minutes_of(f"{minutes}") == minutes
    assert minutes_of("infinite") is None


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
    assert job_of_runs(submission(site=run.site), shape, Path("a/b/c")).flags["gpus-per-node"] == "a100:2"
    without = shape_of(run_of("site.gpus_per_node=0"), "cpu")
    assert "gpus-per-node" not in job_of_runs(submission(site=run.site), without, Path("a/b/c")).flags


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


NO_NODES = "allocation failure: Requested node configuration is not available"


def saying(text: str) -> Callable[..., float | None]:
    """An sbatch --test-only that refuses."""

    def estimated_start(script: str) -> float | None:
        raise scheduler.refusal(text)

    return estimated_start


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ([{"out": 1}], "jobs wait"),
        ([{}], "sbatch may refuse it"),  # for a constraint, or after the controller's restart
        ([{"nodes": 1, "out": 1}], ""),
        ([{"cpus_per_node": 3, "out": 1}], ""),
        ([{"memory_mib": 10_000, "out": 1}], ""),
        ([{"gres": "gpu:a100:3", "out": 1}], ""),
        ([{"gres": "gpu:v100:4", "out": 1}], ""),
        ([{"name": "other", "default": False, "out": 1}], ""),
        ([{"cpus_per_node": 3, "out": 1}, {"out": 1}], "jobs wait"),  # one kind of node that suits is enough
        ([{"nodes": 1, "out": 1}, {"nodes": 1}], "jobs wait"),  # a job may have nodes of several kinds
    ],
)
def test_a_job_that_no_node_can_take_now_waits_only_for_nodes_that_are_out(
    changes: list[dict[str, Any]], note: str, tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm says the same of both; sbatch takes the one that waits."""
    batch = group(tmp_path, "strategy=ddp", "devices=8", "nodes=2")
    monkeypatch.setattr(scheduler, "estimated_start", saying(NO_NODES))
    answer = Cluster([kind(**each) for each in changes]).answer(batch.job)
    assert (bool(answer.refusals), len(answer.notes)) == (not note, bool(note)), answer
    assert note in "".join(answer.notes)
    assert not answer.start


def test_a_refusal_is_slurms_beside_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = group(tmp_path)
    monkeypatch.setattr(scheduler, "estimated_start", saying("allocation failure: Invalid qos specification"))
    (text,) = Cluster([kind()]).answer(batch.job).refusals
    assert text.startswith("sbatch: allocation failure: Invalid qos specification: check site.qos")
    monkeypatch.setattr(scheduler, "estimated_start", saying(NO_NODES))
    (text,) = Cluster([kind(gres="")]).answer(batch.job).refusals
    assert text.endswith(f"({batch.shape}, but normal has 2 nodes with 8 cores, 11 GiB, no GPUs)")


@pytest.mark.parametrize(
    ("wait_s", "words"),
    [
        (0.0, "would start at once"),
        (-3.0, "would start at once"),
        (125.0, "would start in about 2 min"),
        (7810.0, "would start in about 2 h 10 min"),
    ],
)
def test_slurms_estimated_start_is_told(
    wait_s: float, words: str, tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = group(tmp_path)
    now = float(int(time.time()))
    monkeypatch.setattr("launch.slurm.cluster.time.time", lambda: now)
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now + wait_s))
    fake.answers["sbatch"] = f"sbatch: Job 7 to start at {at} using 1 processors on nodes n1 in partition normal\n"
    answer = Cluster([kind()]).answer(batch.job)
    assert (answer.start, answer.refusals, answer.notes) == (words, [], [])
    fake.answers["sbatch"] = "a Slurm of another version says something else\n"
    assert Cluster([kind()]).answer(batch.job).start == ""


def test_runs_of_one_shape_make_up_one_array(tmp_path: Path) -> None:
    groups = job_groups(prepared(tmp_path, "model=mlp,logistic_regression", "devices=1,2", "strategy=ddp"))
    assert [len(group.tasks()) for group in groups] == [2, 2]
    assert "#SBATCH --array=0-1%2" in groups[0].job.script(2)
    assert "--array" not in groups[0].job.script()
    three_starts = Hours(gpu=3 * (2 * 1 + 2 * 2))
    assert sum((group.most_hours for group in groups), Hours()) == three_starts, "of an hour each"
    assert not list(tmp_path.iterdir()), "planning writes nothing"


def test_only_like_runs_share_a_job(tmp_path: Path) -> None:
    unlike = ("epochs=1", "repeat=1", "launcher.time_limit_min=5", "site.partition=b", "launcher.oversubscribe=true")
    items = [item for more in unlike for item in prepared(tmp_path, more)]
    assert [len(group.runs) for group in job_groups(items)] == [2, 1, 1, 1]


def test_a_cpu_run_leaves_a_sites_gpus_to_others() -> None:
    run = one_run(["launcher=slurm", "site=asu_sol", "device=cpu"]).run
    assert shape_of(run, "cpu").gpus_per_node == 0
    assert shape_of(run, "cuda").gpus_per_node == 1
    for device_type in ("cpu", "cuda"):
        on = msgspec.structs.replace(run, device=device_type)
        (batch,) = job_groups([Prepared(PlannedRun(on, []), RunFolder(Path("a")))])
        hours = run.devices * 3 * 1.0
        assert batch.most_hours == (Hours(gpu=hours) if device_type == "cuda" else Hours(cpu=hours))
        assert submission(site=run.site, device_type=device_type).has_gpus == (device_type == "cuda")


def test_a_cpu_run_with_nodes_to_itself_takes_all_their_gpus_from_others() -> None:
    """Four of each node on Sol: three starts of an hour, on one node and on two."""
    site = ["launcher=slurm", "site=asu_sol", "site.exclusive=true", "device=cpu"]
    for nodes in (1, 2):
        run = one_run([*site, "strategy=ddp", f"nodes={nodes}", f"devices={2 * nodes}"]).run
        (batch,) = job_groups([Prepared(PlannedRun(run, []), RunFolder(Path("a")))])
        assert batch.most_hours == Hours(gpu=3 * 4 * nodes)
        assert f"{4 * nodes} GPUs" in batch.most_in_words()
        assert batch.submission([], "TOKEN").devices == 4 * nodes
        with pytest.raises(ConfigError, match="12.0 GPU-hours" if nodes == 1 else "24.0 GPU-hours"):
            check_budget([batch], 11)


@pytest.mark.parametrize(
    ("told", "most"),
    [
        ("MaxArraySize = 1001\n", 1001),
        ("MaxArraySize = 1001\nSchedulerParameters = bf_window=60,max_array_tasks=100,defer\n", 100),
        ("MaxArraySize = 50\nSchedulerParameters = max_array_tasks=100\n", 50),
    ],
)
def test_arrays_have_as_many_tasks_as_the_cluster_allows(fake: FakeSlurm, told: str, most: int) -> None:
    fake.answers["scontrol"] = told
    assert scheduler.max_array_size(scheduler.configuration()) == most


def test_what_waits_in_the_queue_is_not_to_start(tmp_path: Path, fake: FakeSlurm) -> None:
    items = prepared(tmp_path, "sweep.repeats=2")
    tasks = [[item.folder.path.name] for item in items]
    queued = submission(tasks=tasks, job="1", created_at=time.time())
    record.write(items[0].planned.run.sweep_folder, queued)
    fake.answers["squeue"] = f"1|0|1|PENDING|Resources|N/A|{queued.name}\n"
    fake.answers["sinfo"] = SINFO
    assert OnSlurm().show_plan(items, [MISSING, MISSING], Console(file=io.StringIO()))[1] == [False, True]
    assert fake.asked.count("squeue") == 1


def test_a_jobs_environment_does_not_leak_into_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CPU_BIND", "SLURM_JOB_ID", "SBATCH_PARTITION", "SUBMITIT_EXECUTOR"):
        monkeypatch.setenv(name, "leaked")
    monkeypatch.setenv("SLURM_CONF", "kept")
    with scheduler.clean_environment():
        assert "leaked" not in os.environ.values()
        assert os.environ["SLURM_CONF"] == "kept"
    assert os.environ["SLURM_JOB_ID"] == "leaked"


def waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scontrol: str) -> tuple[int, str]:
    """The exit code of a job that a command waits for, and what it showed, where `scontrol` is this script."""
    output, told = tmp_path / "7_0_log.out", tmp_path / "told"
    output.write_text("half a line")
    programs(tmp_path, monkeypatch, sbatch="echo '7;cluster'", scontrol=scontrol, scancel=f'echo "$@" >> {told}')
    monkeypatch.setattr(scheduler, "_LOOK_S", 0.01)
    shown: list[str] = []
    code = scheduler.run_to_its_end("", job="parallelbench-x-1", folder=tmp_path, show=shown.append)
    return code, "".join(shown)


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        *(("COMPLETED ExitCode=0:0", 0), ("FAILED ExitCode=3:0", 3)),
        *(("NODE_FAIL ExitCode=0:0", 1), ("FAILED ExitCode=0:9", 1)),
    ],
)
def test_a_job_that_is_waited_for_ends_with_its_exit_code(
    ended: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = f"[ -e {tmp_path}/seen ] && echo JobState={ended} || echo JobState=RUNNING"
    more = f"[ -e {tmp_path}/seen ] || echo ' more' >> {tmp_path}/7_0_log.out"
    assert waited_for(tmp_path, monkeypatch, f"{seen}; {more}; touch {tmp_path}/seen") == (code, "half a line more\n")


def test_a_job_that_slurm_has_forgotten_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    assert waited_for(tmp_path, monkeypatch, gone)[0] == 1


def test_a_controller_that_is_away_for_a_while_costs_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = tmp_path / "tried"
    busy = f"if [ -e {tried} ]; then echo JobState=COMPLETED ExitCode=0:0; else touch {tried}; exit 1; fi"
    assert waited_for(tmp_path, monkeypatch, busy)[0] == 0
    assert not (tmp_path / "told").exists(), "nothing is cancelled"


def test_a_job_that_is_waited_for_is_cancelled_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            waited_for(tmp_path, monkeypatch, "kill -INT $PPID; exec sleep 20")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "told").read_text() == "--name=parallelbench-x-1\n"


def test_the_file_system_of_a_folder_is_that_of_its_nearest_mount(small_disk: Path) -> None:
    assert file_system(small_disk / "not" / "there") == "tmpfs"
    assert file_system(Path("/proc/self")) == "proc"


def test_doctor_holds_a_site_against_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site of one's own: a job of one device, and one of all devices that the site says a node has."""
    (tmp_path / "site").mkdir()
    mine = "defaults: [default, _self_]\nname: mine\ndata_dir: /data/of/mine\ngpus_per_node: 8\ndevices_per_node: 8\n"
    (tmp_path / "site" / "mine.yaml").write_text(mine)
    monkeypatch.setattr(scheduler, "available", lambda: True)
    monkeypatch.setattr(cluster, "partitions", lambda **_: [kind(cpus_per_node=64, memory_mib=500_000)])
    monkeypatch.setattr(cluster, "reservations", lambda **_: [])
    starts = iter([None, scheduler.refusal(NO_NODES), None, scheduler.refusal(NO_NODES)])

    def estimated_start(script: str) -> float | None:
        if (found := next(starts)) is not None:
            raise found
        return None

    monkeypatch.setattr(scheduler, "estimated_start", estimated_start)
    monkeypatch.setattr(scheduler, "configuration", lambda **_: {"MaxArraySize": "1000"})
    found = dict(launcher.site_findings(["site=mine", f"results={tmp_path}"], Extension(tmp_path)))
    assert found["site=mine, 1 device"].endswith("1 GPU: the cluster takes it")
    assert "8 GPUs, but normal has 2 nodes with 64 cores, 488 GiB, gpu:a100:4" in found["site=mine, 8 devices"]
    monkeypatch.setattr(launcher, "findings", list)
    rows = dict(doctor.findings(["site=mine", f"results={tmp_path}"], Extension(tmp_path)))
    assert rows["folder of site.data_dir"].startswith("/data/of/mine on ")
    assert "missing in /data/of/mine" in rows["data=mnist"]
    assert rows["site=mine, 8 devices"] == found["site=mine, 8 devices"]
    with pytest.raises(ConfigError, match="site=nobodys is no choice"):
        dict(doctor.findings(["site=nobodys"], Extension(tmp_path)))
