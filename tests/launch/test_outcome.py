"""How an attempt ended, judged from error files, logs and exit codes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from launch.attempt.outcome import exit_codes, interrupted, judge, publish_if_finished, stopped
from launch.attempt.processes import before_the_program
from parallelbench.config.components import Strategy
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError, StorageError
from parallelbench.results.attempt import RETRYABLE, Attempt
from parallelbench.results.exits import Exits, exits_file, write_exits
from parallelbench.results.files import fill
from parallelbench.results.journal import Journal
from parallelbench.strategies.data_parallel import Ddp
from parallelbench.strategies.single import Single
from parallelbench.training import failure
from parallelbench.training.failure import RankError, classify
from parallelbench.world.allowance import MEETING_HERE
from tests.analysis.factory import Fake, begin, config, write_epochs
from tests.faults import fault


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """An attempt of three ranks that have not said anything yet."""
    return begin(config(tmp_path, strategy="ddp", devices=3), Fake())[1]


def exit_with(attempt: Attempt, codes: dict[int, int] | None = None, *, failure: str = "", node: int = 0) -> None:
    write_exits(exits_file(attempt.path, node), Exits(codes=codes or {}, failure=failure))


def say(attempt: Attempt, rank: int, kind: str, reason: str, time: float) -> None:
    fill(attempt.error_file(rank), msgspec.json.encode(RankError(rank=rank, kind=kind, reason=reason, time=time)))


# --- who is to blame


MISSED, WAITED = "lost another rank", "waited for another rank"
HANGS = "waited for it longer than launcher.collective_timeout_s"
OF_0, OF_2, OOM = {0: ("waited", WAITED)}, {2: ("waited", WAITED)}, ("oom", "out of memory")
BLAMED: dict[str, tuple[dict[int, tuple[str, str]], dict[int, int], tuple[str, str]]] = {
    "earliest": ({1: ("nan", "1st"), 2: ("error", "2nd"), 0: ("error", "3rd")}, {}, ("nan", "rank 1: 1st")),
    "own before others": ({0: ("peer", MISSED), 1: ("peer", MISSED), 2: OOM}, {}, ("oom", "rank 2: out of memory")),
    "silent and missed": ({0: ("peer", MISSED), 2: ("peer", MISSED)}, {}, ("killed", "rank 1 ended without a record")),
    "seen to die": ({}, {2: -9}, ("killed", "rank 2 was killed by SIGKILL, by hand or by the kernel for lack")),
    "another signal": ({}, {1: -11}, ("killed", "rank 1 was killed by SIGSEGV")),
    "silent and waited for": (OF_0 | OF_2, {}, ("timeout", f"rank 1 hangs: rank 0 and rank 2 {HANGS}")),
    "who waited has a code": (OF_0 | OF_2, {0: 1}, ("timeout", f"rank 1 hangs: rank 0 and rank 2 {HANGS}")),
    "lost who had waited": (OF_0 | {2: ("peer", "lost rank 0")}, {0: 1}, ("timeout", f"rank 1 hangs: rank 0 {HANGS}")),
    "killed, no hang": (OF_0, {1: -9}, ("killed", "rank 1 was killed by SIGKILL")),
    "own before waiting": (OF_0 | {1: OOM}, {}, ("oom", "rank 1: out of memory")),
    "all wait": (OF_0 | {1: ("waited", WAITED)} | OF_2, {}, ("error", f"rank 0: {WAITED}")),
    "all miss": ({1: ("peer", MISSED), 0: ("peer", MISSED), 2: ("peer", MISSED)}, {}, ("error", f"rank 1: {MISSED}")),
}  # fmt: skip
"""What the ranks say, in this order, and their exit codes → the outcome, and how its reason begins."""


@pytest.mark.parametrize("case", BLAMED)
def test_the_rank_that_is_to_blame_is_named(attempt: Attempt, case: str) -> None:
    words, codes, (outcome, reason) = BLAMED[case]
    for time, (rank, (kind, said)) in enumerate(words.items()):
        say(attempt, rank, kind, said, 1.0 + time)
    if codes:
        exit_with(attempt, codes)
    found, told = judge(attempt, 3, 1)
    assert (found, told[: len(reason)]) == (outcome, reason)


def test_a_single_process_has_the_exit_code_of_its_own(attempt: Attempt) -> None:
    assert judge(attempt, 1, -9)[1].startswith("the process was killed by SIGKILL")
    assert "signal 40" in judge(attempt, 1, -40)[1], "real-time signals have no name"
    Journal(attempt.path / "journal-rank0.jsonl").close()
    assert judge(attempt, 1, 3) == ("killed", "the process ended without a record (exit code 3)")
    say(attempt, 0, "error", "ValueError: no", 1.0)
    assert judge(attempt, 1, 1) == ("error", "ValueError: no")
    say(attempt, 0, "strange", "who wrote this?", 1.0)
    assert judge(attempt, 1, 1) == ("error", "who wrote this?"), "a kind that is no outcome"


def test_what_starts_ranks_and_fails_by_itself_is_not_tried_again(attempt: Attempt) -> None:
    attempt.log.write_text(
        'Traceback (most recent call last):\n  File "torch/_logging/_internal.py", line 875\n'
        "ValueError: \nInvalid log settings: banana, must be a comma separated list\n"
    )
    outcome, reason = judge(attempt, 3, 1)
    assert outcome == "error" not in RETRYABLE
    assert reason.startswith("no rank was started (exit code 1): ValueError: Invalid log settings: banana")
    assert judge(attempt, 3, -9)[0] == "killed"
    assert judge(attempt, 1, 1)[0] == "error"
    Journal(attempt.path / "journal-rank0.jsonl").close()
    assert judge(attempt, 3, 1)[0] == "killed", "a rank had begun"


NCCL_LOGS = {
    "ProcessGroupNCCL": (
        "[rank2]:[E1121 02:05:10.000000000 ProcessGroupNCCL.cpp:700] [Rank 2] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=5000) ran for 5012 milliseconds before timing out.\n"
    ),
    "ProcessGroupNCCL2": (
        "[rank2]:[E1121 02:05:10.000000000 ProcessGroupNCCL.cpp:512] [TC][rank=1][name=mesh_data] Aborting process on "
        "rank 1 due to timeout\n"
    ),
}
"""Backend → what it prints before it aborts rank 2, which is rank 1 of its group."""


@pytest.mark.parametrize("backend", NCCL_LOGS)
def test_ranks_that_nccl_aborts_have_waited(attempt: Attempt, backend: str) -> None:
    """The process dies of SIGABRT without a word of its own."""
    attempt.log.write_text(NCCL_LOGS[backend])
    exit_with(attempt, {2: -6})
    say(attempt, 0, "waited", "waited for another rank", 1.0)
    outcome, reason = judge(attempt, 3, 1)
    assert outcome == "timeout"
    assert reason.startswith("rank 1 hangs: rank 0 and rank 2 waited for it")


ASSERTED = "CUDA error: device-side assert triggered"
WATCHDOG = (
    "[rank{}]:[E1121 02:05:10.000000000 ProcessGroupNCCL.cpp:2107] [PG ID 0 Rank 1] Process group "
    "watchdog thread terminated with exception: {}\n"
)
GONE = (
    "[rank{}]:[E1121 02:05:10.000000000 ProcessGroupNCCL.cpp:542] [Rank 0] Collective WorkNCCL(SeqNum=9) raised the "
    "following async exception: NCCL error: remote process exited or there was a network error, NCCL version 2.28.9\n"
)
ABORTED: dict[str, tuple[str, dict[int, int], tuple[str, str]]] = {
    "fails on its GPU": (WATCHDOG.format(1, ASSERTED), {1: -6}, ("error", f"rank 1: {ASSERTED}")),
    "loses another": (GONE.format(0), {0: -6, 2: -9}, ("killed", "rank 2 was killed by SIGKILL")),
    "waits, and torch says it twice": (
        NCCL_LOGS["ProcessGroupNCCL"] + WATCHDOG.format(2, "[Rank 2] Watchdog caught collective operation timeout: …"),
        {2: -6},
        ("timeout", "rank 0 and rank 1 hang: rank 2 waited"),
    ),
    "as all others waits": (
        "".join(NCCL_LOGS["ProcessGroupNCCL"].replace("[rank2]", f"[rank{rank}]") for rank in range(3)),
        {0: -6, 1: -6, 2: -6},
        ("error", "all ranks waited for each other"),
    ),
}
"""A rank that NCCL's watchdog ends before it could record anything: its log, exit codes, and what is said of it."""


