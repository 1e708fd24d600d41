"""How wrong predictions are on measured steps that their fit has not seen, and what anybody could have guessed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.advisor.baselines import BASELINES
from analysis.advisor.splits import FOLDS, beyond, folds
from analysis.advisor.transformer import model_flops
from analysis.advisor.unseen import predicted
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from analysis.advisor.evidence import Evidence
    from analysis.advisor.layouts import Layouts, Values
    from analysis.advisor.unseen import Predictions


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
