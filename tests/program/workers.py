"""Trains on batches that are slow to make, and notes the time beside the shim. See `test_processes.py`."""

from __future__ import annotations

import json
import multiprocessing
import time

import torch
from torch.utils.data import DataLoader, Dataset

LENGTH, BATCH = 24, 2


class Slow(Dataset[torch.Tensor]):
    """10 ms per sample."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.ones(400, 400)


def train(loader: DataLoader[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Time of waiting, and of the end of each step."""
    model = torch.nn.Linear(400, 400)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    waits, ends, batches = [], [], iter(loader)
    while True:
        batch = None  # to free the last one's memory is no wait
        start = time.monotonic_ns()
        batch = next(batches, None)
        waits.append(time.monotonic_ns() - start)
        if batch is None:
            return waits, ends
        model(batch).square().mean().backward()
        optimizer.step()
        ends.append(time.monotonic_ns())


def main() -> None:
    none = train(DataLoader(Slow(), batch_size=BATCH))
    fork = train(DataLoader(Slow(), batch_size=BATCH, num_workers=1, multiprocessing_context="fork"))
    spawn = train(DataLoader(Slow(), batch_size=BATCH, num_workers=1, multiprocessing_context="spawn"))
    rank = multiprocessing.get_context("fork").Process(target=train, args=(DataLoader(Slow(), batch_size=20),))
    rank.start()
    rank.join()
    print(json.dumps({"none": none, "fork": fork, "spawn": spawn, "rank": rank.pid}))


if __name__ == "__main__":
    main()
