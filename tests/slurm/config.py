"""The configuration files of a throwaway Slurm cluster, as text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Variant = Literal["accounting", "no_accounting", "cgroup"]
VARIANTS: tuple[Variant, ...] = ("accounting", "no_accounting", "cgroup")

CLUSTER_NAME = "throwaway"
NODES = ("n1", "n2")
GPUS_PER_NODE = 4
CPUS_PER_NODE = 8
"""More than most test machines have: Slurm is told to believe it, and what is measured there is no benchmark."""
MEMORY_PER_NODE_MB = 11_000


@dataclass(frozen=True)
class Options:
    """What may differ between clusters; the defaults are those of a friendly site."""

    variant: Variant = "accounting"
    """`accounting`: with a database. `no_accounting`: without. `cgroup`: with, and jobs are tracked by cgroups.

    Without cgroups Slurm signals every descendant of a job, with them only the tasks themselves."""

    preempt_mode: Literal["REQUEUE", "CANCEL"] = "REQUEUE"
    preempt_send_user_signal: bool = False
    """Whether preemption sends the signal of `--signal` first; without it only SIGTERM, and only in the grace time."""
    grace_time_s: int = 0
    """How long a preempted job may go on."""
    job_requeue: bool = True
    first_job: int | None = None
    """The id of the first job; by default one that no other cluster of this machine is likely to use."""
    max_array_size: int = 1001
    """One more than the highest index of an array; 1001 is Slurm's own default."""
    slurmd_timeout_s: int = 10
    """How long a node may be silent until the controller takes it for dead; Slurm's own default is 300 s."""
    wckeys: bool = False
    """Whether jobs have workload characterization keys, of which users may use their own only; needs accounting."""

    constrain_ram: bool = False
    """Whether a job is held to its memory by its cgroup; else Slurm looks every few seconds. With `cgroup` only."""

    def __post_init__(self) -> None:
        if self.constrain_ram and self.variant != "cgroup":
            raise ValueError("only cgroups constrain memory")
        if self.wckeys and not self.accounting:
            raise ValueError("wckeys need accounting")

    @property
    def accounting(self) -> bool:
        """Whether there is a database of jobs."""
        return self.variant != "no_accounting"


@dataclass(frozen=True)
class Ports:
    """The TCP ports of the daemons."""

    slurmctld: int
    slurmdbd: int
    mariadbd: int
    nodes: tuple[int, ...]

    def of(self, name: str) -> int:
        """The port of the daemon of this name."""
        if name in NODES:
            return self.nodes[NODES.index(name)]
        return {"slurmctld": self.slurmctld, "slurmdbd": self.slurmdbd, "mariadbd": self.mariadbd}[name]


def slurm_conf(options: Options, ports: Ports, *, folder: Path, host: str, first_job: int) -> str:
    """slurm.conf; `folder` holds all state, `host` is this machine's short name."""
    lines = [
        f"ClusterName={CLUSTER_NAME}",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={ports.slurmctld}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
        # By default a requeued job waits two minutes for its old credential to expire.
        f"AuthInfo=socket={folder}/munge.socket,cred_expire=5",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/%n.pid",
        f"ProctrackType=proctrack/{'cgroup' if options.variant == 'cgroup' else 'linuxproc'}",
        f"TaskPlugin=task/{'cgroup' if options.constrain_ram else 'none'}",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU_Memory",
        "DefMemPerCPU=100",
        "SlurmdParameters=config_overrides",
        "GresTypes=gpu",
        "ReturnToService=2",
        f"JobRequeue={int(options.job_requeue)}",
        f"MaxArraySize={options.max_array_size}",
        f"MaxJobCount={max(10_000, 2 * options.max_array_size)}",
        f"FirstJobId={first_job}",
        # Slurm's default is 30. A supervisor gives its ranks 3 of them, then writes to a disk that other tests load: 5
        # were too few once.
        "KillWait=15",
        "MessageTimeout=5",
        f"SlurmdTimeout={options.slurmd_timeout_s}",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=task=5",
        *([] if options.constrain_ram else ["JobAcctGatherParams=OverMemoryKill"]),
        "SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0",
        "PreemptType=preempt/partition_prio",
        f"PreemptMode={options.preempt_mode}",
        *(["SlurmctldParameters=preempt_send_user_signal"] if options.preempt_send_user_signal else []),
        *_accounting_lines(options, ports, folder=folder),
        *(_node_line(name, port, host=host) for name, port in zip(NODES, ports.nodes, strict=True)),
        "PartitionName=normal Nodes=ALL Default=YES PriorityTier=10 PreemptMode=OFF",
        f"PartitionName=preemptible Nodes=ALL PriorityTier=1 PreemptMode={options.preempt_mode} "
        f"GraceTime={options.grace_time_s}",
    ]
    return "\n".join(lines) + "\n"


