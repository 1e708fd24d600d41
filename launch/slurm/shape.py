"""The resources that a sweep's jobs request from Slurm, and their site's flags. Jobs of one shape are one array."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parallelbench.config.sites import SlurmLauncher
from parallelbench.errors import ConfigError, count_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from parallelbench.config.run import RunConfig
    from parallelbench.config.sites import Site


END_TOGETHER = {"kill-on-bad-exit": 1, "wait": 60}
"""Options of every srun: the first task that fails ends the others; once the first has ended, they get so many s."""
_WARNING_OFF_BY_S = 60
"""Slurm looks at its jobs' times about once a minute (sbatch's manual, --signal)."""


STOP_AT_FAILURE = (
    "set_up_depth=${#BASH_SOURCE[@]}",
    """trap 'code=$?; [ "${#BASH_SOURCE[@]}" -gt "$set_up_depth" ] || { echo "parallelbench: set-up failed with """
    """exit code $code in line $LINENO of the script"; exit "$code"; }' ERR""",
)
"""Not `set -e`: what fails inside a function or a sourced file is that file's affair, and only its end counts. Not
`|| exit` either: several lines may make up one command, such as if … fi."""


@dataclass(frozen=True)
class Shape:
    """The resources of one job. One task per node, which starts all of the node's processes itself."""

    nodes: int
    devices_per_node: int
    gpus_per_node: int
    """GPUs to allocate on each node; 0: none."""
    cpus_per_node: int
    memory_mib_per_node: int

    @property
    def devices(self) -> int:
        """Over all nodes."""
        return self.nodes * self.devices_per_node

    def __str__(self) -> str:
        gpus = f", {count_of(self.gpus_per_node, 'GPU')}" if self.gpus_per_node else ""
        memory = f"{self.memory_mib_per_node / 1024:g} GiB"
        return f"{count_of(self.nodes, 'node')} with {count_of(self.cpus_per_node, 'core')}, {memory}{gpus} each"


def slurm(run: RunConfig) -> SlurmLauncher:
    """The launcher of a run that goes to Slurm."""
    assert isinstance(run.launcher, SlurmLauncher), f"launcher={run.launcher.name}"
    return run.launcher


def shape_of(run: RunConfig, device_type: str) -> Shape:
    """The resources of a run's job; raises `ConfigError` for more than the site has."""
    launcher, site = slurm(run), run.site
    devices = run.devices // run.nodes
    if devices > site.devices_per_node:
        raise ConfigError(_too_many(run, devices))
    if site.max_nodes is not None and run.nodes > site.max_nodes:
        raise ConfigError(f"nodes={run.nodes}, but site={site.name} allows a job site.max_nodes={site.max_nodes}")
    if site.max_time_min is not None and launcher.time_limit_min > site.max_time_min:
        raise ConfigError(
            f"launcher.time_limit_min={launcher.time_limit_min}, but site={site.name} allows a job "
            f"site.max_time_min={site.max_time_min}: lower it"
        )
    if launcher.signal_delay_s + _WARNING_OFF_BY_S >= 60 * launcher.time_limit_min:
        raise ConfigError(
            f"launcher.signal_delay_s={launcher.signal_delay_s} with launcher.time_limit_min={launcher.time_limit_min}:"
            f" Slurm's warning can come {_WARNING_OFF_BY_S} s early, so a run would be stopped as soon as it starts: "
            "raise launcher.time_limit_min or lower launcher.signal_delay_s"
        )
    if device_type == "cuda" and not site.gpus_per_node:
        raise ConfigError(f"device=cuda, but site={site.name} has gpus_per_node=0: choose device=cpu or another site")
    gpus = devices if asks_for_gpus(site, device_type) else 0
    memory_gib = launcher.memory_gib_per_device or site.memory_gib_per_device
    cpus = devices * (launcher.cpus_per_gpu if device_type == "cuda" else run.cores_per_device)
    return Shape(run.nodes, devices, gpus, cpus, round(1024 * memory_gib * devices))


def asks_for_gpus(site: Site, device_type: str) -> bool:
    """Whether a run's devices are GPUs that Slurm allocates.

    A CPU run at a GPU site leaves the GPUs to others; a site of CPUs may have GPUs that are only allocated.
    """
    return bool(site.gpus_per_node) and (device_type == "cuda" or site.device == "cpu")


def charged_devices(shape: Shape, site: Site) -> int:
    """Devices that a job is charged for: all GPUs of its nodes where it has the nodes to itself, else its own."""
    return shape.nodes * site.gpus_per_node if site.exclusive and shape.gpus_per_node else shape.devices


