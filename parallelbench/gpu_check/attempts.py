"""Attempts of runs by the suite's own worker, forked from a warm process, and what their journals say."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.gpu_check.results import FailedError, ended
from parallelbench.gpu_check.variants import COLLECTIVE_TIMEOUT_S
from parallelbench.processes import inherited
from parallelbench.results.attempt import decoded
from parallelbench.results.exits import Exits, exits_file, read_exits, write_exits
from parallelbench.results.folder import RunFolder
from parallelbench.results.journal import read_tables
from parallelbench.training.checks.parity import DIFFERENCES, checks_parity
from parallelbench.training.failure import RankError
from parallelbench.training.warm import MESSAGE_BYTES, ForkRequest, WarmDoor
from parallelbench.world.world import SHARING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from parallelbench.config.run import RunConfig
    from parallelbench.gpu_check.nodes import Nodes
    from parallelbench.results.attempt import Attempt


ATTEMPT_S = COLLECTIVE_TIMEOUT_S + 120.0
"""How long an attempt may take; compiling takes most. A rank that waits in vain has the time to say so."""
ALONE_S = 180.0
"""The same of one process, which waits for nobody: one that hangs must not cost a borrowed GPU's time."""
_POLL_S = 0.1
_LATE = (
    *("torch._inductor", "torch.distributed.fsdp", "torch.distributed.pipelining"),
    "torch.distributed.tensor.parallel",
)
"""What torch imports late, for its first optimizer or for some strategies, in seconds; no memory is measured here."""
_FOLLOWS = ("peer", "waited", "heartbeat")
"""Kinds of a rank's error that only tell of another rank's."""


class Workers:
    """Trains runs one after the other, on this node or on all nodes of a job; a context."""

    def __init__(
        self, device_type: str, devices: int, folder: Path, nodes: Nodes | None = None, *, share: int = 1
    ) -> None:
        """`devices`: of each node. `folder`: of the attempts, which all nodes see. `nodes` None: only this one.

        `share`: ranks on each GPU, which then counts as so many devices.
        """
        self.device_type, self.devices, self.nodes = device_type, share * devices, nodes
        # Ranks that drive GPUs take their share of the cores beside them.
        self._variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._variables |= {SHARING: "1"} if share > 1 else {}
        self._folder, self._numbers, self._warm = folder, count(1), WarmProcesses()

    @property
    def node_count(self) -> int:
        """Of the job."""
        return 1 if self.nodes is None else self.nodes.count

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._warm.close()
        if self.nodes is not None:
            self.nodes.end()

    def carry_out(self, run: RunConfig) -> Attempt:
        """One attempt of a run, to its end."""
        folder = RunFolder(self._folder / f"run-{next(self._numbers)}")
        attempt = folder.claim()
        assert attempt is not None, "nobody else has this folder"
        attempt.write_config(run)
        processes = run.strategy.processes(run, self.device_type)
        attempt.describe(processes=processes, device_type=self.device_type, oversubscribed=False)
        request = ForkRequest(arguments=[str(folder.path), attempt.path.name], processes=processes)
        limit_s = ATTEMPT_S if processes > 1 else ALONE_S
        variables, deadline = self._variables | run.nccl.variables(), time.monotonic() + limit_s
        with ExitStack() as others:
            if self.nodes is not None and run.nodes > 1:
                request = others.enter_context(self.nodes.taking_part(request, variables))
            code = self._warm.run(request, variables, attempt.log, lambda: time.monotonic() > deadline)
        if code is None:
            attempt.finish("timeout", f"ended after {limit_s:g} s")
        elif code and processes == 1:
            write_exits(exits_file(attempt.path, 0), Exits(codes={0: code}))
        elif code < 0:
            attempt.finish("killed", f"what starts the ranks {ended(code)}")
        if attempt.lock is not None:
            attempt.lock.release()
        return attempt


class WarmProcesses:
    """Processes of which ranks are forks: one for each choice of variables that libraries read when loaded."""

    def __init__(self) -> None:
        self._kept: dict[frozenset[tuple[str, str]], _Warm] = {}

    def run(
        self, request: ForkRequest, variables: Mapping[str, str], log: Path, is_over: Callable[[], bool]
    ) -> int | None:
        """Fork this node's ranks of a run, and wait for their end.

        Returns the exit code of the run's leader; None: it was ended, since `is_over`. Raises `FailedError` where
        nothing can be forked, or what is forked from has ended; the next run then gets another such process.
        """
        key = frozenset(variables.items())
        if key in self._kept and self._kept[key].has_ended():
            self._kept.pop(key).close()
        if key not in self._kept:
            self._kept[key] = _Warm(inherited(os.environ) | dict(variables))
        return self._kept[key].run(request, log, is_over)

    def close(self) -> None:
        """End them, and what they have forked."""
        for warm in self._kept.values():
            warm.close()
        self._kept.clear()


