"""Environments of their own, for TensorFlow and for engines: where each is, and whether a run can use it.

An interpreter is asked where it looks for packages, since that is not seen from outside; no package is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


TENSORFLOW_PYTHON = "PARALLELBENCH_TENSORFLOW"
"""Environment variable: the interpreter of TensorFlow's environment, where none of `make`'s is in the checkout."""
TENSORFLOW = "2.21"
"""The release of TensorFlow that the suite is tested with."""
_BESIDE_TENSORFLOW = ("msgspec", "pyyaml", "psutil", "nvidia-ml-py", "scikit-learn", "numpy")
"""What ranks of TensorFlow's load of the suite's own requirements."""


def has_own(framework: str) -> bool:
    """Whether a framework's ranks need another interpreter than the suite's."""
    return framework == "tensorflow"


def python_of(framework: str) -> Path:
    """The interpreter of a framework's environment, whether it exists or not."""
    if not has_own(framework):
        return Path(sys.executable)
    if chosen := os.environ.get(TENSORFLOW_PYTHON):
        return Path(chosen)
    checkout = Path(__file__).resolve().parents[1]
    on_gpus, plain = (checkout / f".venv-{framework}{kind}" / "bin" / "python" for kind in ("-gpu", ""))
    return on_gpus if on_gpus.exists() else plain


def why_not(framework: str, device_type: str) -> str:
    """Why runs can't use a framework's environment, with the remedy; empty: they can."""
    if not has_own(framework):
        return ""
    python = python_of(framework)
    remedy = f"run `make venv-tensorflow`, or set {TENSORFLOW_PYTHON} to the python of an environment that has it"
    if (found := installed(python)) is None:
        return f"{python} is missing, or does not work: {remedy}"
    version = found.get("tensorflow") or found.get("tensorflow-cpu") or "none"
    if not version.startswith(f"{TENSORFLOW}."):
        lacks = f"TensorFlow {TENSORFLOW} (found: {version})"
    elif lacking := [name for name in _BESIDE_TENSORFLOW if name not in found]:
        lacks = ", ".join(lacking)
    elif device_type == "cuda" and "tensorflow" not in found:
        return (
            f"TensorFlow {version} in {python.parents[1]} is built for processors, so it finds no GPU: run "
            "`make venv-tensorflow-gpu`, or choose device=cpu"
        )
    else:
        return ""
    return f"{python} lacks {lacks}: {remedy}"


def require(framework: str, device_type: str) -> None:
    """Raise `ConfigError` with the remedy where a framework's environment is missing, or of another version or kind."""
    if problem := why_not(framework, device_type):
        raise ConfigError(problem)


VELOX_PYTHON = "PARALLELBENCH_VELOX_PYTHON"
"""Environment variable: the interpreter of Velox's environment, where that is not beside the suite's own: its library
needs other versions of the suite's packages."""
VELOX_FOLDER = ".venv-velox"
"""What `make venv-velox` makes, beside the folder of the suite's own environment."""
VELOX = {"pyvelox": "0.2.0", "pyarrow": "19.0.1"}
"""Versions that were tested together; pyvelox is linked against this Arrow."""


def interpreter(engine: str) -> Path:
    """The Python that an engine runs in; `ConfigError` with the fix where its library is not there in its version."""
    if engine == "velox":
        return _velox()
    if engine == "duckdb" and not any(metadata.distributions(name="duckdb")):  # the suite needs all others itself
        raise ConfigError(
            "preprocess.engine=duckdb needs duckdb, which is not installed: pip install 'parallelbench[duckdb]'"
        )
    return Path(sys.executable)


def _velox() -> Path:
    python = Path(os.environ.get(VELOX_PYTHON) or Path(sys.prefix).parent / VELOX_FOLDER / "bin" / "python")
    found = installed(python) or {}
    for package, version in VELOX.items():
        if found.get(package) != version:
            raise ConfigError(
                f"preprocess.engine=velox needs {package} {version}, but {python} has {found.get(package) or 'none'}: "
                f"`make venv-velox` makes it, or name its interpreter in {VELOX_PYTHON}"
            )
    return python


@cache
def installed(python: Path) -> dict[str, str] | None:
    """The distributions that an interpreter finds, with their versions; None where it is missing, or does not work.

    They may be anywhere: Debian's folders, those of the user, of the environment below, or behind a shim.
    """
    command = [str(python), "-c", "import json, sys; print(json.dumps(sys.path[1:]))"]
    try:
        asked = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=True)
        folders = json.loads(asked.stdout.splitlines()[-1])  # what a user's sitecustomize prints comes before
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    # The first of a name is the one that is imported.
    found = reversed([*metadata.distributions(path=folders)])
    return {each.name.lower().replace("_", "-"): each.version for each in found if each.name}


def engine_states() -> Iterator[tuple[str, str]]:
    """The engines that the suite's own dependencies don't bring, and where each is or how to get it; for `doctor`."""
    for engine in ("duckdb", "velox"):
        try:
            python = interpreter(engine)
            versions = VELOX if engine == "velox" else {engine: metadata.version(engine)}
            state = f"{python}: " + ", ".join(f"{name} {version}" for name, version in versions.items())
        except ConfigError as error:
            state = str(error)
        yield f"preprocess.engine={engine}", state
