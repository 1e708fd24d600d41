"""`doctor --bandwidth`: all-reduces between nodes, one rank on each, in a short job. The command waits for it.

On the nodes: `python -m parallelbench.entry launch.slurm.bandwidth FOLDER DEVICE INTERFACE`; rank 0 of the
probe prints JSON.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from launch.slurm import container, rendezvous, scheduler
from launch.slurm.shape import shape_of, slurm
from parallelbench.config.plugin import plugin_of
from parallelbench.errors import ConfigError, count_of
from parallelbench.processes import inherited

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from launch.attempt.processes import Rendezvous
    from parallelbench.config.run import RunConfig


JOB_MINUTES = 2
"""The time limit of the job; the measurement itself takes seconds."""
WAIT_S = 60.0


def findings(run: RunConfig) -> Iterator[tuple[str, str]]:
    """(what, finding) pairs for `doctor`; waits until the cluster has run the job."""
    device_type = run.site.device if run.device == "auto" else run.device
    for row in _measured(run, device_type):
        size = f"{row['size_bytes'] / 1024:,.0f} KiB"
        bus = 2 * (row["ranks"] - 1) / row["ranks"] * row["size_bytes"] / row["time_s"]
        yield (
            f"all-reduce {size}",
            f"{row['time_s'] * 1e6:,.0f} µs, {bus / 1e9:.3f} GB/s sent by each of {row['ranks']} nodes",
        )


def _measured(run: RunConfig, device_type: str) -> list[dict[str, float]]:
    if not scheduler.available():
        raise ConfigError("there is no Slurm here: run `parallelbench doctor --bandwidth` on the login node")
    with tempfile.TemporaryDirectory(prefix=".bandwidth-", dir=shared(run)) as folder:
        print(f"waiting for {count_of(run.nodes, 'node')} of the cluster; Ctrl-C gives up", file=sys.stderr, flush=True)
        text = scheduler.tell(command(run, device_type, Path(folder)), waits=True)
    lines = [line for line in text.splitlines() if line.startswith("[{")]
    if not lines:
        raise ConfigError(f"the probe printed no result: {text.strip()[-300:]}")
    rows: list[dict[str, float]] = msgspec.json.decode(lines[-1])
    return rows


def shared(run: RunConfig) -> Path:
    """A folder that all nodes see: that of the results."""
    folder = run.sweep_folder.parent.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def command(run: RunConfig, device_type: str, folder: Path) -> list[str]:
    """One task and one device on each of the nodes."""
    program = ["launch.slurm.bandwidth", str(folder), device_type, run.site.network_interface or ""]
    return short_job(run, device_type, program, name="bandwidth", minutes=JOB_MINUTES)


def short_job(run: RunConfig, device_type: str, program: Sequence[str], *, name: str, minutes: int) -> list[str]:
    """The srun command that runs a module with its arguments once on each of a run's nodes, with the run's devices."""
    folders = container.needed_folders(run.site, shared(run), plugin_of(run))
    options: dict[str, str | int | bool] = {
        "job-name": f"parallelbench-{name}",
        "time": min(minutes, slurm(run).time_limit_min),
    }
    return container.srun_command(run.site, shape_of(run, device_type), program, options=options, folders=folders)


def main(arguments: Sequence[str]) -> int:
    """On each node, under srun: meet the others, then become the probe."""
    folder, device_type, interface = Path(arguments[0]), arguments[1], arguments[2] or None
    rank, size = os.environ["SLURM_PROCID"], os.environ["SLURM_NTASKS"]
    if interface:
        os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    meeting = met(folder, interface)
    probe = [sys.executable, "-m", "parallelbench.measure.bandwidth"]
    address = f"tcp://{meeting.host}:{meeting.port}"
    os.execve(sys.executable, [*probe, address, rank, size, device_type], inherited(os.environ))


def met(folder: Path, interface: str | None) -> Rendezvous:
    """Where a job's nodes meet: the first of them tells the others through the folder."""
    nodes, node = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_PROCID"])
    if node == 0:
        return rendezvous.offer(folder, os.environ["SLURM_JOB_ID"], nodes=nodes, interface=interface)
    return _wait(folder).meeting(node=node, nodes=nodes)


def _wait(folder: Path) -> rendezvous.Offer:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if (offer := rendezvous.read(folder)) is not None:
            return offer
        time.sleep(rendezvous.POLL_S)
    raise TimeoutError(
        f"node 0 did not write its address to {folder} within {WAIT_S:g} s: do all nodes see that folder?"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
