"""Values of two sides, repeat by repeat."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from analysis.stats import ratio_of_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from analysis.stats import Ratio

One = TypeVar("One")
Other = TypeVar("Other")


def in_both(one: Mapping[int, One], other: Mapping[int, Other]) -> list[tuple[int, One, Other]]:
    """(repeat, value, value) of every repeat that both sides have, in order."""
    return [(repeat, one[repeat], other[repeat]) for repeat in sorted(one.keys() & other.keys())]


def paired_ratio(
    numerator: Mapping[int, float | None],
    denominator: Mapping[int, float | None],
    *,
    pools: Mapping[int, int] | None = None,
) -> Ratio | None:
    """Median of numerator ÷ denominator over the repeats that both have measured; None where there is none.

    Both map repeat → value. A repeat has the same seed and the same round of the sweep on both sides, so what a round
    has in common (a warm machine, a busy neighbour) cancels out. Where a side is 0, there is no ratio. `pools`: those
    of `Pairing`; without them every repeat is a pool of its own.
    """
    pairs = [(repeat, above / below) for repeat, above, below in in_both(numerator, denominator) if above and below]
    return ratio_of_pairs(pairs, pools)
