"""Check the runs of a plan before any of them starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallelbench.config.build import to_mapping
from parallelbench.config.check import check_run
from parallelbench.config.identity import canonical_json
from parallelbench.config.sites import expanded
from parallelbench.environments import interpreter, require
from parallelbench.errors import ConfigError, Refusals, refuse_token
from parallelbench.measure.environment_match import flatten
from parallelbench.redaction import kind_of_token
from parallelbench.results.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from launch.sweep import PlannedRun
    from parallelbench.config.run import RunConfig


@dataclass(frozen=True)
class Prepared:
    """A run that was checked for where it will train."""

    planned: PlannedRun
    """Its device type is the one that it will have."""
    folder: RunFolder
    device_type: str
    oversubscribed: bool = False

    def write_intent(self) -> Path | None:
        """Write what is to be trained. A result that is to be measured anew is moved out of the sweep before.

        Returns where it is then; None: there was none.
        """
        former = self.put_aside()
        self.folder.write_intent(self.planned.run, self.planned.overrides)
        return former

    def put_aside(self) -> Path | None:
        """Move a result that is to be measured anew out of the sweep; returns where it is then."""
        return self.folder.forget() if self.folder.state().state == "done" else None


def checked(planned: PlannedRun, *, oversubscribed: bool = False) -> Prepared:
    """The checks of every launcher, for a run whose device type is decided; raises `ConfigError`. Writes nothing."""
    run = planned.run
    _refuse_secrets(run)
    check_run(run, run.device)
    check_data(run)
    require(run.strategy.framework, run.device)
    check_engine(run)
    return Prepared(planned, RunFolder.of(run), run.device, oversubscribed)


def _refuse_secrets(run: RunConfig) -> None:
    """Refuse a configuration that holds a token; it would be in every run's folder, in reports and in bundles."""
    plain = to_mapping(run)
    if kind_of_token(canonical_json(plain)):
        for key, value in flatten(plain).items():
            refuse_token(str(value), where=key)


def prepare_all(plan: Sequence[PlannedRun], prepare: Callable[[PlannedRun], Prepared]) -> list[Prepared]:
    """Check every run before any starts; raises `ConfigError` that names all that are refused. Writes nothing."""
    prepared: list[Prepared] = []
    reasons: list[str] = []
    for planned in plan:
        try:
            prepared.append(prepare(planned))
        except ConfigError as error:
            run = planned.run
            name = f"{run.data.name}, {run.model.name}, {run.strategy.name} × {run.devices}"
            reasons.append(str(error) if len(plan) == 1 else f"{name}: {error}")
    refused, advice = Refusals(), "; the other runs could start without it" if prepared else ""
    for reason in reasons:
        refused.add(f"{reason}{advice}")
    refused.raise_any()
    for results in dict.fromkeys(item.planned.run.results for item in prepared):
        check_writable(expanded(results))
    return prepared


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
