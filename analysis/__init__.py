"""Answers: run folders → tables → statistics → figures → report. Never imports torch.

```python
from analysis import by, compare, load, per_run, summary, write_report

runs = load("results/demo")             # every run below, whatever became of it
runs.run, runs.epochs, runs.ranks       # polars frames; runs.to_pandas() for pandas
facts(runs)                             # one row per run: what it is, its metrics, why it does not count
summary(runs)                           # one row per configuration, with paired speed-ups
compare(load("results/before"), load("results/after")).frame   # the same configurations, repeat by repeat
by(runs, "strategy", "ddp", "fsdp").frame                       # two strategies, all else being equal
write_report("results/demo")
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.comparison.exclusions import excluded, format_exclusions
from analysis.comparison.groups import labels
from analysis.comparison.policy import UnlikeWork
from analysis.comparison.two_sides import Comparison, by, compare
from analysis.configurations import facts, summary
from analysis.metrics import per_epoch, per_run
from analysis.reader import Runs, Skipped, load
from analysis.terminal_table import summary_table

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "Comparison",
    "Runs",
    "Skipped",
    "UnlikeWork",
    "by",
    "compare",
    "excluded",
    "facts",
    "format_exclusions",
    "labels",
    "load",
    "per_epoch",
    "per_run",
    "summary",
    "summary_table",
    "write_report",
]


def write_report(path: Path | str, out: Path | str | None = None, *, plugin: str | None = None) -> Path:
    """See `analysis.report.write_report`, which loads what draws figures."""
    from analysis.report import write_report

    return write_report(path, out, plugin=plugin)
