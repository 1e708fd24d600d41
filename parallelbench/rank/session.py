"""One rank's run from start to end, in the order in which it happens. Importing this loads torch."""

from __future__ import annotations

import functools
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from parallelbench.probes.machine_probe import probe
from parallelbench.probes.memory_probe import release
from parallelbench.rank import provenance
from parallelbench.rank.closing import ClosingCheck
from parallelbench.rank.epoch_boundary import EpochBoundary
from parallelbench.rank.least_flop import least_flop_per_sample
from parallelbench.rank.likeness import checks_parity, rounding, statistics_warnings, tolerance_warnings
from parallelbench.rank.numerics import Numerics, set_precision
from parallelbench.rank.parity import as_checked, check_parity
from parallelbench.rank.torch_settings import configure_torch
from parallelbench.rank.train import Trainer
from parallelbench.rank.world import World, join
from parallelbench.spec.identity import run_id

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.data.dataset import Arrays
    from parallelbench.loaders.batch import Shard
    from parallelbench.loaders.batch_loader import BatchLoader
    from parallelbench.probes.clock import StartUp
    from parallelbench.probes.machine_probe import Moment
    from parallelbench.rank.epoch_boundary import Resumed
    from parallelbench.spec.config import RunConfig
    from parallelbench.store.attempt import Attempt
    from parallelbench.store.journal import Journal
    from parallelbench.strategies.replica import Replica


