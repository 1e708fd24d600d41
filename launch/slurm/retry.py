"""Whether a run that Slurm has ended is worth another try as it was, or what must change before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launch.launcher import saved
from launch.slurm.sbatch import WARNING_OFF_BY_S, slurm

if TYPE_CHECKING:
    from launch.slurm.record import Submission
    from parallelbench.config.run import RunConfig
    from parallelbench.config.sites import Site, SlurmLauncher
    from parallelbench.results.folder import RunFolder, State


def ran_out(folder: RunFolder, state: State, submission: Submission) -> bool:
    """Whether a run stopped by itself when Slurm warned it of its time limit, and not when somebody else did."""
    attempts = folder.attempts()
    info = attempts[-1].info() if attempts else None
    if state.label != "timeout" or state.outcome is None or info is None:
        return False
    limit_s = 60.0 * submission.launcher.time_limit_min - submission.launcher.signal_delay_s
    return state.outcome.finished_at - info.launched_at > limit_s - WARNING_OFF_BY_S


def what_must_change(folder: RunFolder, ended: str, submission: Submission, run: RunConfig | None) -> str:
    """What must change before a run that Slurm has ended is worth another try; empty: nothing, or it has changed in
    `run` already. `ended`: as Slurm says.
    """
    attempts = folder.attempts()
    supervisor = attempts[-1].supervisor() if attempts else None
    if supervisor is None or not supervisor.job.startswith(f"{submission.token}."):
        return ""  # something else has tried it since
    had, site = submission.launcher, submission.site
    has, its_site = (slurm(run), run.site) if run is not None else (had, site)
    asks = its_site.memory_by != "none"
    if ended == "OUT_OF_MEMORY" and asks and _memory_gib(has, its_site) <= _memory_gib(had, site):
        return f"out of host memory: raise launcher.memory_gib_per_device above {_memory_gib(had, site):g}"
    if ended == "TIMEOUT" and has.time_limit_min <= had.time_limit_min and not saved(folder):
        return f"nothing was saved within launcher.time_limit_min={had.time_limit_min}: raise it"
    return ""


def _memory_gib(launcher: SlurmLauncher, site: Site) -> float:
    """Host memory that a job asks for with each device, GiB."""
    return launcher.memory_gib_per_device or site.memory_gib_per_device
