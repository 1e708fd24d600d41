"""Every strategy on several devices, in processes of its own, by the runs of `variants`.

Each run is held against one device before, during and after training, as any run is, and its steps must never wait.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from parallelbench.config.build import from_mapping, to_mapping
from parallelbench.config.run import Nccl
from parallelbench.errors import one_line
from parallelbench.gpu_check.nodes import Nodes, torchrun
from parallelbench.gpu_check.results import FailedError
from parallelbench.gpu_check.training import EPOCHS, train_watched
from parallelbench.gpu_check.variants import PLAIN, loader_of, names_of, run_of
from parallelbench.gpu_check.variants import runs as runs_of
from parallelbench.optim.optimizers import Lbfgs
from parallelbench.processes import inherited
from parallelbench.training.checks.before_training import check_parity
from parallelbench.training.checks.closing import ClosingCheck
from parallelbench.training.checks.parity import DIFFERENCES, as_checked
from parallelbench.training.replica import new_replica
from parallelbench.training.torch_session import build_model
from parallelbench.world.settings import configure_torch
from parallelbench.world.world import World, join

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
        program = ["parallelbench.gpu_check.strategies", str(runs_file), device_type, str(result_file)]
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


class Result(msgspec.Struct):
    """Rank 0's results of one run; a part is missing where a rank failed before it."""

    difference: float | None = None
    """Largest difference in the parity check; None: not checked."""
    tolerance: float | None = None
    trained: bool = False
    """Whether two epochs were trained, and held against plain code."""
    watched: bool = False
    """Whether waits were looked for in the second one, and no rank waited for its device."""
    unlike: list[str] = []
    """What was not like one device while training, or after it."""


def main(arguments: list[str]) -> int:
    """Check parity, then train an epoch that must not wait, then compare with plain code: each run in turn."""
    runs_file, device_type, result_file = arguments
    plain = msgspec.json.decode(Path(runs_file).read_bytes())
    runs = {label: from_mapping(mapping) for label, mapping in plain.items()}
    first = next(iter(runs.values()))
    world = join(device_type, devices=first.devices, timeout_s=first.launcher.collective_timeout_s, nccl=first.nccl)
    results: dict[str, Result] = {}
    for label, run in runs.items():
        results[label] = Result()
        try:
            for _ in _checked(run, world, results[label]):
                _write(result_file, results, world)
        except Exception as error:
            # Only the first failure is recorded: the others follow from it.
            with contextlib.suppress(FileExistsError), Path(f"{result_file}.error").open("x") as file:
                file.write(one_line(f"{label}, rank {world.rank}: {type(error).__name__}: {error}"))
            raise
    world.barrier()
    world.leave()
    return 0


def _checked(run: RunConfig, world: World, result: Result) -> Iterator[None]:
    """Fill the result; yields whenever there is more of it."""
    configure_torch(run, world.device_type)
    if run.strategy.equals_one_device(run) and has_parity(run):
        result.difference, result.tolerance = _parity(run, world)
        yield
    configure_torch(run, world.device_type)
    replica = new_replica(build_model(run), run, world)
    watching = world.device_type == "cuda" and not waits_by_design(run)
    with closing(loader_of(run, world, replica.data_shard)) as loader:
        if run.compile:
            replica.compile_warmup(next(loader.train(epoch=1)))
        set_mode = torch.cuda.set_sync_debug_mode if watching else lambda _: None
        trainer, checks = train_watched(replica, loader, run=run, world=world, set_mode=set_mode)
        run = msgspec.structs.replace(run, epochs=EPOCHS)
        after = ClosingCheck(replica, loader, run=run, world=world, loader_of=lambda of, sh: loader_of(of, world, sh))
        loss, accuracy = trainer.evaluated
        findings = after.findings(build_model(run), loss=loss, accuracy=accuracy, sent=trainer.sent)
    replica.close()
    rows = [*checks.rows, *(finding.row(EPOCHS) for finding in findings)]
    result.unlike = [
        f"{row['check']} {row['difference']} (limit {row['limit']})" for row in rows if row["passed"] is False
    ]
    result.trained, result.watched = True, watching
    yield


def has_parity(run: RunConfig) -> bool:
    """Whether the parity check, which is fp64 and compiles nothing, shows anything of this run."""
    return run.precision == "fp32" and not run.compile


def waits_by_design(run: RunConfig) -> str:
    """Why the host waits for the device in every step of this run; empty: it must not."""
    return "L-BFGS reads each loss" if isinstance(run.optimizer, Lbfgs) else run.strategy.waits_in_steps


def _parity(run: RunConfig, world: World) -> tuple[float, float]:
    """The largest difference, infinite for a NaN, and its tolerance."""
    checked = as_checked(run)
    rows = check_parity(build_model(checked), checked, world, lambda of, shard: loader_of(of, world, shard))
    if rows is None:
        raise MemoryError("one device has too little memory for the comparison")
    worst = [row[name] for row in rows for name in DIFFERENCES]  # empty except on rank 0
    broken = any(math.isnan(value) for value in worst)  # which a maximum may lose
    return float("inf") if broken else max(worst, default=0.0), checked.strategy.parity_tolerance()


def _write(path: str, results: dict[str, Result], world: World) -> None:
    if world.rank == 0:
        Path(path).write_bytes(msgspec.json.encode(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
