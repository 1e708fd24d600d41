"""What the cluster says to a job before it is submitted: Slurm's own answer, and what it would take and never start.

`sbatch --test-only` says what Slurm refuses, and when it would start the rest; where it says neither, sbatch decides at
submission. It accepts jobs that wait for ever, so partitions, what accounting never starts, and the length of
reservations are looked up besides.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from launch.slurm import scheduler
from launch.slurm.limits import allowed
from launch.slurm.scheduler import NoJob, SchedulerError, SubmissionError, minutes, unix_time
from parallelbench.errors import ConfigError, count_of, duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from launch.slurm.limits import Allowed
    from launch.slurm.sbatch import Job
    from parallelbench.config.sites import Site


@dataclass(frozen=True)
class Answer:
    """What the cluster says to a job."""

    refusals: list[str] = field(default_factory=list)
    """Why it is refused, or would wait for ever; empty: it runs some day."""
    notes: list[str] = field(default_factory=list)
    """What it waits for, and where it never runs."""
    wait_s: float | None = None
    """How long it would wait if it were submitted now, as Slurm expects, s; None: Slurm doesn't say."""
    untold: str = ""
    """Why Slurm did not say whether it takes it; empty: it did."""

    @property
    def start(self) -> str:
        """When it would start, in words; empty: unknown."""
        if self.wait_s is None or self.refusals:
            return ""
        whole_s = 60 * round(self.wait_s / 60)
        return f"would start in about {duration(whole_s).removesuffix(' 0 s')}" if whole_s else "would start at once"


