"""Whether a strategy takes a model and a batch on so many devices. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from parallelbench.spec.config import RunConfig

_MORE_SHARES = 64
"""Batches of so many times the devices, at most, are tried before one is proposed."""


def check_fit(run: RunConfig, device_type: str) -> None:
    """Refuse what the strategy can't do with this model and batch on so many devices."""
    run.strategy.check(run, device_type)
    check_batch(run, device_type)


def is_taken(run: RunConfig, device_type: str) -> bool:
    """Whether the strategy takes the run, so that it can be advised."""
    try:
        run.strategy.check(run, device_type)
    except ConfigError:
        return False
    return True


def check_batch(run: RunConfig, device_type: str) -> None:
    """Refuse batches that the devices can't share, and those of more samples than there are."""
    batch, shards, samples = run.global_batch_size, run.strategy.data_parallel_degree(run), run.data.train_samples

    def taken(size: int) -> bool:
        return is_taken(msgspec.structs.replace(run, batch_size=size), device_type)

    if batch % shards:
        below = batch - batch % shards
        ways = range(below, 0, -shards), range(below + shards, below + _MORE_SHARES * shards, shards)
        near = [next((size for size in way if taken(size)), None) for way in ways]
        advice = " or ".join(str(size) for size in near if size) or f"a larger multiple of {shards}"
        raise ConfigError(
            f"batch_size={run.batch_size} can't be divided among {shards} devices by strategy={run.strategy.name}: "
            f"choose batch_size={advice}"
        )
    if batch > samples:
        raise ConfigError(
            f"batch_size={run.batch_size} makes a global batch of {batch}, but data={run.data.name} has only {samples} "
            "training samples: choose a smaller batch_size"
        )
