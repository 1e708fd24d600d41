"""One rank of a strategy that is checked: `-m parallelbench.gpu_check.ranks RUN.json cpu|cuda RESULT.json`."""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from parallelbench.errors import one_line
from parallelbench.gpu_check.small_runs import loader_of
from parallelbench.gpu_check.training import train_watched
from parallelbench.optimizers import Lbfgs
from parallelbench.rank.numerics import set_precision
from parallelbench.rank.parity import DIFFERENCES, as_checked, check_parity
from parallelbench.rank.session import build_model
from parallelbench.rank.world import World, join
from parallelbench.spec.mapping import from_mapping

if TYPE_CHECKING:
    from parallelbench.spec.config import RunConfig


class Result(msgspec.Struct):
    """Rank 0's results; a part is missing where a rank failed before it."""

    difference: float | None = None
    """Largest difference in the parity check; None: not checked."""
    tolerance: float | None = None
    watched: bool = False
    """Whether an epoch was trained in which no rank waited for its device."""


def main(arguments: list[str]) -> int:
    """Check parity, then train an epoch that must not wait."""
    run_file, device_type, result_file = arguments
    run = from_mapping(msgspec.json.decode(Path(run_file).read_bytes()))
    world = join(device_type, devices=run.devices, timeout_s=run.launcher.collective_timeout_s, nccl=run.nccl)
    result = Result()
    try:
        if run.strategy.equals_one_device(run):
            result.difference, result.tolerance = _parity(run, world)
            _write(result_file, result, world)
        set_precision(run.precision)
        if device_type == "cuda" and not waits_by_design(run):
            replica = run.strategy.prepare(build_model(run), run, world)
            loader = loader_of(run, world, replica.data_shard)
            train_watched(replica, loader, run=run, world=world, set_mode=torch.cuda.set_sync_debug_mode)
            replica.close()
            result.watched = True
        _write(result_file, result, world)
    except Exception as error:
        # Only the first failure is recorded: the others follow from it.
        with contextlib.suppress(FileExistsError), Path(f"{result_file}.error").open("x") as file:
            file.write(one_line(f"rank {world.rank}: {type(error).__name__}: {error}"))
        raise
    world.barrier()
    world.leave()
    return 0


def waits_by_design(run: RunConfig) -> str:
    """Why the host waits for the device in every step of this run; empty: it must not."""
    return "L-BFGS reads each loss" if isinstance(run.optimizer, Lbfgs) else run.strategy.waits_in_steps


def _parity(run: RunConfig, world: World) -> tuple[float, float]:
    """The largest difference, infinite for a NaN, and its tolerance."""
    checked = as_checked(run)
    rows = check_parity(build_model(checked), checked, world, lambda of, shard: loader_of(of, world, shard))
    if rows is None:
        raise MemoryError("one device has too little memory for the comparison")
    worst = [row[name] for row in rows for name in DIFFERENCES]  # empty except on rank 0
    broken = any(math.isnan(value) for value in worst)  # which a maximum may lose
    return float("inf") if broken else max(worst, default=0.0), checked.strategy.parity_tolerance()


def _write(path: str, result: Result, world: World) -> None:
    if world.rank == 0:
        Path(path).write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
