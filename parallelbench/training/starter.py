"""Starts and watches one node's ranks of a framework that has an environment of its own:
`python -m parallelbench.training.starter RUN_DIR ATTEMPT [PLUGIN FOLDER]`, in the suite's environment.

Where torch trains the same, it first hands over what the run starts from, and judges after the ranks have trained.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from parallelbench.environments import python_of
from parallelbench.errors import ConfigError, program
from parallelbench.frameworks import CONTROL_ADDRESS, CONTROL_FD, CONTROL_SECRET, FRAMEWORKS, HEAD, RENDEZVOUS
from parallelbench.processes import die_with_parent
from parallelbench.results.attempt import Attempt
from parallelbench.results.exits import Exits, exits_file, write_exits
from parallelbench.training.exchange import Exchange
from parallelbench.training.worker import LAUNCHED_AT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from parallelbench.config.run import RunConfig


_LINGER_S = 8.0
"""How long the other ranks may take to record how they ended, once one has failed."""
_POLL_S = 0.05


def main(arguments: list[str]) -> int:
    """One node's ranks from start to end; returns the exit code of the first that failed."""
    die_with_parent()
    attempt = Attempt(Path(arguments[0]) / "attempts" / arguments[1])
    sys.path.extend(arguments[3:])
    run = attempt.config(arguments[2] if len(arguments) > 2 else None)
    info = attempt.info()
    assert info is not None, "the supervisor describes an attempt before it starts ranks"
    alone = f"0  {secrets.token_hex(32)}"
    judged = FRAMEWORKS[run.strategy.framework].is_held_against_torch
    node, address, secret = os.environ.pop(RENDEZVOUS, alone).split(" ")
    exits = exits_file(attempt.path, int(node))
    listening = None
    if node == "0":
        # Before torch's part, which takes seconds: the other nodes' ranks connect meanwhile.
        try:
            listening = _listen(address)
            address = address or ":".join(map(str, listening.getsockname()[:2]))
        except OSError as error:
            print(f"{address} could not be listened on: {error}", flush=True)
            write_exits(exits, Exits(failure=errno.errorcode.get(error.errno or 0, type(error).__name__)))
            return 1
        _remove_leftovers(attempt)
        if judged and (code := _torch("make", arguments)):
            if code < 0:  # a signal has ended what rank 0 would begin with
                write_exits(exits, Exits(codes={0: code}))
            return code
    ranks = _ranks(
        run, arguments, processes=info.processes, node=int(node), address=address, listening=listening, secret=secret
    )
    code = _watched(ranks, exits)
    if node == "0":
        if judged and not code and Exchange.of(attempt).has("closing-0"):
            _torch("judge", arguments)  # a failure leaves the run without its closing check, which its result says
        shutil.rmtree(Exchange.of(attempt).folder, ignore_errors=True)
    return code


def _torch(verb: str, arguments: Sequence[str]) -> int:
    command = [sys.executable, "-m", "parallelbench.training.reference", verb, *arguments]
    return subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode


def _remove_leftovers(attempt: Attempt) -> None:
    """What earlier attempts left in the run's folder whose starter was itself killed."""
    for earlier in attempt.path.parent.iterdir():
        shutil.rmtree(Exchange.of(Attempt(earlier)).folder, ignore_errors=True)


def _ranks(
    run: RunConfig,
    arguments: Sequence[str],
    *,
    processes: int,
    node: int,
    address: str,
    listening: socket.socket | None,
    secret: str,
) -> dict[int, subprocess.Popen[bytes]]:
    """Start this node's ranks, of the `processes` of all nodes, which meet at node 0's `address` (host:port).

    `listening`: on node 0, where rank 0 waits for the others. `secret`: by what they know each other.
    """
    here = processes // run.nodes
    command = [str(python_of(run.strategy.framework)), "-m", "parallelbench.training.worker", *arguments]
    ranks = {}
    for local_rank in range(here):
        rank = node * here + local_rank
        names = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": here}
        variables = {name: str(value) for name, value in names.items()} | {LAUNCHED_AT: str(time.time())}
        passed = [listening.fileno()] if listening is not None and rank == 0 else []
        variables |= {CONTROL_FD: str(passed[0])} if passed else {CONTROL_ADDRESS: address}
        variables |= {CONTROL_SECRET: secret, HEAD: address.rpartition(":")[0]}
        ranks[rank] = _started(command, variables, passed)
    if listening is not None:
        listening.close()
    return ranks


def _listen(address: str) -> socket.socket:
    """A socket on this address's port, at all interfaces; empty: on a free port of this machine's own.

    Raises `OSError` where the port is taken.
    """
    host, port = ("", int(address.rpartition(":")[2])) if address else ("127.0.0.1", 0)
    return socket.create_server((host, port), backlog=1024)


def _started(command: Sequence[str], variables: Mapping[str, str], passed: Sequence[int]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **variables}
    return subprocess.Popen(command, env=environment, pass_fds=passed, preexec_fn=die_with_parent)


def _watched(ranks: Mapping[int, subprocess.Popen[bytes]], exits: Path) -> int:
    """Wait for all, and end the others once one fails; returns 0, or the exit code of the first that failed.

    Who fails is recorded at once: whom a killed rank takes along may be gone before it is.
    """
    failed: dict[int, int] = {}
    ends_at = math.inf
    while True:
        codes = {rank: process.poll() for rank, process in ranks.items()}
        if now := {rank: code for rank, code in codes.items() if code and rank not in failed}:
            failed |= now
            write_exits(exits, Exits(codes=failed))
            ends_at = min(ends_at, time.monotonic() + _LINGER_S)
        if None not in codes.values():
            break
        if time.monotonic() > ends_at:
            for process in ranks.values():
                process.kill()
            for process in ranks.values():
                process.wait()
            break
        time.sleep(_POLL_S)
    return next(iter(failed.values()), 0)


if __name__ == "__main__":
    try:
        code = program(lambda: main(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(str(error))
    # As a shell: a signal's number has no exit code of its own.
    sys.exit(code if code >= 0 else 128 - code)
