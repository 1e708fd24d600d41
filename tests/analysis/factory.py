"""Fake run folders, written with the suite's own writers, so that what is read is what a run would have
left.
"""

from __future__ import annotations

import html
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from parallelbench.config.build import COMPONENTS, from_mapping
from parallelbench.config.identity import run_id
from parallelbench.config.run import RunConfig
from parallelbench.config.sites import shipped
from parallelbench.measure.environment_match import ENTRIES_VERSION
from parallelbench.results.attempt import Attempt
from parallelbench.results.folder import RunFolder
from parallelbench.results.journal import Journal, read_tables
from parallelbench.results.publish import publish
from parallelbench.results.recording import Recorder
from parallelbench.results.tables import CLIPPING, TABLES
from parallelbench.strategies.single import Single
from parallelbench.training.checks.parity import checks_parity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MIB = 2**20
STARTUP = {
    "startup_s": 3.0,
    "startup_launch_s": 0.4,
    "startup_imports_s": 1.25,
    "startup_process_group_s": 0.25,
    "startup_data_s": 0.2,
    "startup_parity_s": 0.6,
    "startup_model_s": 0.1,
    "startup_compile_s": None,
    "startup_first_step_s": 0.2,
    "closing_check_s": 0.5,
}


def config(results: Path, **changes: Any) -> RunConfig:
    """A run of the demo; `changes` are keys of the run, of components by name (`strategy="ddp"`) or dicts of
    options.
    """
    plain: dict[str, Any] = {
        "devices": 1,
        "nodes": 1,
        "device": "cpu",
        "cores_per_device": 1,
        "epochs": 3,
        "batch_size": 128,
        "scaling": "strong",
        "precision": "fp32",
        "channels_last": False,
        "compile": False,
        "seed": 0,
        "repeat": 0,
        "results": str(results),
        "sweep_name": "demo",
        "measure": {
            "parity": True,
            "parity_steps": 3,
            "steps_sampled": 4,
            "steps_per_epoch": None,
            "deterministic": False,
            "detect_anomaly": False,
            "telemetry_hz": 10.0,
            "attribution_steps": 0,
            "probe": True,
            "trace": False,
        },
        "launcher": component("launcher", "local"),
        "site": component("site", "default") | {"data_dir": "data"},
    }
    chosen = {"model": "cnn_small", "data": "digits", "strategy": "single", "optimizer": "sgd", "loader": "resident"}
    chosen |= {"lr_schedule": "constant", "loss": "cross_entropy", "metric": "none"}
    for key, value in changes.items():
        if key in COMPONENTS:
            chosen[key] = value
        else:
            plain[key] = plain.get(key, {}) | value if isinstance(value, dict) else value
    return from_mapping(plain | {key: component(key, chosen[key]) for key in COMPONENTS})


def foreign(run: RunConfig, name: str, package: str = "mystrategies") -> RunConfig:
    """The run with a strategy of a user's own, whose class nobody can import here."""
    mine: Any = type(Single)("Mine", (Single,), {"__module__": package}, frozen=True, kw_only=True)
    return structs.replace(run, strategy=mine(name=name))


def component(group: str, choice: str | dict[str, Any]) -> dict[str, Any]:
    """The node of a file of conf/, or of one with some options changed: {"name": …, option: …}."""
    options = {"name": choice} if isinstance(choice, str) else choice
    return (shipped(group, options["name"]) or {}) | options


EPOCH_EVERY_S = 1000.0


