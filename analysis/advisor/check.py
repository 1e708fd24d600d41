"""How wrong the advisor is, by the very formulas and parameters that rank layouts: on finished sweeps, and on files.

A split names each step's group. Each group is predicted by a fit of all other groups; the splits were fixed before
anything was fitted. Files are predicted by the fits that come with the suite. Beside it stands what anybody could have
guessed: perfect scaling, Amdahl's law, the nearest measured layout.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.advisor.fit import (
    ASSUMED_FACTOR,
    FEWEST_ERRORS,
    Learnt,
    fitted,
    half_width,
    learnt,
    predictable,
)
from analysis.advisor.layouts import strategy_name
from analysis.advisor.measurements import layout_keys, read_measured, shipped_files
from analysis.advisor.rows import extrapolated, half_widths
from analysis.advisor.step import Phases, step_phases
from analysis.advisor.transformer import model_flops, work_of
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from analysis.advisor.fit import PublishedFit
    from analysis.advisor.layouts import Layouts, Values
    from analysis.advisor.machine import MachineFigures
    from analysis.advisor.measurements import Evidence, Source
    from analysis.advisor.sweep_evidence import MeasuredStep, SweepEvidence


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Relative errors of several rows, as shares."""

    rows: int
    mean_error: float
    median_error: float
    p90_error: float
    max_error: float

    @classmethod
    def of(cls, errors: Values) -> Errors:
        """Their summary."""
        return cls(
            rows=len(errors),
            mean_error=float(errors.mean()),
            median_error=float(np.median(errors)),
            p90_error=float(np.quantile(errors, 0.9)),
            max_error=float(errors.max()),
        )

    def as_dict(self) -> dict[str, Any]:
        """By name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Predicted steps beside measured ones; seconds."""

    measured_s: Values
    predicted_s: Values
    widths: Values
    """Half of each 90 % interval of log time; NaN where it is not known."""
    kinds: Mapping[str, Sequence[str]]
    """model, strategy, devices: of each step."""
    works: Sequence[Hashable]
    """Steps of one work compete: one would choose among them."""
    baselines: Mapping[str, Values]
    """NaN where a baseline can't say."""
    rows: Sequence[Mapping[str, Any]]
    """What else is known of each step."""

    @property
    def errors(self) -> Values:
        """|predicted ÷ measured − 1| of each step."""
        return np.abs(self.predicted_s / self.measured_s - 1.0)

    def summary(self) -> dict[str, Any]:
        """The object that `--json` prints: shares, not per cent; seconds."""
        errors, choice, known = self.errors, self.regrets(), ~np.isnan(self.widths)
        within = np.abs(np.log(self.measured_s / self.predicted_s))[known] <= self.widths[known]
        return {
            **Errors.of(errors).as_dict(),
            "coverage": float(within.mean()) if known.any() else None,
            "rank_correlation": self.rank_correlation(),
            "median_regret": float(np.median(choice)) if choice else None,
            "max_regret": max(choice) if choice else None,
            "choices": len(choice),
            "baselines": {name: _errors(guess, self.measured_s) for name, guess in self.baselines.items()},
            **{
                f"by_{name}": {key: Errors.of(errors[places]).as_dict() for key, places in grouped(values).items()}
                for name, values in self.kinds.items()
            },
            "predictions": [self._row(place) for place in range(len(errors))],
        }

    def _row(self, place: int) -> dict[str, Any]:
        predicted_s, width = float(self.predicted_s[place]), float(self.widths[place])
        ends = [None, None] if np.isnan(width) else [predicted_s * float(np.exp(sign * width)) for sign in (-1, 1)]
        return {
            **{name: values[place] for name, values in self.kinds.items()},
            "measured_s": float(self.measured_s[place]),
            "predicted_s": predicted_s,
            "low_s": ends[0],
            "high_s": ends[1],
            "error": float(self.errors[place]),
            **self.rows[place],
        }

    def regrets(self) -> list[float]:
        """Of each work: how much slower the step predicted fastest is than the fastest one."""
        found = []
        for places in self._choices():
            chosen = places[self.predicted_s[places].argmin()]
            found.append(float(self.measured_s[chosen] / self.measured_s[places].min() - 1.0))
        return found

    def rank_correlation(self) -> float | None:
        """Spearman's, of predicted and measured times: the median over works with 3 steps or more."""
        from scipy.stats import spearmanr

        found = [
            float(spearmanr(self.measured_s[places], self.predicted_s[places])[0])
            for places in self._choices()
            if len(places) > 2
        ]
        return float(np.median(found)) if found else None

    def _choices(self) -> list[Any]:
        return [places for places in grouped(self.works).values() if len(places) > 1]


