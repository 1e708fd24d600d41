"""How wrong the advisor is on finished sweeps, each step predicted by a fit that lacks its strategy, or its model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.advisor.intervals import FEWEST, half_width
from analysis.advisor.prediction_errors import Errors, grouped
from analysis.advisor.suite_fit import fitted, learnt, predictable
from analysis.advisor.suite_parameters import ASSUMED_FACTOR, Learnt
from analysis.advisor.suite_splits import SPLITS, left_out, most_devices
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from analysis.advisor.layouts import Values
    from analysis.advisor.machine_figures import MachineFigures
    from analysis.advisor.suite_step import Phases
    from analysis.advisor.sweep_evidence import MeasuredStep, SweepEvidence

FEWEST_STEPS = 4
"""A check fits to no fewer measured steps than this."""


@dataclass(frozen=True, eq=False)
class SplitCheck:
    """Predictions of the steps that one split leaves out."""

    steps: Sequence[MeasuredStep]
    groups: Sequence[str]
    """What was left out with each step."""
    predicted: Sequence[Phases]
    baselines: Mapping[str, Values]
    """Seconds, NaN where a baseline can't say."""

    @cached_property
    def measured_s(self) -> Values:
        """Seconds of each step."""
        return np.array([step.step_s for step in self.steps])

    @cached_property
    def predicted_s(self) -> Values:
        """Likewise."""
        return np.array([each.step_s for each in self.predicted])

    @cached_property
    def log_errors(self) -> Values:
        """Log of measured ÷ predicted."""
        result: Values = np.log(self.measured_s / self.predicted_s)
        return result

    @cached_property
    def widths(self) -> list[float | None]:
        """Half of each step's 90 % interval of log time, from the errors of the other groups alone."""
        groups = np.array(self.groups)
        return [half_width(self.log_errors[groups != group]) for group in self.groups]

    def summary(self) -> dict[str, Any]:
        """Shares, not per cent; seconds."""
        errors = np.abs(self.predicted_s / self.measured_s - 1.0)
        known = [(abs(e), w) for e, w in zip(self.log_errors, self.widths, strict=True) if w is not None]
        choice = self.regrets()
        keys = {
            "strategy": [step.strategy for step in self.steps],
            "model": [step.model for step in self.steps],
            "devices": [str(step.run.devices) for step in self.steps],
        }
        return {
            **Errors.of(errors).as_dict(),
            "coverage": float(np.mean([error <= width for error, width in known])) if known else None,
            "rank_correlation": self.rank_correlation(),
            "median_regret": float(np.median(choice)) if choice else None,
            "max_regret": max(choice) if choice else None,
            "choices": len(choice),
            "baselines": {name: _errors(guess, self.measured_s) for name, guess in self.baselines.items()},
            **{
                f"by_{name}": {key: Errors.of(errors[places]).as_dict() for key, places in grouped(values).items()}
                for name, values in keys.items()
            },
            "predictions": [self.row(place) for place in range(len(self.steps))],
        }

    def row(self, place: int) -> dict[str, Any]:
        """One step with what it rests on."""
        step, phases, width = self.steps[place], self.predicted[place], self.widths[place]
        return {
            "work": step.work,
            "model": step.model,
            "strategy": step.strategy,
            "devices": step.run.devices,
            "left_out": self.groups[place],
            "measured_s": step.step_s,
            "predicted_s": phases.step_s,
            "low_s": None if width is None else phases.step_s * float(np.exp(-width)),
            "high_s": None if width is None else phases.step_s * float(np.exp(width)),
            "error": abs(phases.step_s / step.step_s - 1.0),
            **{each.name: getattr(phases, each.name) for each in fields(phases)},
        }

    def regrets(self) -> list[float]:
        """Of each work and number of devices: how much slower the step predicted fastest is than the fastest one."""
        found = []
        for places in self._choices():
            chosen = places[self.predicted_s[places].argmin()]
            found.append(float(self.measured_s[chosen] / self.measured_s[places].min() - 1.0))
        return found

    def rank_correlation(self) -> float | None:
        """Spearman's, of predicted and measured times: the median over works and devices with 3 steps or more."""
        from scipy.stats import spearmanr

        found = [
            float(spearmanr(self.measured_s[places], self.predicted_s[places])[0])
            for places in self._choices()
            if len(places) > 2
        ]
        return float(np.median(found)) if found else None

    def _choices(self) -> list[Any]:
        keys = [(step.work, step.run.devices, step.run.nodes) for step in self.steps]
        return [places for places in grouped(keys).values() if len(places) > 1]


def checked(evidence: SweepEvidence, figures: MachineFigures | None = None) -> dict[str, Any]:
    """The object that `--json` prints: the errors of steps left out with their strategy, and those of other splits.

    Raises `ConfigError` where too few steps can be predicted.
    """
    steps, refused = _steps(evidence, figures)
    machine = figures or evidence.probed
    splits = {name: split_check(steps, machine, name) for name in SPLITS}
    whole = {name: each.summary() for name, each in splits.items() if each is not None}
    first = next(iter(whole), None)
    if first is None:
        raise ConfigError("all measured steps are of one strategy and one model: nothing can be left out; measure more")
    return {
        "split": first,
        **whole[first],
        "splits": {name: {k: v for k, v in each.items() if k != "predictions"} for name, each in whole.items()},
        "fitted_rows": len(steps),
        "excluded_runs": evidence.excluded,
        "refused": refused,
    }


