"""Workers that send gradients to parameter servers (Li et al. 2014, OSDI; Downpour SGD: Dean et al. 2012, NIPS)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from msgspec import Meta

from parallelbench.config.components import Strategy
from parallelbench.optim.optimizers import Adagrad, Sgd
from parallelbench.strategies.shared_refusals import first_of, no_fp16, some_worker, why_complex, why_untouched

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.config.components import Traits
    from parallelbench.config.replica import Replica
    from parallelbench.config.rule import Rules
    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World


@dataclass(frozen=True)
class Schedule:
    """The steps of an epoch, counted from 1, in which an asynchronous worker fetches and pushes."""

    steps: int
    n_push: int
    n_fetch: int

    def fetches_before(self, step: int) -> bool:
        """Whether parameters are fetched before the step; an epoch starts with the last epoch's final ones."""
        return step > 1 and (step - 1) % self.n_fetch == 0

    def pushes_after(self, step: int) -> bool:
        """Whether gradients are pushed after the step."""
        return step % self.n_push == 0 or step == self.steps

    def starts_push(self, step: int) -> bool:
        """Whether the step's gradient is the first of a push."""
        return step == 1 or self.pushes_after(step - 1)

    @cached_property
    def push_steps(self) -> list[int]:
        """The steps that end in a push."""
        return [step for step in range(1, self.steps + 1) if self.pushes_after(step)]

    @cached_property
    def requests(self) -> int:
        """Pushes and fetches of one worker in an epoch."""
        return sum(self.fetches_before(step) + self.pushes_after(step) for step in range(1, self.steps + 1))