@fault(
    "workers",
    "NCCL's watchdog ends a rank",
    injection="what torch prints of a rank whose GPU fails, that loses another rank, or that waits like all others",
    outcome="an error with CUDA's words, the rank that was lost, or that all waited; no rank that was killed",
)
@pytest.mark.parametrize("case", ABORTED)
def test_what_nccls_watchdog_ends_is_not_said_to_be_killed(attempt: Attempt, case: str) -> None:
    log, codes, (outcome, reason) = ABORTED[case]
    attempt.log.write_text(log)
    exit_with(attempt, codes)
    found, told = judge(attempt, 3, 1)
    assert (found, told[: len(reason)]) == (outcome, reason)


@pytest.mark.parametrize("content", [b"", b"{", b" " * 4096, b"\xff", b"[]", b'{"rank": 1}'])
def test_an_unreadable_word_is_no_word(attempt: Attempt, content: bytes) -> None:
    attempt.error_file(0).write_bytes(content)
    assert judge(attempt, 1, -15) == ("killed", "the process was killed by SIGTERM")


def test_exit_codes_are_those_that_were_recorded(attempt: Attempt) -> None:
    assert exit_codes(attempt, 2, 1) == {}
    exit_with(attempt, {1: -6})
    assert exit_codes(attempt, 2, 1) == {1: -6}
    assert exit_codes(attempt, 1, 77) == {0: 77}
    exits_file(attempt.path, 1).write_bytes(b"\xff{")
    assert exit_codes(attempt, 2, 1) == {1: -6}


