"""One rank's run from start to end, in the order in which it happens. Importing this loads torch."""

from __future__ import annotations

import functools
import time
import traceback
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec
import torch

from parallelbench.config.build import package_of
from parallelbench.errors import ConfigError, EngineError, StorageError
from parallelbench.loaders.resident import Resident
from parallelbench.measure.count_layers import count_facts
from parallelbench.measure.machine_probe import probe
from parallelbench.measure.memory import release
from parallelbench.models.gpt import Gpt
from parallelbench.models.initial import unfilled
from parallelbench.models.modules import built
from parallelbench.optim.optimizers import FirstOrder
from parallelbench.results.tables import INITIAL
from parallelbench.training import session
from parallelbench.training.checks.before_training import Initial, check_arithmetic, check_parity
from parallelbench.training.checks.closing import ClosingCheck
from parallelbench.training.checks.comparability import Finding, checks_arithmetic, why_too_large
from parallelbench.training.checks.components import (
    check_logits,
    check_rate,
    check_scores,
    check_traits,
    check_update,
    traits_of,
)
from parallelbench.training.checks.evaluations import DrawnEvaluation
from parallelbench.training.checks.excerpt import excerpt
from parallelbench.training.checks.parity import as_checked, checks_parity, traits_warnings
from parallelbench.training.failure import give_up
from parallelbench.training.replica import new_replica
from parallelbench.training.session import RankSession
from parallelbench.world import machine
from parallelbench.world.generators import Generators
from parallelbench.world.numerics import Numerics, set_precision
from parallelbench.world.settings import configure_torch
from parallelbench.world.world import World, join

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from parallelbench.config.components import Arrays, Shard
    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.loaders.order import BatchLoader
    from parallelbench.measure.clock import StartUp
    from parallelbench.measure.machine_probe import Moment
    from parallelbench.results.attempt import Attempt
    from parallelbench.results.journal import Journal
    from parallelbench.training.checkpoint import Resumed
    from parallelbench.training.loop import Trainer


PLAIN_DATA_BYTES = 2**30
"""Largest images that plain code holds in memory whatever the run's loader."""