def _too_many(run: RunConfig, devices: int) -> str:
    most = run.site.devices_per_node
    nodes = next((n for n in range(run.nodes, run.devices + 1) if run.devices % n == 0 and run.devices // n <= most), 0)
    return (
        f"devices={run.devices} on nodes={run.nodes} are {devices} a node, but site={run.site.name} has "
        f"site.devices_per_node={most}: choose nodes={nodes} or fewer devices"
    )


def typed_gpus(shape: Shape, site: Site) -> str:
    """The GPUs of each node, as Slurm takes them."""
    return f"{site.gpu_type}:{shape.gpus_per_node}" if site.gpu_type else str(shape.gpus_per_node)


def batch_parameters(
    shape: Shape, launcher: SlurmLauncher, site: Site, *, name: str, srun: Sequence[str] = ()
) -> dict[str, Any]:
    """The parameters of submitit's batch script. All values come from checked fields; `srun`: further flags of it."""
    gpus: dict[str, Any] = {}
    if shape.gpus_per_node:
        gpus = {"gpus-per-node": typed_gpus(shape, site)}
    return {
        "job_name": name,
        "time": launcher.time_limit_min,
        "nodes": shape.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": shape.cpus_per_node,
        "wckey": None,  # else submitit sets one
        "signal_delay_s": launcher.signal_delay_s,
        "array_parallelism": launcher.array_parallelism,
        "stderr_to_stdout": True,
        "setup": setup_lines(site),
        # Since 22.05 srun doesn't take the number of cores from the job by itself.
        "srun_args": [f"--cpus-per-task={shape.cpus_per_node}", *as_words(END_TOGETHER), *srun],
        "additional_parameters": {**site_flags(site), **gpus, "mem": f"{shape.memory_mib_per_node}M", "requeue": True},
    }


def setup_lines(site: Site) -> list[str]:
    """Shell lines with which every job begins; one of the site's that fails ends the job."""
    own = [*(f"module load {module}" for module in site.modules), *site.setup]
    return [
        "umask 077",
        # A job's working directory is the user's: a stray conf.py there must not shadow ours.
        "export PYTHONSAFEPATH=1",
        *([*STOP_AT_FAILURE, *own, "trap - ERR"] if own else []),
    ]


_KEYS = (
    *("partition", "qos", "account", "wckey", "constraint"),
    *("reservation", "nice", "nodelist", "exclude"),
)
"""Keys of a site that are options of Slurm's by the same name."""
_DEVICES = "it follows from devices, nodes, site.gpus_per_node and site.gpu_type"
_CORES = "set launcher.cpus_per_gpu, or cores_per_device"
_MEMORY = "set launcher.memory_gib_per_device or site.memory_gib_per_device"
_RECORDS = "the suite finds its jobs and their logs by it"
_NOT_HERE = "it has no place in a job of the suite"
OWN: Mapping[str, str] = {
    **{key: f"set site.{key}" for key in (*_KEYS, "exclusive")},
    **dict.fromkeys(("container", "container-image", "container-mounts"), "set site.container"),
    **dict.fromkeys(("mail-user", "mail-type"), "set site.mail_user"),
    **dict.fromkeys(("time", "time-min"), "set launcher.time_limit_min"),
    **dict.fromkeys(("signal",), "set launcher.signal_delay_s"),
    **dict.fromkeys(("requeue", "no-requeue"), "set launcher.attempts"),
    **dict.fromkeys(("array",), "set launcher.array_parallelism"),
    **dict.fromkeys(("nodes",), "set nodes"),
    **dict.fromkeys(("ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-core", "ntasks-per-socket"), _DEVICES),
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres", "tres-per-task"), _DEVICES),
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu"), _CORES),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), _MEMORY),
    **dict.fromkeys(("job-name", "output", "error", "input", "open-mode", "chdir", "dependency", "clusters"), _RECORDS),
    **dict.fromkeys(("export", "export-file", "get-user-env", "uid", "gid", "wrap", "wait", "hold"), _NOT_HERE),
    **dict.fromkeys(("parsable", "test-only", "quiet", "verbose", "help", "usage", "version"), _NOT_HERE),
    **dict.fromkeys(("kill-on-bad-exit", "unbuffered", "immediate"), _NOT_HERE),
}
"""Options of sbatch and srun that the suite sets, or that would change how it knows its jobs → what to do instead."""


def site_flags(site: Site) -> dict[str, str | int | bool]:
    """Option → its value; True: it has none. Options that the site does not set are left out.

    Raises `ConfigError` where `site.sbatch` has an option of the suite's own.
    """
    flags = {key: value for key in _KEYS if (value := getattr(site, key)) is not None}
    further = {name: value for name, value in (site.sbatch or {}).items() if value is not None and value is not False}
    for name in further:
        if not re.fullmatch(r"[a-z][a-z0-9]+(-[a-z0-9]+)*", name):
            raise ConfigError(
                f"site.sbatch.{name} is no option: name a long one of sbatch's as --help does, e.g. comment"
            )
        # sbatch takes the beginning of a name for the name.
        if (own := next((own for own in OWN if own.startswith(name)), None)) is not None:
            raise ConfigError(f"site.sbatch.{name} is refused, as --{own} is the suite's: {OWN[own]}")
    return flags | further | ({"exclusive": True} if site.exclusive else {})


def as_words(flags: Mapping[str, str | int | bool | None]) -> list[str]:
    """Options as a command has them; those that are None are left out."""
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in flags.items() if value is not None]
