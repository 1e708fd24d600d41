"""Steps of finished sweeps: what was run, how long it took, what its phases were, and on which machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from analysis.advisor.calibration import probed_figures
from analysis.advisor.fit import model_key
from analysis.advisor.strategies import SuiteJob
from analysis.comparison.issues import unlike_probes
from analysis.comparison.notes import format_differences
from analysis.comparison.pairing import Pairing, RepeatPair
from analysis.comparison.run import compared_runs
from analysis.comparison.summary import counted
from analysis.comparison.work import PROBED, component_labels
from analysis.metrics.runs import phase_times
from analysis.runs.reader import load
from parallelbench.config.build import PLUGIN_SOURCES, from_mapping
from parallelbench.config.sites import with_new_options
from parallelbench.errors import ConfigError, count_of
from parallelbench.measure.layer_records import LayerCount
from parallelbench.results.folder import no_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from analysis.advisor.machine import MachineFigures
    from analysis.comparison.run import ComparedRun
    from analysis.comparison.work import Differences
    from analysis.runs.reader import Runs
    from parallelbench.config.run import RunConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredStep:
    """One configuration of a finished sweep: medians over its repeats that count."""

    run: RunConfig
    layers: Sequence[LayerCount]
    work: str
    """What was trained, by the comparisons' rule; strategies compete within it."""
    model: str
    """The model's name, with the options in which others of its name differ."""
    step_s: float
    phases: Mapping[str, float]
    """Seconds per step by phase, means over ranks; empty: not attributed."""
    energy_j: float | None
    """Energy of all devices per step; None: never measured."""
    variant: str = ""
    """The strategy, with the options in which others of its name differ, as reports name it."""

    @property
    def strategy(self) -> str:
        """Its name."""
        return self.run.strategy.name

    @property
    def model_key(self) -> str:
        """Equal for models of equal options, in all sweeps."""
        return model_key(self.run)

    def job(self, figures: MachineFigures) -> SuiteJob:
        """What it ran, on a machine."""
        return SuiteJob(run=self.run, layers=self.layers, figures=figures)


@dataclass(frozen=True, kw_only=True, eq=False)
class SweepEvidence:
    """Measured steps of one kind of machine."""

    steps: Sequence[MeasuredStep]
    probed: MachineFigures
    """What the runs' own probes say of the machine."""
    excluded: int
    """Runs that don't count, by the comparisons' rule."""
    left_out: Sequence[str]
    """Configurations whose classes are of a package that was not named, in words."""


def read_sweeps(
    folders: Sequence[Path], count: Callable[[RunConfig], list[LayerCount]], *, plugin: str | None = None
) -> SweepEvidence:
    """The steps below some folders; a run that lies below several is taken once. `count` counts a model's layers where
    an older result lacks them; `plugin`: see `load`.

    Raises `ConfigError` where nothing counts, or where the runs are of unlike machines by the comparisons' rule.
    """
    loaded: list[Runs] = []
    known: set[Path] = set()
    for runs in (load(folder, plugin=plugin) for folder in folders):
        places = {name: Path(folder).resolve() for name, folder in runs.run.select("run_id", "folder").rows()}
        new = [name for name, place in places.items() if place not in known]
        loaded.append(runs if len(new) == len(places) else runs.only(new))
        known.update(places.values())
    return sweep_evidence(loaded, count)


