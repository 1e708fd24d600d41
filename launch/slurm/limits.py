"""What jobs of a user may take: accounts, QOSs and their limits, as `sacctmgr` shows them, and `--max-gpu-hours`."""

from __future__ import annotations

import os
import pwd
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from launch.slurm import scheduler
from launch.slurm.scheduler import SchedulerError, minutes
from parallelbench.errors import ConfigError, count_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from launch.slurm.sbatch import Job, JobGroup
    from parallelbench.config.sites import Site

_ASSOCIATION = ("Cluster", "DefaultAccount", "Account", "Partition", "QOS", "DefaultQOS")
_OF_BOTH = ("MaxWall", "MaxTRES", "GrpTRES")
_OF_ACCOUNTS = (*_OF_BOTH, "MaxJobs", "MaxSubmitJobs", "MaxTRESMins", "GrpTRESMins")
_OF_QOS = (*_OF_BOTH, "MaxJobsPU", "MaxSubmitPU", "MaxTRESPU", "MaxTRESMins", "GrpTRESMins")
_OF_GROUPS = ("GrpTRES", "GrpTRESMins")
_OF_PARENTS = ("Cluster", "Account", "ParentName", "User", *_OF_GROUPS)
"""An account's limits on its group are the only ones that its associations don't show."""
_COUNTS = {"MaxJobs": "MaxJobs", "MaxJobsPU": "MaxJobs", "MaxSubmitJobs": "MaxSubmit", "MaxSubmitPU": "MaxSubmit"}
_MIB = {"M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}
_UNITS = {"cpu": "cores", "mem": "MiB", "node": "nodes", "gres/gpu": "GPUs"}


@dataclass(frozen=True)
class Limit:
    """A limit and its source."""

    value: int
    source: str
    """`QOS short` or `account lab`."""


Limits = dict[str, Limit]
"""`MaxWall` (minutes), `MaxJobs`, `MaxSubmit`, or `MaxTRES cpu`, `MaxTRESPU gres/gpu`, … (memory in MiB)."""


@dataclass(frozen=True)
class Association:
    """One account that the user may charge, on one partition or all."""

    account: str
    default: bool
    partition: str
    """Empty: all."""
    qos: tuple[str, ...]
    default_qos: str
    limits: Limits


@dataclass(frozen=True)
class Allowed:
    """What accounting allows this user."""

    associations: Sequence[Association]
    qos: Mapping[str, Limits]
    default_partition: str = ""
    partition_qos: Mapping[str, str] = field(default_factory=dict)
    """Partition → its own QOS, whose limits come before those of a job's."""
    parents: Mapping[str, str] = field(default_factory=dict)
    """Account → the one above it."""
    queued: int = 0
    """This user's jobs in the queue."""
    over: frozenset[str] = frozenset()
    """The QOSs whose limits come before those of a partition's own."""
    safe: bool = False
    """Whether Slurm starts only jobs that a group's minutes (`GrpTRESMins`) let run to their end; else it kills them.

    A job's own minutes (`MaxTRESMins`) hold it either way (acct_policy.c).
    """

    def refusals(self, job: Job, partition: str) -> Iterator[str]:
        """Why Slurm would take a job for a partition, and let it wait for ever."""
        limits = self._limits(job.site, partition)
        if (most := limits.get("MaxWall")) and job.minutes > most.value:
            yield f"launcher.time_limit_min={job.minutes}, but the {most.source} allows {most.value}"
        for name, wanted in _tres(job).items():
            for key in (f"MaxTRES {name}", f"MaxTRESPU {name}", f"GrpTRES {name}"):
                if (most := limits.get(key)) and wanted > most.value:
                    yield f"{wanted} {_unit(name)} a job, but the {most.source} allows {most.value}: ask for fewer"
                    break
            yield from self._minutes(limits, name, wanted, job.minutes)

    def _minutes(self, limits: Limits, name: str, wanted: int, wall_min: int) -> Iterator[str]:
        for key, whose in (("MaxTRESMins", "a job"), *([("GrpTRESMins", "in all")] if self.safe else [])):
            if (most := limits.get(f"{key} {name}")) and wanted * wall_min > most.value:
                yield (
                    f"{wanted} {_unit(name)} for {wall_min} min, but the {most.source} allows {most.value} "
                    f"{_unit(name)} × min {whose}: lower launcher.time_limit_min, or ask for fewer"
                )

    def warnings(self, batches: Sequence[tuple[Job, int]]) -> Iterator[str]:
        """Why jobs, so many of each kind, can't be queued yet, or wait in the queue, although all run in the end."""
        jobs = Counter[tuple[str, Limit]]()
        for job, count in batches:
            limits = self._limits(job.site, (job.site.partition or self.default_partition).partition(",")[0])
            jobs.update({(key, limits[key]): count for key in ("MaxSubmit", "MaxJobs") if key in limits})
            at_once = min(_at_once(job, limits), key=lambda limit: limit.value, default=None)
            if at_once is not None and at_once.value < count:
                yield f"the {at_once.source} lets {at_once.value} of these {count} jobs run at once ({job.shape})"
        for (key, limit), count in jobs.items():
            if key == "MaxJobs" and count > limit.value:
                yield f"the {limit.source} lets {limit.value} of these {count} jobs run at once"
            if key == "MaxSubmit" and count + self.queued > limit.value:
                there = f" and {self.queued} are queued already" if self.queued else ""
                yield (
                    f"the {limit.source} allows {count_of(limit.value, 'job')} in the queue, these are {count}{there}: "
                    "submit the rest later"
                )

    def findings(self) -> Iterator[tuple[str, str]]:
        """(what, finding) pairs, for `doctor`."""
        for each in self.associations:
            where = f" on {each.partition}" if each.partition else ""
            qos = ", ".join(f"{name} (default)" if name == each.default_qos else name for name in each.qos)
            yield (
                f"account {each.account}{where}{' (default)' * each.default}",
                "; ".join([f"QOS {qos or 'none'}", *map(_shown, each.limits.items())]),
            )
        for name in sorted({name for each in self.associations for name in each.qos} & self.qos.keys()):
            yield f"QOS {name}", "; ".join(map(_shown, self.qos[name].items())) or "no limits of its own"

    def accounts_of(self, site: Site) -> list[str]:
        """The account that a site's jobs are charged to, then those above it; [] where none is known."""
        account = site.account or next((each.account for each in self.associations if each.default), "")
        found: list[str] = []
        while account and account not in found:
            found.append(account)
            account = self.parents.get(account, "")
        return found

    def qos_of(self, site: Site, partition: str) -> str:
        """The QOS of a site's jobs on a partition, as Slurm chooses it; empty where Slurm refuses the account."""
        association = self._association(site, partition)
        if association is None:
            return ""
        # The association's default, its only one, the cluster's.
        only = association.qos[0] if len(association.qos) == 1 else "normal"
        return site.qos or association.default_qos or only

    def _association(self, site: Site, partition: str) -> Association | None:
        account = next(iter(self.accounts_of(site)), None)
        by_partition = {each.partition: each for each in self.associations if each.account == account}
        return by_partition.get(partition, by_partition.get(""))

    def _limits(self, site: Site, partition: str) -> Limits:
        """Limit by limit, a QOS overrides the account, and the partition's own QOS overrides both (Slurm's
        resource_limits page, on their hierarchy); a QOS with the flag OverPartQOS overrides that.
        """
        association = self._association(site, partition)
        if association is None:
            return {}  # Slurm refuses the job
        name = self.qos_of(site, partition)
        of_job, of_partition = self.qos.get(name, {}), self.qos.get(self.partition_qos.get(partition, ""), {})
        return association.limits | (of_partition | of_job if name in self.over else of_job | of_partition)


def allowed(default_partition: str = "", partition_qos: Mapping[str, str] | None = None) -> Allowed | None:
    """The limits of accounting; None where it limits nothing. Raises `SchedulerError` where it gives no answer."""
    settings = scheduler.configuration()
    enforced = set(settings.get("AccountingStorageEnforce", "none").split(","))
    if not enforced & {"associations", "limits", "qos", "safe", "wckeys", "all"}:
        return None
    user, cluster = _user(), settings.get("ClusterName", "")
    columns = (*_ASSOCIATION, *_OF_ACCOUNTS)
    own = [row for row in _show("user", columns, "where", f"name={user}", "withassoc") if row["Cluster"] == cluster]
    associations = [_association(row) for row in own]
    rows = [row for row in _show("assoc", _OF_PARENTS) if row["Cluster"] == cluster and not row["User"]]
    parents = {row["Account"]: row["ParentName"] for row in rows if row["ParentName"] != row["Account"]}
    qos: dict[str, Limits] = {}
    over: frozenset[str] = frozenset()
    if not enforced & {"limits", "safe", "all"}:
        associations = [replace(each, limits={}) for each in associations]
    else:
        groups = _groups(rows, parents)
        associations = [replace(a, limits=_tightest(a.limits, groups.get(a.account, {}))) for a in associations]
        shown = _show("qos", ("Name", "Flags", *_OF_QOS))
        qos = {row["Name"]: _limits(row, f"QOS {row['Name']}", _OF_QOS) for row in shown}
        over = frozenset(row["Name"] for row in shown if "OverPartQOS" in row["Flags"])
    return Allowed(
        associations,
        qos,
        default_partition,
        partition_qos or {},
        parents,
        queued=len(scheduler.queue()),
        over=over,
        safe=bool(enforced & {"safe", "all"}),
    )


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise SchedulerError(f"the user id {os.getuid()} has no name on this machine") from None


def _groups(rows: Sequence[Mapping[str, str]], parents: Mapping[str, str]) -> dict[str, Limits]:
    """Account → the limits on its group, and on those of the accounts above it, the tightest of each."""
    own = {row["Account"]: _limits(row, f"account {row['Account']}", _OF_GROUPS) for row in rows}

    def whole(account: str) -> Limits:
        above = parents.get(account, "")
        return _tightest(own.get(account, {}), whole(above) if above else {})

    return {account: whole(account) for account in own}


def _tightest(one: Limits, other: Limits) -> Limits:
    both = {key: min(one[key], other[key], key=lambda limit: limit.value) for key in one.keys() & other.keys()}
    return one | other | both


def _show(what: str, columns: Sequence[str], *conditions: str) -> list[dict[str, str]]:
    command = ["sacctmgr", "--noheader", "--parsable2", "show", what, *conditions, f"format={','.join(columns)}"]
    rows = (line.split("|") for line in scheduler.ask(command).splitlines())
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]


