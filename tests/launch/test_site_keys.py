"""What a site asks of all its jobs: passed to sbatch and srun, held against the cluster, refused if malformed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.slurm import scheduler
from launch.slurm.cluster import Cluster, Partition, partitions, require_accepted, reservations
from launch.slurm.errands import errand, report_script
from launch.slurm.limits import Allowed, Association, Limits
from launch.slurm.sbatch import OWN, Hours, JobGroup, shape_of
from launch.slurm.submit import prepare_for_site
from launch.sweep import expand, one_run
from parallelbench.errors import ConfigError
from tests.faults import fault
from tests.launch.fake_slurm import ON_SITE, FakeSlurm, group, of_sbatch

NORMAL = Partition("normal", True, "up", None, 2, 8, 11_000, "gpu:a100:4", "")
SHORT = Partition("short", False, "up", 30, 2, 16, 11_000, "gpu:a100:2", "")
BOTH = "site.partition=normal,short"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture(autouse=True)
def taken(fake: FakeSlurm) -> None:
    """A Slurm whose sbatch takes everything, as it takes what waits for ever."""


def limits(**changes: Any) -> Cluster:
    return Cluster(**{"kinds": [NORMAL, SHORT], "longest": 1000} | changes)


def said(cluster: Cluster, asked: JobGroup) -> tuple[list[str], list[str]]:
    """Refusals and notes."""
    answer = cluster.answer(asked.job)
    return answer.refusals, answer.notes


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (BOTH, "--partition=normal,short"),
        ("site.reservation=deadline", "--reservation=deadline"),
        ("site.nice=100", "--nice=100"),
        ("site.wckey=climate", "--wckey=climate"),
        ("site.nodelist=n[1-2],m1", "--nodelist='n[1-2],m1'"),
        ("site.exclude=n3,n7", "--exclude=n3,n7"),
        ("site.exclusive=true", "--exclusive"),
        ("site.sbatch={comment: my thesis, hold-off: false}", "--comment='my thesis'"),
        ("site.sbatch={spread-job: true}", "--spread-job"),
    ],
)
def test_a_sites_key_reaches_every_job(override: str, line: str, results: Path) -> None:
    key = line.partition("=")[0]
    lines = group(results, override).job.script().splitlines()
    assert f"#SBATCH {line}" in lines
    assert not [other for other in group(results).job.script().splitlines() if key in other and "nodes" not in key]
    run = one_run([*ON_SITE, f"results={results}", override]).run
    assert f"#SBATCH {line}" in errand(run, shape_of(run, "cpu"), results, "x", minutes=1).script().splitlines()


@pytest.mark.cases("error")
@fault(
    "submission",
    "A site's further option of sbatch is one that the suite sets, in full or shortened",
    injection="each of them in site.sbatch, where a cluster's --comment belongs",
    outcome="refused with the key that sets it; others reach every job",
)
def test_a_further_option_is_none_that_the_suite_sets() -> None:
    planned = one_run([*ON_SITE, "site.sbatch={comment: x}"])
    for option in OWN.keys() - {"exclusive"}:
        for name in (option, option[:-1]):  # sbatch takes the beginning of a name for the name
            site = msgspec.structs.replace(planned.run.site, sbatch={name: "x"})
            other = replace(planned, run=msgspec.structs.replace(planned.run, site=site))
            with pytest.raises(ConfigError, match=rf"^site\.sbatch\.{name} is refused, as --[a-z-]+ is the suite's: "):
                prepare_for_site(other)


def test_every_option_of_a_job_is_known_as_the_suites(results: Path) -> None:
    """So that a further one can't replace it."""
    sets = ["site.mail_user=me", BOTH, "site.exclusive=true", "site.nice=1", "site.gpu_type=a100"]
    sets += ["launcher.pack=false"]
    batch, run = group(results, *sets), one_run([*ON_SITE, f"results={results}", *sets]).run
    measured = errand(run, shape_of(run, "cpu"), results, "x", minutes=1)
    scripts = batch.job.script(2), report_script(run, ["7"]), measured.script()
    written = [option for script in scripts for option in of_sbatch(script)]
    options = {word.partition("=")[0] for word in written if word.startswith("--")}
    assert len(options) > 15
    assert {option.removeprefix("--") for option in options} <= OWN.keys()


