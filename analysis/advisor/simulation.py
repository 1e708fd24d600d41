"""What large jobs may lose to slow devices, broken links and failures: simulated from stated assumptions, not measured.

Synchronous strategies wait for their slowest device in every step. Asynchronous parameter servers lose only that
device's share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from parallelbench.config.structure import Node

if TYPE_CHECKING:
    from analysis.advisor.layouts import Values

LABEL = "simulation"
"""Stands beside every number of this file."""
SECONDS_PER_HOUR = 3600.0
Positive = Annotated[float, Meta(gt=0.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class Assumptions(Node, frozen=True, kw_only=True):
    """What nobody measured here, with `ASSUMED`'s meanings; `--assume KEY=VALUE` sets others."""

    device_mtbf_hours: Positive = 50_700.0
    link_mtbf_hours: Positive = 1_280_000.0
    link_repair_hours: Positive = 4.0
    link_speed_left: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    slow_factor: Annotated[float, Meta(ge=1.0)] = 1.5
    jitter: Share = 0.02
    checkpoint_gb_per_s: Positive = 1.0
    restart_s: Positive = 600.0
    bytes_per_parameter: Positive = 12.0


ASSUMED = {
    "device_mtbf_hours": "mean time between failures of one device that stop the job; 419 interruptions in 54 days of "
    "16,384 H100 (Llama Team 2024, arXiv 2407.21783, section 3.3.4)",
    "link_mtbf_hours": "the same of one node's link; 0.057 % of links fail in a month (Qian et al. 2024, SIGCOMM)",
    "link_repair_hours": "until a broken link is whole again; no source",
    "link_speed_left": "share of a node's bandwidth that is left meanwhile, one of two ports; no source",
    "slow_factor": "how many times as long one slow device computes; no source",
    "jitter": "standard deviation of the log of each device's compute time, independent in every step; no source",
    "checkpoint_gb_per_s": "10⁹ bytes/s at which each node writes its part of a checkpoint; no source",
    "restart_s": "from a failure to the first step after it, s; no source",
    "bytes_per_parameter": "of a checkpoint: a parameter and Adam's two moments in fp32",
}
"""Meaning and source of each assumption."""


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """A predicted job, of which the simulation takes its parts."""

    step_s: float
    compute_s: float
    """What a slow device lengthens: forward, backward, update, data."""
    communication_s: float
    devices: int
    nodes: int
    parameters: float
    asynchronous: bool = False
    """No device waits for another."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What assumptions make of a predicted job."""

    jitter_step_s: float
    """A step in which every device is a little slower or faster."""
    slow_device_step_s: float
    """The same with one slow device."""
    broken_links: float
    """Expected number of broken links at any time."""
    step_s: float
    """Jitter, and broken links as often as they are expected; no slow device."""
    checkpoint_s: float
    """To write a checkpoint."""
    checkpoint_every_s: float
    """Daly's optimum."""
    failures_per_day: float
    goodput: float
    """Share of the time that makes progress: steps without jitter, links, checkpoints, failures ÷ all."""

    def as_dict(self) -> dict[str, Any]:
        """By name, labelled."""
        return {"kind": LABEL, **{each.name: getattr(self, each.name) for each in fields(self)}}


def simulated(job: SimulatedJob, assumptions: Assumptions) -> Simulated:
    """What a job loses under the assumptions."""
    most = 1.0 if job.asynchronous else expected_maximum(job.devices, assumptions.jitter)
    jitter_s = job.step_s + (most - 1.0) * job.compute_s
    down, affected = _links(job, assumptions)
    waits = job.communication_s * (1.0 / assumptions.link_speed_left - 1.0)
    step_s = jitter_s + affected * waits
    mtbf_s = assumptions.device_mtbf_hours * SECONDS_PER_HOUR / job.devices
    written_s = job.parameters * assumptions.bytes_per_parameter / (1e9 * assumptions.checkpoint_gb_per_s * job.nodes)
    every_s = daly_interval_s(written_s, mtbf_s)
    stretch = daly_stretch(every_s, checkpoint_s=written_s, restart_s=assumptions.restart_s, mtbf_s=mtbf_s)
    return Simulated(
        jitter_step_s=jitter_s,
        slow_device_step_s=_with_slow_device(job, assumptions, jitter_s),
        broken_links=down,
        step_s=step_s,
        checkpoint_s=written_s,
        checkpoint_every_s=every_s,
        failures_per_day=24.0 * SECONDS_PER_HOUR / mtbf_s,
        goodput=job.step_s / step_s / stretch,
    )


def expected_maximum(devices: int, deviation: float) -> float:
    """Mean of the largest of so many log-normal factors of median 1, by quadrature: ∫ e^{σz} d(Φ(z)^n)."""
    if devices == 1 or not deviation:
        return math.exp(deviation**2 / 2.0)
    from scipy.special import log_ndtr

    z = np.linspace(-10.0, 12.0, 20_001)
    below: Values = np.exp(devices * log_ndtr(z))
    return float(np.sum(np.exp(deviation * 0.5 * (z[1:] + z[:-1])) * np.diff(below)))


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Time to compute between two checkpoints that costs least: Daly 2006 (FGCS 22).

    √(2δM)·[1 + ⅓·√(δ/2M) + ⅑·δ/2M] − δ where δ < 2M, else M.
    """
    if checkpoint_s >= 2.0 * mtbf_s:
        return mtbf_s
    part = checkpoint_s / (2.0 * mtbf_s)
    return math.sqrt(2.0 * checkpoint_s * mtbf_s) * (1.0 + math.sqrt(part) / 3.0 + part / 9.0) - checkpoint_s


def daly_stretch(every_s: float, *, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Expected wall time ÷ time to compute, for exponential failures that may strike checkpoints and restarts too.

    Daly 2006: M·e^{R/M}·(e^{(τ+δ)/M} − 1) ÷ τ. Infinite where that is beyond every number: nothing ever gets done.
    """
    try:
        return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((every_s + checkpoint_s) / mtbf_s) / every_s
    except OverflowError:
        return math.inf


def _links(job: SimulatedJob, assumptions: Assumptions) -> tuple[float, float]:
    """Expected number of broken links, and the share of time in which any is; a job in one node has none."""
    if job.nodes == 1:
        return 0.0, 0.0
    down = assumptions.link_repair_hours / (assumptions.link_mtbf_hours + assumptions.link_repair_hours)
    share = -math.expm1(job.nodes * math.log1p(-down))
    return job.nodes * down, share / job.nodes if job.asynchronous else share


def _with_slow_device(job: SimulatedJob, assumptions: Assumptions, jitter_s: float) -> float:
    """All wait for the slow device; without waiting, all others go on at their own pace."""
    slow_s = jitter_s + (assumptions.slow_factor - 1.0) * job.compute_s
    if not job.asynchronous:
        return slow_s
    others = job.devices - 1
    return job.devices / (others / jitter_s + 1.0 / slow_s)
