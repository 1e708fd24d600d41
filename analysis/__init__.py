"""Answers: run folders → tables → statistics → figures → report. Never imports torch.

```python
from analysis import by, compare, load, per_run, summary, write_report

runs = load("results/demo")             # every run below, whatever became of it
runs.run, runs.epochs, runs.ranks       # polars frames; runs.to_pandas() for pandas
facts(runs)                             # one row per run: what it is, its metrics, why it is left out
summary(runs)                           # one row per configuration, with paired speed-ups
compare(load("results/before"), load("results/after")).frame   # the same configurations, repeat by repeat
by(runs, "strategy", "ddp", "fsdp").frame                       # two strategies, all else being equal
write_report("results/demo")
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.compare import Comparison, by, compare
from analysis.configurations import facts, summary
from analysis.metrics import per_epoch, per_run
from analysis.reader import Runs, Skipped, load
from analysis.terminal_table import summary_table
from analysis.uncounted import uncounted
from analysis.work import UnlikeWork, labels, left_out

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "Comparison",
    "Runs",
    "Skipped",
    "UnlikeWork",
    "by",
    "compare",
    "facts",
    "labels",
    "left_out",
    "load",
    "per_epoch",
    "per_run",
    "summary",
    "summary_table",
    "uncounted",
    "write_report",
]


def write_report(path: Path | str, out: Path | str | None = None, *, plugin: str | None = None) -> Path:
    """See `analysis.report.write_report`, which loads what draws figures."""
    from analysis.report import write_report

    return write_report(path, out, plugin=plugin)
