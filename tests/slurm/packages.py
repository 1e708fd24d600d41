"""What a real Slurm needs of this machine: root, and a few Debian packages.

    python -m tests.slurm.packages

installs those that are missing, as `make test-slurm` does first. Tests install nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.surroundings import machine_path

PROGRAMS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
"""Program → the Debian package that has it."""

ACCOUNTING_PROGRAMS = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",  # not mariadb-server, which would make and start a database of its own
    "my_print_defaults": "mariadb-client-core",  # mariadb-install-db calls it
}

QUOTA_PROGRAMS = {"mkfs.btrfs": "btrfs-progs"}

POLICY = Path("/usr/sbin/policy-rc.d")
INSTALL_TIMEOUT_S = 600

FREEZER = Path("/sys/fs/cgroup/freezer")
"""The cgroups by which Slurm knows the processes of a job, on a kernel that offers them like this."""


class UnavailableError(Exception):
    """A cluster can't be started here; the message says why."""


def require(*, accounting: bool, cgroups: bool) -> None:
    """Make sure that this machine can run a cluster.

    Raises:
        UnavailableError: it can't.
    """
    if os.geteuid() != 0:
        raise UnavailableError("only root can start a Slurm cluster")
    if cgroups and not FREEZER.is_dir():
        raise UnavailableError(f"there are no cgroups of version 1 ({FREEZER})")
    _refuse_without(missing_packages(PROGRAMS | (ACCOUNTING_PROGRAMS if accounting else {})))


def require_quotas() -> None:
    """Make sure that this machine can make a file system with quotas; raises `UnavailableError`."""
    if os.geteuid() != 0:
        raise UnavailableError("only root can mount a file system")
    _refuse_without(missing_packages(QUOTA_PROGRAMS))


def missing_packages(wanted: dict[str, str]) -> list[str]:
    """The packages of programs that this machine does not have."""
    return sorted(package for program, package in wanted.items() if not shutil.which(program, path=search_path()))


def _refuse_without(packages: list[str]) -> None:
    if packages:
        raise UnavailableError(f"{', '.join(packages)} missing: `python -m tests.slurm.packages` installs them")


def search_path() -> str:
    """Where the daemons are: the shells of some users leave the sbin folders out."""
    return f"{os.environ['PATH']}:{machine_path()}:/usr/sbin:/sbin"


def install_missing() -> None:
    """Install what this machine lacks of all that the tests use.

    Raises:
        UnavailableError: that is not possible.
    """
    packages = missing_packages(PROGRAMS | ACCOUNTING_PROGRAMS | QUOTA_PROGRAMS)
    if not packages:
        return
    if os.geteuid() != 0:
        raise UnavailableError(f"only root can install Debian's {', '.join(packages)}")
    if not shutil.which("apt-get", path=search_path()):
        raise UnavailableError(f"{', '.join(packages)} missing, and there is no apt-get to install them with")
    print(f"Installing Debian's {', '.join(packages)}; none of their services is started.", flush=True)
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    with _no_services():
        done = _apt(command)
        if done.returncode:  # the lists of a fresh machine are empty or old
            _apt(["apt-get", "update"])
            done = _apt(command)
    if done.returncode:
        raise UnavailableError(f"`{' '.join(command)}` failed: {done.stderr.strip()[-500:]}")
    _refuse_without(missing_packages(PROGRAMS | ACCOUNTING_PROGRAMS | QUOTA_PROGRAMS))


def _apt(command: list[str]) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "PATH": search_path()}
    # Another process may be installing something: wait for its lock.
    command = [command[0], "-o", "DPkg::Lock::Timeout=120", *command[1:]]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)


@contextmanager
def _no_services() -> Iterator[None]:
    """Keep packages from starting their daemons, in the way Debian has for it."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        install_missing()
    except UnavailableError as error:
        sys.exit(str(error))
