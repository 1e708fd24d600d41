"""`launcher.time_limit_min=auto`, and what a plan prices: by what done runs took."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from launch.known_times import Known
from launch.launcher import Prepared, SubmitOptions
from launch.slurm import record, scheduler, submit
from launch.slurm.cluster import Cluster, Partition
from launch.slurm.launcher import OnSlurm
from launch.slurm.record import Submission
from launch.slurm.sbatch import Hours, Shape, job_groups, job_of_runs
from launch.slurm.time_limit import Limit, Limits
from launch.states import states_of
from parallelbench.config.identity import run_id
from parallelbench.errors import ConfigError
from parallelbench.results.folder import RunFolder
from tests.analysis.factory import published
from tests.helpers import TINY
from tests.launch.fake_slurm import SINFO, FakeSlurm, of_sbatch, prepared, run_of

SWEEP = (*TINY, "strategy=ddp", "devices=1,2", "sweep.repeats=3", "sweep.order=listed")


def took(item: Prepared, seconds: float, *, waited_s: float | None = None) -> None:
    """Let a run be done, and have taken so long."""
    folder = published(item.planned.run)
    manifest, described = folder.result / "manifest.json", folder.attempts()[0].path / "attempt.json"
    plain, info = json.loads(manifest.read_text()), json.loads(described.read_text())
    plain["outcome"]["finished_at"] = info["launched_at"] + seconds
    manifest.write_text(json.dumps(plain))
    described.write_text(json.dumps(info | {"waited_s": waited_s}))


def known(items: Sequence[Prepared]) -> Known:
    return Known.of(items, states_of(item.folder for item in items))


def of_devices(items: Sequence[Prepared], devices: int) -> list[Prepared]:
    return [item for item in items if item.planned.run.devices == devices]


def minutes(items: Sequence[Prepared], limits: Limits) -> dict[int, int]:
    """Devices → the time limit of their jobs."""
    return {group.shape.devices: group.limit.minutes for group in job_groups(items, limits)}


def test_where_nothing_is_done_jobs_have_an_hour(tmp_path: Path) -> None:
    items = prepared(tmp_path, *SWEEP)
    assert minutes(items, Limits(known(items))) == {1: 60, 2: 60}


def test_a_limit_is_twice_the_longest_run_of_the_configuration_or_four_times_that_of_the_sweep(tmp_path: Path) -> None:
    """And 8 minutes more: 5 before the run, 2 from Slurm's warning on, 1 by which that is off; in steps of 5."""
    items = prepared(tmp_path, *SWEEP)
    first, second, _ = of_devices(items, 2)
    took(first, 600)
    took(second, 900)
    assert minutes(items, Limits(known(items))) == {1: 130, 2: 40}, "4 × 15 × 2 devices + 8, and 2 × 15 + 8"
    took(of_devices(items, 1)[0], 1800)
    assert minutes(items, Limits(known(items))) == {1: 70, 2: 40}, "2 × 30 + 8"


def test_no_limit_is_so_low_that_a_run_is_warned_before_it_trains(tmp_path: Path) -> None:
    items = prepared(tmp_path / "a", *SWEEP)
    for item in items:
        took(item, 1)
    assert set(minutes(items, Limits(known(items))).values()) == {10}
    patient = prepared(tmp_path / "b", *SWEEP, "launcher.signal_delay_s=7200")
    assert set(minutes(patient, Limits()).values()) == {130}, "120 + 1 + 5"
    with pytest.raises(ConfigError, match=r"signal_delay_s=120 with jobs of at most 3 min: .*: lower launcher\.signal"):
        prepared(tmp_path, *SWEEP, "site.max_time_min=3")


def test_a_packed_job_has_the_time_of_all_its_runs(tmp_path: Path) -> None:
    items = prepared(tmp_path, *TINY, "launcher.pack=true", "sweep.repeats=4")
    took(items[0], 600)
    assert minutes(items, Limits(known(items))) == {1: 90}, "4 × 2 × 10 + 8"


def test_a_limit_that_was_reached_is_doubled_as_far_as_the_site_and_the_partition_allow(tmp_path: Path) -> None:
    items = prepared(tmp_path, *SWEEP)
    reached = {of_devices(items, 2)[0].folder.path.name: 60}
    assert minutes(items, Limits(known(items), reached)) == {1: 60, 2: 120}
    site = prepared(tmp_path / "b", *SWEEP, "site.max_time_min=100")
    reached = {of_devices(site, 2)[0].folder.path.name: 60}
    (one, two) = (group.limit for group in job_groups(site, Limits(known(site), reached)))
    assert {one, two} == {
        Limit(60, "no run of the sweep is done"),
        Limit(100, "all that site.max_time_min allows", is_most=True),
    }
    assert set(minutes(items, Limits(most_min=lambda _: 30)).values()) == {30}


def test_the_longest_partition_counts_unless_one_has_no_limit() -> None:
    size: dict[str, Any] = {"cpus_per_node": 8, "memory_mib": 2**14, "gres": "", "features": "", "nodes": 1}
    kinds = [
        Partition(name=name, default=name == "short", state="up", limit_min=most, **size)
        for name, most in (("short", 30), ("long", 600), ("endless", None))
    ]
    site = run_of().site
    found = Cluster(kinds)
    assert found.most_min(site) == 30, "of the default one"
    assert found.most_min(msgspec.structs.replace(site, partition="short,long")) == 600
    assert found.most_min(msgspec.structs.replace(site, partition="short,endless")) is None
    assert Cluster().most_min(site) is None


