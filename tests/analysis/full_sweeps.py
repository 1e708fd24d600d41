"""Made-up results of whole published sweeps: every run that `submit` would plan, with times, memory and accuracies
that a simple model of GPUs gives it. They show that a full sweep's page and figures can be read, and nothing else.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launch.sweep import expand
from parallelbench.config.identity import run_id
from parallelbench.results.folder import RunFolder
from tests.analysis.factory import MIB, Fake, published

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from parallelbench.config.run import RunConfig


@dataclass(frozen=True)
class Shape:
    """What the times and sizes of a model are made up from."""

    parameters: int
    sample_s: float
    """Computing of one sample on one GPU."""
    activation_bytes: int
    """Of one sample."""
    reaches: float
    """Accuracy after very many epochs on ten classes; of a hundred classes about half."""


SHAPES = {
    "logistic_regression": Shape(30_730, 1e-6, 24_000, 0.41),
    "mlp": Shape(694_000, 2e-6, 40_000, 0.93),
    "cnn_small": Shape(402_442, 4e-6, 300_000, 0.994),
    "cnn_large": Shape(2_636_554, 28e-6, 1_400_000, 0.995),
    "cnn_large_dense": Shape(3_880_714, 90e-6, 1_400_000, 0.995),
    "cnn": Shape(1_150_000, 12e-6, 900_000, 0.79),
    "resnet50": Shape(23_500_000, 110e-6, 9_000_000, 0.88),
    "vit": Shape(6_300_000, 60e-6, 4_500_000, 0.72),
}
ON_PROCESSOR = 40.0
"""How many times as long a sample takes there."""
TENSORFLOW = 1.3
"""As many times as long as under torch, so that lines of the two can be told apart."""
STEP_S = 0.0012
"""Of a step, whatever it computes."""
LINK_BYTES_PER_S = 20e9
SAMPLES = 250
"""Of a GPU in a run at most: ten a second of a run of hours would take hours to write."""
SERIAL = ("model_parallel", "model_parallel_tutorial")
OF_ONE_PROCESS = ("single", "data_parallel", *SERIAL, "tf_single", "tf_mirrored")


def made_up(results: Path, overrides: Iterable[str]) -> Path:
    """Publish every run of a sweep below `results` that is not there; returns the sweep's folder."""
    folder = results
    for planned in expand([*overrides, f"results={results}"]):
        folder = planned.run.sweep_folder
        if RunFolder.of(planned.run).state().state != "done":
            published(planned.run, fake(planned.run))
    return folder


def step_s(run: RunConfig, shape: Shape) -> float:
    """Time of a step, by strategy and devices."""
    slower = ON_PROCESSOR if run.device == "cpu" else 1.0
    n, strategy = run.devices, run.strategy.name
    slower *= TENSORFLOW if strategy.startswith("tf_") else 1.0
    computing = run.global_batch_size * shape.sample_s * slower
    if n == 1:
        return STEP_S + computing
    moved_s = 4 * shape.parameters / LINK_BYTES_PER_S
    if strategy in SERIAL:
        return STEP_S * n + computing * (1 + 0.04 * n)
    if strategy == "pipeline":
        return STEP_S * 2 * n + computing / n * (1 + 0.25 * (n - 1))
    if strategy == "data_parallel":
        return STEP_S * (1 + 0.6 * n) + computing / n + moved_s * 3 * n
    return STEP_S * 1.25 + computing / n + moved_s * 2 * (n - 1) / n * 4


