"""The verb `doctor`: what this machine has to train with, and how to get what is missing. Never imports torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from rich.table import Table

from launch.slurm import launcher as slurm
from launch.sweep import one_run
from launch.sweep.compose import NOTHING, group_choices
from launch.verbs.console import console, print_json
from parallelbench.config.sites import prepare_line
from parallelbench.environments import engine_states, python_of, why_not
from parallelbench.errors import ConfigError, count_of
from parallelbench.measure.environment import output_of, version
from parallelbench.world.machine import cpu_name, gpu_caveats, problems, this_machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from launch.sweep.compose import Extension
    from parallelbench.config.run import RunConfig
    from parallelbench.world.machine import Machine


def doctor(overrides: Sequence[str], extension: Extension, *, as_json: bool) -> int:
    """Print what this machine and its cluster have."""
    rows = findings(overrides, extension)
    if as_json:
        print_json("doctor", findings=[{"what": what, "finding": finding} for what, finding in rows])
        return 0
    table = Table(box=None, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    console().print(table)
    return 0


_SHARED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "panfs", "wekafs", "afs", "cifs"}
_MISSING = "missing: pip install parallelbench installs it"
_PACKAGES = (
    "parallelbench",
    "torch",
    "torchvision",
    "numpy",
    "hydra-core",
    "submitit",
    "pyarrow",
    "polars",
    "nvidia-ml-py",
)


def findings(overrides: Sequence[str] = (), extension: Extension = NOTHING) -> Iterator[tuple[str, str]]:
    """(what, finding) pairs, in the order of the table; `overrides` choose a site, which the cluster is held against.

    Raises `ConfigError` for overrides that describe no run.
    """
    machine, run = this_machine(), one_run(overrides, extension).run
    yield "processor", f"{cpu_name()}: {_cores(machine)}"
    yield "memory", _memory()
    yield from _gpus(machine)
    yield "devices", _devices(machine)
    yield from slurm.findings()
    if overrides:
        yield from slurm.site_findings(overrides, extension)
    yield from _folders(run)
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    yield "packages", ", ".join(f"{name} {version(name) or _MISSING}" for name in _PACKAGES)
    yield "TensorFlow", why_not("tensorflow", "cpu") or str(python_of("tensorflow"))
    yield from engine_states()
    yield from _data(run.site.data_folder, extension)


def _cores(machine: Machine) -> str:
    cores = f"{count_of(len(machine.cores), 'core')} usable of {os.cpu_count()}"
    if machine.physical_cores < len(machine.cores):
        cores += f", on {machine.physical_cores} physical ones: two threads of one core are not two devices"
    if machine.usable_cores < len(machine.cores):
        cores += f"; a quota (cgroup) allows {machine.quota_cores:g} of them"
    return cores


def _memory() -> str:
    memory = psutil.virtual_memory()
    return f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f} GiB"


def _gpus(machine: Machine) -> Iterator[tuple[str, str]]:
    for index, gpu in enumerate(machine.gpus):
        if gpu.failure is None:  # others are named with the problems
            memory = "memory unknown" if gpu.memory_bytes is None else f"{gpu.memory_bytes / 2**30:.0f} GiB"
            yield f"GPU {index}", f"{gpu.name}, {memory}, {gpu.uuid}"
    if not machine.gpus:
        yield (
            "GPUs",
            "none visible: runs use processor cores as devices; on a GPU machine check the driver with nvidia-smi",
        )
    for text in (*problems(machine.gpus), *gpu_caveats(machine.gpus)):
        yield "GPUs", text
    if machine.gpus and (topology := output_of(["nvidia-smi", "topo", "-m"])):
        yield "topology", topology


def _devices(machine: Machine) -> str:
    if machine.gpus:
        return f"devices=1 … {len(machine.gpus)} with device=cuda; device=cpu: 1 … {machine.usable_cores}"
    return f"devices=1 … {machine.usable_cores} with cores_per_device=1"


def _folders(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Where results and data lie: on a cluster all nodes must see them."""
    for name, folder in (("results", run.sweep_folder.parent), ("site.data_dir", run.site.data_folder)):
        kind = file_system(folder.absolute())
        seen = "all nodes see it" if kind in _SHARED else "on a cluster, make sure that all nodes see it"
        yield f"folder of {name}", f"{folder.absolute()} on {kind}: {seen}"


def file_system(path: Path) -> str:
    """Kind of the file system that a path lies on or would lie on, as mount names it."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in (path, *path.parents) if parent in mounts), "unknown")


def _data(folder: Path, extension: Extension) -> Iterator[tuple[str, str]]:
    for name in group_choices(extension.conf)["data"]:
        try:
            yield f"data={name}", _ready(folder, name, extension)
        except ConfigError as error:  # a choice that names nothing by itself
            yield f"data={name}", str(error)


def _ready(folder: Path, name: str, extension: Extension) -> str:
    data = one_run([f"data={name}"], extension).run.data
    size = f"{data.train_samples:,} training and {data.test_samples:,} test samples"
    missing = data.missing_files(folder)
    fix = (
        f"run `{prepare_line(name, folder)}`" if data.made_by_prepare else "write it there, or choose site.data_dir=DIR"
    )
    state = f"missing in {folder}: {fix}" if missing else "ready"
    return f"{state} ({size})"
