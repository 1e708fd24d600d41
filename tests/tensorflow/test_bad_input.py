"""What TensorFlow can't do is refused in one line, before anything starts, without TensorFlow."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.attempt.outcome import judge
from parallelbench.config.run_rules import check_run
from parallelbench.environments import TENSORFLOW_PYTHON, require
from parallelbench.errors import ConfigError
from parallelbench.frameworks import RENDEZVOUS, control_group
from parallelbench.frameworks.control_group import ControlGroup, PatienceError, Watchdog, host_group, join_group
from parallelbench.results.attempt import Attempt
from parallelbench.results.exits import exits_file, read_exits
from parallelbench.training import starter
from parallelbench.training.exchange import Exchange
from parallelbench.training.failure import classify
from tests.analysis.factory import Fake, begin, config
from tests.faults import fault
from tests.helpers import TINY, configured
from tests.preprocess.test_stage import fake_environment

SECRET = "of the attempt"
WORKERS = ("strategy=tf_multi_worker", "devices=2")
REFUSED = {
    "model=vit has no twin in TensorFlow": ("model=vit", "strategy=tf_single"),
    "optimizer=lbfgs": ("optimizer=lbfgs", "strategy=tf_single"),
    "choose precision=fp32": ("precision=bf16", "strategy=tf_single"),
    "strategy.xla=true needs": ("strategy=tf_single", "strategy.xla=true", "strategy.tf_function=false"),
    "traces nothing": ("strategy=tf_single", "strategy.tf_function=false"),
    "strategy.xla=true with model.norm=sync": (*WORKERS, "strategy.xla=true", "model=cnn", "model.norm=sync"),
    "strategy.xla=true with model.norm=batch": (*WORKERS, "strategy.xla=true", "model=cnn", "model.norm=batch"),
    "strategy.xla=true compiles": ("strategy=tf_single", "compile=true"),
    "channels last anyway": ("strategy=tf_single", "channels_last=true"),
    "loader=dataloader": ("strategy=tf_single", "loader=dataloader"),
    "launcher=inline": ("strategy=tf_single", "launcher=inline"),
    "trains on one device": ("strategy=tf_single", "devices=2"),
    "needs two devices": ("strategy=tf_multi_worker", "devices=1"),
    "all_reduce=nccl needs GPUs": ("strategy=tf_mirrored", "devices=2", "strategy.all_reduce=nccl"),
    "nodes=2 with": ("strategy=tf_mirrored", "devices=2", "nodes=2"),
    "phases are torch's": ("strategy=tf_single", "measure.attribution_steps=3"),
    "leaves no worker": ("strategy=tf_parameter_server", "devices=1"),
    "into 3 equal parts": ("strategy=tf_parameter_server", "devices=4"),
    "no server merges": ("strategy=tf_parameter_server", "devices=2", "model=cnn", "model.norm=sync"),
    "its decay would undo": ("strategy=tf_parameter_server", "strategy.mode=async", "devices=2", "optimizer=adamw"),
    "compile=true with strategy=tf_parameter_server": ("strategy=tf_parameter_server", "devices=2", "compile=true"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_it_can_not_do_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_run(configured(*TINY, *REFUSED[text]), "cpu")


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_what_a_plugin_derives_from_the_suites_own_is_not_trained_as_that(part: str) -> None:
    run = configured(*TINY, "strategy=tf_single")
    own = getattr(run, part)
    derived = type("Own", (type(own),), {}, frozen=True, kw_only=True)
    values = {name: getattr(own, name) for name in own.__struct_fields__}
    with pytest.raises(ConfigError, match=f"{part}={own.name}"):
        check_run(msgspec.structs.replace(run, **{part: derived(**values)}), "cpu")


@pytest.mark.parametrize(
    ("strategy", "refused"),
    [
        (["tf_single"], ""),
        (["tf_mirrored", "devices=4", "strategy.all_reduce=nccl", "batch_size=32"], ""),
        (["tf_multi_worker", "devices=4", "nodes=2", "batch_size=32"], ""),
        (["tf_single", "measure.waits=error", "epochs=2"], "only torch says that the host waits"),
        (["tf_single", "cudnn_benchmark=true"], "always lets cuDNN choose"),
        (["tf_mirrored", "devices=2", "nccl.backend=lazy"], "nccl.backend=lazy with strategy=tf_mirrored"),
        (["tf_parameter_server", "devices=2"], "would hold a GPU idle"),
    ],
)
def test_gpus_are_taken_where_all_of_them_train(strategy: list[str], refused: str) -> None:
    run = configured(*TINY, *(f"strategy={strategy[0]}", *strategy[1:]))
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        check_run(run, "cuda")


BESIDE = dict.fromkeys(("msgspec", "PyYAML", "psutil", "nvidia-ml-py", "scikit_learn", "numpy"), "1.0")


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        (None, "is missing, or does not work"),
        ("broken", "is missing, or does not work"),
        ({"numpy": "2.4"}, r"lacks TensorFlow 2\.21 \(found: none\)"),
        ({"tensorflow": "2.15.1"}, r"found: 2\.15\.1"),
        ({"tensorflow": "2.21.0"} | BESIDE | {"psutil": ""}, "lacks psutil"),
        ({"tensorflow_cpu": "2.21.0"} | BESIDE, None),
    ],
)
def test_an_environment_that_will_not_do_is_named_with_the_remedy(
    versions: dict[str, str] | str | None, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = isinstance(versions, dict)
    complete = versions if isinstance(versions, dict) else {"tensorflow": "2.21.0"} | BESIDE
    there = {name: version for name, version in complete.items() if version}
    python = tmp_path / "python" if versions is None else fake_environment(tmp_path, works=works, **there)
    monkeypatch.setenv(TENSORFLOW_PYTHON, str(python))
    if text is None:
        require("tensorflow", "cpu")
        return
    with pytest.raises(ConfigError, match=f"{text}.*make venv-tensorflow"):
        require("tensorflow", "cpu")
    require("torch", "cuda")


@pytest.mark.parametrize("package", ["tensorflow", "tensorflow-cpu"])
def test_a_build_without_gpus_is_refused_where_torch_finds_one(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TENSORFLOW_PYTHON, str(fake_environment(tmp_path, **{package: "2.21.0"}, **BESIDE)))
    require("tensorflow", "cpu")
    if package == "tensorflow":
        require("tensorflow", "cuda")
    else:
        with pytest.raises(ConfigError, match=r"finds no GPU: run `make venv-tensorflow-gpu`, or choose device=cpu"):
            require("tensorflow", "cuda")


def test_a_port_that_is_taken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' starter records what the supervisor judges."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv(RENDEZVOUS, f"0 {address} secret")
        run = config(tmp_path, strategy="tf_multi_worker", devices=2)
        attempt = begin(run, Fake())[1]
        attempt.write_config(run)
        assert starter.main([str(attempt.path.parents[1]), str(attempt.number)]) == 1
    assert judge(attempt, 2, 1)[1].startswith("no rank was started: another program took the port")


def test_the_first_node_listens_wherever_the_others_reach_it() -> None:
    """Its name may belong to another interface than the one they come by."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listening = starter._listen(f"a-name-of-another-interface:{port}")
    assert listening is not None
    with listening, socket.create_connection(("127.0.0.1", port), timeout=20):
        pass


