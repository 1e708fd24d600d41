"""The servers of parameter_server and downpour: each holds a shard of the parameters and the optimizer's state for it.

Messages between workers and servers are CPU tensors. Under sync a worker sends a gradient in every step and receives
parameters. Under async it first sends a request (`PUSH` or `FETCH`), since a server serves requests in the order of
arrival; at the end of an epoch each server sends every worker the parameters and the staleness of its pushes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelbench.config.components import Shard
from parallelbench.strategies.replica import BaseReplica, to_device
from parallelbench.strategies.state import FlatParameters, kept_by

if TYPE_CHECKING:
    from collections.abc import Iterable

    from parallelbench.config.components import Batch
    from parallelbench.config.run import RunConfig
    from parallelbench.strategies.clipping import Groups
    from parallelbench.strategies.servers import Schedule
    from parallelbench.world.numerics import Sums


PUSH, FETCH = 1, 2
"""Requests of an asynchronous worker."""
REQUEST, VALUES, STALENESS = 1, 2, 3
"""Tags of messages: requests; gradients and parameters; the report at the end of an epoch."""


def shard_bounds(length: int, count: int) -> list[tuple[int, int]]:
    """Cut a vector of `length` values into `count` shards, (start, stop) of each; sizes differ by at most one."""
    return [(length * index // count, length * (index + 1) // count) for index in range(count)]


@dataclass(frozen=True)
class Layout:
    """The ranks' roles: ranks 0 … workers − 1 train, the `servers` ranks after them hold shards."""

    rank: int
    workers: int
    servers: int

    @property
    def server_ranks(self) -> range:
        """The ranks of the servers, in the order of their shards."""
        return range(self.workers, self.workers + self.servers)

    def shard_of(self, vector: Tensor, server: int) -> Tensor:
        """The part of the parameter vector that the rank `server` holds: a view."""
        start, stop = shard_bounds(vector.numel(), self.servers)[server - self.workers]
        return vector[start:stop]


def own_group(layout: Layout, run: RunConfig) -> dist.ProcessGroup | None:
    """The process group of the workers, or of the servers where squares of a gradient add up over several.

    All ranks must make both; servers that need none have none.
    """
    timeout = timedelta(seconds=run.launcher.collective_timeout_s)
    group = dist.new_group(list(range(layout.workers)), timeout=timeout)
    if run.clip_norm is not None and layout.servers > 1:
        of_servers = dist.new_group(list(layout.server_ranks), timeout=timeout)
        group = group if layout.rank < layout.workers else of_servers
    return group if isinstance(group, dist.ProcessGroup) else None  # of others torch returns a number


