"""What anybody could have guessed: perfect scaling, Amdahl's law, the nearest measured layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from analysis.advisor.transformer import model_flops

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.advisor.layouts import Layouts, Values

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
