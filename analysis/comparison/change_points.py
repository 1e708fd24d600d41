"""Change points of a series whose level may also drift: where it shifts for good, and by how much.

The model is a local level with shifts: value = level + noise, and the level takes a random step from each point to the
next (Harvey, "Forecasting, structural time series models and the Kalman filter", 1989; with abrupt changes: Romano et
al., "Detecting abrupt changes in the presence of local fluctuations and autocorrelated noise", J. Am. Stat. Assoc.
2022). Shifts are found one by one (forward selection), each by generalised least squares at the place that explains
most. Tests that know of noise alone take the slow drift of a machine for shifts (docs/comparisons.md has how often).
Where the repeats of points are known, a permutation test asks besides whether the repeats alone, in another order, show
a shift as large: it holds for noise of any shape, as that of a machine of two speeds.

No library: ruptures (1.1.10) has the searches, but neither drift nor a test, so that its penalty would have to be
simulated as the test is here; apache-otava (0.8.0) knows no drift either, and brings clients of databases.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from analysis.comparison.ratio import ERROR

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

FEWEST_POINTS = 9
"""Fewest points for a shift: of n points that each take one of two speeds by chance, 2·(n − 3) of 2ⁿ patterns look like
one, which are 6.3 % of those of seven, and 2.3 % of those of nine.
"""
MARGIN = 2
"""Fewest points before a shift, and behind it: a single slow one at an end is a slow day as likely as a shift."""
Margins = tuple[int, int]
MOST_POINTS = 400
"""Most points of a series that are judged, the last ones."""
DRIFTS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""Variance of the level's step ÷ variance of the noise."""
_SIMULATED = 1999
"""Series without a shift that a test is held against; the same ones at each call."""
_LIKELY = 1.92
"""How much less likely (logarithm) than the likeliest a drift may be to be allowed for: half of the quantile of χ², one
degree of freedom, at 95 %.
"""


class Shift(NamedTuple):
    """A change of the level."""

    at: int
    """Index of the first point behind it."""
    size: float
    low: float
    high: float
    """95 % interval, Student's t."""
    p: float
    """How often a series without this shift shows one as large, anywhere."""


class _Fit(NamedTuple):
    """The best further shift under one drift."""

    drift: float
    at: int
    p: float
    likelihood: float
    """Logarithm, restricted (REML), up to a constant."""


def shifts(
    values: Sequence[float] | Array,
    *,
    repeats: Sequence[Sequence[float] | Array] | None = None,
    margins: Margins = (MARGIN, MARGIN),
    drifts: Sequence[float] = DRIFTS,
    error: float = ERROR,
) -> list[Shift]:
    """The shifts of a series, in order. A p-value is the largest of all these drifts that the series itself allows,
    and of the permutation test of the points' `repeats`, whose medians the values are.

    `margins`: fewest points before the first shift, and behind the last one. `error`: how often a series without any
    may show one.
    """
    series = np.asarray(values, dtype=np.float64)
    if len(series) < FEWEST_POINTS or np.ptp(series) <= 1e-9 * max(1.0, float(np.abs(series).max())):
        return []
    places: tuple[int, ...] = ()
    found: dict[int, _Fit] = {}
    while (fit := _worst_case(series, places, margins, drifts)) is not None and fit.p <= error:
        if repeats is not None:
            fit = fit._replace(p=max(fit.p, _permuted(series, repeats, places, margins)))
            if fit.p > error:
                break
        found[fit.at] = fit
        places = tuple(sorted((*places, fit.at)))
    if not places:
        return []
    drift = max(fit.drift for fit in found.values())
    sized = zip(places, _sizes(series, drift, places), strict=True)
    return [Shift(at, *size, found[at].p) for at, size in sized]


def smallest_seen_last(
    values: Sequence[float],
    *,
    upwards: bool,
    repeats: Sequence[Sequence[float] | Array] | None = None,
    margins: Margins,
    error: float = ERROR,
) -> float | None:
    """The smallest shift of the last points, as many as `margins` asks for, that would be found, were the series as it
    is before them; None: none.
    """
    before = list(values[: -margins[1]])
    base = float(np.median(before[-FEWEST_POINTS:])) if before else 0.0
    sign = 1.0 if upwards else -1.0

    def is_found(size: float) -> bool:
        level = base + sign * size
        moved = None
        if repeats is not None:
            last = zip(values[len(before) :], repeats[len(before) :], strict=True)
            moved = [*repeats[: len(before)], *([each - value + level for each in of] for value, of in last)]
        found = shifts([*before, *[level] * margins[1]], repeats=moved, margins=margins, error=error)
        return bool(found) and found[-1].at == len(before)

    low, high = 0.0, math.log(10.0)
    if len(values) < FEWEST_POINTS or not is_found(high):
        return None
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if is_found(middle) else (middle, high)
    return high


def _worst_case(series: Array, places: tuple[int, ...], margins: Margins, drifts: Sequence[float]) -> _Fit | None:
    """The best further shift under the drift that supports it least, of those that are likely; None without room."""
    if len(series) - len(places) < 4:  # the level, this shift, and its error take a point each
        return None
    if not _model(len(series), 0.0, places, margins).further.any():
        return None
    fits = list(_fits(series, places, margins, drifts))
    likeliest = max(fit.likelihood for fit in fits)
    return max((fit for fit in fits if fit.likelihood >= likeliest - _LIKELY), key=lambda fit: fit.p)


