"""Where and how a run is executed: launchers, sites, their hardware and containers; never part of a run's identity."""

from __future__ import annotations

import math
import os
import re
import shlex
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from parallelbench.config.structure import Count, Memory, Name, Node, Seconds, SlurmName
from parallelbench.errors import ConfigError

Rate = Annotated[float, Meta(gt=0.0)]


class Hardware(Node, frozen=True, kw_only=True):
    """One kind of accelerator in nodes of one kind."""

    accelerator: Name
    """What it is called, e.g. a100_40gb."""
    half_tflops: Rate
    """Dense matrix products in fp16 or bf16 by the data sheet, 10¹² FLOP/s of one device."""
    tf32_tflops: Rate | None = None
    """The same in TF32; null: not known."""
    single_tflops: Rate | None = None
    """The same in fp32, which no tensor cores take; null: not known."""
    matmul_tflops: Rate
    """The most that was measured of them, at any size: power limits keep it below the data sheet."""
    power_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Power limit of a device ÷ that with which matmul_tflops was measured; 0.714: 500 of 700 W."""
    memory_gb_per_s: Rate
    """Bandwidth of a device's memory, 10⁹ bytes/s."""
    memory_gib: Rate
    """Memory of one device, GiB."""
    link_gb_per_s: Rate
    """Links between the devices of a node: 10⁹ bytes/s that one device can send."""
    network_gbit_per_s: Rate
    """Network between nodes: 10⁹ bit/s that one node can send."""
    oversubscription: Annotated[float, Meta(ge=1.0)]
    """Bandwidth of all nodes together ÷ what the network's core carries; 1: full bisection."""
    devices_per_node: Count
    """Devices of a node."""
    multiprocessors: Count = 108
    """Streaming multiprocessors of a device; an A100 has 108."""
    source: str
    """Where the figures come from."""

    @property
    def clock_share(self) -> float:
        """What products keep of their rates under the power limit.

        Power goes as voltage² × frequency, and voltage as frequency (T. Mudge, Power: a first-class architectural
        design constraint, IEEE Computer 34(4), 2001): the third root. What a device draws at rest is not counted.
        """
        return math.cbrt(self.power_share)


Image = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9/][A-Za-z0-9_.:/@#+-]{0,511}\Z",
        description="a file such as /images/bench.sif, or an address such as docker://lab/bench:1.0",
    ),
]
Mount = Annotated[
    str,
    Meta(
        pattern=r"^/[A-Za-z0-9_./-]{0,255}:/[A-Za-z0-9_./-]{0,255}(:(ro|rw))?\Z",
        description="FOLDER:FOLDER or FOLDER:FOLDER:ro, outside and inside, both from / on",
    ),
]
Interpreter = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9/][A-Za-z0-9_./-]{0,255}\Z", description="a program such as /opt/venv/bin/python")
]


class Container(Node, frozen=True, kw_only=True):
    """What starts it, and what is in it."""

    runtime: Literal["apptainer", "singularity", "pyxis"]
    """`apptainer exec` before what srun starts; or `srun --container-image`, which Slurm's plugin Pyxis takes."""
    image: Image
    """The image, with this suite installed in the version that submits."""
    python: Interpreter = "python"
    """The interpreter inside, which has the suite."""
    mounts: list[Mount] = field(default_factory=list)
    """Further folders for it. It sees results, data and a user's package under their own names anyway."""


Constraint = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_.&|*()\[\]-]{1,128}\Z", description="features joined by & | * ( ) [ ], no spaces")
]
"""What a node must have, in Slurm's words, safe as a word of a batch script."""
Module = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./+-]{0,127}\Z", description="a module such as cuda/12.4")
]
"""A module, safe as a word of a batch script."""


Partitions = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,63}(,[A-Za-z0-9_][A-Za-z0-9_.:-]{0,63}){0,31}\Z",
        description="1 to 64 letters, digits, dots, colons, dashes and underscores, no dot, colon or dash first; "
        "several names with commas between them",
    ),
]
"""One partition, or several with commas between them, safe as a word of a batch script."""
MailAddress = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+@-]{0,127}\Z",
        description="an address such as me@example.org, or a user of the cluster",
    ),
]
"""To whom Slurm sends mail, safe as a word of a command."""
Nodes = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,\[\]-]{0,1023}\Z",
        description="names of nodes as Slurm writes them, such as n1,gpu[01-04], no spaces",
    ),
]
"""Names of nodes, safe as a word of a batch script."""


SbatchText = Annotated[
    str,
    Meta(
        pattern=r"^[^\x00-\x1f\x7f'\"\\]{1,1024}\Z",
        description="1 to 1024 characters without quotes, backslashes and line breaks",
    ),
]
"""The value of a further option of sbatch, safe in quotes in a batch script."""


