"""gpu-check: it explains itself without a GPU, needs few packages, and its checks can fail. CPUs stand in for GPUs."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch

from parallelbench.config.run import RunConfig
from parallelbench.gpu_check import device, results, strategies, telemetry, training, variants, whole_runs
from parallelbench.gpu_check.__main__ import REHEARSED_STRATEGIES, carry_out_all, sections
from parallelbench.gpu_check.__main__ import main as gpu_check_main
from parallelbench.gpu_check.attempts import ATTEMPT_S, Answer, WarmProcesses, Workers, answer_of
from parallelbench.gpu_check.nodes import Nodes
from parallelbench.gpu_check.nodes import main as follow
from parallelbench.gpu_check.results import CheckResult, FailedError, KeptResults, SkippedError, at_most, between
from parallelbench.gpu_check.variants import as_attempt
from parallelbench.results.attempt import Attempt
from parallelbench.results.exits import Exits, exits_file, write_exits
from parallelbench.results.files import fill
from parallelbench.results.journal import read_entries
from parallelbench.strategies.pipeline.schedules import Schedule
from parallelbench.telemetry.nvml import WAYS
from parallelbench.training.failure import RankError
from parallelbench.training.warm import ForkRequest
from parallelbench.world.machine import Gpu
from parallelbench.world.world import SHARING, World, join
from tests.norm_kernels import kernels_on_cpus
from tests.telemetry.playback import environment, library, recorded

CPU = World()

BLOCK = """
import sys
import uuid

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
"""
OTHERS = "('hydra', 'omegaconf', 'pyarrow', 'polars', 'scipy', 'sklearn', 'altair', 'rich', 'submitit', 'pandas')"


def program(names: str, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program that can't import some packages, on a machine that shows no GPU unless one is faked."""
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(names=names) + code],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | variables,
        capture_output=True,
        text=True,
    )


MAIN = "from parallelbench.gpu_check.__main__ import main; sys.exit(main())"


@pytest.mark.exhaustive
def test_without_a_gpu_it_says_so_and_needs_few_packages() -> None:
    """All checks can be loaded with them, and none uses CUDA before it begins: their forks could not."""
    code = (
        "from pathlib import Path\n"
        "from parallelbench.gpu_check.__main__ import main, sections\n"
        "assert main() == 0\n"
        "from parallelbench.gpu_check.attempts import Workers\n"
        "from parallelbench.gpu_check.results import apart\n"
        "import parallelbench.gpu_check.strategies, torch\n"
        "found = sections(Workers('cuda', 2, Path('nowhere'))).values()\n"
        "spoilt = apart(torch._C._cuda_isInBadFork)\n"
        "assert not spoilt()\n"
        "print(*[name for section in found for name in section], sep='|')\n"
        "torch.cuda.is_available()\n"
        "assert spoilt() or not torch.version.cuda\n"
    )
    done = program(OTHERS, code)
    assert done.returncode == 0, done.stderr
    assert "Nothing was checked: there is no GPU" in done.stdout
    assert "CUDA_VISIBLE_DEVICES='' may hide it" in done.stdout
    found = done.stdout.splitlines()[-1].split("|")
    assert len(found) == len(set(found)) > 1


def test_a_check_that_crashes_or_hangs_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class UnknownError(Exception):
        """Of a class that can't be sent."""

        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} is not {two}")

    def unlike() -> str:
        raise UnknownError(1, 2)

    def skipped() -> str:
        raise SkippedError("no TF32")

    for check, state, text in (
        (lambda: "fine", "ok", "fine"),
        (skipped, "skipped", "no TF32"),
        (unlike, "failed", "UnknownError: 1 is not 2"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "failed", "its process was killed by SIGKILL"),
        (lambda: os._exit(3), "failed", "its process ended with exit code 3"),
    ):
        found = results.carry_out("check", results.apart(check))
        assert (found.state, found.text) == (state, text)
    monkeypatch.setattr(results, "CHECK_S", 0.2)
    assert results.carry_out("check", results.apart(lambda: time.sleep(60))).text == "ended after 0.2 s"


