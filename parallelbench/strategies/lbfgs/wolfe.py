"""A line search for the strong Wolfe conditions, as in `torch.optim.LBFGS`, but without vectors.

Nocedal and Wright, Numerical Optimization (2nd edition), Algorithms 3.5 and 3.6, with the constants and safeguards of
minFunc, as in torch. It uses losses and directional derivatives only, so the vectors may be anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

Search = Generator[float, tuple[float, float], float]
"""Yields step lengths to try, is sent the loss and the slope there, returns the step length to take."""

DECREASE, CURVATURE = 1e-4, 0.9
TOLERANCE_CHANGE = 1e-9


@dataclass(frozen=True)
class Point:
    """A point on the line: step length, loss, and derivative of the loss along the line."""

    t: float
    loss: float
    slope: float


def strong_wolfe(start: Point, first: float, *, direction_max: float, evaluations: int) -> Search:
    """Search from `start` (t = 0) with the step length `first`.

    `direction_max` is the direction's largest |component|. At most `evaluations` + 1 points are tried; where none
    satisfies both conditions, the lowest end of the last bracket is taken.
    """
    previous, current = start, Point(first, *(yield first))
    for tried in range(evaluations):
        if _too_high(current, start) or (tried > 1 and current.loss >= previous.loss):
            return (yield from _zoom(start, [previous, current], direction_max, evaluations - tried))
        if abs(current.slope) <= -CURVATURE * start.slope:
            return current.t
        if current.slope >= 0:
            return (yield from _zoom(start, [previous, current], direction_max, evaluations - tried))
        bounds = (current.t + 0.01 * (current.t - previous.t), current.t * 10)
        t = cubic_minimum(previous, current, bounds)
        previous, current = current, Point(t, *(yield t))
    return start.t if start.loss <= current.loss else current.t


def _zoom(start: Point, bracket: list[Point], direction_max: float, evaluations: int) -> Search:
    """Narrow a bracket that holds a point satisfying the conditions."""
    low = 0 if bracket[0].loss <= bracket[1].loss else 1
    stuck = False
    for _ in range(evaluations):
        if abs(bracket[1].t - bracket[0].t) * direction_max < TOLERANCE_CHANGE:
            break
        t, stuck = _trial(bracket, stuck)
        new = Point(t, *(yield t))
        if _too_high(new, start) or new.loss >= bracket[low].loss:
            bracket[1 - low] = new
            low = 0 if bracket[0].loss <= bracket[1].loss else 1
            continue
        if abs(new.slope) <= -CURVATURE * start.slope:
            return new.t
        if new.slope * (bracket[1 - low].t - bracket[low].t) >= 0:
            bracket[1 - low] = bracket[low]
        bracket[low] = new
    return bracket[low].t


def _too_high(point: Point, start: Point) -> bool:
    """The first condition fails: the loss has not decreased enough."""
    return point.loss > start.loss + DECREASE * point.t * start.slope


def _trial(bracket: list[Point], stuck: bool) -> tuple[float, bool]:
    """The cubic's minimum; moved inwards by a tenth of the bracket if it is at an end, or near one a second time."""
    t = cubic_minimum(bracket[0], bracket[1])
    lower, upper = sorted(point.t for point in bracket)
    margin = 0.1 * (upper - lower)
    if min(upper - t, t - lower) >= margin:
        return t, False
    if not (stuck or t >= upper or t <= lower):
        return t, True
    return (upper - margin if abs(t - upper) < abs(t - lower) else lower + margin), False


def cubic_minimum(a: Point, b: Point, bounds: tuple[float, float] | None = None) -> float:
    """Minimum, within bounds, of the cubic through both points with both slopes; the middle where it has none.

    Bounds are the points themselves where none are given. Nocedal and Wright, equation 3.59.
    """
    lower, upper = bounds or (min(a.t, b.t), max(a.t, b.t))
    left, right = (a, b) if a.t <= b.t else (b, a)
    d1 = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.t - b.t)
    square = d1**2 - a.slope * b.slope
    if not square >= 0:
        return (lower + upper) / 2
    d2 = math.sqrt(square)
    denominator = right.slope - left.slope + 2 * d2
    if denominator == 0:
        return (lower + upper) / 2
    return min(max(right.t - (right.t - left.t) * ((right.slope + d2 - d1) / denominator), lower), upper)
