"""Answers: run folders → tables → statistics → figures → report. Never imports torch.

```python
from analysis import by, compare, load, per_run, summary, write_report

runs = load("results/demo")             # every run below, finished or not
runs.run, runs.epochs, runs.ranks       # polars frames; runs.to_pandas() for pandas
facts(runs)                             # one row per run: what it is, its metrics, why it does not count
summary(runs)                           # one row per configuration, with paired speed-ups
compare(load("results/before"), load("results/after")).frame   # the same configurations, repeat by repeat
by(runs, "strategy", "ddp", "fsdp").frame                       # two strategies, all else being equal
write_report("results/demo")
```
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analysis.comparison.exclusions import excluded as excluded
    from analysis.comparison.exclusions import format_exclusions as format_exclusions
    from analysis.comparison.issues import UnlikeWork as UnlikeWork
    from analysis.comparison.sides import Comparison as Comparison
    from analysis.comparison.sides import by as by
    from analysis.comparison.sides import compare as compare
    from analysis.comparison.summary import facts as facts
    from analysis.comparison.summary import summary as summary
    from analysis.comparison.work import labels as labels
    from analysis.metrics.epochs import per_epoch as per_epoch
    from analysis.metrics.runs import per_run as per_run
    from analysis.report.page import write_report as write_report
    from analysis.report.tables import summary_table as summary_table
    from analysis.runs.reader import Runs as Runs
    from analysis.runs.reader import Skipped as Skipped
    from analysis.runs.reader import load as load

_HOMES = {
    **dict.fromkeys(("facts", "summary"), "comparison.summary"),
    **dict.fromkeys(("excluded", "format_exclusions"), "comparison.exclusions"),
    "UnlikeWork": "comparison.issues",
    **dict.fromkeys(("by", "Comparison", "compare"), "comparison.sides"),
    "labels": "comparison.work",
    "per_epoch": "metrics.epochs",
    "per_run": "metrics.runs",
    "summary_table": "report.tables",
    "write_report": "report.page",
    **dict.fromkeys(("load", "Runs", "Skipped"), "runs.reader"),
}
"""Name → the module that has it. Each is loaded when it is first asked for: the advisor needs no tables, and what
draws figures takes long to load.
"""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
