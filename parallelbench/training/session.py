"""What a rank of any framework does around its training: resume, record, and leave. Loads no framework."""

from __future__ import annotations

import json
import time
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from parallelbench.config.components import TRAITS
from parallelbench.config.dataset_check import checked
from parallelbench.config.identity import canonical_json
from parallelbench.config.plugin import training_plugin
from parallelbench.config.sites import SlurmLauncher
from parallelbench.data.content import content_sha256
from parallelbench.errors import ConfigError
from parallelbench.measure import environment
from parallelbench.measure.environment_match import (
    PLUGIN,
    UNLIKE_NODES,
    differences,
    entries,
    is_of_program,
    must_match,
)
from parallelbench.measure.memory import memory_limit
from parallelbench.training.checkpoint import EpochBoundary
from parallelbench.training.checks.comparability import rounding
from parallelbench.training.checks.parity import (
    parity_reference,
    reference_warnings,
    statistics_warnings,
    tolerance_warnings,
)
from parallelbench.training.loop import Trainer
from parallelbench.world import machine
from parallelbench.world.machine import device_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from parallelbench.config.components import Arrays
    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks import Meeting, RankWorld
    from parallelbench.loaders.order import BatchLoader
    from parallelbench.measure.clock import StartUp
    from parallelbench.results.attempt import Attempt
    from parallelbench.results.journal import Journal
    from parallelbench.training.checkpoint import Resumed
    from parallelbench.training.observers import Observer


class Session:
    """One process's journal and the others that keep one, during a run."""

    _world: Meeting

    def __init__(self, run: RunConfig, attempt: Attempt, *, journal: Journal, startup: StartUp) -> None:
        self._run, self._attempt, self._journal, self._startup = run, attempt, journal, startup
        info = attempt.info()
        self._warnings = [*(info.warnings if info else ())]
        self._trained_with: dict[str, Any] = {"framework": run.strategy.framework, "plugin": training_plugin(run)}
        if isinstance(run.launcher, SlurmLauncher):  # no other one's processes come after the site's lines
            self._trained_with["site"] = run.site

    def leave(self) -> None:
        """Leave the process group and close the journal."""
        self._journal.close()
        self._world.leave()

    def _record_environment(self) -> None:
        """Record the environment; the time this takes does not count as start-up."""
        captured = captured_environment(self._world, **self._trained_with)
        if self._world.rank == 0:
            self._facts(**first_facts(self._attempt, captured))
            if unlike := captured.get(UNLIKE_NODES):
                self._warn(
                    f"its nodes are unlike ({unlike}), so its times are compared only with those of nodes that are "
                    "unlike in the same way; choose nodes of one kind with site.constraint"
                )
        self._facts(**memory_limit(self._world))
        self._startup.skip()

    def _finished(self, parity_passed: bool | None, *, done: str = "") -> None:
        """Record that all epochs are in the journals: a later failure does not prevent the result.

        `done`: what was done, where that is something else than to train the epochs.
        """
        if self._world.rank == 0:
            self._journal.event("finished", outcome="parity_failed" if parity_passed is False else "ok", done=done)
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


class RankSession(Session):
    """One rank's journal and the other ranks during a run; a framework's session adds model, checks and training."""

    _world: RankWorld

    def __init__(self, run: RunConfig, attempt: Attempt, *, journal: Journal, startup: StartUp) -> None:
        super().__init__(run, attempt, journal=journal, startup=startup)
        self._warnings += [*statistics_warnings(run), *tolerance_warnings(run)]
        self._warnings += reference_warnings(run)
        self._traits = TRAITS
        self._parity_model: str | None = None
        """What of the model parity was checked on; None: the whole."""

    def _join(self, world: RankWorld) -> None:
        """Go on with this world."""
        self._world = world
        self._boundary = EpochBoundary(self._run, self._attempt, world, journal=self._journal, warn=self._warn)

    def _resume(self) -> Resumed | None:
        """The state of an earlier attempt, with its warnings."""
        self._phase("resume")
        resumed = self._boundary.resume()
        if resumed is not None:
            self._warnings = [*dict.fromkeys([*resumed.warnings, *self._warnings])]
            captured = captured_environment(self._world, **self._trained_with)
            if self._world.rank == 0:
                self._facts(**later_facts(self._attempt, self._world, captured, before=resumed.facts))
            self._startup.skip()
        return resumed

    def _describe(self, parameters: int, parity_passed: bool | None, *, frozen: int = 0) -> None:
        """Columns of the `run` table that are known before training; `parameters`: trainable ones of the model, beside
        those that are `frozen`.
        """
        self._facts(
            parity_passed=parity_passed,
            parity_reference=None if parity_passed is None else parity_reference(self._run),
            parity_model=None if parity_passed is None else self._parity_model,
            rounding=rounding(self._run, self._traits),
            parameters=parameters,
            theoretical_state_bytes=self._run.strategy.state_bytes(self._run, parameters, frozen=frozen),
            device_name=machine.device_name(self._world),
            theoretical_bubble=self._run.strategy.bubble(self._run),
        )
        self._record_warnings()

    def _record_data(self, arrays: Arrays, resumed: Resumed | None) -> None:
        """Record what the data set holds, likewise; a run that goes on must find what it began with."""
        self._facts(**data_facts(self._run, arrays, self._world, resumed.facts if resumed else None))
        self._startup.skip()

    def _arrays(self) -> Arrays:
        """The data set, held against what it declares."""
        return checked(self._run.data, self._run.data.load(self._run.site.data_folder))

    def _trainer(self, replica: Replica, loader: BatchLoader, *more: Observer) -> Trainer:
        return Trainer(
            replica,
            loader,
            run=self._run,
            world=self._world,
            journal=self._journal,
            startup=self._startup,
            boundary=self._boundary,
            more=more,
        )


