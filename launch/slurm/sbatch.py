"""What Slurm is asked for, and what it executes: one description of a job of any kind, as a script of sbatch's or srun.

All kinds (runs, reports, measurements) get the same resources' flags, set-up, container, and end together. Runs whose
jobs are alike make up one array.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from launch.slurm import record
from launch.slurm.record import Submission, asks_for_gpus, has_gpus
from launch.slurm.time_limit import MOST_MIN, Limit, Limits, check_time
from launch.slurm.time_limit import slurm as slurm
from parallelbench.config.plugin import plugin_of
from parallelbench.entry import ENTRY
from parallelbench.errors import ConfigError, count_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from launch.known_times import Estimate, Known
    from launch.launcher import Prepared
    from parallelbench.config.run import RunConfig
    from parallelbench.config.sites import Site, SlurmLauncher


Flags = dict[str, str | int | bool]
"""Options of sbatch and srun → their values; True: it has none."""


END_TOGETHER = {"kill-on-bad-exit": 1, "wait": 0}
"""Options of every step: a task that fails ends the others, and one that is done does not."""
STARTED_AT = "SLURM_JOB_START_TIME"
"""Variable of a job: when it started, Unix time, s; Slurm 22.05 has none."""
ENDS_AT = "SLURM_JOB_END_TIME"
"""Variable of a job: when its time limit ends it, Unix time, s."""
STOP_AT_FAILURE = (
    "set_up_depth=${#BASH_SOURCE[@]}",
    """trap 'code=$?; [ "${#BASH_SOURCE[@]}" -gt "$set_up_depth" ] || { echo "parallelbench: set-up failed with """
    """exit code $code in line $LINENO of the script"; exit "$code"; }' ERR""",
)
"""Not `set -e`: what fails inside a function or a sourced file is that file's affair, and only its end counts. Not
`|| exit` either: several lines may make up one command, such as if … fi."""


FIND_MODULE = (
    """for init in "$LMOD_PKG/init/bash" "$MODULESHOME/init/bash" /etc/profile.d/{z00_lmod,lmod,modules}.sh; do """
    """type module > /dev/null 2>&1 && break; [ -r "$init" ] && . "$init"; done""",
    """type module > /dev/null 2>&1 || { echo "parallelbench: site.modules, but no command module on $(hostname)"; """
    """exit 127; }""",
)
"""`module` is a bash function, so a job of a user with another login shell lacks it. The module system that this shell
has loaded comes first: files of /etc/profile.d may set up the login shell instead of the one that reads them."""


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
        memory, each = f"{self.memory_mib_per_node / 1024:g} GiB", " each" if self.nodes > 1 else ""
        return f"{count_of(self.nodes, 'node')} with {count_of(self.cpus_per_node, 'core')}, {memory}{gpus}{each}"


def shape_of(run: RunConfig, device_type: str) -> Shape:
    """The resources of a run's job; raises `ConfigError` for more than the site has."""
    launcher, site = slurm(run), run.site
    devices = run.devices // run.nodes
    if devices > site.devices_per_node:
        raise ConfigError(_too_many(run, devices))
    if site.max_nodes is not None and run.nodes > site.max_nodes:
        raise ConfigError(f"nodes={run.nodes}, but site={site.name} allows a job site.max_nodes={site.max_nodes}")
    check_time(run)
    if device_type == "cuda" and not site.gpus_per_node:
        raise ConfigError(f"device=cuda, but site={site.name} has gpus_per_node=0: choose device=cpu or another site")
    if device_type == "cuda" and site.gpus_by == "none" and not site.exclusive:
        raise ConfigError(
            f"site={site.name} has site.gpus_by=none, so other users' jobs could take the same GPUs: set "
            "site.exclusive=true, or let jobs ask for GPUs by gpus-per-node or gres"
        )
    gpus = devices if asks_for_gpus(site, device_type) else 0
    cpus = devices * (launcher.cpus_per_gpu if device_type == "cuda" else run.cores_per_device)
    return Shape(run.nodes, devices, gpus, cpus, memory_mib(run, devices))