class LauncherOptions(Node, frozen=True, kw_only=True, tag_field="name"):
    """How processes are started; never part of a run's identity. `name` in the YAML chooses the kind."""

    timeout_s: Seconds | None
    """Seconds after which a run ends with the outcome `timeout`; null: no limit."""
    collective_timeout_s: Seconds
    """The run ends when a rank waits longer than this in one collective."""
    oversubscribe: bool
    """Allow more devices than this machine has cores for. Such runs are marked and never enter timing figures."""
    checkpoint: Literal["auto", "always", "never"]
    """Save the training state between epochs, and resume from it. auto: at a graceful stop, and
    where the time left is less than 1.25 times the estimated time of the remaining epochs; never: no checkpoints."""
    checkpoint_every_s: Seconds
    """At least this long between two checkpoints."""

    @property
    def name(self) -> str:
        """The name of the YAML file it was chosen by."""
        return str(type(self).__struct_config__.tag)

    def stops_at(self, *, launched_at: float, job_ends_at: float | None) -> float | None:
        """When an attempt must have ended, as all of these Unix time, s; None: no limit."""
        return None if self.timeout_s is None else launched_at + self.timeout_s

    def fewest_nodes(self, devices: int, site: Site) -> int:
        """Nodes that so many devices need: here there is one."""
        return 1

    @property
    def packed(self) -> bool:
        """Whether warm processes run one configuration after the other: `pack`, of launchers that have it."""
        return bool(getattr(self, "pack", False))

    @property
    def in_this_process(self) -> bool:
        """Whether the calling process itself trains."""
        return False


class LocalLauncher(LauncherOptions, frozen=True, kw_only=True, tag="local"):
    """Separate processes on this machine."""

    pack: bool
    """Fork all runs from warm processes, one for each repeat: no start-up is measured."""


class InlineLauncher(LauncherOptions, frozen=True, kw_only=True, tag="inline"):
    """In the calling process, for debuggers."""

    @property
    def in_this_process(self) -> bool:
        """It does."""
        return True


