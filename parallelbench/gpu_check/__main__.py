"""Print one line per check: ok, failed with the figure and its limit, or skipped with the reason; then all as a table.

After a failure, or a crash, the next call repeats only what has not passed; `--fresh` repeats everything. `--quick`
carries out a few in under two minutes, as a job's prologue may.
`--share=N` lets N ranks share each GPU, by NCCL 2.30 or newer: so one GPU is enough to check the strategies' results,
and says nothing about their speed.
`--rehearse` takes two CPU processes for GPUs: that shows that this program works, and says nothing about a GPU.
Exit code 1 if a check failed, or if there is a GPU that torch can't use; 2 if a package is missing, or if no check has
a name that `--only` asks for. Without a GPU there is nothing to check; the program says so and exits with 0. Needs
torch, numpy, msgspec, PyYAML, psutil and nvidia-ml-py only; whole runs are skipped where the rest of the suite's
packages is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import tempfile
from fnmatch import fnmatchcase
from functools import partial as on
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelbench.errors import count_of
from parallelbench.processes import without_foreign

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from parallelbench.gpu_check.attempts import Workers
    from parallelbench.gpu_check.results import Check
    from parallelbench.world.world import World

NEEDED = {"torch": "torch>=2.11", "numpy": "numpy", "msgspec": "msgspec", "yaml": "PyYAML"}
NEEDED |= {"psutil": "psutil", "pynvml": "nvidia-ml-py"}
"""Module → what installs it."""
LEAST_TORCH = (2, 11)
REHEARSED, REHEARSED_STRATEGIES = 2, 4
"""Processes that take the place of a node's GPUs; strategies that need more than the first number get the second."""
QUICK = (
    *("CUDA's GPUs are NVML's", "NVML's readings", "step times against a stopwatch", "device memory"),
    *("arithmetic of fp32 and tf32", "attention of blocks, bf16", "waits are noticed", "no waits: cnn_small fp32"),
    "no waits: gpt_tiny bf16",
)
"""What `--quick` carries out, beside a plain run of ddp on all devices."""
_TAKES = "about 5 minutes on one GPU; with strategies on four, about half an hour"
_TAKES_QUICK = "under two minutes"
_TAKES_SHARED = "more than half an hour, since ranks take turns on a GPU"


@without_foreign()
def main(arguments: Sequence[str] | None = None) -> int:
    """Check this machine's GPUs, or those of all nodes of a job, of which this one is the first."""
    options = _options(arguments)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as runs do; NVML counts so
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy starts threads when it is loaded, and forks would lack them
    if missing := missing_packages():
        print(f"gpu-check: {', '.join(missing)} missing; the rest of the suite's packages is needed for whole runs")
        return 2
    import torch

    from parallelbench.gpu_check.attempts import Workers
    from parallelbench.gpu_check.nodes import Nodes
    from parallelbench.gpu_check.results import FailedError, apart, default_path

    nodes = Nodes(options.nodes, options.host, options.folder) if options.nodes > 1 else None
    kind = "-rehearsal" if options.rehearse else "-shared" if options.share > 1 else ""
    kept = options.folder.parent / f"gpu-check{kind}.jsonl" if options.folder else default_path(kind)
    if options.rehearse:
        device_type, devices, names = "cpu", REHEARSED, ["processes on CPUs in the place of GPUs"]
    else:
        try:
            found = apart(_names)()
        except FailedError as failed:
            print(f"failed: torch was asked for its GPUs: {failed}")
            return 1
        if not found:
            return without_a_gpu()
        device_type, devices, names = "cuda", len(found), sorted({*found})
    where = f"{options.nodes} nodes × {devices}" if nodes else f"{devices}"
    setting = f"torch {torch.__version__}, CUDA {torch.version.cuda}, {where} × {', '.join(names)}"
    if options.share > 1:
        setting += f", each shared by {options.share} ranks"
    most = devices if device_type == "cuda" or nodes is not None else REHEARSED_STRATEGIES
    with (
        tempfile.TemporaryDirectory(prefix="gpu-check-", dir=options.folder) as folder,
        Workers(device_type, most, Path(folder), nodes, share=options.share) as workers,
    ):
        offered = quick(workers) if options.quick else sections(workers)
        if options.share > 1:
            offered = {"strategies": offered["strategies"]}
        wanted = {
            section: {name: check for name, check in found.items() if fnmatchcase(name, options.only)}
            for section, found in offered.items()
        }
        if not any(wanted.values()):
            there = "\n  ".join(name for found in offered.values() for name in found)
            print(f"gpu-check: no check is called {options.only!r}; there are:\n  {there}", file=sys.stderr)
            return 2
        counts = ", ".join(f"{len(found)} of {section}" for section, found in wanted.items() if found)
        takes = _TAKES_QUICK if options.quick else _TAKES_SHARED if options.share > 1 else _TAKES
        print(f"{counts}; {takes}", flush=True)
        path = Path(folder, "not-kept.jsonl") if options.quick else kept
        together = {name: check for found in wanted.values() for name, check in found.items()}
        return carry_out_all(together, setting, path=path, fresh=options.fresh, some=options.only != "*")


