"""Refusals that several strategies share; loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from parallelbench.spec.config import RunConfig


def check_two_devices(run: RunConfig, *, instead: str = "strategy=single for one device") -> None:
    """Refuse one device, where there is nothing to distribute; `instead` is what to choose there."""
    if run.devices < 2:
        raise ConfigError(f"strategy={run.strategy.name} needs two devices or more: choose devices=2, or {instead}")


def check_no_fp16(run: RunConfig, reason: str) -> None:
    """Refuse fp16, whose gradients are scaled by one process; `reason` says why the strategy has none that could."""
    if run.precision == "fp16":
        raise ConfigError(
            f"precision=fp16 with strategy={run.strategy.name} is refused: {reason}; choose precision=bf16"
        )


SCALES_ALONE = "each process would scale gradients on its own"
"""The reason of strategies whose processes hold different parts of the model."""
