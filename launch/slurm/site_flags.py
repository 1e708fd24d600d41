"""What a site asks of every job, as options of sbatch and srun."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parallelbench.config.sites import Site

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
