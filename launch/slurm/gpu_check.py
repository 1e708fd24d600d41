"""`make gpu-check LAUNCHER=slurm`: the checks of a GPU in a job, on all GPUs of one node or several.

On the login node: `python -m parallelbench.entry launch.slurm.gpu_check [OPTION …] [OVERRIDE …]`, with
gpu-check's options, `--conf DIR`, `site=…` and `nodes=…`. It waits for the job and shows what that prints.
On each node: `… on-node FOLDER INTERFACE OPTION …`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from launch.slurm import container, rendezvous, scheduler
from launch.slurm.shape import Shape, asks_for_gpus, slurm
from launch.sweep import one_run
from launch.sweep.extension import extension
from parallelbench.errors import ConfigError, count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parallelbench.config.run import RunConfig


_ON_NODE = "on-node"
_MINUTES = 60
"""The job's time limit, unless the launcher's is shorter: strategies that compile take most."""
_REHEARSED = 2
"""Cores of each node, where CPU processes take the place of GPUs."""


def main(arguments: Sequence[str]) -> int:
    """Start the job, or be one of its tasks."""
    if arguments[:1] == [_ON_NODE]:
        return _on_node(Path(arguments[1]), arguments[2] or None, list(arguments[3:]))
    parser = argparse.ArgumentParser(prog="gpu-check", add_help=False)
    parser.add_argument("--conf")
    chosen, rest = parser.parse_known_args(list(arguments))
    options = [each for each in rest if each.startswith("--")]
    overrides = [each for each in rest if not each.startswith("--")]
    nodes = next((value for key, _, value in (each.partition("=") for each in overrides) if key == "nodes"), "1")
    try:
        run = one_run(["launcher=slurm", *overrides, f"devices={nodes}"], extension(chosen.conf, None)).run
        if not scheduler.available():
            raise ConfigError("there is no Slurm here: run this on the login node, or without LAUNCHER=slurm")
        results = run.sweep_folder.parent.absolute()
        results.mkdir(parents=True, exist_ok=True)
        # What has passed is kept beside this folder, which all nodes must see.
        with tempfile.TemporaryDirectory(prefix=".gpu-check-", dir=results) as folder:
            words = command(run, Path(folder), options)
            nodes_of_run = count_of(run.nodes, "node")
            print(f"waiting for {nodes_of_run} of the cluster; Ctrl-C gives up", file=sys.stderr, flush=True)
            return subprocess.run(words, stdin=subprocess.DEVNULL).returncode
    except ConfigError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def command(run: RunConfig, folder: Path, options: Sequence[str]) -> list[str]:
    """One task on each of the nodes, with all of its GPUs."""
    site, launcher = run.site, slurm(run)
    rehearsed = "--rehearse" in options
    if not (rehearsed or site.gpus_per_node):
        raise ConfigError(f"site={site.name} has site.gpus_per_node=0: set it to the GPUs of a node")
    devices = _REHEARSED if rehearsed else site.gpus_per_node
    cores = devices if rehearsed else devices * launcher.cpus_per_gpu
    memory_gib = launcher.memory_gib_per_device or site.memory_gib_per_device
    gpus = site.gpus_per_node if asks_for_gpus(site, "cpu" if rehearsed else "cuda") else 0
    shape = Shape(run.nodes, devices, gpus, cores, round(1024 * memory_gib * devices))
    program = ["launch.slurm.gpu_check", _ON_NODE, str(folder), site.network_interface or "", *options]
    folders = container.needed_folders(site, folder.parent, [])
    minutes = min(_MINUTES, launcher.time_limit_min)
    its_own: dict[str, str | int | bool] = {"job-name": "parallelbench-gpu-check", "time": minutes, "unbuffered": True}
    return container.srun_command(site, shape, program, options=its_own, folders=folders)


def _on_node(folder: Path, interface: str | None, options: list[str]) -> int:
    """The first node checks; the others start their share of what it starts."""
    node, nodes = os.environ["SLURM_PROCID"], int(os.environ["SLURM_NTASKS"])
    if interface:
        os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    if node != "0":
        os.execv(sys.executable, [sys.executable, "-m", "parallelbench.gpu_check.nodes", str(folder), node])
    host = rendezvous.address_of(interface, nodes=nodes)
    several = ["--nodes", str(nodes), "--host", host, "--folder", str(folder)]
    os.execv(sys.executable, [sys.executable, "-m", "parallelbench.gpu_check", *several, *options])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
