"""The closing check: what has been trained is held against plain code, and what a run says of itself against that."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from contextlib import closing, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallelbench.config.components import EXACT, TRAITS, Shard
from parallelbench.config.run import own_reference
from parallelbench.loaders.order import endless
from parallelbench.measure.counted_bytes import CountedBytes
from parallelbench.optim.optimizers import Lbfgs
from parallelbench.training.checks.comparability import CLOSING_STEPS, Finding, pieces_of
from parallelbench.training.checks.draws import DrawnNumbers
from parallelbench.training.checks.parity import gathered
from parallelbench.training.checks.plain import (
    HALF,
    PlainModel,
    TooSlowError,
    in_evaluation,
    kept_of_one,
    stay_in_evaluation,
)
from parallelbench.training.checks.plain_step import DRAWS_ALWAYS, Judge, Taken
from parallelbench.world.numerics import dtype_of
from parallelbench.world.settings import changed_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from parallelbench.config.components import Traits
    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.loaders.order import BatchLoader, LoaderOf
    from parallelbench.measure.traffic import Sent
    from parallelbench.training.checks.evaluations import DrawnEvaluation
    from parallelbench.world.world import World


_PRODUCTS = ("convolution", "mm", "addmm", "bmm", "baddbmm", "linear")
_WAYS = ("fused", "foreach")


class ObservedWork(TorchDispatchMode):
    """Listens to this thread, and to those that autograd starts for it."""

    def __init__(self) -> None:
        super().__init__()
        self.products: set[torch.dtype] = set()
        """Formats of the results of products and convolutions."""
        self.updates: set[str] = set()
        """Ways of updating many tensors at once that were seen: fused, foreach."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the operation happen, and look at it."""
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            name = func._schema.name.partition("::")[2]
            if name in _PRODUCTS:
                self.products.add(result.dtype.to_real())
            self.updates.update(way for way in _WAYS if name.startswith(f"_{way}_"))
        return result


BYTES_LIMIT = 0.01
"""Largest share by which bytes that a strategy reports may differ from those counted; and of those counted, largest
share in a coarser format than it says."""
MESSAGES = "messages"

DRAWS, DRAWS_APART = "draws", "draws apart"
DRAWN_STEPS = 3
"""Further steps of a model that draws random numbers, taken as it trains."""
DRAWS_LIMIT = 0.25
"""Largest share by which they may draw less than plain code. A model that leaves layers out at random draws more in
some steps than in others, so that it must only draw at all."""

EXCHANGES = "exchanges"
LEAST_EXCHANGES = 0.75
"""Share of the exchanges that every step must have. It is no mean: who averages now and then begins many at once."""

_OF_STEPS = ("steps", "bytes", MESSAGES, EXCHANGES)
"""What further steps are taken for."""


