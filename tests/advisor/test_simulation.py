"""Simulated losses against draws by hand, replays and Daly's own limits."""

from __future__ import annotations

import json
import math

import msgspec
import numpy as np
import pytest

from analysis.advisor.schedules import pipeline_s
from analysis.advisor.simulation import (
    ASSUMED,
    Assumptions,
    SimulatedJob,
    daly_interval_s,
    daly_stretch,
    expected_maximum,
    simulated,
)
from parallelbench.cli import main

HOUR = 3600.0


@pytest.mark.parametrize(("devices", "deviation"), [(2, 0.1), (64, 0.05), (4096, 0.02)])
def test_the_slowest_of_many_is_the_mean_over_draws(devices: int, deviation: float) -> None:
    draws = np.random.default_rng(0).standard_normal((2000, devices)).max(axis=1)
    assert expected_maximum(devices, deviation) == pytest.approx(float(np.exp(deviation * draws).mean()), rel=0.003)
    assert expected_maximum(devices, 0.0) == 1.0


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


def job(**changes: object) -> SimulatedJob:
    whole = {"step_s": 1.0, "compute_s": 0.8, "communication_s": 0.2, "devices": 1024, "nodes": 128, "parameters": 7e9}
    return SimulatedJob(**whole | changes)  # type: ignore[arg-type]


def test_a_slow_stage_costs_a_pipeline_as_much_as_a_slow_rank_costs_others() -> None:
    """The formula says compute × (factor − 1); the replay of 1F1B has it so where the slow stage is last."""
    micro_batches, factor = 32, 1.5
    stage = [np.array(1.0)] * 4
    slow = [*stage[:3], np.array(factor)]
    none = np.array(0.0)
    plain_s = float(pipeline_s("1f1b", micro_batches, stage, stage, send_s=none))
    slow_s = float(pipeline_s("1f1b", micro_batches, slow, slow, send_s=none))
    still = Assumptions(slow_factor=factor, jitter=0.0)
    said = simulated(job(step_s=plain_s, compute_s=2.0 * micro_batches, devices=4, nodes=1), still)
    assert said.slow_device_step_s == pytest.approx(slow_s, rel=0.05)


def test_asynchronous_workers_lose_only_the_slow_one_s_share() -> None:
    still = Assumptions(slow_factor=2.0, jitter=0.0)
    synchronous, asynchronous = (
        simulated(job(devices=10, nodes=1, asynchronous=each), still) for each in (False, True)
    )
    assert synchronous.slow_device_step_s == pytest.approx(1.8)
    # Nine at one step per second and one at 1/1.8.
    assert asynchronous.slow_device_step_s == pytest.approx(10 / (9 + 1 / 1.8))


def test_more_devices_fail_more_often_and_make_less_progress() -> None:
    found = [simulated(job(devices=n, nodes=n // 8), Assumptions()) for n in (1024, 4096, 16384)]
    assert [each.failures_per_day for each in found] == pytest.approx([24 * n / 50_700 for n in (1024, 4096, 16384)])
    assert found[0].goodput > found[1].goodput > found[2].goodput > 0.5
    assert all(each.as_dict()["kind"] == "simulation" for each in found)
    assert simulated(job(devices=1, nodes=1), Assumptions()).broken_links == 0.0


def test_nothing_is_lost_where_nothing_is_assumed_to_happen() -> None:
    never = Assumptions(device_mtbf_hours=1e15, link_mtbf_hours=1e15, jitter=0.0, slow_factor=1.0)
    found = simulated(job(), never)
    assert (found.step_s, found.slow_device_step_s) == pytest.approx((1.0, 1.0))
    assert found.goodput == pytest.approx(1.0, abs=1e-4)
    assert set(ASSUMED) == set(msgspec.structs.asdict(never)), "every assumption is stated"


def test_the_verb_labels_and_states_all_that_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=gpt", "model.layers=24", "model.width=2048", "model.heads=16", "site=a100_80gb", "batch_size=4096"]
    asked = ["advise", *words, "devices=1024,16384", "--simulate"]
    assert main([*asked, "--assume", "slow_factor=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "simulation"
    assert [each["devices"] for each in found["rows"]] == [1024, 16384]
    assert all(each["kind"] == "simulation" and 0 < each["goodput"] < 1 for each in found["rows"])
    assert found["assumptions"]["slow_factor"]["value"] == 2.0
    assert set(found["assumptions"]) == set(ASSUMED)
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "Simulation: nothing above was measured" in shown
    assert all(f"  {name}=" in shown for name in ASSUMED)


@pytest.mark.parametrize("word", ["luck=1", "jitter=often", "jitter=2", "jitter"])
def test_other_assumptions_are_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "model=mlp", "--simulate", "--assume", word]) == 2
    assert word.partition("=")[0] in capsys.readouterr().err
