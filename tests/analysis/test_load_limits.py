"""The limits of disturbed epochs: a quiet machine seldom exceeds them, and what would change a verdict does."""

from __future__ import annotations

import numpy as np
import pytest

from tests.analysis.load_limits import LENGTHS_S, Probed, called_unlike, set_aside


@pytest.mark.parametrize("length_s", LENGTHS_S)
def test_a_quiet_machines_runs_count_and_disturbed_ones_do_not(length_s: float) -> None:
    rng = np.random.default_rng(1)
    assert set_aside(rng, length_s, quiet=0.01) < 0.01
    assert set_aside(rng, length_s, quiet=0.002, planted=0.5) > 0.99


def test_a_tenth_of_a_core_is_missed_only_in_a_few_short_epochs() -> None:
    rng = np.random.default_rng(2)
    seen = [set_aside(rng, length_s, quiet=0.002, planted=0.1) for length_s in LENGTHS_S if length_s >= 1.0]
    assert seen == sorted(seen)
    assert seen[-1] > 0.99


def test_probes_that_vary_by_a_tenth_are_alike_and_half_the_speed_is_not() -> None:
    rng = np.random.default_rng(3)
    speed = "probed_start_matmul_flop_per_s"
    runs = [Probed({speed: 5e10 * (1 + rng.uniform(-0.05, 0.05))}, {}) for _ in range(40)]
    assert called_unlike(rng, runs, trials=200) == 0.0
    assert called_unlike(rng, runs, 1.5, trials=200) == 1.0