def test_results_are_kept_where_no_home_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    path = results.default_path()
    KeptResults(path, "here").add(CheckResult("a", "ok", "fine", 1.0))
    assert path.is_relative_to(tmp_path / str(os.getuid()))
    assert set(KeptResults(path, "here").passed) == {"a"}


def test_results_go_below_the_home_that_a_variable_means_or_into_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "~/cache")
    assert results.default_path().is_relative_to(tmp_path / "home" / "cache")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # of a user whom no list names
    for cache in ("~/cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert results.default_path().is_relative_to(tmp_path / "temporary" / str(os.getuid()))
    assert not (tmp_path / "~").exists()


def test_whole_runs_are_rehearsed_on_as_many_cores_as_most_machines_have(tmp_path: Path) -> None:
    with Workers("cpu", REHEARSED_STRATEGIES, tmp_path) as workers:
        check: Any = sections(workers)["whole runs"]["TensorFlow: tf_mirrored"]
    assert check.args == ("cpu", "tf_mirrored", 2)


def test_a_missing_package_is_named() -> None:
    done = program("('msgspec', 'yaml')", MAIN)
    assert done.returncode == 2
    assert done.stdout.startswith("gpu-check: msgspec, PyYAML missing")


@pytest.mark.exhaustive
def test_a_gpu_that_torch_can_not_use_is_a_failure(tmp_path: Path) -> None:
    profile = tmp_path / "profile.txt"
    profile.write_text("device GPU-a\nenergy 1\nmemory 7\n")
    done = subprocess.run(
        [sys.executable, "-m", "parallelbench.gpu_check"],
        env=environment(profile, library()),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "this torch can't use it" in done.stdout) == (1, True), done.stdout + done.stderr


def test_limits_are_kept_or_the_check_fails() -> None:
    assert at_most("error", 1.0, 1.0) == "error 1 (limit 1)"
    assert between("ratio", 1.0, 0.9, 1.1) == "ratio 1 (limits 0.9 and 1.1)"
    for check in (
        lambda: at_most("error", 1.1, 1.0),
        lambda: at_most("error", float("nan"), 1.0),
        lambda: between("ratio", 0.8, 0.9, 1.1),
        lambda: between("ratio", float("nan"), 0.9, 1.1),
    ):
        with pytest.raises(FailedError):
            check()


def gpus(*uuids: str) -> list[Gpu]:
    return [Gpu(name="H100", uuid=uuid, memory_bytes=1) for uuid in uuids]


def test_gpus_are_compared_by_uuid_and_order() -> None:
    assert telemetry.compare_gpus(["GPU-a", "GPU-b"], gpus("GPU-a", "GPU-b")).startswith("2 × H100")
    with pytest.raises(FailedError, match="GPU-a GPU-b, NVML GPU-b GPU-a"):
        telemetry.compare_gpus(["GPU-a", "GPU-b"], gpus("GPU-b", "GPU-a"))
    with pytest.raises(FailedError, match="NVML none"):
        telemetry.compare_gpus(["GPU-a"], [])
    with pytest.raises(SkippedError, match="MIG"):
        telemetry.compare_gpus(["GPU-a"], gpus("MIG-a"))


READING = {"device_uuid": "GPU-a", "energy_j": 5.0, "power_w": 90.0, "utilization": 0.0, "memory_used_bytes": 10**9}
READING |= {"clock_hz": 1.2e9, "temperature_c": 40.0, "throttle_reasons": 0, "processes": 1}


def test_readings_are_judged_by_what_is_possible() -> None:
    assert "power_w 90" in telemetry.judge_readings([READING], [], 1)
    lacking = telemetry.judge_readings([READING | {"power_w": None}], ["no power_w (Not Supported) (GPU-a)"], 1)
    assert "power_w 90" not in lacking
    assert "no power_w" in lacking
    for column in WAYS:
        with pytest.raises(FailedError, match=column):
            telemetry.judge_readings([READING | {column: -1}], [], 1)
    with pytest.raises(FailedError, match="1 of 2"):
        telemetry.judge_readings([READING], [], 2)
    with pytest.raises(SkippedError, match="MIG slices"):
        telemetry.judge_readings([], ["MIG slices this one"], 1)


RANK = {"attempt": 1, "node": "here", "device_uuid": "GPU-a", "training_started_at": 1.0, "training_ended_at": 7.0}


def samples(*, watts: float = 300.0, counter_w: float = 300.0, interval_s: float = 0.1, **more: Any) -> list[Any]:
    times = [index * interval_s for index in range(round(8 / interval_s) + 1)]
    row = {"run_id": "x", "attempt": 1, "node": "here", "device_uuid": "GPU-a", "power_w": watts, "utilization": 1.0}
    return [row | {"time": t, "energy_j": 1000 + counter_w * t} | more for t in times]


def test_the_counter_is_held_against_the_power(tmp_path: Path) -> None:
    def judged(rows: list[Any]) -> str:
        return telemetry.judge_energy(recorded(tmp_path / f"{uuid.uuid4()}.bin", rows), RANK)

    assert judged(samples()).startswith("counter ÷ integrated power 1 ")
    assert "1800 J in 6.0 s" in judged(samples())
    for wrong, text in (
        (samples(counter_w=400), "counter ÷ integrated power 1.33"),
        (samples(interval_s=0.5), "interval between samples"),
        (samples(utilization=0.1), "utilisation is 0.10"),
        (samples(device_uuid="GPU-b"), "0 samples"),
    ):
        with pytest.raises(FailedError, match=text):
            judged(wrong)
    with pytest.raises(SkippedError, match="from_power"):
        judged(samples(energy_j=None))


@pytest.mark.exhaustive
def test_the_samplers_process_is_asked_for_energy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profile = tmp_path / "profile.txt"
    profile.write_text("device GPU-a\nenergy 1000\ninstant 5000\nutilization 90\nmemory 7\nclock 1000\nthrottle 0\n")
    for name, value in environment(profile, library()).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FailedError, match=r"counter ÷ integrated power 0 |interval between samples"):
        telemetry.energy(CPU, "GPU-a", device.work_for(CPU, size=16), load_s=2.5)


