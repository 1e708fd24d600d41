"""Whether ranks that should hold the same parameters do: checksums, compared after each epoch outside its windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from parallelbench.rank.world import World

_PIECE = 2**18
"""Values that are summed at a time: little memory is needed besides the parameters."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HALF = 2**32


@torch.no_grad()
def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """A number of 64 bits that depends on all bits of all values and on their places."""
    total: torch.Tensor | int = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        for piece in flat.view(_WORDS[flat.element_size()]).split(_PIECE):
            # Odd factors lose no bit; sums of integers wrap around, and don't depend on their order.
            factors = torch.arange(1, 2 * len(piece), 2, device=piece.device)
            total = total * 1_000_003 + (piece.to(torch.int64) * factors).sum()
    return int(total)


def unlike_ranks(own: int | None, world: World) -> tuple[int, int]:
    """How many ranks have a checksum, and how many have another one than the first of them.

    `own`: None on ranks that hold no copies. The same numbers on every rank; a collective.
    """
    parts = torch.zeros(world.size, 3, dtype=torch.float64)
    if own is not None:
        parts[world.rank] = torch.tensor([1, *divmod(own % 2**64, _HALF)], dtype=torch.float64)
    world.sum(parts)
    held = parts[parts[:, 0] == 1]
    return len(held), int((held != held[:1]).any(dim=1).sum().item())