def _fits(series: Array, places: tuple[int, ...], margins: Margins, drifts: Sequence[float]) -> Iterator[_Fit]:
    for drift in drifts:
        model = _model(len(series), drift, places, margins)
        shares, squares = model.explained(model.whiten @ series)
        at = int(shares[0].argmax())
        left = max(squares[0] * (1 - shares[0, at]), 1e-24 * squares[0], 1e-300)
        freedom = len(series) - model.base.shape[1] - 1
        likelihood = -0.5 * (freedom * math.log(left) + model.log_determinant) - math.log(model.lengths[at])
        yield _Fit(drift, at + 1, _p(shares[0, at], _null(len(series), drift, places, margins)), likelihood)


def _p(share: float, null: Array) -> float:
    """How many of these shares, ascending, are as large, counting itself."""
    as_large = len(null) - int(np.searchsorted(null, share * (1 - 1e-9)))
    return (1 + as_large) / (1 + len(null))


def _permuted(
    series: Array, repeats: Sequence[Sequence[float] | Array], places: tuple[int, ...], margins: Margins
) -> float:
    """The p-value of the best further shift if repeats between known shifts came in any order."""
    model = _model(len(series), 0.0, places, margins)
    rng = np.random.default_rng(0)
    edges = [0, *places, len(series)]
    values = np.empty((_SIMULATED, len(series)))
    for begin, end in itertools.pairwise(edges):
        sizes = [len(of) for of in repeats[begin:end]]
        runs = rng.permuted(
            np.tile(np.concatenate([np.asarray(of) for of in repeats[begin:end]]), (_SIMULATED, 1)), axis=1
        )
        at = 0
        for place, size in enumerate(sizes, begin):
            values[:, place] = np.median(runs[:, at : at + size], axis=1)
            at += size
    null = np.sort(model.explained(values)[0].max(axis=1))
    return _p(float(model.explained(series)[0].max()), null)


class _Model:
    """Generalised least squares of a series' mean and known shifts, and of one more at any place within the margins."""

    def __init__(self, points: int, drift: float, places: tuple[int, ...], margins: Margins) -> None:
        steps = np.arange(points)
        root = np.linalg.cholesky(np.eye(points) + drift * np.minimum.outer(steps, steps))
        self.whiten: Array = np.linalg.inv(root)
        """Turns noise and drift into independent noise."""
        known = np.stack([np.ones(points), *(steps >= place for place in places)], axis=1)
        whole = self.whiten @ known
        self.base: Array = np.linalg.qr(whole)[0]
        """Orthonormal basis of mean and known shifts."""
        further = self.whiten @ np.tri(points, points - 1, -1)
        further -= self.base @ (self.base.T @ further)
        lengths = np.sqrt((further**2).sum(axis=0))
        further_at = steps[1:]
        taken = (lengths < 1e-6) | (further_at < margins[0]) | (further_at > points - margins[1])
        self.lengths: Array = np.where(taken, 1.0, lengths)
        self.further: Array = np.where(taken, 0.0, further / self.lengths)
        """Of each place the unit vector of a shift there, beside what is known."""
        self.log_determinant = float(2 * np.log(np.diag(root)).sum() + np.linalg.slogdet(whole.T @ whole)[1])

    def explained(self, whitened: Array) -> tuple[Array, Array]:
        """Of whitened series, shape ([series,] points): which share of its squares a shift at each place explains,
        shape (series, points − 1), and the sum of these squares, shape (series,).
        """
        rows = np.atleast_2d(whitened)
        rows = rows - (rows @ self.base) @ self.base.T
        squares = (rows**2).sum(axis=1)
        return (rows @ self.further) ** 2 / np.maximum(squares, 1e-300)[:, None], squares


@lru_cache(maxsize=256)
def _model(points: int, drift: float, places: tuple[int, ...], margins: Margins) -> _Model:
    return _Model(points, drift, places, margins)


@lru_cache(maxsize=256)
def _null(points: int, drift: float, places: tuple[int, ...], margins: Margins) -> Array:
    """The largest share that a shift anywhere explains, of series without a further one, ascending."""
    noise = np.random.default_rng(0).standard_normal((_SIMULATED, points))
    return np.sort(_model(points, drift, places, margins).explained(noise)[0].max(axis=1))


def _sizes(series: Array, drift: float, places: tuple[int, ...]) -> list[tuple[float, float, float]]:
    """Each shift's size and its 95 % interval, of all together."""
    from scipy.special import stdtrit

    points = len(series)
    steps = np.arange(points)
    whiten = _model(points, drift, places, (1, 1)).whiten
    whole = whiten @ np.stack([np.ones(points), *(steps >= place for place in places)], axis=1)
    sizes, _, _, _ = np.linalg.lstsq(whole, whiten @ series, rcond=None)
    freedom = points - len(sizes)
    variance = ((whiten @ series - whole @ sizes) ** 2).sum() / freedom
    errors = np.sqrt(variance * np.diag(np.linalg.inv(whole.T @ whole))) * stdtrit(freedom, 1 - ERROR / 2)
    return [(float(size), float(size - e), float(size + e)) for size, e in zip(sizes[1:], errors[1:], strict=True)]
