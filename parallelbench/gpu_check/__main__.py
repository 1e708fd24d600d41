"""Print one line per check: ok, failed with the figure and its limit, or skipped with the reason; then all as a table.

After a failure, or a crash, the next call repeats only what has not passed; `--fresh` repeats everything.
`--rehearse` takes two CPU processes for GPUs: that shows that this program works, and says nothing about a GPU.
Exit code 1 if a check failed, or if there is a GPU that torch can't use; 2 if a package is missing. Without a GPU there
is nothing to check; the program says so and exits with 0. Needs torch, numpy, msgspec, PyYAML and nvidia-ml-py only;
whole runs are skipped where the rest of the suite's packages is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from fnmatch import fnmatchcase
from functools import partial as on
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from parallelbench.errors import count_of
from parallelbench.processes import without_foreign

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from parallelbench.gpu_check.nodes import Nodes
    from parallelbench.gpu_check.results import Check
    from parallelbench.world.world import World

NEEDED = {"torch": "torch>=2.11", "numpy": "numpy", "msgspec": "msgspec", "yaml": "PyYAML", "pynvml": "nvidia-ml-py"}
"""Module → what installs it."""
LEAST_TORCH = (2, 11)
REHEARSED, REHEARSED_STRATEGIES = 2, 4
"""Processes that take the place of a node's GPUs; strategies that need more than the first number get the second."""