class Session(RankSession):
    """One rank's process group, data, model and journal during a run."""

    _world: World

    def __init__(
        self, run: RunConfig, attempt: Attempt, *, device_type: str, journal: Journal, startup: StartUp
    ) -> None:
        super().__init__(run, attempt, journal=journal, startup=startup)
        configure_torch(run, device_type)
        self._startup.done("imports")
        world = join(device_type, devices=run.devices, timeout_s=run.launcher.collective_timeout_s, nccl=run.nccl)
        session.require_one_type(world)
        world.wake()
        self._startup.done("process_group")
        self._join(world)

    def train(self) -> None:
        """Check parity, then train, or resume where an earlier attempt stopped; results go to the journal."""
        resumed = self._resume()
        if resumed is None:
            self._record_environment()
        arrays, run = self._training_set(resumed), self._run
        if not run.epochs:
            self._end_untrained()
            return
        self._check_parts()
        parity_passed = self._check_parity(arrays) if resumed is None and checks_parity(run) else None
        self._check_arithmetic(arrays)
        self._phase("model")
        set_precision(run.precision)
        model = new_model(run)
        self._parameters = sum(p.numel() for p in model.parameters())
        self._too_large: str = self._world.gather(why_too_large(self._parameters))[0]
        if resumed is None:
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            self._describe(trained, parity_passed, frozen=self._parameters - trained)
        else:  # the columns of earlier attempts stay
            parity_passed = resumed.facts.get("parity_passed")
            self._record_warnings(resumed_after=resumed.again())
        replica = self._prepare(model, checks=resumed is None and run.measure.parity)
        del model  # a replica may hold some of its layers only
        loader = self._loader(arrays, run, replica.data_shard)
        release()
        self._startup.done("data")
        with closing(loader):
            if run.compile:
                self._compile(replica, loader)
            if resumed is not None:
                resumed.restore(replica)
                self._require_kept(replica)
            first = 1 if resumed is None else resumed.epoch + 1
            drawn = None
            if run.measure.parity and not self._too_large:
                drawn = DrawnEvaluation(replica, run, self._world, first=first)
            trainer = self._trainer(replica, loader, *filter(None, [drawn]))
            if trainer.train(first=first):
                self._finished(parity_passed)
                self._probe("end")
                # The closing check comes last: it may fail, as on a device that has no room for a second model.
                self._count()
                attributes = bool(run.measure.attribution_steps or run.measure.trace)
                held = attributes and run.measure.parity and not self._too_large
                state = replica.full_state_dict() if held else None
                further = self._attribute(replica, loader) if attributes else 0
                if run.measure.parity:
                    self._close(
                        replica, loader, arrays=arrays, trainer=trainer, trained=state, further=further, drawn=drawn
                    )
        replica.close()

    def _prepare(self, model: nn.Sequential, *, checks: bool) -> Replica:
        """The strategy's replica; whether it begins with the seed's parameters is found out beside the start-up."""
        initial = None
        if checks and not self._too_large:
            self._startup.done("model")
            initial = Initial(model, self._run, self._world)
            self._startup.skip()
        replica = new_replica(model, self._run, self._world)
        if self._run.graph and self._world.size > 1:
            self._watch(replica)
        self._startup.done("model")
        if initial is not None:
            finding = initial.finding(replica, lambda: build_model(self._run))
            self._startup.skip()
        elif checks:
            finding = Finding(INITIAL, self._too_large)
        if checks and self._world.rank == 0:
            self._journal.write("checks", [finding.row(1)])
        draw_apart(self._run, self._world)
        return replica

    def _require_kept(self, replica: Replica) -> None:
        """Refuse to go on with an optimizer that has lost all that it keeps, as where the replica saves none of it."""
        optimizer = self._run.optimizer
        if self._too_large or not isinstance(optimizer, FirstOrder):
            return
        if self._run.precision == "fp16":  # its scaler may have left out every update so far
            return
        lost = []
        for key in optimizer.kept() or ():
            state = replica.full_optimizer_state(key)
            if state and not any(tensor.any() for tensor in state.values()):  # empty but on rank 0
                lost.append(key)
        if found := self._world.gather(", ".join(lost))[0]:
            raise ConfigError(
                f"strategy={self._run.strategy.name}: after the resume {type(replica).__name__} has no {found} of "
                f"optimizer={optimizer.name}, so training would not go on as before: let local_state save the "
                "optimizer's state, or choose launcher.checkpoint=never"
            )

    def _watch(self, replica: Replica) -> None:
        """End this rank where another one hangs while steps are replayed."""
        from parallelbench.frameworks.control_group import PatienceError
        from parallelbench.strategies.graph import CapturedReplica, Progress

        timeout_s = self._run.launcher.collective_timeout_s
        late = PatienceError(f"no captured step was completed within {timeout_s:g} s")
        if isinstance(replica, CapturedReplica):
            give_up_here = functools.partial(give_up, self._attempt, self._world.rank, late)
            replica.progress = Progress(self._world.device, timeout_s, give_up_here)

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
        from parallelbench.preprocess.stage import Preprocessing

        self._phase("preprocessing")
        prepared = Preprocessing(self._run, self._attempt, self._world)
        try:
            prepared.carry_out(arrays)
        except EngineError as error:
            if error.kind == "error":  # a process that was killed says nothing about its engine
                self._facts(device_name=machine.device_name(self._world), preprocess_failed=True)
            raise
        if self._run.epochs:
            self._run, arrays = prepared.training_set(arrays)
        if resumed is None:
            self._journal.write("preprocess", prepared.rows)
            self._facts(**prepared.facts)
        self._startup.skip()
        return arrays

    def _end_untrained(self) -> None:
        """End a run that only preprocesses."""
        self._facts(device_name=machine.device_name(self._world), **self._startup.facts() | {"startup_s": None})
        self._finished(None)
        self._probe("end")

    def _count(self) -> None:
        """Record what training takes at least, and what each layer does, outside all times."""
        if self._world.rank == 0:
            self._facts(**count_facts(self._run, parameters=self._parameters))

    def _probe(self, moment: Moment) -> None:
        """Measure how fast the devices are, outside all times; not where the run's times mean nothing anyway."""
        launcher, info = self._run.launcher, self._attempt.info()
        oversubscribed = info is not None and info.oversubscribed
        if self._run.measure.probe and not (launcher.in_this_process or oversubscribed):
            self._facts(**probe(self._world, moment))
            self._startup.skip()

    def _close(
        self,
        replica: Replica,
        loader: BatchLoader,
        *,
        arrays: Arrays,
        trainer: Trainer,
        trained: Mapping[str, Tensor] | None,
        further: int,
        drawn: DrawnEvaluation | None,
    ) -> None:
        """Hold what was trained against plain code on one device: rows of `checks`, which decide the outcome.

        `trained`: rank 0's copy of it, from before the replica has taken `further` steps.
        """
        self._phase("closing check")
        run, start = self._run, time.perf_counter()
        loader_of = functools.partial(self._plain_loader, arrays)
        closing = ClosingCheck(
            replica,
            loader,
            run=run,
            world=self._world,
            loader_of=loader_of,
            traits=self._traits,
            too_large=self._too_large,
        )
        model = build_model(run) if self._world.rank == 0 and not self._too_large else None
        findings = closing.findings(
            model, evaluated=trainer.evaluations, sent=trainer.sent, drawn=drawn, trained=trained, further=further
        )
        self._journal.write("checks", [finding.row(run.epochs) for finding in findings])
        self._facts(gloo_bytes_per_step_sum=closing.gloo_bytes_per_step_sum)
        self._facts(closing_check_s=time.perf_counter() - start)
        self._journal.commit()

    def _attribute(self, replica: Replica, loader: BatchLoader) -> int:
        """Attribute further steps' time to phases, as `measure` requests; returns how many were taken."""
        measure = self._run.measure
        from parallelbench.measure.attribution import AttributionPass, ring

        self._phase("attribution")
        attribution = AttributionPass(replica, loader, run=self._run, world=self._world)
        if measure.attribution_steps:
            rows = attribution.attribute(measure.attribution_steps)
            self._journal.write("phases", [{"rank": self._world.rank, **row} for row in rows])
            self._facts(**ring(self._world))
        if measure.trace:
            try:
                attribution.trace(self._attempt.trace_file(self._world.rank))
            except StorageError:  # the verdict on what was trained is worth more
                traceback.print_exc()
        self._journal.commit()
        return attribution.steps

    def _check_parts(self) -> None:
        """Refuse a loss, a metric, an optimizer, or a model, that is not what every strategy takes it for."""
        check_scores(self._run, self._world.device)
        check_update(self._run)
        check_rate(self._run)
        if package_of(type(self._run.model)) != "parallelbench":
            check_logits(self._run)  # a test holds shipped models to it: calling one would add to the peak of memory
        self._traits = traits_of(self._run)
        self._startup.skip()
        check_traits(self._run, self._traits)
        self._warnings = [*dict.fromkeys([*self._warnings, *traits_warnings(self._run, self._traits)])]

    def _check_parity(self, arrays: Arrays) -> bool | None:
        """The verdict of the parity check, the same on every rank.

        None where one device can't train the model, and of a model that draws random numbers in evaluation, too.
        """
        if self._traits.draws_in_evaluation:
            return None
        self._phase("parity")
        part = excerpt(as_checked(self._run))
        checked, self._parity_model = part.run, part.smaller
        self._warnings += part.warnings()
        loader_of = functools.partial(self._loader, part.arrays(arrays))
        rows = check_parity(build_model(checked), checked, self._world, loader_of, traits=self._traits)
        self._journal.write("parity", rows or ())
        problems = [sum(not row["passed"] for row in rows or ()), rows is None]
        failed, unchecked = self._world.sum(torch.tensor(problems, dtype=torch.float64)).tolist()
        self._startup.done("parity")
        if unchecked:
            self._warnings.append("parity was not checked: one device has too little memory to train this model alone")
        return None if unchecked else not failed

    def _check_arithmetic(self, arrays: Arrays) -> None:
        """Once on each node, outside the start-up: its ranks load the same libraries."""
        if self._world.local_rank == 0 and checks_arithmetic(self._run, self._world.device_type):
            self._startup.done("model")
            if not why_too_large(sum(p.numel() for p in new_model(self._run).parameters())):
                check_arithmetic(build_model(self._run), self._run, functools.partial(self._plain_loader, arrays))
            release()
            self._startup.skip()

    def _compile(self, replica: Replica, loader: BatchLoader) -> None:
        self._phase("compile")
        torch._dynamo.reset()  # in a process that has trained before, nothing alike is compiled again
        before = compiled_graphs()
        replica.compile_warmup(next(loader.train(epoch=1)))
        self._world.synchronize()
        self._startup.done("compile")
        if not any(self._world.gather(compiled_graphs() - before)):
            raise ConfigError(
                "compile=true, but torch.compile compiled nothing: unset TORCHDYNAMO_DISABLE and "
                "TORCH_COMPILE_DISABLE, take torch.compiler.disable out of the model, or choose compile=false"
            )

    def _loader(self, arrays: Arrays, run: RunConfig, shard: Shard) -> BatchLoader:
        return build_loader(arrays, run, self._world, shard)

    def _plain_loader(self, arrays: Arrays, run: RunConfig, shard: Shard) -> BatchLoader:
        """For plain code, the simplest one: so the run's own is checked as well. It takes the data set's memory."""
        if arrays.train_images.nbytes + arrays.test_images.nbytes <= PLAIN_DATA_BYTES:
            run = msgspec.structs.replace(run, loader=Resident(name="resident"))
        return self._loader(arrays, run, shard)


def compiled_graphs() -> int:
    """Graphs that torch.compile has compiled in this process so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


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
    Generators().seed(run.effective_seed)
    return built(run)


def new_model(run: RunConfig) -> nn.Sequential:
    """The same for a strategy to prepare: one that may be large gets its values layer by layer, by `to_device`.

    Not where a user's own code may look at them before, or make them in another way.
    """
    own = package_of(type(run.model)) == package_of(type(run.strategy)) == "parallelbench"
    return unfilled(run) if own and isinstance(run.model, Gpt) else build_model(run)


def draw_apart(run: RunConfig, world: World) -> None:
    """Give a rank the random numbers that its steps draw (dropout): those of no other rank, but of ranks that compute
    the same values (`Strategy.draws_alike`).
    """
    world.draw_from(f"{run.effective_seed} {world.rank // run.strategy.draws_alike(run)}")
