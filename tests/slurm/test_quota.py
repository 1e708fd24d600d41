"""Results on a disk that gives each user so much room."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import fault
from tests.helpers import fill_disk
from tests.launch.programs import finished_epochs
from tests.slurm import packages
from tests.slurm.cluster import Cluster
from tests.slurm.runs import QUICK, WITHOUT_TORCH, Sweep, times_finished

QUOTA = "4M"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A folder with a quota: a subvolume of btrfs, whose quotas hold for root, too, which runs these tests."""
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(256 << 20)
    try:
        packages.require_quotas()
        _run("mkfs.btrfs", "--quiet", image)
        _run("mount", "-o", "loop", image, disk)
    except (packages.UnavailableError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no quotas here: {error} {getattr(error, 'stderr', '')}")
    try:
        _run("btrfs", "quota", "enable", disk)
        _run("btrfs", "subvolume", "create", disk / "home")
        _run("btrfs", "qgroup", "limit", QUOTA, disk / "home")
        yield disk / "home"
    finally:
        _run("umount", "--lazy", disk)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PATH": packages.search_path()})


@fault(
    "storage and input",
    "The quota is used up during training",
    injection="a btrfs subvolume with a quota of 4 MiB fills up after the first epochs; there, not even what was "
    "reserved can be overwritten",
    outcome="storage, or killed where that could not be written; epochs are kept; submit says that the quota is used "
    "up; with room again it finishes the run",
)
def test_a_used_up_quota(accounting: Cluster, home: Path) -> None:
    accounting.restore()
    paced = ("epochs=60", "strategy.step_s=0.05")
    sweep = Sweep(accounting, home / "results", (*WITHOUT_TORCH, *QUICK, *paced))
    sweep.submit()
    attempt = sweep.attempt()
    sweep.epochs(attempt, at_least=3)
    ballast = fill_disk(home, until=errno.EDQUOT)
    sweep.over()
    state = sweep.run.state()
    assert state.label in ("storage", "killed"), sweep.story()
    assert state.to_run
    assert finished_epochs(attempt)[:3] == [1, 2, 3]
    refused = sweep.submission()
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "the quota is used up: free some space" in refused.stderr
    ballast.unlink()
    sweep.submit()
    assert times_finished(sweep.done()) == 1
