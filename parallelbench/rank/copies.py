"""Whether ranks that should hold the same parameters do: checksums, compared after each epoch outside its windows."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parallelbench.frameworks.contract import RankWorld

_HALF = 2**32


def unlike_ranks(own: int | None, world: RankWorld, *, group: int = 0) -> tuple[int, int]:
    """How many ranks have a checksum that others should have, too; how many have another one than the first of them.

    Ranks of one `group` hold copies of each other. `own`: None on ranks that hold none. A collective; the same numbers
    on every rank.
    """
    table = [0.0] * (4 * world.size)
    if own is not None:
        table[4 * world.rank : 4 * world.rank + 4] = [1.0, float(group), *map(float, divmod(own % 2**64, _HALF))]
    table = world.total(table)
    rows = [tuple(table[start : start + 4]) for start in range(0, len(table), 4)]
    return _unlike([row[1:] for row in rows if row[0]])


def _unlike(held: Sequence[tuple[float, ...]]) -> tuple[int, int]:
    """The same of group and checksum of each rank."""
    groups: dict[float, list[tuple[float, ...]]] = defaultdict(list)
    for group, *checksum in held:
        groups[group].append(tuple(checksum))
    copied = [members for members in groups.values() if len(members) > 1]
    return sum(map(len, copied)), sum(one != members[0] for members in copied for one in members)
