"""Forks the ranks of one run after the other from a process that has imported all they need:
`python -m parallelbench.rank.warm FD`.

A fork copies one thread only, so this process never computes: no thread pool, no autograd engine, no CUDA. Each rank
begins as a cold one is after its imports, and does the same from there. Whoever started this process sends an `Order`
through the socket FD for each run, and ends it by closing the socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from parallelbench.rank import worker

if TYPE_CHECKING:
    from collections.abc import Callable

PRELOADED = (
    "parallelbench.rank.session",
    # What torch imports late: for the first optimizer, for `use_deterministic_algorithms`, and for the strategies.
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)
MESSAGE_BYTES = 65_536
"""Room for a message: an order holds a path."""
_TOGETHER_S = 0.1
"""Ranks that fail within this time of the first one get to say so, as under torchrun."""
_PR_SET_PDEATHSIG = 1


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One run to start. With it come two descriptors: its log, and a socket for the answers."""

    arguments: list[str]
    """Those of `parallelbench.rank.worker`."""
    processes: int


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first answer."""

    pid: int
    """Its own process group's leader; all ranks are in that group."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first answer instead: nothing was started."""

    reason: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The second answer: the run is over, and its processes are gone or have been sent SIGKILL."""

    returncode: int


Answer = Started | Refused | Ended


def main(descriptor: int) -> int:
    """Serve one order after the other until the socket is closed."""
    _die_with_parent()
    for module in PRELOADED:
        importlib.import_module(module)
    # Else the first collection of each child would copy all pages that hold objects.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=descriptor) as orders:
        while True:
            content, received, _, _ = socket.recv_fds(orders, MESSAGE_BYTES, 2)
            if not content:
                return 0
            log, answers = received[0], socket.socket(fileno=received[1])
            with answers:
                _serve(msgspec.json.decode(content, type=Order), log, orders, answers)


def _serve(order: Order, log: int, orders: socket.socket, answers: socket.socket) -> None:
    """Start one run and wait for its end."""

    def begin() -> int:
        os.setsid()
        _die_with_parent()
        os.dup2(log, 1)
        os.dup2(log, 2)
        for inherited in (log, orders.detach(), answers.detach()):
            os.close(inherited)
        return lead(order)

    if (reason := unforkable()) is not None:
        os.close(log)
        _say(answers, Refused(reason=reason))
        return
    leader = forked(begin)
    os.close(log)
    _say(answers, Started(pid=leader))
    os.waitid(os.P_PID, leader, os.WEXITED | os.WNOWAIT)
    # Until it is reaped, no other process can have its number.
    os.killpg(leader, signal.SIGKILL)
    _, status = os.waitpid(leader, 0)
    _say(answers, Ended(returncode=os.waitstatus_to_exitcode(status)))


def _say(answers: socket.socket, answer: Answer) -> None:
    with contextlib.suppress(BrokenPipeError):  # whoever asked may be gone
        answers.send(msgspec.json.encode(answer))


def unforkable() -> str | None:
    """Why a child of this process could not be trusted; None where it can."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"the warm process has {threads} threads, and a fork copies one"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the warm process uses CUDA, which does not survive a fork"
    return None


def forked(work: Callable[[], int]) -> int:
    """Fork a child that ends with the exit code that `work` returns; returns its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # what the parent has registered for its own end is no business of the child


def lead(order: Order) -> int:
    """Be the only rank, or do what torchrun does for several; returns the exit code."""
    if order.processes == 1:
        return worker.main(order.arguments)
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        port = meeting.getsockname()[1]
        ranks = {forked(partial(_rank, order, rank, meeting)): rank for rank in range(order.processes)}
        store = _store(port, meeting)
    codes = _first_to_fail(ranks)
    del store  # it had to last as long as the ranks
    for rank, code in codes.items():
        print(f"failed (exitcode: {code}) local_rank: {rank}", flush=True)  # as torchrun prints it
    return 1 if codes else 0


def _rank(order: Order, rank: int, meeting: socket.socket) -> int:
    os.environ |= variables(rank, order.processes, meeting.getsockname()[1])
    meeting.close()
    return worker.main(order.arguments)


def variables(rank: int, processes: int, port: int) -> dict[str, str]:
    """What a rank learns from torchrun through its environment."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The ranks meet at the leader's store: should rank 0 die, the others need not lose it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _store(port: int, meeting: socket.socket) -> object:
    """The store that the ranks meet at. It has threads, so it comes after the forks."""
    import torch.distributed as dist

    listening = meeting.detach()
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening)  # type: ignore[attr-defined]


def _first_to_fail(ranks: dict[int, int]) -> dict[int, int]:
    """Wait until all ranks have ended or one has failed; rank → exit code of those that failed first."""
    failed: dict[int, int] = {}
    running = dict(ranks)
    while running and not failed:
        pid, status = os.wait()
        failed |= _failure(running.pop(pid), status)
    if failed:
        time.sleep(_TOGETHER_S)
    for pid, rank in running.items():
        ended, status = os.waitpid(pid, os.WNOHANG)
        failed |= _failure(rank, status) if ended else {}
    return failed


def _failure(rank: int, status: int) -> dict[int, int]:
    code = os.waitstatus_to_exitcode(status)
    return {rank: code} if code else {}


def _die_with_parent() -> None:
    """A parent that is killed has no chance to end its children: then the kernel does it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
