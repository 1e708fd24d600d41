"""Checks whether a run can be done, before anything starts. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from parallelbench.spec.config import RunConfig


def check_run(run: RunConfig, device_type: str) -> None:
    """Raise `ConfigError` with the fix where `run` can't work on devices of this type."""
    channels, height, _ = run.data.shape
    run.model.check(in_channels=channels, image_size=height)
    run.strategy.check(run, device_type)
    run.optimizer.check(run, device_type)
    _check_batch(run)
    if run.precision == "tf32" and device_type == "cpu":
        raise ConfigError("precision=tf32 exists on CUDA devices only: choose precision=fp32 or bf16 on a CPU")
    if run.launcher.in_this_process and run.strategy.processes(run, device_type) > 1:
        raise ConfigError(
            f"launcher=inline runs one process, but strategy={run.strategy.name} needs more: choose launcher=local"
        )


def _check_batch(run: RunConfig) -> None:
    batch, shards, samples = run.global_batch_size, run.strategy.data_parallel_degree(run), run.data.train_samples
    if batch % shards:
        below = batch - batch % shards
        advice = f"{below} or {below + shards}" if below else f"{shards}"
        raise ConfigError(
            f"batch_size={run.batch_size} can't be divided among {shards} devices by strategy={run.strategy.name}: "
            f"choose batch_size={advice}"
        )
    if batch > samples:
        raise ConfigError(
            f"batch_size={run.batch_size} makes a global batch of {batch}, but data={run.data.name} has only {samples} "
            "training samples: choose a smaller batch_size"
        )