@dataclass
class Fake:
    """What a made-up run measures. Functions of (epoch, rank), both as in the tables."""

    epoch_time_s: Callable[[int, int], float] = lambda epoch, rank: 1.0
    train_loss: Callable[[int], float] = lambda epoch: 2.0 / epoch
    test_loss: Callable[[int], float] = lambda epoch: 2.2 / epoch
    test_accuracy: Callable[[int], float] = lambda epoch: 1 - 0.5**epoch
    test_metric: Callable[[int], float | None] = lambda epoch: None
    train_accuracy: Callable[[int], float] | None = None
    """None: as on the test set."""
    parameters: int = 402442
    host_peak_rss_bytes: Callable[[int, int], int | None] = lambda epoch, rank: 500 * MIB
    peak_allocated_bytes: Callable[[int, int], int | None] = lambda epoch, rank: None
    peak_allocated_bytes_by_device: Callable[[int, int], str | None] = lambda epoch, rank: None
    expert_imbalance: Callable[[int], float | None] = lambda epoch: None
    norms: Callable[[int, int], tuple[float, float, float] | None] = lambda epoch, rank: None
    """Mean and largest norm of gradients, and the share of steps that were clipped."""
    sent: Callable[[int, int], tuple[int, int, int]] = lambda epoch, rank: (0, 0, 0)
    """Bytes of gradients, activations and parameters."""
    gpu_power_w: Callable[[int, int], float | None] | None = None
    """Of each GPU of a rank, constant through an epoch; None: no GPU is sampled. A GPU that is None was lost."""
    throttle_reasons: Callable[[int], int | None] = lambda epoch: None
    """Of each epoch, of all GPUs that are sampled."""
    sample_every_s: float | None = None
    """Of the GPUs, between epochs too. None: three times about each epoch."""
    idle_w: float | None = None
    """What such samples are between epochs; None: as in the epoch before."""
    started_at: float = 1.7e9
    """Unix time; the first epoch begins `epoch_every_s` later."""
    epoch_every_s: float = EPOCH_EVERY_S
    staleness: Callable[[int, int], list[int]] = lambda epoch, rank: []
    """Of each push."""
    phases: Callable[[int, int], dict[str, float | None]] | None = None
    """Times of (rank, step) in s by phase, of two attributed steps; None: the run was not attributed."""
    probed: tuple[float, float] | None = None
    """Latency in s and bandwidth in bytes/s of its ranks."""
    theoretical_bubble: float | None = None
    theoretical_state_bytes: int | None = None
    processes: int | None = None
    device_type: str = "cpu"
    device_name: str = "Imaginary CPU"
    oversubscribed: bool = False
    parity_passed: bool | None = True
    """Where parity is checked: never of `single`, and not with `measure.parity=false`."""
    parity_model: str | None = None
    rounding: float | None = 2.0**-24
    warnings: str | None = None
    resumed_after: int | None = None
    """The epoch after which the next attempt went on."""
    resumed_elsewhere: str | None = None
    environment: str = (
        f'{{"entries_version":{ENTRIES_VERSION},"host":"here","python":"3.12.1","packages":{{"torch":"2.15.0"}},'
        '"git":{"commit":"0123abc","dirty":false}}'
    )
    data_sha256: str | None = "0" * 64
    speeds: dict[str, float] = field(default_factory=dict)
    """The columns of the probes of its devices; empty: they were not probed."""
    others_time_s: Callable[[int, int], float | None] = lambda epoch, rank: 0.0
    """What other programs took of the rank's cores."""
    step_times_s: Callable[[int, int], list[float]] = lambda epoch, rank: [0.01]
    """Of the sampled steps, the first ones of the epoch."""
    node: Callable[[int], str] = lambda rank: "here"
    memory_limit_bytes: int | None = None
    allocator_retries: Callable[[int, int], int | None] = lambda epoch, rank: None
    cpu_time_s: Callable[[int, int], float] = lambda epoch, rank: 0.0
    """Processor time of the rank itself."""
    loader_cpu_time_s: Callable[[int, int], float | None] = lambda epoch, rank: None
    loader_memory_bytes: Callable[[int, int], int | None] = lambda epoch, rank: None
    startup: dict[str, float | None] = field(default_factory=dict)
    owner: Callable[[int], bool] = lambda rank: True
    """Which ranks own samples; the last stage of a pipeline owns all, the others none."""


def steady(time_s: float, *, first_s: float | None = None, **more: Any) -> Fake:
    """A run whose later epochs take `time_s`, and the first one three times as long, if not `first_s`."""
    return Fake(epoch_time_s=lambda epoch, rank: (first_s or 3 * time_s) if epoch == 1 else time_s, **more)


