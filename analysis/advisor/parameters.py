"""The few numbers that are fitted, each with a unit and a prior: shares of data sheets, and fixed costs."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """One fitted number, positive; it is fitted on its logarithm."""

    name: str
    prior: float
    """What is assumed where nothing was measured."""
    spread: float
    """Standard deviation of the prior's natural logarithm; about its relative uncertainty."""
    unit: str
    doc: str
    most: float = math.inf
    """Upper bound: a share of a data sheet stays below 1."""
    least: float = 0.0
    """Lower bound."""


PARAMETERS = (
    Parameter(
        "matrix_share", 0.87, 0.15, "1", "share of the best measured FLOP/s that large matrix products reach", most=1.0
    ),
    Parameter("narrow_width", 128.0, 0.7, "columns", "width of a device's part of a matrix at which the share halves"),
    Parameter("few_rows", 256.0, 0.7, "tokens", "tokens of a micro-batch at which the share halves"),
    Parameter("fp8_speed", 1.4, 0.2, "1", "speed of products in 8 bits ÷ in 16; 2 by data sheets"),
    Parameter("attention_share", 0.4, 0.4, "1", "share of the same that attention's own products reach", most=0.8),
    Parameter("memory_share", 0.7, 0.3, "1", "share of memory bandwidth that elementwise work reaches", most=0.95),
    Parameter(
        "eager_slower", 1.1, 0.15, "1", "time of torch's own kernels ÷ of Megatron-LM's, which fuse what torch does not"
    ),
    Parameter("launch_s", 1e-3, 1.0, "s", "host's time for one layer, forward, per pass; hidden behind the device's"),
    Parameter("tensor_launch_s", 5e-5, 1.0, "s", "the same, for each further device of the tensor group"),
    Parameter("softmax_launch_s", 2e-4, 0.7, "s", "the same, where softmax takes several kernels instead of one"),
    Parameter(
        "odd_share", 0.4, 0.4, "1", "share of the same for logits of a vocabulary that is no multiple of 8", most=0.9
    ),
    Parameter("loss_bytes", 40.0, 0.4, "bytes", "traffic of the loss per logit, forward and backward"),
    Parameter("handover_s", 3e-4, 0.7, "s", "a pipeline stage's fixed time to hand over a micro-batch, each way"),
    Parameter("link_share", 0.7, 0.3, "1", "share of the links' bandwidth that collectives in a node reach", most=0.95),
    Parameter(
        "network_share",
        0.7,
        0.3,
        "1",
        "share of the network's bandwidth that collectives between nodes reach",
        most=0.95,
    ),
    # Priors of both latencies: NCCL's own for rings, src/graph/tuning.cc.
    Parameter("link_latency_s", 3.4e-6, 0.7, "s", "one turn of a collective in a node"),
    Parameter("network_latency_s", 9.6e-6, 0.7, "s", "one turn of a collective between nodes"),
    Parameter("gradient_bytes", 2.8, 0.35, "bytes", "moved per reduced gradient; 2 in half, 4 in single precision"),
    Parameter(
        "overlap", 3.0, 0.4, "1", "γ of compute and sharding's collectives; 1: none hidden, 10: nearly all", least=1.0
    ),
    Parameter("update_share", 0.5, 0.5, "1", "share of memory bandwidth that the optimizer reaches", most=0.95),
    Parameter("step_s", 5e-3, 1.0, "s", "fixed time of each step"),
)
"""Fitted on a site's measurements, from these priors."""

Fitted = dict[str, float]


def priors() -> Fitted:
    """What is assumed before anything is measured."""
    return {each.name: each.prior for each in PARAMETERS}