class _Warm:
    def __init__(self, variables: dict[str, str]) -> None:
        with WarmDoor() as door:
            self._process = subprocess.Popen(
                [sys.executable, *door.arguments(*_LATE)],
                env=variables,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._socket = door.opened(lambda: not self.has_ended())

    def run(self, request: ForkRequest, log: Path, is_over: Callable[[], bool]) -> int | None:
        try:
            with log.open("ab") as file:
                socket.send_fds(self._socket, [msgspec.json.encode(request)], [file.fileno()])
            leader, in_time = self._answer(), True
            if isinstance(leader, str):
                raise FailedError(leader)
            while not select.select([self._socket], [], [], _POLL_S)[0]:
                if is_over():
                    in_time = False
                    with suppress(ProcessLookupError):  # it has only begun, or has just ended
                        os.killpg(leader, signal.SIGKILL)
            code = self._answer()
        except ConnectionError:
            self.close()
            raise FailedError(f"the process that ranks are forked from {ended(self._process.returncode)}") from None
        assert isinstance(code, int), "the second answer is an exit code"
        return code if in_time else None

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def _answer(self) -> int | str:
        """Raises `ConnectionError` where the process has ended."""
        if not (content := self._socket.recv(MESSAGE_BYTES)):
            raise ConnectionResetError
        answer: int | str = msgspec.json.decode(content, type=int | str)
        return answer

    def close(self) -> None:
        self._socket.close()
        self._process.kill()  # the kernel then ends what it has forked
        self._process.wait()


class Answer(msgspec.Struct, frozen=True):
    """What an attempt's journals say of its run."""

    problem: str
    """Empty: nothing is wrong."""
    difference: float | None = None
    """The largest one of the parity check; None: none was asked for."""
    steps_not_compared: str = ""
    """Why none of the steps after training was; empty: they were."""


def answer_of(run: RunConfig, attempt: Attempt) -> Answer:
    """Whether an attempt has trained to its end, as one device would have."""
    tables, events = read_tables(attempt.path)
    if (failed := _how_it_failed(attempt, tables, events)) or len(tables["epochs"]) != run.epochs:
        return Answer(failed or f"trained {len(tables['epochs'])} of {run.epochs} epochs")
    difference = None
    if checks_parity(run):
        rows = tables["parity"]
        if not rows:
            return Answer("rank 0 has left no result of the parity check")
        differences = [row[name] for row in rows for name in DIFFERENCES]
        difference = float("nan") if None in differences else max(differences)  # JSON has no NaN
        if not all(row["passed"] for row in rows):
            return Answer(f"difference from one device {difference:.3g} (limit {rows[0]['tolerance']:g})")
    unlike = [
        f"{row['check']} {row['difference']} (limit {row['limit']})"
        for row in tables["checks"]
        if row["passed"] is False
    ]
    if unlike:
        return Answer(f"not like one device: {', '.join(unlike)}", difference)
    trained = run.epochs * run.steps_per_epoch
    further = [row for row in tables["checks"] if (row["step"] or 0) > trained]
    if any(row["passed"] is not None for row in further):
        return Answer("", difference)
    reasons = [row["detail"] for row in tables["checks"] if row["check"] == "steps" or row in further]
    if not reasons:
        return Answer("the closing check has left no word of its steps", difference)
    return Answer("", difference, steps_not_compared=reasons[0])


def _how_it_failed(attempt: Attempt, tables: Mapping[str, list[Any]], events: list[dict[str, Any]]) -> str:
    """Empty: it came to its end, the closing check's included."""
    info = attempt.info()
    assert info is not None
    errors = [decoded(attempt.error_file(rank), RankError) for rank in range(info.processes)]
    said = [error for error in errors if error is not None]
    if said:
        first = min(said, key=lambda error: (error.kind in _FOLLOWS, error.time))
        return f"rank {first.rank}: {first.reason}"
    codes = {rank: code for exits in read_exits(attempt.path, info.processes) for rank, code in exits.codes.items()}
    if codes:
        rank = min(codes, key=lambda rank: (codes[rank] > 0, rank))  # a signal comes first: others fail because of it
        return f"rank {rank} {ended(codes[rank])}{_last_words(attempt) if codes[rank] > 0 else ''}"
    if (outcome := attempt.outcome()) is not None:
        return outcome.reason
    if not any(event.get("closing_check_s") is not None for event in events):
        return f"it did not come to the closing check's end{_last_words(attempt)}"
    return ""


def _last_words(attempt: Attempt) -> str:
    lines = attempt.log.read_text(errors="replace").strip().splitlines()
    return f": {lines[-1] if lines else 'no output'}"