def _association(row: Mapping[str, str]) -> Association:
    return Association(
        account=row["Account"],
        default=row["Account"] == row["DefaultAccount"],
        partition=row["Partition"],
        qos=tuple(filter(None, row["QOS"].split(","))),
        default_qos=row["DefaultQOS"],
        limits=_limits(row, f"account {row['Account']}", _OF_ACCOUNTS),
    )


def _limits(row: Mapping[str, str], source: str, columns: Sequence[str]) -> Limits:
    """The limits that are set."""
    limits: Limits = {}
    for column in columns:
        text = row[column]
        if "TRES" in column:
            pairs = (part.split("=", 1) for part in text.split(",") if "=" in part)
            limits |= {f"{column} {name}": Limit(_amount(value), source) for name, value in pairs}
        elif column == "MaxWall":
            limits |= {column: Limit(most, source)} if text and (most := minutes(text)) is not None else {}
        elif text:
            limits[_COUNTS[column]] = Limit(int(text), source)
    return limits


def _amount(text: str) -> int:
    """A count, or MiB of a memory such as 100G."""
    unit = text[-1]
    return round(float(text[:-1]) * _MIB[unit]) if unit in _MIB else int(text)


def _tres(job: Job) -> dict[str, int]:
    """The resources that a job requests, by Slurm's names."""
    shape, kind = job.shape, job.site.gpu_type
    gpus = shape.nodes * job.gpus_asked
    resources = {
        "cpu": shape.nodes * shape.cpus_per_node,
        "mem": shape.nodes * job.memory_asked_mib,
        "node": shape.nodes,
        "gres/gpu": gpus,
    }
    return resources | ({f"gres/gpu:{kind}": gpus} if kind else {})


