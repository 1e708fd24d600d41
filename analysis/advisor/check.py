"""How wrong the advisor is: on finished sweeps, and on published steps, of which its fit has seen none.

A split names each step's group. Each group is predicted by a fit of all other groups; the splits were fixed before
anything was fitted. Beside it stands what anybody could have guessed: perfect scaling, Amdahl's law, the nearest
measured layout.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.advisor.fit import ASSUMED_FACTOR, FEWEST_ERRORS, Learnt, fitted, half_width, learnt, predictable
from analysis.advisor.predictor import FOLDS, beyond, folds, predicted
from analysis.advisor.transformer import model_flops
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from analysis.advisor.layouts import Layouts, Values
    from analysis.advisor.machine import MachineFigures
    from analysis.advisor.measurements import Evidence
    from analysis.advisor.predictor import Predictions
    from analysis.advisor.step import Phases
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
    phases: list[Phases] = []
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
class Accuracy:
    """Predictions beside measurements."""

    asked: Evidence
    models: list[str]
    predictions: Predictions
    baselines: dict[str, Errors]
    fitted_rows: int
    """Rows of the evidence."""

    @property
    def errors(self) -> Values:
        """|predicted ÷ measured − 1| of each row."""
        return np.abs(self.predictions.phases.step_s / self.asked.time_s - 1.0)

    def summary(self) -> dict[str, Any]:
        """The object that `--json` prints: shares, not per cent; seconds."""
        within = (self.asked.time_s >= self.predictions.low_s) & (self.asked.time_s <= self.predictions.high_s)
        known = ~np.isnan(self.predictions.low_s)
        choice = regrets(self)
        return {
            **Errors.of(self.errors).as_dict(),
            "coverage": float(within[known].mean()) if known.any() else None,
            "rank_correlation": rank_correlation(self),
            "median_regret": float(np.median(choice)) if len(choice) else None,
            "max_regret": float(choice.max()) if len(choice) else None,
            "choices": len(choice),
            "fitted_rows": self.fitted_rows,
            "baselines": {name: errors.as_dict() for name, errors in self.baselines.items()},
            **{f"by_{name}": found for name, found in self.groups().items()},
            "predictions": [self.row(i) for i in range(len(self.models))],
        }

    def groups(self) -> dict[str, dict[str, dict[str, float]]]:
        """The errors by model, by strategy, by devices."""
        layouts = self.asked.layouts
        keys: dict[str, list[str]] = {
            "model": self.models,
            "strategy": [strategy_of(layouts, i) for i in range(len(layouts))],
            "devices": [f"{devices:g}" for devices in layouts.devices],
        }
        return {
            name: {value: Errors.of(self.errors[rows]).as_dict() for value, rows in grouped(values).items()}
            for name, values in keys.items()
        }

    def row(self, index: int) -> dict[str, Any]:
        """One row with all that it rests on."""
        phases, low = self.predictions.phases, self.predictions.low_s[index]
        return {
            "model": self.models[index],
            "devices": float(self.asked.layouts.devices[index]),
            **self.asked.layouts.row(index),
            "measured_s": float(self.asked.time_s[index]),
            "predicted_s": float(phases.step_s[index]),
            "low_s": None if np.isnan(low) else float(low),
            "high_s": None if np.isnan(low) else float(self.predictions.high_s[index]),
            "error": float(self.errors[index]),
            "predicted_mfu": float(_mfu(self.asked, phases.step_s)[index]),
            **{field.name: float(getattr(phases, field.name)[index]) for field in fields(phases)},
            "extrapolates": self.predictions.extrapolates[index],
            "also_in_evidence": bool(self.predictions.in_evidence[index]),
        }


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


def judged(
    known: Evidence,
    asked: Evidence,
    models: Sequence[str],
    *,
    largest_fitted: int | None = None,
) -> Accuracy:
    """Predict the asked rows from the known ones; with `largest_fitted`, those on more devices from those on as many.

    No row is predicted by a fit that has seen it. Raises `ConfigError` where a side has no rows.
    """
    rows = np.ones(len(models), dtype=bool)
    if largest_fitted is not None:
        known = known.take(~beyond(known.layouts, largest_fitted))
        rows = beyond(asked.layouts, largest_fitted)
    if not rows.any() or not len(known.layouts):
        raise ConfigError(
            f"fitting up to {largest_fitted} devices leaves {len(known.layouts)} rows to fit, {rows.sum()} to judge: "
            "choose a number between the fewest devices and the most"
        )
    chosen = asked.take(rows)
    predictions = predicted(known, chosen.layouts, chosen.machines)
    return Accuracy(
        asked=chosen,
        models=[model for model, row in zip(models, rows, strict=True) if row],
        predictions=predictions,
        baselines=_baselines(known, chosen, predictions.in_evidence),
        fitted_rows=len(known.layouts),
    )


def _mfu(asked: Evidence, step_s: Values) -> Values:
    """Model FLOPs ÷ what the devices could do in that time by their data sheets."""
    layouts = asked.layouts
    result: Values = model_flops(layouts) / (step_s * layouts.devices * asked.machines.peak_flops_per_s)
    return result


def _baselines(known: Evidence, asked: Evidence, also_known: NDArray[np.bool_]) -> dict[str, Errors]:
    """The baselines' errors; they see no more than the fits do."""
    of_known, of_asked = folds(known.layouts), folds(asked.layouts)
    found = {}
    for name, guess in BASELINES.items():
        guessed = np.zeros(len(asked.layouts))
        for fold in range(-1, FOLDS):
            rows = ~also_known if fold < 0 else also_known & (of_asked == fold)
            rest = known.take(of_known != fold)
            if rows.any() and len(rest.layouts):
                guessed[rows] = guess(rest.layouts, rest.time_s, asked.layouts.take(rows))
        found[name] = Errors.of(np.abs(guessed / asked.time_s - 1.0))
    return found