def test_clocks_are_held_against_a_stopwatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_STEPS", 5)
    durations = device.StepClock.durations
    monkeypatch.setattr(device.StepClock, "durations", lambda clock: [(n, 2 * s) for n, s in durations(clock)])
    with pytest.raises(FailedError, match="sum of the steps"):
        device.clocks(CPU)


@pytest.mark.exhaustive
def test_pieces_of_work_are_held_against_a_stopwatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "work_for", lambda _: lambda: time.sleep(0.01))
    rows = [{"operation": "launch", "time_s": 1e-6}]
    rows.append({"operation": "matmul", "precision": "fp32", "flop": 2e12, "time_s": 1.0})
    monkeypatch.setattr(device, "device_work", lambda _: rows)
    monkeypatch.setattr(device, "sharded_layers", lambda *_: [])
    found = device.calibration(CPU)
    assert "TFLOP/s: fp32 2; µs: launch 1;" in found
    rows[1]["time_s"] = float("nan")
    with pytest.raises(FailedError, match=r"no time of \[\('matmul', 'fp32', None\)\]"):
        device.calibration(CPU)
    monkeypatch.setattr(device, "times_s", lambda *_: [0.02])
    with pytest.raises(FailedError, match="clock ÷ stopwatch"):
        device.calibration(CPU)