@pytest.mark.exhaustive
def test_what_is_no_further_option_is_refused() -> None:
    for name in ("Comment", "--comment", "c", "job_name"):
        with pytest.raises(ConfigError, match=r"site\.sbatch\..* is no option: name a long one"):
            prepare_for_site(one_run([*ON_SITE, f"site.sbatch={{{name}: x}}"]))
    for value in ("'a\\nb'", '"it\'s"', "[1]", "''"):
        with pytest.raises(ConfigError, match=r"site\.sbatch\.comment=.* expected 1 to 1024 characters without quotes"):
            one_run([*ON_SITE, f"site.sbatch={{comment: {value}}}"])


def test_several_partitions_are_one_value_and_no_sweep() -> None:
    assert one_run([*ON_SITE, BOTH]).run.site.partition == "normal,short"
    assert len(expand([*ON_SITE, BOTH, "devices=1,2", "strategy=ddp"])) == 2
    with pytest.raises(ConfigError, match=r"can't be swept: .*quote it"):
        one_run([*ON_SITE, "site.account=a,b"])


def test_a_job_runs_where_one_of_its_partitions_can(results: Path) -> None:
    """Where `EnforcePartLimits` is off, Slurm takes what none of them ever starts."""
    short = "launcher.time_limit_min=60, but short allows 30"
    assert said(limits(), group(results, BOTH)) == ([], [f"the jobs never run in short: {short}"])
    assert said(limits(), group(results, "site.partition=short")) == ([short], [])
    tight = limits(kinds=[replace(NORMAL, limit_min=59), SHORT])
    assert said(tight, group(results, BOTH)) == (["launcher.time_limit_min=60, but normal allows 59", short], [])
    assert said(limits(), group(results, BOTH, "launcher.time_limit_min=30")) == ([], [])


def test_the_limits_of_an_account_count_in_each_partition(results: Path) -> None:
    tight = Association("lab", True, "normal", (), "", Limits(20))
    wide = Association("lab", True, "", (), "")
    cluster, half = limits(allowed=Allowed([tight, wide])), group(results, BOTH, "launcher.time_limit_min=30")
    never = "the jobs never run in normal: launcher.time_limit_min=30, but the account lab allows 20"
    assert said(cluster, half) == ([], [never])
    assert len(said(cluster, group(results, BOTH))[0]) == 2


def test_one_of_several_partitions_may_be_down(results: Path) -> None:
    down = limits(kinds=[replace(NORMAL, state="down"), SHORT])
    waits = "the partition normal is down: jobs wait until it is up"
    assert said(down, group(results, BOTH, "launcher.time_limit_min=30")) == ([], [f"{waits}, or run elsewhere"])
    assert said(down, group(results)) == ([], [waits])


RULES = {"PartitionName": "normal", "MaxNodes": "UNLIMITED", "AllowAccounts": "ALL", "AllowQos": "ALL"}
TWO_NODES = ("strategy=ddp", "devices=2", "nodes=2")


