"""Time of a step of the suite's own models from their counted layers, for every strategy of the suite.

Products take FLOPs ÷ rate, elementwise work bytes ÷ bandwidth, every operation its launch. Collectives take what α and
β of their tier say. Pipelines are replayed. What cannot be predicted is refused with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from analysis.advisor.step_model import overlapped
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from analysis.advisor.layouts import Values
    from analysis.advisor.machine_figures import MachineFigures
    from parallelbench.config.run import RunConfig
    from parallelbench.measure.counting import LayerCount

BACKWARD = 2.0
"""Backward's work ÷ forward's."""
LAUNCH_OVERLAP = 6.0
"""γ of the host's launches and a GPU's work."""
READ_AND_WRITTEN = 3.0
"""Bytes that elementwise work moves ÷ the bytes that it writes: it reads about two values for each."""


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Parts of a step, seconds, that add up to it; of the device that works longest."""

    compute_s: float = 0.0
    """Forward and backward."""
    communication_s: float = 0.0
    """Collectives and messages that no computation hides."""
    bubble_s: float = 0.0
    """Waiting for other stages."""
    optimizer_s: float = 0.0
    """Updating parameters."""
    data_s: float = 0.0
    """Fetching the batch."""
    other_s: float = 0.0
    """What every step costs."""

    @property
    def step_s(self) -> float:
        """The whole step."""
        return float(sum(getattr(self, each.name) for each in fields(self)))

    def stretched(self, factor: float) -> Phases:
        """All parts longer alike."""
        return Phases(**{each.name: factor * getattr(self, each.name) for each in fields(self)})


@dataclass(frozen=True, kw_only=True)
class SuiteJob:
    """One run, what its layers have to do, where, and by which fitted numbers."""

    run: RunConfig
    layers: Sequence[LayerCount]
    figures: MachineFigures
    scales: Mapping[str, float]

    @property
    def value_bytes(self) -> int:
        """Bytes of a parameter or a gradient."""
        return 8 if self.run.precision == "fp64" else 4

    @property
    def activation_share(self) -> float:
        """Bytes of an activation ÷ of one in fp32."""
        return {"fp64": 2.0, "bf16": 0.5, "fp16": 0.5}.get(self.run.precision, 1.0)

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(layer.parameters for layer in self.layers)

    def crowding(self, busy: int) -> float:
        """Compute time where so many devices of a node work at once ÷ where all do."""
        most = max(self.figures.devices_per_node, 2)
        alone = self.scales["alone"]
        return alone + (1.0 - alone) * (min(busy, most) - 1) / (most - 1)

    @cached_property
    def columns(self) -> Mapping[str, Values]:
        """The layers' counts as arrays."""
        names = (
            *("product_flop", "convolution_flop", "grouped_flop", "output_bytes", "operations", "shardable_flop"),
            *("boundary_bytes", "parameters", "shardable_parameters", "exchanged_bytes", "tensors"),
        )
        return {name: np.array([getattr(each, name) for each in self.layers], dtype=np.float64) for name in names}

    def forward_s(self, samples: float, *, tensor: int = 1) -> Values:
        """Each layer's forward pass on one device among busy ones; `tensor` devices share what the plan shards."""
        curve = self.figures.matmul(self.run.precision)
        if curve is None:
            raise ConfigError(
                f"no speed of products in precision={self.run.precision} is known for {self.figures.accelerator}: "
                "calibrate this machine, or choose another precision"
            )
        counts = self.columns
        shared = counts["shardable_flop"] * (1.0 - 1.0 / tensor)
        flop = {
            "product_scale": samples * (counts["product_flop"] - shared),
            "convolution_scale": samples * counts["convolution_flop"],
            "grouped_scale": samples * counts["grouped_flop"],
        }
        fitted = self.scales
        kernels = np.sum([fitted[name] * each / curve.at(each) for name, each in flop.items()], axis=0)
        moved = READ_AND_WRITTEN * self.activation_share * samples * counts["output_bytes"]
        kernels = kernels + fitted["traffic_scale"] * moved / self.figures.memory_bytes_per_s.value
        launches = fitted["launch_scale"] * self.figures.launch_s.value * counts["operations"]
        together: Values = (
            kernels + launches if self.figures.device_type == "cpu" else overlapped(kernels, launches, LAUNCH_OVERLAP)
        )
        return together

    def backward_s(self, forward_s: Values) -> Values:
        """Each layer's backward pass, with what it computes again; the first layer's input needs no gradient."""
        factors = np.full(len(forward_s), BACKWARD)
        factors[0] = 1.0
        result: Values = (factors + self._repeated) * forward_s
        return result

    @property
    def _repeated(self) -> Values:
        """Shares of each layer's forward pass that backward repeats; of attention its products outside of the plan."""
        counts, chosen = self.columns, self.run.activation_recomputation
        shares = np.zeros(len(self.layers))
        if chosen == "full":
            shares[:-1] = 1.0
        elif chosen == "selective":
            block = self.run.model.attention.partition(".")[0]
            attends = np.array([fnmatchcase(layer.name, block) for layer in self.layers])
            inner = counts["product_flop"] - counts["shardable_flop"]
            shares = np.where(attends, inner / np.maximum(counts["product_flop"], 1.0), 0.0)
        return shares

    def update_s(self, parameters: float, tensors: float) -> float:
        """The optimizer's update of so many parameters: gradient, parameter and states read, the latter two written."""
        states = self.run.optimizer.states_per_parameter() or 0
        moved = parameters * self.value_bytes * (3.0 + 2.0 * states)
        launches = tensors * (3.0 + 4.0 * states) * self.figures.launch_s.value
        time_s = moved / self.figures.memory_bytes_per_s.value
        if self.figures.device_type == "cpu":
            return self.scales["update_scale"] * (time_s + launches)
        return self.scales["update_scale"] * max(time_s, self.figures.launch_s.value)

    def data_s(self, samples: float) -> float:
        """Taking a batch from memory: one byte read and one number written and read per value."""
        values = float(np.prod(self.run.data.shape))
        return samples * values * (1.0 + 2.0 * self.value_bytes) / self.figures.memory_bytes_per_s.value

    def phases(self, **parts: float) -> Phases:
        """Phases with what every step costs."""
        return Phases(other_s=self.scales["step_s"], **parts)
