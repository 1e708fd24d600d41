"""What `--from` gives: calibrations of a machine, and finished sweeps that the suite's steps are fitted to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from analysis.advisor.fit import Learnt
from parallelbench.config.plugin import training_plugin
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from analysis.advisor.machine import MachineFigures
    from analysis.advisor.sweep_evidence import SweepEvidence


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """Of one machine."""

    figures: MachineFigures | None = None
    """Calibrated; else by the probes of the runs; None: neither was given."""
    calibrated: bool = False
    """Whether the figures are those of a calibration, which measures whole nodes."""
    evidence: SweepEvidence | None = None
    """None: no sweep was given."""
    learnt: Learnt = field(default_factory=Learnt)
    """Priors where no sweep was given."""


def read_knowledge(paths: Sequence[Path], *, learn: bool = True, plugin: str | None = None) -> Knowledge:
    """Read tables of `parallelbench calibrate` (*.parquet) and folders of runs; without `learn` nothing is fitted.

    `plugin` is an importable package whose classes the runs may name; those of others are left out.

    Raises `ConfigError` for several calibrations, for other files, and where the runs are of unlike machines.
    """
    from analysis.advisor.calibration import read_figures
    from analysis.advisor.check import learnt_from
    from analysis.advisor.model_layers import model_layers
    from analysis.advisor.sweep_evidence import read_sweeps

    tables = [path for path in paths if path.suffix == ".parquet"]
    folders = [path for path in paths if path.is_dir()]
    if others := [path for path in paths if path not in (*tables, *folders)]:
        raise ConfigError(f"{others[0]} is neither a calibration (*.parquet) nor a folder of runs")
    if len(tables) > 1:
        raise ConfigError(f"{tables[0]} and {tables[1]} are two calibrations: give that of one machine")
    calibrated = read_figures(tables[0]) if tables else None
    if not folders:
        return Knowledge(figures=calibrated, calibrated=calibrated is not None)
    evidence = read_sweeps(folders, lambda run: model_layers(run, plugin=training_plugin(run)), plugin=plugin)
    figures = calibrated or evidence.probed
    _require_same_device(figures, evidence)
    learnt = learnt_from(evidence, figures) if learn else Learnt()
    return Knowledge(figures=figures, calibrated=calibrated is not None, evidence=evidence, learnt=learnt)


def _require_same_device(figures: MachineFigures, evidence: SweepEvidence) -> None:
    """Refuse a calibration of another device than the runs'."""
    ran = evidence.probed
    if (figures.accelerator, figures.device_type) != (ran.accelerator, ran.device_type):
        raise ConfigError(
            f"the calibration is of {figures.accelerator} ({figures.device_type}), the runs are of {ran.accelerator} "
            f"({ran.device_type}): calibrate the machine of the runs, or leave one of them out"
        )
