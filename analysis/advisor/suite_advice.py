"""Rows for the suite's own models: every candidate predicted, or measured where a finished run is the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from analysis.advisor.advice import Impossible, Row
from analysis.advisor.suite_memory import suite_peak_bytes
from analysis.advisor.suite_step import SuiteJob
from analysis.advisor.suite_strategies import suite_phases
from parallelbench.config.build import to_mapping
from parallelbench.config.identity import canonical_json
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from analysis.advisor.machine_figures import MachineFigures
    from analysis.advisor.suite_candidates import SuiteCandidate
    from analysis.advisor.suite_parameters import Learnt
    from analysis.advisor.suite_step import Phases
    from parallelbench.config.run import RunConfig
    from parallelbench.measure.counting import LayerCount, ModelMemory


MEASURED_WIDTH = 1.05
"""By which factor a measured step may differ when it is measured again: an assumption."""


@dataclass(frozen=True, kw_only=True)
class KnownStep:
    """What finished runs of a configuration say of a step, medians over its repeats."""

    step_s: float
    energy_j: float | None
    """Of all devices; None: never measured."""


@dataclass(frozen=True, kw_only=True)
class SuiteQuestion:
    """What rows are made from."""

    layers: Sequence[LayerCount]
    memory: ModelMemory | None
    figures: MachineFigures
    learnt: Learnt
    measured: Mapping[str, KnownStep]
    """Configuration (`configuration_id`) → what was measured of it."""


def configuration_id(run: RunConfig) -> str:
    """Equal for runs whose steps are the same, wherever, how long and with which seeds they train."""
    plain = to_mapping(run)
    kept = {key: plain[key] for key in _OF_A_STEP if key in plain}
    return canonical_json(kept | {"batch": run.global_batch_size, "sample": run.data.shape})


_OF_A_STEP = (
    *("model", "strategy", "optimizer", "loader", "devices", "nodes", "precision", "channels_last", "compile"),
    *("cores_per_device", "clip_norm", "loss"),
)
"""What of a configuration decides how long a step takes."""


def suite_rows(candidates: Sequence[SuiteCandidate], question: SuiteQuestion) -> tuple[list[Row], list[Impossible]]:
    """A row for each candidate that can be, and the reason for each that can't."""
    rows: list[Row] = []
    impossible: list[Impossible] = []
    for each in candidates:
        why = each.why_not
        if why is None:
            try:
                rows.append(_row(each, question))
            except ConfigError as error:
                why = str(error)
        if why is not None:
            refused = Impossible(
                strategy=each.run.strategy.name, options=each.options, devices=each.run.devices, why=why
            )
            impossible.append(refused)
    return rows, impossible


def _row(candidate: SuiteCandidate, question: SuiteQuestion) -> Row:
    run, learnt, figures = candidate.run, question.learnt, question.figures
    job = SuiteJob(run=run, layers=question.layers, figures=figures, scales=learnt.scales)
    phases = suite_phases(job).stretched(learnt.stretch(run))
    outside = _extrapolates(run, learnt)
    width = float(np.exp(learnt.far_half_width if outside else learnt.half_width))
    row = Row(
        strategy=run.strategy.name,
        options=candidate.options,
        devices=run.devices,
        nodes=run.nodes,
        phases=phases,
        low_s=phases.step_s / width,
        high_s=phases.step_s * width,
        samples_per_step=run.global_batch_size,
        steps_per_epoch=run.steps_per_epoch,
        memory_bytes=None if question.memory is None else suite_peak_bytes(job, question.memory),
        capacity_bytes=capacity_bytes(figures),
        mfu=_mfu(job, phases.step_s),
        power_w=_power_w(learnt, phases),
        measured=False,
        extrapolates=outside,
        trains_alike=run.strategy.equals_one_device(run),
    )
    found = question.measured.get(configuration_id(run))
    return row if found is None else _as_measured(row, found)


def _as_measured(row: Row, found: KnownStep) -> Row:
    """The row with the measured time; its phases keep their shares."""
    return replace(
        row,
        phases=row.phases.stretched(found.step_s / row.step_s),
        low_s=found.step_s / MEASURED_WIDTH,
        high_s=found.step_s * MEASURED_WIDTH,
        power_w=row.power_w if found.energy_j is None else found.energy_j / found.step_s / row.devices,
        measured=True,
        extrapolates=(),
    )


def _extrapolates(run: RunConfig, learnt: Learnt) -> tuple[str, ...]:
    """In which respects nothing that was measured is like a run."""
    return learnt.seen.outside(run) if learnt.rows else ("everything",)


def _power_w(learnt: Learnt, phases: Phases) -> float | None:
    """Mean power of one device in a step, from its power while it computes and while it waits."""
    if learnt.busy_power_w is None or learnt.waiting_power_w is None:
        return None
    waiting = (phases.communication_s + phases.bubble_s) / phases.step_s
    return learnt.busy_power_w * (1.0 - waiting) + learnt.waiting_power_w * waiting


def capacity_bytes(figures: MachineFigures) -> float | None:
    """Memory of a device, less what libraries take."""
    if figures.memory_bytes is None:
        return None
    return figures.memory_bytes.value - (0.0 if figures.overhead_bytes is None else figures.overhead_bytes.value)


def _mfu(job: SuiteJob, step_s: float) -> float | None:
    """FLOPs of products and convolutions, forward and twice that backward, ÷ what all devices could do."""
    peak = job.figures.peak_flops_per_s.get(job.run.precision)
    if peak is None:
        return None
    names = ("product_flop", "convolution_flop", "grouped_flop")
    flop = 3.0 * job.run.global_batch_size * sum(float(job.columns[name].sum()) for name in names)
    return flop / (step_s * job.run.devices * peak.value)
