"""What the notebooks in `analysis/notebooks/` need: the latest results, frames that name strategy and devices, figures
with their findings, claims.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.comparison.summary import facts, summary
from analysis.figures import draw, specification, svg
from analysis.metrics.columns import brief_columns
from parallelbench.errors import ConfigError
from parallelbench.results.folder import find_runs

if TYPE_CHECKING:
    import polars as pl

    from analysis.runs.reader import Runs

RESULTS = "PARALLELBENCH_RESULTS"
"""Environment variable: the folder of sweeps; default `results` beside or above the working directory."""
_WIDTH = 140
"""Characters that a notebook's page is wide."""


def latest(*sweeps: str) -> Path:
    """The folder of the sweep that was written to last, among these sweeps and their small twins if any are named.

    Raises `ConfigError`, with the command to run, where there is none.
    """
    results = _results()
    names = [name for sweep in sweeps for name in (sweep, f"{sweep}_small")]
    folders = [results / name for name in names] or (list(results.iterdir()) if results.is_dir() else [])
    runs_of = {folder: find_runs(folder) for folder in folders}
    written_at = {folder: max(run.path.stat().st_mtime for run in runs) for folder, runs in runs_of.items() if runs}
    if not written_at:
        raise ConfigError(
            f"{results} holds no runs of {' or '.join(sweeps) or 'a sweep'}: parallelbench submit "
            f"sweep={names[1] if names else 'demo'} results={results}, or name another folder in {RESULTS}"
        )
    return max(written_at, key=lambda folder: written_at[folder])


def _results() -> Path:
    """The folder named in the environment, else the nearest `results` on the way up."""
    if named := os.environ.get(RESULTS):
        return Path(named).absolute()
    here = Path.cwd()
    return next((found for place in (here, *here.parents) if (found := place / "results").is_dir()), here / "results")


WHICH = ("strategy", "devices", "configuration")
"""Columns that say what a row of a frame is of."""


def overview(runs: Runs) -> pl.DataFrame:
    """The rows of `summary`, with strategy and devices first, then the speed-up with its interval and the verdict."""
    first = (*WHICH, "speed_up", "speed_up_low", "speed_up_high", "speed_up_pairs", "verdict", "steady_epoch_time_s")
    brief = [column.name for column in brief_columns() if column.name not in first]
    return summary(runs).select(*first, *brief, "group")


def named(runs: Runs, rows: pl.DataFrame) -> pl.DataFrame:
    """A frame with `run_id`, and before its own columns strategy, devices, configuration and repeat of each run."""
    which = facts(runs).select("run_id", *WHICH, "repeat")
    own = [name for name in rows.columns if name not in which.columns]
    return rows.join(which, on="run_id", how="left", maintain_order="left").select(*WHICH, "repeat", *own, "run_id")


def show(runs: Runs, *names: str) -> None:
    """Display figures by name (default: all), each with its title and finding. As SVG, which any front end draws
    without a network.
    """
    from IPython.display import SVG, Markdown, display

    for figure in draw(runs, names):
        display(Markdown(f"### {figure.title}\n\n{figure.finding}"))
        if figure.chart is not None:
            display(SVG(svg(specification(figure.chart))))


def claims(runs: Runs, publication: str | None = None) -> None:
    """Print the claims of one publication (`"002"`), or of all, with their verdicts from these runs."""
    from rich.console import Console

    from analysis.claims import judge_all, publications
    from analysis.claims.table import judgements_table

    texts = publications()
    if publication is not None and publication not in (known := [text.seed for text in texts]):
        raise ConfigError(f"{publication} is no publication: choose one of {', '.join(known)}")
    judgements = [each for each in judge_all(runs) if publication in (None, each.seed)]
    Console(width=_WIDTH).print(judgements_table(judgements, runs.root))
