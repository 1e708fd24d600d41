"""What is observed beside the windows of an epoch: equal parameters, losses of steps, the metric, experts' balance."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from parallelbench.errors import ConfigError, raised_at
from parallelbench.results.tables import COPIES, EXPERT_BALANCE, METRIC, SETTLED
from parallelbench.training.checks.likeness import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks import RankWorld
    from parallelbench.world.numerics import Sums


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


class Settled:
    """One rank's checksums of its parameters, taken outside of all windows; none where nothing is checked."""

    def __init__(self, replica: Replica, world: RankWorld, *, checks: bool) -> None:
        self._replica, self._world, self._checks = replica, world, checks
        self._trained: int | None = None
        self._evaluated: int | None = None

    def window_ended(self) -> None:
        """Remember the parameters at the end of the training window."""
        self._trained = self._checksum()

    def evaluated(self) -> None:
        """Remember them after the evaluation."""
        self._evaluated = self._checksum()

    def findings(self, *, is_last: bool) -> list[Finding]:
        """Compare both, and those of other ranks. A collective.

        `is_last`: it was the last epoch, after which it is said what was checked, or could not be.
        """
        return [*self._unchanged(is_last=is_last), *self._copies(is_last=is_last)] if self._checks else []

    def _checksum(self) -> int | None:
        copied = list(self._replica.copied()) if self._checks else []
        if (wrong := next((each for each in copied if not hasattr(each, "shape")), None)) is not None:
            raise ConfigError(
                f"{type(self._replica).__name__}.copied returns {type(wrong).__name__}, not tensors: return the "
                "parameters themselves, not their names, or () where no rank holds what another one does"
            )
        return self._world.checksum(copied) if copied else None

    def _unchanged(self, *, is_last: bool) -> list[Finding]:
        """Whether training ended with its window: an update that comes later is in no time that is published."""
        if self._replica.shares_at_evaluation:
            return [Finding(SETTLED, "parameters are shared before each evaluation")] if is_last else []
        held, changed = self._world.total([float(self._trained is not None), float(self._trained != self._evaluated)])
        if not held:
            return [Finding(SETTLED, "ranks hold nothing that others hold, too, or do not say so")] if is_last else []
        if not (changed or is_last):
            return []
        what = f"ranks whose parameters changed after the training window, until evaluated, of {held:.0f}"
        return [Finding(SETTLED, what, difference=changed, limit=0.0)]

    def _copies(self, *, is_last: bool) -> list[Finding]:
        """Compare the copies that ranks hold of the same parameters; none without copies."""
        if self._world.size == 1:
            return []
        held, unlike = unlike_ranks(self._evaluated, self._world, group=self._replica.copy_group)
        if held < 2:
            nothing = Finding(COPIES, "no two ranks hold the same parameters, shards or stages")
            return [nothing] if is_last else []
        what = f"ranks whose copied parameters differ from the first's, of {held} that hold them"
        return [Finding(COPIES, what, difference=float(unlike), limit=0.0)]


BLOCK = 64
"""Steps of a run whose losses have a row each, and steps of a later row: within about as many, right runs drift apart.
"""


def by_step(total: Sums | None, steps: int) -> list[float]:
    """The summed loss of each step of an epoch on this rank: zeros where it owns none, NaN where steps can't be told
    apart. Waits for the device.
    """
    if total is None:
        return [0.0] * steps
    losses: list[float] = total.losses().tolist()
    pieces, rest = divmod(len(losses), steps)
    return [math.nan] * steps if rest else [math.fsum(losses[i * pieces : (i + 1) * pieces]) for i in range(steps)]


def rows_of(losses: Sequence[float], *, before: int, samples: int) -> Iterator[dict[str, Any]]:
    """The columns `step`, `steps` and `train_loss` of an epoch; none where a loss is not finite.

    `losses`: summed over all ranks, of each step. `before`: steps of earlier epochs. `samples`: of a step.
    """
    if not all(map(math.isfinite, losses)):
        return
    first = 0
    while first < len(losses):
        end = first + 1 if before + first < BLOCK else min(len(losses), (first // BLOCK + 1) * BLOCK)
        mean = math.fsum(losses[first:end]) / (end - first) / samples
        yield {"step": first + 1, "steps": end - first, "train_loss": mean}
        first = end


def metric_sums(evaluated: Any, run: RunConfig) -> list[float]:
    """What a rank's evaluation gives besides summed loss and correct predictions; zeros where it owns no sample.

    Raises `ConfigError` where a replica leaves them out.
    """
    size = run.metric_size
    if not size or evaluated is None:
        return [0.0] * size
    if evaluated.shape != (2 + size,):
        raise ConfigError(
            f"metric={run.metric.name} with strategy={run.strategy.name} is refused: evaluate of its replica returns "
            f"{math.prod(evaluated.shape)} sums, not 2 and the metric's {size}: return those of numerics_of(run, "
            "device_type).sums(loss, logits, labels), without gradients, or choose metric=none"
        )
    sums: list[float] = evaluated[2:].tolist()
    return sums


def metric_value(run: RunConfig, sums: Sequence[float]) -> float | None:
    """The metric after these sums over all ranks; None where there is none, or they or it are no finite numbers."""
    if not sums or not all(map(math.isfinite, sums)):
        return None
    try:
        found = float(run.metric.value(sums))
    except (Exception, SystemExit) as error:  # a user's metric may raise anything
        raise ConfigError(
            f"metric={run.metric.name}: {type(run.metric).__qualname__}.value fails: {raised_at(error)}"
        ) from None
    return found if math.isfinite(found) else None


def metric_column(run: RunConfig, sums: Sequence[float]) -> dict[str, float | None]:
    """The column of `epochs`, from the sums over all ranks."""
    (column,) = METRIC
    return {column.name: metric_value(run, sums)}


class ExpertBalance:
    """One rank's counts of an epoch. For models without experts nothing is asked, kept or sent."""

    def __init__(self, replica: Replica, run: RunConfig) -> None:
        self._replica = replica
        self._blocks, self._experts = run.model.routed_blocks, run.model.routed_experts
        self.counts: list[float] = []
        """Block by block, of each expert; zeros of blocks that are on other ranks."""

    def take(self) -> None:
        """Those since the last call; waits for the devices."""
        if not self._blocks:
            return
        taken = self._replica.take_expert_tokens()
        nothing = [0] * self._experts
        self.counts = [float(count) for block in range(self._blocks) for count in taken.get(block, nothing)]

    def column(self, summed: Sequence[float]) -> dict[str, float | None]:
        """The column of `epochs`, from the sum of `counts` over all ranks.

        Ranks that compute the same tokens, as those of tensor parallelism, count them once each: the ratio stays.
        """
        size = self._experts
        blocks = [summed[first : first + size] for first in range(0, len(summed), size)] if size else []
        ratios = [max(counts) * size / sum(counts) for counts in blocks if sum(counts)]
        (column,) = EXPERT_BALANCE
        return {column.name: sum(ratios) / len(ratios) if ratios else None}
