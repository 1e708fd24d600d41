"""The folder of a throwaway cluster: making it, and ending and removing what is in it."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shlex
import shutil
import socket
import stat
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests.slurm import config, daemons
from tests.slurm.packages import FREEZER, UnavailableError

PREFIX = "parallelbench-slurm-"
"""How the temporary folders of clusters begin."""
JOBS_PER_CLUSTER = 20_000
LONGEST_PATH = 60
"""Characters. Sockets lie in the folder, and the kernel allows them 107."""


@dataclass(frozen=True)
class Layout:
    """What the files of one cluster are made from."""

    folder: Path
    options: config.Options
    ports: config.Ports

    def make(self, owner: psutil.Process | None) -> None:
        """Make the folder, its files, and the devices that stand for GPUs.

        Raises:
            UnavailableError: the folder is there already, or can't hold sockets.
        """
        if len(str(self.folder)) > LONGEST_PATH:
            raise UnavailableError(f"{self.folder} is too long for sockets; use at most {LONGEST_PATH} characters")
        try:
            self.folder.mkdir(mode=0o700)
        except FileExistsError:
            raise UnavailableError(f"{self.folder} exists; if a cluster is in it, end that with `down`") from None
        # Cgroups are named after jobs, so clusters on the same machine should not use the same numbers.
        first_job = self.options.first_job or 1 + JOBS_PER_CLUSTER * secrets.randbelow(3000)
        record = {
            "variant": self.options.variant,
            "first_job": first_job,
            "owner": {"pid": owner.pid, "started": owner.create_time()} if owner else None,
        }
        _write(self.folder / "cluster.json", json.dumps(record))  # first: `end` goes by it
        for name in ("daemons", "dev", "log", "state", "spool", "tmp", *(f"spool/{node}" for node in config.NODES)):
            (self.folder / name).mkdir()
        for index in range(config.GPUS_PER_NODE):  # any character device will do; this is /dev/null
            os.mknod(self.folder / "dev" / f"fakegpu{index}", mode=0o666 | stat.S_IFCHR, device=os.makedev(1, 3))
        for name, text in self._files(first_job).items():
            _write(self.folder / name, text)

    def _files(self, first_job: int) -> dict[str, str]:
        options, ports, folder = self.options, self.ports, self.folder
        host = socket.gethostname().split(".")[0]
        password = secrets.token_hex(16)
        files = {
            "munge.key": secrets.token_hex(64),
            "slurm.conf": config.slurm_conf(options, ports, folder=folder, host=host, first_job=first_job),
            "gres.conf": config.gres_conf(folder),
            "cgroup.conf": config.cgroup_conf(options),
            "env": f"export SLURM_CONF={shlex.quote(str(folder / 'slurm.conf'))}\n",
        }
        if options.accounting:
            files |= {
                "slurmdbd.conf": config.slurmdbd_conf(options, ports, folder=folder, host=host, password=password),
                "database.cnf": config.database_conf(ports.mariadbd, folder=folder),
                "database.sql": config.database_sql(password),
            }
        return files


def read(folder: Path) -> dict[str, Any] | None:
    """What `Layout.make` has recorded there; None if that is no cluster, or one that is just being made or removed."""
    try:
        record = json.loads((folder / "cluster.json").read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def living(folder: Path) -> dict[str, psutil.Process]:
    """The daemons of this cluster that are alive, by name."""
    names = sorted(path.stem for path in (folder / "daemons").glob("*.json"))
    return {name: process for name in names if (process := daemons.find(name, folder=folder))}


def end(folder: Path) -> None:
    """End the cluster in this folder, whoever started it, and remove the folder. Does nothing if there is none."""
    record = read(folder)
    if record is None:
        return
    daemons.end(living(folder).values())
    daemons.end_jobs(folder)
    if record["variant"] == "cgroup":
        _remove_cgroups(record["first_job"])
    shutil.rmtree(folder, ignore_errors=True)  # somebody else may be ending it as well


def end_orphans() -> None:
    """End the clusters of tests that were killed before they could do it themselves."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = (read(folder) or {}).get("owner")
        if owner and daemons.alive(owner["pid"], started=owner["started"]) is None:
            end(folder)


def _remove_cgroups(first_job: int) -> None:
    """Remove what slurmstepd would have removed after its jobs, if it had not been killed."""
    for job in (job for folder in (FREEZER, FREEZER.with_name("memory")) for job in folder.glob("slurm*/uid_*/job_*")):
        if 0 <= int(job.name.removeprefix("job_")) - first_job < JOBS_PER_CLUSTER:
            for each in (*sorted(job.glob("**/"), reverse=True), job):
                daemons.until(partial(_is_removed, each), what=f"the end of what is in {each}", timeout_s=60)


def _is_removed(cgroup: Path) -> bool:
    """Remove it, unless something killed is still on its way out of it. What is frozen can't end."""
    try:
        if (freezer := cgroup / "freezer.state").exists():
            freezer.write_text("THAWED")
        cgroup.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
    return not cgroup.exists()


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)  # slurmdbd insists, and keys and passwords are among them
