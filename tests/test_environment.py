"""What a run records of its environment."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parallelbench.frameworks import FRAMEWORKS, entries_of, session_class
from parallelbench.measure import environment
from parallelbench.measure.environment_match import (
    ENTRIES_VERSION,
    differences,
    entries,
    is_of_program,
    is_reported,
    is_set_by_launcher,
    must_match,
)
from tests.analysis.factory import config


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("part", ["session", "entries"])
def test_a_framework_that_cant_be_imported_says_why(framework: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = re.sub(r"\W\w+$", "", getattr(FRAMEWORKS[framework], part))
    monkeypatch.setitem(sys.modules, module, None)  # whose import then fails
    with pytest.raises(ImportError, match=re.escape(module)):
        {"session": session_class, "entries": entries_of}[part](framework)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("JobId=7 NumNodes=1 OverSubscribe=NO Contiguous=0", "exclusive"),
        ("JobId=7 NumNodes=1 OverSubscribe=OK Contiguous=0", "shared"),
        ("JobId=7 OverSubscribe=USER", "shared"),
        ("slurm_load_jobs error", None),
    ],
)
def test_whether_other_jobs_may_run_beside(
    said: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\ntest "$*" = "show job 7 --oneliner" && echo "{said}"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert environment.allocation() is None
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert environment.allocation() == expected


def test_a_machine_is_known_by_a_hash_of_its_id(tmp_path: Path) -> None:
    file = tmp_path / "id"
    assert environment.machine(str(file)) is None
    file.write_text("0123456789abcdef\n")
    known = environment.machine(str(file))
    assert known is not None
    assert len(known) == 16
    assert known not in file.read_text()
    file.write_text("0123456789abcdee\n")
    assert environment.machine(str(file)) not in (None, known)


def test_only_listed_variables_are_kept_and_no_secret_among_them() -> None:
    variables = {"NCCL_DEBUG": "INFO", "HOME": "/me", "RANK": "0", "SLURM_JOB_ID": "7", "TF_XLA_FLAGS": "2"}
    secret = {"SLURM_JWT": "a", "SLURM_EXPORT_ENV": "A=b", "SLURM_SPANK_X": "c", "TF_VAR_db": "d", "TF_TOKEN_app": "e"}
    secret |= {"TRITON_AWS_MOUNT_DIRECTORY": "f", "SLURM_JOB_COMMENT": "g", "CUDA_API_KEY": "h"}
    secret |= {"NCCL_NET_PLUGIN": "hf_" + "a1B2" * 9}
    assert environment.allowed_variables(variables | secret) == {
        "CUDA_API_KEY": "redacted",
        "NCCL_DEBUG": "INFO",
        "NCCL_NET_PLUGIN": "redacted-Hugging-Face-token",
        "RANK": "0",
        "SLURM_JOB_COMMENT": "redacted",
        "SLURM_JOB_ID": "7",
        "TF_XLA_FLAGS": "2",
    }


def test_what_may_halve_a_speed_is_recorded() -> None:
    slowing = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "KMP_BLOCKTIME": "0"}
    slowing |= {"GLIBC_TUNABLES": "glibc.malloc.check=3", "PYTHONMALLOC": "debug", "NVIDIA_TF32_OVERRIDE": "0"}
    slowing |= {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUDA_LAUNCH_BLOCKING": "1"}
    slowing |= {"OPENBLAS_CORETYPE": "Prescott", "BLIS_NUM_THREADS": "1", "TCMALLOC_RELEASE_RATE": "10"}
    assert environment.allowed_variables(slowing | {"NVIDIA_VISIBLE_DEVICES": "GPU-7", "PYTHONPATH": "/me"}) == slowing
    preloaded = environment.allowed_variables({"LD_PRELOAD": "/me/lib/libjemalloc.so.2:libtcmalloc.so /x/liba.so"})
    assert preloaded == {"LD_PRELOAD": "libjemalloc.so.2 libtcmalloc.so liba.so"}, "not whose folder it is in"


def set_up(tmp_path: Path, **site: Any) -> dict[str, Any]:
    """What is recorded in a job of this site."""
    return environment.capture("none", site=msgspec.structs.replace(config(tmp_path).site, **site))


def test_what_a_job_loads_first_must_match_and_names_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "entries_of", lambda _: {"packages": {}})
    monkeypatch.setenv("LOADEDMODULES", "gcc/12.2:/home/me/modules/mpi:cuda/12.4")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/home/me/lib")
    job = set_up(tmp_path, modules=["gcc/12.2", "cuda/12.4"], setup=["export TOKEN=secret"])
    assert (job["loaded_modules"], job["site"]["modules"]) == ("gcc/12.2 mpi cuda/12.4", "gcc/12.2 cuda/12.4")
    assert not any(word in json.dumps(job) for word in ("/home/me", "secret"))
    modules = set_up(tmp_path, modules=["gcc/12.2", "cuda/12.6"], setup=["export TOKEN=secret"])
    assert set(_unlike(job, modules)) == {"site.modules"}
    plain = set_up(tmp_path, modules=["gcc/12.2", "cuda/12.4"])
    assert set(_unlike(job, plain)) == {"site.setup_sha256"}
    monkeypatch.setenv("LOADEDMODULES", "")
    monkeypatch.delenv("LD_LIBRARY_PATH")
    elsewhere, here = set_up(tmp_path), environment.capture("none")
    assert elsewhere["library_path_sha256"] is None
    assert set(_unlike(elsewhere, here)) == set(), "on this machine, no line of a site's was run"
    assert _unlike(job, here) == {"loaded_modules": ("gcc/12.2 mpi cuda/12.4", None)}
    assert set(differences(entries(job), entries(here), is_reported)) == {"library_path_sha256"}
    older = {key: value for key, value in here.items() if key not in ("loaded_modules", "library_path_sha256")}
    assert differences(entries(job), entries(older), lambda key: must_match(key) or is_reported(key)) == {}


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV4\tSYS\tSYS\tPIX\t0-23
GPU1\tNV4\t X \tSYS\tSYS\tPIX\t0-23
GPU2\tSYS\tSYS\t X \tPHB\tSYS\t24-47
GPU3\tSYS\tSYS\tPHB\t X \tSYS\t24-47
NIC0\tPIX\tPIX\tSYS\tSYS\t X
"""


