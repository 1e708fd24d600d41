"""Run a function on several gloo ranks, and give back what each returned."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

HANGS_AFTER_S = 540
"""Less than a test may take; on a machine that others use, too, ranks that compile need minutes."""
PATIENCE_S = 240
"""How long a rank waits for another."""
MOST_IDLE = 4
"""More ranks are rarely asked for, and each holds its memory."""
MOST_FILES = 200
"""A rank with more of them does not go on: groups keep some until they are collected, and 1,024 are the usual limit."""
PRELOADED = (
    "pytest",
    "torch",
    "torch._dynamo",
    "torch._inductor.codegen.cpp",
    "torch._inductor.codegen.triton",
    "torch._inductor.compile_fx",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.utils.cpp_extension",
    "torch.utils.flop_counter",
    "torchvision",
    "parallelbench.training.torch_session",
    "parallelbench.strategies.graph",
    "parallelbench.strategies.fsdp.shards",
    "parallelbench.strategies.pipeline.stages",
    "parallelbench.strategies.tensor.shards",
    "tests.strategies.training",
    "tests.strategies.test_gate",
    "tests.test_checkpoint",
    "tests.test_closing",
    "tests.frozen",
)
"""What the process that ranks are forked from has loaded, in this order."""


def run_ranks(function: Callable[..., Any], size: int, folder: Path, *arguments: Any) -> list[Any]:
    """`function(rank, size, *arguments)` in `size` processes that share a gloo group; results by rank.

    `function` must be importable. The first rank to fail decides the exception. Processes go on to the next call,
    unless `function` has changed what the next would see (`_State`).
    """
    init = folder / f"init-{uuid.uuid4().hex}"  # of this call: that of an earlier one tells of ranks that are gone
    given = pickle.dumps((function, arguments, os.environ["PATH"]))
    ranks = [_IDLE.pop() if _IDLE else _Rank() for _ in range(size)]
    results, unchanged = [b""] * size, list[_Rank]()
    try:
        for number, rank in enumerate(ranks):
            rank.pipe.send((given, number, size, str(init)))
        waiting = {rank.pipe: number for number, rank in enumerate(ranks)}
        while waiting:
            for pipe in wait(list(waiting)):
                number = waiting.pop(pipe)  # type: ignore[call-overload]
                failed, results[number], goes_on = ranks[number].answer()
                if failed:
                    if "Timed out" in failed:
                        for other in waiting.values():
                            ranks[other].tell_where()
                    raise RuntimeError(failed)
                unchanged += [ranks[number]] if goes_on else []
        _IDLE.extend(unchanged[: MOST_IDLE - len(_IDLE)])
    finally:
        for rank in ranks:
            if rank not in _IDLE:
                rank.end()
    return [pickle.loads(result) for result in results]


class _Rank:
    """A process that waits for what it is to do; it ends with this one."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,))
        self.process.start()
        theirs.close()

    def answer(self) -> tuple[str, bytes, bool]:
        """Why it has failed or "", what it gives back, and whether it can go on."""
        try:
            answer: tuple[str, bytes, bool] = self.pipe.recv()
        except EOFError:
            self.process.join()
            return f"a rank ended without a word, with {self.process.exitcode}", b"", False
        return answer

    def tell_where(self) -> None:
        """Its stack goes to stderr: it may be what others have waited for."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        self.process.join(1)

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


_IDLE: list[_Rank] = []


def idle_ranks() -> set[BaseProcess]:
    """Processes that wait for the next call."""
    return {rank.process for rank in _IDLE}


@atexit.register  # before that of multiprocessing, which waits for its processes
def _end_all() -> None:
    while _IDLE:
        _IDLE.pop().end()


def _serve(pipe: Connection) -> None:
    os.environ["TORCH_WARM_POOL"] = "0"  # compilers for Triton, one more torch per rank; C++ is compiled here
    faulthandler.register(signal.SIGUSR1)
    state = _State()
    with contextlib.suppress(EOFError):
        while True:
            given = pipe.recv()
            state.restore()
            before = state.code()
            failed, result = _do(*given)
            unchanged = before.items() <= state.code().items() and len(os.listdir("/proc/self/fd")) < MOST_FILES
            pipe.send((failed, result, unchanged))


_CACHED = type(functools.lru_cache(lambda: None))


class _State:
    """What one call could leave behind for the next in the same process."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._cores = os.sched_getaffinity(0)
        self._threads = threading.active_count()

    def restore(self) -> None:
        """Put back what is set on purpose."""
        import torch

        os.environ.clear()
        os.environ.update(self._environment)
        os.sched_setaffinity(0, self._cores)
        torch.manual_seed(0)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]
        for cached in _caches():  # such as meshes of a group that is gone
            cached.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()  # type: ignore[attr-defined]

    def code(self) -> dict[object, int]:
        """What would be another one if a test had put its own in the place of a function; and threads that go on."""
        found: dict[object, int] = {"threads": threading.active_count() - self._threads}
        for name, module in list(sys.modules.items()):
            if name.startswith(("parallelbench.", "torch.distributed", "torch.nn.", "torch.optim")):
                for key, value in list(vars(module).items()):
                    if callable(value):
                        found[name, key] = id(value)
                        if isinstance(value, type) and value.__module__ == name:
                            found |= {
                                (name, key, own): id(_own(each)) for own, each in vars(value).items() if callable(each)
                            }
        return found


def _caches() -> set[Any]:
    """What torch.distributed and the suite remember by arguments, in functions and in methods."""
    found = set[Any]()
    for name, module in list(sys.modules.items()):
        if name.startswith(("parallelbench.", "torch.distributed.")):
            for value in list(vars(module).values()):
                kept = list(vars(value).values()) if isinstance(value, type) else [value]
                found |= {each for each in kept if isinstance(each, _CACHED)}
    return found


def _own(function: Any) -> Any:
    """What torch wraps in its own at first use: an optimizer's step."""
    return function.__wrapped__ if hasattr(function, "hooked") else function


def _do(given: bytes, rank: int, size: int, init: str) -> tuple[str, bytes]:
    """Why it has failed or "", and the result.

    Takes and gives pickles, which copy tensors: torch would open a file for each, and 1,024 are the usual limit.
    """
    import torch.distributed as dist

    # A rank that hangs ends with its stack on stderr, which fails the test: sub-groups wait for half an hour.
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    timeout = timedelta(seconds=PATIENCE_S)
    dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=size, timeout=timeout)
    try:
        function, arguments, os.environ["PATH"] = pickle.loads(given)
        result = pickle.dumps(function(rank, size, *arguments))
        # Nobody leaves while others still connect to it: they would find the connection closed, or wait for ever.
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # another rank has failed, and says so itself
                dist.barrier()
        return "", result
    except BaseException as error:
        return f"rank {rank}: {error}\n{traceback.format_exc()}", b""
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
