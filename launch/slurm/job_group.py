"""Runs whose jobs are alike: they make up one array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from launch.slurm import record
from launch.slurm.hours import Hours, most_seconds
from launch.slurm.shape import Shape, charged_devices, shape_of, slurm
from parallelbench.config.plugin import plugin_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launch.preparation import Prepared


@dataclass(frozen=True)
class JobGroup:
    """Runs of one shape, in the order of the plan."""

    shape: Shape
    device_type: str
    runs: list[Prepared]
    submit: str
    """Identifies the command that submits them."""

    def tasks(self) -> list[list[str]]:
        """Which runs each task of the array works through."""
        names = [item.folder.path.name for item in self.runs]
        return [names] if self.runs[0].planned.run.launcher.packed else [[name] for name in names]

    @property
    def most_hours(self) -> Hours:
        """Device-hours if every job is started as often as allowed, and uses its time limit each time."""
        run = self.runs[0].planned.run
        devices, most_s = charged_devices(self.shape, run.site), len(self.tasks()) * most_seconds(slurm(run))
        return Hours.of(most_s, devices=devices, gpus=bool(self.shape.gpus_per_node))


def job_groups(prepared: Sequence[Prepared]) -> list[JobGroup]:
    """Group runs by all that their jobs share: resources, launcher, site, and a user's package."""
    groups: dict[tuple[Any, ...], JobGroup] = {}
    submit = record.new_token()
    for item in prepared:
        run, device_type = item.planned.run, item.device_type
        shape = shape_of(run, device_type)
        key = (shape, device_type, msgspec.json.encode([run.launcher, run.site, plugin_of(run), run.same_plugin]))
        groups.setdefault(key, JobGroup(shape, device_type, [], submit)).runs.append(item)
    return list(groups.values())
