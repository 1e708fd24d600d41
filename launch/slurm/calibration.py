"""`calibrate launcher=slurm`: the devices and links of a cluster's nodes, measured in a short job.

On the nodes: `python -m parallelbench.entry launch.slurm.calibration FOLDER INTERFACE FILE DEVICE CONFIGURATION`;
they become the calibration's ranks, and the first of them writes FILE.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from launch.attempt.processes import CALIBRATION, calibration_arguments, command_line, environment
from launch.slurm import scheduler
from launch.slurm.bandwidth import met, shared, short_job
from parallelbench.config.build import from_mapping
from parallelbench.errors import ConfigError, count_of
from parallelbench.world.machine import threads_here

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launch.launcher import Prepared


JOB_MINUTES = 15
"""The time limit of the job, unless the launcher's is shorter; the measurement itself takes minutes."""


def calibrate(prepared: Prepared, path: Path) -> None:
    """Wait until the cluster has run the job; raises `ConfigError` without Slurm, or where the job wrote nothing."""
    run = prepared.planned.run
    if not scheduler.available():
        raise ConfigError("there is no Slurm here: run this on the login node, or with launcher=local")
    with tempfile.TemporaryDirectory(prefix=".calibration-", dir=shared(run)) as folder:
        # All nodes see this folder; the place of the table, they may not.
        table = Path(folder) / "table.parquet"
        print(f"waiting for {count_of(run.nodes, 'node')} of the cluster; Ctrl-C gives up", file=sys.stderr, flush=True)
        text = scheduler.tell(command(prepared, Path(folder), table), waits=True)
        if not table.exists():
            raise ConfigError(f"the calibration wrote no table: {text.strip()[-300:]}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(table.read_bytes())


def command(prepared: Prepared, folder: Path, table: Path) -> list[str]:
    """One task on each node, which starts a rank for each of its devices."""
    run = prepared.planned.run
    words = [str(folder), run.site.network_interface or "", *calibration_arguments(prepared, table)]
    program = ["launch.slurm.calibration", *words]
    return short_job(run, prepared.device_type, program, name="calibration", minutes=JOB_MINUTES)


def main(arguments: Sequence[str]) -> int:
    """On each node, under srun: meet the others, then become the calibration."""
    folder, interface, rest = Path(arguments[0]), arguments[1] or None, list(arguments[2:])
    device_type, run = rest[1], from_mapping(msgspec.json.decode(rest[2]))
    meeting = met(folder, interface)
    processes = run.strategy.processes(run, device_type)
    words = command_line(rest, processes, meeting, program=CALIBRATION)
    cores = threads_here()
    os.execve(words[0], words, environment(run, device_type, os.environ, cores=cores, rendezvous=meeting))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
