"""Somebody else's program with the shim that notes its steps against the same without."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from parallelbench.frameworks.program.journals import Journals
from tests.bench.measure import Figure, paired, ratios
from tests.helpers import interval
from tests.program.shimmed import environment

ROUNDS = 101
STEPS = 20
_PROGRAM = """
import sys, time
import torch
from torch.optim import optimizer as hooks
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter as Batches

before, after = dict(hooks._global_optimizer_pre_hooks), dict(hooks._global_optimizer_post_hooks)
run, fetch = torch.autograd._engine_run_backward, Batches.__next__

def note(on):
    for mine, all_of_them in ((before, hooks._global_optimizer_pre_hooks), (after, hooks._global_optimizer_post_hooks)):
        all_of_them.clear()
        all_of_them.update(mine if on else {})
    torch.autograd._engine_run_backward = run if on else run.__wrapped__
    Batches.__next__ = fetch if on else fetch.__wrapped__

steps, batch = int(sys.argv[1]), 64
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
loader = DataLoader(TensorDataset(torch.randn(steps * batch, 512)), batch_size=batch)
for line in sys.stdin:
    note(line == "on\\n")
    start = time.perf_counter()
    for (samples,) in loader:
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()
    print(time.perf_counter() - start, flush=True)
"""
"""Trains an epoch for each line of its input, with the shim or with all of it taken out, and prints its seconds. One
process: two would have their memory at different places, which makes more difference."""


def figures() -> list[Figure]:
    """Time without ÷ time with, and what the shim says of its own time."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _PROGRAM, str(STEPS)]
        with subprocess.Popen(
            command, env=environment(Path(folder)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as program:
            source, sink = program.stdin, program.stdout
            assert source is not None
            assert sink is not None

            def epoch(way: str) -> float:
                source.write(f"{way}\n")
                source.flush()
                return float(sink.readline())

            results = paired({"off": lambda: epoch("off"), "on": lambda: epoch("on")}, ROUNDS)
            source.close()
        (journal,) = Journals(Path(folder)).poll()
    assert len(journal.steps) == STEPS * (ROUNDS + 1)
    speeds = ratios(results, "off", "on")
    low, high = interval(tuple(speeds)) or (0.0, 0.0)
    step_ms = statistics.median(results["off"]) / STEPS * 1e3
    note = f"steps of {step_ms:.1f} ms on one core; {ROUNDS} rounds of {STEPS}, 95 % interval {low:.4f} – {high:.4f}"
    own = [step.own_ns / 1e3 for step in journal.steps[STEPS:]]
    return [
        Figure("a program whose steps are noted ÷ the same without, speed", speeds, "", 0.995, True, note),
        Figure("what noting a step takes, as it says itself", own, "µs", None, False),
    ]
