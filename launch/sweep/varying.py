"""What tells the runs of a sweep apart, beside what their names and columns say: the overrides in which they differ."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from parallelbench.store.folder import RunFolder

_TOLD = ("data", "model", "strategy", "devices", "repeat")
"""Parts of a run's name."""
_APART = ("results", "launcher", "site", "sweep", "tune", "faithful")
"""Of no experiment: the same run may be asked for with others."""


def varying(runs: Sequence[Sequence[str]], *, besides: Collection[str] = ()) -> list[str]:
    """Of the overrides of each run those whose keys don't have the same value in all, in a line; without `besides`."""
    found = Counter(override for overrides in runs for override in set(overrides))
    keys = {override.partition("=")[0] for override, count in found.items() if count < len(runs)}
    keys = {key for key in keys if key not in (*_TOLD, *besides) and key.partition(".")[0] not in _APART}
    # Quotes are for Hydra; of very many runs few differ in their own way, and each way is looked at once.
    shown = {override: override.replace('"', "") for override in found if override.partition("=")[0] in keys}
    return [" ".join(shown[override] for override in overrides if override in shown) for overrides in runs]


@cache
def overrides_of(folder: RunFolder) -> Sequence[str]:
    """What a run was asked for with; it never changes; empty where nothing says so."""
    try:
        return (folder.path / "overrides.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