def fake(run: RunConfig) -> Fake:
    """What this run measures."""
    shape = SHAPES[run.model.name]
    on_gpus = run.device != "cpu"
    processes = 1 if run.strategy.name in OF_ONE_PROCESS else run.devices
    wobble = 1 + (int(run_id(run)[:4], 16) / 0xFFFF - 0.5) * 0.03
    steady_s = run.steps_per_epoch * step_s(run, shape) * wobble
    warm_up = 2.2 if run.strategy.name.startswith("tf_") else 1.25
    epoch_every_s = 1.02 * warm_up * steady_s

    def epoch_time_s(epoch: int, rank: int) -> float:
        return steady_s * (warm_up if epoch == 1 else 1 + 0.004 * ((epoch * 7) % 5))

    def accuracy(epoch: int) -> float:
        hundred = 0.52 if run.data.name == "cifar100" else 1.0
        steps = epoch * run.steps_per_epoch
        pace = 2200 if "cifar" in run.data.name else 60
        return shape.reaches * hundred * (1 - 0.8 * math.exp(-steps / pace)) * wobble**0.1

    trainer = {"framework": "tensorflow", "packages": {"tensorflow": "2.19"}}
    own = trainer if run.strategy.name.startswith("tf_") else {}
    return Fake(
        environment=json.dumps(json.loads(Fake.environment) | own),
        epoch_time_s=epoch_time_s,
        test_accuracy=accuracy,
        train_accuracy=lambda epoch: min(0.999, accuracy(epoch) * (1 + 0.0012 * epoch)),
        test_loss=lambda epoch: 2.4 * (1 - accuracy(epoch)) + 0.003 * epoch,
        train_loss=lambda epoch: 2.4 * (1 - accuracy(epoch)) / (1 + 0.02 * epoch),
        parameters=shape.parameters,
        peak_allocated_bytes=lambda epoch, rank: _held_bytes(run, shape, processes) if on_gpus else None,
        peak_allocated_bytes_by_device=lambda epoch, rank: _on_each(run, shape, processes) if on_gpus else None,
        host_peak_rss_bytes=lambda epoch, rank: 2300 * MIB if on_gpus else 700 * MIB,
        sent=lambda epoch, rank: (_sent(run, shape, processes), 0, 0),
        phases=_phases(run, shape) if run.measure.attribution_steps else None,
        gpu_power_w=(lambda epoch, rank: _power_w(shape, run.devices, epoch)) if on_gpus else None,
        epoch_every_s=epoch_every_s,
        sample_every_s=max(1 / run.measure.telemetry_hz, epoch_every_s * run.epochs / SAMPLES),
        processes=processes,
        device_type="cuda" if on_gpus else "cpu",
        device_name="Imaginary GPU" if on_gpus else "Imaginary CPU",
    )


def _power_w(shape: Shape, devices: int, epoch: int) -> float:
    """Of one GPU, which warms up in the first epochs."""
    return (180.0 + 60 * min(1, shape.sample_s * 2e4) / devices) * (1 - 0.3 * math.exp(-epoch / 3))


def _held_bytes(run: RunConfig, shape: Shape, processes: int) -> int:
    """Peak of one process, over all GPUs that it drives."""
    states, activations = 16 * shape.parameters, shape.activation_bytes * run.global_batch_size
    if run.strategy.name == "data_parallel":
        return states + 8 * shape.parameters * (run.devices - 1) + activations
    return states + activations // processes


def _on_each(run: RunConfig, shape: Shape, processes: int) -> str:
    """The same of each GPU of a process; of replicas in one process, the first gathers."""
    gpus, held = run.devices // processes, _held_bytes(run, shape, processes)
    rest = held // gpus
    if run.strategy.name == "data_parallel" and gpus > 1:
        rest = 8 * shape.parameters + shape.activation_bytes * run.global_batch_size // gpus
    return ",".join(map(str, (held - (gpus - 1) * rest, *[rest] * (gpus - 1))))


def _sent(run: RunConfig, shape: Shape, processes: int) -> int:
    """Of one process: gradients, or activations between layers; what the devices of one process copy counts, too."""
    if run.devices == 1:
        return 0
    if run.strategy.name in SERIAL:
        return 2 * (run.devices - 1) * run.global_batch_size * shape.activation_bytes // 100 * run.steps_per_epoch
    of_all = 8 * shape.parameters * (run.devices - 1)
    return of_all // processes * run.steps_per_epoch


def _phases(run: RunConfig, shape: Shape) -> Callable[[int, int], dict[str, float | None]]:
    whole_s = step_s(run, shape)
    waiting_s = 0.0 if run.devices == 1 else 0.3 * (whole_s - STEP_S)
    busy_s = whole_s - STEP_S - waiting_s
    parts: dict[str, float | None] = {"data_wait": 0.1 * STEP_S, "forward": busy_s / 3, "backward": busy_s * 2 / 3}
    parts |= {"communication": waiting_s, "optimizer": 0.5 * STEP_S, "other": 0.4 * STEP_S}
    return lambda rank, step: parts