class ClosingCheck:
    """One rank's part."""

    def __init__(
        self,
        replica: Replica,
        loader: BatchLoader,
        *,
        run: RunConfig,
        world: World,
        loader_of: LoaderOf,
        traits: Traits = TRAITS,
        too_large: str = "",
    ) -> None:
        """`too_large`: why rank 0 can't hold whole models, the same on every rank; empty: it can."""
        self._too_large = too_large
        self._replica, self._loader, self._run, self._world, self._loader_of = replica, loader, run, world, loader_of
        self._traits = traits
        self._findings: list[Finding] = []
        self._judge: Judge | None = None
        self._budget_s = run.launcher.collective_timeout_s / 2
        """For what rank 0 computes from one collective to the next, in which the others wait."""
        self._exchanges: list[int] = []
        self.gloo_bytes_per_step_sum: float | None = None
        """Bytes that all ranks sent in a step, as gloo sends them; None where another library, or nobody, sent them."""

    def findings(
        self,
        model: nn.Module | None,
        *,
        evaluated: Mapping[int, tuple[float, float]],
        sent: Sequence[Sent],
        drawn: DrawnEvaluation | None = None,
        trained: Mapping[str, Tensor] | None = None,
        further: int = 0,
    ) -> list[Finding]:
        """Compare; what is found is on rank 0, elsewhere nothing. A collective.

        `model`: on rank 0 the run's model as it is built, on the CPU, which is consumed; None where it is too large.
        `evaluated`: loss and accuracy after each epoch. `sent`: by this rank, in each epoch. `drawn`: an evaluation
        before the last. `trained`: rank 0's copy of what was evaluated, where the replica has taken `further` steps
        since.
        """
        self._settings()
        if self._too_large:
            self._findings += [Finding(check, self._too_large) for check in ("evaluation", *_OF_STEPS)]
            return self._findings if self._world.rank == 0 else []
        state = self._replica.full_state_dict()
        plain: list[DrawnNumbers] = []
        if self._traits.draws:
            if model is not None:
                if not self._why_draws_not_seen():
                    plain = self._drawn_by_plain_code(model, state)
                stay_in_evaluation(model)
            self._world.barrier()
        if self._world.rank == 0:
            assert model is not None
            self._judge = Judge(
                model, self._run, self._world, self._loader_of, traits=self._traits, budget_s=self._budget_s
            )
            self._findings += self._judge.evaluation(trained or state, *evaluated[self._run.epochs])
        if drawn is not None and drawn.epoch is not None:
            self._world.barrier()
            self._earlier(drawn, *evaluated[drawn.epoch])
        elif drawn is not None and self._world.rank == 0:
            self._findings.append(Finding("earlier evaluation", "this attempt evaluated once"))
        reason = why_no_steps(self._run, self._traits) or self._why_not_in_evaluation()
        if reason is None:
            with in_evaluation(self._module) if self._traits.draws else nullcontext():
                self._steps(state, sent, before=self._run.epochs * self._run.steps_per_epoch + further)
        else:
            self._findings += [Finding(check, reason) for check in _OF_STEPS]
        if self._traits.draws:
            self._drawn(plain)
        if self._judge is not None:
            self._judge.close()
        return self._findings if self._world.rank == 0 else []

    def _drawn_by_plain_code(self, model: nn.Module, state: Mapping[str, Tensor]) -> list[DrawnNumbers]:
        """What some steps of one device draw, as it trains; nothing where they don't fit its memory, or its time."""
        run, world = self._run, self._world
        loss = run.model.with_own_loss(run.loss.build())
        # As often as ranks call it: what a model draws may be one number for each call.
        pieces = run.strategy.data_parallel_degree(run) * run.strategy.micro_batches_per_step(run)
        plain = PlainModel(model, loss, device=world.device, pieces=pieces)
        plain.deadline = time.perf_counter() + self._budget_s
        before, seen = world.random_state(), list[DrawnNumbers]()
        with closing(self._loader_of(run, Shard())) as loader:
            try:
                for batch in islice(endless(loader, first=run.epochs + 1), DRAWN_STEPS):
                    with DrawnNumbers() as drawn:
                        plain.step(state, batch, precision=run.precision)
                    seen.append(drawn)
            except (torch.OutOfMemoryError, TooSlowError):
                seen.clear()
        model.zero_grad(set_to_none=True)
        world.set_random_state(before)
        return seen

    def _drawn(self, plain: Sequence[DrawnNumbers]) -> None:
        """Whether ranks still draw, in further steps, as many numbers as plain code, and each others than the rest."""
        if why := self._why_draws_not_seen():
            self._findings.append(Finding(DRAWS, why))
            return
        own = []
        for batch in islice(endless(self._loader, first=self._run.epochs + 1), DRAWN_STEPS):
            with DrawnNumbers() as drawn:
                self._replica.step(batch)
            own.append((drawn.numbers, sorted(drawn.streams)))
        self._replica.traffic.take()
        ranks = self._world.gather(own)
        if self._judge is not None:
            alike = self._run.strategy.draws_alike(self._run)
            self._findings += compared_draws(ranks, plain, alike=alike, owns=owns_generators(self._traits))

    def _why_draws_not_seen(self) -> str:
        """Empty: they are, by torch's dispatcher."""
        if why := why_no_steps(self._run, self._traits):
            return why
        if self._run.compile or self._run.graph:
            return "the model draws random numbers, as it was compiled or captured"
        return "" if len(self._world.devices) == 1 else "a process drives several devices, each in a thread of its own"

    def _earlier(self, drawn: DrawnEvaluation, loss: float, accuracy: float) -> None:
        """Hold an evaluation before the last against plain code, too."""
        if self._judge is None:
            return
        state, what = drawn.state(), f"the evaluation after epoch {drawn.epoch}, which was drawn"
        if state is None:
            self._findings.append(Finding("earlier evaluation", f"{what}: {drawn.why_not_kept}"))
            return
        for found in self._judge.evaluation(state, loss, accuracy):
            self._findings.append(found._replace(check=f"earlier {found.check}", detail=f"{what}: {found.detail}"))

    @property
    def _module(self) -> nn.Module:
        """What this rank's replica computes with."""
        module, _ = self._replica.trained()  # type: ignore[attr-defined]
        assert isinstance(module, nn.Module)
        return module

    def _why_not_in_evaluation(self) -> str | None:
        """Why a model that draws can't take its steps in evaluation mode; None: it can, or need not."""
        if not self._traits.draws:
            return None
        reasons = {
            DRAWS_ALWAYS: self._traits.draws_in_evaluation,
            "the model draws random numbers, as it was compiled or captured": self._run.compile or self._run.graph,
            "the model draws random numbers, and its replica has no `trained`": not hasattr(self._replica, "trained"),
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    def _settings(self) -> None:
        """Whether torch still computes as the run asks for: what a library sets holds for the plain code here, too."""
        changed = changed_settings(self._run, self._world.device_type)
        (ranks,) = self._world.total([float(bool(changed))])
        names = ", ".join(changed) or ("on ranks other than the first" if ranks else "none")
        what = f"ranks on which settings of torch have changed since the start: {names}"
        self._findings.append(Finding("settings", what, difference=ranks, limit=0.0))

    def _steps(self, state: Mapping[str, Tensor], sent: Sequence[Sent], *, before: int) -> None:
        """Train further steps, and let rank 0 judge each; `before`: steps that the replica has taken."""
        counted, observed = CountedBytes(), ObservedWork()
        reported_bytes = activation_bytes = 0.0
        self._take_optimizer(before)
        self._replica.traffic.take()
        batches = endless(self._loader, first=self._run.epochs + 1)
        exchanges = self._world.exchange_counter()
        for step in range(1, CLOSING_STEPS + 1):
            began = exchanges()
            batch, scale = next(batches), _scale(self._replica) if self._run.precision == "fp16" else 1.0
            if self._run.compile:
                result = self._replica.step(batch)
            else:
                with counted, observed:
                    result = self._replica.step(batch)
            self._exchanges.append(exchanges() - began)
            reported = self._replica.traffic.take()
            reported_bytes += sum(reported.values())
            activation_bytes += reported["activation_bytes_sent"]
            loss, gradients, after = gathered(self._replica, result, self._run, self._world)
            if self._judge is not None:
                taken = Taken(before + step, loss, gradients, state, after, scale)
                self._findings += self._judge.step(taken)
            state = after
        if self._judge is not None:
            self._findings += self._judge.rounding()
        self._claims(observed)
        self._bytes(reported_bytes / CLOSING_STEPS, counted, sent=sent)
        self._messages(activation_bytes, counted)
        self._held_exchanges(sent)

    def _claims(self, observed: ObservedWork) -> None:
        """Hold what the steps computed with against what the run says of itself."""
        run = self._run
        wanted = HALF.get(run.precision, dtype_of(run.precision))  # TF32 is fp32 to whoever looks from outside
        way = getattr(run.optimizer, "implementation", "auto")
        seen = [bool(observed.products), wanted in observed.products, way in observed.updates]
        products, in_format, updated = self._world.total(list(map(float, seen)))
        if run.graph:
            what = "graph=true, but torch launched the products of a step one by one"
            self._findings.append(Finding("graph", what, difference=float(products > 0), limit=0.0))
        elif products:  # compiled steps show none
            formats = ", ".join(sorted(str(each).removeprefix("torch.") for each in observed.products))
            what = f"precision={run.precision}: products were in {formats or 'other formats'} on rank 0"
            self._findings.append(Finding("precision", what, difference=float(not in_format), limit=0.0))
            if way in ("fused", "foreach") and run.precision != "fp16":  # whose scaler may skip steps
                what = f"optimizer.implementation={way}: no update was seen to be"
                self._findings.append(Finding("implementation", what, difference=float(not updated), limit=0.0))

    def _take_optimizer(self, before: int) -> None:
        """Give rank 0's optimizer the state of the replica's: once, so that it shows if later steps lose theirs."""
        keys, _ = kept_of_one(self._run)
        kept = {key: self._replica.full_optimizer_state(key) for key in keys}
        if self._judge is not None:
            gathered_state = {key: tensors for key, tensors in kept.items() if tensors is not None}
            self._judge.begin_updates(gathered_state, before=before)

    def _bytes(self, reported: float, counted: CountedBytes, *, sent: Sequence[Sent]) -> None:
        """Hold the bytes per step that strategies report, here and in every epoch, against those counted.

        Small messages may be in the report or not: control messages are not, biases and statistics of norms are.
        Early epochs may have sent more (what is sent once), but not less.
        """
        gloo_bytes = math.nan if counted.gloo_bytes is None else counted.gloo_bytes
        counts = [each / CLOSING_STEPS for each in (counted.sent_bytes, counted.control_bytes, gloo_bytes)]
        counts.append(float(len(counted.unknown)))
        values = [reported, *counts, *(epoch.step_bytes for epoch in self._held(sent))]
        reported, large, small, on_gloo, unknown, *trained = self._world.total(values)
        why = self._why_bytes_not_counted()
        if unknown and not why:
            names = ", ".join(sorted(counted.unknown)) or "on ranks other than the first"
            why = f"operations of torch.distributed whose bytes are not known: {names}"
        if why:
            self._findings.append(Finding("bytes", why))
            return
        self.gloo_bytes_per_step_sum = None if math.isnan(on_gloo) else on_gloo
        if isinstance(self._run.optimizer, Lbfgs):
            trained = [reported]  # each line search evaluates as often as it needs
        fewest, most = min(reported, *trained), max(reported, trained[-1])
        off = max(large - fewest, most - large - small, 0.0) / max(large, 1.0)
        spread = "" if fewest == most else f"{fewest:.0f} to "
        what = (
            f"{spread}{most:.0f} bytes per step reported, {large:.0f} and {small:.0f} in messages below 1 KiB counted"
        )
        self._findings.append(Finding("bytes", what, difference=off, limit=BYTES_LIMIT))

    def _messages(self, activation_bytes: float, counted: CountedBytes) -> None:
        """Hold the formats of what was sent against the run's: who sends halves sends half as much.

        In half precision, values between layers are halves, and so are messages with them (`activation_bytes`: what
        this rank reports of those); gradients and parameters are not, unless the strategy says so.
        """
        run, dtype = self._run, dtype_of(self._run.precision)
        values = [counted.narrow_bytes(dtype), counted.sent_bytes + counted.control_bytes, activation_bytes]
        narrow, total, activations = (value / CLOSING_STEPS for value in self._world.total(values))
        what = f"{narrow:.0f} of {total:.0f} bytes per step sent in formats of fewer bits than those of parameters"
        if run.precision in HALF:
            narrow = max(0.0, narrow - activations)
            what += f"; {activations:.0f} may be, as values between layers are {run.precision}"
        off: float | None = narrow / max(total, 1.0)
        if why := self._why_bytes_not_counted():
            what, off = why, None
        elif run.strategy.rounds_messages(run):
            what, off = f"{what}, as the strategy says", None
        self._findings.append(Finding(MESSAGES, what, difference=off, limit=None if off is None else BYTES_LIMIT))

    def _held(self, sent: Sequence[Sent]) -> Sequence[Sent]:
        """Who rounds what is sent may begin with another exchange, and change over later: its last epoch alone."""
        return sent if self._run.strategy.parity_tolerance() <= EXACT else sent[-1:]

    def _held_exchanges(self, sent: Sequence[Sent]) -> None:
        """Hold the exchanges of each step of every epoch against those of the steps that plain code has judged.

        Who leaves exchanges out in early epochs trains like one device again by now.
        """
        expected, fewest = min(self._exchanges), min(epoch.exchanges for epoch in self._held(sent))
        counted = expected > 0 and self._run.steps_per_epoch > 1
        lacking, ranks = self._world.total([float(counted and fewest < LEAST_EXCHANGES * expected), float(counted)])
        why = self._why_no_exchanges(ranks)
        if why:
            self._findings.append(Finding(EXCHANGES, why))
            return
        what = f"ranks with a step of fewer exchanges than {LEAST_EXCHANGES:.0%} of those in the steps compared here, "
        what += f"of {ranks:.0f}; the first has {fewest} or more in each, and here {expected}"
        self._findings.append(Finding(EXCHANGES, what, difference=lacking, limit=0.0))

    def _why_no_exchanges(self, ranks: float) -> str:
        """Empty: every step needs as many."""
        if isinstance(self._run.optimizer, Lbfgs):
            return "each line search needs as many as it takes"
        if self._run.precision == "fp16":
            return "where gradients overflow, fp16 leaves the update out, and what it sends"
        return "" if ranks else "exchanges are not counted, or there are none"

    def _why_bytes_not_counted(self) -> str:
        """Empty: they are. Only what passes torch's dispatcher can be counted."""
        if self._world.size == 1:
            return "one process sends nothing through torch.distributed"
        return "compile=true" if self._run.compile else "graph=true" if self._run.graph else ""


def compared_draws(
    ranks: Sequence[Sequence[tuple[int, Sequence[int]]]],
    plain: Sequence[DrawnNumbers],
    *,
    alike: int,
    owns: bool = False,
) -> Iterator[Finding]:
    """Findings about what each rank has drawn in each of some steps: how many numbers, and where its streams began.

    `plain`: of the same steps in plain code. `alike`: neighbouring ranks that draw the same. `owns`: the model draws
    from generators of its own, which begin alike on all ranks.
    """
    wanted, drawn = sum(each.numbers for each in plain), sum(count for steps in ranks for count, _ in steps) / alike
    if not wanted:
        yield Finding(DRAWS, "plain code drew nothing, or one device has too little memory or time")
        return
    what = f"in {len(plain)} steps as the model trains, {drawn:.0f} random numbers drawn, by plain code {wanted}"
    of_steps = [[each.numbers for each in plain], *([count for count, _ in steps] for steps in ranks)]
    is_even = all(len(set(counts)) == 1 for counts in of_steps)
    off = max(0.0, 1 - drawn / wanted) if is_even else float(not drawn)
    yield Finding(DRAWS, what, difference=off, limit=DRAWS_LIMIT)
    if owns:
        yield Finding(DRAWS_APART, "the model draws from generators of its own, which begin alike on all ranks")
        return
    if set.intersection(*(each.streams for each in plain)):
        yield Finding(DRAWS_APART, "the model itself draws the same numbers in each step")
        return
    users: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for rank, steps in enumerate(ranks):
        for step, (_, streams) in enumerate(steps):
            for stream in streams:
                users[stream].add((rank // alike, step))
    again = {group for those in users.values() if len(those) > 1 for group, _ in those}
    what = f"ranks, or groups of {alike}, " if alike > 1 else "ranks "
    what += f"whose random numbers are those of another one, or of their own step before, of {len(ranks) // alike}"
    yield Finding(DRAWS_APART, what, difference=float(len(again)), limit=0.0)


def owns_generators(traits: Traits) -> bool:
    """Whether a model draws from generators that are none of the global ones, which ranks seed apart."""
    return bool(traits.generators) or traits.draws_elsewhere


def why_no_steps(run: RunConfig, traits: Traits = TRAITS) -> str | None:
    """Why further steps can't be compared with plain code; None where they can."""
    if not run.strategy.equals_one_device(run):
        compared = "" if own_reference(run) is None else ": its own reference is compared before training only"
        return f"the strategy does not train like one device{compared}"
    if pieces_of(run, traits) is None:
        return f"model.norm={getattr(run.model, 'norm', '')} under micro-batches"
    return None


def _scale(replica: Replica) -> float:
    """The factor of the loss in the next step's backward: that of the fp16 scaler, where there is one."""
    scale: float = (replica.local_state().get("scaler") or {}).get("scale", 1.0)
    return scale
