"""Numbers as people read them. What was not measured is a dash, never 0."""

from __future__ import annotations

from math import floor, isfinite, log10
from typing import TYPE_CHECKING, Any

from parallelbench.errors import count_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


MISSING = "–"
_THIN = "\u202f"
MIB = 2**20


def number(value: float | None, *, digits: int = 3) -> str:
    """Three significant digits, all digits before the point: 0.0123, 1.23, 12.3, 123, 12,345; ∞, NaN."""
    if value is None:
        return MISSING
    if not isfinite(value):
        return fixed(value, 0)
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return fixed(value, min(9, max(0, digits - 1 - exponent)))


def fixed(value: float, digits: int) -> str:
    """With so many digits after the point: 12,345.60; ∞ and NaN, which a quotient or an overflow may be."""
    return f"{value:,.{digits}f}".replace("nan", "NaN").replace("-inf", "−∞").replace("inf", "∞")


def seconds(value: float | None) -> str:
    """A duration with its unit."""
    return MISSING if value is None else f"{number(value)}{_THIN}s"


def percent(share: float | None) -> str:
    """A share from 0 to 1 in per cent, one digit after the point; of a smaller one the first digit that is not 0."""
    if share is None:
        return MISSING
    digits = 1 if not share or not isfinite(share) else max(1, -floor(log10(abs(100 * share))))
    return f"{fixed(100 * share, min(digits, 6))}{_THIN}%"


def accuracy(share: float | None) -> str:
    """An accuracy that somebody chose, with all its digits: "95 %", "99.95 %"."""
    return MISSING if share is None else f"{100 * share:.6g}{_THIN}%"


def mebibytes(size_bytes: float | None) -> str:
    """Bytes as MiB, without the unit."""
    return MISSING if size_bytes is None else fixed(size_bytes / MIB, 0 if size_bytes >= 100 * MIB else 1)


def sent(size_bytes: float | None) -> str:
    """Bytes as MiB without the unit, to three digits however few they are; what sends nothing has 0."""
    return MISSING if size_bytes is None else number(size_bytes / MIB) if size_bytes else "0"


def scientific(value: float | None) -> str:
    """1.2e-09."""
    return MISSING if value is None else f"{value:.1e}" if isfinite(value) else fixed(value, 0)


def mean_and_max(mean: float | None, largest: float | None) -> str:
    """The mean, and the largest in brackets: "0.48 (2)"."""
    return MISSING if mean is None else f"{fixed(mean, 2)} ({largest})"


def parity(passed: bool | None) -> str:
    """The result of a run's parity check."""
    return "not checked" if passed is None else "passed" if passed else "failed"


def to_add(n: int, *, after: int | None = None) -> str:
    """ "add 3 repeats per side, in turn (sweep.repeats=6)": the unit of all advice on how much to measure.

    `after`: the highest repeat there is. Those that don't count are not measured again, so new ones come after them.
    """
    command = "" if after is None else f" (sweep.repeats={after + 1 + n})"
    return f"add {count_of(n, 'repeat')} per side, in turn{command}"


def ratio(row: Mapping[str, Any], name: str) -> str:
    """A ratio of a row of `summary`, with its interval, which is in the columns `_low` and `_high` of its name."""
    return interval(row[name], row[f"{name}_low"], row[f"{name}_high"])


def interval(value: float | None, low: float | None, high: float | None, *, digits: int = 2) -> str:
    """A value with its interval, where there are such: "1.43 (1.38–1.49)"."""
    if value is None:
        return MISSING
    if low is None or high is None:
        return estimate(value, low, high, digits=digits)
    return f"{estimate(value, low, high, digits=digits)} ({ends(low, high, digits=digits)})"


def estimate(value: float, low: float | None, high: float | None, *, digits: int = 2) -> str:
    """A value with as many digits as its interval has, where there is one: "1.004" of 1.002 to 1.006."""
    if low is None or high is None:
        return fixed(value, digits + (0 < value < _SMALL))
    return fixed(value, _telling(digits, low, high))


def ends(low: float, high: float, *, digits: int = 2) -> str:
    """ "1.38–1.49"; of an interval so wide that its ends say nothing, how wide it is."""
    return _WIDE if is_wide(low, high) else span(low, high, digits=digits)


def is_wide(low: float, high: float) -> bool:
    """Whether the ends of a ratio's interval say nothing."""
    return high > WIDEST * max(low, 0.0)


def interval_of_95(low: float, high: float) -> str:
    """ "95 % interval 1.38–1.49", or how wide it is."""
    return f"95 % {_WIDE}" if is_wide(low, high) else f"95 % interval {span(low, high)}"


def span(low: float, high: float, *, digits: int = 2) -> str:
    """ "1.38–1.49"; ends of 10 and more have three digits in all. Ends near 1 have as many as tell them from 1."""
    digits = _telling(digits, low, high)
    return "–".join(number(end) if end >= 10 else fixed(end, digits) for end in (low, high))


_MOST_DIGITS = 6
_SMALL = 0.1
"""Below it, a ratio has a third digit after the point."""
WIDEST = 100
"""Factor from one end of an interval to the other, beyond which its ends say nothing."""
_WIDE = f"interval wider than a factor of {WIDEST}"


def _telling(digits: int, *ends: float) -> int:
    """Digits after the point that show on which side of 1 each end lies, because the verdict depends on it; one more
    where all are small.
    """
    digits += 0 < max(ends) < _SMALL
    enough = (n for n in range(digits, _MOST_DIGITS) if all(end == 1 or f"{end:.{n}f}" != f"{1:.{n}f}" for end in ends))
    return next(enough, _MOST_DIGITS)


def sentence(words: str) -> str:
    """ "the sides differ" → "The sides differ."."""
    return f"{words[:1].upper()}{words[1:]}."


def listed(items: Sequence[str], *, most: int = 3, sep: str = ", ") -> str:
    """ "a", "a and b", "a, b and c", "a, b, c and 4 more"; with semicolons where an item has commas."""
    sep = "; " if any(sep in item for item in items) else sep
    shown = [*items[:most], f"{len(items) - most} more"] if len(items) > most else list(items)
    last = " and " if sep == ", " else f"{sep}and "
    return last.join([sep.join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


DISTURBED_MARK = "*"
"""After the times of runs that others disturbed."""
