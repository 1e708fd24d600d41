"""How often to save a checkpoint, and what failures cost, by Daly's formulas (Daly 2006, FGCS 22)."""

from __future__ import annotations

import math


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Time to compute between two checkpoints that costs least: Daly 2006 (FGCS 22).

    √(2δM)·[1 + ⅓·√(δ/2M) + ⅑·δ/2M] − δ where δ < 2M, else M.
    """
    if checkpoint_s >= 2.0 * mtbf_s:
        return mtbf_s
    part = checkpoint_s / (2.0 * mtbf_s)
    return math.sqrt(2.0 * checkpoint_s * mtbf_s) * (1.0 + math.sqrt(part) / 3.0 + part / 9.0) - checkpoint_s


def daly_stretch(every_s: float, *, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Expected wall time ÷ time to compute, for exponential failures that may strike checkpoints and restarts too.

    Daly 2006: M·e^{R/M}·(e^{(τ+δ)/M} − 1) ÷ τ. Infinite where that is beyond every number: nothing ever gets done.
    """
    try:
        return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((every_s + checkpoint_s) / mtbf_s) / every_s
    except OverflowError:
        return math.inf
