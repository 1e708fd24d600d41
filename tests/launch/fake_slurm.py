"""A run for a site, a submission of it, and a Slurm that prints what a test says."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.launcher import Prepared
from launch.slurm import record
from launch.slurm.record import Submission
from launch.slurm.sbatch import JobGroup, job_groups, slurm
from launch.slurm.submit import prepare_for_site
from launch.sweep import expand, one_run
from parallelbench.config.run import RunConfig
from parallelbench.results.attempt import Outcome
from parallelbench.results.folder import State

SINFO = "normal|normal*|up|infinite|2|8|11000|gpu:a100:4|(null)|0/2/0/2|idle\n"
"""What `sinfo` says of a partition of two nodes with four GPUs each."""
ON_SITE = ["launcher=slurm", "site=local_cluster"]
MISSING, DONE = State("missing"), State("done", Outcome(outcome="ok", reason="trained", finished_at=2.0), 1)


@functools.cache
def run_of(*overrides: str) -> RunConfig:
    return one_run([*ON_SITE, *overrides]).run


def prepared(results: Path, *overrides: str) -> list[Prepared]:
    """The runs of a sweep, as a cluster would get them."""
    return [prepare_for_site(planned) for planned in expand([*ON_SITE, f"results={results}", *overrides])]


def group(results: Path, *overrides: str) -> JobGroup:
    """The only kind of job of a sweep."""
    (found,) = job_groups(prepared(results, *overrides))
    return found


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
    plain |= changes
    if plain["launcher"].time_limit_min == "auto":
        plain["launcher"] = msgspec.structs.replace(plain["launcher"], time_limit_min=60)
    return Submission(**plain)


def of_sbatch(script: str) -> list[str]:
    """The options in a batch script."""
    return [line.partition(" ")[2] for line in script.splitlines() if line.startswith("#SBATCH ")]


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Programs of Slurm's, or in their place, which PATH has first: name → what bash does."""
    folder.mkdir(exist_ok=True)
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@dataclass
class FakeSlurm:
    """Prints what a test says, and remembers which programs were asked."""

    answers: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def ask(self, command: list[str], **_: object) -> str:
        self.asked.append(command[0])
        return self.answers.get(command[0], "")