@fault(
    "numbers",
    "A node whose exit codes are missing",
    injection="a rank is killed on the last of three nodes, and the second one has recorded nothing",
    outcome="the rank that is named is the one that was killed",
)
def test_ranks_are_counted_over_all_nodes_that_the_run_has(tmp_path: Path) -> None:
    attempt = begin(config(tmp_path, strategy="ddp", devices=6, nodes=3), Fake())[1]
    exit_with(attempt, {0: 1}, node=0)
    exit_with(attempt, {5: -9}, node=2)
    assert exit_codes(attempt, 6, 1) == {0: 1, 5: -9}
    assert judge(attempt, 6, 1)[1].startswith("rank 5 was killed by SIGKILL")


RANKS = """
import os, pathlib, signal, sys
rank, killed, waiting = int(os.environ["RANK"]), int(sys.argv[1]), pathlib.Path(sys.argv[2])
if rank == killed:
    pipes = [pipe.open("w") for pipe in waiting.iterdir()]  # each opens once its reader has
    os.kill(os.getpid(), signal.SIGKILL)
if (waiting / str(rank)).exists():
    (waiting / str(rank)).read_bytes()  # until the killed one has gone; torchrun may find both at once
    sys.exit(3)
signal.pause()
"""


HANGING = """
import os, signal, sys
from parallelbench.processes import die_with_parent
die_with_parent()
rank, (ready, told) = int(os.environ["RANK"]), sys.argv[1:]
if rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: open(told, "w").close())
    open(ready, "w").close()
elif rank == 1:
    open(ready).close()  # once rank 0 would survive
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    signal.pause()
"""


def ranks_of_which_one_is_killed(folder: Path, killed: int, waiting: Iterable[int]) -> list[str]:
    """The program of such ranks and its arguments: those that wait end once the killed one has gone."""
    program, pipes = folder / "ranks.py", folder / "waiting"
    program.write_text(RANKS)
    pipes.mkdir()
    for rank in waiting:
        os.mkfifo(pipes / str(rank))
    return [str(program), str(killed), str(pipes)]


def run_torchrun(attempt: Attempt, *options: str, node: int = 0) -> subprocess.Popen[bytes]:
    module = [sys.executable, "-m", "parallelbench.training.torchrun", str(exits_file(attempt.path, node))]
    command = [*module, "--max-restarts=0", *options]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)


