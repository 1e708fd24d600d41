"""Prediction intervals by split conformal prediction: as wide as the errors on rows that a fit had not seen.

Vovk et al. 2005; Lei et al. 2018 (JASA 113). With n errors the quantile is the ⌈(n+1)·share⌉-th smallest, which covers
at least the share where new rows are like these. They are not where devices are extrapolated: such rows get the errors
of fits that had not seen the larger device counts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from analysis.advisor.layouts import Values

SHARE = 0.9
"""Of the intervals that should hold the measurement."""
FEWEST = 9
"""Fewer errors than this give no interval at 90 %."""


def half_width(errors: Values, share: float = SHARE) -> float | None:
    """Half the interval of log time, from log errors on unseen rows; None where they are too few."""
    place = math.ceil((len(errors) + 1) * share)
    if place > len(errors):
        return None
    return float(np.sort(np.abs(errors))[place - 1])