@pytest.mark.exhaustive
def test_arithmetic_that_is_too_rough_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "error of a convolution in fp32" in device.arithmetic(CPU)
    product = torch.Tensor.__matmul__

    def rough(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return product(a, b) if a.dtype == torch.float64 else product(a.bfloat16(), b.bfloat16()).float()

    monkeypatch.setattr(torch.Tensor, "__matmul__", rough)
    with pytest.raises(FailedError, match="matrix product in fp32"):
        device.arithmetic(CPU)


@pytest.mark.slow
def test_training_is_compared_with_a_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert training.like_a_cpu(CPU, "mlp").startswith("largest relative difference 0 ")
    build = training.replica_of

    def disturbed(run: Any, world: World) -> Any:
        replica = build(run, world)
        if world is not CPU:
            with torch.no_grad():
                next(iter(replica.trained()[0].parameters())).mul_(1.001)
        return replica

    monkeypatch.setattr(training, "replica_of", disturbed)
    with pytest.raises(FailedError):
        training.like_a_cpu(CPU, "mlp")


@pytest.mark.slow
def test_norms_by_torchs_kernels_are_held_against_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FailedError, match="does not take torch's kernels"):
        training.synchronized_norms(CPU)
    with kernels_on_cpus():
        assert "torch.bfloat16 0.00" in training.synchronized_norms(CPU)
        monkeypatch.setattr(torch, "batch_norm_elemt", lambda x, *_: x.clone())
        with pytest.raises(FailedError, match="float32"):
            training.synchronized_norms(CPU)


def test_ranks_wait_for_others_that_compile() -> None:
    """Which has taken more than a minute, on a busy machine; and what waits in vain is told before the attempt ends."""
    waits = {run.launcher.collective_timeout_s for run in variants.runs("model_parallel", "cpu", 2).values()}
    assert min(waits) > 60
    assert max(waits) + 60 < ATTEMPT_S


def test_one_gpu_on_each_of_two_nodes_is_enough() -> None:
    plain = variants.runs("ddp", "cuda", 1, nodes=2)["plain"]
    assert (plain.devices, plain.nodes) == (2, 2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Attempt]:
    """Two ranks of a small model, by attempts' own means."""
    run = as_attempt(training.small_run("mlp", strategy="ddp", devices=2), "cpu")
    with Workers("cpu", 2, tmp_path_factory.mktemp("attempts")) as workers:
        return run, workers.carry_out(run)


STAND_IN = """#!{python} -S
import json, os, socket, sys

asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asked.connect(chr(0) + sys.argv[3])
while (received := socket.recv_fds(asked, 65536, 1))[0]:
    for log in received[1]:
        os.close(log)
    word = json.loads(received[0])["arguments"][0]
    if word == "dies at once":
        os.abort()
    asked.send(b"4000000")
    if word == "dies later":
        os.abort()
    asked.send(word.encode())
    if word == "0":
        sys.exit()
"""
"""Takes the place of the process that ranks are forked from; answers with the exit code that it is asked for."""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "stand-in"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.usefixtures("stand_in")
def test_a_process_to_fork_from_that_has_ended_is_named_and_replaced(tmp_path: Path) -> None:
    def ends(word: str) -> int | None:
        return warm.run(ForkRequest(arguments=[word], processes=1), {}, tmp_path / "log.txt", lambda: False)

    with closing(WarmProcesses()) as warm:
        for word in ("dies at once", "dies later"):
            with pytest.raises(FailedError, match="the process that ranks are forked from was killed by SIGABRT"):
                ends(word)
            assert (ends("7"), ends("-11")) == (7, -11)
        assert ends("0") == 0
        (kept,) = warm._kept.values()
        kept._process.wait()
        assert ends("7") == 7, "it ended between two runs"


