"""From overrides to the runs of a sweep."""

from launch.sweep.expansion import PlannedRun, expand, one_run

__all__ = ["PlannedRun", "expand", "one_run"]
