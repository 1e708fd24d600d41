"""Where each engine's library is: in the suite's own environment, or in one of its own. Starts nothing."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

OWN_ENVIRONMENT = ("velox",)
"""Engines that can't live in the suite's environment: their libraries need other versions of its packages."""
PYTHON = "PARALLELBENCH_VELOX_PYTHON"
"""Environment variable: the interpreter of Velox's environment, where that is not beside the suite's own."""
FOLDER = ".venv-velox"
"""What `make velox` makes, beside the folder of the suite's own environment."""
VELOX = {"pyvelox": "0.2.0", "pyarrow": "19.0.1"}
"""Versions that were tested together; pyvelox is linked against this Arrow."""
_IN_OWN = {"numpy": "numpy", "torch": "torch", "arrow": "pyarrow", "polars": "polars", "duckdb": "duckdb"}
_MAKE = f"`make velox` makes it, or name its interpreter in {PYTHON}"


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
    python = Path(os.environ.get(PYTHON) or Path(sys.prefix).parent / FOLDER / "bin" / "python")
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