@without_foreign()
def main(arguments: Sequence[str] | None = None) -> int:
    """Check this machine's GPUs, or those of all nodes of a job, of which this one is the first."""
    options = _options(arguments)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as runs do; NVML counts so
    if missing := missing_packages():
        print(f"gpu-check: {', '.join(missing)} missing; the rest of the suite's packages is needed for whole runs")
        return 2
    import torch

    from parallelbench.gpu_check.nodes import Nodes
    from parallelbench.gpu_check.results import default_path

    gpus = count_of(torch.cuda.device_count(), "GPU")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda or 'not built in'}, {gpus}")
    nodes = Nodes(options.nodes, options.host, options.folder) if options.nodes > 1 else None
    kept = options.folder.parent / "gpu-check.jsonl" if options.folder else default_path(rehearsed=options.rehearse)
    if options.rehearse:
        device_type, devices, names = "cpu", REHEARSED, ["processes on CPUs in the place of GPUs"]
    elif not torch.cuda.is_available():
        return without_a_gpu()
    else:
        device_type, devices = "cuda", torch.cuda.device_count()
        names = sorted({torch.cuda.get_device_name(index) for index in range(devices)})
    on = f"{options.nodes} nodes × " if nodes else ""
    setting = f"torch {torch.__version__}, CUDA {torch.version.cuda}, {on}{devices} × {', '.join(names)}"
    try:
        wanted = (each for each in checks(device_type, devices, nodes) if fnmatchcase(each[0], options.only))
        return carry_out_all(wanted, setting, path=kept, fresh=options.fresh, some=options.only != "*")
    finally:
        if nodes is not None:
            nodes.end()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-check", description="Checks of what only a GPU can show.")
    parser.add_argument("--fresh", action="store_true", help="repeat also what has passed")
    parser.add_argument("--rehearse", action="store_true", help="take two CPU processes for GPUs")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="checks by name, e.g. --only='strategy *'")
    # Of a job on several nodes, by `python -m parallelbench.entry launch.slurm.errands gpu-check`.
    parser.add_argument("--nodes", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--host", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def carry_out_all(all_checks: Iterable[tuple[str, Check]], setting: str, *, path: Path, fresh: bool, some: bool) -> int:
    """Print the result of each check, and the table; returns the exit code.

    `path` keeps what has passed, until all checks have; `some`: these are not all of them.
    """
    from parallelbench.gpu_check.results import KeptResults, carry_out, markdown

    kept = KeptResults(path, setting)
    if fresh:
        kept.passed.clear()
    results = []
    for name, check in all_checks:
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
        print(f"{which} failed; the next call repeats only what has not passed (all of it with --fresh)")
        return 1
    if not some:
        kept.forget()
    print("no check failed")
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


def checks(device_type: str, devices: int, nodes: Nodes | None = None) -> Iterator[tuple[str, Check]]:
    """All checks, from the basic ones to those that build on them.

    `devices`: of each node. On CPUs, only those that mean something there.
    """
    import torch

    from parallelbench.gpu_check import strategies
    from parallelbench.world.world import World

    if device_type == "cuda":
        world = World(device_type="cuda", devices=(torch.device("cuda", 0),))
        torch.cuda.set_device(0)
        yield from _of_nvml(world)
    else:
        world = World()
    yield from _of_a_device(world)
    yield from _of_training(world)
    yield from _of_whole_runs(device_type, devices)
    most = devices if device_type == "cuda" or nodes is not None else REHEARSED_STRATEGIES
    for name in strategies.names():
        yield f"strategy {name}", on(strategies.strategy, name, device_type, most, nodes)
    if device_type == "cuda":
        for how in strategies.WAYS:
            yield how, on(strategies.exchanged, how, devices, nodes)


def _of_nvml(world: World) -> Iterator[tuple[str, Check]]:
    from parallelbench.gpu_check import device, telemetry

    yield "CUDA's GPUs are NVML's", telemetry.same_gpus
    yield "NVML's readings", telemetry.readings
    yield (
        "energy, and the sampler's process",
        lambda: telemetry.energy(world, telemetry.uuid_of(0), device.work_for(world)),
    )


def _of_a_device(world: World) -> Iterator[tuple[str, Check]]:
    from parallelbench.gpu_check import attention, device

    yield "step times against a stopwatch", on(device.clocks, world)
    yield "device memory", on(device.device_memory, world)
    yield "host memory", device.host_memory
    yield "arithmetic of fp32 and tf32", on(device.arithmetic, world)
    for precision in attention.DTYPES if world.device_type == "cuda" else ("bf16",):
        yield f"attention of blocks, {precision}", on(attention.exact, world, precision)
    if world.device_type == "cuda":
        for batch in (1, 8):
            yield f"attention of blocks, ms at batch {batch}", on(attention.speed, world, batch)


def _of_training(world: World) -> Iterator[tuple[str, Check]]:
    from parallelbench.gpu_check import launches, training

    yield "batches", on(training.batches, world)
    for name in ("tensor_dataset", "dataloader", "arrow"):
        yield f"batches of loader={name}", on(training.loaded, world, name)
    for model in training.MODELS:
        yield f"fp64 like a CPU: {model}", on(training.like_a_cpu, world, model)
    yield "channels_last", on(training.channels_last, world)
    for name in ("tf32", "bf16", "fp16") if world.device_type == "cuda" else ("bf16",):
        yield f"precision {name}", on(training.precision, world, name)
    yield "compile", on(training.compiled, world, "model")
    for name in ("sgd", "adam", "adagrad") if world.device_type == "cuda" else ("adam",):
        yield f"compile_scope=step, {name}", on(training.compiled, world, "step", name)
    yield "one rank, sharded", on(training.sharded, world)
    if world.device_type != "cuda":
        return
    yield "norm=sync on one rank", on(training.synchronized_norms, world)
    yield "captured steps (graph=true)", on(launches.captured, world)
    yield "captured steps of gpt", on(launches.captured_gpt, world)
    yield "launches per step", on(launches.per_step, world)
    yield "milliseconds per step", on(launches.beside_a_bare_loop, world)
    yield "waits are noticed", on(training.waits_are_seen, world)
    for model in training.MODELS:
        for name in ("fp32", "bf16", "fp16"):
            last = name != "fp32" and model not in training.OF_TOKENS
            run = training.small_run(model, precision=name, channels_last=last)
            yield f"no waits: {model} {name}", on(training.watched, world, run)
    llama = training.llama_run(precision="bf16")
    yield "no waits: gpt_tiny with rotary positions", on(training.watched, world, llama)
    for name in ("sgd", "adamw", "adagrad"):
        yield f"no waits: {name}", on(training.watched, world, training.small_run("cnn_small", optimizer=name))


def _of_whole_runs(device_type: str, devices: int) -> Iterator[tuple[str, Check]]:
    from parallelbench.gpu_check import attempts

    yield "whole run", on(attempts.ends_well, device_type)
    for loader in ("arrow", "dataloader"):
        name = f"whole run on all devices, loader={loader}"
        yield name, on(attempts.ends_well, device_type, f"loader={loader}", devices=devices)
    if device_type == "cuda":
        graph = ("graph=true", "measure.attribution_steps=0")
        yield "whole run, graph=true", on(attempts.ends_well, device_type, *graph)
    yield "whole run, compile=true", on(attempts.ends_well, device_type, "compile=true")
    yield "checkpoint and resume", on(attempts.resumes, device_type)
    yield "packed runs", on(attempts.packed, device_type)
    yield "debugging", on(attempts.debugged, device_type)
    yield "out of memory", on(attempts.runs_out_of_memory, device_type)
    yield "a rank that hangs", on(attempts.hangs, device_type, devices)


if __name__ == "__main__":
    sys.exit(main())
