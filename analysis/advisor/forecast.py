"""What a report shows of the advisor: measured steps beside predictions that had not seen them, and larger counts."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from analysis.advisor.check import FEWEST_STEPS, SplitCheck, most_devices, split_check
from analysis.advisor.fit import ASSUMED_FACTOR, FEWEST_ERRORS, fitted, half_width, predictable
from analysis.advisor.machine import assumed_figures
from analysis.advisor.sweep_evidence import sweep_evidence
from analysis.comparison.configurations import counted
from analysis.runs.reader import once
from parallelbench.config.run_rules import check_run
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    check: SplitCheck
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
    known = [step for step in evidence.steps if step.layers]
    figures = evidence.probed
    steps, refused = predictable(known, figures)
    if len(steps) < FEWEST_STEPS:
        why = f"; {reasons[0]}" if (reasons := [*evidence.left_out, *refused]) else ""
        raise ConfigError(
            f"{len(steps)} measured configurations can be predicted, and {FEWEST_STEPS} are needed to fit to{why}"
        )
    check = split_check(steps, figures, "folds")
    if check is None:
        raise ConfigError(f"{len(steps)} configurations are too few to leave any out and fit to the others")
    near = half_width(check.log_errors)
    usual = float(np.log(ASSUMED_FACTOR)) if near is None else near
    wide = max(usual, _width_beyond(steps, figures))
    return Forecast(
        steps=steps,
        check=check,
        half_width=usual,
        assumed=near is None,
        further=list(_further(steps, fitted(steps, figures), wide)),
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


def _width_beyond(steps: Sequence[MeasuredStep], figures: MachineFigures) -> float:
    """Half of the interval on more devices than were measured, from a fit that lacked the most; assumed of few."""
    places = most_devices(steps)
    rest = [step for place, step in enumerate(steps) if place not in places]
    if len(places) < FEWEST_ERRORS or len(rest) < FEWEST_STEPS:
        return float(np.log(ASSUMED_FACTOR))
    fit = fitted(rest, figures)
    width = half_width(np.log([steps[place].step_s / fit.phases(steps[place]).step_s for place in places]))
    assert width is not None, "there are enough"
    return width


def _further(steps: Sequence[MeasuredStep], fit: SuiteFit, width: float) -> Iterator[Further]:
    """Each kind of configuration on multiples of the most devices that it was measured on; kinds of one device stay."""
    largest: dict[tuple[str, str], MeasuredStep] = {}
    for step in sorted(steps, key=lambda step: step.run.devices):
        largest[step.work, step.variant] = step
    for step in largest.values():
        if step.run.devices == 1:
            continue
        for times in FURTHER:
            run, figures = _on_more(step.run, times, fit.figures)
            try:
                check_run(run, figures.device_type)
                predicted_s = replace(fit, figures=figures).phases(_as_if(step, run)).step_s
            except ConfigError:
                break
            beyond = run.nodes > step.run.nodes
            own = max(width, float(np.log(ASSUMED_FACTOR))) if beyond else width
            low_s, high_s = (predicted_s * float(np.exp(sign * own)) for sign in (-1.0, 1.0))
            yield Further(of=step, run=run, step_s=predicted_s, low_s=low_s, high_s=high_s, beyond_node=beyond)


def _as_if(step: MeasuredStep, run: RunConfig) -> MeasuredStep:
    """The same model under another run; its measured time means nothing there."""
    return replace(step, run=run, phases={}, energy_j=None)


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
