"""What Slurm takes and never starts by the rules of accounting, as `sacctmgr` shows them, and `--max-gpu-hours`.

The account and the QOS that a job gets decide which partitions admit it, how long it may be (`MaxWall`), and how many
nodes it may have (`MaxTRES`). All else of accounting lets jobs wait, and `squeue` gives the reason.
"""

from __future__ import annotations

import os
import pwd
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from launch.slurm import scheduler
from launch.slurm.scheduler import SchedulerError, minutes
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from launch.slurm.sbatch import Job, JobGroup
    from parallelbench.config.sites import Site

_OF_JOBS = ("MaxWall", "MaxTRES")
_ASSOCIATION = ("Cluster", "DefaultAccount", "Account", "Partition", "QOS", "DefaultQOS", *_OF_JOBS)


@dataclass(frozen=True)
class Limits:
    """Of one job; None: no limit."""

    minutes: int | None = None
    nodes: int | None = None

    def __str__(self) -> str:
        parts = ((self.minutes, "min"), (self.nodes, "node(s)"))
        return ", ".join(f"{most} {what} a job" for most, what in parts if most is not None)


@dataclass(frozen=True)
class Association:
    """One account that the user may charge, on one partition or all."""

    account: str
    default: bool
    partition: str
    """Empty: all."""
    qos: tuple[str, ...]
    default_qos: str
    limits: Limits = Limits()


@dataclass(frozen=True)
class Allowed:
    """What accounting allows this user."""

    associations: Sequence[Association]
    qos: Mapping[str, Limits] = field(default_factory=dict)
    partition_qos: Mapping[str, str] = field(default_factory=dict)
    """Partition → its own QOS, whose limits come before those of a job's."""
    parents: Mapping[str, str] = field(default_factory=dict)
    """Account → the one above it."""
    over: frozenset[str] = frozenset()
    """The QOSs whose limits come before those of a partition's own."""

    def refusals(self, job: Job, partition: str) -> Iterator[str]:
        """Why Slurm would take a job for a partition, and let it wait for ever.

        Limit by limit, the partition's own QOS comes before the job's, and that before the account (Slurm's
        resource_limits page); a QOS with the flag OverPartQOS comes first.
        """
        association = self._association(job.site, partition)
        if association is None:
            return  # Slurm refuses the job
        name, own = self.qos_of(job.site, partition), self.partition_qos.get(partition, "")
        names = (name, own) if name in self.over else (own, name)
        of_qos = [(f"QOS {each}", self.qos[each]) for each in names if each in self.qos]
        limits = [*of_qos, (f"account {association.account}", association.limits)]
        source, most = next(((at, each.minutes) for at, each in limits if each.minutes is not None), ("", None))
        if most is not None and job.minutes > most:
            yield f"launcher.time_limit_min={job.minutes}, but the {source} allows {most}"
        source, most = next(((at, each.nodes) for at, each in limits if each.nodes is not None), ("", None))
        if most is not None and job.shape.nodes > most:
            yield f"nodes={job.shape.nodes}, but the {source} allows {most}"

    def findings(self) -> Iterator[tuple[str, str]]:
        """(what, finding) pairs, for `doctor`."""
        for each in self.associations:
            where = f" on {each.partition}" if each.partition else ""
            qos = ", ".join(f"{name} (default)" if name == each.default_qos else name for name in each.qos)
            found = "; ".join(filter(None, [f"QOS {qos or 'none'}", str(each.limits)]))
            yield f"account {each.account}{where}{' (default)' * each.default}", found
        for name in sorted({name for each in self.associations for name in each.qos} & self.qos.keys()):
            yield f"QOS {name}", str(self.qos[name]) or "no limits of a job's length or nodes"

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


def allowed(partition_qos: Mapping[str, str] | None = None) -> Allowed | None:
    """The limits of accounting; None where it limits nothing. Raises `SchedulerError` where it gives no answer."""
    settings = scheduler.configuration()
    enforced = set(settings.get("AccountingStorageEnforce", "none").split(","))
    if not enforced & {"associations", "limits", "qos", "safe", "wckeys", "all"}:
        return None
    cluster, limited = settings.get("ClusterName", ""), bool(enforced & {"limits", "safe", "all"})
    own = _show("user", _ASSOCIATION, "where", f"name={_user()}", "withassoc")
    accounts = _show("assoc", ("Cluster", "Account", "ParentName", "User"))
    qos = _show("qos", ("Name", "Flags", *_OF_JOBS)) if limited else []
    return Allowed(
        [_association(row, limited=limited) for row in own if row["Cluster"] == cluster],
        {row["Name"]: _limits(row) for row in qos},
        partition_qos or {},
        {row["Account"]: row["ParentName"] for row in accounts if row["Cluster"] == cluster and not row["User"]},
        over=frozenset(row["Name"] for row in qos if "OverPartQOS" in row["Flags"]),
    )


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise SchedulerError(f"the user id {os.getuid()} has no name on this machine") from None


def _show(what: str, columns: Sequence[str], *conditions: str) -> list[dict[str, str]]:
    command = ["sacctmgr", "--noheader", "--parsable2", "show", what, *conditions, f"format={','.join(columns)}"]
    rows = (line.split("|") for line in scheduler.ask(command).splitlines())
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]


def _association(row: Mapping[str, str], *, limited: bool) -> Association:
    return Association(
        account=row["Account"],
        default=row["Account"] == row["DefaultAccount"],
        partition=row["Partition"],
        qos=tuple(filter(None, row["QOS"].split(","))),
        default_qos=row["DefaultQOS"],
        limits=_limits(row) if limited else Limits(),
    )


def _limits(row: Mapping[str, str]) -> Limits:
    nodes = re.search(r"\bnode=(\d+)", row["MaxTRES"])
    return Limits(minutes(row["MaxWall"]) if row["MaxWall"] else None, int(nodes[1]) if nodes else None)


def check_budget(groups: Sequence[JobGroup], most: float | None) -> None:
    """Raise `ConfigError` where jobs may use more than so many GPU-hours."""
    needed = sum(group.most_hours.gpu for group in groups)
    if most is not None and needed > most:
        raise ConfigError(
            f"these jobs may use {needed:.1f} GPU-hours (time limits × launcher.attempts), over "
            f"--max-gpu-hours={most:g}: lower launcher.time_limit_min or launcher.attempts, or submit fewer runs"
        )
