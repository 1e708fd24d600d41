"""A throwaway real Slurm cluster on this machine: two nodes with four fake GPUs each, for tests and for trying out.

On the command line, as root (its state is in `.cluster/`, or in `--folder`):

    python -m tests.slurm.cluster up [--variant accounting|no_accounting|cgroup]
    source .cluster/env          # sets SLURM_CONF: sinfo, sbatch and `make sweep LAUNCHER=slurm` now use this cluster
    python -m tests.slurm.cluster status
    python -m tests.slurm.cluster down

In a test, with a fixture of `tests/slurm/conftest.py` (`accounting`, `no_accounting`, `cgroup`), or with options of its
own (`config.Options` lists them):

    with Cluster("accounting", max_array_size=20) as cluster:
        cluster.run("sbatch", "--wrap", "hostname")  # or subprocess.run(…, env=cluster.env)
        cluster.kill("slurmctld")  # or slurmdbd, mariadbd, munged; `stop` asks it nicely
        cluster.start("slurmctld")
        cluster.kill("n1")  # slurmd alone: its jobs live on, as on a node that lost its network
        cluster.crash_node("n2")  # slurmd and all its jobs, as on a node that lost its power
        cluster.start("n2")
        cluster.restore()  # start what is dead, cancel all jobs, wait until both nodes are idle

Partitions: `normal` (the default) and `preemptible`, which gives way to it. All daemons listen on 127.0.0.1, on ports
that were free, so several clusters can be up side by side. Nothing but Debian's packages is left outside the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.slurm import config, daemons, layout, packages
from tests.slurm.config import NODES, Options, Ports, Variant
from tests.slurm.daemons import DaemonError, until

START_TIMEOUT_S = 60.0


class Cluster:
    """A cluster in one folder; as a context it is up, and gone afterwards."""

    def __init__(self, variant: Variant = "accounting", *, folder: Path | None = None, **options: Any) -> None:
        self.options = Options(variant=variant, **options)
        self.folder = folder.resolve() if folder else Path(tempfile.gettempdir(), layout.PREFIX + secrets.token_hex(4))
        slurmctld, slurmdbd, mariadbd, *nodes = _free_ports(3 + len(NODES))
        self.ports = Ports(slurmctld=slurmctld, slurmdbd=slurmdbd, mariadbd=mariadbd, nodes=tuple(nodes))

    def __enter__(self) -> Cluster:
        self.up(owner=psutil.Process())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    @property
    def env(self) -> dict[str, str]:
        """The environment in which Slurm's programs, and submitit, talk to this cluster."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "SRUN"))}
        return kept | {"PATH": packages.search_path(), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, check: bool = True, timeout_s: float = 60.0) -> str:
        """Run a program that talks to this cluster; returns what it printed."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout_s)
        if check and done.returncode:
            raise DaemonError(f"`{shlex.join(command)}` exited with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    # --- up and down

    def up(self, *, owner: psutil.Process | None = None) -> None:
        """Start everything and wait until both nodes are idle; once its owner is dead, it is an orphan.

        Raises:
            UnavailableError: this machine can't run Slurm.
            DaemonError: it can, but a daemon did not start.
        """
        packages.require(accounting=self.options.accounting, cgroups=self.options.variant == "cgroup")
        layout.end_orphans()
        layout.Layout(self.folder, self.options, self.ports).make(owner)
        try:
            for name in self.names:
                self.start(name)
            self.wait_nodes_idle()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End everything that was started, and remove the folder. Does nothing if there is none."""
        layout.end(self.folder)

    @property
    def names(self) -> tuple[str, ...]:
        """The daemons, in the order in which they are started."""
        database = ("mariadbd", "slurmdbd") if self.options.accounting else ()
        return ("munged", *database, "slurmctld", *NODES)

    # --- single daemons

    def start(self, name: str) -> None:
        """Start one daemon and wait until it answers."""
        if name == "mariadbd" and not (self.folder / "database").exists():
            self.run("mariadb-install-db", f"--defaults-file={self.folder}/database.cnf", "--skip-test-db")
        daemons.start(name, _command(name, self.folder), folder=self.folder, env=self.env)
        until(lambda: self._answers(name), what=f"{name} answering", timeout_s=START_TIMEOUT_S)
        if name == "slurmdbd" and not any((self.folder / "state").iterdir()):  # slurmctld has never been up
            self.run("sacctmgr", "--immediate", "add", "cluster", config.CLUSTER_NAME)

    def kill(self, name: str) -> None:
        """Kill one daemon, and nothing else; it is gone on return. A controller forgets the last seconds."""
        self._end(name, patience_s=0.0)

    def stop(self, name: str) -> None:
        """Ask one daemon to end, as an administrator would; it is gone on return."""
        self._end(name, patience_s=30.0)

    def _end(self, name: str, *, patience_s: float) -> None:
        process = daemons.find(name, folder=self.folder)
        if process is not None:
            daemons.end([process], patience_s=patience_s)

    def crash_node(self, node: str, *, noticed: bool = False) -> None:
        """Kill a node's slurmd, if it is still there, and all that its jobs run.

        `noticed`: the controller hears of it, so that it ends the node's jobs at once. It finds out by itself where the
        node is away for long; one that is back sooner it asks for its jobs once a minute.
        """
        self.kill(node)  # first, or it would report that its jobs have failed
        daemons.end_jobs(self.folder, node=node)
        if noticed:
            self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    @contextlib.contextmanager
    def frozen_node(self, node: str) -> Iterator[None]:
        """Stop a node and all that its jobs run, as if it hung: connections stay open, and nothing answers."""
        frozen = daemons.of_node(self.folder, node=node)
        for process in frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        try:
            yield
        finally:
            self.crash_node(node)
            self.start(node)

    def wait_saved(self) -> None:
        """Wait until the controller saves its state again, which it does up to five seconds after a change.

        Killed later, it would have forgotten that a job was started, and start it again: Slurm then drains the node
        ("Duplicate jobid") until an administrator comes.
        """

        def saved() -> int:
            try:
                return (self.folder / "state" / "job_state").stat().st_mtime_ns
            except FileNotFoundError:  # it is replaced at this moment
                return 0

        before = saved()
        until(lambda: saved() > before, what="the controller saving its state", timeout_s=60, interval_s=0.01)

    def _answers(self, name: str) -> bool:
        if daemons.find(name, folder=self.folder) is None:
            raise DaemonError(f"{name} has ended:\n{daemons.log_tail(name, folder=self.folder)}")
        if name == "munged":
            probe = ["munge", "--no-input", f"--socket={self.folder}/munge.socket"]
            return subprocess.run(probe, env=self.env, capture_output=True).returncode == 0
        if name == "slurmctld":
            return _listens(self.ports.slurmctld) and " UP" in self.run("scontrol", "ping", check=False)
        return _listens(self.ports.of(name))

    def limit_submissions(self, jobs: int | None) -> None:
        """How many jobs a user may have in the queue from now on; None lifts the limit."""
        limit = f"MaxSubmitJobsPerUser={-1 if jobs is None else jobs}"
        self.run("sacctmgr", "--immediate", "modify", "qos", "normal", "set", limit)

    def restore(self) -> None:
        """Undo what a test has done: start what is dead, cancel all jobs, and wait until the nodes are idle."""
        for name in self.names:
            if daemons.find(name, folder=self.folder) is None:
                self.start(name)
        self.run("scancel", f"--user={os.geteuid()}")
        self.resume_drained()
        self.wait_nodes_idle()

    def resume_drained(self) -> None:
        """Do what an administrator does about nodes whose slurmd could not end a job in time."""
        for node, state in self.node_states().items():
            if "drain" in state:  # its slurmd could not end a job in time
                daemons.end_jobs(self.folder, node=node)
                self.start(node)
                self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    # --- looking at it

    def node_states(self) -> dict[str, str]:
        """What sinfo says of each node, e.g. `idle`, `mixed`, `down*`."""
        lines = self.run("sinfo", "--noheader", "--Node", "--partition=normal", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def wait_nodes_idle(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until all nodes are up and without work."""
        idle = dict.fromkeys(NODES, "idle")
        try:
            until(lambda: self.node_states() == idle, what="all nodes becoming idle", timeout_s=timeout_s)
        except DaemonError as error:
            states = self.run("scontrol", "--oneliner", "show", "nodes") + self.run("squeue", "--long")
            raise DaemonError(f"{error}:\n{states}") from None


def _command(name: str, folder: Path) -> list[str]:
    """How a daemon is started so that it stays in the foreground."""
    if name in NODES:
        return ["slurmd", "-D", "-N", name]
    return {
        "munged": [
            *("munged", "--foreground", "--force", f"--key-file={folder}/munge.key"),
            *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"),
            *(f"--seed-file={folder}/munge.seed", f"--log-file={folder}/log/munged.txt"),
        ],
        "mariadbd": ["mariadbd", f"--defaults-file={folder}/database.cnf", f"--init-file={folder}/database.sql"],
        "slurmdbd": ["slurmdbd", "-D"],
        "slurmctld": ["slurmctld", "-D"],
    }[name]


def _free_ports(count: int) -> list[int]:
    """Ports below those that the kernel gives to whoever asks for any (ip(7): ip_local_port_range): nobody takes them
    before a daemon does.
    """
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            each = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                each.bind(("127.0.0.1", 10_000 + secrets.randbelow(22_000)))
                ports.append(each.getsockname()[1])
        return ports


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


# --- the command line


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m tests.slurm.cluster up|down|status`."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.cluster", description="A throwaway Slurm cluster.")
    parser.add_argument("action", choices=("up", "down", "status"))
    parser.add_argument("--variant", choices=config.VARIANTS, default="accounting")
    parser.add_argument("--folder", type=Path, default=Path(".cluster"))
    chosen = parser.parse_args(arguments)
    folder = chosen.folder.resolve()
    try:
        if chosen.action == "up":
            _up(folder, variant=chosen.variant, shown=chosen.folder)
        elif chosen.action == "down":
            layout.end(folder)
        else:
            return _status(folder)
    except (packages.UnavailableError, DaemonError) as error:
        print(f"No cluster: {error}", file=sys.stderr)
        return 1
    return 0


def _up(folder: Path, *, variant: Variant, shown: Path) -> None:
    if layout.read(folder) and not layout.living(folder):  # the machine was restarted since
        layout.end(folder)
    began = time.monotonic()
    Cluster(variant, folder=folder).up()
    print(
        f"A Slurm cluster ({variant}) came up in {time.monotonic() - began:.1f} s. In your shell:\n"
        f"  source {shown}/env\n"
        "  sinfo\n"
        "  make sweep SWEEP=demo LAUNCHER=slurm SITE=local_cluster\n"
        f"`python -m tests.slurm.cluster down --folder {shown}` ends it."
    )


def _status(folder: Path) -> int:
    alive = layout.living(folder)
    if not alive:
        print(f"No cluster is up in {folder}.")
        return 1
    print("\n".join(f"{name}: process {process.pid}" for name, process in alive.items()), flush=True)
    env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    for command in (["sinfo", "--Node", "--long"], ["squeue"]):
        subprocess.run(command, env=env)
    return 0


if __name__ == "__main__":
    sys.exit(main())
