"""Run a function on several gloo ranks, and give back what each returned."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import traceback
import uuid
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


HANGS_AFTER_S = 540
"""Less than a test may take; on a machine that others use, too, ranks that compile need minutes."""
PATIENCE_S = 240
"""How long a rank waits for another."""
PRELOADED = (
    "concurrent.futures.process",
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
    "tests.strategies.test_sequence_parallel",
    "tests.test_checkpoint",
    "tests.test_closing",
    "tests.frozen",
)
"""What the process that ranks are forked from has loaded, in this order."""


def run_ranks(function: Callable[..., Any], size: int, folder: Path, *arguments: Any) -> list[Any]:
    """`function(rank, size, *arguments)` in `size` processes that share a gloo group; results by rank.

    `function` must be importable. The first rank to fail decides the exception.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    init = folder / f"init-{uuid.uuid4().hex}"  # of this call: that of an earlier one tells of ranks that are gone
    with ProcessPoolExecutor(size, mp_context=context) as pool:
        given = pickle.dumps((function, arguments, os.environ["PATH"]))
        futures = [pool.submit(_rank, given, rank, size, str(init)) for rank in range(size)]
        for ended in wait(futures, return_when=FIRST_EXCEPTION).done:
            ended.result()
        return [pickle.loads(future.result()) for future in futures]


def _rank(given: bytes, rank: int, size: int, init: str) -> bytes:
    """Takes and gives pickles, which copy tensors: torch would open a file for each, and 1,024 are the usual limit."""
    import torch
    import torch.distributed as dist

    os.environ["TORCH_WARM_POOL"] = "0"  # compilers for Triton, one more torch per rank; C++ is compiled here
    torch.set_num_threads(1)
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
        return result
    except BaseException as error:
        raise RuntimeError(f"rank {rank}: {error}\n{traceback.format_exc()}") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
