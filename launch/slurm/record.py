"""Submissions on disk: `<sweep>/submissions/<token>/`, written before Slurm is asked, so that no job is ever lost.

The folder holds `submission.json` and what submitit needs. The token is a part of the jobs' name: a submission that was
cut off before it learned its job's id finds the job by it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import socket
import stat
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from parallelbench.config.sites import Site, SlurmLauncher, with_new_options
from parallelbench.errors import ConfigError
from parallelbench.results import liveness
from parallelbench.results.files import is_there, storage_errors, write_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


FOLDER = "submissions"
LOCK_ABSENCE_S = 120.0
"""A lock whose process can't be seen to live from here counts as abandoned after this time without a touch."""


def asks_for_gpus(site: Site, device_type: str) -> bool:
    """Whether a run's devices are GPUs that Slurm allocates.

    A CPU run at a GPU site leaves the GPUs to others; a site of CPUs may have GPUs that are only allocated.
    """
    return bool(site.gpus_per_node) and (device_type == "cuda" or site.device == "cpu")


def has_gpus(site: Site, device_type: str) -> bool:
    """Whether a run's job takes GPUs from others: those that it asks for, or all of nodes that it has to itself."""
    return asks_for_gpus(site, device_type) or (site.exclusive and bool(site.gpus_per_node))


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """One `sbatch`: which runs, for which job, with which settings."""

    token: str
    created_at: float
    """Unix time, s."""
    job: str | None
    """The job's id; null: not known (yet)."""
    tasks: list[list[str]]
    """Task → the names of the run folders it works through: one, unless packed."""
    devices: int
    """Devices that each task is charged for."""
    device_type: str
    launcher: SlurmLauncher
    """With the time limit as a number."""
    auto: bool = False
    """Whether `launcher.time_limit_min=auto` has chosen that number."""
    is_most: bool = False
    """Whether it is all that the site or the cluster allows."""
    site: Site
    """Both as of this submission; the runs' configurations keep those of the first one."""
    plugin: list[str]
    """A user's package and the folder it is in; empty: none."""
    umask: int = 0o077
    """Umask for run folders. The job's own folder, whose files are executed, has 077."""
    submit: str = ""
    """Identifies the `submit` command, which may call sbatch several times; empty in submissions of older releases."""
    after: list[str] = []
    """Arrays of an earlier turn: its own jobs wait until all of theirs have started."""
    cluster: str = ""
    """Name of the cluster that was asked, since others may see the same files; empty in submissions of older releases,
    which count as those of any."""
    cancelled: bool | list[str] = False
    """Runs whose jobs `cancel` has ended, which another cluster can't see in its queue; false: none; true, in
    submissions of older releases: all."""

    def is_elsewhere(self, here: str) -> bool:
        """Whether it went to another cluster than the one named; empty: that name is not known."""
        return bool(here and self.cluster) and self.cluster != here

    def with_cancelled(self, runs: Iterable[str]) -> Submission:
        """The record once `cancel` has ended the jobs of these runs, as far as they are its own."""
        over = set(runs)
        own = [run for names in self.tasks for run in names if run in over or self.has_cancelled(run)]
        return msgspec.structs.replace(self, cancelled=own) if own else self

    def has_cancelled(self, run: str) -> bool:
        """Whether `cancel` has ended the job of a run."""
        return self.cancelled if isinstance(self.cancelled, bool) else run in self.cancelled

    @property
    def name(self) -> str:
        """The jobs' name in Slurm."""
        return f"parallelbench-{self.token}"

    @property
    def has_gpus(self) -> bool:
        """Whether `devices` are GPUs that nobody else has meanwhile."""
        return has_gpus(self.site, self.device_type)

    def job_of(self, task: int) -> str | None:
        """What Slurm calls a task: `17_3`, or `17` where there is only one."""
        if self.job is None:
            return None
        return f"{self.job}_{task}" if len(self.tasks) > 1 else self.job


def new_token() -> str:
    """Short, unique, safe in a job's name and a path."""
    return f"{time.strftime('%m%d%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"


def folder_of(sweep: Path, token: str) -> Path:
    """Where a submission is kept."""
    return sweep / FOLDER / token


def write(sweep: Path, submission: Submission) -> Path:
    """Write or replace a record; returns its path."""
    folder = folder_of(sweep, submission.token)
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _inherit_nothing(folder)
    path = folder / "submission.json"
    write_file(path, msgspec.json.encode(submission), private=True)
    return path


def _inherit_nothing(folder: Path) -> None:
    """Take a folder's default access control list away: under one, new files don't heed the umask (acl(5))."""
    with contextlib.suppress(OSError):  # mostly there is none
        os.removexattr(folder, "system.posix_acl_default")