class ServerReplica(BaseReplica):
    """A shard of the parameter vector, and the optimizer that updates it. Reads no data and owns no loss."""

    def __init__(self, model: nn.Module, layout: Layout, run: RunConfig) -> None:
        super().__init__(Shard(0, layout.workers, images=False, labels=False), run)
        self._layout = layout
        flat = FlatParameters(to_device(model, run, torch.device("cpu")))
        self._parameter = nn.Parameter(layout.shard_of(flat.values, layout.rank).clone())
        self._values = self._parameter.detach()
        self._compiles_update = run.compiles_step
        self._optimizer = run.optimizer.build([self._parameter], run, "cpu")

    def _forward_backward(self, batch: Batch) -> Sums | None:
        """The workers compute the gradients."""
        return None

    def compile_warmup(self, batch: Batch) -> None:
        """By a gradient of zeros."""
        self._parameter.grad = torch.zeros_like(self._parameter)
        super().compile_warmup(batch)

    def evaluate(self, batches: Iterable[Batch]) -> Tensor | None:
        return None

    def trained(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The shard. Between epochs all workers have the same parameters, so staleness needs no state."""
        return nn.ParameterList([self._parameter]), self._optimizer

    def full_state_dict(self) -> dict[str, Tensor]:
        """Worker 0, which is rank 0, has everything."""
        return {}

    def full_gradients(self) -> dict[str, Tensor]:
        """Worker 0 gets the gradient of the shard's last update, before it was clipped."""
        assert self._parameter.grad is not None
        return self._sent(self._unclipped({"": self._parameter.grad})[""])

    def full_optimizer_state(self, key: str) -> dict[str, Tensor] | None:
        return self._sent(kept_by(self._optimizer, [("", self._parameter)], key)[""])

    def _sent(self, shard: Tensor) -> dict[str, Tensor]:
        dist.send(shard, 0, tag=VALUES)
        return {}

    def _apply(self, gradient: Tensor) -> None:
        self._parameter.grad = gradient
        self._update()

    def _send_values(self, worker: int) -> dist.Work:
        self.traffic.send("parameter", self._values.nbytes)
        return sending(self._values, worker)


class SyncServer(ServerReplica):
    """Every step: all workers' gradients in, one update, the parameters out to all."""

    def __init__(self, model: nn.Module, layout: Layout, run: RunConfig, servers: dist.ProcessGroup | None) -> None:
        super().__init__(model, layout, run)
        self._servers = servers
        self._received = [torch.empty_like(self._values) for _ in range(layout.workers)]

    def _counted(self) -> tuple[Iterable[Tensor], Groups]:
        return [self._parameter], () if self._servers is None else (self._servers,)

    def close(self) -> None:
        if self._servers is not None:
            dist.destroy_process_group(self._servers)

    def step(self, batch: Batch) -> Sums | None:
        wait_all([receiving(gradient, worker) for worker, gradient in enumerate(self._received)])
        self._apply(self._average())
        wait_all([self._send_values(worker) for worker in range(self._layout.workers)])
        return None

    def _average(self) -> Tensor:
        """Mean of the workers' gradients, summed in the order of the ranks."""
        mean, *others = self._received
        for gradient in others:
            mean += gradient
        return mean.div_(len(self._received)) if others else mean


class AsyncServer(ServerReplica):
    """Serves pushes and fetches one after the other, in the order in which they arrive."""

    whole_epochs: ClassVar[bool] = True

    def __init__(self, model: nn.Module, layout: Layout, run: RunConfig, schedule: Schedule) -> None:
        super().__init__(model, layout, run)
        self._schedule = schedule
        self._gradient = torch.empty_like(self._values)
        self._step = self._served = 0
        self._updates: Counter[int] = Counter()
        """Updates so far, by worker."""
        self._seen: Counter[int] = Counter()
        """Updates by others in a worker's last fetch."""
        self._oldest: Counter[int] = Counter()
        """Updates by others in the parameters of the first gradient of a worker's next push."""
        self._fetches: Counter[int] = Counter()
        """Fetches in this epoch, by worker."""
        self._staleness: dict[int, list[int]] = {worker: [] for worker in range(layout.workers)}

    def step(self, batch: Batch) -> Sums | None:
        """Serve this step's share of the epoch's requests; after the last step, end the epoch.

        All workers together make a known number of requests per epoch, so a server knows when the epoch ends.
        """
        self._step += 1
        due = self._schedule.requests * self._layout.workers * self._step // self._schedule.steps
        while self._served < due:
            self._serve()
        if self._step == self._schedule.steps:
            self._end_epoch()
        return None

    def _serve(self) -> None:
        request = torch.empty(1, dtype=torch.int64)
        worker = dist.recv(request, tag=REQUEST)  # from any source
        if request.item() == PUSH:
            self._push(worker)
        else:
            self._fetch(worker)
        self._served += 1

    def _push(self, worker: int) -> None:
        dist.recv(self._gradient, worker, tag=VALUES)
        self._staleness[worker].append(self._updates_by_others(worker) - self._oldest[worker])
        self._oldest[worker] = self._seen[worker]
        self._apply(self._gradient)
        self._updates[worker] += 1

    def _fetch(self, worker: int) -> None:
        self._send_values(worker).wait()
        self._seen[worker] = self._updates_by_others(worker)
        self._fetches[worker] += 1
        if self._schedule.starts_push(1 + self._fetches[worker] * self._schedule.n_fetch):
            self._oldest[worker] = self._seen[worker]

    def _updates_by_others(self, worker: int) -> int:
        """Updates by all workers but this one."""
        return self._updates.total() - self._updates[worker]

    def _end_epoch(self) -> None:
        reports = {worker: torch.tensor(values) for worker, values in self._staleness.items()}
        values = [self._send_values(worker) for worker in reports]
        wait_all([*values, *(sending(report, worker, tag=STALENESS) for worker, report in reports.items())])
        for worker, staleness in self._staleness.items():
            self._seen[worker] = self._oldest[worker] = self._updates_by_others(worker)
            staleness.clear()
        self._fetches.clear()
        self._step = self._served = 0


def sending(value: Tensor, to: int, *, tag: int = VALUES) -> dist.Work:
    """Start to send; the tensor must not change until the send has ended."""
    work = dist.isend(value, to, tag=tag)
    assert work is not None
    return work


def receiving(value: Tensor, source: int, *, tag: int = VALUES) -> dist.Work:
    """Start to receive."""
    work = dist.irecv(value, source, tag=tag)
    assert work is not None
    return work


def wait_all(works: Iterable[dist.Work]) -> None:
    """Wait until all have ended."""
    for work in works:
        work.wait()
