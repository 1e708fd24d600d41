"""Runs with all that can be measured; and runs as users start them, among them some that must end badly."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.environments import why_not
from parallelbench.errors import count_of
from parallelbench.gpu_check.attempts import answer_of
from parallelbench.gpu_check.results import FailedError, SkippedError
from parallelbench.gpu_check.telemetry import samples
from parallelbench.gpu_check.variants import BATCH_SIZE, as_attempt, run_of
from parallelbench.processes import inherited
from parallelbench.results.folder import find_runs
from parallelbench.results.journal import read_entries, read_tables
from parallelbench.world.machine import visible_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from parallelbench.gpu_check.attempts import Workers
    from parallelbench.results.attempt import Attempt
    from parallelbench.results.folder import RunFolder


_SMALL = ("data=synthetic", "data.train_samples=960", "data.test_samples=74", f"batch_size={BATCH_SIZE}", "epochs=2")
_NEEDED = ("hydra", "submitit", "pyarrow", "psutil")
_HZ = 20.0
_TIMEOUT_S = 240.0
_POLL_S = 0.05
_PATIENCE_S = 15
"""Of the rank that waits for one that hangs."""
_TOO_LARGE = (
    *("data.channels=1", "data.image_size=8", "data.train_samples=131072", "batch_size=131072", "epochs=1"),
    *("model=mlp", "model.hidden=[1000000]", "measure.parity=false", "measure.probe=false"),
)
"""The activations of one layer are 488 GiB, its weights 256 MB."""


def ends_well(workers: Workers, on_all: bool = False, **changes: Any) -> str:
    """A run with everything that can be measured has journals in which that is measured; `on_all`: of the devices."""
    if importlib.util.find_spec("pyarrow") is None:
        raise SkippedError("needs pyarrow, which is not installed, to read telemetry")
    device_type = workers.device_type
    most = workers.devices if on_all else 1
    devices = max(count for count in range(1, most + 1) if BATCH_SIZE % count == 0)
    run = run_of(**changes, **({"strategy": "ddp", "devices": devices} if devices > 1 else {}))
    before = {gpu.uuid: gpu.other_processes for gpu in visible_gpus()} if device_type == "cuda" else {}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        site = msgspec.structs.replace(run.site, data_dir=folder)
        measure = msgspec.structs.replace(run.measure, attribution_steps=0 if run.graph else 3, trace=True)
        run = as_attempt(msgspec.structs.replace(run, site=site, measure=measure), device_type)
        # Loaders' workers may wait.
        measured = msgspec.structs.replace(run.measure, telemetry_hz=_HZ, probe=True, waits="allowed")
        run = msgspec.structs.replace(run, measure=measured)
        attempt = workers.carry_out(run)
        if problem := answer_of(run, attempt).problem:
            raise FailedError(problem)
        return judge(attempt, device_type, devices, phases=not run.graph, before=before)


def judge(attempt: Attempt, device_type: str, devices: int, *, phases: bool, before: Mapping[str, int]) -> str:
    """Whether a finished attempt has measured what it should.

    `before`: processes on each GPU when the run began, this one among them.
    """
    tables, events = read_tables(attempt.path)
    sampled = samples(attempt.path / "telemetry-node0.bin")
    trace = attempt.trace_file(0)
    lacking = {
        "epochs": len(tables["epochs"]) != 2,
        "rows of `ranks`": len(tables["ranks"]) != 2 * devices,
        "checks that passed": not any(row["passed"] for row in tables["checks"]),
        "phases": phases and not any(row["forward_s"] for row in tables["phases"]),
        "a trace": not (trace.exists() and trace.stat().st_size),
        "probes": not all(
            any(event.get(f"probed_{at}_matmul_flop_per_s") for event in events) for at in ("start", "end")
        ),
        "the host's telemetry": all(row["device_uuid"] for row in sampled),
    }
    if device_type == "cuda":
        of_gpus = [row for row in sampled if row["device_uuid"]]
        seen = {row["device_uuid"] for row in of_gpus}
        most = max(((row["processes"] or 0) - before.get(row["device_uuid"], 0) for row in of_gpus), default=0)
        lacking |= {
            "memory of the device": not all(row["peak_allocated_bytes"] for row in tables["ranks"]),
            f"telemetry of {count_of(devices, 'GPU')}": len(seen) != devices,
            f"GPUs to itself: {most} of the run's processes computed on one": most > 1,
        }
    if missing := [what for what, lacks in lacking.items() if lacks]:
        raise FailedError(f"a finished run lacks {', '.join(missing)}")
    name = next((e["device_name"] for e in events if e["event"] == "facts" and "device_name" in e), "")
    passed = sum(row["passed"] is True for row in tables["checks"])
    return f"{devices} × {name}: 2 epochs, {passed} checks passed, {len(sampled)} samples of telemetry, phases, a trace"


def tensorflow(device_type: str, strategy: str, devices: int) -> str:
    """TensorFlow's ranks train like torch's one device, and tell their GPUs' names, energies' owners and peaks."""
    if lacking := why_not("tensorflow", device_type):
        raise SkippedError(lacking)
    if devices < 2 and strategy != "tf_single":
        raise SkippedError(f"needs two devices; here: {devices}")
    with _results() as results:
        devices = max(count for count in range(1, devices + 1) if BATCH_SIZE % count == 0)
        _submit(results, device_type, *_SMALL, "model=cnn_small", f"strategy={strategy}", f"devices={devices}")
        tables, events = read_tables(_done(results).path)
    if wrong := [row["check"] for name in ("parity", "checks") for row in tables[name] if row["passed"] is False]:
        raise FailedError(f"not like one device of torch's: {wrong}")
    uuids = {uuid for row in tables["ranks"] for uuid in row["device_uuid"].split(",")}
    peaks = [row["peak_allocated_bytes"] for row in tables["ranks"]]
    if device_type == "cuda" and (uuids != {gpu.uuid for gpu in visible_gpus()[:devices]} or not all(peaks)):
        raise FailedError(f"its GPUs are {uuids}, their peaks {peaks} bytes")
    name = next((event["device_name"] for event in events if event.get("device_name")), "")
    return f"{devices} × {name}, peaks of a rank {peaks[-1]} bytes, {len(tables['checks'])} checks"


def resumes(device_type: str) -> str:
    """A run that is asked to stop saves its state; submitted again, it goes on from there."""
    with _results() as results:
        overrides = [*_SMALL, "epochs=3", "launcher.checkpoint=always"]
        with _submitting(results, device_type, *overrides) as process:
            attempt = _until(lambda: _attempt(results), process)
            attempt.ask_to_stop()
        _expect(attempt, "timeout", "submitting again goes on from there")
        _submit(results, device_type, *overrides)
        again = _done(results)
        epochs = {row["epoch"]: row["attempt"] for row in read_tables(again.path)[0]["epochs"]}
        if epochs != {1: 1, 2: 2, 3: 2}:
            raise FailedError(f"epochs were trained by these attempts: {epochs}")
    return "stopped after epoch 1, went on with epoch 2"


def debugged(device_type: str) -> str:
    """What `make debug` runs: deterministic steps in the calling process."""
    with _results() as results:
        _program("run", results, device_type, *_SMALL, "epochs=1", "measure=debug", "launcher=inline")
        _expect_done(*find_runs(results))
    return "5 deterministic steps in one process"


def runs_out_of_memory(device_type: str) -> str:
    """A batch that fits no device: the outcome is oom, which is not tried again."""
    with _results() as results:
        _submit(results, device_type, "data=synthetic", *_TOO_LARGE, fails=True)
        return _expect(_last(results), "oom", "out of memory")


def hangs(device_type: str, devices: int) -> str:
    """A rank that is stopped: the outcome is timeout, and names it."""
    if devices < 2:
        raise SkippedError(f"needs two devices; here: {devices}")
    with _results() as results:
        overrides = ("strategy=ddp", "devices=2", f"launcher.collective_timeout_s={_PATIENCE_S}", "epochs=1000000")
        with _submitting(results, device_type, *_SMALL, *overrides) as process:
            attempt = _until(lambda: _attempt(results), process)
            _until(lambda: _has_trained(attempt), process)
            pid = read_entries(attempt.path / "journal-rank1.jsonl")[0]["pid"]
            os.kill(pid, signal.SIGSTOP)
        return _expect(attempt, "timeout", "rank 1 hangs: rank 0 waited for it")


@contextmanager
def _results() -> Iterator[Path]:
    """A folder of results, where the whole suite is installed."""
    if lacking := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise SkippedError(f"needs the whole suite; not installed: {', '.join(lacking)}")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        yield Path(folder)


def _command(verb: str, results: Path, device_type: str, *overrides: str) -> list[str]:
    fixed = (f"device={device_type}", f"results={results}", f"site.data_dir={results}")
    return [sys.executable, "-m", "parallelbench.cli", verb, *overrides, *fixed]


def _submit(results: Path, device_type: str, *overrides: str, fails: bool = False) -> None:
    _program("submit", results, device_type, *overrides, fails=fails)


def _program(verb: str, results: Path, device_type: str, *overrides: str, fails: bool = False) -> None:
    command = _command(verb, results, device_type, *overrides)
    try:
        done = subprocess.run(
            command,
            env=inherited(os.environ),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:  # its ranks end with it
        raise FailedError(f"ended after {_TIMEOUT_S:g} s") from None
    if done.returncode and not fails:
        reasons = [state.outcome.reason for run in find_runs(results) if (state := run.state()).outcome]
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise FailedError("; ".join(reasons) or (lines or [f"exit code {done.returncode}"])[-1])


@contextmanager
def _submitting(results: Path, device_type: str, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    """While a run trains; waits for its end."""
    command = _command("submit", results, device_type, *overrides)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
            process.wait(_TIMEOUT_S)
        finally:
            process.terminate()  # it ends its ranks


def _until(condition: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    """The first true value of a condition; fails where the program ends without it."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not (found := condition()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise FailedError("the run ended before it trained an epoch")
        time.sleep(_POLL_S)
    return found


def _attempt(results: Path) -> Attempt | None:
    runs = find_runs(results)
    attempts = runs[0].attempts() if runs else []
    return attempts[-1] if attempts else None


def _last(results: Path) -> Attempt:
    attempt = _attempt(results)
    if attempt is None:
        raise FailedError("no attempt was begun")
    return attempt


def _has_trained(attempt: Attempt) -> bool:
    return any(entry.get("table") == "epochs" for entry in read_entries(attempt.path / "journal-rank0.jsonl"))


def _done(results: Path) -> Attempt:
    (run,) = find_runs(results)
    _expect_done(run)
    return run.attempts()[-1]


def _expect_done(run: RunFolder) -> None:
    state = run.state()
    if (state.state, state.label) != ("done", "ok"):
        raise FailedError(f"{state.label}: {state.outcome.reason if state.outcome else 'no result'}")


def _expect(attempt: Attempt, name: str, words: str) -> str:
    outcome = attempt.outcome()
    found = "none" if outcome is None else f"{outcome.outcome}: {outcome.reason}"
    if outcome is None or outcome.outcome != name or words not in outcome.reason:
        raise FailedError(f"the outcome should be {name} with “{words}”, and is {found}")
    return f"the outcome is {found}"
