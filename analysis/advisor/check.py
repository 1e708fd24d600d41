"""How wrong the advisor is, by the very formulas and parameters that rank layouts: on finished sweeps, and on files.

A split names each step's group. Each group is predicted by a fit of all other groups; the splits were fixed before
anything was fitted. Files are predicted by the fits that come with the suite. Beside it stands what anybody could have
guessed: perfect scaling, Amdahl's law, the nearest measured layout.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from analysis.advisor.fit import (
    ASSUMED_FACTOR,
    FEWEST_ERRORS,
    Learnt,
    fitted,
    half_width,
    powers,
    predictable,
)
from analysis.advisor.layouts import strategy_name
from analysis.advisor.rows import extrapolated, half_widths
from analysis.advisor.step import Phases
from analysis.advisor.step_tables import layout_keys
from analysis.advisor.strategies import forward_flop
from analysis.advisor.transformer import model_flops
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from analysis.advisor.fit import PublishedFit
    from analysis.advisor.layouts import Layouts, Values
    from analysis.advisor.machine import MachineFigures
    from analysis.advisor.step_tables import Evidence, Measured
    from analysis.advisor.sweep_evidence import MeasuredStep, SweepEvidence


def error_summary(errors: Values) -> dict[str, Any]:
    """Of relative errors, as shares."""
    return {
        "rows": len(errors),
        "mean_error": float(errors.mean()),
        "median_error": float(np.median(errors)),
        "p90_error": float(np.quantile(errors, 0.9)),
        "max_error": float(errors.max()),
    }


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
    steps: Sequence[MeasuredStep] = ()
    """Those of the suite's own models."""

    @property
    def log_errors(self) -> Values:
        """Log of measured ÷ predicted."""
        return np.log(self.measured_s / self.predicted_s)

    @property
    def errors(self) -> Values:
        """|predicted ÷ measured − 1| of each step."""
        return np.abs(self.predicted_s / self.measured_s - 1.0)

    def summary(self) -> dict[str, Any]:
        """The object that `--json` prints: shares, not per cent; seconds."""
        errors, choice, known = self.errors, self.regrets(), ~np.isnan(self.widths)
        within = np.abs(self.log_errors)[known] <= self.widths[known]
        return {
            **error_summary(errors),
            "coverage": float(within.mean()) if known.any() else None,
            "rank_correlation": self.rank_correlation(),
            "median_regret": float(np.median(choice)) if choice else None,
            "max_regret": max(choice) if choice else None,
            "choices": len(choice),
            "baselines": {name: _errors(guess, self.measured_s) for name, guess in self.baselines.items()},
            **{
                f"by_{name}": {key: error_summary(errors[places]) for key, places in grouped(values).items()}
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
        """Spearman's, of predicted and measured times: the median over works with 3 steps or more that differ."""
        from scipy.stats import spearmanr

        found = [
            float(spearmanr(self.measured_s[places], self.predicted_s[places])[0])
            for places in self._choices()
            if len(places) > 2 and np.ptp(self.measured_s[places]) > 0 < np.ptp(self.predicted_s[places])
        ]
        return float(np.median(found)) if found else None

    def _choices(self) -> list[list[int]]:
        return [places for places in grouped(self.works).values() if len(places) > 1]


def grouped(keys: Sequence[Hashable]) -> dict[Any, list[int]]:
    """Where each key stands."""
    found = defaultdict(list)
    for place, key in enumerate(keys):
        found[key].append(place)
    return dict(found)


FEWEST_STEPS = 4
"""A check fits to no fewer measured steps than this."""


def checked(evidence: SweepEvidence, figures: MachineFigures | None = None) -> dict[str, Any]:
    """The object that `--json` prints: the errors of steps left out with their strategy, and those of other splits.

    Raises `ConfigError` where too few steps can be predicted.
    """
    machine = figures or evidence.probed
    steps, refused = fittable(evidence, machine)
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
    widths = {"devices": width_beyond(steps, machine)}
    splits = {"near": "folds", "strategy": "leave_one_strategy_out", "model": "leave_one_model_out"}
    for name, split in splits.items() if len(steps) >= FEWEST_ERRORS else ():
        found = split_check(steps, machine, split)
        widths[name] = None if found is None else half_width(found.log_errors)
    far = {name: width for name, width in widths.items() if width is not None}
    fit = fitted(steps, machine)
    return Learnt(
        fit=fit,
        half_width=far.pop("near", math.log(ASSUMED_FACTOR)),
        far_half_widths=far,
        runs=[step.run for step in steps],
        powers_w=powers(steps, fit, machine),
    )


def width_beyond(steps: Sequence[MeasuredStep], machine: MachineFigures) -> float | None:
    """Half of the interval on more devices than were measured, from a fit that lacked the most; None: too few."""
    most = max(step.run.devices for step in steps)
    beyond, rest = ([step for step in steps if (step.run.devices == most) is each] for each in (True, False))
    if len(beyond) < FEWEST_ERRORS or len(rest) < FEWEST_STEPS:
        return None
    fit = fitted(rest, machine)
    return half_width(np.log([step.step_s / fit.phases(step.job(machine)).step_s for step in beyond]))


def fittable(evidence: SweepEvidence, machine: MachineFigures) -> tuple[list[MeasuredStep], list[str]]:
    """The steps that a formula knows, and why others are left out; raises `ConfigError` where they are too few."""
    steps, unknown = predictable(evidence.steps, machine)
    refused = [*evidence.left_out, *unknown]
    if len(steps) < FEWEST_STEPS:
        raise ConfigError(
            f"{len(steps)} measured configurations can be predicted, and {FEWEST_STEPS} are needed to fit to: "
            f"measure more strategies or models{'; ' + refused[0] if refused else ''}"
        )
    return steps, refused


def split_check(steps: Sequence[MeasuredStep], figures: MachineFigures, split: str) -> Judged | None:
    """Every group predicted by a fit of the others; None where too few steps remain without any group.

    Its intervals rest on the errors of the other groups alone.
    """
    asked: list[MeasuredStep] = []
    rows: list[dict[str, Any]] = []
    predicted: list[float] = []
    baselines: dict[str, list[float]] = {name: [] for name in BASELINES}
    names = sorted({step.strategy for step in steps})
    for group, places in left_out(steps, split).items():
        rest = [step for place, step in enumerate(steps) if place not in places]
        if len(rest) < FEWEST_STEPS:
            continue
        fit, those = fitted(rest, figures), [steps[place] for place in places]
        for step in those:
            phases = fit.phases(step.job(figures))
            predicted.append(phases.step_s)
            rows.append({"work": step.work, "devices": step.run.devices, "left_out": group, **vars(phases)})
        asked += those
        for name, values in guesses(*(Points.of_steps(each, rest, names) for each in (rest, those))).items():
            baselines[name] += values.tolist()
    if len(asked) < 2:
        return None
    measured_s, predicted_s = np.array([step.step_s for step in asked]), np.array(predicted)
    errors, groups = np.log(measured_s / predicted_s), np.array([row["left_out"] for row in rows])
    return Judged(
        steps=asked,
        measured_s=measured_s,
        predicted_s=predicted_s,
        widths=np.array([half_width(errors[groups != group]) for group in groups], dtype=np.float64),
        kinds={
            "model": [step.model for step in asked],
            "strategy": [step.strategy for step in asked],
            "devices": [str(step.run.devices) for step in asked],
        },
        works=[(step.work, step.run.devices, step.run.nodes) for step in asked],
        baselines={name: np.array(values) for name, values in baselines.items()},
        rows=rows,
    )


def _errors(guess: Values, measured_s: Values) -> dict[str, Any] | None:
    known = ~np.isnan(guess)
    return error_summary(np.abs(guess[known] / measured_s[known] - 1.0)) if known.any() else None


@dataclass(frozen=True, kw_only=True)
class Points:
    """Steps as anybody sees them who has no model of what they do."""

    features: Values
    """[step, feature]: logarithms of sizes and degrees; how unlike two steps are is their distance."""
    flops: Values
    """Of a step, on all devices."""
    devices: Values
    time_s: Values
    """NaN where it is asked for."""
    alone_s: Values
    """Of the same work on one device; NaN: not known."""

    @classmethod
    def of_layouts(cls, layouts: Layouts, time_s: Values) -> Points:
        """Transformers, by eight sizes and degrees."""
        names = ("hidden", "layers", "sequence", "global_batch", "micro_batch", "tensor", "pipeline", "data")
        return cls(
            features=np.log2(np.stack([getattr(layouts, name) for name in names], axis=1)),
            flops=model_flops(layouts),
            devices=layouts.devices,
            time_s=time_s,
            alone_s=np.full(len(layouts), np.nan),
        )

    @classmethod
    def of_steps(cls, steps: Sequence[MeasuredStep], known: Sequence[MeasuredStep], names: Sequence[str]) -> Points:
        """The suite's, by FLOPs and devices; a strategy of another name is as far as twice the FLOPs."""
        strategies = np.array([[step.strategy == name for name in names] for step in steps]) / np.sqrt(2.0)
        flops = np.array([forward_flop(step.run, step.layers) for step in steps])
        devices = np.array([float(step.run.devices) for step in steps])
        alone = {step.work: step.step_s for step in reversed(known) if step.run.devices == 1}
        return cls(
            features=np.concatenate([np.log2(np.stack([flops, devices], axis=1)), strategies], axis=1),
            flops=flops,
            devices=devices,
            time_s=np.array([step.step_s for step in steps]),
            alone_s=np.array([alone.get(step.work, np.nan) for step in steps]),
        )


BASELINES = ("perfect_scaling", "amdahl", "nearest_neighbour")


def guesses(known: Points, asked: Points) -> dict[str, Values]:
    """Times of the asked steps, by `BASELINES`.

    Perfect scaling: the same work's time on one device ÷ devices; without it, the nearest known step's, scaled by the
    FLOPs of a device. Amdahl's law with one rate and one serial share: T = F·(a + b/n), fitted to all known steps by
    non-negative least squares on relative errors (Amdahl 1967). Nearest neighbour: that step's time, as it was.
    """
    from scipy.optimize import nnls

    near = ((known.features[None] - asked.features[:, None]) ** 2).sum(axis=2).argmin(axis=1)
    terms, of_asked = (np.stack([each.flops, each.flops / each.devices], axis=1) for each in (known, asked))
    weights, _ = nnls(terms / known.time_s[:, None], np.ones(len(known.time_s)))
    scaled = known.time_s[near] * of_asked[:, 1] / terms[near, 1]
    perfect = np.where(np.isnan(asked.alone_s), scaled, asked.alone_s / asked.devices)
    return dict(zip(BASELINES, (perfect, of_asked @ weights, known.time_s[near]), strict=True))


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
    groups, seen = grouped([SPLITS[split](step) for step in steps]), ALWAYS_SEEN.get(split, frozenset())
    return {name: places for name, places in groups.items() if name not in seen and len(places) < len(steps)}


def judged(asked: Evidence, *, known: Evidence | Measured, fit: PublishedFit) -> Judged:
    """Predict measured steps as `advise` would; layouts that are known, by the fit that lacks their width of model."""
    layouts = asked.layouts
    held = set(layout_keys(known.layouts))
    seen = np.array([key in held for key in layout_keys(layouts)], dtype=bool)
    phases = Phases(**{each.name: np.zeros(len(layouts)) for each in fields(Phases)})
    widths = np.zeros(len(layouts))
    baselines = {name: np.full(len(layouts), np.nan) for name in BASELINES}
    like = np.array([name in fit.accelerators for name in asked.accelerators], dtype=bool)
    without = np.where(seen, layouts.hidden, 0.0)
    for width, near in sorted(set(zip(without.tolist(), like.tolist(), strict=True))):
        rows = (without == width) & (like == near)
        these, machines, rest = layouts.take(rows), asked.machines.take(rows), known.layouts.hidden != width
        fitted = fit.lacking(width) if width else fit if near else msgspec.structs.replace(fit, kernels={})
        widths[rows] = half_widths(these, fitted, per_node=machines.devices_per_node, known=like[rows])
        for name, values in vars(fitted.phases(these, machines)).items():
            getattr(phases, name)[rows] = values
        if rest.any():
            points = Points.of_layouts(known.layouts.take(rest), known.time_s[rest])
            for name, values in guesses(points, Points.of_layouts(these, asked.time_s[rows])).items():
                baselines[name][rows] = values
    outside = extrapolated(layouts, fit, known=like)
    # By the data sheets.
    mfu = model_flops(layouts) / (phases.step_s * layouts.devices * asked.machines.peak_flops_per_s)
    return Judged(
        measured_s=asked.time_s,
        predicted_s=phases.step_s,
        widths=widths,
        kinds={
            "model": asked.models,
            "strategy": [strategy_name(layouts.row(place)) for place in range(len(layouts))],
            "devices": [f"{devices:g}" for devices in layouts.devices],
        },
        works=list(zip(*(getattr(layouts, name).tolist() for name in _WORK), asked.accelerators, strict=True)),
        baselines=baselines,
        rows=[
            {"devices": float(layouts.devices[place]), **layouts.row(place), **vars(phases.at(place))}
            | {"predicted_mfu": share, "extrapolates": list(outside[place]), "also_in_evidence": bool(seen[place])}
            for place, share in enumerate(mfu.tolist())
        ],
    )


_WORK = ("hidden", "layers", "sequence", "global_batch", "devices")
"""What one would choose a layout for."""
