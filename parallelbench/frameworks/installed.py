"""Frameworks that have an environment of their own: where it is, and whether a run can use it. Loads none of them."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from parallelbench.errors import ConfigError

PYTHON_VARIABLE = "PARALLELBENCH_TENSORFLOW"
"""Environment variable: the interpreter of TensorFlow's environment, where `make tensorflow` did not make it."""
NEEDED = "2.21"
"""The release of TensorFlow that the suite is tested with."""
_ASK = """
import json
from importlib import metadata
found = {}
for name in ("tensorflow", "tensorflow-cpu", "numpy"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
missing = []
for name in ("msgspec", "yaml", "psutil", "pynvml", "sklearn", "numpy", "parallelbench"):
    import importlib.util
    if importlib.util.find_spec(name) is None:
        missing.append(name)
print(json.dumps({"versions": found, "missing": missing}))
"""


class Environment(msgspec.Struct, frozen=True):
    """What an environment says of itself."""

    versions: dict[str, str]
    missing: list[str]


class EnvironmentFinding(NamedTuple):
    """Whether runs can use an environment."""

    problem: str | None
    """Why not, with the remedy; None: they can."""
    text: str
    """One line for `doctor`."""
    on_gpus: bool = False
    """Whether it was built for GPUs, too."""


def python_of(framework: str) -> Path:
    """The interpreter of a framework's environment, whether it exists or not."""
    if chosen := os.environ.get(PYTHON_VARIABLE):
        return Path(chosen)
    checkout = Path(__file__).resolve().parents[2]
    return checkout / f".venv-{framework}" / "bin" / "python"


def require(framework: str, device_type: str) -> None:
    """Raise `ConfigError` with the remedy where a framework's environment is missing, or of another version or kind."""
    if framework == "torch":
        return
    found = look(python_of(framework))
    if found.problem:
        raise ConfigError(found.problem)
    if device_type == "cuda" and not found.on_gpus:
        raise ConfigError(
            f"{found.text} finds no GPU, though torch does: it is built for processors; choose device=cpu, or set "
            f"{PYTHON_VARIABLE} to an environment with tensorflow[and-cuda] {NEEDED}"
        )


@cache
def look(python: Path) -> EnvironmentFinding:
    """Ask an environment what it has, without loading the framework."""
    remedy = f"run `make tensorflow`, or set {PYTHON_VARIABLE} to the python of an environment that has it"
    if not os.access(python, os.X_OK):
        return _bad(f"TensorFlow has no environment here ({python} does not exist): {remedy}")
    try:
        asked = subprocess.run([str(python), "-c", _ASK], capture_output=True, timeout=60, check=True)
        said = msgspec.json.decode(asked.stdout, type=Environment)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
        return _bad(f"{python} does not work: {remedy}")
    found = said.versions.get("tensorflow") or said.versions.get("tensorflow-cpu")
    if found is None:
        return _bad(f"{python} has no TensorFlow: {remedy}")
    if not found.startswith(f"{NEEDED}."):
        return _bad(f"{python} has TensorFlow {found}, and the suite needs {NEEDED}: {remedy}")
    if said.missing:
        return _bad(f"{python} lacks {', '.join(said.missing)}: {remedy}")
    return EnvironmentFinding(None, f"TensorFlow {found} in {python.parents[1]}", "tensorflow" in said.versions)


def _bad(problem: str) -> EnvironmentFinding:
    return EnvironmentFinding(problem, problem)
