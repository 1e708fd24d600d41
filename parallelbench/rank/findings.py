"""What the checks during and after training find, as rows of the table `checks`."""

from __future__ import annotations

from typing import Any, NamedTuple


class Finding(NamedTuple):
    """One thing that was checked, or was not."""

    check: str
    detail: str
    """What was compared, or why nothing was."""
    step: int | None = None
    """Counts from 1 over all epochs; the closing check's follow the last of training."""
    difference: float | None = None
    limit: float | None = None

    def row(self, epoch: int) -> dict[str, Any]:
        """The row after an epoch. What was not compared has not passed, and has not failed."""
        # A NaN compares as False, so it fails.
        passed = None if self.limit is None or self.difference is None else self.difference <= self.limit
        return {"epoch": epoch, **self._asdict(), "passed": passed}
