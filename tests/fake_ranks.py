"""One rank of many in one process: `python -m tests.fake_ranks` tries cases and prints what came of each.

The group is torch's `fake` one: collectives do nothing, and the other ranks are made up. So what is computed means
nothing, but everything else is the suite's and torch's own: meshes, sharding, hooks, schedules, updates, state.
Updates are those of GPUs (fused, where torch can). Whatever would make the host wait for a GPU, reading a value, is an
error in a step, unless the strategy waits by design.

Tensors are real, on the CPU; or, of cases `on_gpus`, without values, on the rank's own GPUs (`tests.fake_devices`).
What such a case makes torch load and remember, those after it find where it was not `forked`.

Input: a JSON list of cases on stdin. Output: a JSON list of texts, "ok" or what failed.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from launch.sweep import one_run
from parallelbench.config.components import Batch
from parallelbench.config.replica import Replica
from parallelbench.config.run import RunConfig
from parallelbench.config.run_rules import check_run
from parallelbench.errors import ConfigError
from parallelbench.gpu_check.variants import waits_by_design
from parallelbench.optim.optimizers import FirstOrder
from parallelbench.strategies import mesh, pipeline
from parallelbench.strategies.data_parallel import DdpStrategy
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.fake_devices import without_values
from tests.scripted_cuda import ScriptedCuda

STEPS = 2
PRELOADED = (
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining"),
    *("torch.distributed.optim", "torch.nn.parallel"),
    *("torch._subclasses.fake_tensor", "torch.utils.flop_counter"),
    *("parallelbench.strategies.tensor.shards", "parallelbench.strategies.pipeline.stages"),
    "parallelbench.strategies.expert.dispatch",
    *("parallelbench.strategies.servers.servers", "parallelbench.strategies.lbfgs.sandblaster"),
)
"""Loaded once, before the cases' processes are forked."""
PATIENCE_S = 120
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select")


class NoReads(TorchDispatchMode):
    """Raises where the host needs a value of a tensor, for which it would wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in READS and not _reads_a_step_count():
            raise RuntimeError(f"the host would wait for the GPU: {name}")
        return func(*args, **(kwargs or {}))


def _reads_a_step_count() -> bool:
    """Whether a `torch.optim` optimizer reads how many steps it has taken, which torch keeps on the host."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_get_value":
        frame = frame.f_back
    return frame is not None and frame.f_globals["__name__"] == "torch.optim.optimizer"


def tried(case: dict[str, Any]) -> str:
    """Build, step, evaluate, save and load one rank of a run, in a process of its own."""
    try:
        run = one_run([f"strategy={case['strategy']}", f"devices={case['size']}", *case["overrides"]]).run
        check_run(run, "cuda")
    except ConfigError as error:
        return f"refused: {error}"
    if case.get("on_gpus"):
        rank = _drive_on_gpus, run, case["rank"], run.strategy.processes(run, "cuda")
        return _forked(_trained, *rank) if case.get("forked", True) else _trained(*rank)
    return _forked(_trained, _drive, run, case["rank"], case["size"])


def _trained(drive: Callable[[RunConfig, int, int], None], run: RunConfig, rank: int, size: int) -> str:
    if size > 1:
        dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        drive(run, rank, size)
    except Exception as error:
        if "-v" in sys.argv:
            traceback.print_exc()
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return "ok"