@fault(
    "workers",
    "A rank dies and the others hang",
    injection="SIGKILL to one of three ranks; another ignores SIGTERM; torchrun is killed while it waits for that one",
    outcome="killed, and the rank that was killed is named with its signal, as it would be had torchrun ended",
)
def test_who_failed_first_is_recorded_while_others_hang_on(tmp_path: Path, attempt: Attempt) -> None:
    program = tmp_path / "ranks.py"
    program.write_text(HANGING)
    ready, told = tmp_path / "ready", tmp_path / "told"
    os.mkfifo(ready), os.mkfifo(told)
    process = run_torchrun(attempt, *MEETING_HERE, "--nproc-per-node=3", *map(str, (program, ready, told)))
    told.read_bytes()  # torchrun has told it to end
    process.kill()
    process.communicate()
    assert exit_codes(attempt, 3, process.returncode) == {1: -signal.SIGKILL}
    reason = "rank 1 was killed by SIGKILL, by hand or by the kernel for lack of memory"
    assert judge(attempt, 3, process.returncode) == ("killed", reason)
    found = interrupted(attempt, 3, "interrupted by SIGTERM")
    assert found == ("killed", reason), "it was another node's, or the job is ended for it"


def test_ranks_that_an_interruption_ends_are_not_to_blame(attempt: Attempt) -> None:
    exit_with(attempt, {0: -signal.SIGTERM, 2: 1})
    assert interrupted(attempt, 3, "interrupted by SIGTERM") == ("killed", "interrupted by SIGTERM")


def test_ranks_of_the_second_node_have_their_own_numbers(tmp_path: Path, attempt: Attempt) -> None:
    """Rank 2, the first of the second node, is killed; the others of its node are ended, those of the first fail."""
    program = ranks_of_which_one_is_killed(tmp_path, killed=2, waiting=(0, 1))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    nodes = [
        run_torchrun(attempt, *meeting, "--rdzv-id=x", f"--rdzv-conf=is_host={1 - node}", *program, node=node)
        for node in (0, 1)
    ]
    for process in nodes:
        process.communicate()
    codes = exit_codes(attempt, 4, 1)
    assert codes[2] == -signal.SIGKILL
    assert 3 not in codes
    assert codes.items() <= {0: 3, 1: 3, 2: -signal.SIGKILL}.items()


def test_a_port_that_is_taken_and_nodes_that_do_not_come_are_named(tmp_path: Path, attempt: Attempt) -> None:
    program = tmp_path / "ranks.py"
    program.touch()
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=x", "--local-addr=127.0.0.1"]
    for conf, reason in (
        ("is_host=1,join_timeout=1", "another program took the port of the nodes' rendezvous"),
        ("is_host=0,read_timeout=1", "the nodes could not reach each other"),
    ):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen() if conf.startswith("is_host=1") else None
            endpoint = f"--rdzv-endpoint=127.0.0.1:{taken.getsockname()[1]}"
            run_torchrun(attempt, *meeting, endpoint, f"--rdzv-conf={conf}", str(program)).communicate()
        outcome, said = judge(attempt, 2, 1)
        assert (outcome, said.partition(" (")[0]) == ("killed", f"no rank was started: {reason}")
    endpoint = "--rdzv-endpoint=127.0.0.1:0"
    run_torchrun(attempt, *meeting, endpoint, "--rdzv-conf=is_host=1,join_timeout=1", str(program)).communicate()
    assert judge(attempt, 2, 1) == ("killed", "no rank was started: not all nodes arrived")
    Journal(attempt.path / "journal-rank0.jsonl").close()
    assert "no rank was started" not in judge(attempt, 2, 1)[1]


@pytest.mark.parametrize(
    ("saved", "word"), [(3, "goes on from there"), (2, "goes on after epoch 2"), (0, "starts over")]
)
def test_ranks_that_were_asked_to_stop_did_not_fail(attempt: Attempt, saved: int, word: str) -> None:
    assert stopped(attempt) is None
    journal = Journal(attempt.path / "journal-rank0.jsonl")
    journal.event("stopped", epoch=3, epochs=9, saved=saved)
    say(attempt, 1, "peer", "lost another rank", 1.0)
    outcome, reason = judge(attempt, 3, 1)
    assert outcome == "timeout"
    assert outcome in RETRYABLE
    assert reason.startswith(f"stopped after epoch 3 of 9, as requested; submitting again {word}")
    journal.event("unsaved", epoch=3, reason="can't write x: the disk is full")
    assert judge(attempt, 3, 1)[1] == f"{reason} (can't write x: the disk is full)"


# --- what went wrong on a rank


class OutOfMemoryError(RuntimeError):
    pass


