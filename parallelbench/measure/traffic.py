"""Communication: the bytes that a rank sends to others, by what they mean.

Collectives of libraries count by their formulas; `ring_ddp` counts what its own ring sends.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from collections.abc import Iterator


Kind = Literal["gradient", "activation", "parameter"]
"""gradient: of parameters. activation: values between layers, and their gradients. parameter: weights and buffers."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass
class Traffic:
    """Bytes sent by one rank since the last `take`, by kind.

    What the suite sends itself is counted as it is sent. What a library's collective sends is counted as the textbook
    algorithm that moves the fewest bytes per rank, with n ranks and a message of M bytes (Thakur et al. 2005; Patarasuk
    and Yuan 2009): the libraries choose their algorithms by size and topology and don't say which.
    """

    gradient: float = 0.0
    activation: float = 0.0
    parameter: float = 0.0

    def send(self, kind: Kind, size_bytes: float) -> None:
        """A message to one other rank."""
        setattr(self, kind, getattr(self, kind) + size_bytes)

    def all_reduce(self, kind: Kind, size_bytes: float, ranks: int) -> None:
        """A sum of `size_bytes` that all `ranks` receive: 2(n−1)/n · M."""
        self.send(kind, 2 * (ranks - 1) / ranks * size_bytes)

    def all_gather(self, kind: Kind, size_bytes: float, ranks: int) -> None:
        """`size_bytes` in total; every rank holds an n-th and receives the rest: (n−1)/n · M."""
        self.send(kind, (ranks - 1) / ranks * size_bytes)

    def reduce_scatter(self, kind: Kind, size_bytes: float, ranks: int) -> None:
        """A sum of `size_bytes`, of which every rank receives an n-th: (n−1)/n · M."""
        self.send(kind, (ranks - 1) / ranks * size_bytes)

    @contextmanager
    def apart(self) -> Iterator[Traffic]:
        """Count what is sent meanwhile in what this yields, once it ends, and not here."""
        before, sent = replace(self), Traffic()
        yield sent
        for kind in KINDS:
            sent.send(kind, getattr(self, kind) - getattr(before, kind))
            setattr(self, kind, getattr(before, kind))

    def add(self, sent: Traffic) -> None:
        """What was counted apart."""
        for kind in KINDS:
            self.send(kind, getattr(sent, kind))

    def take(self) -> dict[str, int]:
        """Return the columns of `ranks` and reset the counts to zero."""
        columns = {f"{kind}_bytes_sent": round(getattr(self, kind)) for kind in KINDS}
        self.gradient = self.activation = self.parameter = 0.0
        return columns


class Sent(NamedTuple):
    """What a rank has sent in an epoch."""

    step_bytes: float
    """Per step, as the strategy reports it."""
    exchanges: int
    """Collectives, sends and receives that it began in the step with fewest; 0 where they can't be counted."""