def _forked(trained: Callable[..., str], *arguments: Any) -> str:
    """What came of a rank in a process of its own: DTensor remembers the groups of the first mesh of a shape."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(PATIENCE_S)
        torch.set_num_threads(1)  # replaces the parent's pool of threads, for which autograd's threads would race
        os.write(writing, trained(*arguments).encode()[:4096])
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return text or _without_answer(os.waitstatus_to_exitcode(status))


def _without_answer(code: int) -> str:
    return f"no answer within {PATIENCE_S} s" if code == -signal.SIGALRM else f"its process ended with code {code}"


def _drive(run: RunConfig, rank: int, size: int) -> None:
    world = World(rank=rank, size=size, local_rank=rank)
    torch.manual_seed(0)
    replica = run.strategy.prepare(build_model(run), run, world)
    for _ in range(STEPS):
        with nullcontext() if waits_by_design(run) else NoReads():
            result = replica.step(_batch(run, replica))
        if result is not None:
            assert result.tensor().shape == (2,)
    replica.evaluate([_batch(run, replica)])
    state = copy.deepcopy(replica.local_state())
    replica.close()
    again = run.strategy.prepare(build_model(run), run, world)
    again.load_local_state(state)
    assert _flat(again.local_state()) == _flat(state)
    again.step(_batch(run, again))
    again.close()


def _drive_on_gpus(run: RunConfig, rank: int, size: int) -> None:
    """Steps, an evaluation and a checkpoint of a rank whose tensors are on GPUs, and without values."""
    here, own = size // run.nodes, run.devices // size
    first = rank % here * own
    gpus = tuple(torch.device("cuda", index) for index in range(first, first + own))
    world = World(rank=rank, size=size, local_rank=rank % here, device_type="cuda", devices=gpus)
    model = build_model(run)
    with without_values(first), pytest.MonkeyPatch.context() as patched, _meshes_with_values():
        ScriptedCuda().install_beside_torch(patched)
        replica = run.strategy.prepare(model, run, world)
        result = replica.step(_batch(run, replica, world.device))
        if result is not None:
            assert result.tensor().shape == (2,)
        replica.evaluate([_batch(run, replica, world.device)])
        replica.load_local_state(replica.local_state())
        replica.step(_batch(run, replica, world.device))
        replica.close()


@contextmanager
def _meshes_with_values() -> Iterator[None]:
    """A mesh is made of ranks' numbers, which are read."""

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            with _disable_current_modes():
                return function(*arguments, **options)

        return called

    with (
        mock.patch.object(mesh, "_new_mesh", outside(mesh._new_mesh)),
        mock.patch.object(DeviceMesh, "__getitem__", outside(DeviceMesh.__getitem__)),
        mock.patch.object(DeviceMesh, "__init__", outside(DeviceMesh.__init__)),
        mock.patch.object(pipeline, "position_in", outside(mesh.position_in)),
    ):
        yield


def _flat(state: Any) -> Any:
    """Plain values, to compare."""
    if isinstance(state, torch.Tensor):
        return state.double().nan_to_num().tolist()
    if isinstance(state, dict):
        return {key: _flat(value) for key, value in state.items()}
    return [_flat(value) for value in state] if isinstance(state, (list, tuple)) else state


def _batch(run: RunConfig, replica: Replica, device: torch.device | None = None) -> Batch:
    shard = replica.data_shard
    size = run.global_batch_size // shard.count
    dtype = torch.float64 if run.precision == "fp64" else torch.float32
    images = torch.rand(size, *run.data.shape, dtype=dtype, device=device) if shard.images else None
    if images is not None and run.data.kind == "tokens":
        images = images.long()
    labels = torch.zeros(size, *run.data.label_shape, dtype=torch.int64, device=device) if shard.labels else None
    return Batch(images, labels, size)


def _built_for_a_gpu(self: FirstOrder, parameters: Any, run: RunConfig, device_type: str) -> Any:
    return _build(self, parameters, run, "cuda")


def _averaged_by_nobody(self: DdpStrategy, *arguments: Any, **options: Any) -> Any:
    """The fake group's all-reduce gives DDP no result that its reducer could read; a hook does."""
    wrapped = _in_ddp(self, *arguments, **options)
    if self.name in ("ddp", "zero1", "context_parallel", "expert_parallel"):
        wrapped.register_comm_hook(None, _done)
    return wrapped


def _done(_state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


_build, _in_ddp = FirstOrder.build, DdpStrategy.in_ddp

if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
    cases = json.load(sys.stdin)
    importlib.import_module("tests.frozen")
    with (
        mock.patch.object(FirstOrder, "build", _built_for_a_gpu),
        mock.patch.object(DdpStrategy, "in_ddp", _averaged_by_nobody),
        mock.patch.object(mesh, "_set_run_timeout"),  # fake groups never wait
    ):
        print(json.dumps([tried(case) for case in cases]))
