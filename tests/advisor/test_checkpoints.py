"""Daly's formulas against their own limits and failures that are drawn one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from analysis.advisor.checkpoints import daly_interval_s, daly_stretch

HOUR = 3600.0


def test_a_checkpoint_interval_is_the_one_that_costs_least() -> None:
    for checkpoint_s, mtbf_s in ((10.0, HOUR), (60.0, 3 * HOUR), (300.0, 24 * HOUR)):
        best = daly_interval_s(checkpoint_s, mtbf_s)
        costs = {
            share: daly_stretch(share * best, checkpoint_s=checkpoint_s, restart_s=600.0, mtbf_s=mtbf_s)
            for share in (0.7, 0.95, 1.0, 1.05, 1.4)
        }
        assert costs[1.0] == pytest.approx(min(costs.values()), rel=1e-4)
        assert min(costs[0.7], costs[1.4]) > costs[1.0]
    # Young's first-order rule (1974), where a checkpoint is short.
    assert daly_interval_s(1.0, 1e8) == pytest.approx(math.sqrt(2e8), rel=1e-3)
    assert daly_interval_s(100.0, 40.0) == 40.0


def test_expected_time_is_that_of_drawn_failures() -> None:
    """Segments of work and checkpoint that failures interrupt at exponential times; each restart may fail as well."""
    every_s, checkpoint_s, restart_s, mtbf_s = 600.0, 60.0, 120.0, 1500.0
    draw, wall_s, segments = np.random.default_rng(1), 0.0, 4000
    for _ in range(segments):
        while (failure_s := draw.exponential(mtbf_s)) < every_s + checkpoint_s:
            wall_s += failure_s
            while (again_s := draw.exponential(mtbf_s)) < restart_s:
                wall_s += again_s
            wall_s += restart_s
        wall_s += every_s + checkpoint_s
    expected = daly_stretch(every_s, checkpoint_s=checkpoint_s, restart_s=restart_s, mtbf_s=mtbf_s)
    assert expected == pytest.approx(wall_s / (segments * every_s), rel=0.03)


def test_failures_beyond_every_number_leave_no_progress() -> None:
    assert daly_stretch(1.0, checkpoint_s=1.0, restart_s=600.0, mtbf_s=0.2) == float("inf")
