"""Every configuration against one device: its speed-up, efficiency, energy ratio and verdict."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from analysis import text
from analysis.comparison.exclusions import excluded
from analysis.comparison.groups import labels
from analysis.comparison.pairing import ComparedRun, Pairing, compared_runs, paired
from analysis.comparison.policy import BASELINE
from analysis.comparison.speed import SpeedVerdict, of_speed
from analysis.metrics import efficiency

if TYPE_CHECKING:
    from analysis.reader import Runs

Configuration = tuple[str, str]
"""Group and configuration."""


def is_baseline(strategy: str, devices: int) -> bool:
    """Whether these runs are what others are compared with."""
    return (strategy, devices) == BASELINE


@lru_cache(maxsize=8)
def against_one_device(runs: Runs) -> dict[Configuration, Pairing]:
    """Every configuration of a group that has a baseline → its counted runs, paired with the baseline's."""
    members: dict[Configuration, list[ComparedRun]] = defaultdict(list)
    baselines: dict[str, list[ComparedRun]] = defaultdict(list)
    rows = labels(runs).join(runs.run.select("run_id", "strategy", "devices"), on="run_id")
    rows = rows.join(excluded(runs), on="run_id", how="anti")
    known = compared_runs(runs)
    columns = ("run_id", "group", "configuration", "strategy", "devices")
    for run_id, group, configuration, strategy, devices in rows.select(columns).rows():
        members[group, configuration].append(known[run_id])
        if is_baseline(strategy, devices):
            baselines[group].append(known[run_id])
    return {key: paired(baselines[key[0]], found) for key, found in members.items() if key[0] in baselines}


def refused(runs: Runs) -> list[str]:
    """The configurations that are not compared with one device, with what differs and the remedy, in sentences."""
    pairings = against_one_device(runs)
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (group, configuration), pairing in pairings.items():
        for issue in pairing.blockers():
            names[group, str(issue)].append(configuration)
    several = len({group for group, _ in pairings}) > 1
    baseline = " × ".join(map(str, BASELINE))
    return [
        f"{text.listed(members)}{f' ({group})' if several else ''} can't be compared with {baseline}: {why}."
        for (group, why), members in names.items()
    ]


def gain(pairing: Pairing | None, *, devices: int, baseline: bool) -> dict[str, Any]:
    """The columns of `summary` that compare with one device."""
    pairing = pairing or Pairing(())
    steady, energy = pairing.speed_up(), pairing.ratio("gpu_energy_per_sample_j")
    whole = pairing.speed_up(with_startup=True)
    verdict = of_speed(steady) if steady else None
    if pairing.blockers():
        verdict = SpeedVerdict.NOT_COMPARABLE
    columns: dict[str, Any] = {
        "speed_up_pairs": steady.n if steady else 0,
        "verdict": SpeedVerdict.BASELINE.value if baseline else verdict and verdict.value,
        "efficiency": efficiency(steady.median if steady else None, devices=devices),
        "efficiency_with_startup": efficiency(whole.median if whole else None, devices=devices),
    }
    for name, ratio in (("speed_up", steady), ("energy_ratio", energy)):
        # Against itself every ratio is 1 by construction: an interval would say nothing.
        low, high = (ratio.low, ratio.high) if ratio and not baseline else (None, None)
        columns |= {name: ratio and ratio.median, f"{name}_low": low, f"{name}_high": high}
    return columns
