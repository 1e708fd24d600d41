"""An epoch of the suite against one as it is usually written: torchvision's way of feeding, `.item()` each step.

Both train fresh models of the same seeds on scikit-learn's digits, one full epoch each; the accuracies afterwards are
asserted to differ by no more than seeds do.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from launch.sweep import one_run
from parallelbench.config.run import RunConfig
from parallelbench.training.torch_session import build_model
from tests.bench.feeding import PilDataset
from tests.bench.loop import Suite
from tests.bench.measure import Figure

GOALS = {"cnn_small": 1.25, "cnn_large": 1.9, "cnn_large_dense": 3.2}
"""Model → how many times as fast."""
NAMES = {"cnn_small": "small CNN", "cnn_large": "large CNN, grouped", "cnn_large_dense": "large CNN, dense"}
BATCH_SIZE = 128
SETTINGS = {
    "cnn_small": ("precision=bf16", "channels_last=true", "optimizer.implementation=for_loop"),
    "cnn_large": ("channels_last=true", "optimizer.implementation=fused"),
    "cnn_large_dense": ("precision=bf16", "channels_last=true", "optimizer.implementation=fused"),
}
"""Model → the settings that are fastest on a processor that multiplies in bf16, as `sweep=tune` compares them."""
ROUNDS = {"cnn_small": 9, "cnn_large": 7, "cnn_large_dense": 5}
NOISE_FLOOR = 0.02


def figures() -> list[Figure]:
    """Time as usually written ÷ time by the suite, by seed."""
    return [_figure(model) for model in GOALS]


def _figure(model: str) -> Figure:
    times: dict[str, list[float]] = {"usual": [], "suite": []}
    accuracies: dict[str, list[float]] = {"usual": [], "suite": []}
    for seed in range(ROUNDS[model]):
        for kind in sorted(times, reverse=seed % 2 == 0):
            run = _run(model, seed, SETTINGS[model] if kind == "suite" else ())
            seconds, accuracy = (_suite if kind == "suite" else _usual)(run)
            times[kind].append(seconds)
            accuracies[kind].append(accuracy)
    means = {kind: statistics.fmean(values) for kind, values in accuracies.items()}
    error = (sum(statistics.variance(values) / len(values) for values in accuracies.values())) ** 0.5
    noise = max(3 * error, NOISE_FLOOR)
    assert abs(means["suite"] - means["usual"]) <= noise, f"not the same training: {accuracies}"
    note = (
        f"digits, {len(times['usual'])} seeds, {statistics.median(times['suite']):.2f} s against "
        f"{statistics.median(times['usual']):.2f} s; the suite with {' '.join(SETTINGS[model])}; accuracy "
        f"{means['suite']:.3f} against {means['usual']:.3f} (three standard errors: {noise:.3f})"
    )
    speedups = [usual / suite for usual, suite in zip(times["usual"], times["suite"], strict=True)]
    return Figure(f"{NAMES[model]}: an epoch as usually written ÷ the suite's", speedups, "×", GOALS[model], True, note)


def _run(model: str, seed: int, options: tuple[str, ...]) -> RunConfig:
    return one_run(
        [f"model={model}", "data=digits", f"batch_size={BATCH_SIZE}", f"seed={seed}", "measure.parity=false", *options]
    ).run


def _suite(run: RunConfig) -> tuple[float, float]:
    suite = Suite(run)
    seconds = suite.epoch()
    return seconds, suite.accuracy()


def _usual(run: RunConfig) -> tuple[float, float]:
    arrays, model = run.data.load(Path("nowhere")), build_model(run)
    optimizer = torch.optim.Adam(model.parameters(), lr=run.optimizer.lr)
    mean, std = run.data.mean[0], run.data.std[0]
    shuffled = torch.Generator().manual_seed(run.effective_seed)
    dataset = PilDataset(arrays.train_images, arrays.train_labels, mean, std)
    loader = DataLoader(dataset, BATCH_SIZE, shuffle=True, drop_last=True, generator=shuffled)
    start, total_loss, correct = time.perf_counter(), 0.0, 0
    for images, labels in loader:
        optimizer.zero_grad()
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
        correct += int((logits.argmax(1) == labels).sum().item())
    seconds = time.perf_counter() - start
    assert total_loss > 0
    assert correct > 0
    tests = list(DataLoader(PilDataset(arrays.test_images, arrays.test_labels, mean, std), BATCH_SIZE))
    model.eval()
    with torch.no_grad():
        right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in tests)
    return seconds, right / len(arrays.test_labels)