def _node_line(name: str, port: int, *, host: str) -> str:
    return (
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
        f"CPUs={CPUS_PER_NODE} RealMemory={MEMORY_PER_NODE_MB} Gres=gpu:a100:{GPUS_PER_NODE}"
    )


def _accounting_lines(options: Options, ports: Ports, *, folder: Path) -> list[str]:
    if not options.accounting:
        return ["AccountingStorageType=accounting_storage/none"]
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageTRES=gres/gpu",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={ports.slurmdbd}",
        f"AccountingStoragePass={folder}/munge.socket",
        f"AccountingStorageEnforce=limits,qos{',wckeys' if options.wckeys else ''}",
        *(["TrackWCKey=yes"] if options.wckeys else []),
    ]


def gres_conf(folder: Path) -> str:
    """gres.conf: the fake GPUs, which both nodes share."""
    return f"NodeName={','.join(NODES)} Name=gpu Type=a100 File={folder}/dev/fakegpu[0-{GPUS_PER_NODE - 1}]\n"


def cgroup_conf(options: Options) -> str:
    """cgroup.conf: track processes, and limit nothing but what the options say."""
    ram = "yes" if options.constrain_ram else "no"
    resources = {"Cores": "no", "Devices": "no", "RAMSpace": ram, "SwapSpace": ram}
    lines = [f"Constrain{name}={value}" for name, value in resources.items()]
    return "\n".join(["CgroupPlugin=cgroup/v1", *lines, "AllowedSwapSpace=0"]) + "\n"


def slurmdbd_conf(options: Options, ports: Ports, *, folder: Path, host: str, password: str) -> str:
    """slurmdbd.conf; with a numeric DbdHost slurmdbd does not start."""
    lines = [
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge.socket",
        f"DbdHost={host}",
        "DbdAddr=127.0.0.1",
        f"DbdPort={ports.slurmdbd}",
        "SlurmUser=root",
        f"PidFile={folder}/slurmdbd.pid",
        "CommunicationParameters=NoInAddrAny",
        "StorageType=accounting_storage/mysql",
        "StorageHost=127.0.0.1",
        f"StoragePort={ports.mariadbd}",
        "StorageLoc=accounting",
        "StorageUser=slurm",
        f"StoragePass={password}",
        *(["TrackWCKey=yes"] if options.wckeys else []),
    ]
    return "\n".join(lines) + "\n"


def database_sql(password: str) -> str:
    """What mariadbd runs when it starts: slurmdbd's user, who makes its database itself."""
    hosts = ("127.0.0.1", "localhost")
    lines = [f"CREATE USER IF NOT EXISTS slurm@'{host}' IDENTIFIED BY '{password}';" for host in hosts]
    lines += [f"GRANT ALL ON accounting.* TO slurm@'{host}';" for host in hosts]
    return "\n".join(lines) + "\n"


def database_conf(port: int, *, folder: Path) -> str:
    """The options of mariadbd: small, and never waiting for the disk, since a crash may take all."""
    lines = [
        "[mariadbd]",
        "user=root",
        f"datadir={folder}/database",
        f"tmpdir={folder}/tmp",  # in /tmp, two that start at once take each other's files away
        f"socket={folder}/mariadbd.socket",
        f"pid-file={folder}/mariadbd.pid",
        f"port={port}",
        "bind-address=127.0.0.1",
        "skip-name-resolve",
        "innodb_log_file_size=8M",
        "innodb_flush_log_at_trx_commit=0",
        "innodb_flush_method=nosync",
        "innodb_doublewrite=0",
        "debug-no-sync=1",
    ]
    return "\n".join(lines) + "\n"
