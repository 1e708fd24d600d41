"""What a user must know of a plugin whose sources have changed since earlier runs of a sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launch.sweep.sources import recorded
from parallelbench.config.plugin import training_plugin
from parallelbench.errors import count_of
from parallelbench.results.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from launch.sweep import PlannedRun
    from launch.sweep.compose import Extension
    from parallelbench.config.run import RunConfig


def notes_on_sources(plan: Sequence[PlannedRun], extension: Extension) -> Iterator[str]:
    """Under which sources of a plugin runs are looked for, where the sweep has runs of others."""
    own: dict[Path, list[RunConfig]] = {}
    for planned in plan:
        if training_plugin(planned.run) is not None:
            own.setdefault(planned.run.sweep_folder, []).append(planned.run)
    for sweep, runs in own.items():
        yield from _of_sweep(sweep, runs, same=extension.same_plugin)


def _of_sweep(sweep: Path, runs: Sequence[RunConfig], *, same: bool) -> Iterator[str]:
    first = runs[0]
    former, now = first.plugin_sources or _UNRECORDED, first.same_plugin
    if now:
        count = "counts as one" if len(runs) == 1 else "count as those"
        yield f"--same-plugin: {count_of(len(runs), 'run')} {count} of {former}, though the sources are {now} now"
    elif same:
        yield f"--same-plugin changes nothing: the latest runs in {sweep} are of the same sources, or there are none"
    elif missing := sum(not RunFolder.of(run).path.exists() for run in runs):
        package = str(training_plugin(first))
        other = recorded(sweep, package)
        if other not in (None, former):
            yield (
                f"{count_of(missing, 'run')} {'is' if missing == 1 else 'are'} new, since {package} has changed: it is "
                f"{former} now, and earlier runs in {sweep} are of {other or _UNRECORDED} (--same-plugin goes "
                "on with those, if no number has changed)"
            )


_UNRECORDED = "sources that were not recorded"