def learnt_from(evidence: SweepEvidence, figures: MachineFigures | None = None) -> Learnt:
    """What the steps teach, with intervals as wide as the errors of fits that lacked what they predict.

    Of few steps the priors decide most, and intervals are assumed.
    """
    machine = figures or evidence.probed
    steps, _ = predictable(evidence.steps, machine)
    if not steps:
        return Learnt()
    usual = wide = float(np.log(ASSUMED_FACTOR))
    if len(steps) >= FEWEST:
        near = split_check(steps, machine, "folds")
        usual = (half_width(near.log_errors) if near is not None else None) or usual
        wide = max(
            (width for errors in _far(steps, machine) if (width := half_width(errors)) is not None), default=wide
        )
    return learnt(fitted(steps, machine), steps, half_width=usual, far_half_width=max(usual, wide))


def _far(steps: Sequence[MeasuredStep], machine: MachineFigures) -> Iterator[Values]:
    """Log errors of fits that lacked a strategy, a model, or the most devices."""
    for name in ("leave_one_strategy_out", "leave_one_model_out"):
        if (split := split_check(steps, machine, name)) is not None:
            yield split.log_errors
    devices = most_devices(steps)
    rest = [step for place, step in enumerate(steps) if place not in devices]
    if devices and len(rest) >= FEWEST_STEPS:
        fit = fitted(rest, machine)
        yield np.log([steps[place].step_s / fit.phases(steps[place]).step_s for place in devices])


def _steps(evidence: SweepEvidence, figures: MachineFigures | None) -> tuple[list[MeasuredStep], list[str]]:
    steps, refused = predictable(evidence.steps, figures or evidence.probed)
    if len(steps) < FEWEST_STEPS:
        raise ConfigError(
            f"{len(steps)} measured configurations can be predicted, and {FEWEST_STEPS} are needed to fit to: "
            f"measure more strategies or models{'; ' + refused[0] if refused else ''}"
        )
    return steps, refused


def split_check(steps: Sequence[MeasuredStep], figures: MachineFigures, split: str) -> SplitCheck | None:
    """Every group predicted by a fit of the others; None where too few steps remain without any group."""
    order: list[int] = []
    groups: list[str] = []
    phases: list[Phases] = []
    guesses: dict[str, list[float]] = {name: [] for name in _BASELINES}
    for group, places in left_out(steps, split).items():
        rest = [step for place, step in enumerate(steps) if place not in places]
        if len(rest) < FEWEST_STEPS:
            continue
        fit = fitted(rest, figures)
        for place in places:
            order.append(place)
            groups.append(group)
            phases.append(fit.phases(steps[place]))
            for name, guess in _BASELINES.items():
                guesses[name].append(guess(rest, steps[place]))
    if len(order) < 2:
        return None
    return SplitCheck(
        [steps[place] for place in order],
        groups,
        phases,
        {name: np.array(values) for name, values in guesses.items()},
    )


def _errors(guess: Values, measured_s: Values) -> dict[str, Any] | None:
    known = ~np.isnan(guess)
    return Errors.of(np.abs(guess[known] / measured_s[known] - 1.0)).as_dict() if known.any() else None


def _flop(step: MeasuredStep) -> float:
    """Forward, of a step."""
    of_sample = sum(each.product_flop + each.convolution_flop + each.grouped_flop for each in step.layers)
    return step.run.global_batch_size * of_sample


def _nearest(known: Sequence[MeasuredStep], asked: MeasuredStep) -> MeasuredStep:
    """By the logarithms of FLOPs and devices; a strategy of another name is as far as twice the FLOPs."""

    def distance(step: MeasuredStep) -> float:
        flop, devices = (np.log2(value) for value in (_flop(step) / _flop(asked), step.run.devices / asked.run.devices))
        return float(flop**2 + devices**2 + (step.strategy != asked.strategy))

    return min(known, key=distance)


def _neighbour_s(known: Sequence[MeasuredStep], asked: MeasuredStep) -> float:
    return _nearest(known, asked).step_s


def _perfect_s(known: Sequence[MeasuredStep], asked: MeasuredStep) -> float:
    """The same work's time on one device ÷ devices; without it, the nearest step's, by FLOPs of a device."""
    alone = [step.step_s for step in known if step.work == asked.work and step.run.devices == 1]
    if alone:
        return alone[0] / asked.run.devices
    near = _nearest(known, asked)
    return near.step_s * _flop(asked) / _flop(near) * near.run.devices / asked.run.devices


def _amdahl_s(known: Sequence[MeasuredStep], asked: MeasuredStep) -> float:
    """T = F · (a + b/n), fitted to all known steps by non-negative least squares on relative errors (Amdahl 1967)."""
    from scipy.optimize import nnls

    terms = np.array([(_flop(step), _flop(step) / step.run.devices) for step in known])
    times = np.array([step.step_s for step in known])
    weights, _ = nnls(terms / times[:, None], np.ones(len(times)))
    return float(weights @ (_flop(asked), _flop(asked) / asked.run.devices))


_BASELINES = {"perfect_scaling": _perfect_s, "amdahl": _amdahl_s, "nearest_neighbour": _neighbour_s}