def grouped(keys: Sequence[Hashable]) -> dict[Any, NDArray[np.int64]]:
    """Where each key stands."""
    found = defaultdict(list)
    for place, key in enumerate(keys):
        found[key].append(place)
    return {key: np.array(places) for key, places in found.items()}


FEWEST_STEPS = 4
"""A check fits to no fewer measured steps than this."""


@dataclass(frozen=True, eq=False)
class SplitCheck:
    """Predictions of the steps that one split leaves out."""

    steps: Sequence[MeasuredStep]
    groups: Sequence[str]
    """What was left out with each step."""
    predicted: Sequence[Phases[float]]
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

    def judged(self) -> Judged:
        """With what each step rests on."""
        return Judged(
            measured_s=self.measured_s,
            predicted_s=self.predicted_s,
            widths=np.array([np.nan if width is None else width for width in self.widths]),
            kinds={
                "model": [step.model for step in self.steps],
                "strategy": [step.strategy for step in self.steps],
                "devices": [str(step.run.devices) for step in self.steps],
            },
            works=[(step.work, step.run.devices, step.run.nodes) for step in self.steps],
            baselines=self.baselines,
            rows=[
                {"work": step.work, "devices": step.run.devices, "left_out": group}
                | {each.name: getattr(phases, each.name) for each in fields(phases)}
                for step, group, phases in zip(self.steps, self.groups, self.predicted, strict=True)
            ],
        )


def checked(evidence: SweepEvidence, figures: MachineFigures | None = None) -> dict[str, Any]:
    """The object that `--json` prints: the errors of steps left out with their strategy, and those of other splits.

    Raises `ConfigError` where too few steps can be predicted.
    """
    steps, refused = _steps(evidence, figures)
    machine = figures or evidence.probed
    splits = {name: split_check(steps, machine, name) for name in SPLITS}
    whole = {name: each.judged().summary() for name, each in splits.items() if each is not None}
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
    if len(steps) >= FEWEST_ERRORS:
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
    phases: list[Phases[float]] = []
    guesses: dict[str, list[float]] = {name: [] for name in _STEP_BASELINES}
    for group, places in left_out(steps, split).items():
        rest = [step for place, step in enumerate(steps) if place not in places]
        if len(rest) < FEWEST_STEPS:
            continue
        fit = fitted(rest, figures)
        for place in places:
            order.append(place)
            groups.append(group)
            phases.append(fit.phases(steps[place]))
            for name, guess in _STEP_BASELINES.items():
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


def _nearest_step(known: Sequence[MeasuredStep], asked: MeasuredStep) -> MeasuredStep:
    """By the logarithms of FLOPs and devices; a strategy of another name is as far as twice the FLOPs."""

    def distance(step: MeasuredStep) -> float:
        flop, devices = (np.log2(value) for value in (_flop(step) / _flop(asked), step.run.devices / asked.run.devices))
        return float(flop**2 + devices**2 + (step.strategy != asked.strategy))

    return min(known, key=distance)


def _nearest_step_s(known: Sequence[MeasuredStep], asked: MeasuredStep) -> float:
    return _nearest_step(known, asked).step_s


