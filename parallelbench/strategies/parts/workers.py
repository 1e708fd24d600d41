"""The workers of `strategy=parameter_server`: the whole model on each, but no optimizer state."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelbench.loaders.batch import Shard
from parallelbench.models.norms import synchronize_norms
from parallelbench.strategies.parts.flat import HostedParameters
from parallelbench.strategies.parts.replicas import ModuleReplica, place, share_buffers
from parallelbench.strategies.parts.servers import (
    FETCH,
    PUSH,
    REQUEST,
    STALENESS,
    Layout,
    Schedule,
    receiving,
    schedule_of,
    sending,
    wait_all,
    workers_group,
)
from parallelbench.strategies.replica import Push

if TYPE_CHECKING:
    from parallelbench.loaders.batch import Batch
    from parallelbench.rank.world import World
    from parallelbench.spec.config import RunConfig
    from parallelbench.strategies.parameter_server import ParameterServer


def worker_of(
    model: nn.Sequential, options: ParameterServer, layout: Layout, *, run: RunConfig, world: World
) -> SyncWorker | AsyncWorker:
    """The worker of this rank. All ranks make the workers' group, as torch demands."""
    group = workers_group(layout, run)
    assert isinstance(group, dist.ProcessGroup), "a worker is a member"
    module = place(model, run, world.device)
    synchronize_norms(module, group)
    slowdown = options.slow_worker_factor if layout.rank == 0 else 1.0
    if options.mode == "sync":
        return SyncWorker(module, layout, run=run, world=world, group=group, slowdown=slowdown)
    schedule = schedule_of(options, run)
    return AsyncWorker(module, layout, schedule, run=run, world=world, group=group, slowdown=slowdown)


class WorkerReplica(ModuleReplica):
    """Forward and backward as on one device; what makes of gradients new parameters is elsewhere."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        *,
        run: RunConfig,
        world: World,
        group: dist.ProcessGroup,
        slowdown: float,
    ) -> None:
        self._flat = HostedParameters(module)
        super().__init__(
            module,
            run=run,
            world=world,
            data_shard=Shard(layout.rank, layout.workers),
            # The servers update: this one, which only clears gradients, holds no state whatever the run's own holds.
            optimizer=torch.optim.SGD(module.parameters()),
            before_evaluation=lambda: share_buffers(module, group),
        )
        self._layout, self._group, self._slowdown = layout, group, slowdown
        self._pushes: list[Push] = []
        self._step, self._steps = 0, run.steps_per_epoch

    def take_pushes(self) -> list[Push]:
        """The pushes of the epoch."""
        pushes, self._pushes = self._pushes, []
        return pushes

    def full_gradients(self) -> dict[str, Tensor]:
        """What the servers last updated with."""
        if self._layout.rank:
            return {}
        vector = torch.empty_like(self._flat.host_gradient)
        wait_all([receiving(shard, server) for server, shard in self._shards(vector)])
        return self._flat.named_views(vector, self._module)

    def close(self) -> None:
        """Release the workers' process group."""
        dist.destroy_process_group(self._group)

    def _compute(self, batch: Batch) -> Tensor:
        """Forward and backward, on worker 0 perhaps slowed down; counts the steps of the epoch."""
        self._step = self._step % self._steps + 1
        start = time.perf_counter()
        result = self._forward_backward(batch)
        if self._slowdown > 1:
            self._world.synchronize()
            time.sleep((self._slowdown - 1) * (time.perf_counter() - start))
        return result

    def _shards(self, vector: Tensor) -> list[tuple[int, Tensor]]:
        """Each server's rank and its part of a vector: a view."""
        return [(server, self._layout.shard_of(vector, server)) for server in self._layout.server_ranks]

    def _sending(self) -> list[dist.Work]:
        gradient = self._flat.gradient_to_host()
        self.traffic.send("gradient", gradient.nbytes)
        return [sending(shard, server) for server, shard in self._shards(gradient)]

    def _receiving(self) -> list[dist.Work]:
        return [receiving(shard, server) for server, shard in self._shards(self._flat.host_values)]


class SyncWorker(WorkerReplica):
    """Pushes and fetches in every step, and waits for both."""

    def step(self, batch: Batch) -> Tensor | None:
        """Forward, backward, push, fetch."""
        result = self._compute(batch)
        self._flat.gather_gradient()
        self._exchange()
        self._pushes.append(Push(self._step, 0))
        return result

    def _exchange(self) -> None:
        """The parameters are received in place: nobody reads them while the gradient is under way."""
        wait_all([*self._receiving(), *self._sending()])
        self._flat.values_from_host()


class AsyncWorker(WorkerReplica):
    """Pushes and fetches on its own schedule: `DownpourSGDClient` in the appendix of Dean et al. 2012."""

    whole_epochs: ClassVar[bool] = True

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        schedule: Schedule,
        *,
        run: RunConfig,
        world: World,
        group: dist.ProcessGroup,
        slowdown: float,
    ) -> None:
        super().__init__(module, layout, run=run, world=world, group=group, slowdown=slowdown)
        self._schedule, self._lr = schedule, run.optimizer.scaled_lr(run)
        self._accrued = torch.zeros_like(self._flat.gradient) if schedule.n_push > 1 else None

    def step(self, batch: Batch) -> Tensor | None:
        """Fetch where it is due, forward, backward, local update, push where it is due; at last, end the epoch."""
        if self._schedule.fetches_before(self._step % self._steps + 1):
            self._fetch()
        result = self._compute(batch)
        self._flat.gather_gradient()
        if self._schedule.n_fetch > 1:
            self._flat.values.sub_(self._flat.gradient, alpha=self._lr)
        if self._accrued is not None:
            self._accrued += self._flat.gradient
        if self._schedule.pushes_after(self._step):
            self._push()
        if self._step == self._steps:
            self._end_epoch()
        return result

    def _fetch(self) -> None:
        works = self._receiving()
        wait_all([*self._requesting(FETCH), *works])
        self._flat.values_from_host()

    def _push(self) -> None:
        if self._accrued is not None:
            self._flat.gradient.copy_(self._accrued)
            self._accrued.zero_()
        wait_all([*self._requesting(PUSH), *self._sending()])

    def _requesting(self, request: int) -> list[dist.Work]:
        message = torch.tensor([request])
        return [sending(message, server, tag=REQUEST) for server in self._layout.server_ranks]

    def _end_epoch(self) -> None:
        """The parameters arrive once all pushes have been applied, and with them the staleness of this worker's."""
        steps = self._schedule.push_steps
        reports = [torch.empty(len(steps), dtype=torch.int64) for _ in self._layout.server_ranks]
        senders = zip(self._layout.server_ranks, reports, strict=True)
        works = [receiving(report, server, tag=STALENESS) for server, report in senders]
        wait_all([*self._receiving(), *works])
        self._flat.values_from_host()
        staleness = torch.stack(reports).amax(0).tolist()
        self._pushes += [Push(step, value) for step, value in zip(steps, staleness, strict=True)]
