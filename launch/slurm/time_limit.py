"""The time limits of jobs: as asked for or, with `launcher.time_limit_min=auto`, from what done runs have taken."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from launch.known_times import NOTHING_KNOWN, Known
from parallelbench.config.sites import SlurmLauncher
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from launch.launcher import Prepared
    from parallelbench.config.run import RunConfig
    from parallelbench.config.sites import Site


UNKNOWN_MIN = 60
"""Limit where no run of the sweep is done."""
OF_CONFIGURATION = 2.0
"""Factor on the longest done run of a run's own configuration."""
OF_SWEEP = 4.0
"""Factor on the longest done run of the sweep, where none of the configuration is done."""
AFTER_TIMEOUT = 2.0
"""Factor on the limit that a run has reached."""
START_S = 300.0
"""For what a job does before its run begins: modules, set-up lines, a container."""
STEP_MIN = 5
"""Limits are rounded up to multiples, so that they stay the same from one submission to the next."""
MOST_MIN = 1_000_000
"""The largest limit that `launcher.time_limit_min` takes."""
WARNING_OFF_BY_S = 60
"""Slurm looks at its jobs' times about once a minute (sbatch's manual, --signal)."""


@dataclass(frozen=True)
class Limit:
    """The time limit of jobs of one shape."""

    minutes: int
    why: str = ""
    """What it follows from; empty: it was asked for."""
    is_most: bool = False
    """Whether it is all that the site or the cluster allows."""


@dataclass(frozen=True)
class Limits:
    """What limits are chosen by."""

    known: Known = NOTHING_KNOWN
    reached_min: Mapping[str, int] = field(default_factory=dict)
    """Name of a run's folder → the limit, in minutes, that ended its latest job."""
    most_min: Callable[[Site], int | None] = lambda site: None
    """Longest job, in minutes, that the cluster starts on a site's partitions; None: not known."""

    def of(self, items: Sequence[Prepared]) -> Limit:
        """The limit of jobs that these runs have or, packed, share; raises `ConfigError` where it leaves no time."""
        run = items[0].planned.run
        launcher = slurm(run)
        if launcher.time_limit_min != "auto":
            return Limit(launcher.time_limit_min)
        least = _least_min(launcher)
        own = [self._of_configuration_s(item) for item in items]
        needed = [own_s or self._of_sweep_s(item) for own_s, item in zip(own, items, strict=True)]
        if not self.known.count:
            found = Limit(max(UNKNOWN_MIN, least), "no run of the sweep is done")
        else:
            longest_s = sum(needed) if launcher.packed else max(needed)
            which = "of the configuration" if all(own) else "of the sweep"
            factor = OF_CONFIGURATION if all(own) else OF_SWEEP
            why = f"{factor:g} × the longest done run {which}, and {least} min"
            found = Limit(least + math.ceil(longest_s / 60), why)
        reached = max((self.reached_min.get(item.folder.path.name, 0) for item in items), default=0)
        if (more := math.ceil(AFTER_TIMEOUT * reached)) > found.minutes:
            found = Limit(more, f"{AFTER_TIMEOUT:g} × the {reached} min that a job has reached")
        return self._at_most(Limit(_rounded(found.minutes), found.why), run)

    def _of_configuration_s(self, item: Prepared) -> float:
        """Time for a run by those of its configuration, s; 0: none is done."""
        return OF_CONFIGURATION * max((each.took_s for each in self.known.same(item)), default=0.0)

    def _of_sweep_s(self, item: Prepared) -> float:
        """Time for a run by the others of its sweep, s, as if fewer devices took longer in proportion; 0: none is."""
        devices = item.planned.run.devices
        return OF_SWEEP * max(self.known.scaled_s(devices), default=0.0)

    def _at_most(self, found: Limit, run: RunConfig) -> Limit:
        """The limit, as far as the site and the cluster allow it."""
        allowed = {"site.max_time_min": run.site.max_time_min, "the partition": self.most_min(run.site)}
        for what, most in allowed.items():
            if most is not None and most <= found.minutes:
                found = Limit(most, f"all that {what} allows", is_most=True)
        _require_time(run, found.minutes)
        return found


def check_time(run: RunConfig) -> None:
    """Raise `ConfigError` for a limit above the site's, and where no time is left before Slurm's warning."""
    asked, most = slurm(run).time_limit_min, run.site.max_time_min
    if asked == "auto":
        _require_time(run, most or MOST_MIN)
        return
    if most is not None and asked > most:
        raise ConfigError(
            f"launcher.time_limit_min={asked}, but site={run.site.name} allows a job site.max_time_min={most}: lower it"
        )
    _require_time(run, asked)


def _require_time(run: RunConfig, minutes: int) -> None:
    """Raise `ConfigError` where a job of so many minutes could be warned of its end before its run begins."""
    launcher = slurm(run)
    if launcher.signal_delay_s + WARNING_OFF_BY_S < 60 * minutes:
        return
    asked = launcher.time_limit_min != "auto"
    limit = f"launcher.time_limit_min={minutes}" if asked else f"jobs of at most {minutes} min"
    fix = "raise launcher.time_limit_min or lower launcher.signal_delay_s" if asked else "lower launcher.signal_delay_s"
    raise ConfigError(
        f"launcher.signal_delay_s={launcher.signal_delay_s} with {limit}: Slurm's warning can come "
        f"{WARNING_OFF_BY_S} s early, so a run would be stopped as soon as it starts: {fix}"
    )


def slurm(run: RunConfig) -> SlurmLauncher:
    """The launcher of a run that goes to Slurm."""
    assert isinstance(run.launcher, SlurmLauncher), f"launcher={run.launcher.name}"
    return run.launcher


def _least_min(launcher: SlurmLauncher) -> int:
    """What a job needs besides its run: the time before it, and from Slurm's warning on."""
    return math.ceil((START_S + launcher.signal_delay_s + WARNING_OFF_BY_S) / 60)


def _rounded(minutes: int) -> int:
    return STEP_MIN * math.ceil(minutes / STEP_MIN)
