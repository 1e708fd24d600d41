"""Somebody else's program with the shim that notes its steps against the same without."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from parallelbench.frameworks.program.journals import Journals
from tests.bench.measure import Figure, paired, ratios
from tests.helpers import interval
from tests.program.shimmed import environment

ROUNDS = 51
STEPS = 40
_PROGRAM = """
import sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
steps, batch = int(sys.argv[1]), 64
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
loader = DataLoader(TensorDataset(torch.randn(steps * batch, 512)), batch_size=batch)
print("ready", flush=True)
for _ in sys.stdin:
    start = time.perf_counter()
    for (samples,) in loader:
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()
    print(time.perf_counter() - start, flush=True)
"""
"""Trains an epoch for each line of its input, and prints its seconds."""


def figures() -> list[Figure]:
    """Time without ÷ time with, and what the shim says of its own time."""
    with tempfile.TemporaryDirectory() as folder, _epochs("") as off, _epochs(folder) as on:
        results = paired({"off": off, "on": on}, ROUNDS)
        (journal,) = Journals(Path(folder)).poll()
    speeds = ratios(results, "off", "on")
    low, high = interval(tuple(speeds)) or (0.0, 0.0)
    step_ms = statistics.median(results["off"]) / STEPS * 1e3
    note = f"steps of {step_ms:.1f} ms on one core; {ROUNDS} rounds of {STEPS}, 95 % interval {low:.4f} – {high:.4f}"
    own = [step.own_ns / 1e3 for step in journal.steps[STEPS:]]
    return [
        Figure("a program whose steps are noted ÷ the same without, speed", speeds, "", 0.995, True, note),
        Figure("what noting a step takes, as it says itself", own, "µs", None, False),
    ]


@contextlib.contextmanager
def _epochs(folder: str) -> Iterator[Callable[[], float]]:
    """A program that has loaded torch; each call is an epoch, and its seconds. An empty folder: without the shim."""
    variables = environment(Path(folder)) if folder else {**os.environ, "PYTHONPATH": ""}
    command = [sys.executable, "-c", _PROGRAM, str(STEPS)]
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        source, sink = program.stdin, program.stdout
        assert source is not None
        assert sink is not None
        assert sink.readline() == "ready\n"

        def epoch() -> float:
            source.write("\n")
            source.flush()
            return float(sink.readline())

        yield epoch
        source.close()