def test_what_was_asked_for_is_kept_and_a_limit_is_no_part_of_a_run(tmp_path: Path) -> None:
    items = prepared(tmp_path, *SWEEP, "launcher.time_limit_min=25")
    took(items[0], 7200)
    assert set(minutes(items, Limits(known(items), {items[0].folder.path.name: 25})).values()) == {25}
    assert run_id(run_of("launcher.time_limit_min=25")) == run_id(run_of("launcher.time_limit_min=auto"))


def test_a_submission_records_the_number_and_the_next_one_doubles_it_after_a_time_out(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.answers["sinfo"] = SINFO
    asked: list[str] = []

    def sbatch(path: Path, submission: Submission, shape: Shape) -> str:
        script = job_of_runs(submission, shape, path.parent).script(len(submission.tasks))
        asked.extend(option for option in of_sbatch(script) if option.startswith("--time="))
        return str(6 + len(asked))

    monkeypatch.setattr(submit, "sbatch", sbatch)
    items = prepared(tmp_path, *TINY)
    (first,) = submit.submit(items, SubmitOptions(), lambda _: None)
    assert (first.launcher.time_limit_min, first.auto, asked) == (60, True, ["--time=60"])
    folder = items[0].folder
    assert folder.config().launcher.time_limit_min == "auto", "what was asked for"  # type: ignore[attr-defined]
    attempt = folder.claim(job=f"{first.token}.7.0")
    assert attempt is not None
    attempt.describe(processes=1, device_type="cpu", oversubscribed=False)
    attempt.finish("killed", "interrupted by SIGTERM")
    fake.answers["sacct"] = f"7|TIMEOUT|{first.name}\n"
    (second,) = submit.submit(items, SubmitOptions(), lambda _: None)
    assert (second.launcher.time_limit_min, asked[1:]) == (120, ["--time=120"])
    assert {each.launcher.limit_min for each in record.submissions(folder.path.parent)} == {60, 120}


def test_a_run_that_has_had_all_that_a_partition_allows_in_vain_is_not_started_again(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "available", lambda: True)
    fake.answers["sinfo"] = SINFO.replace("infinite", "1:00:00")
    monkeypatch.setattr(submit, "sbatch", lambda *_: "7")
    items = prepared(tmp_path, *TINY)
    (first,) = submit.submit(items, SubmitOptions(), lambda _: None)
    assert (first.launcher.time_limit_min, first.is_most) == (60, True)
    attempt = items[0].folder.claim(job=f"{first.token}.7.0")
    assert attempt is not None
    attempt.describe(processes=1, device_type="cpu", oversubscribed=False)
    attempt.finish("killed", "interrupted by SIGTERM")
    fake.answers["sacct"] = f"7|TIMEOUT|{first.name}\n"
    said: list[str] = []
    assert submit.submit(items, SubmitOptions(), said.append) == []
    assert "it is all that the site or its partition allows" in said[0]


def test_a_plan_is_priced_by_known_times_beside_the_most_that_it_may_cost(tmp_path: Path, fake: FakeSlurm) -> None:
    fake.answers["sinfo"] = SINFO
    items = prepared(tmp_path, *SWEEP)
    ones, twos = of_devices(items, 1), of_devices(items, 2)
    took(ones[0], 3600, waited_s=600)
    took(ones[1], 7200, waited_s=1800)
    took(twos[0], 1800)
    console = Console(width=200, file=io.StringIO())
    accepted, starts = OnSlurm().show_plan(items, states_of(item.folder for item in items), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert (accepted, sum(starts)) == (True, 3)
    hours = {group.shape.devices: str(group.expected_hours(known(items))) for group in job_groups(items)}
    assert hours == {
        1: "4.50 GPU-hours (3.00–6.00)",  # three runs of 1.5 h, between 1 and 2
        2: "3.00 GPU-hours (3.00–3.00)",  # three of half an hour on two devices
    }
    # To start: one run of one device, and two of two devices.
    assert "about 1.50 GPU-hours (1.00–2.00), at most 12.50 GPU-hours (1 job × 1 GPU × 250 min" in text
    assert "about 2.00 GPU-hours (2.00–2.00), at most 14.00 GPU-hours (2 jobs × 2 GPUs × 70 min" in text
    assert "about 3.50 GPU-hours (3.00–4.00), at most 26.50 GPU-hours in all" in text
    assert "time limit 250 min: 2 × the longest done run of the configuration, and 8 min" in text
    assert text.count("jobs of this shape waited 20 min 0 s (10 min 0 s–30 min 0 s)") == 1
    assert sum((group.most_hours for group in job_groups(items)), Hours()) == Hours(gpu=27.0), "3 × 3 h of 1 and of 2"


def test_a_wait_is_from_the_submission_to_the_first_start_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launch.slurm.job import Job
    from tests.launch.fake_slurm import submission

    mine = submission(created_at=1000.0)
    assert Job(mine, "7", ends_at=1000.0 + 90 + 3600).waited_s == 90, "where Slurm says only when it ends"
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1300")
    assert Job(mine, "7", ends_at=9e9).waited_s == 300
    assert Job(mine, "7", restarts=1).waited_s is None
    for for_others in (submission(after=["5"]), submission(tasks=[["a"]] * 65)):  # 64 of an array run at a time
        assert Job(for_others, "7").waited_s is None
    assert RunFolder(tmp_path / "a").attempts() == []