class SlurmLauncher(LauncherOptions, frozen=True, kw_only=True, tag="slurm"):
    """One Slurm job per run; those of equal shape and round make up an array."""

    time_limit_min: Count | Literal["auto"]
    """Time limit of a job, in minutes. auto: from what done runs of the sweep took, and 60 where none is done; twice
    the limit that a run has reached; at most `site.max_time_min`."""
    cpus_per_gpu: Count
    """Cores requested with each GPU; on CPUs a device is `cores_per_device` cores."""
    memory_gib_per_device: Memory | None
    """Host memory requested with each device, GiB; null: the site's usual amount."""
    array_parallelism: Count
    """At most this many jobs of one array, one shape's in one round, run at a time; the next round waits for all of
    them to start."""
    signal_delay_s: Annotated[int, Meta(ge=1, le=65_535)]
    """Slurm warns a job this long before its time limit, give or take a minute; it stops after the current epoch."""
    attempts: Count
    """A submitted run is started at most this often: after a warning, a preemption, or a node's failure."""
    pack: bool
    """Run all configurations of one shape in one job, forked from warm processes: no start-up is measured."""

    @property
    def limit_min(self) -> int:
        """The time limit of a job that is asked for, in minutes: what `auto` has found."""
        assert self.time_limit_min != "auto", "a submission has the number"
        return self.time_limit_min

    def fewest_nodes(self, devices: int, site: Site) -> int:
        """Nodes that so many devices need."""
        return -(-devices // site.devices_per_node)

    def stops_at(self, *, launched_at: float, job_ends_at: float | None) -> float | None:
        """At the warning, or after `timeout_s`."""
        warned_at = self.warned_at(launched_at=launched_at, job_ends_at=job_ends_at)
        return warned_at if self.timeout_s is None else min(warned_at, launched_at + self.timeout_s)

    def warned_at(self, *, launched_at: float, job_ends_at: float | None) -> float:
        """When Slurm warns an attempt's job, give or take a minute; where its end is not known, it began just then."""
        return (job_ends_at or launched_at + 60.0 * self.limit_min) - self.signal_delay_s


AnyLauncher = LocalLauncher | InlineLauncher | SlurmLauncher


class Site(Node, frozen=True, kw_only=True):
    """The machine or cluster where runs happen; never part of a run's identity."""

    name: Name
    """The name of the YAML file it was chosen by."""
    data_dir: str
    """Folder of the prepared data sets; `~` is expanded where it is used."""
    device: Literal["cpu", "cuda"]
    """The value of `device=auto` in a Slurm job: the login node can't see the GPUs of the other nodes."""
    devices_per_node: Count
    """Most devices of one node that a job may have."""
    gpus_per_node: Annotated[int, Meta(ge=0, le=1000)]
    """GPUs of a node; 0: jobs ask for none."""
    gpus_by: Literal["gpus-per-node", "gres", "none"]
    """How jobs ask for GPUs; none: the nodes' GPUs are no resource of Slurm's, so jobs need `exclusive`."""
    memory_gib_per_device: Memory
    """Host memory that a job requests with each device by default, GiB."""
    memory_by: Literal["node", "cpu", "none"]
    """Whether jobs ask for memory by node (`--mem`) or by core (`--mem-per-cpu`), as a cluster may demand; none:
    neither."""
    gpu_type: SlurmName | None
    """Type of the GPUs as Slurm names it (`sinfo -o %G`); null: any."""
    partition: Partitions | None
    """One, or several such as gpu,low: Slurm takes the one where a job starts first. null: the cluster's default, as
    for the four below."""
    qos: SlurmName | None
    """Quality of service."""
    account: SlurmName | None
    """What the jobs are charged to."""
    wckey: SlurmName | None
    """Workload characterization key, which some clusters demand for their accounting."""
    constraint: Constraint | None
    """Node features, e.g. a100_80."""
    reservation: SlurmName | None
    """A reservation (`scontrol show reservation`), within which all jobs run; null: none."""
    nodelist: Nodes | None
    """Nodes that every job has all of, e.g. n[1-2]; null: Slurm chooses."""
    exclude: Nodes | None
    """Nodes that no job may have, e.g. n3,n7; null: none."""
    exclusive: bool
    """Whether each job has its nodes to itself. It is then charged for all of their cores and GPUs."""
    nice: Annotated[int, Meta(ge=0, le=2_147_483_645)] | None
    """How much lower the jobs' priority is than that of one's other jobs; null: as Slurm has it."""
    mail_user: MailAddress | None
    """To whom Slurm sends mail when the report of `submit --then report` is written, or has failed; null: to nobody."""
    sbatch: dict[str, SbatchText | int | bool | None] | None
    """Further options of sbatch that jobs need here, e.g. {comment: thesis}; true: one without a value. Not those that
    the suite sets."""
    max_time_min: Count | None
    """Longest job the partition allows, in minutes; null: not known here, Slurm decides."""
    max_nodes: Count | None
    """Most nodes of one job."""
    network_interface: SlurmName | None
    """Interface over which nodes talk to each other, e.g. ib0; null: the one that the host's name resolves to."""
    modules: list[Module]
    """Modules to load first in a job, e.g. cuda/12.4."""
    setup: list[str]
    """Shell lines to run before the job's program; only from the site's file, never from the command line."""
    container: Container | None
    """The container that runs train in; null: none."""
    price_per_device_hour: Rate | None
    """What an hour of one device costs, in whatever currency; `cost` of a run is in the same. null: not known."""
    grams_co2_per_kwh: Rate | None
    """CO₂ of the electricity here, g/kWh, of which a run's `co2_g` is computed; null: not known."""
    hardware: Hardware | None
    """Data sheets of devices and links, which predictions start from; null: not known."""

    @property
    def data_folder(self) -> Path:
        """`data_dir` with `~` and `$NAME` replaced."""
        return expanded(self.data_dir, "site.data_dir")


def expanded(path: str, key: str) -> Path:
    """The path that a key has, with `~` and `$NAME` replaced; configurations keep it as written.

    Raises `ConfigError` for a `$NAME` that is not set: it would become the name of a folder.
    """
    written_out = os.path.expandvars(path)
    if (left := re.search(r"\$(?:[A-Za-z_]\w*|\{\w+\})", written_out, re.ASCII)) is not None:
        raise ConfigError(f"{key}={path}: {left[0]} is not set in this environment: set it, or write the path out")
    return Path(written_out).expanduser()


def with_new_options(node: dict[str, Any]) -> dict[str, Any]:
    """A configuration that an earlier release wrote, with the options that it could not have.

    They get the values of the shipped files. All of them are no part of a run's identity: options of launcher and site,
    and `measure.probe`.
    """
    filled = dict(node)
    launcher, site = node.get("launcher"), node.get("site")
    if isinstance(launcher, dict):
        filled["launcher"] = (shipped("launcher", str(launcher.get("name"))) or {}) | launcher
    if isinstance(measure := node.get("measure"), dict):
        filled["measure"] = {"probe": (shipped("measure", "default") or {})["probe"]} | measure
    if isinstance(site, dict):
        filled["site"] = (shipped("site", "default") or {}) | site
    return filled


@cache
def shipped(group: str, name: str) -> dict[str, Any] | None:
    """The content of a file of conf/, over that of the files of its group that it inherits from; None: no such file."""
    from parallelbench.config.build import load_yaml

    path = resources.files("conf") / group / f"{name}.yaml"
    if not path.is_file():
        return None
    content: dict[str, Any] = load_yaml(path.read_bytes())
    inherited: dict[str, Any] = {}
    for each in content.pop("defaults", ()) if group else ():
        inherited = merged(inherited, (shipped(group, each) or {}) if each != "_self_" else {})
    return merged(inherited, content)


def names_of(group: str) -> list[str]:
    """The names of a group's files in conf/."""
    names = (path.name for path in (resources.files("conf") / group).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both, at every depth, as Hydra merges files; where both have a value, the one above."""
    both = below | above
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            both[key] = merged(below[key], above[key])
    return both


def prepare_line(data: str, data_dir: Path, *options: str) -> str:
    """The command that prepares a data set in this folder; it names the folder unless it is the default."""
    usual = (shipped("site", "default") or {})["data_dir"]
    folder = data_dir.expanduser()
    where = [] if folder == expanded(usual, "site.data_dir") else [shlex.quote(f"site.data_dir={folder.absolute()}")]
    return " ".join(["parallelbench prepare", f"data={data}", *options, *where])