_RUNNING: list[Attempt] = []
"""An attempt that nobody refers to has ended."""


def begin(run: RunConfig, fake: Fake) -> tuple[RunFolder, Attempt]:
    """The intent and a claimed attempt, which goes on."""
    folder, attempt = _claimed(run, fake)
    _RUNNING.append(attempt)
    return folder, attempt


def _claimed(run: RunConfig, fake: Fake) -> tuple[RunFolder, Attempt]:
    folder = RunFolder.of(run)
    folder.write_intent(run, ["made=up"])
    attempt = folder.claim()
    assert attempt is not None
    processes = fake.processes or run.devices
    attempt.describe(processes=processes, device_type=fake.device_type, oversubscribed=fake.oversubscribed)
    return folder, attempt


def write_epochs(run: RunConfig, attempt: Attempt, fake: Fake, *, epochs: int) -> None:
    """Journals of all ranks with `epochs` finished epochs."""
    keys = {"run_id": run_id(run), "attempt": attempt.number}
    processes = fake.processes or run.devices
    passed = fake.parity_passed if checks_parity(run) else None
    startup = STARTUP if passed is not None else STARTUP | {"startup_s": 2.4, "startup_parity_s": None}
    journals = [Journal(attempt.path / f"journal-rank{rank}.jsonl") for rank in range(processes)]
    journals[0].event(
        "facts",
        device_name=fake.device_name,
        parameters=fake.parameters,
        parity_passed=passed,
        parity_model=fake.parity_model,
        rounding=fake.rounding,
        theoretical_bubble=fake.theoretical_bubble,
        theoretical_state_bytes=fake.theoretical_state_bytes,
        warnings=fake.warnings,
        resumed_after=None if fake.resumed_after is None else str(fake.resumed_after),
        resumed_elsewhere=fake.resumed_elsewhere,
        environment_json=fake.environment,
        data_sha256=fake.data_sha256,
        memory_limit_bytes=fake.memory_limit_bytes,
        memory_limit_by="device" if fake.device_type == "cuda" else "node",
        **fake.speeds,
        **dict(zip(("probed_latency_s", "probed_bandwidth_bytes_per_s"), fake.probed or (None, None), strict=True)),
        **(startup | fake.startup),
    )
    if passed is not None:
        _write(journals[0], "parity", [_parity(keys, step, passed=passed) for step in (1, 2, 3)])
    _write(journals[0], "checks", [keys | {"epoch": epochs, "check": "steps", "detail": "made up"}])
    for epoch in range(1, epochs + 1):
        keys["attempt"] = attempt.number + (fake.resumed_after is not None and epoch > fake.resumed_after)
        for rank, journal in enumerate(journals):
            _write(journal, "ranks", [_rank(run, keys, fake, epoch, rank, processes)])
            pushes = list(enumerate(fake.staleness(epoch, rank), start=1))
            push = keys | {"epoch": epoch, "rank": rank}
            _write(journal, "pushes", [push | {"step": step, "staleness": value} for step, value in pushes])
            steps = enumerate(fake.step_times_s(epoch, rank), start=1)
            _write(journal, "steps", [push | {"step": step, "step_time_s": time_s} for step, time_s in steps])
        _write(journals[0], "epochs", [_epoch(run, keys, fake, epoch)])
    if fake.phases is not None:
        for rank, journal in enumerate(journals):
            _write(journal, "phases", [_phases(keys, fake.phases(rank, step), rank, step) for step in (1, 2)])
    for journal in journals:
        journal.close()
    if fake.gpu_power_w is not None:
        _write_samples(run, attempt, fake, epochs=epochs, processes=processes)


