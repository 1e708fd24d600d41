"""Fits the parameters to measured steps, on log time, from their priors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.advisor.parameters import PARAMETERS, Fitted
from analysis.advisor.step_model import step_time

if TYPE_CHECKING:
    from analysis.advisor.layouts import Layouts, Values
    from analysis.advisor.machines import Machines

NOISE = 0.05
"""Standard deviation of log time that is taken for granted: what a measurement and these formulas are good for."""
_STEP = 1e-4
"""Step of the numerical derivatives, of a parameter's logarithm."""


def fit(layouts: Layouts, machines: Machines, measured_s: Values) -> Fitted:
    """The parameters that are most probable: measurements and priors weigh by their variances.

    Errors count by a soft absolute value beyond `NOISE`, so that a few disturbed runs don't bend everything.
    """
    from scipy.optimize import least_squares

    spreads = np.array([each.spread for each in PARAMETERS])
    log_priors = np.log([each.prior for each in PARAMETERS])
    log_measured = np.log(measured_s)
    most = (np.log([each.most for each in PARAMETERS]) - log_priors) / spreads
    with np.errstate(divide="ignore"):
        least = (np.log([each.least for each in PARAMETERS]) - log_priors) / spreads
    weights = np.sqrt(_weights(layouts))

    def errors(units: Values) -> Values:
        """One row of errors per row of parameters, in units of their prior's spread."""
        logs = np.atleast_2d(log_priors + units * spreads)
        columns = {each.name: np.exp(logs[:, [i]]) for i, each in enumerate(PARAMETERS)}
        off: Values = (np.log(step_time(layouts, machines, columns).step_s) - log_measured) / NOISE
        together: Values = np.concatenate([weights * _softened(off), np.atleast_2d(units)], axis=1)
        return together

    def derivatives(units: Values) -> Values:
        every = errors(np.concatenate([units[None], units + _STEP * np.eye(len(units))]))
        result: Values = (every[1:] - every[0]).T / _STEP
        return result

    found: Any = least_squares(
        lambda units: errors(units)[0],
        np.zeros(len(PARAMETERS)),
        jac=derivatives,
        bounds=(least, most),
        ftol=1e-5,
        xtol=1e-5,
    )
    values = np.exp(log_priors + found.x * spreads)
    return {each.name: float(value) for each, value in zip(PARAMETERS, values, strict=True)}


def _weights(layouts: Layouts) -> Values:
    """How much each row counts.

    Rows of equal kernels (width, sequence, micro-batch, tensor group) err alike, whatever else differs: measured errors
    differ by 1 % within such rows and by 8 % between them. So n of them count as one.
    """
    columns = (layouts.hidden, layouts.sequence, layouts.micro_batch, layouts.tensor)
    _, group, counts = np.unique(np.stack(columns), axis=1, return_inverse=True, return_counts=True)
    result: Values = 1.0 / counts[np.ravel(group)]
    return result


def _softened(off: Values) -> Values:
    """Errors whose squares grow like 2·|error| once beyond 1."""
    result: Values = np.sign(off) * np.sqrt(2.0 * (np.sqrt(1.0 + off**2) - 1.0))
    return result