def _names() -> list[str]:
    """Of the GPUs that torch can use."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(index) for index in range(count)]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-check", description="Checks of what only a GPU can show.")
    parser.add_argument("--fresh", action="store_true", help="repeat also what has passed")
    parser.add_argument("--quick", action="store_true", help="a few, in under two minutes, as before a job's runs")
    parser.add_argument("--rehearse", action="store_true", help="take two CPU processes for GPUs")
    shared = "let N ranks share each GPU, and check strategies (NCCL 2.30 or newer)"
    parser.add_argument("--share", metavar="N", type=int, choices=range(1, 9), default=1, help=shared)
    parser.add_argument("--only", metavar="PATTERN", default="*", help="checks by name, e.g. --only='strategy *'")
    # Of a job on several nodes, by `python -m parallelbench.entry launch.slurm.errands gpu-check`.
    parser.add_argument("--nodes", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--host", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def carry_out_all(all_checks: Mapping[str, Check], setting: str, *, path: Path, fresh: bool, some: bool) -> int:
    """Print the result of each check, and the table; returns the exit code.

    `path` keeps what has passed, until all checks have; `some`: these are not all of them.
    """
    from parallelbench.gpu_check.results import KeptResults, carry_out, markdown

    kept = KeptResults(path, setting)
    if fresh:
        kept.passed.clear()
    results = []
    for name, check in all_checks.items():
        if name in kept.passed:
            results.append(kept.passed[name])
            print(f"{'before':8}{results[-1].line()[8:]}")
            continue
        results.append(carry_out(name, check))
        kept.add(results[-1])
        print(results[-1].line(), flush=True)
    failed = sum(result.state == "failed" for result in results)
    print(f"\n{markdown(setting, results)}\n")
    if failed:
        which = count_of(failed, "check")
        again = "the next call repeats only what has not passed (all of it with --fresh)"
        print(f"{which} failed: trust no number that rests on it, and paste the table into an issue; {again}")
        return 1
    if not some:
        kept.forget()
    print("no check failed: measure here, and keep the table with what you publish")
    return 0


def missing_packages() -> list[str]:
    """Packages that must be installed first."""
    missing = [package for module, package in NEEDED.items() if not _is_installed(module)]
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version("torch")
        if tuple(map(int, version.split(".")[:2])) < LEAST_TORCH:
            missing.append(f"torch>={'.'.join(map(str, LEAST_TORCH))} (here: {version})")
    return missing


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def without_a_gpu() -> int:
    """Say why torch shows no GPU."""
    from parallelbench.world.machine import visible_gpus

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus := visible_gpus():
        names = ", ".join(gpu.name for gpu in gpus)
        print(f"failed: the driver shows {names}, but this torch can't use it: install one built for the driver's CUDA")
        return 1
    hidden = f" CUDA_VISIBLE_DEVICES={visible!r} may hide it." if visible is not None else ""
    print(
        "Nothing was checked: there is no GPU that the driver shows this process."
        f"{hidden} On a machine with one, this checks NVML's readings and energy, CUDA's clocks and memory, each "
        "precision, layouts, torch.compile, that no step waits for the device, and every strategy on several GPUs."
    )
    return 0


def sections(workers: Workers) -> dict[str, dict[str, Check]]:
    """All checks by name, from the basic ones to those that build on them; on CPUs, only those that mean something."""
    from parallelbench.gpu_check import strategies
    from parallelbench.gpu_check.results import apart

    on_gpus = workers.device_type == "cuda"
    of_strategies: dict[str, Check] = {}
    for name in strategies.names():
        of_strategies[f"strategy {name}"] = on(strategies.strategy, name, workers)
    if on_gpus:
        of_strategies |= {how: on(strategies.exchanged, how, workers) for how in strategies.WAYS}
    return {
        "devices": {name: apart(check) for name, check in (*(_of_nvml() if on_gpus else ()), *_of_a_device(on_gpus))},
        "training": {name: apart(check) for name, check in _of_training(on_gpus)},
        "runs on one device": dict(_of_runs(workers)),
        "whole runs": dict(_of_whole_runs(workers)),
        "strategies": of_strategies,
    }


def quick(workers: Workers) -> dict[str, dict[str, Check]]:
    """A few of them."""
    from parallelbench.gpu_check import strategies, variants

    found = {
        section: {name: check for name, check in all_of_it.items() if name in QUICK}
        for section, all_of_it in sections(workers).items()
    }
    found["strategies"] = {"strategy ddp, plain": on(strategies.strategy, "ddp", workers, (variants.PLAIN,))}
    return found


def _on_a_device(check: Callable[..., str], on_gpus: bool, *arguments: Any) -> Check:
    """The check with its first argument, the first device, which is taken only when it begins."""

    def checked() -> str:
        import torch

        from parallelbench.world.world import World

        if not on_gpus:
            return check(World(), *arguments)
        torch.cuda.set_device(0)
        return check(World(device_type="cuda", devices=(torch.device("cuda", 0),)), *arguments)

    return checked


def _of_nvml() -> Iterator[tuple[str, Check]]:
    from parallelbench.gpu_check import device, telemetry

    def energy(world: World) -> str:
        return telemetry.energy(world, telemetry.uuid_of(0), device.work_for(world))

    yield "CUDA's GPUs are NVML's", telemetry.same_gpus
    yield "NVML's readings", telemetry.readings
    yield "energy, and the sampler's process", _on_a_device(energy, True)


def _of_a_device(on_gpus: bool) -> Iterator[tuple[str, Check]]:
    from parallelbench.gpu_check import attention, device

    yield "step times against a stopwatch", _on_a_device(device.clocks, on_gpus)
    yield "device memory", _on_a_device(device.device_memory, on_gpus)
    yield "arithmetic of fp32 and tf32", _on_a_device(device.arithmetic, on_gpus)
    if on_gpus:
        yield "pieces of work, and calibrate", _on_a_device(device.calibration, on_gpus)
    for precision in attention.DTYPES if on_gpus else ("bf16",):
        yield f"attention of blocks, {precision}", _on_a_device(attention.exact, on_gpus, precision)


def _of_training(on_gpus: bool) -> Iterator[tuple[str, Check]]:
    from parallelbench.gpu_check import training

    for model in training.MODELS:
        yield f"fp64 like a CPU: {model}", _on_a_device(training.like_a_cpu, on_gpus, model)
    yield "one rank, sharded", _on_a_device(training.sharded, on_gpus)
    if not on_gpus:
        return
    yield "norm=sync on one rank", _on_a_device(training.synchronized_norms, on_gpus)
    yield "waits are noticed", _on_a_device(training.waits_are_seen, on_gpus)


def _of_runs(workers: Workers) -> Iterator[tuple[str, Check]]:
    from parallelbench.gpu_check import strategies, training

    if workers.device_type != "cuda":
        return
    for model in training.MODELS:
        for name in ("fp32", "bf16", "fp16"):
            last = name != "fp32" and model not in training.OF_TOKENS
            run = training.small_run(model, precision=name, channels_last=last)
            yield f"no waits: {model} {name}", on(strategies.alone, run, workers)
    yield "no waits: cnn_small tf32", on(strategies.alone, training.small_run("cnn_small", precision="tf32"), workers)
    llama = training.llama_run(precision="bf16")
    yield "no waits: gpt_tiny with rotary positions", on(strategies.alone, llama, workers)
    captured = {model: training.small_run(model, precision="fp64", graph=True) for model in ("cnn_small", "gpt_tiny")}
    captured["Llama's layers"] = training.llama_run(precision="fp64", graph=True)
    for model, run in captured.items():
        yield f"captured steps: {model}", on(strategies.alone, run, workers)
    for name in ("sgd", "adamw", "adagrad"):
        yield f"no waits: {name}", on(strategies.alone, training.small_run("cnn_small", optimizer=name), workers)
    for name in ("sgd", "adam", "adagrad"):
        run = training.small_run("cnn_small", optimizer=name, compile=True, compile_scope="step")
        yield f"no waits: compile_scope=step, {name}", on(strategies.alone, run, workers)


def _of_whole_runs(workers: Workers) -> Iterator[tuple[str, Check]]:
    from parallelbench.gpu_check import whole_runs

    device_type = workers.device_type
    yield "whole run", on(whole_runs.ends_well, workers)
    for loader in ("streamed", "dataloader", "tensor_dataset"):
        yield f"whole run on all devices, loader={loader}", on(whole_runs.ends_well, workers, True, loader=loader)
    yield "whole run, compile=true", on(whole_runs.ends_well, workers, compile=True)
    # Rehearsed strategies may take more processes than there are cores; whole runs are refused then.
    most = workers.devices if device_type == "cuda" else min(workers.devices, REHEARSED)
    for strategy, devices in (("tf_single", 1), ("tf_mirrored", most), ("tf_multi_worker", most)):
        yield f"TensorFlow: {strategy}", on(whole_runs.tensorflow, device_type, strategy, devices)
    yield "checkpoint and resume", on(whole_runs.resumes, device_type)
    yield "debugging", on(whole_runs.debugged, device_type)
    yield "out of memory", on(whole_runs.runs_out_of_memory, device_type)
    yield "a rank that hangs", on(whole_runs.hangs, device_type, workers.devices)


if __name__ == "__main__":
    sys.exit(main())
