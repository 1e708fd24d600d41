"""Every strategy on several devices, in processes of its own, by the runs of `variants`.

Each run is held against one device before, during and after training, as any run is, and its steps must never wait.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from parallelbench.config.build import to_mapping
from parallelbench.config.run import Nccl
from parallelbench.gpu_check.check_result import FailedError
from parallelbench.gpu_check.on_node import Nodes, torchrun
from parallelbench.gpu_check.ranks import Result, has_parity, waits_by_design
from parallelbench.gpu_check.small_runs import names_of, run_of
from parallelbench.gpu_check.variants import PLAIN
from parallelbench.gpu_check.variants import runs as runs_of
from parallelbench.processes import inherited

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parallelbench.config.run import RunConfig

WAYS = {
    "nccl.backend=lazy": Nccl(backend="lazy"),
    "nccl.backend=legacy": Nccl(backend="legacy"),
    "nccl.per_edge=true": Nccl(per_edge=True),
}
"""Ways of exchanging messages besides the default."""
_START_S, _RUN_S = 120.0, 60.0
"""How long the processes may take to start, and then for each run; compiling takes most."""


def names() -> list[str]:
    """All of torch's strategies for several devices."""
    several = (name for name in names_of("strategy") if name != "single")
    return [name for name in several if run_of(strategy=name).strategy.framework == "torch"]


def strategy(name: str, device_type: str, devices: int, nodes: Nodes | None = None) -> str:
    """Check one strategy on as many devices as it can use; `devices`: of each node; `nodes` None: only this one."""
    runs = runs_of(name, device_type, devices, 1 if nodes is None else nodes.count)
    return judge(runs, device_type, *_carried_out(runs, device_type, nodes))


def exchanged(how: str, devices: int, nodes: Nodes | None = None) -> str:
    """Check a pipeline whose GPUs exchange messages in one of the ways of `WAYS`."""
    plain = runs_of("pipeline", "cuda", devices, 1 if nodes is None else nodes.count)[PLAIN]
    runs = {how: msgspec.structs.replace(plain, nccl=WAYS[how])}
    return judge(runs, "cuda", *_carried_out(runs, "cuda", nodes))


def judge(runs: dict[str, RunConfig], device_type: str, results: dict[str, Result], error: str | None) -> str:
    """The verdict on the ranks' results."""
    first = next(iter(runs.values()))
    where = f"{first.devices} devices, {first.model.name}" + (f", {first.nodes} nodes" if first.nodes > 1 else "")
    for label, run in runs.items():
        if problem := _problem(run, device_type, results.get(label, Result())):
            raise FailedError(", ".join(filter(None, [where, f"{label}: {problem}", error])))
    if error is not None:
        raise FailedError(f"{where}, {error}")
    return f"{where}, {'; '.join(_texts(runs, device_type, results))}"


def _problem(run: RunConfig, device_type: str, result: Result) -> str:
    """What is wrong with a result; empty: nothing."""
    if run.strategy.equals_one_device(run) and has_parity(run):
        if result.difference is None or result.tolerance is None:
            return "rank 0 has left no result of the parity check"
        if not result.difference <= result.tolerance:
            return f"difference from one device {result.difference:.3g} (limit {result.tolerance:g})"
    if not result.trained:
        return "rank 0 has left no word of having trained"
    if result.unlike:
        return f"not like one device: {', '.join(result.unlike)}"
    if device_type == "cuda" and not (result.watched or waits_by_design(run)):
        return "rank 0 has left no word of an epoch in which waits were looked for"
    return ""


def _texts(runs: dict[str, RunConfig], device_type: str, results: dict[str, Result]) -> Iterator[str]:
    compared = [result.difference for result in results.values() if result.difference is not None]
    if compared:
        yield f"largest difference from one device {max(compared):.3g}"
    if apart := [label for label, run in runs.items() if not run.strategy.equals_one_device(run)]:
        yield f"asynchronous, so not compared in steps: {', '.join(apart)}"
    yield f"trained like plain code: {', '.join(runs)}"
    if device_type != "cuda":
        return
    reasons = {waits_by_design(run) for run in runs.values()}
    if reasons != {""}:
        yield f"waits by design, so none was looked for: {', '.join(filter(None, sorted(reasons)))}"
    else:
        yield "no step waited"


def _carried_out(
    runs: dict[str, RunConfig], device_type: str, nodes: Nodes | None = None
) -> tuple[dict[str, Result], str | None]:
    """Rank 0's results, and the error of the first rank that failed."""
    with tempfile.TemporaryDirectory(dir=None if nodes is None else nodes.folder) as folder:
        runs_file, result_file = Path(folder) / "runs.json", Path(folder) / "results.json"
        # In their order: the plain run first, so that what fails later is not taken for its fault.
        runs_file.write_bytes(msgspec.json.encode({label: to_mapping(run) for label, run in runs.items()}))
        program = ["parallelbench.gpu_check.ranks", str(runs_file), device_type, str(result_file)]
        first = next(iter(runs.values()))
        processes = first.strategy.processes(first, device_type) // first.nodes
        variables, timeout_s = first.nccl.variables(), _START_S + _RUN_S * len(runs)
        if nodes is None:
            code, output = output_of(torchrun(program, processes), timeout_s, variables)
        else:
            with nodes.taking_part(program, processes, variables) as command:
                code, output = output_of(command, timeout_s, variables)
        result = result_file.read_bytes() if result_file.exists() else b"{}"
        error_file = Path(f"{result_file}.error")
        error = None if code == 0 else error_file.read_text() if error_file.exists() else _last_line(code, output)
        return msgspec.json.decode(result, type=dict[str, Result]), error


def output_of(command: list[str], timeout_s: float, variables: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and output; after `timeout_s` all processes of the command are ended."""
    with subprocess.Popen(
        command,
        env=inherited(os.environ) | (variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return 1, f"{output}\nended after {timeout_s:g} s"
    return process.returncode, output


def _last_line(code: int, output: str) -> str:
    lines = output.strip().splitlines()
    return f"exit code {code}: {lines[-1] if lines else 'no output'}"