class NotFiniteError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried\nmore"), "oom", "out of memory: CUDA out of memory. Tried"),
        (MemoryError(), "oom", "out of memory: MemoryError"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            "oom",
            "out of memory: ",
        ),
        (RuntimeError("CUDA error: out of memory\nCompile with"), "oom", "out of memory: CUDA error"),
        (RuntimeError("Last error:\nCuda failure 2 'out of memory'"), "oom", "out of memory"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom", "CUBLAS_STATUS"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "oom", "out of memory: [Errno 12] Cannot allocate memory"),
        (RuntimeError("unable to mmap 8 bytes from file </t>: Cannot allocate memory (12)"), "oom", "unable to mmap"),
        (OSError("/usr/lib/x.so: cannot allocate memory in static TLS block"), "error", "static TLS"),
        (NotFiniteError("the training loss was not finite"), "nan", "the training loss"),
        (StorageError("can't write x: the disk is full"), "storage", "can't write x"),
        (ConfigError("data=mnist is not prepared"), "error", "data=mnist is not prepared"),
        (RuntimeError("[gloo/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:123"), "peer", "lost another rank"),
        (RuntimeError("Broken pipe"), "peer", "lost another rank"),
        (RuntimeError("[gloo/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv"), "waited", "another rank"),
        (RuntimeError("wait timeout after 5000ms, keys: /default_pg/0//cpu//0/1"), "waited", "collective_timeout_s"),
        (RuntimeError("passing the keyword argument `find_unused_parameters=True` to"), "error", "or choose strategy="),
        (KeyError("x"), "error", "KeyError: 'x'"),
    ],
)
def test_errors_are_classified(error: Exception, kind: str, words: str) -> None:
    found, reason = classify(error)
    assert found == kind
    assert words in reason


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"
CAUGHT = "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File x\n"