@contextmanager
def private(mask: int = 0o077) -> Iterator[None]:
    """Create files that only the user can read and write, under any umask, because jobs execute them.

    `mask`: with this umask instead.
    """
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def readable_by_others() -> int:
    """The umask of a folder of results: others may read it if the user allows that, and never write to it."""
    before = os.umask(0o077)
    os.umask(before)
    return before | 0o022


def read(path: Path) -> Submission:
    """Read a record; raises `ConfigError` where it is missing, damaged, or somebody else could have written it.

    Jobs execute its content, so only the user's own files count.
    """
    require_own(path.parent)
    require_own(path)
    try:
        return msgspec.convert(with_new_options(msgspec.json.decode(path.read_bytes(), type=dict)), Submission)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no submission: {error}") from None


def submissions(sweep: Path) -> list[Submission]:
    """All submissions of a sweep, oldest first; raises `ConfigError` as `read` does."""
    if is_there(sweep / FOLDER):
        require_own(sweep)
        require_own(sweep / FOLDER)
    records = filter(None, map(_unless_withdrawn, sweep.glob(f"{FOLDER}/*/submission.json")))
    return sorted(records, key=lambda submission: (submission.created_at, submission.token))


def _unless_withdrawn(path: Path) -> Submission | None:
    """The record; None where another process has withdrawn it since it was listed."""
    try:
        return read(path)
    except ConfigError:
        if is_there(path):
            raise
        return None


def age_s(sweep: Path, submission: Submission) -> float:
    """How long ago a submission was written, s; not by `created_at`, which another login node's clock may have told."""
    try:
        return liveness.age_s(folder_of(sweep, submission.token) / "submission.json")
    except FileNotFoundError:
        return 0.0  # another process withdraws it now


def belongs_to_another(sweep: Path) -> bool:
    """Whether somebody else has submitted a sweep: only that user may read the submissions."""
    try:
        return (sweep / FOLDER).stat().st_uid != os.geteuid()
    except OSError:
        return True


def withdraw(sweep: Path, submission: Submission) -> None:
    """Delete the record of a submission that never reached Slurm."""
    shutil.rmtree(folder_of(sweep, submission.token), ignore_errors=True)


def require_own(path: Path) -> None:
    """Refuse files and folders of other users, and those that others may write to."""
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{path} belongs to another user, and jobs would execute it: use your own folder")
    if status.st_mode & 0o022:
        raise ConfigError(
            f"{path} may be written by others, and jobs would execute it: chmod go-w {shlex.quote(str(path))}"
        )


@contextmanager
def lock(sweep: Path) -> Iterator[None]:
    """Let one process at a time submit a sweep; raises `ConfigError` while another one does.

    A file made exclusively, since some cluster file systems ignore flock; one that a dead process left is taken over.
    """
    path = sweep / FOLDER / "lock"
    with storage_errors(path), private(readable_by_others()):
        is_new = not is_there(sweep)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if is_new:  # an inherited access control list may let others write
            sweep.chmod(stat.S_IMODE(sweep.stat().st_mode) & ~0o022)
    require_own(sweep)
    require_own(path.parent)
    _take_over_abandoned(path)
    own, held = _take(path)
    try:
        with liveness.touched(path, every_s=LOCK_ABSENCE_S / 4):  # Slurm may take its time to answer
            yield
    finally:
        _remove(path, held)
        own.release()


def _take(path: Path) -> tuple[liveness.Lock, str]:
    """Make the file; returns the lock on it, and its content."""
    own = path.with_name(f"lock.{secrets.token_hex(4)}")
    with storage_errors(path), contextlib.ExitStack() as undo:
        undo.callback(own.unlink, missing_ok=True)
        own.touch()
        lock = liveness.Lock(own)
        held = f"{socket.gethostname()} {os.getpid()} {lock.machine or '-'} {secrets.token_hex(4)}\n"
        own.write_text(held)
        try:
            os.link(own, path)  # whole, or not at all
        except FileExistsError:
            raise ConfigError(
                f"another process is submitting this sweep ({_holder(path)}): wait for it, "
                f"or remove {path} if there is none"
            ) from None
        undo.pop_all()
        own.unlink()
    return lock, held


def _take_over_abandoned(path: Path) -> None:
    try:
        held = path.read_text()
        _, _, machine, _ = held.split()
        abandoned = not liveness.alive(path, machine, absence_s=LOCK_ABSENCE_S)
    except (OSError, ValueError):
        return
    if abandoned:
        _remove(path, held)


def _remove(path: Path, held: str) -> None:
    """Remove one particular lock. Of several processes that try, one succeeds; who gets another lock restores it."""
    aside = path.with_name(f"lock.{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        if aside.read_text() != held:
            os.link(aside, path)
        aside.unlink()


def _holder(path: Path) -> str:
    try:
        host, pid, *_ = path.read_text().split()
    except (OSError, ValueError):
        return "it has just ended"
    return f"process {pid} on {host}"
