"""How an attempt ended: judged by its ranks' files, then by the exit of its processes."""

from __future__ import annotations

import math
import re
import signal
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.config.run import own_reference
from parallelbench.errors import StorageError, SupersededError, count_of, one_line
from parallelbench.results.attempt import OUTCOMES, Outcome
from parallelbench.results.exits import read_exits
from parallelbench.results.journal import read_entries, read_tables
from parallelbench.results.publish import publish, was_closed
from parallelbench.training.failure import RankError, classify
from parallelbench.world.allowance import processor_time_is_up

if TYPE_CHECKING:
    from collections.abc import Iterable

    from parallelbench.config.run import RunConfig
    from parallelbench.results.attempt import Attempt, OutcomeName
    from parallelbench.results.folder import RunFolder

_NCCL_WAITED = re.compile(
    rb"\[rank(\d+)\][^\n]*"
    rb"(?:Watchdog caught collective operation timeout|Aborting process on rank \d+ due to timeout)"
)
"""What torch's two NCCL backends print before they abort a process that waited too long, and that can leave no record.
The newer backend names the rank within the group after "on rank"; the prefix names the rank of the run."""
_NCCL_TOLD = re.compile(
    rb"\[rank(\d+)\][^\n]*"
    rb"(?:watchdog thread terminated with exception|raised the following async exception): ([^\n]+)"
)
"""What torch prints before NCCL's watchdog ends a process in which CUDA or NCCL has failed: often before Python can."""
_NEVER_MET = {
    "EADDRINUSE": "another program took the port of the nodes' rendezvous (address already in use)",
    "RendezvousTimeoutError": "not all nodes arrived",
    "RendezvousConnectionError": "the nodes could not reach each other",
}
"""Failure of a node's rendezvous → the reason."""
_SIGNALLED = "SignalException"
"""What torchrun raises where it is ended by a signal before its ranks begin, as at a preemption."""
_SIGNAL_CODES = range(129, 193)
"""Exit codes of shells and of srun where a signal has ended a process."""
_STEP_FAILED = re.compile(rb"^srun: error: (?!.*task \S+ Exited)(.*)$", re.MULTILINE)
"""What srun prints where Slurm could not start a step, or its container."""
_MISUSED = re.compile(
    r"^\S*srun: (?:(?:unrecognized|invalid) option|option .* (?:is ambiguous|requires)).*$", re.MULTILINE
)
"""What srun prints about its options, before advice that is the same for all."""
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Exit)\b", re.MULTILINE)
"""The line of a traceback that names the exception."""
_MOST_WORDS = 200


def publish_if_finished(folder: RunFolder, run: RunConfig, attempt: Attempt) -> Outcome | None:
    """Publish the result of an attempt that trained to its end; None where it didn't.

    The last event of rank 0 counts, not exit codes: a process may fail after its work is done. A journal that has
    lost an epoch since then gives no result. If a newer attempt has begun, this one ends as `killed`.
    """
    tables, events = read_tables(attempt.path)
    finished = next((event for event in events if event["event"] == "finished"), None)
    if finished is None or len(tables["epochs"]) != run.epochs:
        return None
    reference = own_reference(run) if tables["parity"] else None
    whom = "one device" if reference is None else f"the strategy's own reference, {type(reference).__name__},"
    reason = _unlike(whom, finished, tables)
    name: OutcomeName = "ok" if reason is None else "parity_failed"
    compared = "" if reference is None else f"; parity was checked against {whom} not one device"
    outcome = Outcome(outcome=name, reason=reason or _done(run, events) + compared, finished_at=finished["time"])
    try:
        publish(folder, run, attempt, outcome, (tables, events))
    except SupersededError as error:
        return attempt.finish("killed", str(error))
    except StorageError as error:
        return attempt.finish("storage", str(error))
    return attempt.finish(outcome.outcome, outcome.reason)


def _done(run: RunConfig, events: list[dict[str, Any]]) -> str:
    """What an attempt has done that found nothing wrong."""
    if not run.epochs:
        return "prepared the training set"
    unchecked = "" if was_closed(run, events) else "; not checked: the closing check did not end"
    done = next((event["done"] for event in events if event.get("done")), "")
    return f"{done or 'trained ' + count_of(run.epochs, 'epoch')}{unchecked}"


