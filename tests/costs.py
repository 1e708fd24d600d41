"""Where the tests' time goes: `TEST_COSTS=FILE make test-all`, then `python -m tests.costs FILE`.

Each test adds a line: the seconds it took, and the CPU seconds of its process and of all that these started. Unlike the
time that pytest shows, CPU seconds hardly depend on what else the machine does. A test pays for the fixtures and the
servers that it is the first to need.

`python -m tests.costs --record FILE…` writes `recorded_costs.txt`, by which `tests/conftest.py` marks tests: those that
take longer than their own marks say. Of several files, the least that a test took counts.
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

VARIABLE = "TEST_COSTS"
RECORD = Path(__file__).with_name("recorded_costs.txt")
SLOW_S, DEAR_S = 0.12, 1.2
"""CPU seconds from which a test is left out of `make check`, and of `make test`."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@contextmanager
def recorded(test: str, mark: str = "") -> Iterator[None]:
    """Append what a test takes to the file that `TEST_COSTS` names; without it, do nothing.

    `mark` is how its author marked it: `slow`, `exhaustive`, `always`, or not at all.
    """
    if VARIABLE not in os.environ:
        yield
        return
    began_s, cpu_s = time.perf_counter(), _cpu_s()
    yield
    line = {"test": test, "mark": mark, "wall_s": time.perf_counter() - began_s, "cpu_s": _cpu_s() - cpu_s}
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


def known() -> dict[str, float]:
    """The CPU seconds of the tests that take longer than their marks say."""
    pairs = (line.partition(" ") for line in RECORD.read_text().splitlines() if not line.startswith("#"))
    return {test: float(cpu_s) for cpu_s, _, test in pairs}


def to_record(lines: list[dict[str, float | str]]) -> str:
    """The content of `recorded_costs.txt`."""
    least: dict[str, float] = {}
    for line in lines:
        test, cpu_s = str(line["test"]), float(line["cpu_s"])
        if cpu_s >= {"": SLOW_S, "slow": DEAR_S}.get(str(line["mark"]), float("inf")):
            least[test] = min(cpu_s, least.get(test, cpu_s))
        else:
            least[test] = 0.0
    rows = [f"{cpu_s:.2f} {test}" for test, cpu_s in sorted(least.items()) if cpu_s]
    return "\n".join(["# CPU seconds of tests, written by `python -m tests.costs --record`.", *rows, ""])


if __name__ == "__main__":
    names = [name for name in sys.argv[1:] if name != "--record"]
    lines = [json.loads(line) for name in names for line in Path(name).read_text().splitlines()]
    if "--record" in sys.argv:
        RECORD.write_text(to_record(lines))
    else:
        print(_table(lines))