def test_what_a_killed_starter_left_is_removed(tmp_path: Path) -> None:
    attempts = [Attempt(tmp_path / "attempts" / number) for number in ("1", "2")]
    for attempt in attempts:
        Exchange.of(attempt).folder.mkdir(parents=True)
        (attempt.path / "journal-rank0.jsonl").touch()
    starter._remove_leftovers(attempts[1])
    assert not any(Exchange.of(attempt).folder.exists() for attempt in attempts)
    assert all((attempt.path / "journal-rank0.jsonl").exists() for attempt in attempts)


def test_of_ranks_that_ended_at_once_all_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was killed took the other along before their starter looked; the last is ended by it."""
    monkeypatch.setattr(starter, "_LINGER_S", 0.0)
    scripts = ("exit 1", "kill -KILL $$", "exec sleep 600")
    ranks = {rank: subprocess.Popen(["sh", "-c", what]) for rank, what in enumerate(scripts, start=4)}
    for rank in (4, 5):
        ranks[rank].wait()
    assert starter._watched(ranks, exits_file(tmp_path, 1)) == 1
    assert [exits.codes for exits in read_exits(tmp_path, 8)] == [{4: 1, 5: -9}]
    assert ranks[6].returncode == -9


def test_a_rank_that_fails_is_seen_while_those_before_it_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter, "_LINGER_S", 0.0)
    ranks = {rank: subprocess.Popen(["sh", "-c", what]) for rank, what in enumerate(("exec sleep 600", "exit 3"))}
    assert starter._watched(ranks, exits_file(tmp_path, 0)) == 3
    assert [exits.codes for exits in read_exits(tmp_path, 2)] == [{1: 3}]
    assert ranks[0].returncode == -9


def test_ranks_add_up_and_a_rank_that_never_joins_is_named() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    address, found = listening.getsockname(), {}

    def other(rank: int) -> None:
        group = join_group(rank, 3, address, secret=SECRET, timeout_s=20)
        found[rank] = group.total([0.1 * rank, 1.0])
        group.close()

    threads = [threading.Thread(target=other, args=(rank,)) for rank in (2, 1)]
    for thread in threads:
        thread.start()
    group = host_group(listening, 3, secret=SECRET, timeout_s=20)
    found[0] = group.total([0.0, 1.0])
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == found[2] == [0.0 + 0.1 + 0.2, 3.0], "the same bits, added in the order of the ranks"
    with pytest.raises(ConnectionResetError) as lost:
        group.total([0.0])
    assert classify(lost.value)[0] == "peer"
    group.close()
    with pytest.raises(PatienceError, match="rank 1 and rank 2 did not join within") as late:
        host_group(socket.create_server(("127.0.0.1", 0)), 3, secret=SECRET, timeout_s=0.01)
    assert classify(late.value)[0] == "waited"


def test_other_nodes_wait_for_a_first_node_that_prepares_for_longer_than_ranks_may_wait() -> None:
    """It listens before torch's part, and accepts after it: the limit begins there."""
    listening, limit_s, found = socket.create_server(("127.0.0.1", 0)), 1.0, []

    def other() -> None:
        group = join_group(1, 2, listening.getsockname(), secret=SECRET, timeout_s=limit_s)
        found.append(group.total([1.0]))
        group.close()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(2 * limit_s)
    assert thread.is_alive(), "it waits longer than its limit"
    group = host_group(listening, 2, secret=SECRET, timeout_s=20)
    group.total([2.0])
    thread.join()
    group.close()
    assert found == [[3.0]]