class Session:
    """One rank's process group, data, model and journal during a run."""

    def __init__(
        self, run: RunConfig, attempt: Attempt, *, device_type: str, journal: Journal, startup: StartUp
    ) -> None:
        self._run, self._attempt, self._journal, self._startup = run, attempt, journal, startup
        info = attempt.info()
        self._warnings = [*(info.warnings if info else ()), *statistics_warnings(run), *tolerance_warnings(run)]
        self._keys = {"run_id": run_id(run), "attempt": attempt.number}
        configure_torch(run, device_type)
        self._startup.done("imports")
        self._world = join(device_type, devices=run.devices, timeout_s=run.launcher.collective_timeout_s, nccl=run.nccl)
        provenance.require_one_type(self._world)
        self._world.wake()
        self._startup.done("process_group")
        self._boundary = EpochBoundary(run, attempt, self._world, journal=journal, warn=self._warn)

    def train(self) -> None:
        """Check parity, then train, or resume where an earlier attempt stopped; results go to the journal."""
        resumed = self._resume()
        if resumed is None:
            self._record_environment()
        arrays, run = self._training_set(resumed), self._run
        if not run.epochs:
            self._end_untrained()
            return
        parity_passed = self._check_parity(arrays) if resumed is None and checks_parity(run) else None
        self._phase("model")
        set_precision(run.precision)
        model = build_model(run)
        if resumed is None:
            self._describe(model, parity_passed)
        else:  # the columns of earlier attempts stay
            parity_passed = resumed.facts.get("parity_passed")
            self._record_warnings(resumed_after=resumed.again())
        replica = run.strategy.prepare(model, run, self._world)
        self._startup.done("model")
        loader = self._loader(arrays, run, replica.data_shard)
        release()
        self._startup.done("data")
        with closing(loader):
            if run.compile:
                self._compile(replica, loader)
            if resumed is not None:
                resumed.restore(replica)
            trainer = self._trainer(replica, loader)
            if trainer.train(first=1 if resumed is None else resumed.epoch + 1):
                self._finished(parity_passed)
                self._probe("end")
                if run.measure.parity:
                    self._close(replica, loader, arrays=arrays, trainer=trainer)
                self._attribute(replica, loader)
                self._count_flop()
        replica.close()

    def _training_set(self, resumed: Resumed | None) -> Arrays:
        """What the run trains on: the data set, or what an engine has made of it, which is no part of the start-up."""
        arrays = self._arrays()
        self._startup.done("data")
        self._record_data(arrays, resumed)
        if resumed is None:
            self._probe("start")
        if self._run.preprocess.engine == "none":
            return arrays
        # Arrow's threads would keep a warm process, which imports this module, from forking.
        from parallelbench.rank.prepared_set import Preprocessing

        self._phase("preprocessing")
        prepared = Preprocessing(self._run, self._attempt, self._world)
        prepared.carry_out(arrays)
        if self._run.epochs:
            self._run, arrays = prepared.training_set(arrays)
        if resumed is None:
            self._journal.write("preprocess", [{**self._keys, **row} for row in prepared.rows])
            self._facts(**prepared.facts)
        self._startup.skip()
        return arrays

    def _end_untrained(self) -> None:
        """End a run that only preprocesses."""
        self._facts(device_name=provenance.device_name(self._world), **self._startup.facts() | {"startup_s": None})
        self._finished(None)
        self._probe("end")

    def _finished(self, parity_passed: bool | None) -> None:
        """Record that all epochs are in the journals: a later failure does not prevent the result."""
        if self._world.rank == 0:
            self._journal.event("finished", outcome="parity_failed" if parity_passed is False else "ok")
            self._journal.commit()

    def _count_flop(self) -> None:
        """Record what training takes at least, outside all times."""
        if self._world.rank == 0:
            self._facts(least_flop_per_sample=least_flop_per_sample(self._run))

    def _probe(self, moment: Moment) -> None:
        """Measure how fast the devices are, outside all times; not where the run's times mean nothing anyway."""
        launcher, info = self._run.launcher, self._attempt.info()
        oversubscribed = info is not None and info.oversubscribed
        if self._run.measure.probe and not (launcher.packed or launcher.in_this_process or oversubscribed):
            self._facts(**probe(self._world, moment))
            self._startup.skip()

    def _close(self, replica: Replica, loader: BatchLoader, *, arrays: Arrays, trainer: Trainer) -> None:
        """Hold what was trained against plain code on one device: rows of `checks`, which decide the outcome."""
        self._phase("closing check")
        run, start = self._run, time.perf_counter()
        loader_of = functools.partial(self._loader, arrays)
        closing = ClosingCheck(replica, loader, run=run, world=self._world, loader_of=loader_of)
        (loss, accuracy), sent_bytes = trainer.evaluated, trainer.step_bytes
        findings = closing.findings(build_model(run), loss=loss, accuracy=accuracy, sent_bytes=sent_bytes)
        self._journal.write("checks", [{**self._keys, **finding.row(run.epochs)} for finding in findings])
        self._facts(gloo_bytes_per_step_sum=closing.gloo_bytes_per_step_sum)
        self._facts(closing_check_s=time.perf_counter() - start)
        self._journal.commit()

    def _attribute(self, replica: Replica, loader: BatchLoader) -> None:
        """Attribute further steps' time to phases, where `measure` requests it."""
        measure = self._run.measure
        if not measure.attribution_steps and not measure.trace:
            return
        from parallelbench.probes.step_attribution import AttributionPass, ring

        self._phase("attribution")
        attribution = AttributionPass(replica, loader, run=self._run, world=self._world)
        if measure.attribution_steps:
            rows = attribution.attribute(measure.attribution_steps)
            self._journal.write("phases", [{**self._keys, "rank": self._world.rank, **row} for row in rows])
            self._facts(**ring(self._world))
        if measure.trace:
            attribution.trace(self._attempt.trace_file(self._world.rank))
        self._journal.commit()

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
                self._facts(**provenance.later_facts(self._attempt.number, self._world, before=resumed.facts))
            self._startup.skip()
        return resumed

    def _describe(self, model: nn.Module, parity_passed: bool | None) -> None:
        parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._facts(
            parity_passed=parity_passed,
            rounding=rounding(self._run),
            parameters=parameters,
            theoretical_state_bytes=self._run.strategy.state_bytes(self._run, parameters),
            device_name=provenance.device_name(self._world),
            theoretical_bubble=self._run.strategy.bubble(self._run),
        )
        self._record_warnings()

    def _warn(self, text: str) -> None:
        """Add a warning at any point of the run."""
        self._warnings.append(text)
        self._record_warnings()

    def _record_warnings(self, **facts: Any) -> None:
        """As a column, and one by one for a later attempt."""
        self._facts(warnings="; ".join(self._warnings) or None, **facts)
        if self._world.rank == 0:
            self._journal.event("warned", texts=self._warnings)

    def _record_environment(self) -> None:
        """Record the environment; the time this takes does not count as start-up."""
        if self._world.rank == 0:
            self._facts(**provenance.first_facts(self._attempt.number))
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
        return self._run.loader.load(data, folder)

    def _check_parity(self, arrays: Arrays) -> bool | None:
        """The verdict of the parity check, the same on every rank; None where one device can't train the model."""
        self._phase("parity")
        checked = as_checked(self._run)
        loader_of = functools.partial(self._loader, arrays)
        rows = check_parity(build_model(checked), checked, self._world, loader_of)
        self._journal.write("parity", [{**self._keys, **row} for row in rows or ()])
        problems = [sum(not row["passed"] for row in rows or ()), rows is None]
        failed, unchecked = self._world.sum(torch.tensor(problems, dtype=torch.float64)).tolist()
        self._startup.done("parity")
        if unchecked:
            self._warnings.append("parity was not checked: one device has too little memory to train this model alone")
        return None if unchecked else not failed

    def _compile(self, replica: Replica, loader: BatchLoader) -> None:
        self._phase("compile")
        replica.compile_warmup(next(loader.train(epoch=1)))
        self._world.synchronize()
        self._startup.done("compile")

    def _loader(self, arrays: Arrays, run: RunConfig, shard: Shard) -> BatchLoader:
        return build_loader(arrays, run, self._world, shard)

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

    def _phase(self, name: str) -> None:
        if self._world.rank == 0:
            self._journal.event("phase", phase=name)

    def _facts(self, **facts: Any) -> None:
        """Record columns of the `run` table, on rank 0."""
        if self._world.rank == 0:
            self._journal.event("facts", **facts)


def build_loader(arrays: Arrays, run: RunConfig, world: World, shard: Shard) -> BatchLoader:
    """The loader of one rank."""
    return run.loader.build(
        arrays,
        run.data,
        device=world.device,
        dtype=Numerics(run.precision, world.device_type).dtype,
        seed=run.effective_seed,
        global_batch_size=run.global_batch_size,
        shard=shard,
        channels_last=run.channels_last,
        steps_per_epoch=run.steps_per_epoch,
    )


def build_model(run: RunConfig) -> nn.Sequential:
    """The initial model of a run, on the CPU: the same bits on every rank and device."""
    torch.manual_seed(run.effective_seed)
    channels, height, _ = run.data.shape
    return run.model.build(in_channels=channels, image_size=height, num_classes=run.data.num_classes)