@pytest.mark.usefixtures("stand_in")
def test_ranks_that_leave_no_word_fail_by_their_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone = as_attempt(training.small_run("mlp"), "cpu")
    two = as_attempt(training.small_run("mlp", strategy="ddp", devices=2), "cpu")
    with Workers("cpu", 2, tmp_path) as workers:
        for run, code, words in (
            (alone, -11, "rank 0 was killed by SIGSEGV"),
            (alone, 3, "rank 0 ended with exit code 3: no output"),
            (two, -9, "what starts the ranks was killed by SIGKILL"),
        ):
            monkeypatch.setattr(
                "parallelbench.gpu_check.attempts.ForkRequest",
                lambda code=code, **_: ForkRequest(arguments=[str(code)], processes=1),
            )
            assert answer_of(run, workers.carry_out(run)).problem == words


def test_another_node_goes_on_after_a_run_that_it_could_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def run(_: WarmProcesses, request: ForkRequest, *_more: object) -> None:
        asked.append(request.arguments[1])
        raise FailedError("nothing to fork from")

    monkeypatch.setattr(WarmProcesses, "run", run)
    nodes = Nodes(2, "127.0.0.1", tmp_path)
    for attempt in ("a", "b"):
        with nodes.taking_part(ForkRequest(arguments=["run", attempt], processes=2), {}):
            pass
    nodes.end()
    assert follow([str(tmp_path), "1"]) == 0
    assert asked == ["a", "b"]


def altered(attempt: Attempt, folder: Path, alter: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Attempt:
    """A copy in which each entry of rank 0's journal is what `alter` makes of it; None: it is not there."""
    copy = Attempt(folder / attempt.path.name)
    shutil.copytree(attempt.path, copy.path)
    entries = read_entries(attempt.path / "journal-rank0.jsonl")
    kept = [entry for entry in map(alter, entries) if entry is not None]
    (copy.path / "journal-rank0.jsonl").write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in kept))
    return copy


def failing(table: str, difference: float | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Lets all rows of a table have failed by this difference; None: it is NaN, which JSON can't hold."""
    worse = {"passed": False, "gradient_difference" if table == "parity" else "difference": difference}

    def alter(entry: dict[str, Any]) -> dict[str, Any]:
        row = entry.get("row", {})
        changed = {key: value for key, value in worse.items() if key in row}
        return entry | {"row": row | changed} if entry.get("table") == table else entry

    return alter


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (lambda entry: entry, ""),
        (lambda entry: None if entry.get("table") == "parity" else entry, "no result of the parity check"),
        (failing("parity", 0.1), r"difference from one device 0\.1 \(limit 1e-09\)"),
        (failing("parity", None), r"difference from one device nan \(limit 1e-09\)"),
        (failing("checks", 0.5), r"not like one device: .*gradients 0\.5 \(limit"),
        (lambda entry: None if entry.get("table") == "epochs" else entry, "trained 0 of 2 epochs"),
        (
            lambda entry: None if (entry.get("row", {}).get("step") or 0) > 20 else entry,
            "the closing check has left no word of its steps",
        ),
        (lambda entry: None if "closing_check_s" in entry else entry, "did not come to the closing check's end"),
    ],
    ids=["right", "no parity", "parity", "NaN", "closing", "epochs", "no steps", "end"],
)
def test_an_attempts_journals_are_judged(
    finished: tuple[RunConfig, Attempt], tmp_path: Path, alter: Any, words: str
) -> None:
    run, attempt = finished
    found = answer_of(run, altered(attempt, tmp_path, alter)).problem
    assert re.search(words, found) if words else found == ""


@pytest.mark.slow
def test_steps_that_were_not_compared_are_said_with_the_reason(
    finished: tuple[RunConfig, Attempt], tmp_path: Path
) -> None:
    """As where fp16 overflows in each of them."""
    run, attempt = finished
    assert answer_of(run, attempt).steps_not_compared == ""

    def overflowed(entry: dict[str, Any]) -> dict[str, Any]:
        row = entry.get("row", {})
        if entry.get("table") != "checks" or (row["step"] or 0) <= run.epochs * run.steps_per_epoch:
            return entry
        return entry | {"row": row | {"difference": None, "passed": None, "detail": "gradients overflowed"}}

    assert answer_of(run, altered(attempt, tmp_path, overflowed)).steps_not_compared == "gradients overflowed"


