"""A run for a site, a submission of it, and a Slurm that prints what a test says."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from launch.slurm import record
from launch.slurm.jobs import slurm
from launch.slurm.record import Submission
from launch.sweep import one_run
from parallelbench.config.run import RunConfig
from parallelbench.results.attempt import Outcome
from parallelbench.results.folder import State

ON_SITE = ["launcher=slurm", "site=local_cluster"]
MISSING, DONE = State("missing"), State("done", Outcome(outcome="ok", reason="trained", finished_at=2.0), 1)


@functools.cache
def run_of(*overrides: str) -> RunConfig:
    return one_run([*ON_SITE, *overrides]).run


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


@dataclass
class FakeSlurm:
    """Prints what a test says, and remembers which programs were asked."""

    answers: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def ask(self, command: list[str], **_: object) -> str:
        self.asked.append(command[0])
        return self.answers.get(command[0], "")
