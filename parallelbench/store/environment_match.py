"""Which entries of a run's environment must match for its times to be compared. Never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MUST_MATCH = (
    *("platform", "python", "packages.torch", "packages.torchvision", "packages.numpy"),
    *("cpu", "logical_cores", "threads", "cpu_governor"),
    *("cuda.version", "cuda.cudnn", "cuda.nccl", "cuda.driver", "cuda.power_limit_w"),
    *("float32_matmul_precision", "cudnn_allow_tf32", "cudnn_benchmark"),
)
_VARIABLES = tuple(f"variables.{name}_" for name in ("NCCL", "GLOO", "OMP", "MKL", "MALLOC", "TORCH", "PYTORCH"))
"""Prefixes of the environment variables that must match, too."""
REPORTED = ("git.commit", "git.dirty", "packages.parallelbench", "host", "allocation")
"""Entries that may differ between compared runs. Comparisons report them."""
SET_BY_LAUNCHER = (
    "threads",
    *(f"variables.{name}" for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")),
    "variables.TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
"""Entries that the launcher and torchrun set as strategy, devices and nodes need it.

They must match only between runs that have these in common.
"""
VOLATILE = ("load_average_1min", "cores_of_rank_0")
"""Entries that differ from run to run. Nothing is said about them."""
_OF_EACH_GPU = ("cuda.driver", "cuda.power_limit_w")
"""Entries with a line per visible GPU."""


def must_match(key: str) -> bool:
    """Whether an entry must be equal in two environments for their times to be compared."""
    return key in MUST_MATCH or key.startswith(_VARIABLES)


def is_reported(key: str) -> bool:
    """Whether an entry may differ and is reported where it does."""
    return key in REPORTED


def is_volatile(key: str) -> bool:
    """Whether a difference in an entry says nothing about the compared runs."""
    return key in (*VOLATILE, *SET_BY_LAUNCHER) or (key.startswith("variables.") and not must_match(key))


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], relevant: Callable[[str], bool] = must_match
) -> dict[str, tuple[Any, Any]]:
    """The relevant `entries` that differ between two environments: dotted key → both values, None for a missing one."""
    keys = sorted(key for key in one.keys() | other.keys() if relevant(key))
    return {key: (one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)}


def entries(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key → value. What all visible GPUs have in common counts once, however many a job sees."""
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
