"""What a site asks of all its jobs: passed to sbatch and srun, held against the cluster, refused if malformed."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from launch.slurm import bandwidth, report
from launch.slurm.arrays import job_groups
from launch.slurm.cluster import ClusterLimits, Partition, Reservation, partitions, reservations
from launch.slurm.hours import Hours
from launch.slurm.limits import Allowed, Association, Limit
from launch.slurm.scheduler import hosts
from launch.slurm.shape import OWN
from launch.slurm.submit import batch_script, prepare_for_site
from launch.sweep import expand, one_run
from parallelbench.errors import ConfigError
from tests.faults import fault
from tests.launch.fake_slurm import ON_SITE

if TYPE_CHECKING:
    from pathlib import Path

    from launch.slurm.arrays import JobGroup
    from tests.launch.fake_slurm import FakeSlurm

NORMAL = Partition("normal", True, "up", None, 2, 8, 11_000, "gpu:a100:4", "", hosts("n[1-2]"))
SHORT = Partition("short", False, "up", 30, 2, 16, 11_000, "gpu:a100:2", "", hosts("m[1-2]"))
BOTH = "site.partition=normal,short"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path


def group(results: Path, *overrides: str) -> JobGroup:
    plan = expand([*ON_SITE, f"results={results}", *overrides])
    (batch,) = job_groups([prepare_for_site(planned) for planned in plan])
    return batch


def limits(**changes: Any) -> ClusterLimits:
    return ClusterLimits(**{"kinds": [NORMAL, SHORT], "longest": 1000} | changes)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (None, ""),
        ("n1", "n1"),
        ("n1,gpu-2.x", "n1 gpu-2.x"),
        ("n[1-3,07]", "n1 n2 n3 n07"),
        ("n[08-10],m[2]", "n08 n09 n10 m2"),
        ("r[1-2]n[1-2]x", "r1n1x r1n2x r2n1x r2n2x"),
    ],
)
def test_lists_of_nodes_are_read(text: str | None, names: str) -> None:
    assert hosts(text) == set(names.split())


def test_more_nodes_than_any_cluster_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"are 10000000000 nodes, and no cluster has more than 100000"):
        hosts("a[0-99999]b[0-99999]")
    assert len(hosts("a[0-99999]")) == 100_000


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (BOTH, "--partition=normal,short"),
        ("site.reservation=deadline", "--reservation=deadline"),
        ("site.nice=100", "--nice=100"),
        ("site.nice=0", "--nice=0"),
        ("site.nodelist=n[1-2],m1", "--nodelist='n[1-2],m1'"),
        ("site.exclude=n3,n7", "--exclude=n3,n7"),
        ("site.exclusive=true", "--exclusive"),
        ("site.sbatch={comment: my thesis, hold-off: false}", "--comment='my thesis'"),
        ("site.sbatch={comment: 2026}", "--comment=2026"),
        ("site.sbatch={spread-job: true}", "--spread-job"),
    ],
)
def test_a_sites_key_reaches_sbatch_and_srun(override: str, line: str, results: Path) -> None:
    key = line.partition("=")[0]
    lines = batch_script(group(results, override), 1).splitlines()
    assert f"#SBATCH {line}" in lines
    assert not [other for other in batch_script(group(results), 1).splitlines() if key in other and "nodes" not in key]
    run = one_run([*ON_SITE, f"results={results}", override]).run
    assert line.replace("'", "") in bandwidth.short_job(run, "cpu", ["module"], name="x", minutes=1)


@pytest.mark.parametrize(
    "override",
    [
        *("site.partition='gpu,,low'", "site.partition='gpu, low'", "site.partition=[a,b]", "site.nice=-1"),
        *("site.nodelist='n1 n2'", "site.exclude='$(x)'", "site.exclusive=user", "site.reservation='a,b'"),
    ],
)
def test_what_is_no_word_of_slurms_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"^site\.\w+=.* is not valid: expected "):
        one_run([*ON_SITE, override])


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
    sets = [
        "site.mail_user=me",
        BOTH,
        "site.exclusive=true",
        "site.nice=1",
        "site.gpu_type=a100",
        "launcher.pack=false",
    ]
    batch, run = group(results, *sets), one_run([*ON_SITE, f"results={results}", *sets]).run
    written = [line.partition(" ")[2] for line in batch_script(batch, 2).splitlines() if line.startswith("#SBATCH")]
    written += [*report.command(run, ["7"]), *bandwidth.short_job(run, "cpu", ["x"], name="x", minutes=1)]
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
    """Sixteen cores are in short only, 60 minutes in normal only."""
    hour, cores = group(results, BOTH), group(results, BOTH, "cores_per_device=16")
    assert limits().refusals(hour) == []
    assert list(limits().notes(hour)) == [
        "the jobs never run in short: launcher.time_limit_min=60, but short allows 30"
    ]
    assert limits(in_all=True).refusals(hour) == ["launcher.time_limit_min=60, but short allows 30"]
    assert list(limits(in_all=True).notes(hour)) == []
    assert limits().refusals(cores) == [
        "16 cores of a node, but those of normal have 8",
        "launcher.time_limit_min=60, but short allows 30",
    ]
    half = group(results, BOTH, "cores_per_device=16", "launcher.time_limit_min=30")
    assert limits().refusals(half) == []


def test_each_named_partition_must_be_there_and_open(results: Path) -> None:
    (text,) = limits().refusals(group(results, "site.partition=normal,nowhere"))
    assert text == "site.partition=nowhere is no partition of this cluster: normal, short"
    lab = Association("lab", True, "normal", (), "", {})
    (text,) = limits(allowed=Allowed([lab], {})).refusals(group(results, BOTH, "launcher.time_limit_min=30"))
    assert text == "the account lab is for the partition normal, not for short: set site.partition"


def test_the_limits_of_an_account_count_in_each_partition(results: Path) -> None:
    tight = Association("lab", True, "normal", (), "", {"MaxWall": Limit(20, "account lab")})
    wide = Association("lab", True, "", (), "", {})
    cluster, half = limits(allowed=Allowed([tight, wide], {})), group(results, BOTH, "launcher.time_limit_min=30")
    assert cluster.refusals(half) == []
    assert list(cluster.notes(half)) == [
        "the jobs never run in normal: launcher.time_limit_min=30, but the account lab allows 20"
    ]
    assert len(cluster.refusals(group(results, BOTH))) == 2


def test_one_of_several_partitions_may_be_down(results: Path) -> None:
    down = [replace(NORMAL, state="down"), SHORT]
    quick = group(results, BOTH, "launcher.time_limit_min=30")
    assert list(limits(kinds=down).notes(quick)) == [
        "the partition normal is down: jobs wait until it is up, or run elsewhere"
    ]
    assert list(limits(kinds=down).notes(group(results))) == ["the partition normal is down: jobs wait until it is up"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["site.nodelist=n1"], ""),
        (["site.nodelist=n1,m1"], "site.nodelist=n1,m1: m1 does not belong to normal"),
        (["site.nodelist=n[1-2]"], "site.nodelist=n[1-2] are 2 nodes, all of which every job gets, but these jobs"),
        (["site.nodelist=n[1-2]", "nodes=2", "devices=2", "strategy=ddp"], ""),
        (["site.exclude=n1"], ""),
        (["site.exclude=m[1-2]"], ""),
        (["site.exclude=n[1-2]"], "1 node, but site.exclude=n[1-2] leaves 0 of normal"),
        (["site.exclude=n2", "nodes=2", "devices=2", "strategy=ddp"], "2 nodes, but site.exclude=n2 leaves 1 of"),
    ],
)
def test_nodes_that_are_named_are_held_against_the_partition(overrides: list[str], message: str, results: Path) -> None:
    found = limits().refusals(group(results, *overrides))
    assert len(found) == bool(message)
    assert "".join(found).startswith(message)


def test_named_nodes_must_all_suit(results: Path) -> None:
    """A partition of two kinds of nodes: one that suits is enough, unless the site names nodes."""
    kinds = [NORMAL, replace(NORMAL, cpus_per_node=2, names=hosts("old1"))]
    four = ("cores_per_device=4",)
    assert limits(kinds=kinds).refusals(group(results, *four)) == []
    (text,) = limits(kinds=kinds).refusals(group(results, *four, "site.nodelist=old1"))
    assert text == "4 cores of a node, but those of normal have 2"
    two = (*four, "nodes=2", "devices=2", "strategy=ddp")
    assert limits(kinds=kinds).refusals(group(results, *two, "site.nodelist=n1,old1")) == [text]


def test_a_job_may_have_nodes_of_several_kinds(results: Path) -> None:
    racks = [replace(NORMAL, features=f"rack{rack}", names=hosts(f"r{rack}n[1-2]")) for rack in (1, 2)]
    old = replace(NORMAL, cpus_per_node=2, names=hosts("old[1-2]"))
    four = group(results, "cores_per_device=4", "nodes=4", "devices=4", "strategy=ddp")
    assert limits(kinds=[*racks, old]).refusals(four) == []
    assert limits(kinds=[racks[0], old]).refusals(four) == ["4 nodes, but normal has 2 that suit"]
    less = group(results, "nodes=4", "devices=4", "strategy=ddp", "site.exclude=r1n1")
    assert limits(kinds=racks).refusals(less) == ["4 nodes, but site.exclude=r1n1 leaves 3 of normal"]
    down = [racks[0], replace(racks[1], out=1)]
    assert list(limits(kinds=down).notes(four)) == [
        "1 of 4 nodes of normal is down or drained: jobs wait until enough are up"
    ]
    two = group(results, "nodes=2", "devices=2", "strategy=ddp")
    assert list(limits(kinds=down).notes(two)) == []


OUTLASTS = "launcher.time_limit_min=60, but {} min are left of the reservation deadline (ends 2030-01-01T02:00:00)"


def test_a_reservation_must_be_there_and_last_long_enough(results: Path) -> None:
    asked = group(results, "site.reservation=deadline")
    there = Reservation("deadline", active=False, began="2030-01-01T00:00:00", minutes=60)
    assert limits(reserved=[there]).refusals(asked) == []
    assert list(limits(reserved=[there]).notes(asked)) == [
        "the reservation deadline is not active: jobs wait for it (begins 2030-01-01T00:00:00)"
    ]
    (text,) = limits(reserved=[Reservation("deadline", active=True, began="", minutes=59)]).refusals(asked)
    assert text == "launcher.time_limit_min=60, but the reservation deadline lasts 59"
    (text,) = limits(reserved=[Reservation("other", active=True, began="", minutes=None)]).refusals(asked)
    assert text == "site.reservation=deadline is no reservation of this cluster: other"
    assert limits(reserved=[]).refusals(asked)[0].endswith(": there is none")


@pytest.mark.parametrize(
    ("left_min", "recurs", "refused", "noted"),
    [
        (None, False, [], []),
        (60, False, [], []),
        (59, False, [f"{OUTLASTS.format(59)}, and Slurm ends what runs then: lower it to 59 or less"], []),
        (0, False, [f"{OUTLASTS.format(0)}, and Slurm ends what runs then: name another, or none"], []),
        (59, True, [], [f"{OUTLASTS.format(59)}, and Slurm ends what runs then"]),
    ],
)
def test_a_job_starts_only_within_what_is_left_of_its_reservation(
    results: Path, left_min: int | None, recurs: bool, refused: list[str], noted: list[str]
) -> None:
    asked = group(results, "site.reservation=deadline")
    ends = "2030-01-01T02:00:00"
    found = Reservation("deadline", True, "", minutes=120, left_min=left_min, ends=ends, recurs=recurs)
    assert limits(reserved=[found]).refusals(asked) == refused
    assert list(limits(reserved=[found]).notes(asked)) == noted


def test_what_is_left_of_a_reservation_is_read(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.mktime(time.strptime("2030-01-01T00:00:00", "%Y-%m-%dT%H:%M:%S"))
    monkeypatch.setattr(time, "time", lambda: began + 90)
    line = "ReservationName=one StartTime=2030-01-01T00:00:00 EndTime={} Duration=01:00:00 Flags={} State={}\n"
    texts = (
        line.format("2030-01-01T01:00:00", "SPEC_NODES", "ACTIVE"),
        line.format("2030-01-01T01:00:00", "SPEC_NODES,DAILY", "ACTIVE"),
        line.format("2030-01-01T01:00:00", "FLEX", "ACTIVE"),
        line.format("2030-01-01T01:00:00", "SPEC_NODES", "INACTIVE"),
        line.format("Unknown", "SPEC_NODES", "ACTIVE"),
        line.format("2030-01-01T00:01:00", "SPEC_NODES", "ACTIVE"),
    )
    fake.answers["scontrol"] = "".join(texts)
    left = [(each.left_min, each.recurs) for each in reservations()]
    assert left == [(58, False), (58, True), (None, False), (None, False), (None, False), (0, False)]


def test_an_exclusive_job_is_charged_for_whole_nodes(results: Path) -> None:
    """Slurm gives it all cores and GPUs of its nodes, whatever it asks for."""
    most = {"MaxTRES cpu": Limit(4, "account lab"), "MaxTRES gres/gpu": Limit(3, "account lab")}
    cluster = limits(allowed=Allowed([Association("lab", True, "", (), "", most)], {}))
    one, whole = group(results), group(results, "site.exclusive=true")
    assert cluster.refusals(one) == []
    assert cluster.refusals(whole) == [
        "8 cores a job, but the account lab allows 4: ask for fewer",
        "4 GPUs a job, but the account lab allows 3: ask for fewer",
    ]
    assert (one.most_hours, whole.most_hours) == (Hours(gpu=3), Hours(gpu=12))


def test_what_sinfo_and_scontrol_say_is_read(fake: FakeSlurm) -> None:
    fake.answers["sinfo"] = "normal|normal*|up|1-00:00:00|4|8|11000|(null)|(null)|1/1/2/4|n[1-4]\n"
    (kind,) = partitions()
    assert (kind.nodes, kind.out, kind.names, kind.gres) == (4, 2, hosts("n[1-4]"), "")
    line = "ReservationName={} StartTime=2030-01-01T00:00:00 Duration={} Nodes=n1 Flags={} State={}\n"
    shown = line.format("one", "02:00:00", "SPEC_NODES", "ACTIVE") + line.format("two", "01:00:00", "FLEX", "INACTIVE")
    fake.answers["scontrol"] = shown
    assert reservations() == [
        Reservation("one", active=True, began="2030-01-01T00:00:00", minutes=120),
        Reservation("two", active=False, began="2030-01-01T00:00:00", minutes=None),
    ]
    fake.answers["scontrol"] = "No reservations in the system\n"
    assert reservations() == []
