"""Fits the suite's step model to finished sweeps: few numbers on log time, then what strategies and models leave.

Measured phases of runs whose ranks all do the same are fitted beside their steps, with less weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.advisor.suite_parameters import SUITE_PARAMETERS, Learnt, Seen
from analysis.advisor.suite_step import SuiteJob
from analysis.advisor.suite_strategies import suite_phases
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.advisor.layouts import Values
    from analysis.advisor.machine_figures import MachineFigures
    from analysis.advisor.suite_parameters import Scales
    from analysis.advisor.suite_step import Phases
    from analysis.advisor.sweep_evidence import MeasuredStep

NOISE = 0.05
"""Standard deviation of log time of a measured step that is taken for granted."""
PHASE_NOISE = 0.2
"""The same of a phase: its measurement adds clocks to the step, and the formulas have means where ranks differ."""
STRATEGY_SIZE, MODEL_SIZE = 0.15, 0.3
"""Standard deviations of what strategies and models leave of log time, before it is seen."""
_STEP = 1e-3
"""Step of the numerical derivatives, of a parameter's logarithm."""
_COMPUTED, _UPDATED = ("forward_s", "backward_s"), ("optimizer_s",)


@dataclass(frozen=True)
class Residual:
    """What the formulas leave of measured steps: log of measured ÷ predicted, by strategy and by model."""

    strategies: dict[str, float]
    models: dict[str, float]

    def of(self, step: MeasuredStep) -> float:
        """What is to be expected of a step; 0 where neither was seen."""
        return self.strategies.get(step.strategy, 0.0) + self.models.get(step.model_key, 0.0)


@dataclass(frozen=True)
class SuiteFit:
    """What a set of measured steps taught."""

    scales: Scales
    residual: Residual
    figures: MachineFigures

    def phases(self, step: MeasuredStep) -> Phases:
        """Predicted phases of what a step ran; its measured time is not looked at."""
        return _formula(step, self.scales, self.figures).stretched(float(np.exp(self.residual.of(step))))


def predictable(steps: Sequence[MeasuredStep], figures: MachineFigures) -> tuple[list[MeasuredStep], list[str]]:
    """Those that a formula knows, and why the others are left out."""
    from analysis.advisor.suite_parameters import assumed_scales

    kept, refused = [], []
    for step in steps:
        try:
            _formula(step, assumed_scales(), figures)
        except ConfigError as error:
            refused.append(f"{step.model} under {step.strategy}: {error}")
        else:
            kept.append(step)
    return kept, refused


def fitted(steps: Sequence[MeasuredStep], figures: MachineFigures) -> SuiteFit:
    """The most probable parameters, measurements and priors weighing by their variances, and what remains."""
    from scipy.optimize import least_squares

    spreads = np.array([each.spread for each in SUITE_PARAMETERS])
    log_priors = np.log([each.prior for each in SUITE_PARAMETERS])
    most = (np.log([each.most for each in SUITE_PARAMETERS]) - log_priors) / spreads

    def scales_at(units: Values) -> Scales:
        values = np.exp(log_priors + units * spreads)
        return {each.name: float(value) for each, value in zip(SUITE_PARAMETERS, values, strict=True)}

    def errors(units: Values) -> Values:
        """Errors in units of their standard deviation, models' own common part taken out, then the priors'."""
        scales = scales_at(units)
        predicted = [_formula(step, scales, figures) for step in steps]
        off = np.log([each.step_s / step.step_s for each, step in zip(predicted, steps, strict=True)])
        phases = [error for each, step in zip(predicted, steps, strict=True) for error in _phase_errors(each, step)]
        together: Values = np.concatenate([_whitened(off, steps), np.array(phases), units])
        return together

    def derivatives(units: Values) -> Values:
        now = errors(units)
        result: Values = np.stack([(errors(units + _STEP * each) - now) / _STEP for each in np.eye(len(units))], axis=1)
        return result

    found: Any = least_squares(
        errors, np.zeros(len(SUITE_PARAMETERS)), jac=derivatives, bounds=(-np.inf, most), ftol=1e-3, xtol=1e-3
    )
    scales = scales_at(found.x)
    return SuiteFit(scales, _residual(steps, scales, figures), figures)