def _perfect_step_s(known: Sequence[MeasuredStep], asked: MeasuredStep) -> float:
    """The same work's time on one device ÷ devices; without it, the nearest step's, by FLOPs of a device."""
    alone = [step.step_s for step in known if step.work == asked.work and step.run.devices == 1]
    if alone:
        return alone[0] / asked.run.devices
    near = _nearest_step(known, asked)
    return near.step_s * _flop(asked) / _flop(near) * near.run.devices / asked.run.devices


def _amdahl_step_s(known: Sequence[MeasuredStep], asked: MeasuredStep) -> float:
    """T = F · (a + b/n), fitted to all known steps by non-negative least squares on relative errors (Amdahl 1967)."""
    from scipy.optimize import nnls

    terms = np.array([(_flop(step), _flop(step) / step.run.devices) for step in known])
    times = np.array([step.step_s for step in known])
    weights, _ = nnls(terms / times[:, None], np.ones(len(times)))
    return float(weights @ (_flop(asked), _flop(asked) / asked.run.devices))


_STEP_BASELINES = {"perfect_scaling": _perfect_step_s, "amdahl": _amdahl_step_s, "nearest_neighbour": _nearest_step_s}


FOLDS_OF_SWEEPS = 5


def fold_of(step: MeasuredStep) -> str:
    """By a hash of what was asked, never of what was measured."""
    key = f"{step.work}|{step.strategy}|{step.run.devices}|{step.run.nodes}"
    return f"fold {int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % FOLDS_OF_SWEEPS}"


SPLITS: Mapping[str, Callable[[MeasuredStep], str]] = {
    "leave_one_strategy_out": lambda step: step.strategy,
    "leave_one_model_out": lambda step: step.run.model.name,
    "folds": fold_of,
}
"""Name of a split → the group of a step."""
ALWAYS_SEEN = {"leave_one_strategy_out": frozenset({"single"})}
"""Groups that no fit lacks and that are not judged: one device is what everybody measures first, and no strategy."""


def left_out(steps: Sequence[MeasuredStep], split: str) -> dict[str, list[int]]:
    """Group → its places, of the groups that are predicted by the others."""
    groups: dict[str, list[int]] = {}
    for place, step in enumerate(steps):
        groups.setdefault(SPLITS[split](step), []).append(place)
    seen = ALWAYS_SEEN.get(split, frozenset())
    return {name: places for name, places in groups.items() if name not in seen and len(places) < len(steps)}


