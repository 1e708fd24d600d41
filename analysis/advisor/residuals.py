"""What the formulas get wrong in the same way again and again: a Gaussian process on the log errors of a fit.

Far from every measured row its correction is zero, so that extrapolations rest on the formulas alone (Rasmussen and
Williams 2006, ch. 2). Lengths and sizes are fixed, not fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from analysis.advisor.layouts import Layouts, Values
    from analysis.advisor.machines import Machines

LENGTHS = {
    "hidden": 0.5,
    "sequence": 0.5,
    "micro_batch": 0.5,
    "tensor": 0.5,
    "layers": 3.0,
    "pipeline": 1.5,
    "data": 3.0,
    "global_batch": 3.0,
}
"""Over how many doublings of each quantity errors are alike. The first four decide which kernels run.
Devices of twice the speed, in products or in memory, share little."""
SIZE = 0.1
"""Standard deviation of the formulas' log error."""
REPEAT = 0.02
"""Standard deviation of what two measurements of one layout differ by, and of what is left unexplained."""

MOST = 0.3
"""Larger log errors are taken for disturbed measurements, and count as this."""


@dataclass(frozen=True)
class Residuals:
    """The rows of a fit, and how each of them bends what is near."""

    features: Values
    triangle: Values
    """Cholesky factor of the rows' covariance."""
    weights: Values

    @classmethod
    def of(cls, layouts: Layouts, machines: Machines, log_errors: Values) -> Residuals:
        """From the log of measured ÷ predicted of a fit's own rows."""
        from scipy.linalg import cho_solve

        features = _features(layouts, machines)
        covariance = _alike(features, features) + REPEAT**2 * np.eye(len(features))
        triangle = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
        return cls(features, triangle, cho_solve((triangle, True), np.clip(log_errors, -MOST, MOST)))

    def correction(self, layouts: Layouts, machines: Machines) -> tuple[Values, Values]:
        """What to add to the log of each row's predicted time, and its standard deviation afterwards."""
        from scipy.linalg import solve_triangular

        near = _alike(_features(layouts, machines), self.features)
        explained = solve_triangular(self.triangle, near.T, lower=True, check_finite=False)
        return near @ self.weights, np.sqrt(np.maximum(SIZE**2 - (explained**2).sum(0), 0.0) + REPEAT**2)


def _features(layouts: Layouts, machines: Machines) -> Values:
    columns = [np.log2(getattr(layouts, name)) / length for name, length in LENGTHS.items()]
    columns += [np.log2(machines.flops_per_s), np.log2(machines.memory_bytes_per_s)]
    # Alternatives, not sizes: rows that differ in one of them have nothing in common.
    kinds = [10.0 * column for column in (layouts.recompute, layouts.sharded, layouts.fused_attention, layouts.fp8)]
    return np.stack([*columns, *kinds], axis=1)


def _alike(first: Values, second: Values) -> Values:
    """Covariance of the errors of two sets of rows: squared exponential."""
    squares = (first**2).sum(1)[:, None] + (second**2).sum(1) - 2.0 * first @ second.T
    result: Values = SIZE**2 * np.exp(-0.5 * np.maximum(squares, 0.0))
    return result