@pytest.mark.slow
def test_a_rank_that_a_signal_killed_after_all_checks_is_named(
    finished: tuple[RunConfig, Attempt], tmp_path: Path
) -> None:
    run, attempt = finished
    copy = altered(attempt, tmp_path, lambda entry: entry)
    write_exits(exits_file(copy.path, 0), Exits(codes={0: 1, 1: -11}))
    assert answer_of(run, copy).problem == "rank 1 was killed by SIGSEGV"


@pytest.mark.slow
def test_the_first_rank_that_failed_by_itself_is_named(finished: tuple[RunConfig, Attempt], tmp_path: Path) -> None:
    run, attempt = finished
    copy = altered(attempt, tmp_path, lambda entry: entry)
    for rank, kind, at in ((0, "peer", 1.0), (1, "error", 2.0)):
        error = RankError(rank=rank, kind=kind, reason=f"of rank {rank}", time=at)
        fill(copy.error_file(rank), msgspec.json.encode(error))
    assert answer_of(run, copy).problem == "rank 1: of rank 1"


def test_a_strategy_fails_by_any_of_its_variants() -> None:
    runs = variants.runs("ddp", "cuda", 2)
    with pytest.raises(FailedError, match="2 devices, vit_tiny, compile: rank 1: a wait"):
        strategies.judged(runs, "cuda", dict.fromkeys(runs, Answer("")) | {"compile": Answer("rank 1: a wait")})


@pytest.mark.slow
def test_runs_on_gpus_never_wait_but_by_design() -> None:
    for name in strategies.names():
        runs = variants.runs(name, "cuda", 4)
        assert {run.strategy.name for run in runs.values()} == {name}, "each has runs on four GPUs"
        assert {run.devices for run in runs.values()} <= {2, 3, 4}
        first_order = set() if name in ("downpour", "sandblaster_lbfgs") else {"sgd", "adamw", "adagrad"}
        # Experts compute tensors of sizes that no compiler knows.
        compiled = set() if name in ("data_parallel", "expert_parallel") else {"compile"}
        compiled |= {"compile_scope=step"} if compiled and name != "sandblaster_lbfgs" else set()
        lowered = set() if name == "sandblaster_lbfgs" else {"bf16"}
        assert {"plain", *first_order, *compiled, *lowered, *variants.OWN.get(name, {})} <= runs.keys()
        for run in runs.values():
            assert (run.measure.waits == "error") == (variants.waits_by_design(run) == ""), name


@pytest.mark.exhaustive
def test_all_schedules_of_pipelines_are_tried() -> None:
    for gpus in (2, 4, 8):
        found = {run.strategy.schedule for run in variants.runs("pipeline", "cuda", gpus).values()}  # type: ignore[attr-defined]
        assert found == set(get_args(Schedule))


def only(monkeypatch: pytest.MonkeyPatch, *labels: str) -> None:
    """Check strategies by a small model, and these variants."""
    monkeypatch.setattr(variants, "MODELS", variants.MODELS[1:])
    monkeypatch.setattr(variants, "ALIKE", {label: variants.ALIKE[label] for label in labels})
    monkeypatch.setattr(variants, "OWN", {})


@pytest.mark.exhaustive
def test_a_strategys_ranks_are_started_and_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only(monkeypatch, "bf16")
    with Workers("cpu", 2, tmp_path) as workers:
        text = strategies.strategy("ddp", workers)
    assert text.startswith("2 devices, mlp, largest difference from one device")
    assert text.endswith("; trained like plain code: plain, bf16")


