"""What `tune=true` chooses, against the best of all settings, and what choosing costs beside ten epochs."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from launch.sweep import PlannedRun, one_run
from launch.tuning import EPOCHS, IMPLEMENTATIONS, PRECISIONS, Choice, applied, try_out_here
from parallelbench.config.build import from_mapping, to_mapping
from parallelbench.config.run import RunConfig
from parallelbench.training.tuning import Patch, patched, timed
from tests.bench.measure import Figure

WORK = (
    *("data=synthetic", "data.channels=1", "data.image_size=28", "data.train_samples=60000", "data.test_samples=1000"),
    *("batch_size=128", "device=cpu"),
)
"""As large as MNIST."""
NUMBERS: tuple[Patch, ...] = tuple(
    {"precision": precision, "channels_last": layout, "optimizer.implementation": name}
    for precision, layout, name in product(PRECISIONS["cpu"], (False, True), IMPLEMENTATIONS)
)
"""All settings of how a step is computed; how batches are made is given then, and the other way round."""
LOADERS: tuple[Patch, ...] = tuple({"loader": name} for name in ("resident", "tensor_dataset", "dataloader"))
CASES: dict[str, tuple[tuple[str, ...], tuple[Patch, ...]]] = {
    "cnn_small": (("loader=resident",), NUMBERS),
    "cnn_large_dense": (("loader=resident",), NUMBERS),
    # So many epochs that there is time to try loaders: with ten, none is tried.
    "logistic_regression": (
        ("precision=fp32", "channels_last=false", "optimizer.implementation=fused", "epochs=2000"),
        LOADERS,
    ),
}
"""Model → what is given, and all settings of the rest."""
ROUNDS, STEPS = 5, 4


def figures() -> list[Figure]:
    """Per model: speed of the choice ÷ that of the best, and seconds of the trial ÷ those of ten epochs with it."""
    return [figure for model in CASES for figure in _figures(model)]


def _figures(model: str) -> list[Figure]:
    given, every = CASES[model]
    planned = replace(one_run([f"model={model}", *WORK, *given, f"results={Path('nowhere').absolute()}"]), tune=True)
    choice = try_out_here([planned])
    shares, best, step_s = _against_all(planned, choice, every)
    note = (
        f"{' '.join(choice.overrides) or 'as it is'} was chosen of {len(choice.findings.trials)} trials, of all "
        f"{len(every)} settings {best} was fastest; {ROUNDS} rounds"
    )
    epochs = max(EPOCHS, planned.run.epochs)
    cost = choice.took_s / (epochs * planned.run.steps_per_epoch * step_s)
    took = f"{choice.took_s:.1f} s, {epochs * planned.run.steps_per_epoch:,} steps of {1e3 * step_s:.1f} ms each"
    return [
        Figure(f"tune=true, {model}: speed of the choice ÷ that of the best", shares, "", 0.97, True, note),
        Figure(f"tune=true, {model}: the trial ÷ {epochs:,} epochs, time", [100 * cost], "%", 5, False, took),
    ]


def _against_all(planned: PlannedRun, choice: Choice, every: tuple[Patch, ...]) -> tuple[list[float], str, float]:
    """By round, the time per step of the best settings ÷ that of the choice; the best in words; the choice's, s."""
    mine = to_mapping(applied(planned, choice).run)
    settings = [patched(to_mapping(planned.run), _whole(patch)) for patch in every]
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
    return (plain["precision"], layout, plain["optimizer"]["implementation"], plain["loader"]["name"])


def _whole(patch: Patch) -> Patch:
    """The patch with a loader's options beside its name."""
    if "loader" not in patch:
        return patch
    return {"loader": to_mapping(one_run([f"loader={patch['loader']}"]).run)["loader"]}


def _step_s(run: RunConfig) -> float:
    return timed(run, "cpu", steps=STEPS)[0]
