"""What `tune=true` chooses, against the best of all settings, and what choosing costs beside ten epochs."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from launch.sweep import PlannedRun, one_run
from launch.tuning import IMPLEMENTATIONS, PRECISIONS, applied, try_out_here
from parallelbench.config import from_mapping, to_mapping
from parallelbench.tuning import patched, timed
from tests.bench.measure import Figure

if TYPE_CHECKING:
    from launch.tuning import Choice
    from parallelbench.config import RunConfig

MODELS = ("cnn_small", "cnn_large_dense")
WORK = (
    *("data=synthetic", "data.channels=1", "data.image_size=28", "data.train_samples=60000", "data.test_samples=1000"),
    *("batch_size=128", "device=cpu", "loader=resident"),
)
"""As large as MNIST."""
ROUNDS, STEPS = 5, 4


def figures() -> list[Figure]:
    """Per model: speed of the choice ÷ that of the best, and seconds of the trial ÷ those of ten epochs with it."""
    return [figure for model in MODELS for figure in _figures(model)]


def _figures(model: str) -> list[Figure]:
    planned = replace(one_run([f"model={model}", *WORK, f"results={Path('nowhere').absolute()}"]), tune=True)
    choice = try_out_here([planned])
    shares, best, step_s = _against_all(planned, choice)
    note = (
        f"{' '.join(choice.overrides) or 'as it is'} was chosen of {len(choice.findings.trials)} trials, of all "
        f"{len(_all(planned.run))} settings {best} was fastest; {ROUNDS} rounds"
    )
    cost = choice.took_s / (10 * planned.run.steps_per_epoch * step_s)
    took = f"{choice.took_s:.1f} s, {10 * planned.run.steps_per_epoch} steps of {1e3 * step_s:.1f} ms each"
    return [
        Figure(f"tune=true, {model}: speed of the choice ÷ that of the best", shares, "", 0.97, True, note),
        Figure(f"tune=true, {model}: the trial ÷ ten epochs, time", [100 * cost], "%", 5, False, took),
    ]


def _all(run: RunConfig) -> list[dict[str, object]]:
    return [
        {"precision": precision, "channels_last": layout, "optimizer.implementation": name}
        for precision, layout, name in product(PRECISIONS["cpu"], (False, True), IMPLEMENTATIONS)
    ]


def _against_all(planned: PlannedRun, choice: Choice) -> tuple[list[float], str, float]:
    """By round, the time per step of the best settings ÷ that of the choice; the best in words; the choice's, s."""
    settings = [patched(to_mapping(planned.run), patch) for patch in _all(planned.run)]
    mine = applied(planned, choice).run
    times: list[list[float]] = [[] for _ in settings]
    chosen: list[float] = []
    for _ in range(ROUNDS):
        chosen.append(_step_s(mine))
        for found, plain in zip(times, settings, strict=True):
            found.append(_step_s(from_mapping(plain)))
    best = min(range(len(settings)), key=lambda index: statistics.median(times[index]))
    words = " ".join(f"{key}={value}" for key, value in _all(planned.run)[best].items())
    return [all_s / own_s for all_s, own_s in zip(times[best], chosen, strict=True)], words, statistics.median(chosen)


def _step_s(run: RunConfig) -> float:
    return timed(run, "cpu", steps=STEPS)[0]