@pytest.mark.parametrize(
    ("gpus", "links"),
    [("a b", "NV4"), ("b c", "SYS"), ("d c", "PHB"), ("a b c d", "NV4, PHB, SYS"), ("a", None), ("a e", None)],
)
def test_the_links_are_those_between_the_runs_own_gpus(
    gpus: str, links: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"topo": TOPOLOGY, "--query-gpu=uuid": "a\nb\nc\nd"}
    monkeypatch.setattr(environment, "entries_of", lambda _: {"packages": {}, "cuda": {}})
    monkeypatch.setattr(environment, "output_of", lambda command: said.get(command[1]))
    assert environment.capture(gpus=gpus.split())["cuda"].get("links") == links


@pytest.mark.parametrize(("processes", "threads"), [(1, 32), (4, 8)])
def test_threads_are_those_of_a_gpu_however_many_a_process_drives(
    processes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "entries_of", lambda _: {"packages": {}, "cuda": {}, "threads": threads})
    monkeypatch.setattr(environment, "output_of", lambda _: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    captured = environment.capture(gpus=["a", "b", "c", "d"])
    assert captured["threads"] == 8
    assert not [key for key in entries(captured) if must_match(key) and key.endswith("OMP_NUM_THREADS")]


def test_links_must_match_between_runs_on_equally_many_gpus() -> None:
    close, apart, alone = {"cuda": {"links": "NV4"}}, {"cuda": {"links": "SYS"}}, {"cuda": {"version": None}}
    assert _unlike(close, apart) == {"cuda.links": ("NV4", "SYS")}
    assert _unlike(alone, apart) == {}, "one GPU has none, and an older release recorded none"
    two, four = {"devices": 2, "nodes": 1}, {"devices": 4, "nodes": 1}
    assert is_set_by_launcher("cuda.links", two, four)
    assert not is_set_by_launcher("cuda.links", two, two)


@pytest.mark.exhaustive
def test_how_the_system_schedules_this_process_is_recorded() -> None:
    program = "from parallelbench.measure.environment import capture; import json; print(json.dumps(capture()))"
    usual, nice = (
        json.loads(subprocess.run([*prefix, sys.executable, "-c", program], capture_output=True, check=True).stdout)
        for prefix in ([], ["nice", "-n", "7"])
    )
    assert nice["nice"] == usual["nice"] + 7
    assert (usual["scheduling_policy"], usual["entries_version"]) == ("other", ENTRIES_VERSION)
    assert set(_unlike(usual, nice)) == {"nice"}


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=me", "-c", "user.email=me@localhost")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def committed(folder: Path) -> Path:
    """A repository with one file."""
    folder.mkdir()
    git(folder, "init")
    (folder / "file").write_text(folder.name)
    git(folder, "add", "file")
    git(folder, "commit", "-m", folder.name)
    return folder


def test_the_state_of_a_checkout(tmp_path: Path) -> None:
    checkout = committed(tmp_path / "suite")
    clean = environment.git_state(checkout)
    assert (len(clean["commit"]), clean["dirty"]) == (40, False)
    (checkout / "file").write_text("two")
    assert environment.git_state(checkout) == clean | {"dirty": True}


def test_the_checkout_is_the_suites_whatever_repository_the_shell_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in git's hooks, which set these."""
    checkout, other = committed(tmp_path / "suite"), committed(tmp_path / "other")
    clean = environment.git_state(checkout)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    assert environment.git_state(checkout) == clean


def test_without_a_commit_the_reason_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.git_state(tmp_path) == {"unknown": "installed without a checkout"}
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init")
    assert "HEAD" in environment.git_state(tmp_path / "empty")["unknown"], "nothing was committed"
    (tmp_path / "broken" / ".git").mkdir(parents=True)
    said = environment.git_state(tmp_path / "broken")["unknown"]
    assert "not a git repository" in said
    assert str(tmp_path) not in said, "places name users"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.git_state(tmp_path / "empty") == {"unknown": "git is not installed"}


def test_settings_of_interconnects_are_recorded_and_must_match() -> None:
    chosen = {"FI_PROVIDER": "cxi", "UCX_NET_DEVICES": "mlx5_0:1", "RCCL_MSCCL_ENABLE": "1", "HSA_ENABLE_SDMA": "0"}
    chosen |= {"NVSHMEM_REMOTE_TRANSPORT": "none", "MPICH_OFI_NIC_POLICY": "NUMA", "NCCL_ALGO": "Ring"}
    assert environment.allowed_variables(chosen) == chosen
    one, other = entries({"variables": {}}), entries({"variables": chosen | {"UCX_LOG_FILE": "/home/me/log"}})
    assert set(differences(one, other)) == {f"variables.{name}" for name in chosen}, "but no places"


def _unlike(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return differences(entries(one), entries(other))


def test_only_what_changes_a_measurement_differs() -> None:
    before = {"host": "a", "packages": {"torch": "2.14", "hydra-core": "1"}, "variables": {"NCCL_ALGO": "Ring"}}
    now = {"host": "b", "packages": {"torch": "2.15", "hydra-core": "2"}, "variables": {"SLURM_JOB_ID": "8"}}
    assert _unlike(before, before | {"host": "c"}) == {}
    assert _unlike(before, now) == {"packages.torch": ("2.14", "2.15"), "variables.NCCL_ALGO": ("Ring", None)}


def test_what_tensorflow_sets_for_its_strategies_keeps_no_runs_apart() -> None:
    """A worker's addresses are drawn anew for every run; servers have two switches of their own."""
    of_worker = {
        "TF_CLI_CONFIG_FILE": "/home/me/.terraformrc",
        "TF_CONFIG": '{"cluster": {"worker": ["127.0.0.1:43313"]}, "task": {"type": "worker", "index": 0}}',
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    one, worker = entries({"variables": {}}), entries({"variables": of_worker})
    assert differences(one, worker) == {}
    served = {"TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY": "0", "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE": "False"}
    unlike = differences(one, entries({"variables": served}))
    assert len(unlike) == 2
    single, server = {"strategy.name": "tf_single"}, {"strategy.name": "tf_parameter_server"}
    assert all(is_set_by_launcher(key, single, server) for key in unlike)
    assert not any(is_set_by_launcher(key, server, server) for key in unlike), "someone else has set it"
    assert set(differences(one, entries({"variables": {"TF_ENABLE_ONEDNN_OPTS": "0"}}))) == {
        "variables.TF_ENABLE_ONEDNN_OPTS"
    }


def test_the_suite_has_no_other_version_where_another_framework_only_imports_it() -> None:
    installed = entries({"packages": {"parallelbench": "0.1.0"}, "git": {"commit": "a"}})
    imported = entries({"framework": "tensorflow", "packages": {"parallelbench": None}, "git": {"commit": "b"}})
    assert set(differences(installed, imported, is_of_program)) == {"git.commit"}
    newer = entries({"framework": "tensorflow", "packages": {"parallelbench": "0.2.0"}, "git": {"commit": "a"}})
    assert set(differences(installed, newer, is_of_program)) == {"packages.parallelbench"}
    same = entries({"packages": {"parallelbench": None}, "git": {"commit": "a"}})
    assert set(differences(installed, same, is_of_program)) == {"packages.parallelbench"}, "of one framework"


def test_what_each_gpu_says_counts_once() -> None:
    alone = {"cuda": {"driver": "570.1", "power_limit_w": "400.00"}}
    both = {"cuda": {"driver": "570.1\n570.1", "power_limit_w": "400.00\n400.00"}}
    assert _unlike(alone, both) == {}
    uneven = {"cuda": {"driver": "570.1\n570.1", "power_limit_w": "400.00\n300.00"}}
    assert _unlike(alone, uneven) == {"cuda.power_limit_w": ("400.00", "300.00, 400.00")}
    other = {"framework": "tensorflow"}
    assert _unlike(alone, both | other) == {}
    assert _unlike(alone, uneven | other) == {"cuda.power_limit_w": ("400.00", "300.00, 400.00")}
    for_processors = {"cuda": None}
    assert _unlike(for_processors, both | other) == {}, "a torch that uses no GPU tells of no driver"
    assert set(_unlike(for_processors, both)) == {"cuda.driver", "cuda.power_limit_w"}


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
@pytest.mark.parametrize("cuda", [None, {"version": "12.8"}])
def test_each_framework_that_could_use_gpus_tells_of_their_driver(
    framework: str, cuda: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "entries_of", lambda _: {"packages": {}, "cuda": cuda and cuda.copy()})
    monkeypatch.setattr(environment, "output_of", lambda command: command[1])
    asked = {"driver": "--query-gpu=driver_version", "power_limit_w": "--query-gpu=power.limit", "topology": "topo"}
    assert environment.capture(framework)["cuda"] == (cuda and cuda | asked)
