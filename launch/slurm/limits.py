"""What jobs of a user may take: accounts, QOSs and their limits, as `sacctmgr` shows them, and `--max-gpu-hours`."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from launch.slurm import scheduler
from launch.slurm.scheduler import SchedulerError, minutes
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from launch.slurm.jobs import Job, JobGroup
    from parallelbench.config.sites import Site

_ASSOCIATION = ("Cluster", "DefaultAccount", "Account", "Partition", "QOS", "DefaultQOS")
_OF_BOTH = ("MaxWall", "MaxTRES", "GrpTRES", "MaxTRESMins")
_OF_ACCOUNTS = (*_OF_BOTH, "MaxJobs", "MaxSubmitJobs")
_OF_QOS = (*_OF_BOTH, "MaxTRESPU", "MaxJobsPU", "MaxSubmitPU")
_OF_GROUPS = ("GrpTRES",)
_OF_PARENTS = ("Cluster", "Account", "ParentName", "User", *_OF_GROUPS)
"""An account's limit on its group is the only one that its associations don't show."""
_MIB = {"M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}
_UNITS = {"cpu": "cores", "mem": "MiB", "node": "nodes", "gres/gpu": "GPUs"}


@dataclass(frozen=True)
class Limit:
    """A limit and its source."""

    value: int
    source: str
    """`QOS short` or `account lab`."""


Limits = dict[str, Limit]
"""By Slurm's names: `MaxWall` (minutes), `MaxJobs`, `MaxTRES cpu`, `MaxTRESPU gres/gpu`, … (memory in MiB)."""


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
            if (most := limits.get(f"MaxTRESMins {name}")) and wanted * job.minutes > most.value:
                yield (
                    f"{wanted} {_unit(name)} for {job.minutes} min, but the {most.source} allows {most.value} "
                    f"{_unit(name)} × min a job: lower launcher.time_limit_min, or ask for fewer"
                )

    def findings(self) -> Iterator[tuple[str, str]]:
        """(what, finding) pairs, for `doctor`."""
        for each in self.associations:
            where = f" on {each.partition}" if each.partition else ""
            qos = ", ".join(f"{name} (default)" if name == each.default_qos else name for name in each.qos)
            yield (
                f"account {each.account}{where}{' (default)' * each.default}",
                "; ".join([f"QOS {qos or 'none'}", *_shown(each.limits)]),
            )
        for name in sorted({name for each in self.associations for name in each.qos} & self.qos.keys()):
            yield f"QOS {name}", "; ".join(_shown(self.qos[name])) or "no limits of its own"

    def _limits(self, site: Site, partition: str) -> Limits:
        """A QOS overrides the account, limit by limit (Slurm's resource_limits page, on their hierarchy)."""
        account = site.account or next((each.account for each in self.associations if each.default), None)
        by_partition = {each.partition: each for each in self.associations if each.account == account}
        association = by_partition.get(partition, by_partition.get(""))
        if association is None:
            return {}  # Slurm refuses the job
        # As Slurm chooses: the association's default, its only one, the cluster's.
        only = association.qos[0] if len(association.qos) == 1 else "normal"
        return association.limits | self.qos.get(site.qos or association.default_qos or only, {})


def allowed() -> Allowed | None:
    """The limits of accounting; None where it limits nothing. Raises `SchedulerError` where it gives no answer."""
    settings = scheduler.configuration()
    enforced = set(settings.get("AccountingStorageEnforce", "none").split(","))
    if not enforced & {"associations", "limits", "qos", "safe", "wckeys", "all"}:
        return None
    user, cluster = _user(), settings.get("ClusterName", "")
    columns = (*_ASSOCIATION, *_OF_ACCOUNTS)
    own = [row for row in _show("user", columns, "where", f"name={user}", "withassoc") if row["Cluster"] == cluster]
    associations = [_association(row) for row in own]
    if not enforced & {"limits", "safe", "all"}:
        associations, qos = [replace(each, limits={}) for each in associations], {}
    else:
        groups = _groups(cluster)
        associations = [replace(a, limits=_tightest(a.limits, groups.get(a.account, {}))) for a in associations]
        qos = {row["Name"]: _limits(row, f"QOS {row['Name']}", _OF_QOS) for row in _show("qos", ("Name", *_OF_QOS))}
    return Allowed(associations, qos)


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise SchedulerError(f"the user id {os.getuid()} has no name on this machine") from None


def _groups(cluster: str) -> dict[str, Limits]:
    """Account → the limits on its group, and on those of the accounts above it, the tightest of each."""
    rows = [row for row in _show("assoc", _OF_PARENTS) if row["Cluster"] == cluster and not row["User"]]
    parents = {row["Account"]: row["ParentName"] for row in rows}
    own = {row["Account"]: _limits(row, f"account {row['Account']}", _OF_GROUPS) for row in rows}

    def whole(account: str) -> Limits:
        above = parents.get(account, "")
        return _tightest(own.get(account, {}), whole(above) if above and above != account else {})

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
            limits[column] = Limit(int(text), source)
    return limits


def _amount(text: str) -> int:
    """A count, or MiB of a memory such as 100G."""
    unit = text[-1]
    return round(float(text[:-1]) * _MIB[unit]) if unit in _MIB else int(text)


def _tres(job: Job) -> dict[str, int]:
    """The resources that a job requests, by Slurm's names."""
    shape, kind = job.shape, job.site.gpu_type
    gpus = shape.nodes * shape.gpus_per_node
    resources = {
        "cpu": shape.nodes * shape.cpus_per_node,
        "mem": shape.nodes * shape.memory_mib_per_node,
        "node": shape.nodes,
        "gres/gpu": gpus,
    }
    return resources | ({f"gres/gpu:{kind}": gpus} if kind else {})


def _unit(name: str) -> str:
    """What is counted under one of Slurm's names, such as `gres/gpu:a100`."""
    kind = name.removeprefix("gres/gpu:")
    return f"{kind} GPUs" if kind != name else _UNITS.get(name, name)


def _shown(limits: Limits) -> list[str]:
    return [f"{name} {limit.value}" for name, limit in limits.items()]


def check_budget(groups: Sequence[JobGroup], most: float | None) -> None:
    """Raise `ConfigError` where jobs may use more than so many GPU-hours."""
    needed = sum(group.most_hours.gpu for group in groups)
    if most is not None and needed > most:
        raise ConfigError(
            f"these jobs may use {needed:.1f} GPU-hours (time limits × launcher.attempts), over "
            f"--max-gpu-hours={most:g}: lower launcher.time_limit_min or launcher.attempts, or submit fewer runs"
        )
