"""One run of the benchmark: from a resolved configuration to Parquet rows."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_BESIDE = str(Path(__file__).parents[1])


class _OwnPackages:
    """Finds the suite's packages where this one is: PYTHONPATH comes first else, and others have a `launch`, too."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [_BESIDE]) if name in ("launch", "analysis", "conf") else None


sys.meta_path.insert(0, _OwnPackages)
