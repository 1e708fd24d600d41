"""Where the tests' time goes: `PYTEST_COSTS=FILE make test-all`, then `python -m tests.costs FILE`.

Each test adds a line: the seconds it took, and the CPU seconds of its process and of all that these started. Unlike the
time that pytest shows, CPU seconds hardly depend on what else the machine does. A test pays for the fixtures and the
servers that it is the first to need.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "PYTEST_COSTS"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@contextmanager
def recorded(test: str) -> Iterator[None]:
    """Append what a test takes to the file that `PYTEST_COSTS` names; without it, do nothing."""
    if VARIABLE not in os.environ:
        yield
        return
    began_s, cpu_s = time.perf_counter(), _cpu_s()
    yield
    line = {"test": test, "wall_s": time.perf_counter() - began_s, "cpu_s": _cpu_s() - cpu_s}
    with Path(os.environ[VARIABLE]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _cpu_s() -> float:
    """CPU seconds of this process and its descendants, those that have ended and were waited for included."""
    ticks, left = 0, [str(os.getpid())]
    while left:
        folder = Path("/proc", left.pop())
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime: see proc(5)
            left += [child for path in folder.glob("task/*/children") for child in path.read_text().split()]
        except OSError:  # it has just ended
            continue
    return ticks / _TICKS_PER_S


def _table(lines: list[dict[str, float | str]]) -> str:
    """Files and then tests, the dearest first."""
    shown = []
    for name_of, most in ((lambda test: test.partition("::")[0], 200), (str, 60)):
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for line in lines:
            for place, value in enumerate((line["cpu_s"], line["wall_s"], 1)):
                sums[name_of(str(line["test"]))][place] += float(value)
        shown.append(f"{'CPU s':>8} {'s':>8} tests")
        for name, (cpu_s, wall_s, count) in sorted(sums.items(), key=lambda pair: -pair[1][0])[:most]:
            shown.append(f"{cpu_s:8.1f} {wall_s:8.1f} {count:5.0f}  {name}")
        shown.append(f"{sum(v[0] for v in sums.values()):8.1f} {sum(v[1] for v in sums.values()):8.1f}        in all\n")
    return "\n".join(shown)


if __name__ == "__main__":
    print(_table([json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]))
