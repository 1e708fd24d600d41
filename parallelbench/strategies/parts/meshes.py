"""Meshes of data × pipeline × tensor, and what tensor parallelism needs of a model; loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from parallelbench.spec.config import RunConfig


@dataclass(frozen=True)
class Mesh:
    """The dimensions that a strategy asks for; the data dimension follows. Ranks count along the last one first."""

    devices: int
    inner: dict[str, int]
    """Option of the strategy → size of that dimension."""

    @property
    def inner_size(self) -> int:
        """Devices that hold one copy of the model together."""
        size = 1
        for part in self.inner.values():
            size *= part
        return size

    @property
    def data(self) -> int:
        """Copies of the model; at least 1, so that it can be asked before `check`."""
        return max(1, self.devices // self.inner_size)

    def check(self, run: RunConfig, *, least_data: int) -> None:
        """Refuse sizes whose product isn't the number of devices, and dimensions that aren't there."""
        who, size = f"strategy={run.strategy.name}", self.inner_size
        for name, part in self.inner.items():
            if part < 2:
                raise ConfigError(
                    f"strategy.{name}={part} leaves {who} without that dimension: choose strategy.{name}=2 or more, or "
                    "a strategy of fewer dimensions"
                )
        if self.devices % size or self.data < least_data:
            options = " and ".join(f"strategy.{name}={part}" for name, part in self.inner.items())
            more = f", at least {least_data * size}" if least_data > 1 else ""
            advice = max(least_data, -(-self.devices // size)) * size
            raise ConfigError(
                f"{who} with {options} needs a multiple of {size} devices{more}, not devices={self.devices}: "
                f"choose devices={advice}, or sizes whose product divides the devices"
            )


def check_tensor_plan(run: RunConfig, *, shards: int, option: str) -> None:
    """Refuse models whose linear layers can't be cut into so many shards; `option` is what asked for them."""
    who, units = f"strategy={run.strategy.name}", run.model.tensor_units
    if not run.model.tensor_plan():
        raise ConfigError(
            f"{who} finds nothing to shard in model={run.model.name}: only pairs of linear layers are sharded, as "
            "DTensor's convolutions are not to be trusted; choose model=mlp, vit or cnn_small, or strategy=fsdp"
        )
    if units % shards:
        valid = [str(n) for n in range(2, min(units, 1024) + 1) if units % n == 0]
        raise ConfigError(
            f"{who} can't cut model={run.model.name} into {shards} equal shards ({option}): its layers consist of "
            f"{units} equal parts: choose {', '.join(valid) or 'another model, or strategy=ddp'}"
        )
    if run.precision == "fp16":
        raise ConfigError(
            f"precision=fp16 with {who} is refused: each process would scale gradients on its own; "
            "choose precision=bf16"
        )