def _write_samples(run: RunConfig, attempt: Attempt, fake: Fake, *, epochs: int, processes: int) -> None:
    """Samples of each GPU's power, and of a counter that grows by it."""
    assert fake.gpu_power_w is not None
    recorder = Recorder(attempt.path / "telemetry-nodehere.bin")
    energy_j, before = dict.fromkeys(_gpus(run, processes), 0.0), fake.started_at + fake.epoch_every_s - 2
    for epoch, since_start_s in _moments(fake, epochs):
        time = fake.started_at + epoch * fake.epoch_every_s + since_start_s
        number = attempt.number + (fake.resumed_after is not None and epoch > fake.resumed_after)
        for gpu, rank in _gpus(run, processes).items():
            power_w = fake.gpu_power_w(epoch, rank)
            if power_w is not None and not 0 <= since_start_s <= fake.epoch_time_s(epoch, rank):
                power_w = power_w if fake.idle_w is None else fake.idle_w
            energy_j[gpu] += (time - before) * (power_w or 0.0)
            row = {"run_id": run_id(run), "attempt": number, "node": "here", "device_uuid": gpu}
            values = {} if power_w is None else {"energy_j": energy_j[gpu], "power_w": power_w}
            values |= {"throttle_reasons": fake.throttle_reasons(epoch)}
            recorder.record([row | {"time": time} | values])
        before = time
    recorder.close()


