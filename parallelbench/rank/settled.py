"""What a rank's parameters are after each epoch: the same as others', and as at the end of the training window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError
from parallelbench.rank.copies import unlike_ranks
from parallelbench.rank.findings import Finding
from parallelbench.store.check_tables import COPIES, SETTLED

if TYPE_CHECKING:
    from parallelbench.frameworks.contract import RankWorld
    from parallelbench.spec.replica import Replica


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
