"""Fixtures of the tests of launch."""

from __future__ import annotations

import pytest

from launch.slurm import scheduler
from tests.launch.fake_slurm import FakeSlurm, of_sbatch


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr(scheduler, "ask", fake.ask)
    return fake


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that change something, sbatch's with the options in its script; it gives the job 99."""
    commands: list[list[str]] = []

    def tell(words: list[str], *, script: str = "", patient: bool = False) -> str:
        commands.append([*words, *of_sbatch(script)])
        return "99\n"

    monkeypatch.setattr(scheduler, "tell", tell)
    return commands