def _at_once(job: Job, limits: Limits) -> Iterator[Limit]:
    """How many such jobs each limit on resources lets run at the same time."""
    for name, amount in _tres(job).items():
        for key in (f"MaxTRESPU {name}", f"GrpTRES {name}"):
            if amount and (most := limits.get(key)) and most.value >= amount:
                yield Limit(most.value // amount, most.source)


def _unit(name: str) -> str:
    """What is counted under one of Slurm's names, such as `gres/gpu:a100`."""
    kind = name.removeprefix("gres/gpu:")
    return f"{kind} GPUs" if kind != name else _UNITS.get(name, name)


def _shown(item: tuple[str, Limit]) -> str:
    key, limit = item
    kind, _, name = key.partition(" ")
    unit = _unit(name)
    texts = {
        "MaxWall": f"{limit.value} min a job",
        "MaxJobs": f"{count_of(limit.value, 'job')} at once",
        "MaxSubmit": f"{count_of(limit.value, 'job')} in the queue",
        "MaxTRES": f"{limit.value} {unit} a job",
        "MaxTRESPU": f"{limit.value} {unit} a user",
        "GrpTRES": f"{limit.value} {unit} in all",
        "MaxTRESMins": f"{limit.value} {unit} × min a job",
        "GrpTRESMins": f"{limit.value} {unit} × min in all",
    }
    return texts[kind]


def check_budget(groups: Sequence[JobGroup], most: float | None) -> None:
    """Raise `ConfigError` where jobs may use more than so many GPU-hours."""
    needed = sum(group.most_hours.gpu for group in groups)
    if most is not None and needed > most:
        raise ConfigError(
            f"these jobs may use {needed:.1f} GPU-hours (time limits × launcher.attempts), over "
            f"--max-gpu-hours={most:g}: lower launcher.time_limit_min or launcher.attempts, or submit fewer runs"
        )
