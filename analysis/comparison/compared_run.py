"""A run as comparisons see it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.comparison.environments import circumstances_of
from analysis.comparison.groups import definitions
from analysis.comparison.policy import PROBED, is_baseline
from analysis.comparison.sessions import UNKNOWN, sessions_of, spans
from analysis.metrics import per_run, resting_on_disturbed

if TYPE_CHECKING:
    from collections.abc import Hashable

    from analysis.comparison.sessions import Span
    from analysis.comparison.work import Work
    from analysis.reader import Runs


@dataclass(frozen=True, eq=False, slots=True)
class ComparedRun:
    """The data of a run that a comparison needs."""

    runs: Runs
    run_id: str
    repeat: int
    definition: Work
    """Its definition, without its repeat."""
    environment: Work
    """The entries of its environment that must match, or are reported."""
    data_samples: int | None
    """Samples of its training set; None where an old result doesn't say."""
    epoch_samples: int | None
    """Samples that it trains on in an epoch; likewise."""
    data_sha256: str | None
    """What its data set holds; likewise."""

    def value(self, metric: str) -> float | None:
        """A metric of `per_run`, or a number of the run table; None where it was not measured, or rests on epochs that
        others disturbed.
        """
        return _values(self.runs, metric)[self.run_id]

    def probes(self, key: str) -> tuple[float, ...]:
        """What was measured of the machine by this name, at the run's start and at its end; without what is unknown."""
        return _probed(self.runs, key)[self.run_id]

    @property
    def span(self) -> Span:
        """Unix times of the start of its first and the end of its last epoch; infinite where unknown."""
        return spans(self.runs).get(self.run_id, UNKNOWN)

    @property
    def session(self) -> Hashable:
        """What it was measured in, together with others."""
        return sessions_of(self.runs)[self.run_id]

    @property
    def sweep(self) -> Path:
        """The folder of the sweep that it was measured in."""
        return _sweeps(self.runs)[self.run_id]

    @property
    def is_baseline(self) -> bool:
        """Whether others are compared with it."""
        return is_baseline(self.definition["strategy.name"], self.definition["devices"])


@lru_cache(maxsize=32)
def _probed(runs: Runs, key: str) -> dict[str, tuple[float, ...]]:
    rows = runs.run.select("run_id", *PROBED[key]).rows()
    return {run_id: tuple(speed for speed in speeds if speed is not None) for run_id, *speeds in rows}


@lru_cache(maxsize=8)
def compared_runs(runs: Runs) -> dict[str, ComparedRun]:
    """Run id → the data of the run that a comparison needs."""
    environments, defined = circumstances_of(runs), definitions(runs)
    columns = ("run_id", "repeat", "train_samples", "dropped_samples", "data_sha256")
    return {
        run_id: ComparedRun(
            runs=runs,
            run_id=run_id,
            repeat=repeat,
            definition=defined[run_id],
            environment=environments[run_id],
            data_samples=samples,
            epoch_samples=None if samples is None or dropped is None else samples - dropped,
            data_sha256=content,
        )
        for run_id, repeat, samples, dropped, content in runs.run.select(columns).rows()
    }


@lru_cache(maxsize=8)
def _sweeps(runs: Runs) -> dict[str, Path]:
    return {run_id: Path(folder).parent for run_id, folder in runs.run.select("run_id", "folder").rows()}


@lru_cache(maxsize=64)
def _values(runs: Runs, metric: str) -> dict[str, float | None]:
    known = runs.run if metric in runs.run.columns else per_run(runs)
    values = dict(zip(runs.run["run_id"].to_list(), known[metric].to_list(), strict=True))
    return values | dict.fromkeys(resting_on_disturbed(runs).get(metric, ()))
