"""Fixtures of the tests of launch."""

from __future__ import annotations

import pytest

from launch.slurm import scheduler
from tests.launch.fake_slurm import FakeSlurm


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr(scheduler, "ask", fake.ask)
    return fake
