"""Which entries of a run's environment must match for its times to be compared; `analysis.comparison.pairing` blocks a
comparison by them. Never imports torch.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from parallelbench.redaction import is_recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


VERSION = "entries_version"
"""The entry that says which list of entries an environment was recorded by."""
ENTRIES_VERSION = 5
"""Version of that list."""
PACKED = "packed"
"""Whether a warm process was forked. It is the run's own column, which comparisons put beside its environment."""
UNLIKE_NODES = "unlike_nodes"
"""The entry that says in which of these a run's nodes differ, and which node has which; none where they don't."""
LINKS = "cuda.links"
"""The entry of the kinds of links between the GPUs that a run has on a node; none with fewer than two."""
FRAMEWORK = "framework"
"""The entry that says what a run trained with; torch where older releases recorded none."""
OF_FRAMEWORK = (
    *("packages.torch", "packages.torchvision", "packages.tensorflow", "packages.numpy", "cpu_capability"),
    *("cuda.version", "cuda.cudnn", "cuda.nccl"),
    *("float32_matmul_precision", "cudnn_allow_tf32", "cudnn_benchmark"),
)
"""Entries that must match between runs of one framework. Runs of two are compared in spite of them: each framework has
an environment of its own, which is what is compared."""
_SET_UP = ("loaded_modules", "site.modules", "site.setup_sha256")
MUST_MATCH = (
    *(PACKED, "platform", "python", *OF_FRAMEWORK, *_SET_UP, UNLIKE_NODES),
    *("cpu", "logical_cores", "threads", "cpu_governor", "cpu_boost", "cpu_quota_cores"),
    *("nice", "scheduling_policy", "transparent_hugepages"),
    *("cuda.driver", "cuda.power_limit_w", LINKS),
)
WHERE_BOTH = (*_SET_UP, "library_path_sha256", LINKS)
"""Entries that are compared where both environments have them. Older releases recorded none; only a job of Slurm's has
its site's, and only several GPUs have links.
"""
_VARIABLES = (
    *("FI_", "UCX_", "RCCL_", "HSA_", "NVSHMEM_", "MPICH_"),  # interconnects
    *("NCCL_", "GLOO_", "OMP_", "MKL_", "MALLOC_", "TORCH_", "PYTORCH_", "TF_", "XLA_"),
    *("OPENBLAS_", "BLIS_", "TCMALLOC_"),
    *("ATEN_", "ONEDNN_", "DNNL_", "KMP_", "GOMP_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "TORCHINDUCTOR_"),
    *("TORCHDYNAMO_", "TRITON_", "GLIBC_TUNABLES", "LD_PRELOAD", "NVIDIA_TF32_OVERRIDE"),
    *("PYTHONMALLOC", "PYTHONDEVMODE", "PYTHONTRACEMALLOC"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "CUDA_FORCE_PTX_JIT"),
    *("CUDA_AUTO_BOOST", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_SCALE_LAUNCH_QUEUES"),
)
"""Prefixes of environment variables that must match, too. Of CUDA's variables most say where something is, or which
GPUs a job has."""
_ELSEWHERE = re.compile(r"_(DIR|PATH|HOME|ROOT|ID|HOST|PORT|ADDR|(DUMP|DEBUG|LOG|TEMP)_FILE)$")
"""The ends of names of variables that hold a place: it differs between users and jobs, not between speeds. Files that
are read, such as NCCL's topology and graph, choose algorithms."""
PLUGIN = "plugin"
"""The entry of a user's own package, in runs whose classes come from one."""
_PLUGIN_SOURCES = f"{PLUGIN}.sources"
_SUITE = "packages.parallelbench"
OF_PROGRAM = ("git.commit", "git.dirty", _SUITE, _PLUGIN_SOURCES)
"""Entries that say which version of the suite and of a plugin ran. One run has one version: it may not go on under
another."""
REPORTED = (*OF_PROGRAM, "host", "allocation", "library_path_sha256")
"""Entries that may differ between compared runs. Comparisons report them."""
SET_BY_LAUNCHER = {
    "threads": ("devices", "nodes"),
    "variables.GLOO_SOCKET_IFNAME": ("nodes",),
    "variables.NCCL_SOCKET_IFNAME": ("nodes", "nccl.interface"),
    "variables.TORCH_DIST_USE_NCCL2": ("nccl.backend",),
    "variables.TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P": ("nccl.per_edge",),
    LINKS: ("devices", "nodes"),
    "cudnn_benchmark": ("cudnn_benchmark",),
    "variables.TORCHINDUCTOR_FORCE_DISABLE_CACHES": ("compile",),
    "variables.CUBLAS_WORKSPACE_CONFIG": ("measure.deterministic",),
    "variables.TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY": ("strategy.name",),
    "variables.TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE": ("strategy.name",),
}
"""Entries that the launcher sets, or that follow from which GPUs a run has → the keys of the run that decide them. They
must match between runs that have these keys in common; between others a difference is reported.
"""
THREADS = "threads"
"""Of these, what follows from devices and nodes only for GPUs, among which the cores are shared out: those of one."""
_NO_EFFECT = (
    "variables.OMP_NUM_THREADS",  # set by the suite for each process; `threads` are those of a device
    "variables.TORCH_NCCL_ASYNC_ERROR_HANDLING",  # set by torchrun, not for a single process: what follows an error
    "variables.TF_CONFIG",  # TensorFlow's addresses, with ports drawn anew for each run
    "variables.TF_CPP_MIN_LOG_LEVEL",  # how much TensorFlow logs
    "variables.KMP_DUPLICATE_LIB_OK",  # set by scikit-learn, which Keras loads: whether two OpenMPs are an error
    "variables.KMP_INIT_AT_FORK",  # likewise: what a fork copies
)
"""Variables with one of the prefixes that change no speed."""
VOLATILE = ("load_average_1min", "cores_of_rank_0")
"""Entries that differ from run to run. They are not reported."""
_OF_EACH_GPU = ("cuda.driver", "cuda.power_limit_w")
"""Entries with a line per visible GPU."""


def must_match(key: str) -> bool:
    """Whether an entry must be equal in two environments for their times to be compared."""
    root, _, name = key.partition(".")
    is_variable = root == "variables" and name.startswith(_VARIABLES) and is_recorded(name)
    changes_speed = is_variable and key not in _NO_EFFECT and not _ELSEWHERE.search(name)
    return key in MUST_MATCH or changes_speed


def is_reported(key: str) -> bool:
    """Whether an entry may differ, and is reported if it does."""
    return key in REPORTED


def is_of_program(key: str) -> bool:
    """Whether an entry says which version of the suite, or of a plugin, ran."""
    return key in OF_PROGRAM


def is_volatile(key: str) -> bool:
    """Whether a difference in an entry says nothing about the compared runs."""
    noted = key.startswith("program.") and key != "program.executable"  # how a program's steps were counted
    return noted or key in (*VOLATILE, VERSION) or (key.startswith("variables.") and not must_match(key))


def unrecorded(environment: Mapping[str, Any]) -> tuple[str, ...]:
    """What may lack of what must match: that two environments lack it does not make them equal."""
    return () if environment.get(VERSION) == ENTRIES_VERSION else ("all that is recorded of an environment today",)


def is_set_by_launcher(key: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the launcher explains a difference in an entry: it sets the entry by keys in which two runs differ.

    `one` and `other` are the runs' definitions: dotted key → value.
    """
    if key == THREADS and one.get("device_type") == other.get("device_type") == "cpu":
        return False  # there a device has its own cores, however many devices there are
    return any(one.get(cause) != other.get(cause) for cause in SET_BY_LAUNCHER.get(key, ()))


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], relevant: Callable[[str], bool] = must_match
) -> dict[str, tuple[Any, Any]]:
    """The relevant `entries` that differ between two environments: dotted key → both values, None for a missing one.

    Of entries that neither has, `unrecorded` says whether they could have been recorded.
    """
    frameworks = {environment.get(FRAMEWORK, "torch") for environment in (one, other)}
    apart = {VERSION, FRAMEWORK, *(OF_FRAMEWORK if len(frameworks) > 1 else ())}
    apart |= {key for key in WHERE_BOTH if key not in one or key not in other}
    if not (one.get(_PLUGIN_SOURCES) and other.get(_PLUGIN_SOURCES)):
        apart.add(_PLUGIN_SOURCES)  # a run of the suite's own classes, or one that an older release measured
    if len(frameworks) > 1 and not (one.get(_SUITE) and other.get(_SUITE)):
        apart.add(_SUITE)  # in another framework's environment the suite is imported, but not installed
    if len(frameworks) > 1:
        # On processors torch tells of a driver only where it could use it; on GPUs each framework does.
        apart |= {key for key in _OF_EACH_GPU if one.get(key) is None or other.get(key) is None}
    keys = sorted(key for key in one.keys() | other.keys() if relevant(key) and key not in apart)
    return {key: (one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)}


def entries(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key → value. A value that all visible GPUs share counts once, for any number of GPUs."""
    flat = flatten(environment)
    for key in _OF_EACH_GPU:
        if isinstance(flat.get(key), str):
            flat[key] = ", ".join(sorted(set(flat[key].split("\n"))))
    return flat


def flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} → {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