@dataclass(frozen=True)
class Cluster:
    """What a cluster offers and allows."""

    kinds: list[Partition] | None = None
    """None: it can't be asked."""
    longest: int | None = None
    """Most tasks of an array; None: unknown."""
    allowed: Allowed | None = None
    """None: accounting limits nothing, or can't be asked."""
    reservations: Sequence[Mapping[str, str]] = ()
    """Those that this user may see, as Slurm shows them."""
    unknown: str = ""
    """What is unknown, and why; empty: everything is known."""

    def answers(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        """Ask for each of several jobs; once Slurm did not say, it isn't asked about the others."""
        untold = ""
        for job in jobs:
            answer = self.answer(job, untold=untold)
            yield answer
            untold = answer.untold

    def answer(self, job: Job, *, untold: str = "") -> Answer:
        """Ask for one job; `untold`: why Slurm isn't to be asked."""
        if self.kinds is None:
            return Answer()
        refusals, notes = self._never(job)
        for shown in [each for each in self.reservations if each["ReservationName"] == job.site.reservation]:
            never, noted = in_reservation(shown, job.minutes)
            refusals, notes = [*refusals, *never], [*notes, *noted]
        wait_s = None
        try:
            starts_at = scheduler.estimated_start(job.script()) if not untold else None
            wait_s = max(0.0, starts_at - time.time()) if starts_at is not None else None
        except SchedulerError as error:
            if isinstance(error, SubmissionError) and error.refused:
                waits = self._waits(job, error)
                notes += [waits] if waits else []
                refusals = refusals if waits else [self._refusal(job, error), *refusals]
            else:
                untold = str(error)
        notes += [f"Slurm did not say whether it takes such jobs: {untold}"] if untold else []
        return Answer(refusals, notes, wait_s, untold)

    def never(self, job: Job) -> list[str]:
        """Why no partition would ever start a job that Slurm takes; empty: one would, or nobody knows."""
        return self._never(job)[0] if self.kinds else []

    def _never(self, job: Job) -> tuple[list[str], list[str]]:
        """Why none of its partitions would ever start a job, and why some would not, or not now."""
        found = {name: list(self._in_one(job, name)) for name in self._partitions(job.site)}
        if all(found.values()):
            return list(dict.fromkeys(text for texts in found.values() for text in texts)), []
        notes = [f"the jobs never run in {name}: {'; '.join(texts)}" for name, texts in found.items() if texts]
        down = [name for name in found if any(kind.state == "down" for kind in self._named(name))]
        elsewhere = ", or run elsewhere" if len(down) < len(found) else ""
        return [], [*notes, *(f"the partition {name} is down: jobs wait until it is up{elsewhere}" for name in down)]

    def _in_one(self, job: Job, name: str) -> Iterator[str]:
        """Why one partition would never start a job that Slurm takes."""
        kinds = self._named(name)
        most = max((kind.limit_min for kind in kinds if kind.limit_min is not None), default=None)
        if most is not None and job.minutes > most:
            yield f"launcher.time_limit_min={job.minutes}, but {name} allows {most}"
        accounts = self.allowed.accounts_of(job.site) if self.allowed else [*filter(None, [job.site.account])]
        qos = self.allowed.qos_of(job.site, name) if self.allowed else job.site.qos or ""
        for rules in [kind.rules for kind in kinds][:1]:
            yield from not_admitted(rules, job, accounts=accounts, qos=qos)
        if self.allowed is not None:
            yield from self.allowed.refusals(job, name)

    def most_min(self, site: Site) -> int | None:
        """Longest job, in minutes, that any of a site's partitions starts; None: there is no such limit, or nobody
        knows.
        """
        most = [kind.limit_min for name in self._partitions(site) for kind in self._named(name)]
        known = [each for each in most if each is not None]
        return max(known) if known and len(known) == len(most) else None

    def _partitions(self, site: Site) -> list[str]:
        if site.partition:
            return site.partition.split(",")
        return list(dict.fromkeys(kind.name for kind in self.kinds or () if kind.default)) or [""]

    def _named(self, name: str) -> list[Partition]:
        return [kind for kind in self.kinds or () if kind.name == name]

    def _waits(self, job: Job, error: SubmissionError) -> str:
        """What a job waits for that sbatch takes, although Slurm can't say when it starts; empty: it is refused."""
        if error.why is NoJob.LIMIT:
            return str(error)
        if error.why is NoJob.BUSY:
            return f"{error}: jobs wait"
        if error.why is not NoJob.NO_NODES:
            return ""
        suiting = [kind for name in self._partitions(job.site) for kind in self._named(name) if suits(kind, job)]
        nodes, out = (sum(getattr(kind, key) for kind in suiting) for key in ("nodes", "out"))
        if nodes < job.shape.nodes:
            return ""
        if not out and not job.site.reservation:
            up = f"by cores, memory and GPUs {count_of(nodes, 'node')} suit, and none is down or drained"
            return f"Slurm has no nodes for it now ({up}): jobs wait if others reserved them, else sbatch may refuse it"
        down = f"{out} of {count_of(nodes, 'node')} that suit are down or drained"
        return f"Slurm has no nodes for it now ({down}): jobs wait until it has"

    def _refusal(self, job: Job, error: SubmissionError) -> str:
        """Slurm's own words; where it has no such nodes, beside those that it has."""
        if error.why is not NoJob.NO_NODES:
            return str(error)
        named = {name: self._named(name) for name in self._partitions(job.site)}
        offered = "; ".join(f"{name} has {' and '.join(map(str, kinds))}" for name, kinds in named.items())
        gpu, of_all = job.site.gpu_type, ",".join(each.gres for kinds in named.values() for each in kinds)
        if gpu and job.gpus_asked and gpus_in(of_all, None) and not gpus_in(of_all, gpu):
            return f"site.gpu_type={gpu}, but {offered}: set site.gpu_type to one of these, or to null for any"
        return f"{error} ({job.shape}, but {offered})"


def cluster_of(*, patient: bool = False) -> Cluster:
    """Ask the cluster what it offers; raises `SchedulerError` where the controller gives no answer."""
    kinds = partitions(patient=patient)
    longest = scheduler.max_array_size(scheduler.configuration(patient=patient))
    cluster = Cluster(kinds, longest, reservations=reservations(patient=patient))
    if not kinds:
        return replace(cluster, unknown="sinfo lists no partition, so the cluster's limits were not checked")
    try:
        own_qos = {kind.name: qos for kind in kinds if (qos := kind.rules.get("QoS", "N/A")) != "N/A"}
        return replace(cluster, allowed=allowed(own_qos))
    except SchedulerError as error:
        return replace(cluster, unknown=f"the limits of your account could not be checked: {error}")


def known_cluster() -> Cluster:
    """What is known of the cluster; where nothing is, `unknown` says why."""
    if not scheduler.available():
        return Cluster(unknown="there is no Slurm here, so its limits were not checked: plan again on the login node")
    try:
        return cluster_of()
    except SchedulerError as error:
        return Cluster(unknown=f"the cluster's limits could not be checked: {error}")


def require_accepted(jobs: Sequence[Job]) -> list[str]:
    """The notes on jobs, one of each kind: what they wait for, and what is unknown.

    Raises `ConfigError` for jobs that never run here, and `SchedulerError` where the cluster can't be reached.
    """
    if not jobs:
        return []
    cluster = cluster_of(patient=True)
    answers = list(cluster.answers(jobs))
    if texts := list(dict.fromkeys(text for answer in answers for text in answer.refusals)):
        raise ConfigError(f"refused by the cluster, nothing was submitted: {'; '.join(texts)}")
    notes = [*(note for answer in answers for note in answer.notes), cluster.unknown, ignored_variables()]
    return list(dict.fromkeys(filter(None, notes)))


def ignored_variables() -> str:
    """A note on the variables by which sbatch would choose an account, a partition or a cluster; empty: none is set.

    A sweep is submitted in several sessions, and all of its jobs have to go to the same place: so the site decides.
    """
    names = sorted(
        name for name, value in os.environ.items() if value and name.startswith(("SBATCH_", "SLURM_CLUSTERS"))
    )
    if not names:
        return ""
    have = "has" if len(names) == 1 else "have"
    return f"{', '.join(names)} of the environment {have} no effect: set site.account, site.partition and the like"


_RECURRING = {"HOURLY", "DAILY", "WEEKDAY", "WEEKEND", "WEEKLY"}
"""Flags of reservations that come again."""


@dataclass(frozen=True)
class Partition:
    """What a partition offers, as `sinfo` says."""

    name: str
    default: bool
    state: str
    """`up`; `down`: jobs wait until it is up; `drain` and `inact`: it takes none."""
    limit_min: int | None
    """Longest job, minutes; None: no limit."""
    nodes: int
    cpus_per_node: int
    memory_mib: int
    gres: str
    features: str
    out: int = 0
    """How many of its nodes are down, drained, or about to be."""
    rules: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What `scontrol show partition` says of it, e.g. `MaxNodes`, `AllowAccounts`."""

    def __str__(self) -> str:
        out = f" ({self.out} down or drained)" if self.out else ""
        cores, memory = count_of(self.cpus_per_node, "core"), f"{self.memory_mib / 1024:.0f} GiB"
        return f"{count_of(self.nodes, 'node')}{out} with {cores}, {memory}, {self.gres or 'no GPUs'}"


def partitions(*, patient: bool = False) -> list[Partition]:
    """All partitions; where their nodes differ, one entry for each kind."""
    text = scheduler.ask(["sinfo", "--noheader", "--format=%R|%P|%a|%l|%D|%c|%m|%G|%f|%F|%T"], patient=patient)
    kinds: dict[Partition, Partition] = {}
    for each in (_partition(line) for line in text.splitlines() if line.strip()):
        kind = replace(each, nodes=0, out=0)  # which has a line for each state of its nodes
        before = kinds.get(kind, kind)
        kinds[kind] = replace(kind, nodes=before.nodes + each.nodes, out=before.out + each.out)
    shown = {each["PartitionName"]: each for each in _shown("partition", "PartitionName", patient=patient)}
    return [replace(kind, rules=shown.get(kind.name, {})) for kind in kinds.values()]


def _partition(line: str) -> Partition:
    name, marked, state, limit, nodes, cpus, memory, gres, features, usage, of_nodes = line.strip().split("|")
    out = int(usage.split("/")[2])  # allocated/idle/other/total, where a node that drains is allocated
    return Partition(
        name=name,
        default=marked.endswith("*"),
        state=state,
        limit_min=minutes(limit),
        nodes=int(nodes),
        cpus_per_node=int(cpus.rstrip("+")),
        memory_mib=int(memory.rstrip("+")),
        gres="" if gres == "(null)" else gres,
        features="" if features == "(null)" else features,
        out=int(nodes) if of_nodes.startswith(("drain", "fail")) else out,
    )


def reservations(*, patient: bool = False) -> list[dict[str, str]]:
    """All that this user may see, as `scontrol` shows them."""
    return _shown("reservation", "ReservationName", patient=patient)


def _shown(what: str, name: str, *, patient: bool) -> list[dict[str, str]]:
    """All things of a kind, as `scontrol` shows them; `name`: the key of their names."""
    text = scheduler.ask(["scontrol", "--oneliner", "show", what], patient=patient)
    found = (dict(pair.partition("=")[::2] for pair in line.split()) for line in text.splitlines())
    return [each for each in found if name in each]


def in_reservation(shown: Mapping[str, str], limit_min: int) -> tuple[list[str], list[str]]:
    """Why a job of so many minutes never starts in a reservation, or is ended in it; what it waits for, or risks."""
    name, flags = shown["ReservationName"], set(shown.get("Flags", "").split(","))
    active, ends = shown.get("State") == "ACTIVE", shown.get("EndTime", "")
    began = shown.get("StartTime", "")
    notes = [] if active else [f"the reservation {name} is not active: jobs wait for it (begins {began})"]
    lasts_min = minutes(shown.get("Duration", "infinite"))
    if lasts_min is None or "FLEX" in flags:  # jobs may outlast a flexible one
        return [], notes
    if limit_min > lasts_min:
        return [f"launcher.time_limit_min={limit_min}, but the reservation {name} lasts {lasts_min}"], notes
    end_s = unix_time(ends) if active else None
    left_min = lasts_min if end_s is None else max(0, int((end_s - time.time()) // 60))
    if limit_min <= left_min:
        return [], notes
    left = f"{left_min} min are left of the reservation {name} (ends {ends})"
    text = f"launcher.time_limit_min={limit_min}, but {left}, and Slurm ends what runs then"
    if flags & _RECURRING:
        return [], [text]
    lower = f"lower it to {left_min} or less" if left_min else "name another, or none"
    return [f"{text}: {lower}"], []


def not_admitted(rules: Mapping[str, str], job: Job, *, accounts: Sequence[str], qos: str) -> Iterator[str]:
    """Why a partition never starts a job, which sbatch takes all the same unless `EnforcePartLimits` is set.

    `accounts`: the job's, then those above it; [] and an empty `qos`: unknown.
    """
    name = rules.get("PartitionName", "")
    most, least, cores = (
        int(text) if (text := rules.get(key, "")).isdecimal() else None
        for key in ("MaxNodes", "MinNodes", "MaxCPUsPerNode")
    )
    if most is not None and job.shape.nodes > most:
        yield f"nodes={job.shape.nodes}, but {name} allows a job MaxNodes={most}"
    if least is not None and job.shape.nodes < least:
        yield f"nodes={job.shape.nodes}, but {name} demands MinNodes={least}"
    if cores is not None and job.shape.cpus_per_node > cores:
        yield f"{count_of(job.shape.cpus_per_node, 'core')} a node, but {name} allows a job MaxCPUsPerNode={cores}"
    # Newer releases let in accounts below those that are named.
    for key, own, above in (("account", accounts[:1], accounts[1:]), ("qos", [qos] if qos else [], [])):
        word = key.capitalize() + "s" * (key == "account")
        admitted, denied = (rules.get(f"{what}{word}", "ALL").lower().split(",") for what in ("Allow", "Deny"))
        if own and admitted != ["all"] and not {each.lower() for each in (*own, *above)} & {*admitted}:
            yield f"{name} admits Allow{word}={','.join(admitted)}, and the jobs' is {own[0]}: set site.{key}"
        elif own and own[0].lower() in denied:
            yield f"{name} refuses Deny{word}={','.join(denied)}, and the jobs' is {own[0]}: set site.{key}"


def suits(kind: Partition, job: Job) -> bool:
    """Whether such nodes have what a job asks of each of its nodes."""
    cores = job.shape.cpus_per_node <= kind.cpus_per_node and job.memory_asked_mib <= kind.memory_mib
    return cores and job.gpus_asked <= gpus_in(kind.gres, job.site.gpu_type)


def gpus_in(gres: str, kind: str | None) -> int:
    """GPUs in a `Gres` such as `gpu:a100:4(S:0-1),gpu:v100:2`, of one type or all."""
    entries = re.findall(r"gpu(?::([A-Za-z0-9_.-]*[A-Za-z][A-Za-z0-9_.-]*))?:(\d+)", gres)
    return sum(int(count) for type_, count in entries if kind is None or type_ == kind)


def findings() -> Iterator[tuple[str, str]]:
    """(what, finding) pairs about the cluster, for `doctor`."""
    try:
        kinds = partitions()
        settings = scheduler.configuration()
    except SchedulerError as error:
        yield "Slurm", f"sbatch is here, but gives no answer: {error}"
        return
    yield "Slurm", f"{settings.get('SLURM_VERSION', 'of unknown version')}, cluster {settings.get('ClusterName', '?')}"
    for kind in kinds:
        limit = f"{kind.limit_min} min" if kind.limit_min is not None else "no time limit"
        mark = " (default)" if kind.default else ""
        state = "" if kind.state == "up" else f", {kind.state.upper()}"
        features = f", features {kind.features}" if kind.features else ""
        yield f"partition {kind.name}{mark}", f"{kind}, {limit}{state}{features}"
    kept = (
        "how jobs ended is known" if scheduler.accounting() else "a job that leaves no outcome is judged by its folder"
    )
    yield "accounting", kept
    try:
        yield from limits.findings() if (limits := allowed()) else ()
    except SchedulerError as error:
        yield "accounts", f"your limits could not be checked: {error}"
    yield "arrays", f"up to {settings.get('MaxArraySize', '?')} tasks; longer sweeps take several arrays"