def _unlike(whom: str, finished: dict[str, Any], tables: dict[str, list[dict[str, Any]]]) -> str | None:
    """What the parity check, which compares with `whom`, or one that followed it has found; None where all passed."""
    if finished["outcome"] == "parity_failed":
        return _parity_reason(tables["parity"], whom)
    for row in tables["checks"]:
        if row["passed"] is False:
            step = "" if row["step"] is None else f", step {row['step']}"
            found = "no number" if row["difference"] is None else format(row["difference"], ".2g")
            return (
                f"{row['check']} after epoch {row['epoch']}{step}: {found}, limit {row['limit']:.2g} ({row['detail']})"
            )
    return None


def _parity_reason(rows: list[dict[str, Any]], whom: str) -> str:
    worst = next(row for row in rows if not row["passed"])
    parts = [
        f"{what} by {'no number' if (by := worst[f'{what}_difference']) is None else format(by, '.1e')}"
        for what in ("loss", "gradient", "parameter", "evaluation")
    ]
    return (
        f"training differs from {whom} after step {worst['step']}: {', '.join(parts)}, "
        f"tolerance {worst['tolerance']:.0e}"
    )


def judge(attempt: Attempt, processes: int, returncode: int) -> tuple[OutcomeName, str]:
    """Outcome and reason of processes that ended without finishing the run.

    Ranks that stopped on request have recorded that last. Else the earliest error of a rank counts, except errors that
    only report another rank as gone or missing. Without one, a rank without a record hung while others waited for it,
    or was killed.
    """
    if (reason := stopped(attempt)) is not None:
        return "timeout", reason
    errors = sorted(rank_errors(attempt, processes), key=lambda error: error.time)
    said = {error.rank for error in errors}
    log = attempt.log.read_bytes() if attempt.log.exists() else b""
    aborted = _aborted_by_nccl(log)
    errors += [error for error in _told_by_nccl(log) if error.rank not in said | aborted]
    codes = exit_codes(attempt, processes, returncode)
    was_killed = any(code < 0 for code in codes.values())
    if not errors and not was_killed and (unread := _unread(attempt, processes)):
        return "storage", (
            f"trained to its end, but the journal of {_ranks(unread)} can't be read, or not to its end: submitting "
            "again looks once more, and trains only where it is still so"
        )
    own = [error for error in errors if error.kind not in ("peer", "waited", "heartbeat")]
    if own:
        where = f"rank {own[0].rank}: " if processes > 1 else ""
        kind: OutcomeName = own[0].kind if own[0].kind in OUTCOMES else "error"  # type: ignore[assignment]
        return kind, where + own[0].reason
    gave_up = {error.rank for error in errors if error.kind == "heartbeat"}
    waited = {error.rank for error in errors if error.kind == "waited"} | aborted | gave_up
    silent = sorted(set(range(processes)) - {error.rank for error in errors} - waited)
    if waited and silent and all(codes.get(rank, 0) >= 0 for rank in silent):
        hang = "hangs" if len(silent) == 1 else "hang"
        whom = "it" if len(silent) == 1 else "them"
        limit = "TensorFlow's heartbeat allows" if waited == gave_up else "launcher.collective_timeout_s"
        return "timeout", f"{_ranks(silent)} {hang}: {_ranks(waited)} waited for {whom} longer than {limit}"
    if _none_began(attempt):
        failures = {exits.failure for exits in read_exits(attempt.path, processes)}
        if never_met := next((reason for failure, reason in _NEVER_MET.items() if failure in failures), None):
            return "killed", f"no rank was started: {never_met}"
        if _SIGNALLED in failures or (returncode in _SIGNAL_CODES and not was_killed):
            return "killed", f"no rank was started{_last_words(attempt)}"
        if step_failed := _STEP_FAILED.findall(log):
            return "killed", f"no rank was started: {one_line(step_failed[0].decode(errors='replace'), _MOST_WORDS)}"
        if returncode > 0 and not errors and not was_killed:
            # What starts ranks has failed by itself, and will again: nobody killed it.
            return "error", f"no rank was started (exit code {returncode}){_last_words(attempt)}"
    for rank in sorted(silent, key=lambda rank: codes.get(rank, 0) >= 0):
        name, code = f"rank {rank}" if processes > 1 else "the process", codes.get(rank)
        if code == -signal.SIGXCPU:  # and would be again
            return "error", f"{name} {processor_time_is_up()}"
        return "killed", f"{name} {_death(code)}"
    if errors:
        return "error", f"rank {errors[0].rank}: {errors[0].reason}"
    if waited:
        return "error", "all ranks waited for each other longer than launcher.collective_timeout_s"
    return (
        "error",
        f"the processes ended with exit code {returncode} and recorded no reason; see {attempt.log.name}",
    )


