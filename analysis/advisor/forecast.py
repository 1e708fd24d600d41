"""What a report shows of the advisor: measured steps beside predictions that had not seen them, and larger counts."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from analysis.advisor.check import fittable, split_check, width_beyond
from analysis.advisor.fit import ASSUMED_FACTOR, fitted, half_width
from analysis.advisor.machine import assumed_figures
from analysis.advisor.sweep_evidence import sweep_evidence
from analysis.comparison.configurations import counted
from analysis.runs.reader import once
from parallelbench.config.run_rules import check_run
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from analysis.advisor.check import Judged
    from analysis.advisor.fit import SuiteFit
    from analysis.advisor.machine import MachineFigures
    from analysis.advisor.sweep_evidence import MeasuredStep
    from analysis.runs.reader import Runs
    from parallelbench.config.run import RunConfig

MOST_STEPS = 60
"""The first report fits to no more configurations than this: each takes every fit about 30 ms."""
FURTHER = (2, 4, 8)
"""How many times as many devices as the most measured ones are predicted."""


@dataclass(frozen=True, kw_only=True)
class Further:
    """A measured configuration on more devices than any of its kind was measured on."""

    of: MeasuredStep
    run: RunConfig
    step_s: float
    low_s: float
    high_s: float
    """Ends of the 90 % interval."""
    beyond_node: bool
    """Whether it needs more nodes than were measured: their network is assumed."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Of one folder of runs."""

    steps: list[MeasuredStep]
    """All that were measured."""
    check: Judged
    """Those of them that could be left out, each predicted by a fit that lacked it."""
    half_width: float
    """Half of the 90 % interval of log time of what is like the measured steps."""
    assumed: bool
    """Whether too few steps were left out for an interval, so that it is assumed."""
    further: list[Further]
    left_out: Sequence[str]
    """Configurations that need a plugin which was not named, in words."""


@once
def forecast(runs: Runs) -> Forecast:
    """Fit to the runs that count; raises `ConfigError` that says why where it can't."""
    _require_few(runs)
    evidence = sweep_evidence([runs], lambda run: [])
    figures = evidence.probed
    steps, _ = fittable(replace(evidence, steps=[step for step in evidence.steps if step.layers]), figures)
    check = split_check(steps, figures, "folds")
    if check is None:
        raise ConfigError(f"{len(steps)} configurations are too few to leave any out and fit to the others")
    near, assumed = half_width(check.log_errors), math.log(ASSUMED_FACTOR)
    usual = assumed if near is None else near
    wide = max(usual, width_beyond(steps, figures) or assumed)
    return Forecast(
        steps=steps,
        check=check,
        half_width=usual,
        assumed=near is None,
        further=list(_further(steps, fitted(steps, figures), figures, wide)),
        left_out=evidence.left_out,
    )


def _require_few(runs: Runs) -> None:
    """Refuse, before anything takes long, what can't be fitted to or would take a report too long."""
    rows = counted(runs)
    if not rows.is_empty() and rows["layers_json"].is_null().all():
        raise ConfigError("the results don't hold what the layers of their models do: older releases did not write it")
    configurations = rows.select("group", "configuration").n_unique()
    if configurations > MOST_STEPS:
        raise ConfigError(
            f"a report fits to {MOST_STEPS} configurations at most, and there are {configurations}: "
            f"`parallelbench advise --check {shlex.quote(str(runs.root))}` takes them all"
        )


def _further(steps: Sequence[MeasuredStep], fit: SuiteFit, measured: MachineFigures, width: float) -> Iterator[Further]:
    """Each kind of configuration on multiples of the most devices that it was measured on; kinds of one device stay."""
    largest: dict[tuple[str, str], MeasuredStep] = {}
    for step in sorted(steps, key=lambda step: step.run.devices):
        largest[step.work, step.variant] = step
    for step in largest.values():
        if step.run.devices == 1:
            continue
        for times in FURTHER:
            run, figures = _on_more(step.run, times, measured)
            try:
                check_run(run, figures.device_type)
                predicted_s = fit.phases(replace(step, run=run).job(figures)).step_s
            except ConfigError:
                break
            beyond = run.nodes > step.run.nodes
            own = max(width, math.log(ASSUMED_FACTOR)) if beyond else width
            low_s, high_s = (predicted_s * float(np.exp(sign * own)) for sign in (-1.0, 1.0))
            yield Further(of=step, run=run, step_s=predicted_s, low_s=low_s, high_s=high_s, beyond_node=beyond)


def _on_more(run: RunConfig, times: int, figures: MachineFigures) -> tuple[RunConfig, MachineFigures]:
    """The run on so many times the devices, in nodes like the measured one; a network that nobody measured is assumed.

    Under weak scaling the batch grows with them by itself.
    """
    devices = times * run.devices
    nodes = max(run.nodes, -(-devices // figures.devices_per_node))
    if nodes > 1 and figures.network is None:
        assumed = assumed_figures(figures.device_type, devices_per_node=figures.devices_per_node, memory_bytes=None)
        figures = replace(figures, network=assumed.network)
    return msgspec.structs.replace(run, devices=devices, nodes=nodes), figures