def learnt(fit: SuiteFit, steps: Sequence[MeasuredStep], *, half_width: float, far_half_width: float) -> Learnt:
    """What the advice rests on: the fit, how wide its intervals are, and what was seen."""
    busy_w, waiting_w = powers(steps, fit)
    return Learnt(
        scales=fit.scales,
        offsets=fit.residual.strategies,
        model_offsets=fit.residual.models,
        half_width=half_width,
        far_half_width=far_half_width,
        seen=Seen.of([step.run for step in steps]),
        rows=len(steps),
        busy_power_w=busy_w,
        waiting_power_w=waiting_w,
    )


def powers(steps: Sequence[MeasuredStep], fit: SuiteFit) -> tuple[float | None, float | None]:
    """Power of one device while it computes and while it waits, W: energy of a step = Σ power × time in the phase.

    By non-negative least squares on relative errors over the runs whose energy was measured; (None, None) without any,
    and where they don't tell computing from waiting.
    """
    from scipy.optimize import nnls

    known = [step for step in steps if step.energy_j]
    if not known:
        return None, None
    terms = []
    for step in known:
        phases = fit.phases(step)
        waiting = phases.communication_s + phases.bubble_s
        terms.append((step.run.devices * (phases.step_s - waiting), step.run.devices * waiting))
    energies = np.array([step.energy_j for step in known], dtype=np.float64)
    (busy_w, waiting_w), _ = nnls(np.array(terms) / energies[:, None], np.ones(len(known)))
    if not any(waiting > 0 for _, waiting in terms):
        waiting_w = busy_w
    # No device draws nothing: where the runs can't tell the two apart, neither is known.
    return (float(busy_w), float(waiting_w)) if min(busy_w, waiting_w) > 0 else (None, None)


def _formula(step: MeasuredStep, scales: Scales, figures: MachineFigures) -> Phases:
    return suite_phases(SuiteJob(run=step.run, layers=step.layers, figures=figures, scales=scales))


def _phase_errors(predicted: Phases, step: MeasuredStep) -> list[float]:
    """Of computing and updating, where every rank does the same."""
    if not step.phases or step.run.strategy.state_shards(step.run) is None:
        return []
    found = []
    for names, prediction in ((_COMPUTED, predicted.compute_s), (_UPDATED, predicted.optimizer_s)):
        measured = sum(step.phases.get(name, 0.0) for name in names)
        if measured > 0 and prediction > 0:
            # A part of the step, so that small phases don't decide.
            found.append((prediction - measured) / (step.phases["step_time_s"] * PHASE_NOISE))
    return found


def _design(steps: Sequence[MeasuredStep]) -> tuple[list[str], list[str], Values]:
    """Strategies, models, and which of them each step has, in units of their sizes."""
    strategies, models = (sorted({getattr(step, name) for step in steps}) for name in ("strategy", "model_key"))
    design = np.zeros((len(steps), len(strategies) + len(models)))
    for place, step in enumerate(steps):
        design[place, strategies.index(step.strategy)] = STRATEGY_SIZE
        design[place, len(strategies) + models.index(step.model_key)] = MODEL_SIZE
    return strategies, models, design


def _whitened(off: Values, steps: Sequence[MeasuredStep]) -> Values:
    """Errors as independent ones of size 1, those of a strategy and of a model being alike."""
    _, _, design = _design(steps)
    covariance = design @ design.T + NOISE**2 * np.eye(len(steps))
    result: Values = np.linalg.solve(np.linalg.cholesky(covariance), off)
    return result


def _residual(steps: Sequence[MeasuredStep], scales: Scales, figures: MachineFigures) -> Residual:
    """What strategies and models have in common, each shrunk towards 0 by how often it was seen (ridge regression)."""
    log_errors = np.log([step.step_s / _formula(step, scales, figures).step_s for step in steps])
    strategies, models, design = _design(steps)
    precision = design.T @ design / NOISE**2 + np.eye(design.shape[1])
    units = np.linalg.solve(precision, design.T @ log_errors / NOISE**2)
    sizes = np.array([STRATEGY_SIZE] * len(strategies) + [MODEL_SIZE] * len(models))
    values = (units * sizes).tolist()
    count = len(strategies)
    return Residual(dict(zip(strategies, values[:count], strict=True)), dict(zip(models, values[count:], strict=True)))
