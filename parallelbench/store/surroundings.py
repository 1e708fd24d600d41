"""Which of a run's surroundings change what is measured. Never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MATTER = (
    *("platform", "python", "packages.torch", "packages.torchvision", "packages.numpy"),
    *("cpu", "logical_cores", "threads", "cpu_governor"),
    *("cuda.version", "cuda.cudnn", "cuda.nccl", "cuda.driver", "cuda.power_limit_w"),
    *("float32_matmul_precision", "cudnn_allow_tf32", "cudnn_benchmark"),
)
_VARIABLES = tuple(f"variables.{name}_" for name in ("NCCL", "GLOO", "OMP", "MKL", "MALLOC", "TORCH", "PYTORCH"))
_OF_EACH_GPU = ("cuda.driver", "cuda.power_limit_w")
"""A line per GPU that the process sees."""
_TORCHRUN = "variables.TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""What torchrun sets for its processes, and a single process hasn't: it says what happens after an error."""


def matters(key: str) -> bool:
    """Whether an entry of the environment must be alike for times to be compared."""
    return key in _MATTER or (key.startswith(_VARIABLES) and key != _TORCHRUN)


def unlike(
    one: Mapping[str, Any], other: Mapping[str, Any], relevant: Callable[[str], bool] = matters
) -> dict[str, tuple[Any, Any]]:
    """What is relevant and not alike in the `entries` of two environments: dotted key → the value of each."""
    keys = sorted(key for key in one.keys() | other.keys() if relevant(key))
    return {key: (one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)}


def entries(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key → value. What is said of each visible GPU counts once where all have the same: a job that sees two is
    on no other machine than one that sees one.
    """
    flat = flatten(environment)
    for key in _OF_EACH_GPU:
        if isinstance(flat.get(key), str):
            flat[key] = ", ".join(sorted(set(flat[key].split("\n"))))
    return flat


def flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} → {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
