"""The workers of `strategy=parameter_server` and `downpour`: each has the whole model, but no optimizer state."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelbench.config.components import Shard
from parallelbench.config.replica import Push
from parallelbench.models.norms import synchronize_norms
from parallelbench.strategies.replica import ModuleReplica, share_buffers, to_device
from parallelbench.strategies.servers.servers import (
    FETCH,
    PUSH,
    REQUEST,
    STALENESS,
    Layout,
    receiving,
    sending,
    wait_all,
)
from parallelbench.strategies.state import FlatParameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from parallelbench.config.components import Batch
    from parallelbench.config.run import RunConfig
    from parallelbench.strategies.servers import Schedule
    from parallelbench.world.numerics import Sums
    from parallelbench.world.world import World


class HostedParameters(FlatParameters):
    """Flat parameters with copies in pinned host memory, for gloo's messages; on a CPU there is no second copy."""

    def __init__(self, module: nn.Module) -> None:
        """Copy the parameters into the vector, and the vector to the host."""
        super().__init__(module)
        self.host_values = _on_host(self.values)
        self.host_gradient = _on_host(self.gradient)

    def gradient_to_host(self) -> Tensor:
        """Copy `gradient` to the host, and return the copy."""
        if self.host_gradient is not self.gradient:
            self.host_gradient.copy_(self.gradient)
        return self.host_gradient

    def values_from_host(self) -> None:
        """Give the module the parameters received in `host_values`."""
        if self.host_values is not self.values:
            self.values.copy_(self.host_values)


def _on_host(vector: Tensor) -> Tensor:
    """The vector itself on a CPU, else a pinned copy."""
    if vector.device.type == "cpu":
        return vector
    return torch.empty_like(vector, device="cpu", pin_memory=True).copy_(vector)


class WorkerReplica(ModuleReplica):
    """Forward and backward as on one device; the servers update."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        *,
        run: RunConfig,
        world: World,
        group: dist.ProcessGroup,
        slowdown: float,
    ) -> None:
        module = to_device(model, run, world.device)
        synchronize_norms(module, group)
        self._flat = HostedParameters(module)
        super().__init__(
            module,
            run=run,
            world=world,
            data_shard=Shard(layout.rank, layout.workers),
            # It only clears gradients, and has no state: the run's optimizer is on the servers.
            optimizer=torch.optim.SGD(module.parameters()),
            before_evaluation=lambda: share_buffers(module, group),
        )
        self._compiles_update = False  # servers update
        self._layout, self._group, self._slowdown = layout, group, slowdown
        self._pushes: list[Push] = []
        self._step, self._steps = 0, run.steps_per_epoch

    def take_pushes(self) -> list[Push]:
        pushes, self._pushes = self._pushes, []
        return pushes

    def full_gradients(self) -> dict[str, Tensor]:
        """The gradients of the servers' last update, of which each sends its shard."""
        return self._from_servers()

    def full_optimizer_state(self, key: str) -> dict[str, Tensor] | None:
        return self._from_servers()

    def _from_servers(self) -> dict[str, Tensor]:
        if self._layout.rank:
            return {}
        vector = torch.empty_like(self._flat.host_gradient)
        wait_all([receiving(shard, server) for server, shard in self._shards(vector)])
        return self._flat.named_views(vector, self._module)

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def _compute(self, batch: Batch) -> Sums:
        """Forward and backward, made slower by `slowdown`; counts the steps of the epoch."""
        self._step = self._step % self._steps + 1
        start = time.perf_counter()
        result = self._forward_backward(batch)
        if self._slowdown > 1:
            self._world.synchronize()
            time.sleep((self._slowdown - 1) * (time.perf_counter() - start))
        return result

    def _shards(self, vector: Tensor) -> list[tuple[int, Tensor]]:
        """Each server's rank and its shard of a vector: a view."""
        return [(server, self._layout.shard_of(vector, server)) for server in self._layout.server_ranks]

    def _sending(self) -> list[dist.Work]:
        gradient = self._flat.gradient_to_host()
        self.traffic.send("gradient", gradient.nbytes)
        return [sending(shard, server) for server, shard in self._shards(gradient)]

    def _receiving(self) -> list[dist.Work]:
        return [receiving(shard, server) for server, shard in self._shards(self._flat.host_values)]


class SyncWorker(WorkerReplica):
    """Pushes and fetches in every step, and waits for both to end."""

    def step(self, batch: Batch) -> Sums | None:
        """Forward, backward, push, fetch."""
        result = self._compute(batch)
        self._flat.gather_gradient()
        self._exchange()
        self._pushes.append(Push(self._step, 0))
        return result

    def _exchange(self) -> None:
        """The parameters are received in place: nothing reads them until the gradient has been sent."""
        wait_all([*self._receiving(), *self._sending()])
        self._flat.values_from_host()


class AsyncWorker(WorkerReplica):
    """Pushes and fetches by its own `Schedule`: `DownpourSGDClient` in the appendix of Dean et al. 2012."""

    whole_epochs: ClassVar[bool] = True

    def copied(self) -> Mapping[int, Iterable[Tensor]]:
        """None: each worker has fetched at another time."""
        return {}

    def __init__(self, model: nn.Module, layout: Layout, schedule: Schedule, *, run: RunConfig, **place: Any) -> None:
        """`place`: the rest of what `WorkerReplica` takes."""
        super().__init__(model, layout, run=run, **place)
        self._schedule, self._lr = schedule, run.optimizer.scaled_lr(run)
        self._accrued = torch.zeros_like(self._flat.gradient) if schedule.n_push > 1 else None

    def step(self, batch: Batch) -> Sums | None:
        """Fetch if due, forward, backward, local update, push if due; after the last step, end the epoch."""
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
        """Receive the parameters after all workers' pushes, and the staleness of this worker's own."""
        steps = self._schedule.push_steps
        reports = [torch.empty(len(steps), dtype=torch.int64) for _ in self._layout.server_ranks]
        senders = zip(self._layout.server_ranks, reports, strict=True)
        works = [receiving(report, server, tag=STALENESS) for server, report in senders]
        wait_all([*self._receiving(), *works])
        self._flat.values_from_host()
        staleness = torch.stack(reports).amax(0).tolist()
        self._pushes += [Push(step, value) for step, value in zip(steps, staleness, strict=True)]