def _gpus(run: RunConfig, processes: int) -> dict[str, int]:
    """UUID of each GPU → the rank that drives it; a process may drive several."""
    of_each = max(1, run.devices // processes)
    return {f"GPU-{place}": place // of_each for place in range(processes * of_each)}


def _moments(fake: Fake, epochs: int) -> Iterator[tuple[int, float]]:
    """When samples are taken: epoch, and seconds since its start. By default before, at its start and long after it."""
    for epoch in range(1, epochs + 1):
        if fake.sample_every_s is None:
            yield from ((epoch, since_s) for since_s in (-1.0, 0.0, fake.epoch_every_s - 2))
        else:
            places = range(0 - (epoch == 1), math.ceil(fake.epoch_every_s / fake.sample_every_s) + (epoch == epochs))
            yield from ((epoch, fake.sample_every_s * place) for place in places)


def _write(journal: Journal, table: str, rows: list[dict[str, Any]]) -> None:
    """Write rows; columns that the reports make nothing of are filled up."""
    blank = {"string": "", "float64": 0.0, "bool": False}
    filled = {c.name: None if c.nullable else blank.get(c.type, 0) for c in TABLES[table]}
    journal.write(table, [filled | row for row in rows])


def published(run: RunConfig, fake: Fake | None = None) -> RunFolder:
    """A run that trained to its end and was published."""
    fake = fake or Fake()
    folder, attempt = _claimed(run, fake)
    write_epochs(run, attempt, fake, epochs=run.epochs)
    failed = fake.parity_passed is False  # by the check before the training, or by that after it
    outcome = attempt.finish(
        "parity_failed" if failed else "ok", "loss differs by 0.5" if failed else "trained to the end"
    )
    publish(folder, run, attempt, outcome, read_tables(attempt.path))
    return folder


def one_and_two(root: Path, fakes: Iterable[tuple[Fake, Fake]], **changes: Any) -> None:
    """Repeats of single × 1 and ddp × 2."""
    for repeat, (one, two) in enumerate(fakes):
        published(config(root, repeat=repeat, **changes), one)
        published(config(root, repeat=repeat, strategy="ddp", devices=2, **changes), two)


def failed(run: RunConfig, outcome: Any, reason: str, *, epochs: int, fake: Fake | None = None) -> RunFolder:
    """A run that ended early, with a word."""
    fake = fake or Fake()
    folder, attempt = _claimed(run, fake)
    write_epochs(run, attempt, fake, epochs=epochs)
    attempt.finish(outcome, reason)
    return folder


def _phases(keys: dict[str, Any], times: dict[str, float | None], rank: int, step: int) -> dict[str, Any]:
    columns = {f"{phase}_s": time for phase, time in times.items()}
    return keys | {"rank": rank, "step": step, "step_time_s": sum(filter(None, times.values()))} | columns


def _epoch(run: RunConfig, keys: dict[str, Any], fake: Fake, epoch: int) -> dict[str, Any]:
    samples = run.steps_per_epoch * run.global_batch_size
    return keys | {
        "epoch": epoch,
        "train_loss": fake.train_loss(epoch),
        "train_accuracy": (fake.train_accuracy or fake.test_accuracy)(epoch),
        "test_loss": fake.test_loss(epoch),
        "test_accuracy": fake.test_accuracy(epoch),
        "test_metric": fake.test_metric(epoch),
        "train_samples": samples,
        "test_samples": run.data.test_samples,
        "steps": run.steps_per_epoch,
        "expert_imbalance": fake.expert_imbalance(epoch),
        "finished_at": fake.started_at + epoch * fake.epoch_every_s + 500.0,
    }


def _rank(run: RunConfig, keys: dict[str, Any], fake: Fake, epoch: int, rank: int, processes: int) -> dict[str, Any]:
    owners = [r for r in range(processes) if fake.owner(r)]
    train = run.steps_per_epoch * run.global_batch_size // len(owners) if rank in owners else 0
    # Uneven, as in life: the last owner takes what is left.
    test = run.data.test_samples // len(owners) if rank in owners else 0
    test += run.data.test_samples % len(owners) if owners and rank == owners[-1] else 0
    gradients, activations, parameters = fake.sent(epoch, rank)
    norms = fake.norms(epoch, rank) or (None, None, None)
    return keys | {
        "epoch": epoch,
        "rank": rank,
        "local_rank": rank,
        "node": fake.node(rank),
        "device_uuid": f"core {rank}"
        if fake.gpu_power_w is None
        else ",".join(gpu for gpu, driver in _gpus(run, processes).items() if driver == rank),
        "epoch_time_s": fake.epoch_time_s(epoch, rank),
        "training_started_at": fake.started_at + epoch * fake.epoch_every_s,
        "training_ended_at": fake.started_at + epoch * fake.epoch_every_s + fake.epoch_time_s(epoch, rank),
        "cpu_time_s": fake.cpu_time_s(epoch, rank),
        "loader_cpu_time_s": fake.loader_cpu_time_s(epoch, rank),
        "loader_memory_bytes": fake.loader_memory_bytes(epoch, rank),
        "evaluation_time_s": 0.1,
        "others_time_s": fake.others_time_s(epoch, rank),
        "train_samples": train,
        "train_loss_sum": 1.0 * train,
        "train_correct": train // 2,
        "test_samples": test,
        "test_loss_sum": 1.0 * test,
        "test_correct": test // 2,
        **{column.name: norm for column, norm in zip(CLIPPING, norms, strict=True)},
        "gradient_bytes_sent": gradients,
        "activation_bytes_sent": activations,
        "parameter_bytes_sent": parameters,
        "peak_allocated_bytes": fake.peak_allocated_bytes(epoch, rank),
        "peak_allocated_bytes_by_device": fake.peak_allocated_bytes_by_device(epoch, rank),
        "peak_reserved_bytes": fake.peak_allocated_bytes(epoch, rank),
        "peak_reserved_bytes_by_device": fake.peak_allocated_bytes_by_device(epoch, rank),
        "alloc_retries": fake.allocator_retries(epoch, rank),
        "device_used_bytes": None,
        "host_peak_rss_bytes": fake.host_peak_rss_bytes(epoch, rank),
    }


def _parity(keys: dict[str, Any], step: int, *, passed: bool) -> dict[str, Any]:
    difference = 1e-7 * step if passed else 0.5
    return keys | {
        "step": step,
        "loss": 2.3,
        "loss_reference": 2.3,
        "loss_difference": difference,
        "gradient_difference": difference / 2,
        "parameter_difference": difference / 4,
        "evaluation_difference": difference / 8,
        "tolerance": 1e-4,
        "passed": passed,
    }


def words_of(page: str) -> str:
    """What a reader of the page sees: without markup, of which code is some."""
    return html.unescape(re.sub("<[^>]*>", "", page))


def as_words(line: str) -> str:
    """The same of a line as the terminal prints it."""
    return line.replace("`", "")
