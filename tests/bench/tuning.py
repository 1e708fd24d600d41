"""What `tune=true` chooses, against the best of all settings, and what choosing costs beside ten epochs."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    mine = to_mapping(applied(planned, choice).run)
    settings = [patched(to_mapping(planned.run), patch) for patch in _all(planned.run)]
    settings += [] if mine in settings else [mine]  # implementation=auto, say
    times: list[list[float]] = [[] for _ in settings]
    for number in range(ROUNDS):
        order = range(len(settings))
        for index in reversed(order) if number % 2 else order:
            times[index].append(_step_s(from_mapping(settings[index])))
    best, own = min(times, key=statistics.median), times[settings.index(mine)]
    words = " ".join(map(str, _keys(settings[times.index(best)])))
    return [best_s / own_s for best_s, own_s in zip(best, own, strict=True)], words, statistics.median(own)


def _keys(plain: dict[str, Any]) -> tuple[str, ...]:
    layout = "channels_last" if plain["channels_last"] else "channels first"
    return (plain["precision"], layout, plain["optimizer"]["implementation"])


def _step_s(run: RunConfig) -> float:
    return timed(run, "cpu", steps=STEPS)[0]
