"""What gloo sends, held against the kernel's counters of a loopback interface that nobody else uses."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelbench.measure.counted_bytes import CountedBytes
from tests.ranks import run_ranks
from tests.surroundings import program

SIZE_BYTES = 3 * 2**19
REPEATED = 4
NOISE = 0.03
"""Share of a message that headers, acknowledgements and barriers take."""


def sent_by_loopback() -> int:
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def operations(size: int) -> dict[str, Callable[[], object]]:
    whole, part = torch.ones(SIZE_BYTES // 4), torch.ones(SIZE_BYTES // 4 // size)
    return {
        "all-reduce": lambda: dist.all_reduce(whole),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all-to-all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
    }


def measured(rank: int, size: int) -> dict[str, tuple[float, float, float]]:
    """Of each operation the bytes of all ranks: by textbook, by gloo, and on the interface; ÷ those of the message."""
    found = {}
    for name, operation in operations(size).items():
        operation()  # connects
        dist.barrier()
        with CountedBytes() as counted:
            before = sent_by_loopback()
            dist.barrier()
            for _ in range(REPEATED):
                operation()
            dist.barrier()
            after = sent_by_loopback()
            dist.barrier()
        assert counted.gloo_bytes is not None
        both = torch.tensor([counted.sent_bytes, counted.gloo_bytes], dtype=torch.float64)
        dist.all_reduce(both)
        textbook, gloo = (both / REPEATED / SIZE_BYTES).tolist()
        found[name] = (textbook, gloo, (after - before) / REPEATED / SIZE_BYTES)
    return found


def check(folder: Path, size: int) -> None:
    for name, (textbook, gloo, wire) in run_ranks(measured, size, folder)[0].items():
        assert wire == pytest.approx(gloo, rel=NOISE), name
        assert gloo == pytest.approx(textbook * (2 if name == "reduce-scatter" else 1), rel=1e-3), name


class Within(torch.autograd.Function):
    """Its backward pass begins another one, so many times; the last one sums a message over the ranks."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, passes: int) -> torch.Tensor:
        ctx.passes = passes
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.passes:
            with torch.enable_grad():
                value = torch.ones(1, requires_grad=True)
                Within.apply(value, ctx.passes - 1).sum().backward()
        else:
            threads.append(threading.get_ident())
            dist.all_reduce(torch.ones(1024))
        return gradients[0], None


threads: list[int] = []
MORE_THAN_A_THREAD_NESTS = 70


def sent_by_another_thread(rank: int, size: int) -> float:
    value = torch.ones(1, requires_grad=True)
    with CountedBytes() as counted:
        Within.apply(value, MORE_THAN_A_THREAD_NESTS).sum().backward()
    assert threads.pop() != threading.get_ident(), "torch went on in a thread of its own, as for each GPU"
    return counted.sent_bytes


def test_threads_of_autograd_are_heard_once(tmp_path: Path) -> None:
    assert run_ranks(sent_by_another_thread, 2, tmp_path) == [4096.0, 4096.0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 3])
def test_gloo_sends_what_is_counted(size: int, tmp_path: Path) -> None:
    """In a network namespace of its own, so that no other program uses the interface."""
    code = (
        f"from pathlib import Path; from tests.test_counted_bytes import check; check(Path({str(tmp_path)!r}), {size})"
    )
    ready = ["sh", "-c", f'{program("ip")} link set lo up && exec "$@"', "sh"]
    alone = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"]), *ready]
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may make no network namespace here")
    done = subprocess.run([*alone, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
