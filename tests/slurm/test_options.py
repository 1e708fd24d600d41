"""What can be different about a cluster, and that nothing is left of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.slurm import layout
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import started
from tests.slurm.daemons import DaemonError, is_alive, until
from tests.slurm.jobs import show, submit, wait

WHOLE = ("--nodes=2", "--exclusive")


@pytest.fixture
def special(request: pytest.FixtureRequest) -> Any:
    """A cluster with the options that the test is parametrized with."""
    yield from started(**{"variant": "no_accounting", **request.param})


def options(**values: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("special", [values], indirect=True)


@options(variant="accounting", max_submit_jobs=3)
def test_submissions_are_limited(special: Cluster) -> None:
    submit(special, "sleep infinity", "--array=0-2")
    with pytest.raises(DaemonError, match="QOSMaxSubmitJobPerUserLimit"):
        submit(special, "sleep infinity")
    special.limit_submissions(None)
    submit(special, "sleep infinity")


@options(max_array_size=20)
def test_arrays_are_limited(special: Cluster) -> None:
    submit(special, "true", "--array=0-19")
    with pytest.raises(DaemonError, match="Invalid job array specification"):
        submit(special, "true", "--array=0-20")


@options(preempt_mode="CANCEL")
def test_preemption_cancels(special: Cluster) -> None:
    low = submit(special, "sleep infinity", "--partition=preemptible", *WHOLE)
    wait(special, low, JobState="RUNNING")
    assert show(special, low)["Requeue"] == "1", "it would be, if the mode were another"
    submit(special, "true", *WHOLE)
    assert wait(special, low, JobState="PREEMPTED")["Restarts"] == "0"


@options(job_requeue=False)
def test_no_job_is_requeued(special: Cluster) -> None:
    low = submit(special, "sleep infinity", "--partition=preemptible", *WHOLE)
    wait(special, low, JobState="RUNNING")
    assert show(special, low)["Requeue"] == "0"
    submit(special, "true", *WHOLE)
    wait(special, low, JobState="PREEMPTED")


@pytest.mark.parametrize(
    ("special", "heard"),
    [({"grace_time_s": 10, "preempt_send_user_signal": True}, "USR1"), ({}, "TERM")],
    indirect=["special"],
)
def test_the_signal_before_preemption(special: Cluster, heard: str, tmp_path: Path) -> None:
    script = "trap 'echo USR1; exit' USR1; trap 'echo TERM; exit' TERM; echo ready; while true; do sleep 0.1; done"
    said = tmp_path / "said"
    signals = ("--signal=B:USR1@60", f"--output={said}", "--open-mode=append")
    submit(special, script, "--partition=preemptible", *signals, *WHOLE)
    until(lambda: said.exists() and said.read_text() == "ready\n", what="the traps", timeout_s=30)
    submit(special, "sleep infinity", *WHOLE)
    until(lambda: heard in said.read_text(), what=f"hearing of {heard}", timeout_s=30)
    assert {"USR1", "TERM"} & set(said.read_text().split()) == {heard}


def test_accounting_is_needed_to_limit_submissions() -> None:
    with pytest.raises(ValueError, match="accounting"):
        Cluster("no_accounting", max_submit_jobs=3)


def test_nothing_is_left(tmp_path: Path) -> None:
    ours = Cluster("no_accounting")
    beat = tmp_path / "beat"
    try:
        ours.__enter__()
        submit(ours, f"setsid bash -c 'echo $$ > {beat}; sleep 60' & sleep 60")
        until(lambda: beat.exists() and beat.read_text() != "", what="a process that leaves its session", timeout_s=30)
    finally:
        ours.down()
    pid = int(beat.read_text())
    assert not (psutil.pid_exists(pid) and is_alive(psutil.Process(pid)))
    assert not ours.folder.exists()
    assert not [each for each in psutil.process_iter(["cwd"]) if str(ours.folder) in (each.info["cwd"] or "")]


def test_what_a_killed_test_leaves_is_ended_by_the_next() -> None:
    program = (
        "import os, signal\n"
        "from tests.slurm.cluster import Cluster\n"
        "cluster = Cluster('no_accounting')\n"
        "cluster.__enter__()\n"
        "print(cluster.folder, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path.cwd())
    folder = Path(done.stdout.strip())
    assert set(layout.living(folder)) == {"munged", "slurmctld", "n1", "n2"}, done.stderr
    layout.end_orphans()
    assert not layout.living(folder)
    assert not folder.exists()
