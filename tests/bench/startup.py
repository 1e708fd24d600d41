"""How long the program takes to answer."""

from __future__ import annotations

import subprocess
import sys
import time

from tests.bench.measure import Figure, paired


def figures() -> list[Figure]:
    """Wall time of whole commands."""
    results = paired({"--help": lambda: seconds_of("--help"), "show": lambda: seconds_of("show")})
    return [
        Figure("parallelbench --help", results["--help"], "s", 0.15, False),
        Figure("parallelbench show", results["show"], "s", 0.5, False),
    ]


def seconds_of(*arguments: str) -> float:
    """Wall time of one command of the program."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "parallelbench.cli", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start
