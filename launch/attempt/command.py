"""The command line and the environment of a run's processes, as pure functions."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallelbench.config.build import to_mapping
from parallelbench.config.identity import canonical_json
from parallelbench.frameworks import RENDEZVOUS
from parallelbench.processes import inherited
from parallelbench.world.allowance import MEETING_HERE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from launch.preparation import Prepared
    from parallelbench.config.run import RunConfig

_JOIN_S = 300
"""How long the first node waits for the others."""
MALLOC = {
    # glibc returns freed tensors to the system and faults them in again: 1.1 to 1.7 times the time per step on a CPU.
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}


@dataclass(frozen=True)
class Rendezvous:
    """One node's part in the rendezvous of a run's several nodes."""

    node: int
    """0 is the head, which hosts the store that all nodes connect to."""
    nodes: int
    host: str
    port: int
    id: str
    """Identifies this start of this job: processes of another job on the same port are refused."""
    secret: str
    """Known to this job's nodes alone: what the suite itself listens with refuses everybody else."""


WORKER, CALIBRATION = "parallelbench.training.worker", "parallelbench.measure.calibration"
"""What each rank executes: a run, or a calibration."""


def command_line(
    arguments: Sequence[str],
    processes: int,
    rendezvous: Rendezvous | None = None,
    *,
    program: str = WORKER,
    framework: str = "torch",
) -> list[str]:
    """One process directly; several through torchrun, which on one machine picks a free port by itself.

    Frameworks besides torch have a starter of the suite's. `arguments` are those of `program`.
    """
    if framework != "torch":
        return [sys.executable, "-m", "parallelbench.training.starter", *arguments]
    worker = ["-m", program, *arguments]
    if processes == 1:
        return [sys.executable, *worker]
    if rendezvous is None:
        torchrun = [*MEETING_HERE, f"--nproc-per-node={processes}"]
    else:
        torchrun = [
            f"--nnodes={rendezvous.nodes}",
            f"--nproc-per-node={processes // rendezvous.nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={rendezvous.host}:{rendezvous.port}",
            f"--rdzv-id={rendezvous.id}",
            f"--rdzv-conf=is_host={int(rendezvous.node == 0)},join_timeout={_JOIN_S}",
            f"--local-addr={rendezvous.host}" if rendezvous.node == 0 else "",
        ]
    torchrun = [option for option in torchrun if option]
    return [sys.executable, "-m", "torch.distributed.run", *torchrun, "--max-restarts=0", *worker]


def calibration_arguments(prepared: Prepared, path: Path) -> list[str]:
    """The arguments of a calibration on the devices of a run."""
    return [str(path.absolute()), prepared.device_type, canonical_json(to_mapping(prepared.planned.run))]


def environment(
    run: RunConfig, device_type: str, shell: Mapping[str, str], *, cores: int, rendezvous: Rendezvous | None = None
) -> dict[str, str]:
    """Environment variables of the training processes, from this process's, on a machine with `cores` usable cores."""
    own = {
        # A stray conf.py or analysis/ in the working directory must not shadow ours.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        # torch counts GPUs as the driver's tools do.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": str(threads_per_process(run, device_type, cores)),
        # numpy starts a thread pool on import. Nothing here uses it, and it would not survive a fork.
        "OPENBLAS_NUM_THREADS": "1",
        **_network(run, rendezvous),
        **(run.nccl.variables() if device_type == "cuda" else {}),
        **MALLOC,
    }
    if run.strategy.framework != "torch":
        own["TF_CPP_MIN_LOG_LEVEL"] = "2"  # errors only
        if rendezvous is not None:
            own[RENDEZVOUS] = f"{rendezvous.node} {rendezvous.host}:{rendezvous.port} {rendezvous.secret}"
    if run.compile:
        # Code that an earlier run compiled must not shorten this run's start.
        own["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    if run.measure.deterministic:
        own["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return inherited(shell) | own


def _network(run: RunConfig, rendezvous: Rendezvous | None) -> dict[str, str]:
    """Variables that choose the interface between ranks. On one machine ranks listen on loopback only."""
    interface = "lo" if rendezvous is None else run.site.network_interface
    if interface is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": interface} | ({} if rendezvous is None else {"NCCL_SOCKET_IFNAME": interface})


def threads_per_process(run: RunConfig, device_type: str, cores: int) -> int:
    """On a CPU, the device's cores. On CUDA, an equal share of the cores for each device."""
    return run.cores_per_device if device_type == "cpu" else max(1, cores // (run.devices // run.nodes))