@pytest.mark.parametrize(
    ("error", "file", "ranks", "kind"),
    [
        # a user's data set that reads from the network, its loader's worker, and torch's DataLoader itself
        (ConnectionResetError(104, "Connection reset by peer"), "/usr/lib/python3/ssl.py", 1, "error"),
        (ConnectionResetError(104, "Connection reset by peer"), "/usr/lib/python3/ssl.py", 2, "error"),
        (BrokenPipeError(32, "Broken pipe"), "/home/me/mine/data.py", 2, "error"),
        (RuntimeError("connection reset by peer"), "/home/me/mine/data.py", 2, "error"),
        (TimeoutError("timed out after 30 s"), "/home/me/mine/data.py", 2, "error"),
        (RuntimeError(f"{CAUGHT}RuntimeError: broken pipe"), "/v/torch/_utils.py", 2, "error"),
        (RuntimeError("timed out after 60 seconds"), "/v/torch/utils/data/dataloader.py", 2, "error"),
        # a rank that waits for another: within torch, in the suite, in a strategy of a user's
        (RuntimeError(GLOO), "/v/torch/autograd/graph.py", 2, "peer"),
        (RuntimeError("Broken pipe"), "/v/torch/distributed/distributed_c10d.py", 2, "peer"),
        (RuntimeError("Broken pipe"), failure.__file__, 2, "peer"),
        (RuntimeError(GLOO), "/home/me/mine/replica.py", 2, "peer"),
        (RuntimeError("wait timeout after 300000ms, keys: /x"), "/v/torch/distributed/rendezvous.py", 2, "waited"),
        (RuntimeError("Broken pipe"), "/v/torch/distributed/distributed_c10d.py", 1, "error"),
    ],
)
def test_another_rank_is_lost_only_where_the_message_was_from_one(
    monkeypatch: pytest.MonkeyPatch, error: Exception, file: str, ranks: int, kind: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(type(error)) as raised:
        exec(compile("raise error", file, "exec"), {"error": error})
    assert classify(raised.value)[0] == kind


@pytest.mark.parametrize(
    ("number", "words"), [(errno.EROFS, "can't be written"), (errno.ENOENT, "can't be"), (errno.ENOSPC, "too small")]
)
def test_dev_shm_that_takes_no_semaphore_is_named(monkeypatch: pytest.MonkeyPatch, number: int, words: str) -> None:
    """Read-only, not there, full: the error itself names no file."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("multiprocessing.synchronize._multiprocessing.SemLock", refuse)
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        multiprocessing.Queue()
    last = raised.value.__traceback__
    while last and last.tb_next and last.tb_next.tb_next:
        last = last.tb_next
    assert last is not None
    last.tb_next = None  # the real one is no Python code
    kind, reason = classify(raised.value)
    assert kind == "error"
    assert "/dev/shm" in reason
    assert words in reason
    assert "loader.workers=0" in reason


@fault(
    "lifecycle",
    "A limit on processor time",
    injection="`ulimit -t`, which is SIGKILL's where the soft limit is the hard one",
    outcome="the process ends by SIGXCPU; the outcome is error, which is not tried again, and names the limit",
)
@pytest.mark.slow
def test_what_uses_up_its_processor_time_ends_by_a_signal_that_says_so() -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
        before_the_program()

    done = subprocess.run([sys.executable, "-S", "-c", "while True: pass"], preexec_fn=limited, check=False)
    assert done.returncode == -signal.SIGXCPU


@pytest.mark.parametrize("processes", [1, 3])
def test_a_limit_on_processor_time_is_named_and_not_tried_again(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setattr("parallelbench.world.allowance.resource.getrlimit", lambda _: (1799, 1800))
    exit_with(attempt, {processes - 1: -signal.SIGXCPU})
    for rank in range(processes - 1):
        say(attempt, rank, "peer", "lost another rank", 2.0)
    outcome, reason = judge(attempt, processes, 1)
    assert outcome == "error"
    assert outcome not in RETRYABLE
    assert "processor time" in reason
    assert "1799 s (`ulimit -t`)" in reason
    worker = RuntimeError("DataLoader worker (pid 7) is killed by signal: CPU time limit exceeded. ")
    assert (classify(worker)[0], "`ulimit -t`" in classify(worker)[1]) == ("error", True)


def test_one_process_of_another_framework_is_told_by_what_it_was_killed(attempt: Attempt) -> None:
    """Its starter ends with 128 + 9, as a shell does, and has recorded the signal."""
    exit_with(attempt, {0: -signal.SIGKILL})
    outcome, reason = judge(attempt, 1, 137)
    assert outcome == "killed"
    assert "SIGKILL" in reason


# --- publishing instead of judging


def test_a_parity_failure_says_by_how_much(tmp_path: Path) -> None:
    run, fake = config(tmp_path, strategy="ddp", devices=2), Fake(parity_passed=False)
    folder, attempt = begin(run, fake)
    write_epochs(run, attempt, fake, epochs=run.epochs)
    journal = Journal(attempt.path / "journal-rank0.jsonl")
    journal.event("finished", outcome="parity_failed")
    outcome = publish_if_finished(folder, run, attempt)
    assert outcome is not None
    assert outcome.outcome == "parity_failed"
    assert outcome.reason.startswith("training differs from one device after step 1: loss by 5.0e-01")
    assert "tolerance" in outcome.reason
    assert folder.state().state == "done"


class Unlike(Ddp, frozen=True, kw_only=True):
    """A strategy that is held against a reference of its own."""

    def equals_one_device(self, run: RunConfig) -> bool:
        return False

    def reference(self, run: RunConfig) -> Strategy:
        return Single(name="mine")


@pytest.mark.parametrize("passes", [True, False])
def test_what_was_held_against_an_authors_reference_is_not_said_to_be_like_one_device(
    tmp_path: Path, passes: bool
) -> None:
    run = config(tmp_path, strategy="ddp", devices=2)
    run = msgspec.structs.replace(run, strategy=Unlike(**msgspec.structs.asdict(run.strategy) | {"name": "unlike"}))
    fake = Fake(parity_passed=passes)
    folder, attempt = begin(run, fake)
    write_epochs(run, attempt, fake, epochs=run.epochs)
    journal = Journal(attempt.path / "journal-rank0.jsonl")
    journal.event("finished", outcome="ok" if passes else "parity_failed")
    journal.close()
    outcome = publish_if_finished(folder, run, attempt)
    assert outcome is not None
    found = "; parity was checked against the strategy's own reference, Single, not one device"
    assert outcome.reason.endswith(found) == passes
    wrong = "training differs from the strategy's own reference, Single, after step 1: loss by"
    assert outcome.reason.startswith(wrong) == (not passes)


def test_a_signal_to_what_starts_ranks_is_no_error_of_theirs(attempt: Attempt) -> None:
    """As at a preemption: the run is queued again."""
    attempt.log.write_text("torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15\n")
    exit_with(attempt, failure="SignalException")
    outcome, reason = judge(attempt, 3, 1)
    assert outcome == "killed"
    assert "got signal: 15" in reason
