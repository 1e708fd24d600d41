"""Training with the sampler's process beside it against training without, at the default rate."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from launch.sweep import one_run
from parallelbench.errors import count_of
from parallelbench.results.journal import Journal
from parallelbench.telemetry.sampler import SamplerSettings, sampling
from parallelbench.world.machine import this_machine, visible_gpus
from tests.bench.loop import OVERRIDES, Suite
from tests.bench.measure import Figure, paired, ratios
from tests.helpers import interval

HZ = 10.0
ROUNDS = 25
SAMPLES = 12_800
"""100 steps, some 20 samples."""


def figures() -> list[Figure]:
    """Time without ÷ time with, once with a core for the sampler and once without."""
    suite, spare = Suite(one_run([*OVERRIDES, f"data.train_samples={SAMPLES}"]).run), _spare_cores()
    alternatives = {"off": suite.epoch, "no spare core": lambda: _sampled(suite, [])}
    if spare:
        alternatives["a spare core"] = lambda: _sampled(suite, spare)
    results = paired(alternatives, ROUNDS)
    return [_figure(name, ratios(results, "off", name)) for name in alternatives if name != "off"]


def _figure(name: str, speeds: list[float]) -> Figure:
    """The interval shows what such a machine can tell apart at all."""
    low, high = interval(tuple(speeds)) or (0.0, 0.0)
    note = (
        f"cnn_small, epochs of 100 steps on one core; of the host and {count_of(len(visible_gpus()), 'GPU')}; "
        f"{ROUNDS} rounds, 95 % interval {low:.4f} – {high:.4f}"
    )
    return Figure(f"training while sampled at 10 Hz, {name}, ÷ not sampled, speed", speeds, "", 0.995, True, note)


def _sampled(suite: Suite, spare_cores: list[int]) -> float:
    with _sampler(spare_cores):
        return suite.epoch()


@contextlib.contextmanager
def _sampler(spare_cores: list[int]) -> Iterator[None]:
    """A sampler that has taken its first sample: its start is no part of an epoch."""
    with tempfile.TemporaryDirectory() as folder:
        recording, log = Path(folder) / "telemetry.bin", Journal(Path(folder) / "rank.jsonl")
        settings = SamplerSettings(
            recording=str(recording),
            run_id="bench",
            attempt=1,
            node="here",
            hz=HZ,
            gpus=len(visible_gpus()),
            spare_cores=spare_cores,
            parent=os.getpid(),
        )
        with sampling(settings, log):
            while not (recording.exists() and recording.stat().st_size):
                time.sleep(0.01)
            yield
        log.close()


def _spare_cores() -> list[int]:
    """All but the one that the benchmarks train on."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    every = this_machine().cores
    os.sched_setaffinity(0, mine)
    return [core for core in every if core not in mine]