def interrupted(attempt: Attempt, processes: int, reason: str) -> tuple[OutcomeName, str]:
    """Outcome and reason of an attempt that was ended, for this reason unless a rank had failed on another node."""
    failed = any(error.kind != "peer" for error in rank_errors(attempt, processes))
    # SIGTERM may have reached the ranks, too: Slurm sends it to all processes of a job.
    killed = any(code < 0 and code != -signal.SIGTERM for code in exit_codes(attempt, processes, 0).values())
    if failed or killed:
        return judge(attempt, processes, 1)
    return "killed", reason


def stopped(attempt: Attempt) -> str | None:
    """How far an attempt came that stopped on request; None where it did not stop that way."""
    events = [entry for entry in read_entries(attempt.path / "journal-rank0.jsonl") if entry.get("event") == "stopped"]
    if not events:
        return None
    epoch, saved = events[-1]["epoch"], events[-1]["saved"]
    there = "from there" if saved == epoch else f"after epoch {saved}, the last one that could be saved"
    again = f"goes on {there}" if saved else "starts over, since nothing was saved"
    if why := unsaved(attempt):
        again += f" ({why})"
    return f"stopped after epoch {epoch} of {events[-1]['epochs']}, as requested; submitting again {again}"


def unsaved(attempt: Attempt) -> str:
    """Why the last epoch that was to be saved could not be; empty: it was, or none was to be."""
    journal = read_entries(attempt.path / "journal-rank0.jsonl")
    tried = [entry for entry in journal if entry.get("event") in ("checkpoint", "unsaved")]
    return str(tried[-1]["reason"]) if tried and tried[-1]["event"] == "unsaved" else ""


def rank_errors(attempt: Attempt, processes: int) -> list[RankError]:
    """The ranks' own records of their failures."""
    errors = []
    for rank in range(processes):
        try:
            errors.append(msgspec.json.decode(attempt.error_file(rank).read_bytes(), type=RankError))
        except (OSError, msgspec.DecodeError):
            continue  # missing, or reserved and never filled: this rank recorded nothing
    return errors


def _unread(attempt: Attempt, processes: int) -> list[int]:
    """The ranks whose journals have fewer epochs than rank 0 has finished; none where it did not come to its end."""
    journals = [read_entries(attempt.path / f"journal-rank{rank}.jsonl") for rank in range(processes)]
    if not any(entry.get("event") == "finished" for entry in journals[0]):
        return []
    epochs = sum(entry.get("table") == "epochs" for entry in journals[0])
    return [r for r, rows in enumerate(journals) if sum(row.get("table") == "ranks" for row in rows) < epochs]


def _aborted_by_nccl(log: bytes) -> set[int]:
    """The ranks that NCCL has aborted because they waited too long."""
    return {int(rank) for rank in _NCCL_WAITED.findall(log)}


def _told_by_nccl(log: bytes) -> list[RankError]:
    """What ranks have failed by that NCCL's watchdog has ended; the first of each."""
    found: dict[int, RankError] = {}
    for number, said in _NCCL_TOLD.findall(log):
        rank, text = int(number), said.decode(errors="replace").strip()
        kind, reason = classify(RuntimeError(text))
        reason = text if kind == "error" else reason
        found.setdefault(rank, RankError(rank=rank, kind=kind, reason=reason, time=math.inf))
    return list(found.values())


def _none_began(attempt: Attempt) -> bool:
    """Whether no rank has opened its journal, which is the first that it does."""
    return not any(attempt.path.glob("journal-rank*.jsonl"))


def _last_words(attempt: Attempt) -> str:
    """What srun did not know, the last exception that was printed, or the last line; empty where nothing was."""
    printed = attempt.log.read_text(errors="replace").strip() if attempt.log.exists() else ""
    raised = [found.start() for found in _RAISED.finditer(printed)]
    said = printed[raised[-1] :] if raised else printed.rpartition("\n")[2]
    if misused := _MISUSED.search(printed):
        said = misused[0]
    return f": {one_line(said, _MOST_WORDS)}" if said else ""


def _ranks(ranks: Iterable[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in sorted(ranks))


def exit_codes(attempt: Attempt, processes: int, returncode: int) -> dict[int, int]:
    """Exit codes per rank as far as they are known: of several, those of the ranks that failed by themselves."""
    codes = {rank: code for exits in read_exits(attempt.path, processes) for rank, code in exits.codes.items()}
    return {0: codes.get(0, returncode)} if processes == 1 else codes


def _death(code: int | None) -> str:
    if code is None or code >= 0:
        return "ended without a record" + (f" (exit code {code})" if code is not None else "")
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = ", by hand or by the kernel for lack of memory" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
