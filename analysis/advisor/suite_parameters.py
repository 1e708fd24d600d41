"""What the suite's own steps are fitted by: few numbers with units and priors, and what was learnt of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from analysis.advisor.parameters import Parameter
from parallelbench.config.identity import canonical_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from parallelbench.config.run import RunConfig

Scales = dict[str, float]
"""Name of a parameter → its value."""

SUITE_PARAMETERS = (
    Parameter("product_scale", 1.0, 0.3, "1", "time of a layer's products ÷ what calibrated products of the size take"),
    Parameter("convolution_scale", 1.5, 0.7, "1", "the same for convolutions, by their FLOPs by definition"),
    Parameter("grouped_scale", 5.0, 1.0, "1", "the same for convolutions in groups"),
    Parameter("traffic_scale", 1.0, 0.5, "1", "time of elementwise work ÷ what its bytes take"),
    Parameter("launch_scale", 1.0, 0.5, "1", "host time of an operation ÷ the calibrated one"),
    Parameter("update_scale", 1.0, 0.5, "1", "time of the optimizer's update ÷ what its bytes take"),
    Parameter("alone", 0.9, 0.2, "1", "compute time of a device alone in its node ÷ of one among busy ones", most=1.0),
    Parameter("link_scale", 1.0, 0.4, "1", "time of collectives ÷ what α and β say"),
    Parameter("message_s", 5e-5, 1.0, "s", "host time of one collective or message"),
    Parameter("overlap", 2.0, 0.4, "1", "γ of backward and all-reduced buckets; 1: none hidden, 10: nearly all"),
    Parameter("sharded_overlap", 1.2, 0.4, "1", "γ of compute and FSDP's collectives"),
    Parameter("shard_copies", 4.0, 0.7, "1", "copies of the gathered parameters' bytes that FSDP makes per gathering"),
    Parameter(
        "sharding_scale", 1.0, 0.3, "1", "time of what FSDP adds to a layer besides messages ÷ the calibrated one"
    ),
    Parameter("handover_s", 2e-4, 1.0, "s", "a stage's fixed time to hand over a micro-batch, each way"),
    Parameter("server_copies", 4.0, 0.7, "1", "copies of the parameters' bytes that a server makes per worker's step"),
    Parameter("step_s", 2e-4, 1.0, "s", "fixed time of each step"),
)
"""Fitted on log time of finished sweeps, from these priors."""
ASSUMED_FACTOR = 2.0
"""Where nothing was measured, 90 % of steps are assumed to be within this factor of the prediction."""


def assumed_scales() -> Scales:
    """What is taken for granted before anything is measured."""
    return {each.name: each.prior for each in SUITE_PARAMETERS}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What measured runs cover; everything else is extrapolation."""

    strategies: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    """By options and the shape of a sample."""
    optimizers: frozenset[str] = frozenset()
    precisions: frozenset[str] = frozenset()
    devices: frozenset[int] = frozenset()
    nodes: frozenset[int] = frozenset()
    samples: frozenset[float] = frozenset()
    """Per device and step."""

    @classmethod
    def of(cls, runs: Sequence[RunConfig]) -> Seen:
        """What these runs cover."""
        return cls(
            strategies=frozenset(run.strategy.name for run in runs),
            models=frozenset(_trained(run) for run in runs),
            optimizers=frozenset(run.optimizer.name for run in runs),
            precisions=frozenset(run.precision for run in runs),
            devices=frozenset(run.devices for run in runs),
            nodes=frozenset(run.nodes for run in runs),
            samples=frozenset(run.global_batch_size / run.devices for run in runs),
        )

    def outside(self, run: RunConfig) -> tuple[str, ...]:
        """In which respects no measured run is like this one."""
        samples = run.global_batch_size / run.devices
        respects = {
            "strategy": run.strategy.name not in self.strategies,
            "model": _trained(run) not in self.models,
            "optimizer": run.optimizer.name not in self.optimizers,
            "precision": run.precision not in self.precisions,
            "devices": run.devices > max(self.devices, default=0),
            "nodes": run.nodes > max(self.nodes, default=0),
            "batch": not min(self.samples, default=0.0) <= samples <= max(self.samples, default=0.0),
        }
        return tuple(name for name, outside in respects.items() if outside)


def _trained(run: RunConfig) -> str:
    return canonical_json({"model": msgspec.to_builtins(run.model), "sample": run.data.shape})


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """What finished runs taught about the suite's own steps."""

    scales: Mapping[str, float] = field(default_factory=assumed_scales)
    offsets: Mapping[str, float] = field(default_factory=dict)
    """Strategy → log of measured ÷ predicted that its runs leave, shrunk towards 0; other strategies have 0."""
    model_offsets: Mapping[str, float] = field(default_factory=dict)
    """The same of models, by `model_key`: what their kernels have in common under every strategy."""
    half_width: float = math.log(ASSUMED_FACTOR)
    """Half of the 90 % interval of log time, for what is like the measured runs."""
    far_half_width: float = math.log(ASSUMED_FACTOR)
    """The same for rows that extrapolate: larger device counts, other strategies, other models."""
    seen: Seen = field(default_factory=Seen)
    rows: int = 0
    """Measured configurations that it rests on; 0: everything is assumed."""
    busy_power_w: float | None = None
    """One device's power while it computes, from the energy of measured runs; None: none was measured."""
    waiting_power_w: float | None = None
    """The same while it waits for others."""

    def stretch(self, run: RunConfig) -> float:
        """Measured ÷ predicted that is to be expected of a run, by those of its strategy and of its model."""
        return math.exp(self.offsets.get(run.strategy.name, 0.0) + self.model_offsets.get(model_key(run), 0.0))


def model_key(run: RunConfig) -> str:
    """Equal for models of equal options."""
    return canonical_json(msgspec.to_builtins(run.model))
