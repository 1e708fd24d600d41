"""What a rank of any framework does around its training: resume, record, and leave. Loads no framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parallelbench.rank import provenance
from parallelbench.rank.epoch_boundary import EpochBoundary
from parallelbench.rank.likeness import (
    parity_reference,
    reference_warnings,
    rounding,
    statistics_warnings,
    tolerance_warnings,
)
from parallelbench.rank.train import Trainer
from parallelbench.spec.identity import run_id
from parallelbench.spec.plugin import training_plugin
from parallelbench.spec.traits import TRAITS

if TYPE_CHECKING:
    from parallelbench.frameworks.contract import RankWorld
    from parallelbench.loaders.batch_loader import BatchLoader
    from parallelbench.probes.clock import StartUp
    from parallelbench.rank.epoch_boundary import Resumed
    from parallelbench.spec.config import RunConfig
    from parallelbench.spec.dataset import Arrays
    from parallelbench.spec.replica import Replica
    from parallelbench.store.attempt import Attempt
    from parallelbench.store.journal import Journal


class RankSession:
    """One rank's journal and the other ranks during a run; a framework's session adds model, checks and training."""

    _world: RankWorld

    def __init__(self, run: RunConfig, attempt: Attempt, *, journal: Journal, startup: StartUp) -> None:
        self._run, self._attempt, self._journal, self._startup = run, attempt, journal, startup
        info = attempt.info()
        self._warnings = [*(info.warnings if info else ()), *statistics_warnings(run), *tolerance_warnings(run)]
        self._warnings += reference_warnings(run)
        self._traits = TRAITS
        self._keys = {"run_id": run_id(run), "attempt": attempt.number}
        self._trained_with: dict[str, Any] = {"framework": run.strategy.framework, "plugin": training_plugin(run)}

    def _join(self, world: RankWorld) -> None:
        """Go on with this world."""
        self._world = world
        self._boundary = EpochBoundary(self._run, self._attempt, world, journal=self._journal, warn=self._warn)

    def leave(self) -> None:
        """Leave the process group and close the journal."""
        self._journal.close()
        self._world.leave()

    def _resume(self) -> Resumed | None:
        """The state of an earlier attempt, with its warnings."""
        self._phase("resume")
        resumed = self._boundary.resume()
        if resumed is not None:
            self._warnings = [*dict.fromkeys([*resumed.warnings, *self._warnings])]
            if self._world.rank == 0:
                facts = provenance.later_facts(
                    self._attempt.number, self._world, before=resumed.facts, **self._trained_with
                )
                self._facts(**facts)
            self._startup.skip()
        return resumed

    def _describe(self, parameters: int, parity_passed: bool | None) -> None:
        """Columns of the `run` table that are known before training; `parameters`: trainable ones of the model."""
        self._facts(
            parity_passed=parity_passed,
            parity_reference=None if parity_passed is None else parity_reference(self._run),
            rounding=rounding(self._run, self._traits),
            parameters=parameters,
            theoretical_state_bytes=self._run.strategy.state_bytes(self._run, parameters),
            device_name=provenance.device_name(self._world),
            theoretical_bubble=self._run.strategy.bubble(self._run),
        )
        self._record_warnings()

    def _record_environment(self) -> None:
        """Record the environment; the time this takes does not count as start-up."""
        if self._world.rank == 0:
            self._facts(**provenance.first_facts(self._attempt.number, **self._trained_with))
        self._startup.skip()

    def _record_data(self, arrays: Arrays, resumed: Resumed | None) -> None:
        """Record what the data set holds, likewise; a run that goes on must find what it began with."""
        self._facts(**provenance.data_facts(self._run, arrays, self._world, resumed.facts if resumed else None))
        self._startup.skip()

    def _arrays(self) -> Arrays:
        """The data set. One rank per node first writes the files that the loader needs, unless they exist."""
        data, folder = self._run.data, self._run.site.data_folder
        if self._run.loader.writes_files:
            self._phase("conversion")
            if self._world.local_rank == 0:
                self._run.loader.prepare(data, folder)
            self._world.barrier()
            self._startup.skip()  # only the first of many runs converts; its start must not seem slower
        return self._run.loader.arrays(data, folder)

    def _trainer(self, replica: Replica, loader: BatchLoader) -> Trainer:
        return Trainer(
            replica,
            loader,
            run=self._run,
            world=self._world,
            journal=self._journal,
            keys=self._keys,
            startup=self._startup,
            boundary=self._boundary,
        )

    def _finished(self, parity_passed: bool | None) -> None:
        """Record that all epochs are in the journals: a later failure does not prevent the result."""
        if self._world.rank == 0:
            self._journal.event("finished", outcome="parity_failed" if parity_passed is False else "ok")
            self._journal.commit()

    def _warn(self, text: str) -> None:
        """Add a warning at any point of the run."""
        self._warnings.append(text)
        self._record_warnings()

    def _record_warnings(self, **facts: Any) -> None:
        """As a column, and one by one for a later attempt."""
        self._facts(warnings="; ".join(self._warnings) or None, **facts)
        if self._world.rank == 0:
            self._journal.event("warned", texts=self._warnings)

    def _phase(self, name: str) -> None:
        if self._world.rank == 0:
            self._journal.event("phase", phase=name)

    def _facts(self, **facts: Any) -> None:
        """Record columns of the `run` table, on rank 0."""
        if self._world.rank == 0:
            self._journal.event("facts", **facts)
