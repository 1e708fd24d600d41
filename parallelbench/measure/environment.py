"""The environment of a run, by allowlist: what a reader needs to judge and repeat its numbers, never secrets."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelbench.config.plugin import folders, source_files, sources_now
from parallelbench.frameworks import entries_of
from parallelbench.measure.environment_match import ENTRIES_VERSION, FRAMEWORK, PLUGIN, VERSION
from parallelbench.measure.git import GitError, said
from parallelbench.redaction import recorded_variables
from parallelbench.world.machine import cpu_name, cpu_quota_cores, text_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from parallelbench.config.sites import Site

_PACKAGES = (
    "parallelbench",
    "numpy",
    "hydra-core",
    "submitit",
    "pyarrow",
    "nvidia-ml-py",
)
_ANSWERS_S = 20
"""How long a command may take to answer."""
_POLICIES = {getattr(os, f"SCHED_{name}"): name.lower() for name in ("OTHER", "BATCH", "IDLE", "FIFO", "RR")}


def capture(
    framework: str = "torch",
    *,
    plugin: str | None = None,
    site: Site | None = None,
    gpus: Collection[str] = (),
    foreign: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The parts of this process's environment that may change a number; this process trains with `framework`.

    `foreign`: entries of the processes that train, where these are not the suite's. `plugin`: a user's package that
    the run's classes come from. `site`: the one whose modules and set-up lines came before this
    process. `gpus`: UUIDs of the run's GPUs on this machine; `threads` are those of each.
    """
    own = dict(foreign) if foreign else entries_of(framework)
    if gpus and foreign is not None:  # whatever trains there
        own.setdefault("cuda", {})
    if gpus and "threads" in own and foreign is None:  # a process that drives several has as many times the threads
        own["threads"] = own["threads"] * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // len(gpus)
    if own.get("cuda") is not None:
        own["cuda"] |= _of_driver(gpus)
    return {
        VERSION: ENTRIES_VERSION,
        FRAMEWORK: framework,
        "host": socket.gethostname(),
        "machine": machine(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES} | own.pop("packages"),
        "git": git_state(Path(__file__).resolve().parents[2]),
        **({PLUGIN: _plugin(plugin)} if plugin else {}),
        "allocation": allocation(),
        "cpu": cpu_name(),
        "logical_cores": os.cpu_count(),
        "cores_of_rank_0": sorted(os.sched_getaffinity(0)),
        "cpu_governor": text_of("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "cpu_boost": _boost(),
        "cpu_quota_cores": cpu_quota_cores(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "scheduling_policy": _POLICIES.get(os.sched_getscheduler(0)),
        "transparent_hugepages": _chosen(text_of("/sys/kernel/mm/transparent_hugepage/enabled")),
        "load_average_1min": os.getloadavg()[0],
        "loaded_modules": module_names(os.environ.get("LOADEDMODULES", "")),
        "library_path_sha256": _hash(os.environ.get("LD_LIBRARY_PATH")),
        **({"site": _set_up(site)} if site else {}),
        **own,
        "variables": allowed_variables(dict(os.environ)),
    }


def machine(path: str = "/etc/machine-id") -> str | None:
    """What tells this machine from others of its name: a hash of its id, which itself is to stay on it."""
    return _hash(text_of(path))


def _hash(text: str | None) -> str | None:
    """What tells a text from others without saying it, as it may name users, or hold secrets."""
    return hashlib.sha256(f"parallelbench {text}".encode()).hexdigest()[:16] if text else None


def module_names(loaded: str) -> str | None:
    """The modules of LOADEDMODULES, in their order; of one that was loaded by its path, only the file's name."""
    names = (Path(module).name if module.startswith("/") else module for module in loaded.split(":") if module)
    return " ".join(names) or None


def _set_up(site: Site) -> dict[str, str | None]:
    """What of a site runs at the start of its jobs."""
    return {"modules": " ".join(site.modules) or None, "setup_sha256": _hash("\n".join(site.setup))}


def allowed_variables(variables: dict[str, str]) -> dict[str, str]:
    """`recorded_variables`, of LD_PRELOAD only the libraries."""
    found = recorded_variables(variables)
    return found | ({"LD_PRELOAD": _file_names(found["LD_PRELOAD"])} if "LD_PRELOAD" in found else {})


def _file_names(paths: str) -> str:
    """The libraries of LD_PRELOAD without their folders, which differ between users who preload the same one."""
    return " ".join(Path(path).name for path in re.split(r"[\s:]+", paths) if path)


def _boost() -> str | None:
    """Whether cores may exceed their base clock: on, off; None where the kernel doesn't say."""
    cpus = "/sys/devices/system/cpu"
    boost, no_turbo = text_of(f"{cpus}/cpufreq/boost"), text_of(f"{cpus}/intel_pstate/no_turbo")
    if boost is None and no_turbo is None:
        return None
    return "on" if boost == "1" or no_turbo == "0" else "off"


def _chosen(options: str | None) -> str | None:
    """ "always [madvise] never" → "madvise"."""
    found = re.search(r"\[(\w+)\]", options or "")
    return found and found[1]


def allocation() -> str | None:
    """Whether other jobs may run on this one's nodes: exclusive or shared; None: no Slurm job, or Slurm doesn't say."""
    job = os.environ.get("SLURM_JOB_ID")
    shown = output_of(["scontrol", "show", "job", job, "--oneliner"]) if job else None
    mode = re.search(r"\bOverSubscribe=(\w+)", shown or "")
    return None if mode is None else "exclusive" if mode[1] == "NO" else "shared"


def git_state(repository: Path) -> dict[str, Any]:
    """Commit and dirty flag of the suite's own checkout; `unknown`: why there is none."""
    if not (repository / ".git").exists():
        return {"unknown": "installed without a checkout"}
    return _git(repository, "--untracked-files=no")


def _git(folder: Path, *status: str) -> dict[str, Any]:
    """The commit that a folder is in, and whether `git status` with these arguments shows changes; `unknown`: why git
    does not say.
    """
    try:
        commit, changes = said(folder, "rev-parse", "HEAD"), said(folder, "status", "--porcelain", *status)
    except GitError as error:
        return {"unknown": str(error)}
    return {"commit": commit, "dirty": bool(changes)}


def _plugin(package: str) -> dict[str, Any]:
    """The sources of a user's package, and the commit that they are in; `dirty`: the commit has others."""
    folder, files = folders(package)[0], [name for name, _ in source_files(package)]
    try:
        is_known = bool(said(folder, "ls-files", "--", *files))
    except GitError as error:
        return {"sources": sources_now(package), "git": {"unknown": str(error)}}
    git = _git(folder, "--", *files) if is_known else {"unknown": "no repository holds these files"}
    return {"sources": sources_now(package), "git": git}


def version(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _of_driver(gpus: Collection[str]) -> dict[str, str | None]:
    """What the driver says of all GPUs of this machine, and of the links between these; nothing where there is none."""
    found = {
        "driver": output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "power_limit_w": output_of(["nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader,nounits"]),
        "topology": output_of(["nvidia-smi", "topo", "-m"]),
    }
    if len({*gpus}) < 2:
        return found
    uuids = (output_of(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]) or "").split()
    known = {*gpus} <= {*uuids}
    kinds = {*links(found["topology"], {uuids.index(uuid) for uuid in gpus})} if known else set()
    return found | ({"links": ", ".join(sorted(kinds))} if kinds else {})


_GPU, _LINK = re.compile(r"GPU\d+"), re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS")
"""Words of `nvidia-smi topo -m`; NV12: twelve NVLinks."""
_ESCAPES = re.compile(r"\x1b\[[\d;]*m")


def links(topology: str | None, gpus: Collection[int] | None = None) -> list[str]:
    """Of the matrix of `nvidia-smi topo -m`, from GPU to GPU alone: network cards stand behind them, and below it all
    kinds are explained. `gpus`: only between these; None: all.
    """
    rows = [_ESCAPES.sub("", line).split() for line in (topology or "").splitlines()]
    most = max((sum(bool(_GPU.fullmatch(cell)) for cell in row) for row in rows), default=0)
    of_gpus = {row[0]: row[1 : 1 + most] for row in rows if len(row) > most and _GPU.fullmatch(row[0])}
    chosen = range(most) if gpus is None else sorted(gpus)
    return [
        row[number]
        for gpu, row in of_gpus.items()
        if int(gpu.removeprefix("GPU")) in chosen
        for number in chosen
        if number < most and _LINK.fullmatch(row[number])
    ]


def output_of(command: list[str]) -> str | None:
    """What a command prints; None where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_ANSWERS_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
