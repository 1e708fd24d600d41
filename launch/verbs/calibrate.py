"""The verb `calibrate`: measures what devices and links take, and writes the table that predictions start from."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from launch.checks import check_writable, prepare_all
from launch.launcher import launcher_of
from launch.sweep import one_run
from launch.sweep.compose import parse
from launch.verbs.console import console, listing, say
from parallelbench.config.sites import expanded
from parallelbench.errors import ConfigError, choices
from parallelbench.world.machine import this_machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from analysis.advisor.machine import MachineFigures
    from launch.launcher import Launcher
    from launch.sweep.compose import Extension
    from parallelbench.config.run import RunConfig


_KEYS = ("site", "launcher", "devices", "nodes", "device", "cores_per_device", "nccl", "results")
MOST_HERE = 8
"""Devices of this machine that are calibrated where no number is asked for."""


def calibrate(overrides: Sequence[str], extension: Extension, *, out: str | None) -> int:
    """Measure on one node, or on several in a job, write the table, and print what it says."""
    from analysis.advisor.calibration import read_figures

    nodes = "1"
    for override in parse(overrides, extension.conf):
        if override.key_or_group.partition(".")[0] not in _KEYS:
            wrong = override.key_or_group
            raise ConfigError(f"{override.input_line} changes no calibration: {choices(wrong, _KEYS)}")
        nodes = str(override.value()) if override.key_or_group == "nodes" else nodes
    if out and (not out.endswith(".parquet") or Path(out).expanduser().is_dir()):
        raise ConfigError(f"--out {out} is no name of a table: give one that ends in .parquet, as --from takes it")
    # One device of each node; how many a node has is known once the site is.
    devices = nodes if nodes.isdigit() else "1"
    asked = one_run([f"devices={devices}", *overrides], extension, instead="calibrate one machine at a time").run
    launcher = launcher_of(asked)
    count = _devices(asked, launcher, overrides)
    strategy = "ddp" if count > 1 else "single"
    # Nothing trains, so no number of devices is refused for the batch that it would have to divide.
    planned = one_run([*overrides, f"devices={count}", f"strategy={strategy}", f"batch_size={count}"], extension)
    (prepared,) = prepare_all([planned], launcher.prepare)
    path = Path(out).expanduser() if out else _default(planned.run)
    check_writable(path.parent, option="--out ")
    launcher.calibrate(prepared, path)
    figures = read_figures(path)
    console().print(listing(("figure", "value"), list(rows_of(figures))), crop=False)
    for note in figures.notes:
        say(note)
    say(f"{path}: `parallelbench advise … --from {shlex.quote(str(path))}` predicts from it")
    return 0


def _devices(run: RunConfig, launcher: Launcher, overrides: Sequence[str]) -> int:
    """As many as are asked for; else all of each node, of this machine at most `MOST_HERE`."""
    if any(each.startswith("devices=") for each in overrides):
        return run.devices
    if not launcher.trains_here:
        return run.site.devices_per_node * run.nodes
    machine = this_machine()
    gpus = machine.device_type(run.device) == "cuda"
    return max(1, min(MOST_HERE, len(machine.gpus) if gpus else machine.usable_cores // run.cores_per_device))


def _default(run: RunConfig) -> Path:
    return expanded(run.results, "results") / f"calibration-{time.strftime('%Y%m%d-%H%M%S')}.parquet"


def rows_of(figures: MachineFigures) -> Iterator[tuple[str, str]]:
    """What a calibration found, in words and numbers."""
    yield "devices", f"{figures.devices_per_node} × {figures.accelerator} per node"
    for precision, curve in figures.matmul_flops_per_s.items():
        best = max(zip(curve.rates, curve.sizes, strict=True))
        yield f"products in {precision}", f"{best[0] / 1e9:,.3g} GFLOP/s at {best[1]:.2g} FLOP, the fastest"
    yield "memory", f"{figures.memory_bytes_per_s.value / 1e9:,.3g} GB/s read and written"
    yield "launch of an operation", f"{figures.launch_s.value * 1e6:,.3g} µs"
    for tier in figures.tiers:
        words = f"{tier.latency_s.value * 1e6:,.3g} µs and {tier.bytes_per_s.value / 1e9:,.3g} GB/s"
        yield f"{tier.name}s" if tier.name == "link" else tier.name, f"{words} ({tier.latency_s.origin})"
    if shards := figures.sharding:
        small, large = (f"{1e3 * time_s:,.3g} ms" for time_s in (shards.times_s[0], shards.times_s[-1]))
        ends = (f"{size / 2**20:,.3g} MiB" for size in (shards.sizes_bytes[0], shards.sizes_bytes[-1]))
        yield f"sharding a layer among {shards.ranks}", f"{small} of {next(ends)}, {large} of {next(ends)}"
