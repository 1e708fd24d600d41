"""A throwaway cluster leaves nothing on the machine, however its test ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.slurm import layout
from tests.slurm.cluster import Cluster
from tests.slurm.daemons import is_alive, until
from tests.slurm.jobs import submit


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
