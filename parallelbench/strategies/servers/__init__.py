"""Workers that send gradients to parameter servers (Li et al. 2014, OSDI; Downpour SGD: Dean et al. 2012, NIPS)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from msgspec import Meta

from parallelbench.config.components import Strategy
from parallelbench.errors import ConfigError
from parallelbench.optim.optimizers import Adagrad, Sgd
from parallelbench.strategies.refusals import check_no_fp16, first_of, why_complex, why_untouched

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.config.components import Traits
    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World


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
        """One per worker."""
        return max(1, run.devices - self.servers)

    def equals_one_device(self, run: RunConfig) -> bool:
        """Not when pushes are applied in the order in which they happen to arrive."""
        return self.mode == "sync"

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse counts that don't fit, and options that servers can't combine."""
        workers = run.devices - self.servers
        if workers < 1:
            raise ConfigError(
                f"strategy.servers={self.servers} of devices={run.devices} leaves no worker: choose "
                f"devices={self.servers + 1} or more"
                + (f", or strategy.servers={run.devices - 1} or fewer" if run.devices > 1 else "")
            )
        if self.mode == "sync" and (self.n_push, self.n_fetch) != (1, 1):
            raise ConfigError(
                f"strategy.n_push={self.n_push} strategy.n_fetch={self.n_fetch} with strategy.mode=sync: synchronous "
                "workers push and fetch in every step: choose strategy.n_push=1 strategy.n_fetch=1, or "
                "strategy.mode=async"
            )
        if run.global_batch_size % workers:
            below = run.batch_size - run.batch_size % workers
            advice = f"{below} or {below + workers}" if below else f"{workers}"
            raise ConfigError(
                f"batch_size={run.batch_size} can't be divided among {workers} workers (devices={run.devices} less "
                f"strategy.servers={self.servers}): choose batch_size={advice}"
            )
        if self.name == "downpour":
            self._check_downpour(run)
        check_no_fp16(run, "each worker would scale gradients on its own")
        if self.mode == "async" and run.clip_norm is not None:
            raise ConfigError(
                f"clip_norm={run.clip_norm:g} with strategy.mode=async is refused: no server has a whole gradient, and "
                f"none waits for the others; choose clip_norm=null, or {self._in_sync}"
            )
        if self.mode == "async" and run.lr_schedule.changes:
            raise ConfigError(
                f"lr_schedule={run.lr_schedule.name} with strategy.mode=async is refused: a server counts pushes, of "
                f"which nobody knows to which step they belong; choose lr_schedule=constant, or {self._in_sync}"
            )
        if self.mode == "async" and getattr(run.model, "norm", None) == "sync":
            raise ConfigError(
                "model.norm=sync with strategy.mode=async is refused: workers would wait for each other in every "
                "layer; choose model.norm=batch or model.norm=group"
            )

    def why_not_model(self, run: RunConfig, traits: Traits) -> str:
        """All parameters are one real vector."""
        return first_of(why_untouched(traits), why_complex(traits))

    @property
    def _in_sync(self) -> str:
        """What chooses servers that wait for all workers."""
        return "strategy=parameter_server strategy.mode=sync" if self.name == "downpour" else "strategy.mode=sync"

    def _check_downpour(self, run: RunConfig) -> None:
        """Refuse all but Downpour SGD as Dean et al. (2012) define it: the rest is `strategy=parameter_server`."""
        if self.mode != "async":
            raise ConfigError(
                "strategy=downpour with strategy.mode=sync is refused: Downpour SGD is asynchronous; choose "
                "strategy=parameter_server strategy.mode=sync"
            )
        plain = isinstance(run.optimizer, Sgd) and not run.optimizer.momentum
        if not plain and not isinstance(run.optimizer, Adagrad):
            momentum = " with momentum" if isinstance(run.optimizer, Sgd) else ""
            raise ConfigError(
                f"strategy=downpour with optimizer={run.optimizer.name}{momentum} is refused: Downpour SGD (Dean et "
                "al. 2012) is Adagrad, or plain SGD, on the server: choose optimizer=adagrad, or optimizer=sgd "
                "optimizer.momentum=0.0; any other optimizer works with strategy=parameter_server strategy.mode=async"
            )

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """A worker, or on the last ranks a server."""
        from parallelbench.strategies.servers.servers import Layout, Schedule, server_of
        from parallelbench.strategies.servers.workers import worker_of

        layout = Layout(rank=world.rank, workers=run.devices - self.servers, servers=self.servers)
        schedule = Schedule(run.steps_per_epoch, self.n_push, self.n_fetch) if self.mode == "async" else None
        if world.rank >= layout.workers:
            return server_of(model, layout, schedule, run=run)
        slowdown = self.slow_worker_factor if world.rank == 0 else 1.0
        return worker_of(model, layout, schedule, slowdown=slowdown, run=run, world=world)
