"""Whether a run can be compared with one device, what of it, and how closely; a finding. Loads no torch.

Whether parity passed is decided in `parity.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from parallelbench.config.components import EXACT, TRAITS
from parallelbench.config.run import own_reference
from parallelbench.strategies.single import Single
from parallelbench.world.machine import host_memory_bytes

if TYPE_CHECKING:
    from parallelbench.config.components import Traits
    from parallelbench.config.run import RunConfig


class Finding(NamedTuple):
    """One thing that was checked, or was not."""

    check: str
    detail: str
    """What was compared, or why nothing was."""
    step: int | None = None
    """Counts from 1 over all epochs; the closing check's follow the last of training."""
    difference: float | None = None
    limit: float | None = None

    def row(self, epoch: int) -> dict[str, Any]:
        """The row after an epoch. What was not compared has not passed, and has not failed."""
        # A NaN compares as False, so it fails.
        passed = None if self.limit is None or self.difference is None else self.difference <= self.limit
        return {"epoch": epoch, **self._asdict(), "passed": passed}


PARITY_TEST_SAMPLES = 37
"""Test samples that parity evaluates after each step: a prime number, so that every split makes unequal parts."""
CLOSING_STEPS = 3
"""Steps after the last epoch that are compared: a strategy that idles every other step idles in one of them."""
WIDEST_TOLERANCE = 0.05
"""Most that a strategy may ask for (`Strategy.parity_tolerance`): what gradients rounded to bf16 need."""


_BYTES_COMPARED = 64
"""Of rank 0's host memory, for each parameter, at least: the run's states before and after a step and its gradients in
fp32, and plain code's in fp64."""


def why_too_large(parameters: int) -> str:
    """Why this machine can't hold all that is compared of a whole model; empty: it can."""
    needed = _BYTES_COMPARED * parameters
    there = host_memory_bytes()
    if needed <= there:
        return ""
    return f"whole models of {parameters:,} parameters take {needed >> 30} GiB of host memory, of {there >> 30} GiB"


def granted_tolerance(run: RunConfig) -> float:
    """What the strategy asks for, up to the most that one may."""
    return min(run.strategy.parity_tolerance(), WIDEST_TOLERANCE)


def statistics_pieces(run: RunConfig) -> int | None:
    """Equal pieces of a global batch that batch normalisation takes its statistics of; None where pieces overlap."""
    norm, micro_batches = getattr(run.model, "norm", None), run.strategy.micro_batches_per_step(run)
    if norm == "batch":
        return run.strategy.data_parallel_degree(run) * micro_batches
    return None if norm == "sync" and micro_batches > 1 else 1


def cut_statistics(run: RunConfig, traits: Traits) -> bool:
    """Whether a model of one's own mixes the samples of each of several pieces of a global batch: see `pieces_of`."""
    pieces = run.strategy.data_parallel_degree(run) * run.strategy.micro_batches_per_step(run)
    return traits.mixes_samples and pieces > 1 and not _says_its_norm(run)


def _says_its_norm(run: RunConfig) -> bool:
    return getattr(run.model, "norm", None) in ("batch", "sync")


def pieces_of(run: RunConfig, traits: Traits) -> int | None:
    """Slices of a global batch that plain code computes one after the other.

    Where batch statistics are local, each slice has its own, as in training; None where they can't be had so.
    Elsewhere slices only save memory.
    """
    if _says_its_norm(run):
        return statistics_pieces(run)
    if traits.mixes_samples:
        return run.strategy.data_parallel_degree(run) * run.strategy.micro_batches_per_step(run)
    return math.gcd(run.global_batch_size, run.devices)


def why_in_evaluation(run: RunConfig, traits: Traits) -> str:
    """Why a model can be compared in evaluation mode only; empty: it is compared as it trains."""
    if traits.draws:
        return f"model={run.model.name} draws random numbers in training"
    if cut_statistics(run, traits):
        piece = "data shard" if run.strategy.micro_batches_per_step(run) == 1 else "micro-batch"
        return f"model={run.model.name} mixes the samples of each {piece}, so training differs from one device"
    return ""


def uncompared(run: RunConfig, traits: Traits) -> tuple[str, ...]:
    """Buffers that no split can leave as one device does: they count micro-batches."""
    return traits.counters if run.strategy.micro_batches_per_step(run) > 1 else ()


def local_statistics(run: RunConfig) -> bool:
    """Whether batch normalisation sees only a part of each global batch, so that no split can equal one device."""
    return statistics_pieces(run) != 1


def as_reference(run: RunConfig) -> RunConfig:
    """The same training on one device: by the strategy's own reference where it has one."""
    return msgspec.structs.replace(
        run,
        strategy=own_reference(run) or Single(name="single"),
        optimizer=msgspec.structs.replace(run.optimizer, lr=run.optimizer.scaled_lr(run), lr_rule="constant"),
        batch_size=run.global_batch_size,
        scaling="strong",
        devices=1,
        nodes=1,
        graph=False,
        activation_recomputation="none",
    )


UNIT_ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Largest relative error of rounding to the format that products are computed in (IEEE 754; 8 bits in bf16)."""


def rounding(run: RunConfig, traits: Traits = TRAITS) -> float | None:
    """Relative rounding of the coarsest format that a run's gradients pass through.

    None where the run does not train like one device: by its strategy, by batch statistics of its own, or because its
    ranks draw random numbers of their own.
    """
    if not run.strategy.equals_one_device(run) or local_statistics(run):
        return None
    if why_in_evaluation(run, traits) and not isinstance(run.strategy, Single):
        return None
    granted = granted_tolerance(run)
    return max(UNIT_ROUNDOFF[run.precision], granted if granted > EXACT else 0.0)


def checks_arithmetic(run: RunConfig, device_type: str) -> bool:
    """Whether to hold all threads against one: a GPU has no threads of the host, and one thread is like itself."""
    torch_trains = run.strategy.framework == "torch"
    return run.measure.parity and torch_trains and device_type == "cpu" and run.cores_per_device > 1