def sweep_evidence(loaded: Sequence[Runs], count: Callable[[RunConfig], list[LayerCount]]) -> SweepEvidence:
    """The same of folders that are loaded."""
    sides = [_counting(runs) for runs in loaded]
    if not any(sides):
        where, known = ", ".join(str(runs.root) for runs in loaded), sum(runs.run.height for runs in loaded)
        if not known:
            raise ConfigError(no_runs(loaded[0].root))
        raise ConfigError(
            f"{where}: none of {known} runs counts in comparisons of times: `parallelbench report` says why; measure "
            "on a free machine"
        )
    if unlike := _unlike([side for side in sides if side]):
        raise ConfigError(
            f"the runs are of unlike machines, and one fit can't hold them: {format_differences(unlike)}; "
            "name folders that were measured in one environment"
        )
    others: Counter[str] = Counter()
    steps = [step for runs in loaded for step in _steps(runs, count, others)]
    left_out = [
        f"{count_of(n, 'configuration')} of {target} {'is' if n == 1 else 'are'} left out: "
        f"add --plugin {target.partition('.')[0]}"
        for target, n in others.items()
    ]
    if not steps and left_out:
        raise ConfigError("; ".join(left_out))
    return SweepEvidence(
        steps=steps,
        left_out=left_out,
        probed=probed_figures([row for runs in loaded for row in counted(runs).to_dicts()]),
        excluded=sum(runs.run.height for runs in loaded) - sum(map(len, sides)),
    )


def _counting(runs: Runs) -> list[ComparedRun]:
    known = compared_runs(runs)
    return [known[run_id] for run_id in counted(runs)["run_id"]]


def _unlike(sides: Sequence[Sequence[ComparedRun]]) -> Differences:
    """What differs between environments that must match to be compared; folders are held against each other too."""
    first = sides[0][0]
    for other in (run for side in sides for run in side):
        pairing = Pairing((RepeatPair(0, (first, other)),))
        # Single probes of one folder may be disturbed: medians of folders are compared below.
        unlike: Differences = {k: v for k, v in pairing.unlike_environments.items() if k not in PROBED}
        for key in ("device_type", "device_name", "cores_per_device"):
            if (values := (first.definition.get(key), other.definition.get(key)))[0] != values[1]:
                unlike[key] = values
        if unlike:
            return unlike
    return unlike_probes(sides)


def _steps(runs: Runs, count: Callable[[RunConfig], list[LayerCount]], others: Counter[str]) -> Iterator[MeasuredStep]:
    """One per configuration, in the order of the tables; `others` counts those of packages that nobody named."""
    rows = counted(runs).filter(pl.col("steady_epoch_time_s").is_not_null())
    models = component_labels(runs, "model")
    phases = {row.pop("run_id"): row for row in phase_times(runs).to_dicts()}
    for _, members in rows.group_by("group", "configuration", maintain_order=True):
        each = members.to_dicts()
        first = each[0]
        plain = with_new_options(msgspec.json.decode(first["config_json"]))
        if unnamed := _of_others(plain, runs.plugin):
            others[unnamed] += 1
            continue
        run = from_mapping(plain, runs.plugin)
        yield MeasuredStep(
            run=run,
            layers=msgspec.json.decode(known, type=list[LayerCount]) if (known := first["layers_json"]) else count(run),
            work=first["group"],
            model=models[first["run_id"]],
            step_s=median(row["steady_epoch_time_s"] / row["steps_per_epoch"] for row in each),
            phases=_median_phases([phases[row["run_id"]] for row in each if row["run_id"] in phases]),
            energy_j=_median_energy(each),
            variant=first["variant"],
        )


def _of_others(plain: Mapping[str, Any], plugin: str | None) -> str | None:
    """What a configuration names of a package that is neither the suite's nor `plugin`: a class, or the package."""
    nodes = [node for node in plain.values() if isinstance(node, dict)]
    named = [str(node.get(key, "")).partition("@")[0] for key in ("_target_", PLUGIN_SOURCES) for node in nodes]
    return next((each for each in named if each.partition(".")[0] not in ("", "parallelbench", plugin)), None)


def _median_phases(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    known = {name: [value for row in rows if (value := row[name]) is not None] for name in (rows[0] if rows else ())}
    return {name: median(values) for name, values in known.items() if values}


def _median_energy(rows: Sequence[Mapping[str, Any]]) -> float | None:
    known = [
        row["gpu_energy_per_sample_j"] * row["global_batch_size"] for row in rows if row["gpu_energy_per_sample_j"]
    ]
    return median(known) if known else None