class ParameterServer(Strategy, frozen=True, kw_only=True):
    """Workers that send gradients to parameter servers (Li et al. 2014, OSDI; Downpour SGD: Dean et al. 2012, NIPS).

    The last `servers` ranks hold the parameters and the optimizer's state, in equal shards; the others train.

    A server takes a device's place, works on the host's memory, and updates its shard by the run's optimizer. Messages
    are CPU tensors over gloo; on CUDA, workers copy.

    sync: in every step each server averages all workers' gradients, in the order of the ranks, updates, and sends the
    new parameters to all: the same computation as on one device.

    async: a worker fetches before the steps 1, 1 + n_fetch, 1 + 2·n_fetch, … of an epoch and pushes after the steps
    n_push, 2·n_push, … and the last one, waiting for no other worker. A push is the sum of the gradients since the push
    before, each the mean over the worker's own slice of the global batch; a server applies it on arrival as one update
    with the run's learning rate. Between fetches (n_fetch > 1) a worker follows its own gradients: it subtracts the
    learning rate times the gradient, as in Dean et al.'s algorithm. An epoch ends when all workers have done their
    steps and all pushes have been applied: then every worker gets the same parameters, is evaluated with them, and
    starts the next epoch from them. The staleness of a push that differs between servers is the largest.

    Under weak scaling the global batch grows with all devices, servers among them, and the workers share it.
    BatchNorm's running statistics belong to no server: worker 0's are evaluated. With `clip_norm` the servers of sync
    add up the squares of their shards of the mean gradient; async refuses it, so a push is never clipped.
    """

    updates_as_asked: ClassVar[bool] = True
    takes_own_loss: ClassVar[bool] = True
    waits_in_steps: ClassVar[str] = "gradients and parameters travel through host memory"

    mode: Literal["sync", "async"]
    """sync: all workers' gradients make one update. async: each push makes one, on arrival."""
    servers: Annotated[int, Meta(ge=1)]
    """How many of the devices are servers."""
    n_push: Annotated[int, Meta(ge=1)]
    """Steps between pushes of a worker; 1 under sync."""
    n_fetch: Annotated[int, Meta(ge=1)]
    """Steps between fetches of a worker; 1 under sync."""
    slow_worker_factor: Annotated[float, Meta(ge=1)]
    """Simulates a slow worker: worker 0 sleeps until its forward and backward took this many times as long. Above 1
    it waits for its device in every step."""

    def data_parallel_degree(self, run: RunConfig) -> int:
        return max(1, run.devices - self.servers)

    def equals_one_device(self, run: RunConfig) -> bool:
        """Not when pushes are applied in the order in which they happen to arrive."""
        return self.mode == "sync"

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        yield from some_worker(run, self.servers)
        yield (
            self.mode == "sync" and (self.n_push, self.n_fetch) != (1, 1),
            f"strategy.n_push={self.n_push} strategy.n_fetch={self.n_fetch} with strategy.mode=sync: synchronous "
            "workers push and fetch in every step",
            ("strategy.n_push=1 strategy.n_fetch=1", "strategy.mode"),
        )
        yield from no_fp16(run, "each worker would scale gradients on its own")
        if self.mode == "sync":
            return
        sync = ("strategy.mode", "strategy")
        if run.clip_norm is not None:
            yield (
                True,
                f"clip_norm={run.clip_norm:g} with strategy.mode=async is refused: no server has a whole gradient, and "
                "none waits for the others",
                ("clip_norm", *sync),
            )
        yield (
            run.lr_schedule.changes,
            f"lr_schedule={run.lr_schedule.name} with strategy.mode=async is refused: a server counts pushes, of which "
            "nobody knows to which step they belong",
            ("lr_schedule=constant", *sync),
        )
        yield (
            getattr(run.model, "norm", None) == "sync",
            "model.norm=sync with strategy.mode=async is refused: workers would wait for each other in every layer",
            ("model.norm",),
        )

    def why_not_model(self, run: RunConfig, traits: Traits) -> str:
        """All parameters are one real vector."""
        return first_of(why_untouched(traits), why_complex(traits))

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """A worker, or on the last ranks a server."""
        from parallelbench.strategies.servers.servers import AsyncServer, Layout, SyncServer, own_group
        from parallelbench.strategies.servers.workers import AsyncWorker, SyncWorker

        layout = Layout(rank=world.rank, workers=run.devices - self.servers, servers=self.servers)
        schedule = Schedule(run.steps_per_epoch, self.n_push, self.n_fetch) if self.mode == "async" else None
        group = own_group(layout, run)
        if world.rank >= layout.workers:
            if schedule is None:
                return SyncServer(model, layout, run, group)
            return AsyncServer(model, layout, run, schedule)
        assert group is not None, "a worker is a member"
        slowdown = self.slow_worker_factor if world.rank == 0 else 1.0
        if schedule is None:
            return SyncWorker(model, layout, run=run, world=world, group=group, slowdown=slowdown)
        return AsyncWorker(model, layout, schedule, run=run, world=world, group=group, slowdown=slowdown)


class Downpour(ParameterServer, frozen=True, kw_only=True):
    """Downpour SGD as Dean et al. (2012) define it: asynchronous, with Adagrad or plain SGD on the servers.

    All else of `ParameterServer` is `strategy=parameter_server`.
    """

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        yield (
            self.mode != "async",
            f"strategy={self.name} with strategy.mode=sync is refused: Downpour SGD is asynchronous",
            ("strategy.mode", "strategy=parameter_server"),
        )
        plain = isinstance(run.optimizer, Sgd) and not run.optimizer.momentum
        momentum = " with momentum" if isinstance(run.optimizer, Sgd) else ""
        yield (
            not plain and not isinstance(run.optimizer, Adagrad),
            f"strategy={self.name} with optimizer={run.optimizer.name}{momentum} is refused: Downpour SGD is Adagrad, "
            "or plain SGD, on the server, and any other optimizer strategy=parameter_server strategy.mode=async",
            ("optimizer=adagrad", "optimizer=sgd optimizer.momentum=0.0 optimizer.nesterov=false"),
        )
        yield from super().rules(run, device_type)