def shortened(minutes: int, run: RunConfig) -> int:
    """The time limit of a job that trains no run: so many minutes, or less where the site or the launcher has less."""
    asked = slurm(run).time_limit_min
    return min(minutes, MOST_MIN if asked == "auto" else asked, run.site.max_time_min or MOST_MIN)


def memory_mib(run: RunConfig, devices: int) -> int:
    """What a node needs for so many of a run's devices."""
    return round(1024 * (slurm(run).memory_gib_per_device or run.site.memory_gib_per_device) * devices)


def charged_devices(shape: Shape, site: Site) -> int:
    """Devices that a job is charged for: all GPUs of its nodes where it has the nodes to itself, else its own."""
    return shape.nodes * site.gpus_per_node if site.exclusive and site.gpus_per_node else shape.devices


def _too_many(run: RunConfig, devices: int) -> str:
    most = run.site.devices_per_node
    nodes = next((n for n in range(run.nodes, run.devices + 1) if run.devices % n == 0 and run.devices // n <= most), 0)
    return (
        f"devices={run.devices} on nodes={run.nodes} are {devices} a node, but site={run.site.name} has "
        f"site.devices_per_node={most}: choose nodes={nodes} or fewer devices"
    )


@dataclass(frozen=True)
class Job:
    """One job of any kind: a run's, a report's, a measurement's. Of an array: each of its tasks."""

    name: str
    shape: Shape
    launcher: SlurmLauncher
    site: Site
    minutes: int
    """Its time limit."""
    program: Sequence[str]
    """A module of the suite and its arguments, which its first node executes, outside any container."""
    folder: Path
    """Where Slurm writes what it prints."""
    lines: Sequence[str] = ()
    """Shell lines of its own, after the site's."""
    after: Sequence[str] = ()
    """Jobs and arrays that have to start before."""
    goes_on: bool = False
    """Whether Slurm warns it before its time is over, and starts it again: a run goes on where it was."""

    @property
    def flags(self) -> Flags:
        """Its options; raises `ConfigError` as `site_flags` does."""
        shape, site = self.shape, self.site
        return {
            "job-name": self.name,
            "time": self.minutes,
            "nodes": shape.nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": shape.cpus_per_node,
            **self._memory,
            **site_flags(site),
            **self._gpus,
            **({"dependency": f"after:{':'.join(self.after)}"} if self.after else {}),
        }

    @property
    def gpus_asked(self) -> int:
        """GPUs that Slurm is asked for on each node; it may not allocate those that the job has."""
        return 0 if self.site.gpus_by == "none" else self.shape.gpus_per_node

    @property
    def memory_asked_mib(self) -> int:
        """Memory that Slurm is asked for on each node."""
        return 0 if self.site.memory_by == "none" else self.shape.memory_mib_per_node

    @property
    def _gpus(self) -> Flags:
        if not self.gpus_asked:
            return {}
        gpus = f"{self.site.gpu_type}:{self.gpus_asked}" if self.site.gpu_type else str(self.gpus_asked)
        return {"gres": f"gpu:{gpus}"} if self.site.gpus_by == "gres" else {"gpus-per-node": gpus}

    @property
    def _memory(self) -> Flags:
        if not self.memory_asked_mib:
            return {}
        each = -(-self.memory_asked_mib // self.shape.cpus_per_node)
        return {"mem-per-cpu": f"{each}M"} if self.site.memory_by == "cpu" else {"mem": f"{self.memory_asked_mib}M"}

    def command(self) -> str:
        """The last line of its batch script: the program takes the place of the shell, which hands no signal on."""
        return f"exec {shlex.join([sys.executable, '-u', '-m', ENTRY, *self.program])}"

    def batch(self) -> dict[str, Any]:
        """The parameters of submitit's batch script. All values are those of checked fields."""
        named = ("job-name", "time", "nodes", "ntasks-per-node", "cpus-per-task")
        flags = self.flags
        return {
            **{name.replace("-", "_"): flags.pop(name) for name in named},
            "wckey": None,  # else submitit sets one
            **({"signal_delay_s": self.launcher.signal_delay_s} if self.goes_on else {}),
            "array_parallelism": self.launcher.array_parallelism,
            "stderr_to_stdout": True,
            "setup": [*FIRST_LINES, *(self._end if self.goes_on else []), *site_lines(self.site), *self.lines],
            "use_srun": False,
            "additional_parameters": {**flags, **(self._warned if self.goes_on else {})},
        }

    def script(self, count: int = 1, *, further: Mapping[str, Any] | None = None) -> str:
        """The batch script of an array of `count` jobs; `further`: parameters of submitit's."""
        from submitit.slurm.slurm import _make_sbatch_string

        several = count if count > 1 else None
        parameters = self.batch() | dict(further or {})
        text = str(_make_sbatch_string(self.command(), self.folder, map_count=several, **parameters))
        # submitit always asks for a signal, which would end a program that doesn't expect it.
        return text if self.goes_on else re.sub(r"^#SBATCH --signal=.*\n", "", text, flags=re.MULTILINE)

    @property
    def _warned(self) -> Flags:
        """Options of a job that goes on: submitit's signal would go to its steps alone, not to the batch script."""
        return {"requeue": True, "signal": f"B:USR2@{self.launcher.signal_delay_s}"}

    @property
    def _end(self) -> list[str]:
        """Tells a run when its job ends, before set-up lines take a part of the time; Slurm 22.05 does not."""
        return [f'export {ENDS_AT}="${{{ENDS_AT}:-$(($(date +%s) + {60 * self.minutes}))}}"']


def step_command(shape: Shape, site: Site, folders: Sequence[Path], program: Sequence[str]) -> list[str]:
    """What a job executes to have a module of the suite run, with arguments, once on each node of a shape.

    In the site's container, if it has one, which then sees these folders.
    """
    flags: Flags = {
        "nodes": shape.nodes,
        "ntasks": shape.nodes,
        "ntasks-per-node": 1,
        # Since 22.05 srun doesn't take the number of cores from the job by itself.
        "cpus-per-task": shape.cpus_per_node,
        "cpu-bind": "none",
        **END_TOGETHER,
        **({"label": True} if shape.nodes > 1 else {}),
    }
    before: list[str] = []
    container = site.container
    if container is not None and in_pyxis(site):
        flags |= {"container-image": container.image, "container-mounts": ",".join(_mounts(site, folders))}
    elif container is not None:
        binds = [word for mount in _mounts(site, folders) for word in ("--bind", mount)]
        nvidia = ["--nv"] if shape.gpus_per_node else []
        before = [container.runtime, "exec", *nvidia, *binds, container.image]
    python = container.python if container is not None else sys.executable
    return ["srun", *as_words(flags), *before, python, "-u", "-m", ENTRY, *program]


def job_of_runs(submission: Submission, shape: Shape, folder: Path) -> Job:
    """The job that works through runs; `folder` is its submission's."""
    folder = folder.absolute()
    return Job(
        name=submission.name,
        shape=shape,
        launcher=submission.launcher,
        site=submission.site,
        minutes=submission.launcher.limit_min,
        program=["launch.slurm.start", str(folder)],
        folder=folder,
        after=submission.after,
        goes_on=True,
    )


FIRST_LINES = (
    "umask 077",
    # A job's working directory is the user's: a stray conf.py there must not shadow ours.
    "export PYTHONSAFEPATH=1",
)
"""Shell lines with which every job begins."""


def site_lines(site: Site) -> list[str]:
    """The site's shell lines; one that fails ends the job."""
    own = [*(f"module load {module}" for module in site.modules), *site.setup]
    found = FIND_MODULE if site.modules else ()
    return [*found, *STOP_AT_FAILURE, *own, "trap - ERR"] if own else []


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
    **dict.fromkeys(("kill-on-bad-exit", "unbuffered", "quit-on-interrupt", "immediate"), _NOT_HERE),
}
"""Options of sbatch and srun that the suite sets, or that would change how it knows its jobs → what to do instead."""


def site_flags(site: Site) -> Flags:
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


def in_pyxis(site: Site) -> bool:
    """Whether srun puts jobs into a container, by its plugin Pyxis."""
    return site.container is not None and site.container.runtime == "pyxis"


def needed_folders(site: Site, results: Path, plugin: Sequence[str]) -> list[Path]:
    """What a job reads and writes: its sweep's folder, or that of the results; the data; a user's package."""
    data = site.data_folder.absolute()
    return [results.absolute(), *([data] if data.is_dir() else []), *map(Path, plugin[1:])]


def check_container(run: RunConfig) -> None:
    """Refuse folders that the container could not be given."""
    site = run.site
    if site.container is None:
        return
    for folder in needed_folders(site, run.sweep_folder, []):
        if odd := next((character for character in str(folder) if character in ",:"), None):
            raise ConfigError(f"{folder} has {odd!r}, which no folder of a container may have: choose another")
    if in_pyxis(site) and site.data_dir.startswith("~"):
        raise ConfigError(
            f"site.data_dir={site.data_dir} with a container of Pyxis, where the home folder may be another: write "
            f"the path out, e.g. {os.path.expanduser(site.data_dir)}"
        )


def _mounts(site: Site, folders: Sequence[Path]) -> list[str]:
    assert site.container is not None
    return list(dict.fromkeys([*(f"{folder}:{folder}" for folder in folders), *site.container.mounts]))


@dataclass(frozen=True)
class Hours:
    """A sum over devices."""

    gpu: float = 0.0
    """Of GPUs that the jobs request from Slurm, or that are in nodes which they have to themselves."""
    cpu: float = 0.0
    """Of devices that are cores, in other jobs."""

    @classmethod
    def of(cls, seconds: float, *, devices: int, gpus: bool) -> Hours:
        """The hours of `devices` devices for `seconds`."""
        hours = devices * seconds / 3600
        return cls(gpu=hours) if gpus else cls(cpu=hours)

    def __add__(self, other: Hours) -> Hours:
        return Hours(self.gpu + other.gpu, self.cpu + other.cpu)

    def __bool__(self) -> bool:
        return bool(self.gpu or self.cpu)

    def __str__(self) -> str:
        parts = [f"{self.gpu:.2f} GPU-hours"] if self.gpu or not self.cpu else []
        return " and ".join([*parts, *([f"{self.cpu:.2f} CPU device-hours"] if self.cpu else [])])


@dataclass(frozen=True)
class HoursExpected:
    """Device-hours by what done runs took."""

    middle: Hours
    low: Hours
    high: Hours

    @classmethod
    def of(cls, time_s: Estimate, *, devices: int, gpus: bool) -> HoursExpected:
        """Those of `devices` devices."""
        each = (time_s.middle, time_s.low, time_s.high)
        return cls(*(Hours.of(seconds, devices=devices, gpus=gpus) for seconds in each))

    def __add__(self, other: HoursExpected) -> HoursExpected:
        return HoursExpected(self.middle + other.middle, self.low + other.low, self.high + other.high)

    def __str__(self) -> str:
        if self.middle.gpu and self.middle.cpu:
            return f"{self.middle} ({self.low} to {self.high})"
        low, high = (each.gpu or each.cpu for each in (self.low, self.high))
        return f"{self.middle} ({low:.2f}–{high:.2f})"


def most_seconds(launcher: SlurmLauncher) -> float:
    """Most time that a job may take, s: the time limit times the allowed starts."""
    return 60.0 * launcher.limit_min * launcher.attempts


@dataclass(frozen=True)
class JobGroup:
    """Runs of one shape, in the order of the plan."""

    shape: Shape
    device_type: str
    runs: list[Prepared]
    submit: str
    """Identifies the command that submits them."""
    limit: Limit
    """Of each of their jobs."""

    @property
    def launcher(self) -> SlurmLauncher:
        """Theirs, with the time limit as a number."""
        return msgspec.structs.replace(slurm(self.runs[0].planned.run), time_limit_min=self.limit.minutes)

    def tasks(self) -> list[list[str]]:
        """Which runs each task of the array works through."""
        names = [item.folder.path.name for item in self.runs]
        return [names] if self.runs[0].planned.run.launcher.packed else [[name] for name in names]

    @property
    def most_hours(self) -> Hours:
        """Device-hours if every job is started as often as allowed, and uses its time limit each time."""
        most_s = len(self.tasks()) * most_seconds(self.launcher)
        return Hours.of(most_s, devices=self._charged, gpus=self._has_gpus)

    def takes(self, item: Prepared) -> bool:
        """Whether a run's job has this shape."""
        return shape_of(item.planned.run, item.planned.run.device) == self.shape

    def expected_hours(self, known: Known) -> HoursExpected | None:
        """Device-hours by what done runs of the sweep took; None: none is done."""
        time_s = known.together(self.runs)
        return None if time_s is None else HoursExpected.of(time_s, devices=self._charged, gpus=self._has_gpus)

    @property
    def _has_gpus(self) -> bool:
        return has_gpus(self.runs[0].planned.run.site, self.device_type)

    @property
    def _charged(self) -> int:
        return charged_devices(self.shape, self.runs[0].planned.run.site)

    def most_in_words(self) -> str:
        """ "3.00 GPU-hours (1 job × 1 GPU × 60 min × 3 attempts)"."""
        launcher, device = self.launcher, "GPU" if self._has_gpus else "device"
        factors = (
            *(count_of(len(self.tasks()), "job"), count_of(self._charged, device)),
            *(f"{launcher.limit_min} min", count_of(launcher.attempts, "attempt")),
        )
        return f"{self.most_hours} ({' × '.join(factors)})"

    def submission(self, tasks: list[list[str]], token: str) -> Submission:
        """The record of some of its tasks, before Slurm is asked for their jobs."""
        run = self.runs[0].planned.run
        return Submission(
            token=token,
            created_at=time.time(),
            job=None,
            tasks=tasks,
            devices=charged_devices(self.shape, run.site),
            device_type=self.device_type,
            launcher=self.launcher,
            auto=slurm(run).time_limit_min == "auto",
            is_most=self.limit.is_most,
            site=run.site,
            plugin=plugin_of(run),
            umask=record.readable_by_others(),
            submit=self.submit,
        )

    @property
    def job(self) -> Job:
        """One of its jobs, as it is before there is a record of it."""
        folder = record.folder_of(self.runs[0].planned.run.sweep_folder, "TOKEN")
        return job_of_runs(self.submission([], "TOKEN"), self.shape, folder)


def job_groups(prepared: Sequence[Prepared], limits: Limits = Limits()) -> list[JobGroup]:  # noqa: B008 - frozen
    """Group runs by all that their jobs share: resources, launcher, site, and a user's package."""
    groups: dict[tuple[Any, ...], list[Prepared]] = {}
    submit = record.new_token()
    for item in prepared:
        run = item.planned.run
        shape = shape_of(run, run.device)
        key = (shape, run.device, msgspec.json.encode([run.launcher, run.site, plugin_of(run)]))
        groups.setdefault(key, []).append(item)
    return [JobGroup(shape, device, runs, submit, limits.of(runs)) for (shape, device, _), runs in groups.items()]
