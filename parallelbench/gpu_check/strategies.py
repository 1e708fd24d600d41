"""Every strategy on several devices, in processes of its own: parity with one device, and steps that never wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.errors import ConfigError
from parallelbench.gpu_check.check_result import FailedError, SkippedError, at_most
from parallelbench.gpu_check.ranks import Result, waits_by_design
from parallelbench.gpu_check.small_runs import BATCH_SIZE, names_of, run_of
from parallelbench.spec.check import check_run
from parallelbench.spec.identity import canonical_json
from parallelbench.spec.mapping import to_mapping

if TYPE_CHECKING:
    from parallelbench.spec.config import RunConfig

_MODELS: tuple[dict[str, Any], ...] = (
    {"model": "vit_tiny"},
    {"model": "mlp", "data": ("synthetic", {"channels": 1})},
    {"model": "cnn_small"},
    # For what takes the training set as one batch.
    {"model": "mlp", "data": ("synthetic", {"channels": 1, "train_samples": BATCH_SIZE}), "optimizer": "lbfgs"},
    {"model": "mlp", "data": ("synthetic", {"channels": 1}), "optimizer": "adagrad"},
)
"""Tried in this order; a strategy takes the first that its check allows."""
_DEVICES = (8, 4, 3, 2)
_TIMEOUT_S = 240.0
_COLLECTIVE_TIMEOUT_S = 60.0


def names() -> list[str]:
    """All strategies for several devices."""
    return [name for name in names_of("strategy") if name != "single"]


def strategy(name: str, device_type: str, devices: int) -> str:
    """Check one strategy on as many of the devices as it can use."""
    if devices < 2:
        raise SkippedError(f"needs two devices or more; here: {devices}")
    run = choose(name, device_type, devices)
    return judge(run, device_type, *_carried_out(run, device_type))


def choose(name: str, device_type: str, devices: int) -> RunConfig:
    """A run that the strategy's own check allows, on the most devices."""
    reason = ""
    for count in (count for count in _DEVICES if count <= devices):
        for options in _MODELS:
            run = run_of(strategy=name, devices=count, **options)
            try:
                check_run(run, device_type)
            except ConfigError as error:
                reason = reason or str(error)
                continue
            return msgspec.structs.replace(
                run, launcher=msgspec.structs.replace(run.launcher, collective_timeout_s=_COLLECTIVE_TIMEOUT_S)
            )
    raise SkippedError(f"no run of it fits {devices} devices: {reason}")


def judge(run: RunConfig, device_type: str, result: Result, error: str | None) -> str:
    """The verdict on the ranks' result."""
    texts = [f"{run.devices} devices, {run.model.name}"]
    if not run.strategy.equals_one_device(run):
        texts.append("asynchronous: no comparison with one device")
    elif result.difference is not None and result.tolerance is not None:
        texts.append(at_most("largest difference from one device", result.difference, result.tolerance))
    elif error is None:
        error = "rank 0 has left no result of the parity check"
    reason = waits_by_design(run)
    if error is None and device_type == "cuda" and not (result.watched or reason):
        error = "rank 0 has left no word of an epoch in which waits were looked for"
    if error is not None:
        raise FailedError(", ".join([*texts, error]))
    if result.watched:
        texts.append(f"{run.steps_per_epoch} steps without a wait")
    elif device_type == "cuda":
        texts.append(f"waits by design, so none was looked for: {reason}")
    return ", ".join(texts)


def _carried_out(run: RunConfig, device_type: str) -> tuple[Result, str | None]:
    """Rank 0's result, and the error of the first rank that failed."""
    with tempfile.TemporaryDirectory() as folder:
        run_file, result_file = Path(folder) / "run.json", Path(folder) / "result.json"
        run_file.write_text(canonical_json(to_mapping(run)))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        ranks = [f"--nproc-per-node={run.strategy.processes(run, device_type)}", "-m", "parallelbench.gpu_check.ranks"]
        code, output = _output_of([*torchrun, *ranks, str(run_file), device_type, str(result_file)])
        result = result_file.read_bytes() if result_file.exists() else b"{}"
        error_file = Path(f"{result_file}.error")
        error = None if code == 0 else error_file.read_text() if error_file.exists() else _last_line(code, output)
        return msgspec.json.decode(result, type=Result), error


def _output_of(command: list[str]) -> tuple[int, str]:
    """Exit code and output; after `_TIMEOUT_S` all processes of the command are ended."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return 1, f"{output}\nended after {_TIMEOUT_S:g} s"
    return process.returncode, output


def _last_line(code: int, output: str) -> str:
    lines = output.strip().splitlines()
    return f"exit code {code}: {lines[-1] if lines else 'no output'}"
