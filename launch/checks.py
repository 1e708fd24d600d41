"""The checks of runs before any of them starts. They write nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from launch.launcher import Prepared
from parallelbench.config.build import to_mapping
from parallelbench.config.identity import canonical_json
from parallelbench.config.run_rules import check_run
from parallelbench.config.sites import expanded
from parallelbench.environments import interpreter, require
from parallelbench.errors import ConfigError, Refusals, refuse_token
from parallelbench.measure.environment_match import flatten
from parallelbench.redaction import kind_of_token
from parallelbench.results.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from launch.sweep import PlannedRun
    from parallelbench.config.run import RunConfig


def checked(planned: PlannedRun, *, oversubscribed: bool = False) -> Prepared:
    """The checks of every launcher, for a run whose device type is decided; raises `ConfigError`. Writes nothing."""
    run = planned.run
    _refuse_secrets(run)
    check_run(run, run.device)
    check_data(run)
    require(run.strategy.framework, run.device)
    check_engine(run)
    return Prepared(planned, RunFolder.of(run), oversubscribed)


def _refuse_secrets(run: RunConfig) -> None:
    """Refuse a configuration that holds a token; it would be in every run's folder, in reports and in bundles."""
    plain = to_mapping(run)
    if kind_of_token(canonical_json(plain)):
        for key, value in flatten(plain).items():
            refuse_token(str(value), where=key)


def prepare_all(plan: Sequence[PlannedRun], prepare: Callable[[PlannedRun], Prepared]) -> list[Prepared]:
    """Check every run before any starts; raises `ConfigError` that names all that are refused. Writes nothing."""
    checked = prepare_each(plan, prepare)
    prepared = [item for item in checked if isinstance(item, Prepared)]
    refusals, advice = Refusals(), "; the other runs could start without it" if prepared else ""
    for planned, item in zip(plan, checked, strict=True):
        if isinstance(item, ConfigError):
            run = planned.run
            name = f"{run.data.name}, {run.model.name}, {run.strategy.name} × {run.devices}: "
            refusals.add(item, before=name if len(plan) > 1 else "", after=advice)
    refusals.raise_any()
    check_results(prepared)
    return prepared


def prepare_each(plan: Sequence[PlannedRun], prepare: Callable[[PlannedRun], Prepared]) -> list[Prepared | ConfigError]:
    """Each run, checked for where it will train, or why it is refused."""
    checked: list[Prepared | ConfigError] = []
    for planned in plan:
        try:
            checked.append(prepare(planned))
        except ConfigError as error:
            checked.append(error)
    return checked


def check_results(prepared: Iterable[Prepared]) -> None:
    """Refuse runs whose results can't be written."""
    for results in dict.fromkeys(item.planned.run.results for item in prepared):
        check_writable(expanded(results, "results"))


def check_data(run: RunConfig) -> None:
    """Refuse a run whose data set is not prepared."""
    run.data.require_files(run.site.data_folder)


def check_engine(run: RunConfig) -> None:
    """Refuse a run whose preprocessing engine is not installed here, or in another version."""
    if run.preprocess.engine != "none":
        interpreter(run.preprocess.engine)


def check_writable(path: Path, *, option: str = "results=") -> None:
    """Refuse a folder that can't be written, without writing; `option` chooses it."""
    # os.path.exists is also right about folders that can't be looked into and names that are too long.
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if os.path.exists(parent))
    if too_long := [part for part in path.parts if len(os.fsencode(part)) > os.pathconf(existing, "PC_NAME_MAX")]:
        raise ConfigError(f"{option}{path} can't be written: {too_long[0][:20]}… is too long a name")
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK) or _read_only(existing):
        raise ConfigError(f"{option}{path} can't be written ({existing}): choose another folder with {option}DIR")


def _read_only(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
