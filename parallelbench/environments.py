"""Environments of their own, for TensorFlow and for engines: where each is, and whether a run can use it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


TENSORFLOW_PYTHON = "PARALLELBENCH_TENSORFLOW"
"""Environment variable: the interpreter of TensorFlow's environment, where `make venv-tensorflow` did not make it."""
TENSORFLOW = "2.21"
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
    if chosen := os.environ.get(TENSORFLOW_PYTHON):
        return Path(chosen)
    checkout = Path(__file__).resolve().parents[1]
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
            f"{TENSORFLOW_PYTHON} to an environment with tensorflow[and-cuda] {TENSORFLOW}"
        )


@cache
def look(python: Path) -> EnvironmentFinding:
    """Ask an environment what it has, without loading the framework."""
    remedy = f"run `make venv-tensorflow`, or set {TENSORFLOW_PYTHON} to the python of an environment that has it"
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
    if not found.startswith(f"{TENSORFLOW}."):
        return _bad(f"{python} has TensorFlow {found}, and the suite needs {TENSORFLOW}: {remedy}")
    if said.missing:
        return _bad(f"{python} lacks {', '.join(said.missing)}: {remedy}")
    return EnvironmentFinding(None, f"TensorFlow {found} in {python.parents[1]}", "tensorflow" in said.versions)


def _bad(problem: str) -> EnvironmentFinding:
    return EnvironmentFinding(problem, problem)


OWN_ENVIRONMENT = ("velox",)
"""Engines that can't live in the suite's environment: their libraries need other versions of its packages."""
VELOX_PYTHON = "PARALLELBENCH_VELOX_PYTHON"
"""Environment variable: the interpreter of Velox's environment, where that is not beside the suite's own."""
VELOX_FOLDER = ".venv-velox"
"""What `make venv-velox` makes, beside the folder of the suite's own environment."""
VELOX = {"pyvelox": "0.2.0", "pyarrow": "19.0.1"}
"""Versions that were tested together; pyvelox is linked against this Arrow."""
_IN_OWN = {"numpy": "numpy", "torch": "torch", "arrow": "pyarrow", "polars": "polars", "duckdb": "duckdb"}
_MAKE = f"`make venv-velox` makes it, or name its interpreter in {VELOX_PYTHON}"


def interpreter(engine: str) -> Path:
    """The Python that an engine runs in; `ConfigError` with the fix where its library is missing or of another version.

    Looks at the names of installed distributions only, which takes a millisecond.
    """
    if engine == "velox":
        return _velox()
    package = _IN_OWN[engine]
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"preprocess.engine={engine} needs {package}, which is not installed: pip install 'parallelbench[{engine}]'"
        ) from None
    return Path(sys.executable)


def _velox() -> Path:
    python = Path(os.environ.get(VELOX_PYTHON) or Path(sys.prefix).parent / VELOX_FOLDER / "bin" / "python")
    if not os.access(python, os.X_OK):
        raise ConfigError(f"preprocess.engine=velox needs an environment of its own, and {python} is missing: {_MAKE}")
    found = installed(python)
    for package, version in VELOX.items():
        if found.get(package) != version:
            raise ConfigError(
                f"preprocess.engine=velox needs {package} {version}, but {python} has {found.get(package) or 'none'}: "
                f"{_MAKE}"
            )
    return python


def installed(python: Path) -> dict[str, str]:
    """The distributions of VELOX in an environment, with their versions."""
    folders = [Path(path) for path in python.parent.parent.glob("lib/python3*/site-packages")]
    there = metadata.distributions(path=[str(folder) for folder in folders])
    return {each.name.lower(): each.version for each in there if each.name.lower() in VELOX}


def engine_states() -> Iterator[tuple[str, str]]:
    """The engines that the suite's own dependencies don't bring, and where each is or how to get it; for `doctor`."""
    for engine, packages in (("duckdb", ("duckdb",)), ("velox", tuple(VELOX))):
        try:
            python = interpreter(engine)
        except ConfigError as error:
            yield f"preprocess.engine={engine}", str(error)
            continue
        known = VELOX if engine == "velox" else {name: metadata.version(name) for name in packages}
        yield f"preprocess.engine={engine}", f"{python}: " + ", ".join(f"{name} {known[name]}" for name in packages)