@pytest.mark.exhaustive
def test_strategies_are_checked_on_several_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both nodes are this machine."""
    only(monkeypatch)
    other = [sys.executable, "-m", "parallelbench.gpu_check.nodes", str(tmp_path), "1"]
    nodes = Nodes(2, "127.0.0.1", tmp_path)
    with subprocess.Popen(other) as follower, Workers("cpu", 1, tmp_path, nodes) as workers:
        assert strategies.strategy("ddp", workers).startswith("2 devices, mlp, 2 nodes, largest difference")
        assert strategies.alone(training.small_run("mlp"), workers).startswith("1 devices, mlp, trained")
    assert follower.returncode == 0


@pytest.mark.exhaustive
def test_ranks_that_fail_or_hang_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = as_attempt(training.small_run("mlp", strategy="ddp", devices=2), "cpu")
    with Workers("cuda", 2, tmp_path) as workers:  # there is none: torch says so, or NCCL
        found = answer_of(run, workers.carry_out(run)).problem
        assert torch.cuda.is_available() or found.startswith("rank ")
        monkeypatch.setattr(workers, "device_type", "cpu")
        monkeypatch.setattr("parallelbench.gpu_check.attempts.ATTEMPT_S", 0.0)
        assert answer_of(run, workers.carry_out(run)).problem == "ended after 0 s"
        monkeypatch.setattr("parallelbench.gpu_check.attempts.ALONE_S", 0.1)
        alone = as_attempt(training.small_run("mlp"), "cpu")
        assert answer_of(alone, workers.carry_out(alone)).problem == "ended after 0.1 s"


@pytest.mark.exhaustive
def test_one_rank_in_shards_is_held_against_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "OPTIMIZERS", ("adam",))
    text = training.sharded(CPU)
    assert text.startswith("largest relative difference of a loss")
    assert text.endswith("adam, by ProcessGroupGloo")
    build = variants.replica_of
    monkeypatch.setattr(training, "replica_of", lambda run, world: build(msgspec.structs.replace(run, seed=1), world))
    with pytest.raises(FailedError, match="largest relative difference"):
        training.sharded(CPU)


def carried_out(folder: Path, setting: str, *, fresh: bool = False) -> list[str]:
    """The checks that were really carried out."""
    done: list[str] = []

    def check(name: str, problem: str = "") -> tuple[str, Any]:
        def carry() -> str:
            done.append(name)
            if problem and not (folder / "mended").exists():
                raise FailedError(problem)
            return "fine | good"

        return name, carry

    checks = dict([check("a"), check("b", "3 is too much"), check("c")])
    failed = not (folder / "mended").exists()
    assert carry_out_all(checks, setting, path=folder / "kept.jsonl", fresh=fresh, some=False) == failed
    return done


def test_after_a_failure_only_what_has_not_passed_is_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert carried_out(tmp_path, "torch 1 on A") == ["a", "b", "c"]
    assert "| b | failed | 3 is too much |" in capsys.readouterr().out
    assert carried_out(tmp_path, "torch 1 on A") == ["b"]
    assert carried_out(tmp_path, "torch 1 on A", fresh=True) == ["a", "b", "c"]
    assert carried_out(tmp_path, "torch 2 on A") == ["a", "b", "c"], "other software shows other things"
    (tmp_path / "mended").touch()
    assert carried_out(tmp_path, "torch 2 on A") == ["b"]
    table = capsys.readouterr().out
    assert r"| a | ok | fine \| good |" in table, "what passed before is in the table, too"
    assert carried_out(tmp_path, "torch 2 on A") == ["a", "b", "c"], "after a success all begins anew"


def test_a_crash_costs_only_the_check_that_crashed(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    kept = KeptResults(path, "here")
    kept.add(CheckResult("a", "ok", "fine", 1.0))
    path.write_bytes(path.read_bytes() + b'{"name": "b", "sta')
    assert KeptResults(path, "here").passed == {}, "a file that ends in the middle is not believed"
    kept = KeptResults(path, "here")
    kept.add(CheckResult("a", "ok", "fine", 1.0))
    assert set(KeptResults(path, "here").passed) == {"a"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "words"),
    [
        (lambda of: whole_runs.ends_well(of, True, loader="streamed"), "2 × "),
        (lambda _: whole_runs.debugged("cpu"), "5 deterministic steps"),
        pytest.param(
            lambda _: whole_runs.tensorflow("cpu", "tf_mirrored", 2),
            "peaks of a rank None",
            marks=pytest.mark.tensorflow,
        ),
    ],
    ids=["two", "debugged", "tensorflow"],
)
@pytest.mark.cases("two")
def test_whole_runs_are_judged(check: Any, words: str, tmp_path: Path) -> None:
    with Workers("cpu", 2, tmp_path) as workers:
        assert words in check(workers)


def test_a_run_that_ended_otherwise_than_it_should_is_a_failure(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    with pytest.raises(FailedError, match="should be oom with “memory”, and is none"):
        whole_runs._expect(attempt, "oom", "memory")
    (tmp_path / "outcome.json").write_bytes(b" " * 4096)  # as attempts reserve it
    attempt.finish("error", "no such thing")
    with pytest.raises(FailedError, match="should be oom with “memory”, and is error: no such thing"):
        whole_runs._expect(attempt, "oom", "memory")


@pytest.mark.parametrize(("before", "failed"), [({"GPU-a": 1}, False), ({}, True)])
def test_a_rank_on_anothers_gpu_is_noticed(before: dict[str, int], failed: bool, tmp_path: Path) -> None:
    """This process may have a context on the GPU itself."""
    own = {"run_id": "r", "attempt": 1, "node": "n", "time": 1.0, "device_uuid": "GPU-a", "processes": 2}
    recorded(tmp_path / "telemetry-node0.bin", [own])
    with pytest.raises(FailedError) as caught:  # there are no epochs
        whole_runs.judge(Attempt(tmp_path), "cuda", 1, phases=True, before=before)
    assert ("2 of the run's processes computed on one" in str(caught.value)) == failed


def test_only_some_checks_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tried = {name: lambda: "fine" for name in ("a", "strategy x", "strategy y")}
    monkeypatch.setattr("parallelbench.gpu_check.__main__.sections", lambda *_: {"letters": tried})
    assert gpu_check_main(["--rehearse", "--only", "strategy *"]) == 0
    table = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in table.splitlines() if " ok | fine" in line] == [*tried][1:]
    assert gpu_check_main(["--rehearse", "--only", "strategies *"]) == 2
    said = capsys.readouterr()
    assert (said.out, re.findall(r"^  (.*)", said.err, re.MULTILINE)) == ("", [*tried]), "it checked nothing"


def test_ranks_that_share_gpus_check_the_strategies_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def offered(workers: Workers) -> dict[str, dict[str, Any]]:
        counted = {"ranks": lambda: f"{workers.devices} ranks"}
        return {"devices": {"energy": lambda: "not of shared ones"}, "strategies": counted}

    monkeypatch.setattr("parallelbench.gpu_check.__main__.sections", offered)
    assert gpu_check_main(["--rehearse", "--share", "2"]) == 0
    said = capsys.readouterr().out
    assert "not of shared ones" not in said
    assert f"{2 * REHEARSED_STRATEGIES} ranks" in said


def test_ranks_that_share_gpus_take_turns_in_taking_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARING, "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    taken = []
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        join("cuda", devices=1, timeout_s=1.0)
    assert [device.index for device in taken] == [0, 1, 0, 1]
    monkeypatch.setenv("LOCAL_RANK", "0")
    both = join("cuda", devices=3, timeout_s=1.0).devices
    assert [device.index for device in both] == [0, 1, 0], "of one process that drives several"
