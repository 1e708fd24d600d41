"""What is remembered of a submission, and who may submit."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import pytest

from launch.slurm import record
from parallelbench.errors import ConfigError, StorageError
from tests.helpers import fill_disk
from tests.launch.fake_slurm import submission


def test_a_submission_survives_the_disk(tmp_path: Path) -> None:
    mine = submission(job="17")
    record.write(tmp_path, mine)
    assert record.submissions(tmp_path) == [mine]
    assert (mine.job_of(1), submission(job="17", tasks=[["a"]]).job_of(0), submission().job_of(0)) == (
        "17_1",
        "17",
        None,
    )


def test_an_option_that_an_older_release_did_not_have_is_the_shipped_one(tmp_path: Path) -> None:
    mine = submission(job="17")
    path = record.write(tmp_path, mine)
    plain = json.loads(path.read_text())
    del plain["site"]["max_nodes"], plain["launcher"]["pack"]
    path.write_text(json.dumps(plain))
    assert record.submissions(tmp_path) == [mine]


def test_what_jobs_execute_is_private_under_an_inherited_access_control_list(tmp_path: Path) -> None:
    """Under one, new files don't heed the umask (acl(5)): in a lab's folder the group may write to all of them."""
    everybody = ((0x01, 7), (0x04, 7), (0x20, 7))  # the user, the group, others: rwx
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", tag, mode, 2**32 - 1) for tag, mode in everybody)
    try:
        os.setxattr(tmp_path, "system.posix_acl_default", acl)
    except OSError as error:
        pytest.skip(f"no access control lists here: {error.strerror}")
    (tmp_path / "theirs").touch()
    assert (tmp_path / "theirs").stat().st_mode & 0o022, "the list has its effect"
    sweep = tmp_path / "results" / "sweep"
    with record.lock(sweep):
        path = record.write(sweep, submission())
    assert record.read(path)
    assert [each for each in (sweep, *sweep.rglob("*")) if each.stat().st_mode & 0o022] == []
    before = os.umask(0o077)
    (path.parent / "private").touch()
    os.umask(before)
    assert (path.parent / "private").stat().st_mode & 0o077 == 0


def test_what_others_may_have_written_is_not_executed(tmp_path: Path) -> None:
    path = record.write(tmp_path, submission())
    path.chmod(0o666)
    with pytest.raises(ConfigError, match=r"may be written by others.*chmod go-w"):
        record.read(path)
    path.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        with pytest.raises(ConfigError, match="belongs to another user"):
            record.read(path)


def test_one_process_at_a_time_submits(tmp_path: Path) -> None:
    with record.lock(tmp_path), pytest.raises(ConfigError, match=f"process {os.getpid()} on "), record.lock(tmp_path):
        pass
    with record.lock(tmp_path):
        pass
    assert not list((tmp_path / "submissions").iterdir())


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "submissions" / "lock"
    with record.lock(tmp_path):
        left = path.read_text()
    path.write_text(left)
    with record.lock(tmp_path):
        assert path.read_text().split()[:3] == left.split()[:3]
        assert path.read_text() != left


def test_a_lock_is_believed_whatever_its_process_and_its_machine_are_called(tmp_path: Path) -> None:
    path = tmp_path / "submissions" / "lock"
    with record.lock(tmp_path):
        host, _, _, token = path.read_text().split()
        path.write_text(f"{host} {2**22 + 1} another {token}\n")  # as seen from another container
        os.utime(path, (0, 0))
        with pytest.raises(ConfigError, match="is submitting this sweep"), record.lock(tmp_path):
            pass


def test_a_clock_that_is_ahead_abandons_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "submissions" / "lock"
    path.parent.mkdir(mode=0o700)
    path.write_text("elsewhere 1 another x\n")
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 2 * record.LOCK_ABSENCE_S)
    with pytest.raises(ConfigError, match="process 1 on elsewhere"), record.lock(tmp_path):
        pass


def test_the_lock_of_another_host_is_believed_while_it_is_fresh(tmp_path: Path) -> None:
    path = tmp_path / "submissions" / "lock"
    with record.lock(tmp_path):
        pass
    path.write_text("elsewhere 1 another x\n")
    with pytest.raises(ConfigError, match="process 1 on elsewhere"), record.lock(tmp_path):
        pass
    os.utime(path, (0, 0))
    with record.lock(tmp_path):
        path.write_text("taken over by somebody else meanwhile\n")
    assert path.exists(), "nobody removes another's lock"


def test_a_full_disk_is_a_message(small_disk: Path) -> None:
    sweep = small_disk / "sweep"
    sweep.mkdir(mode=0o755)
    (sweep / "submissions").mkdir(mode=0o700)
    fill_disk(small_disk)
    with pytest.raises(StorageError, match="disk is full"), record.lock(sweep):
        pass
