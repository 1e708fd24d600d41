"""A ring of the suite's own that averages gradients, as Horovod does.

Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"; Sergeev and
Del Balso 2018, "Horovod: fast and easy distributed deep learning in TensorFlow" (arXiv 1802.05799).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._C._distributed_c10d import GradBucket
    from torch.distributed import P2POp, Work

    from parallelbench.measure.traffic import Traffic
    from parallelbench.world.world import World


def ring_average(values: Tensor, traffic: Traffic) -> None:
    """Replace a contiguous tensor by its mean over the n ranks: every rank sends about 2(n−1)/n of its bytes.

    The tensor is cut into n chunks. In each of 2(n−1) steps every rank sends a chunk to the next rank and receives one
    from the rank before. In the first n−1 steps a rank combines the received chunk with its own (a reduce-scatter: at
    the end every rank holds one finished chunk); in the others it replaces its own (an all-gather). So all ranks get
    the same bits.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    chunks = values.view(-1).tensor_split(ranks)
    scratch = torch.empty_like(chunks[0])  # the first chunks are the larger ones
    sends: list[Work] = []
    for step in range(2 * (ranks - 1)):
        leaving, own = chunks[(rank - step) % ranks], chunks[(rank - step - 1) % ranks]
        reducing = step < ranks - 1
        arriving = scratch[: own.numel()] if reducing else own
        sends += _exchange(dist.P2POp(dist.isend, leaving, after), dist.P2POp(dist.irecv, arriving, before))
        traffic.send("gradient", leaving.nbytes)
        if reducing:
            # A running mean of the ranks passed so far: one pass over memory, and half types can't overflow.
            torch.lerp(arriving, own, 1 / (step + 2), out=own)
    # A chunk is overwritten only by its own finished value, which exists only after the next rank has read the chunk.
    for work in sends:
        work.wait()


def _exchange(*operations: P2POp) -> list[Work]:
    """Start to send and to receive, in this order; wait for the received chunk; return the sends that may still run.

    A tensor of fewer values than ranks has empty chunks, which are not sent.
    """
    present = [operation for operation in operations if operation.tensor.numel()]
    works: list[Work] = dist.batch_isend_irecv(present) if present else []
    if works:
        works.pop().wait()  # NCCL has one work for both
    return works


def ring_hook(traffic: Traffic, world: World) -> Callable[[GradBucket], torch.futures.Future[Tensor]]:
    """Return the hook that DDP calls with each full bucket, in the same order on all ranks, while backward goes on."""
    return _stream_hook(traffic, world.device) if world.device_type == "cuda" else _thread_hook(traffic)


def _thread_hook(traffic: Traffic) -> Callable[[GradBucket], torch.futures.Future[Tensor]]:
    ring = ThreadPoolExecutor(1, "ring")  # one thread keeps the buckets in order

    def reduce(bucket: GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        values = bucket.buffer()

        def run() -> None:
            try:
                ring_average(values, traffic)
                future.set_result(values)
            except Exception as error:  # another rank is gone: backward raises this error
                future.set_exception(error)  # type: ignore[arg-type]

        ring.submit(run)
        return future

    return reduce


def _stream_hook(traffic: Traffic, device: torch.device) -> Callable[[GradBucket], torch.futures.Future[Tensor]]:
    stream = torch.cuda.Stream(device)

    def reduce(bucket: GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device])
        stream.wait_stream(torch.cuda.current_stream(device))  # the bucket is full
        with torch.cuda.stream(stream):
            ring_average(bucket.buffer(), traffic)
            future.set_result(bucket.buffer())  # waiting for the future waits for this stream
        return future

    return reduce
