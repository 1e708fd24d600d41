"""What a folder must hold to be reported, judged or compared: the same refusal of all verbs."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.comparison.exclusions import describe, excluded
from parallelbench.errors import ConfigError
from parallelbench.results.folder import instead_of, no_runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from analysis.reader import Runs


def require_finished(runs: Runs) -> None:
    """Raise `ConfigError`, with the remedy, where no run of the folder trained to its end."""
    root = runs.root
    if "done" in runs.run["state"]:
        return
    if not runs.run.is_empty():
        labels = Counter(runs.run.select(pl.coalesce("outcome", "state")).to_series())
        counts = text.listed([f"{count} {label}" for label, count in sorted(labels.items())], most=len(labels))
        raise ConfigError(
            f"{root} holds no finished run ({counts}): `parallelbench status {shlex.quote(str(root))}` says why; "
            f"{_advice(labels.keys())}"
        )
    unreadable = [skipped for skipped in runs.skipped if skipped.is_run]
    if not unreadable:
        raise ConfigError(no_runs(root))
    first, *others = unreadable
    more = f", and {len(others)} more" if others else ""
    raise ConfigError(f"{root} holds no readable run ({first.path}: {first.reason}{more}): {instead_of(root)}")


def _advice(labels: Iterable[str]) -> str:
    """What to do where no run has finished: wait, begin, or try again."""
    found = set(labels)
    if "running" in found:
        return "report once some are done"
    return "none has begun: submit them, or wait for their jobs" if found == {"missing"} else "submit what failed again"


def _most_common(known: Sequence[tuple[str, str | None]]) -> str:
    """The exclusion of most runs, in the words of its first run; empty without any."""
    if not known:
        return ""
    counts = Counter(exclusion for exclusion, _ in known)
    most = max(sorted(counts), key=counts.__getitem__)
    return describe(most, next(detail for exclusion, detail in known if exclusion == most))


def require_counted(runs: Runs) -> None:
    """Raise `ConfigError` where no run counts; the message has the most common reason."""
    require_finished(runs.whole)
    gone = excluded(runs)
    if runs.run.height > gone.height:
        return
    why = f" ({reason})" if (reason := _most_common(gone.select("exclusion", "exclusion_detail").rows())) else ""
    where = f"one side of {runs.root}" if runs.taken_from else runs.root
    raise ConfigError(f"{where} holds no run that counts{why}: there is nothing to compare")
