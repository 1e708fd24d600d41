"""Every sweep in conf/sweep/ expands into runs that can be done."""

from __future__ import annotations

import pytest

from launch.sweep.compose import group_choices
from parallelbench.config.check import check_run
from tests.launch.plans import plan

pytestmark = pytest.mark.slow

GPUS_ONLY = {"data_parallel"}
"""Strategies that a CPU can't do; their runs are checked as runs on GPUs."""


@pytest.mark.parametrize("name", group_choices()["sweep"])
def test_a_shipped_sweep_has_only_runs_that_can_be_done(name: str) -> None:
    runs = plan(name)
    assert runs
    for planned in runs:
        on_gpus = planned.run.strategy.name in GPUS_ONLY or planned.run.precision == "tf32"
        check_run(planned.run, "cuda" if on_gpus else "cpu")
