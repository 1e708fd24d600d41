"""Which of a run's surroundings change what is measured. Never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_MATTER = (
    *("platform", "python", "packages.torch", "packages.torchvision", "packages.numpy"),
    *("cpu", "logical_cores", "threads", "cpu_governor"),
    *("cuda.version", "cuda.cudnn", "cuda.nccl", "cuda.driver", "cuda.power_limit_w"),
    *("float32_matmul_precision", "cudnn_allow_tf32", "cudnn_benchmark"),
)
_VARIABLES = tuple(f"variables.{name}_" for name in ("NCCL", "GLOO", "OMP", "MKL", "MALLOC", "TORCH", "PYTORCH"))
_TORCHRUN = "variables.TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""What torchrun sets for its processes, and a single process hasn't: it says what happens after an error."""


def matters(key: str) -> bool:
    """Whether an entry of the environment must be alike for times to be compared."""
    return key in _MATTER or (key.startswith(_VARIABLES) and key != _TORCHRUN)


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What matters and is not alike in two environments: dotted key → the value of each."""
    one, other = flatten(before), flatten(now)
    keys = sorted(key for key in one.keys() | other.keys() if matters(key))
    return {key: (one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)}


def flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} → {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