@pytest.mark.parametrize(
    ("rules", "overrides", "refusal"),
    [
        ({}, TWO_NODES, ""),
        ({"MaxNodes": "2", "MinNodes": "2"}, TWO_NODES, ""),
        ({"MaxNodes": "1"}, TWO_NODES, "nodes=2, but normal allows a job MaxNodes=1"),
        ({"MinNodes": "2"}, (), "nodes=1, but normal demands MinNodes=2"),
        ({"MaxCPUsPerNode": "2"}, ("cores_per_device=3",), "3 cores a node, but normal allows a job MaxCPUsPerNode=2"),
        ({"AllowAccounts": "lab,x"}, (), ""),
        ({"AllowAccounts": "science"}, (), ""),  # newer releases let in the accounts below it
        ({"AllowAccounts": "x"}, (), "normal admits AllowAccounts=x, and the jobs' is lab: set site.account"),
        ({"AllowAccounts": "lab"}, ("site.account=x",), "the jobs' is x: set site.account"),
        ({"DenyAccounts": "lab"}, (), "normal refuses DenyAccounts=lab, and the jobs' is lab: set site.account"),
        ({"AllowQos": "short,long"}, ("site.qos=long",), ""),
        ({"AllowQos": "short,long"}, (), "normal admits AllowQos=short,long, and the jobs' is usual: set site.qos"),
        ({"DenyQos": "usual"}, (), "normal refuses DenyQos=usual, and the jobs' is usual: set site.qos"),
    ],
)
def test_what_a_partition_never_starts_is_refused(
    rules: dict[str, str], overrides: Sequence[str], refusal: str, results: Path
) -> None:
    """`sbatch --test-only` says when it would start."""
    own = [Association(name, name == "lab", "", ("usual", "long"), "usual") for name in ("lab", "x")]
    known = Allowed(own, parents={"lab": "science"})
    cluster = limits(kinds=[replace(NORMAL, rules=RULES | rules)], allowed=known)
    refusals, _ = said(cluster, group(results, *overrides))
    assert len(refusals) == bool(refusal), refusals
    assert all(refusal in text for text in refusals)
    if not overrides:  # without accounting nobody knows whose account and QOS that is
        assert said(replace(cluster, allowed=None), group(results))[0] == [refusal] * ("MinNodes" in rules)


