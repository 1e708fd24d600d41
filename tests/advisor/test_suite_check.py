"""The fit on finished sweeps: it finds what made the steps, and sees nothing of what it is judged by."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from analysis.advisor import check
from analysis.advisor.check import checked, learnt_from, left_out
from analysis.advisor.fit import MEASURED, SuiteFit, fitted, powers, values_of
from analysis.advisor.machine import Known
from analysis.advisor.strategies import SuiteJob, suite_phases
from analysis.advisor.sweep_evidence import MeasuredStep, SweepEvidence
from tests.advisor.machine import layer, machine
from tests.helpers import configured

MODELS = {
    "cnn_small": ("conv1", "fc1", "fc2"),
    "mlp": ("fc1", "fc2", "fc3", "fc4"),
    "vit_tiny": ("embed", "block1", "block2", "head"),
}
COUNTS = {"output_bytes": 4e4, "operations": 3, "parameters": 1_000_000, "tensors": 2, "boundary_bytes": 4e3}
STRATEGIES = (("single", 1), ("ddp", 2), ("zero1", 2), ("fsdp", 2), ("ddp", 4))
FIGURES = machine(launch_s=Known(1e-6, "assumed", "a test"))
TRUTH = values_of(MEASURED) | {"product_scale": 1.4, "link_scale": 0.7, "update_scale": 1.3, "alone": 0.8}


def made(truth: dict[str, float], *, noise: float = 0.0, odd: dict[str, float] | None = None) -> list[MeasuredStep]:
    """Steps that take what the formulas say under `truth`, times what a strategy in `odd` has of its own."""
    draw, steps = np.random.default_rng(0), []
    for place, (model, names) in enumerate(MODELS.items()):
        flop = 2e6 * 3**place
        each = [layer(n, product_flop=flop, **COUNTS) for n in names]
        for strategy, devices in STRATEGIES:
            run = configured(f"model={model}", f"strategy={strategy}", f"devices={devices}", "batch_size=64")
            phases = suite_phases(SuiteJob(run=run, layers=each, figures=FIGURES), truth).at(0)
            time_s = phases.step_s * float(np.exp(noise * draw.standard_normal())) * (odd or {}).get(strategy, 1.0)
            steps.append(
                MeasuredStep(
                    run=run, layers=each, work=model, model=model, step_s=time_s, phases={},
                    energy_j=devices * (30.0 * (phases.compute_s + phases.optimizer_s + phases.data_s + phases.other_s)
                    + 10.0 * (phases.communication_s + phases.bubble_s)),
                )
            )  # fmt: skip
    return steps


def evidence(steps: Sequence[MeasuredStep]) -> SweepEvidence:
    return SweepEvidence(steps=steps, probed=FIGURES, excluded=0, left_out=[])


def test_a_fit_repeats_the_steps_that_it_has_seen() -> None:
    steps = made(TRUTH)
    fit = fitted(steps, FIGURES)
    errors = [abs(fit.phases(step.job(FIGURES)).step_s / step.step_s - 1.0) for step in steps]
    assert max(errors) < 0.03, "the steps follow the formulas exactly"


@pytest.mark.exhaustive
def test_a_strategy_that_no_fit_saw_is_predicted_from_the_others() -> None:
    summary = checked(evidence(made(TRUTH)))
    assert summary["split"] == "leave_one_strategy_out"
    assert {row["strategy"] for row in summary["predictions"]} == {"ddp", "zero1", "fsdp"}
    assert all(row["left_out"] == row["strategy"] for row in summary["predictions"])
    assert summary["median_error"] < 0.1 < summary["baselines"]["perfect_scaling"]["median_error"]


def test_no_fit_sees_what_it_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, seen = made(TRUTH), []
    known = fitted(steps, FIGURES)

    def watched(rest: Sequence[MeasuredStep], figures: object) -> SuiteFit:
        seen.append({(step.model, step.strategy) for step in rest})
        return known

    monkeypatch.setattr(check, "fitted", watched)
    for split in ("leave_one_strategy_out", "leave_one_model_out"):
        seen.clear()
        check.split_check(steps, FIGURES, split)
        for rest, places in zip(seen, left_out(steps, split).values(), strict=True):
            assert not rest & {(steps[place].model, steps[place].strategy) for place in places}


@pytest.mark.exhaustive
def test_a_measured_time_changes_no_prediction_of_itself() -> None:
    steps = made(TRUTH)
    slower = [dataclasses.replace(s, step_s=3 * s.step_s) if s.strategy == "fsdp" else s for s in steps]
    splits = [check.split_check(each, FIGURES, "leave_one_strategy_out") for each in (steps, slower)]
    of_fsdp = [
        [time_s for step, time_s in zip(split.steps, split.predicted_s, strict=True) if step.strategy == "fsdp"]
        for split in splits
        if split is not None
    ]
    assert len(of_fsdp) == 2
    assert of_fsdp[0] == of_fsdp[1]


@pytest.mark.exhaustive
def test_what_a_strategy_leaves_is_learnt_and_shrunk() -> None:
    learnt = learnt_from(evidence(made(TRUTH, odd={"fsdp": 1.5})))
    assert 0.1 < learnt.fit.strategies["fsdp"] < np.log(1.5)
    assert abs(learnt.fit.strategies["single"]) < 0.1
    assert len(learnt.runs) == len(MODELS) * len(STRATEGIES)
    assert {learnt.outside(step.run) for step in made(TRUTH)} == {()}
    assert learnt.half_width > 0
    assert learnt.far_half_widths.keys() >= {"strategy", "model"}


@pytest.mark.exhaustive
def test_one_models_strategies_say_nothing_of_another_model() -> None:
    steps = [each for each in made(TRUTH) if each.model == next(iter(MODELS))]
    learnt = learnt_from(evidence(steps))
    assert "model" not in learnt.far_half_widths
    assert learnt.half_width_of(("strategy", "model")) >= np.log(2.0)


def test_power_by_phase_is_what_made_the_energy() -> None:
    steps = made(values_of(MEASURED))
    fit = fitted(steps, FIGURES)
    found = powers(steps, fit, FIGURES)
    assert found is not None
    assert found[0] == pytest.approx(30.0, rel=0.05)
    assert found[1] == pytest.approx(10.0, rel=0.3)
    assert powers([dataclasses.replace(s, energy_j=None) for s in steps], fit, FIGURES) is None


def test_devices_that_would_wait_without_power_have_no_power() -> None:
    """Energies that computing explains alone: the runs don't tell the two apart, and no device draws 0 W."""
    steps, fit = made(values_of(MEASURED)), fitted(made(values_of(MEASURED)), FIGURES)
    computing = []
    for step in steps:
        phases = fit.phases(step.job(FIGURES))
        waiting = phases.communication_s + phases.bubble_s
        energy_j = step.run.devices * (30.0 * (phases.step_s - waiting) - 1.0 * waiting)
        computing.append(dataclasses.replace(step, energy_j=energy_j))
    assert powers(computing, fit, FIGURES) is None