def most_devices(steps: Sequence[MeasuredStep]) -> list[int]:
    """Places of the steps on the most devices; empty where all are."""
    most = max(step.run.devices for step in steps)
    found = [place for place, step in enumerate(steps) if step.run.devices == most]
    return found if len(found) < len(steps) else []


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Published steps that a fit rests on."""

    layouts: Layouts
    time_s: Values


def shipped(source: Source) -> Seen:
    """Those of one publication that come with the suite."""
    files = [read_measured(file) for file in shipped_files(source)]
    layouts = joined([each.layouts for each in files])
    return Seen(layouts=layouts, time_s=np.concatenate([each.time_s for each in files]))


def joined(parts: Sequence[Layouts]) -> Layouts:
    """The rows of all."""
    names = [each.name for each in fields(parts[0])]
    return type(parts[0])(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def judged(asked: Evidence, *, known: Seen, fit: PublishedFit) -> Judged:
    """Predict measured steps as `advise` would; layouts that are known, by the fit that lacks their width of model."""
    layouts = asked.layouts
    held = set(layout_keys(known.layouts))
    seen = np.array([key in held for key in layout_keys(layouts)], dtype=bool)
    parts = {each.name: np.zeros(len(layouts)) for each in fields(Phases)}
    baselines = {name: np.full(len(layouts), np.nan) for name in BASELINES}
    without = np.where(seen, layouts.hidden, 0.0)
    for width in np.unique(without).tolist():
        rows = without == width
        these, rest = layouts.take(rows), known.layouts.hidden != width
        fitted = fit.without_width[f"{width:g}"] if width else fit.parameters
        found = step_phases(work_of(these), these, asked.machines.take(rows), fitted)
        for name, values in parts.items():
            values[rows] = getattr(found, name)
        for name, guess in BASELINES.items() if rest.any() else ():
            baselines[name][rows] = guess(known.layouts.take(rest), known.time_s[rest], these)
    phases = Phases(**parts)
    like = np.array([name in fit.accelerators for name in asked.accelerators], dtype=bool)
    outside = extrapolated(layouts, fit, known=like)
    return Judged(
        measured_s=asked.time_s,
        predicted_s=phases.step_s,
        widths=half_widths(layouts, fit, per_node=asked.machines.devices_per_node, known=like),
        kinds={
            "model": asked.models,
            "strategy": [strategy_name(layouts, place) for place in range(len(layouts))],
            "devices": [f"{devices:g}" for devices in layouts.devices],
        },
        works=list(zip(*(getattr(layouts, name).tolist() for name in _WORK), asked.accelerators, strict=True)),
        baselines=baselines,
        rows=[
            {"devices": float(layouts.devices[place]), **layouts.row(place)}
            | {name: float(values[place]) for name, values in parts.items()}
            | {"predicted_mfu": mfu, "extrapolates": list(outside[place]), "also_in_evidence": bool(seen[place])}
            for place, mfu in enumerate(_mfu(asked, phases.step_s).tolist())
        ],
    )


_WORK = ("hidden", "layers", "sequence", "global_batch", "devices")
"""What one would choose a layout for."""


def _mfu(asked: Evidence, step_s: Values) -> Values:
    """Model FLOPs ÷ what the devices could do in that time by their data sheets."""
    layouts = asked.layouts
    result: Values = model_flops(layouts) / (step_s * layouts.devices * asked.machines.peak_flops_per_s)
    return result


_FEATURES = ("hidden", "layers", "sequence", "global_batch", "micro_batch", "tensor", "pipeline", "data")


def nearest(known: Layouts, asked: Layouts) -> NDArray[np.int64]:
    """The known row next to each asked one, by the distance of the logarithms of sizes and degrees."""
    logs = [np.log2(np.stack([getattr(each, name) for name in _FEATURES], axis=1)) for each in (known, asked)]
    distances = ((logs[1][:, None, :] - logs[0][None, :, :]) ** 2).sum(axis=2)
    return np.asarray(distances.argmin(axis=1), dtype=np.int64)


def nearest_neighbour_s(known: Layouts, known_s: Values, asked: Layouts) -> Values:
    """The time of the nearest known row, as it was."""
    return known_s[nearest(known, asked)]


def perfect_scaling_s(known: Layouts, known_s: Values, asked: Layouts) -> Values:
    """The nearest known row's time, scaled by the FLOPs that a device has to do."""
    near = nearest(known, asked)
    share = _flops_per_device(asked) / _flops_per_device(known)[near]
    return known_s[near] * share


def amdahl_s(known: Layouts, known_s: Values, asked: Layouts) -> Values:
    """Amdahl's law with one rate and one serial share: T = F/r · (s + (1 − s)/n), fitted to all known rows.

    Amdahl 1967. Fitted by non-negative least squares on relative errors.
    """
    from scipy.optimize import nnls

    def terms(layouts: Layouts) -> Values:
        return np.stack([model_flops(layouts), _flops_per_device(layouts)], axis=1)

    weights, _ = nnls(terms(known) / known_s[:, None], np.ones(len(known_s)))
    result: Values = terms(asked) @ weights
    return result


def _flops_per_device(layouts: Layouts) -> Values:
    return model_flops(layouts) / layouts.devices


BASELINES = {"perfect_scaling": perfect_scaling_s, "amdahl": amdahl_s, "nearest_neighbour": nearest_neighbour_s}
