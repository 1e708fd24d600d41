"""Peak memory of one rank of many, as its operations allocate: `python -m tests.advisor.rank_memory`.

Like `tests.fake_ranks`, whose made-up group it takes. Input: a JSON list of [overrides, rank]. Output: a JSON list of
the most bytes that tensors held at once in the second step.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import weakref
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._guards import active_fake_mode
from torch.distributed._tools.mem_tracker import get_untyped_storages
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from launch.sweep import one_run
from parallelbench.config.run import RunConfig
from parallelbench.strategies import mesh
from parallelbench.strategies.data_parallel import DdpStrategy
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.fake_ranks import PRELOADED, _averaged_by_nobody, _batch

_resize = torch.UntypedStorage.resize_


class LiveTensors(TorchDispatchMode):
    """Bytes of all storages that an operation has read or made, as long as they live: also those made in C++."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its local tensors come by
        made = func(*args, **(kwargs or {}))
        if active_fake_mode() is None:
            for value in tree_iter((args, kwargs, made)):
                if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                    for storage in get_untyped_storages(value):
                        self.see(storage)
        return made

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count it, or what it has grown by: FSDP resizes storages."""
        if storage not in self._sizes:
            self._sizes[storage] = size = [0]
            weakref.finalize(storage, self._gone, size)
        held = self._sizes[storage]
        self.now += storage.nbytes() - held[0]
        held[0] = storage.nbytes()
        self.most = max(self.most, self.now)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """In the place of `UntypedStorage.resize_`, which is no operation."""
        _resize(storage, size)
        self.see(storage)

    def _gone(self, size: list[int]) -> None:
        self.now -= size[0]


def peak_bytes(run: RunConfig, rank: int) -> int:
    """Of the second step: in the first one, optimizers make their states."""
    if run.devices > 1:
        dist.init_process_group("fake", rank=rank, world_size=run.devices)
    live = LiveTensors()
    torch.UntypedStorage.resize_ = lambda *arguments: live.resize(*arguments)  # type: ignore[method-assign,assignment]
    with live:
        world = World(rank=rank, size=run.devices, local_rank=rank)
        replica = run.strategy.prepare(build_model(run), run, world)
        for _ in range(2):
            gc.collect()
            live.most = live.now
            replica.step(_batch(run, replica))
    return live.most


def _forked(run: RunConfig, rank: int) -> int | None:
    reading, writing = os.pipe()
    if os.fork() == 0:
        torch.set_num_threads(1)  # see tests.fake_ranks
        os.write(writing, str(peak_bytes(run, rank)).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        text = pipe.read().decode()
    os.wait()
    return int(text) if text else None


if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
    importlib.import_module("tests.frozen")
    with mock.patch.object(DdpStrategy, "in_ddp", _averaged_by_nobody), mock.patch.object(mesh, "_set_run_timeout"):
        print(json.dumps([_forked(one_run(overrides).run, rank) for overrides, rank in json.load(sys.stdin)]))