def strategy_of(layouts: Layouts, row: int) -> str:
    """The kinds of parallelism of a row, in a word: dp, tp, pp, fsdp, and their products."""
    one = layouts.take(np.array([row]))
    data = "fsdp" if one.sharded[0] else "dp"
    degrees = ((one.tensor[0], "tp"), (one.data[0], data), (one.pipeline[0], "pp"))
    return "×".join(word for degree, word in degrees if degree > 1) or "single"


def grouped(keys: Sequence[Hashable]) -> dict[Any, NDArray[np.int64]]:
    """Where each key stands."""
    found = defaultdict(list)
    for place, key in enumerate(keys):
        found[key].append(place)
    return {key: np.array(places) for key, places in found.items()}


def _same_work(accuracy: Accuracy) -> list[NDArray[np.int64]]:
    """Rows that do the same work on as many devices, so that one would choose among them: two or more of each."""
    layouts = accuracy.asked.layouts
    columns = (layouts.hidden, layouts.layers, layouts.sequence, layouts.global_batch, layouts.devices)
    found = grouped(list(zip(*(column.tolist() for column in columns), strict=True)))
    return [rows for rows in found.values() if len(rows) > 1]


def regrets(accuracy: Accuracy) -> Values:
    """How much slower the layout with the best prediction is than the fastest one, per piece of work: a share."""
    times, predicted_s = accuracy.asked.time_s, accuracy.predictions.phases.step_s
    return np.array([times[r[predicted_s[r].argmin()]] / times[r].min() - 1.0 for r in _same_work(accuracy)])


def rank_correlation(accuracy: Accuracy) -> float | None:
    """Spearman's correlation of predicted and measured times, the median over pieces of work of 3 layouts or more."""
    from scipy.stats import spearmanr

    times, predicted_s = accuracy.asked.time_s, accuracy.predictions.phases.step_s
    found = [float(spearmanr(times[r], predicted_s[r])[0]) for r in _same_work(accuracy) if len(r) > 2]
    return float(np.median(found)) if found else None


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
