"""Every strategy × optimizer × precision at 2, 4, 8 and 64 ranks, without their devices: each builds and trains."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from launch.sweep.compose import group_choices

pytestmark = pytest.mark.slow

SIZES = (2, 4, 8, 64)
OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad")
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16")
DATA = ["data=synthetic", "data.channels=1", "data.image_size=32", "data.train_samples=1024", "data.test_samples=64"]
MLP = ["model=mlp", "model.hidden=[64,64,64]"]
DEEP = [*DATA, "batch_size=512", "model=vit", "model.layers=64", "model.dim=16", "model.heads=2"]
NOT_POSSIBLE = {
    "downpour": "its servers wait for whom asks next, and nobody does",
    "data_parallel": "one process drives all devices, which are real ones",
}
"""What no made-up rank can do. Both are trained by several processes, or several devices, elsewhere."""
LAST_ONES = ("pipeline", "dp_pp", "dp_pp_tp", "model_parallel", "model_parallel_tutorial", "parameter_server")
"""Strategies whose ranks do different things: the last one is tried, too."""
STRATEGIES = [name for name in group_choices()["strategy"] if name not in NOT_POSSIBLE]
REFUSED = "refused: "


def cases(strategy: str) -> list[dict[str, Any]]:
    ranks_of = {size: (0, size - 1) if strategy in LAST_ONES else (0,) for size in SIZES}
    return [
        {"strategy": strategy, "size": size, "rank": rank, "overrides": overrides(strategy, size, optimizer, precision)}
        for size, optimizer, precision in product(SIZES, optimizers(strategy), PRECISIONS)
        for rank in ranks_of[size]
    ]


def optimizers(strategy: str) -> tuple[str, ...]:
    return ("lbfgs",) if strategy == "sandblaster_lbfgs" else OPTIMIZERS


def overrides(strategy: str, size: int, optimizer: str, precision: str) -> list[str]:
    batch = [f"optimizer={optimizer}", f"precision={precision}", "batch_size=1024"]
    return [*DATA, *MLP, *batch]
