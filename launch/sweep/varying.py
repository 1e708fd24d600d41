"""The overrides in which the runs of a sweep differ, besides those in their names and columns."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

from parallelbench.results.files import read_record

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from parallelbench.results.folder import RunFolder

_IN_NAME = ("data", "model", "strategy", "devices", "repeat")
"""Parts of a run's name."""
_NOT_IDENTITY = ("results", "launcher", "site", "sweep", "tune", "faithful")
"""Keys that are no part of an experiment: the same run may be requested with other values."""


def varying(runs: Sequence[Sequence[str]], *, besides: Collection[str] = ()) -> list[str]:
    """For each run, in one line, its overrides whose keys differ between runs; without the keys in `besides`."""
    counts = Counter(override for overrides in runs for override in set(overrides))
    keys = {override.partition("=")[0] for override, count in counts.items() if count < len(runs)}
    keys = {key for key in keys if not key.startswith("#")}  # why a strategy was chosen
    keys = {key for key in keys if key not in (*_IN_NAME, *besides) and key.partition(".")[0] not in _NOT_IDENTITY}
    # Quotes are for Hydra. Many runs share an override, so each is formatted once.
    shown = {override: override.replace('"', "") for override in counts if override.partition("=")[0] in keys}
    return [" ".join(shown[override] for override in overrides if override in shown) for overrides in runs]


@cache
def overrides_of(folder: RunFolder) -> Sequence[str]:
    """The overrides that a run was requested with, which never change; empty where they are not recorded."""
    try:
        return read_record(folder.path / "overrides.txt").decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ()