def captured_environment(world: Meeting, **trained_with: Any) -> dict[str, Any]:
    """The environment of this rank's node, on rank 0 with how the other nodes' is unlike it; empty on ranks that are
    not the first of their node. A collective.

    `trained_with`: what `environment.capture` takes.
    """
    ranks = world.gather([world.local_rank, [uuid for _, uuid in world.gpus()]])
    nodes = [*accumulate(int(local_rank == 0) for local_rank, _ in ranks)]  # the ranks of a node follow each other
    gpus = [uuid for node, (_, uuids) in zip(nodes, ranks, strict=True) if node == nodes[world.rank] for uuid in uuids]
    captured: dict[str, Any] = {}
    if world.local_rank == 0:
        captured = json.loads(canonical_json(environment.capture(gpus=gpus, **trained_with)))
    relevant = {key: value for key, value in entries(captured).items() if must_match(key)}
    of_nodes = [json.loads(each) for each in world.gather(canonical_json(relevant) if captured else "") if each]
    return captured | ({UNLIKE_NODES: unlike} if world.rank == 0 and (unlike := _unlike(of_nodes)) else {})


def _unlike(nodes: Sequence[Mapping[str, Any]]) -> str:
    """ "cpu: EPYC 7543 on node 0, 2; EPYC 7763 on node 1": of what must match, all that differs, by the nodes' numbers
    as in the names of their logs.
    """
    keys = sorted({key for other in nodes[1:] for key in differences(nodes[0], other)})
    told = []
    for key in keys:
        having: dict[str, list[str]] = {}
        for number, node in enumerate(nodes):
            having.setdefault(str(node.get(key)), []).append(str(number))
        told.append(f"{key}: " + "; ".join(f"{value} on node {', '.join(those)}" for value, those in having.items()))
    return ", ".join(told)


def first_facts(attempt: Attempt, captured: Mapping[str, Any]) -> dict[str, str]:
    """Columns of the `run` table about the environment of a run's first attempt."""
    return {"environment_json": canonical_json(captured), "attempts_json": _attempts([], attempt, captured)}


def later_facts(
    attempt: Attempt, world: RankWorld, captured: Mapping[str, Any], *, before: Mapping[str, Any]
) -> dict[str, str]:
    """The same of an attempt that goes on; `before` are the columns that the attempts before it have recorded."""
    facts = {"attempts_json": _attempts(json.loads(before.get("attempts_json") or "[]"), attempt, captured)}
    if changed := _elsewhere(before, captured, device_name(world)):
        facts["resumed_elsewhere"] = ", ".join(dict.fromkeys(filter(None, [before.get("resumed_elsewhere"), changed])))
    return facts


def data_facts(run: RunConfig, arrays: Arrays, world: RankWorld, before: Mapping[str, Any] | None) -> dict[str, str]:
    """The column of what the data set holds; `before` are the columns that earlier attempts have recorded, if any.

    A collective. Raises `ConfigError` on every rank where the data set has changed since.
    """
    content, recorded = "", None
    if world.rank == 0:
        content = content_sha256(run.data, run.site.data_folder, arrays)
        recorded = (before or {}).get("data_sha256")  # None also where an older release did not record it
    if any(world.gather(recorded not in (None, content))):
        found = f": its sha256 was {recorded[:12]}…, now it is {content[:12]}…" if recorded else ", as rank 0 says"
        raise ConfigError(
            f"the data set has changed since this run began{found}; put the old files back, or delete the run's folder "
            "and submit again"
        )
    return {"data_sha256": content} if content and before is None else {}


def _attempts(before: list[dict[str, Any]], attempt: Attempt, captured: Mapping[str, Any]) -> str:
    git, info = captured.get("git") or {}, attempt.info()
    own: dict[str, Any] = {"attempt": attempt.number, "submit": (info.submit or None) if info else None}
    own |= {"began_at": time.time(), "host": captured.get("host")}
    own |= {"commit": git.get("commit"), "dirty": git.get("dirty")}
    return canonical_json([*before, own | ({PLUGIN: captured[PLUGIN]} if PLUGIN in captured else {})])


def _elsewhere(before: Mapping[str, Any], captured: Mapping[str, Any], device: str) -> str:
    """How this attempt's environment differs from the first attempt's; empty where it doesn't."""
    first = json.loads(before.get("environment_json") or "{}")
    changed = differences(entries(first), entries(captured), lambda key: must_match(key) or is_of_program(key))
    if device != before.get("device_name"):
        changed = {"device_name": (before.get("device_name"), device)} | changed
    return ", ".join(f"{key}: {then} and {now}" for key, (then, now) in changed.items())


def require_one_type(world: RankWorld) -> None:
    """Refuse GPUs of several types under one run; a node sees only its own. A collective."""
    if world.size == 1 or world.device_type != "cuda":
        return
    ranks: dict[str, list[str]] = {}
    for rank, name in enumerate(world.gather(device_name(world))):
        ranks.setdefault(name, []).append(str(rank))
    if len(ranks) > 1:
        found = "; ".join(f"{name} on rank {', '.join(those)}" for name, those in sorted(ranks.items()))
        raise ConfigError(
            f"GPUs of several types would train together, at the slowest one's pace ({found}): choose a type with "
            "site.gpu_type, or nodes of one kind with site.constraint"
        )
