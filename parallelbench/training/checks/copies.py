"""The check that ranks which hold copies of the same parameters hold the same values, after every epoch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from parallelbench.errors import ConfigError, count_of
from parallelbench.results.tables import COPIES, SETTLED
from parallelbench.training.checks.comparability import Finding
from parallelbench.training.observers import Observer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks import RankWorld
    from parallelbench.training.observers import Row


_HALF = 2**32
_MOST_GROUPS = 2
"""What a rank holds as one group of ranks does, and as another: dense parameters and shards."""


class Copies(Observer):
    """What a rank's parameters are after each epoch: the same as others', and as at the end of the training window.

    Both by checksums. An update that comes after the window would be in no time that is published.
    """

    def __init__(self, replica: Replica, run: RunConfig, world: RankWorld) -> None:
        self._replica, self._run, self._world = replica, run, world
        self._copied()  # before an epoch is trained in vain
        self._trained = dict[int, int]()
        """Number of a group → checksum of what this rank holds as all of the group do."""
        self._evaluated = dict[int, int]()

    def epoch_starts(self, epoch: int) -> None:
        self._epoch = epoch

    def epoch_trained(self, trained: Any) -> Row:
        self._trained = self._checksums()
        return {}

    def epoch_evaluated(self, evaluated: Any) -> Row:
        self._evaluated = self._checksums()
        return {}

    def sums(self) -> list[float]:
        """Whether this rank holds something, and whether it has changed; then a table with two rows a rank."""
        table, first = [0.0] * (4 * _MOST_GROUPS * self._world.size), 4 * _MOST_GROUPS * self._world.rank
        for place, (group, checksum) in enumerate(self._evaluated.items()):
            start = first + 4 * place
            table[start : start + 4] = [1.0, float(group), *map(float, divmod(checksum % 2**64, _HALF))]
        return [float(bool(self._trained)), float(self._trained != self._evaluated), *table]

    def epoch_summed(self, total: Sequence[float]) -> Iterator[tuple[str, Row]]:
        held, changed, *table = total
        for finding in (self._unchanged(held, changed), self._alike(table)):
            if finding is not None:
                yield "checks", finding.row(self._epoch)

    def _unchanged(self, held: float, changed: float) -> Finding | None:
        """Whether training ended with its window. Where it did, that is said after the last epoch only."""
        if not (changed or self._is_last):
            return None
        if self._replica.shares_at_evaluation:
            return Finding(SETTLED, "parameters are shared before each evaluation") if self._is_last else None
        if not held:
            return Finding(SETTLED, "ranks hold nothing that others hold, too, or do not say so")
        what = f"ranks whose parameters changed after the training window, until evaluated, of {held:.0f}"
        return Finding(SETTLED, what, difference=changed, limit=0.0)

    def _alike(self, table: Sequence[float]) -> Finding | None:
        """Whether ranks hold the same copies of the same parameters."""
        if self._world.size == 1:
            return None
        held, unlike = unlike_ranks(table)
        if held < 2:
            nothing = Finding(COPIES, "no two ranks hold the same parameters, shards or stages")
            return nothing if self._is_last else None
        what = f"ranks whose copied parameters differ from the first's, of {held} that hold them"
        return Finding(COPIES, what, difference=float(unlike), limit=0.0)

    @property
    def _is_last(self) -> bool:
        return self._epoch == self._run.epochs

    def _checksums(self) -> dict[int, int]:
        held = {group: list(copied) for group, copied in self._copied().items()}
        return {group: self._world.checksum(copied) for group, copied in held.items() if copied}

    def _copied(self) -> Mapping[int, Iterable[Any]]:
        """What the replica says; `ConfigError` where that has another form than it must have."""
        copied: object = self._replica.copied()
        if isinstance(copied, Mapping) and len(copied) <= _MOST_GROUPS:
            return copied
        what = count_of(len(copied), "group") if isinstance(copied, Mapping) else type(copied).__name__
        raise ConfigError(
            f"strategy={self._run.strategy.name}: copied of {type(self._replica).__name__} returns {what}: return a "
            f"dict of {_MOST_GROUPS} groups at most, from a number that all ranks give which hold the same to the "
            "tensors that they hold, {} where no rank holds what another one does (docs/adding-a-strategy.md)"
        )


def unlike_ranks(table: Sequence[float]) -> tuple[int, int]:
    """How many ranks have a checksum that others should have, too; how many have another one than the first of them.

    `table`: two rows of four numbers a rank: whether it holds anything, the group, whose ranks hold copies of each
    other, and the halves of the checksum.
    """
    groups: dict[float, list[tuple[int, list[float]]]] = defaultdict(list)
    for start in range(0, len(table), 4):
        holds, group, *checksum = table[start : start + 4]
        if holds:
            groups[group].append((start // (4 * _MOST_GROUPS), checksum))
    copied = [members for members in groups.values() if len(members) > 1]
    unlike = {rank for members in copied for rank, checksum in members if checksum != members[0][1]}
    return len({rank for members in copied for rank, _ in members}), len(unlike)
