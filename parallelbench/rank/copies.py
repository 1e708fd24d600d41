"""Whether ranks that should hold the same parameters do: checksums, compared after each epoch outside its windows."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from parallelbench.rank.world import World

_PIECE = 2**18
"""Values that are summed at a time: little memory is needed besides the parameters."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HALF = 2**32


@torch.no_grad()
def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """A number of 64 bits that depends on all bits of all values and on their places."""
    total: torch.Tensor | int = 0
    for tensor in filter(torch.numel, tensors):  # a rank may hold no row of a small parameter
        flat = tensor.detach().contiguous().view(-1)
        for piece in flat.view(_WORDS[flat.element_size()]).split(_PIECE):
            # Odd factors lose no bit; sums of integers wrap around, and don't depend on their order.
            factors = torch.arange(1, 2 * len(piece), 2, device=piece.device)
            total = total * 1_000_003 + (piece.to(torch.int64) * factors).sum()
    return int(total)


def unlike_ranks(own: int | None, world: World, *, group: int = 0) -> tuple[int, int]:
    """How many ranks have a checksum that others should have, too; how many have another one than the first of them.

    Ranks of one `group` hold copies of each other. `own`: None on ranks that hold none. A collective; the same numbers
    on every rank.
    """
    parts = torch.zeros(world.size, 4, dtype=torch.float64)
    if own is not None:
        parts[world.rank] = torch.tensor([1, group, *divmod(own % 2**64, _HALF)], dtype=torch.float64)
    world.sum(parts)
    return _unlike([tuple(row[1:]) for row in parts.tolist() if row[0]])


def _unlike(held: Sequence[tuple[float, ...]]) -> tuple[int, int]:
    """The same of group and checksum of each rank."""
    groups: dict[float, list[tuple[float, ...]]] = defaultdict(list)
    for group, *checksum in held:
        groups[group].append(tuple(checksum))
    copied = [members for members in groups.values() if len(members) > 1]
    return sum(map(len, copied)), sum(one != members[0] for members in copied for one in members)
