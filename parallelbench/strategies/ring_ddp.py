"""Data parallel training whose gradients go round a ring of the suite's own, as Horovod does.

Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"; Sergeev and
Del Balso 2018, "Horovod: fast and easy distributed deep learning in TensorFlow" (arXiv 1802.05799).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from parallelbench.errors import ConfigError
from parallelbench.loaders.batch import Shard
from parallelbench.spec.config import StateShards, Strategy

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor, nn
    from torch._C._distributed_c10d import GradBucket
    from torch.distributed import P2POp, Work

    from parallelbench.probes.communication import Traffic
    from parallelbench.rank.world import World
    from parallelbench.spec.config import RunConfig
    from parallelbench.strategies.replica import Replica


class RingDdp(Strategy, frozen=True, kw_only=True):
    """One process per device, each with the whole model; a chunked ring averages the gradients during backward."""

    bucket_mib: Annotated[float, Meta(gt=0)]
    """Size of a gradient bucket, MiB (DDP's `bucket_cap_mb`); each bucket goes round the ring once."""
    gradient_as_bucket_view: bool
    """Let gradients share the buckets' memory: saves one copy of all gradients."""

    def processes(self, run: RunConfig, device_type: str) -> int:
        """One per device."""
        return run.devices

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One per device."""
        return run.devices

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse one device, which makes no ring."""
        if run.devices < 2:
            raise ConfigError(
                "strategy=ring_ddp needs two devices or more: choose devices=2, or strategy=single for one device"
            )

    def held(self, run: RunConfig) -> StateShards:
        """A copy of everything."""
        return StateShards.even(1)

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Let DDP fill buckets during backward, and send them round the ring."""
        from parallelbench.strategies.parts.replicas import ModuleReplica, in_ddp, share_buffers

        wrapped = in_ddp(
            model,
            run,
            world,
            bucket_mib=self.bucket_mib,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )
        module = wrapped.module

        replica = ModuleReplica(
            module,
            run=run,
            world=world,
            data_shard=Shard(world.rank, world.size),
            wrapped=wrapped,
            before_evaluation=lambda: share_buffers(module),
        )
        reduce = ring_hook(replica.traffic, world)
        wrapped.register_comm_hook(None, lambda _, bucket: reduce(bucket))
        return replica


def ring_average(values: Tensor, traffic: Traffic) -> None:
    """Replace a contiguous tensor by its mean over the n ranks: every rank sends about 2(n−1)/n of its bytes.

    The tensor is cut into n chunks. In each of 2(n−1) steps every rank passes one chunk to the next rank and gets one
    from the rank before. For n−1 steps what arrives is combined with the rank's own chunk (a reduce-scatter: at the
    end every rank holds one finished chunk), for n−1 steps it replaces it (an all-gather): all ranks get the same bits.
    """
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    chunks = values.view(-1).tensor_split(ranks)
    scratch = torch.empty_like(chunks[0])  # the first chunks are the larger ones
    sends: list[Work] = []
    for step in range(2 * (ranks - 1)):
        leaving, mine = chunks[(rank - step) % ranks], chunks[(rank - step - 1) % ranks]
        reducing = step < ranks - 1
        arriving = scratch[: mine.numel()] if reducing else mine
        sends += _exchange(dist.P2POp(dist.isend, leaving, after), dist.P2POp(dist.irecv, arriving, before))
        traffic.send("gradient", leaving.numel() * leaving.element_size())
        if reducing:
            # A running mean of the ranks passed so far: one pass over memory, and half types can't overflow.
            torch.lerp(arriving, mine, 1 / (step + 2), out=mine)
    # A chunk is overwritten only by what it became on its way round, so after the next rank has read it.
    for work in sends:
        work.wait()


def _exchange(*operations: P2POp) -> list[Work]:
    """Start to send and to receive, in this order, wait for what arrives, and return what may still be on its way out.

    Tensors of fewer values than ranks have empty chunks, which nobody sends.
    """
    import torch.distributed as dist

    present = [operation for operation in operations if operation.tensor.numel()]
    works: list[Work] = dist.batch_isend_irecv(present) if present else []
    if works:
        works.pop().wait()  # NCCL has one work for both
    return works


def ring_hook(traffic: Traffic, world: World) -> Callable[[GradBucket], torch.futures.Future[Tensor]]:
    """Return what DDP calls with each full bucket, in the same order on all ranks; backward goes on meanwhile."""
    return _stream_hook(traffic, world.device) if world.device_type == "cuda" else _thread_hook(traffic)


def _thread_hook(traffic: Traffic) -> Callable[[GradBucket], torch.futures.Future[Tensor]]:
    from concurrent.futures import ThreadPoolExecutor

    import torch

    ring = ThreadPoolExecutor(1, "ring")  # one thread: buckets go round one after the other, in order

    def reduce(bucket: GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        values = bucket.buffer()

        def run() -> None:
            try:
                ring_average(values, traffic)
                future.set_result(values)
            except Exception as error:  # a rank that is gone: backward raises it
                future.set_exception(error)  # type: ignore[arg-type]

        ring.submit(run)
        return future

    return reduce


def _stream_hook(traffic: Traffic, device: torch.device) -> Callable[[GradBucket], torch.futures.Future[Tensor]]:
    import torch

    stream = torch.cuda.Stream(device)

    def reduce(bucket: GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device])
        stream.wait_stream(torch.cuda.current_stream(device))  # the bucket is full
        with torch.cuda.stream(stream):
            ring_average(bucket.buffer(), traffic)
            future.set_result(bucket.buffer())  # whoever waits for it waits for this stream
        return future

    return reduce
