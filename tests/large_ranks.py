"""The first rank of a training too large for this machine: `python -m tests.large_ranks` builds it and takes a step.

The group is torch's `fake` one (see `tests.fake_ranks`), and tensors have no values (`FakeTensorMode`), so they take no
memory; what they would take is counted. Input: a JSON list of overrides on stdin. Output: what was counted, as JSON.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launch.sweep import one_run
from parallelbench.config.run_rules import check_run
from parallelbench.strategies import mesh
from parallelbench.strategies.state import local
from parallelbench.training.replica import new_replica
from parallelbench.training.torch_session import new_model
from parallelbench.world.world import World
from tests.fake_ranks import _batch, _meshes_with_values


class HostMemory(TorchDispatchMode):
    """Bytes of all tensors of a mode that are on the CPU, as long as they live; not of those that only give shapes."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self.now = self.most = 0
        self._held: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its local tensors come by
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, FakeTensor) and value.fake_mode is self._mode and value.device.type == "cpu":
                self._see(value.untyped_storage())
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._held:
            self._held.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.now -= size


def counted(overrides: list[str]) -> dict[str, int]:
    """Bytes: of all parameters, of this rank's, of the largest layer, and of what the start held at most."""
    run = one_run(overrides).run
    check_run(run, "cuda")
    dist.init_process_group("fake", rank=0, world_size=run.devices)
    with (
        mock.patch.object(mesh, "_set_run_timeout"),  # fake groups never wait
        _meshes_with_values(),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
    ):
        model = new_model(run)
        layers = [sum(each.nbytes for each in layer.parameters()) for layer in model]
        whole = sum(each.nbytes for each in model.parameters())
        with HostMemory(mode) as memory:
            replica = new_replica(model, run, World(size=run.devices))
            gc.collect()
        replica.step(_batch(run, replica))
        own, _ = replica.trained()  # type: ignore[attr-defined]
        share = sum(local(each).nbytes for each in own.parameters())
    return {"whole": whole, "share": share, "layer": max(layers), "peak": memory.most}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(counted(json.load(sys.stdin))))