def test_a_first_node_that_ends_while_it_prepares_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    listening, found, connected = socket.create_server(("127.0.0.1", 0)), [], threading.Event()
    genuine = socket.create_connection

    def connect(*arguments: Any, **named: Any) -> socket.socket:
        connection = genuine(*arguments, **named)
        connected.set()
        return connection

    monkeypatch.setattr(control_group.socket, "create_connection", connect)

    def other() -> None:
        try:
            join_group(1, 2, listening.getsockname(), secret=SECRET, timeout_s=20)
        except OSError as error:
            found.append(classify(error)[0])

    thread = threading.Thread(target=other)
    thread.start()
    assert connected.wait(60)
    listening.close()
    thread.join()
    assert found == ["peer"]


class Vanishing(socket.socket):
    """A connection whose other side has vanished, as the kernel of this one says in the end."""

    number = 0

    def recv(self, *_: object) -> bytes:
        raise OSError(self.number, os.strerror(self.number))

    def sendall(self, *_: object) -> None:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_vanishes_is_lost_like_one_that_ends(number: int, rank: int) -> None:
    here, there = socket.socketpair()
    with there, Vanishing(fileno=here.detach()) as connection:
        connection.number = number
        with pytest.raises(ConnectionError) as lost:
            ControlGroup(rank, 2, [connection], timeout_s=1e6).gather(0)  # rank 0 receives first
    assert classify(lost.value)[0] == "peer"


STRANGERS = {"silent": b"", "a browser": b"GET / HTTP/1.1\r\n", "long": bytes(1 << 16), "a length": b"\xff" * 4}


@fault(
    "workers",
    "A stranger finds TensorFlow's meeting",
    injection="connections to rank 0 that say nothing, too little, too much, or have another secret",
    outcome="the ranks meet at once; nobody else joins, and nothing of theirs is read but the bytes of a proof",
)
def test_strangers_neither_join_nor_hold_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_group, "_SILENCE_S", 1e6)
    listening, found = socket.create_server(("127.0.0.1", 0)), []
    address = listening.getsockname()
    strangers = [socket.create_connection(address) for _ in STRANGERS]
    for stranger, words in zip(strangers, STRANGERS.values(), strict=True):
        stranger.sendall(words)
    impostor = threading.Thread(target=lambda: found.append(_refused(address, secret="another's")))
    impostor.start()
    rank = threading.Thread(
        target=lambda: found.append(join_group(1, 2, address, secret=SECRET, timeout_s=1e6).total([1.0]))
    )
    rank.start()
    group = host_group(listening, 2, secret=SECRET, timeout_s=1e6)
    assert group.total([2.0]) == [3.0]
    for thread in (rank, impostor):
        thread.join()
    assert len(found) == 2
    assert "refused" in found
    assert [3.0] in found
    group.close()


def test_a_rank_joins_nobody_but_rank_0_of_its_attempt() -> None:
    def host() -> None:
        connection, _ = impostor.accept()
        connection.sendall(bytes(control_group._NONCE_BYTES + control_group._PROOF_BYTES))
        connection.recv(1)

    impostor = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=host)
    thread.start()
    with pytest.raises(ConfigError, match="is not rank 0 of this attempt"):
        join_group(1, 2, impostor.getsockname(), secret=SECRET, timeout_s=20)
    thread.join()
    impostor.close()


def _refused(address: tuple[str, int], *, secret: str) -> str:
    try:
        join_group(1, 2, address, secret=secret, timeout_s=20)
    except OSError:
        return "refused"
    return "joined"


def test_who_waits_inside_a_runtime_for_too_long_is_ended() -> None:
    bitten, spared = threading.Event(), threading.Event()
    patient = Watchdog(1000, spared.set)
    with patient, Watchdog(0.02, bitten.set):
        assert bitten.wait(60)
    assert not spared.is_set()


def test_tensorflows_own_heartbeat_is_told_apart() -> None:
    lost = RuntimeError("Collective ops is aborted by: The following tasks are unhealthy (stopped sending heartbeats)")
    assert classify(lost)[0] == "heartbeat"
