"""Print one line per check: ok, failed with the figure and its limit, or skipped with the reason; then all as a table.

After a failure, or a crash, the next call repeats only what has not passed; `--fresh` repeats everything.
Exit code 1 if a check failed, or if there is a GPU that torch can't use; 2 if a package is missing. Without a GPU there
is nothing to check; the program says so and exits with 0. Needs torch, numpy, msgspec, PyYAML and nvidia-ml-py only.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from parallelbench.gpu_check.check_result import Check

NEEDED = {"torch": "torch>=2.11", "numpy": "numpy", "msgspec": "msgspec", "yaml": "PyYAML", "pynvml": "nvidia-ml-py"}
"""Module → what installs it."""
LEAST_TORCH = (2, 11)


def main() -> int:
    """Check this machine's GPUs."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as runs do; NVML counts so
    if missing := missing_packages():
        print(f"gpu-check: {', '.join(missing)} missing; the rest of the suite's packages is not needed")
        return 2
    import torch

    print(f"torch {torch.__version__}, CUDA {torch.version.cuda or 'not built in'}, {torch.cuda.device_count()} GPU(s)")
    if not torch.cuda.is_available():
        return without_a_gpu()
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    setting = f"torch {torch.__version__}, CUDA {torch.version.cuda}, {len(names)} × {', '.join(sorted(set(names)))}"
    return carry_out_all(checks(len(names)), setting, fresh="--fresh" in sys.argv[1:])


def carry_out_all(all_checks: Iterable[tuple[str, Check]], setting: str, *, fresh: bool) -> int:
    """Print the result of each check, and the table; returns the exit code."""
    from parallelbench.gpu_check.check_result import carry_out
    from parallelbench.gpu_check.kept_results import KeptResults, default_path, markdown

    kept = KeptResults(default_path(), setting)
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
        print(f"{failed} check(s) failed; the next call repeats only what has not passed (all of it with --fresh)")
        return 1
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
    from parallelbench.rank.gpus import visible_gpus

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


def checks(gpus: int) -> Iterator[tuple[str, Check]]:
    """All checks, from the basic ones to those that build on them."""
    import torch

    from parallelbench.gpu_check import device, launches, one_rank, strategies, telemetry, training
    from parallelbench.rank.world import World

    world = World(device_type="cuda", devices=(torch.device("cuda", 0),))
    torch.cuda.set_device(0)
    on = functools.partial
    yield "CUDA's GPUs are NVML's", telemetry.same_gpus
    yield "NVML's readings", telemetry.readings
    yield (
        "energy, and the sampler's process",
        lambda: telemetry.energy(world, telemetry.uuid_of(0), device.work_for(world)),
    )
    yield "CUDA events against a stopwatch", on(device.clocks, world)
    yield "device memory", on(device.device_memory, world)
    yield "host memory", device.host_memory
    yield "arithmetic of fp32 and tf32", on(device.arithmetic, world)
    yield "batches", on(training.batches, world)
    for model in training.MODELS:
        yield f"fp64 like a CPU: {model}", on(training.like_a_cpu, world, model)
    yield "channels_last", on(training.channels_last, world)
    for name in ("tf32", "bf16", "fp16"):
        yield f"precision {name}", on(training.precision, world, name)
    yield "compile", on(training.compiled, world)
    yield "captured steps (graph=true)", on(launches.captured, world)
    yield "launches per step", on(launches.per_step, world)
    yield "milliseconds per step", on(launches.beside_a_bare_loop, world)
    yield "waits are noticed", on(training.waits_are_seen, world)
    yield "one rank on NCCL, sharded", on(one_rank.sharded, world)
    for model in training.MODELS:
        for name in ("fp32", "bf16", "fp16"):
            run = training.small_run(model, precision=name, channels_last=name != "fp32")
            yield f"no waits: {model} {name}", on(training.watched, world, run)
    for name in ("sgd", "adamw", "adagrad"):
        yield f"no waits: {name}", on(training.watched, world, training.small_run("cnn_small", optimizer=name))
    for name in strategies.names():
        yield f"strategy {name}", on(strategies.strategy, name, "cuda", gpus)


if __name__ == "__main__":
    sys.exit(main())