def test_a_wrong_type_of_gpu_is_named(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise scheduler.refusal("allocation failure: Requested node configuration is not available")

    monkeypatch.setattr(scheduler, "estimated_start", refuse)
    one = limits(kinds=[replace(NORMAL, out=2)])
    gpus = ("device=cuda", "site.gpu_type=v100")
    ((refusal,), _) = said(one, group(results, *gpus))
    assert refusal.startswith("site.gpu_type=v100, but normal has 2 nodes")
    assert "gpu:a100:4: set site.gpu_type to one of these" in refusal
    assert said(one, group(results, "device=cuda", "site.gpu_type=a100"))[0] == [], "its nodes are down"


LEFT = "{} min are left of the reservation deadline (ends END)"
OUTLASTS = f"launcher.time_limit_min=60, but {LEFT}, and Slurm ends what runs then"


def reservation(name: str = "deadline", **shown: str) -> dict[str, str]:
    """One as `scontrol` shows it, of an hour unless `shown` says otherwise."""
    usual = {"StartTime": "2030-01-01T00:00:00", "Duration": "01:00:00", "Flags": "SPEC_NODES", "State": "ACTIVE"}
    return {"ReservationName": name} | usual | shown


def test_a_reservation_must_last_long_enough(results: Path) -> None:
    asked = group(results, "site.reservation=deadline")
    waits = "the reservation deadline is not active: jobs wait for it (begins 2030-01-01T00:00:00)"
    assert said(limits(reservations=[reservation(State="INACTIVE")]), asked) == ([], [waits])
    brief, refusal = {"Duration": "00:59:00"}, "launcher.time_limit_min=60, but the reservation deadline lasts 59"
    assert said(limits(reservations=[reservation(**brief)]), asked) == ([refusal], [])
    assert said(limits(reservations=[reservation("other", **brief)]), asked) == ([], []), "Slurm says that itself"


def test_what_slurm_can_not_date_waits_for_its_reservation(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """22.05 says of a reservation that begins later that the time is invalid; sbatch takes the job."""

    def refuse(*_: object, **__: object) -> None:
        raise scheduler.refusal("allocation failure: Invalid time specified")

    monkeypatch.setattr(scheduler, "estimated_start", refuse)
    asked = group(results, "site.reservation=deadline")
    refusals, notes = said(limits(reservations=[reservation(State="INACTIVE")]), asked)
    assert (refusals, len(notes)) == ([], 2)


@pytest.mark.parametrize(
    ("ends", "flags", "refused", "noted"),
    [
        ("Unknown", "SPEC_NODES", "", ""),
        ("2030-01-01T02:01:00", "SPEC_NODES", "", ""),
        ("2030-01-01T02:00:00", "FLEX", "", ""),
        ("2030-01-01T02:00:00", "SPEC_NODES", f"{OUTLASTS.format(59)}: lower it to 59 or less", ""),
        ("2030-01-01T01:00:30", "SPEC_NODES", f"{OUTLASTS.format(0)}: name another, or none", ""),
        ("2030-01-01T02:00:00", "SPEC_NODES,DAILY", "", OUTLASTS.format(59)),
    ],
)
def test_a_job_starts_only_within_what_is_left_of_its_reservation(
    ends: str, flags: str, refused: str, noted: str, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.mktime(time.strptime("2030-01-01T01:00:01", "%Y-%m-%dT%H:%M:%S"))
    monkeypatch.setattr(time, "time", lambda: now)
    found = reservation(Duration="02:00:00", EndTime=ends, Flags=flags)
    refusals, notes = said(limits(reservations=[found]), group(results, "site.reservation=deadline"))
    assert [text.replace(ends, "END") for text in refusals] == [refused] * bool(refused)
    assert [text.replace(ends, "END") for text in notes] == [noted] * bool(noted)


def test_reservations_are_asked_for_once_and_patiently(
    results: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many shapes are to be submitted."""
    asked: list[bool] = []

    def ask(command: list[str], *, patient: bool = False, **_: object) -> str:
        if "reservation" in command:
            asked.append(patient)
            return "ReservationName=deadline StartTime=x Duration=00:30:00 State=ACTIVE\n"
        return fake.ask(command)

    monkeypatch.setattr(scheduler, "ask", ask)
    fake.answers["sinfo"] = "normal|normal*|up|infinite|4|8|11000|gpu:a100:4|(null)|1/1/2/4|mixed\n"
    jobs = [group(results, "site.reservation=deadline", f"cores_per_device={cores}").job for cores in (1, 2, 3)]
    with pytest.raises(ConfigError, match=r"the reservation deadline lasts 30$"):
        require_accepted(jobs)
    assert asked == [True]


def test_an_exclusive_job_is_charged_for_whole_nodes(results: Path) -> None:
    """Slurm gives it all GPUs of its nodes, whatever it asks for: three hours of one, and of four."""
    one, whole = group(results), group(results, "site.exclusive=true")
    assert (one.most_hours, whole.most_hours) == (Hours(gpu=3), Hours(gpu=12))


def test_what_sinfo_and_scontrol_say_is_read(fake: FakeSlurm) -> None:
    fake.answers["sinfo"] = "normal|normal*|up|1-00:00:00|4|8|11000|(null)|(null)|1/1/2/4|mixed\n"
    (kind,) = partitions()
    assert (kind.nodes, kind.out, kind.gres) == (4, 2, "")
    drains = "normal|normal*|up|infinite|{}|8|11000|(null)|(null)|{}\n"
    fake.answers["sinfo"] = drains.format(3, "3/0/0/3|draining") + drains.format(2, "1/1/0/2|mixed")
    (kind,) = partitions()
    assert (kind.nodes, kind.out) == (5, 3), "what drains takes no other job"
    shown = "PartitionName=normal AllowAccounts=lab MaxNodes=2 QoS=N/A\nPartitionName=other MaxNodes=1\n"
    fake.answers["scontrol"] = shown
    assert partitions()[0].rules["MaxNodes"] == "2"
    fake.answers["scontrol"] = "ReservationName=one Duration=02:00:00 Nodes=n1 Flags=A,B State=ACTIVE\n" * 2
    one = {"ReservationName": "one", "Duration": "02:00:00", "Nodes": "n1", "Flags": "A,B", "State": "ACTIVE"}
    assert reservations() == [one] * 2
    fake.answers["scontrol"] = "No reservations in the system\n"
    assert reservations() == []
