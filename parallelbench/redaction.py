"""What looks like a token is written nowhere: one table of shapes, and one function that every writer of text calls.

Of environment variables only those are recorded whose names are known to hold no secret.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class TokenShape(NamedTuple):
    """How one kind of token looks."""

    marks: tuple[str, ...]
    """Any of them is in every such token: a search for them is much faster than the pattern's."""
    kind: str
    pattern: str
    """Its group `secret`, or all of it without one, is the token."""

    def removed(self, found: re.Match[str]) -> str:
        """What is written instead of what was found: without quotes, brackets and spaces, for it may stand in code."""
        whole, secret = found.group(), found.groupdict().get("secret")
        return f"redacted-{self.kind}" if secret is None else whole.replace(secret, f"redacted-{self.kind}")


_WITH_DIGIT = r"(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{20,}"
"""Names of files and functions may be as long, and of the same characters, but hardly have such a start and digits."""
_PLAIN = "[A-Za-z0-9]{20,}"


def _prefixed(kind: str, *starts: str, then: str = _WITH_DIGIT) -> TokenShape:
    """Tokens that begin with one of these, and go on as `then`."""
    return TokenShape(starts, kind, rf"(?<![A-Za-z0-9])(?:{'|'.join(map(re.escape, starts))}){then}")


_BODY = r"[A-Za-z0-9+/=\s\\:,.-]"
_NAMES = (
    *("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "APIKEY", "ACCESS_KEY", "SECRET_KEY", "PRIVATE_KEY", "_JWT"),
    *("access_token", "auth_token", "api_key", "password", "passwd", "secret_key", "AccountKey", "SharedAccessKey"),
    "X-Amz-Security-Token",
)
_BEFORE_A_NAME = r"(?:(?<![A-Za-z0-9_])|u0026|%(?:25)*26|%(?:25)*3[Ff])"
"""In a URL, also within another one, and within JSON."""
_SHAPES = (
    TokenShape(
        ("PRIVATE KEY",),
        "private-key",
        r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----"
        rf"(?:{_BODY}*?-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|{_BODY}*)",
    ),
    TokenShape(("eyJ",), "JWT", r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
    _prefixed("Hugging-Face-token", "hf_", "api_org_", then=_PLAIN),
    _prefixed("GitHub-token", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", then=_PLAIN),
    _prefixed("GitHub-token", "github_pat_"),
    _prefixed("GitLab-token", "glpat-", "glrt-", "gldt-", "glptt-", "glcbt-", "glsoat-"),
    _prefixed("AWS-key", "AKIA", "ASIA", then=r"[A-Z0-9]{16}(?![A-Za-z0-9])"),
    _prefixed("API-key", "sk-", "gsk_", "xai-", "pplx-", "nvapi-", then=r"[A-Za-z0-9]{20,}[A-Za-z0-9_-]*"),
    _prefixed("API-key", "sk-proj-", "sk-ant-", "sk-svcacct-", "sk-admin-", "sk-or-v1-", "nvapi-", "wandb_v1_"),
    _prefixed("Stripe-key", "sk_live_", "rk_live_", "sk_test_", "rk_test_", "whsec_", then=_PLAIN),
    _prefixed("Slack-token", "xoxb-", "xoxp-", "xoxa-", "xoxr-", "xoxs-", "xoxe-", "xapp-", then="[A-Za-z0-9-]{10,}"),
    _prefixed("webhook", "hooks.slack.com/services/", "discord.com/api/webhooks/", then="[A-Za-z0-9/_-]{20,}"),
    _prefixed("Google-key", "AIza", then=r"[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])"),
    _prefixed("Google-token", "ya29.", "GOCSPX-"),
    _prefixed("package-token", "npm_", "rubygems_", then=_PLAIN),
    _prefixed("package-token", "pypi-AgE", "dckr_pat_", "figd_"),
    _prefixed("cloud-token", "dop_v1_", "doo_v1_", "hvs.", "hvb.", "tskey-", "shpat_", "lin_api_", "glsa_", "ATATT"),
    _prefixed("Databricks-token", "dapi", then=r"[0-9a-f]{32}(?![A-Za-z0-9])"),
    _prefixed("Replicate-token", "r8_", then="[A-Za-z0-9]{37}"),
    _prefixed("SendGrid-key", "SG.", then=r"[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"),
    _prefixed("age-key", "AGE-SECRET-KEY-1", then="[A-Z0-9]{40,}"),
    _prefixed("munge-credential", "MUNGE:", then="[A-Za-z0-9+/=]{20,}:?"),
    TokenShape((".atlasv1.",), "Terraform-token", r"(?<![A-Za-z0-9])[A-Za-z0-9]{10,}\.atlasv1\.[A-Za-z0-9_-]{20,}"),
    TokenShape(("://",), "password", r"""://[^\s/:"'\\]*:(?P<secret>(?!redacted-)[^\s/"'\\]+)@"""),
    TokenShape(
        ("sig=", "sig%", "SIG=", "SIG%", "Sig=", "ignature=", "ignature%"),  # of Azure; of Amazon, Google and others
        "signature",
        rf"(?:{_BEFORE_A_NAME}(?<![A-Za-z]-)(?:[A-Za-z]{{1,20}}-){{0,4}}(?:sig|SIG|Sig|[Ss]ignature)(?:=|%(?:25)*3D)"
        r"(?=[A-Za-z_.~-]*[0-9%+/])|[?&](?:[A-Za-z_]{1,20}[_-])?(?:sig|SIG|Sig|[Ss]ignature)=)"
        r"(?P<secret>(?!redacted-)[A-Za-z0-9%+/=_.~-]{16,})",
    ),
    TokenShape(
        ("token=", "token%3D", "key=", "key%3D"),
        "URL-token",
        rf"(?:[?&]|u0026|%26|%3[Ff])(?:token|key)(?:=|%3D)(?P<secret>(?!redacted-){_WITH_DIGIT})",
    ),
    TokenShape(
        ("Bearer ", "bearer ", "Basic "),
        "authorization",
        r"(?:[Bb]earer|Authorization: Basic) (?P<secret>(?!redacted-)[A-Za-z0-9._~+/=-]{16,})",
    ),
    TokenShape(
        (*_NAMES, "TF_VAR_"),
        "value",
        rf"""(?:{"|".join(_NAMES)}|TF_VAR_\w+)\\?["']?\s?[=:]\s?\\?["']?(?P<secret>(?!redacted-)[^\s"'\\,;&<>]{{6,}})""",
    ),
)
_BY_MARK = tuple((mark, shape) for shape in _SHAPES for mark in shape.marks)
MARKS = tuple(dict.fromkeys(mark for mark, _ in _BY_MARK))
"""Texts without any of these hold nothing that looks like a token."""


def redacted(text: str) -> str:
    """The same text with `redacted-<kind>` for all that looks like a token."""
    for mark, shape in _BY_MARK:
        if mark in text:
            text = re.sub(shape.pattern, shape.removed, text)
    return text


def kind_of_token(text: str) -> str:
    """What kind of token a text seems to hold; empty: none."""
    return next((shape.kind for mark, shape in _BY_MARK if mark in text and re.search(shape.pattern, text)), "")


_LIBRARIES = (
    *("NCCL", "GLOO", "OMP", "MKL", "CUDA", "TORCH", "MALLOC", "PYTORCH", "ATEN", "ONEDNN", "DNNL", "KMP", "GOMP"),
    *("CUBLAS", "CUBLASLT", "CUDNN", "TORCHINDUCTOR", "TORCHDYNAMO", "OPENBLAS", "BLIS", "TCMALLOC"),
    *("FI", "UCX", "RCCL", "HSA", "NVSHMEM", "MPICH"),
)
"""Libraries that own their prefix, and read no secret by such a name."""
_OF_SHARED_PREFIX = (
    # TF_ is Terraform's, too, whose variables (TF_VAR_*, TF_TOKEN_*) are secrets.
    r"TF_(ENABLE|DISABLE|FORCE|XLA|CPP|GPU|NUM|CUDNN|CUBLAS|DETERMINISTIC|USE|PS|ONEDNN|MKL|AUTOTUNE|LAYOUT|THREAD|OP"
    r"|INTRA|INTER|GRAPPLER|JIT|BATCHNORM|CUDA|ALLOW|SYNC|DATA|CONV)(_\w+)?",
    r"TF_(CONFIG|OVERRIDE_GLOBAL_THREADPOOL|FUNCTION_JIT_COMPILE_DEFAULT|EXTRA_PTXAS_FLAGS|EXTRA_PTX_OPTIONS)",
    r"XLA_(FLAGS|(PYTHON|IR|HLO|USE|GPU|CPU|SAVE|DISABLE|ENABLE|PARAMETER|TARGET|CLIENT)_\w+)",
    # TRITON_ is an inference server's, too.
    r"TRITON_(ALLOW|ALWAYS|CACHE|CUDACRT|CUDART|CUPTI|DEBUG|DEFAULT|DISABLE|DUMP|ENABLE|F32|FORCE|FRONT|HOME|INTERPRET"
    r"|KERNEL|LIBCUDA|LIBDEVICE|MOCK|OVERRIDE|PRINT|PTXAS|STORE|SWAP)(_\w+)?",
    # Slurm's own token is SLURM_JWT; SLURM_EXPORT_ENV and SLURM_SPANK_* hold what the user put there.
    r"SLURM_(ARRAY|JOB|STEP|CPUS?|MEM|NTASKS|TASKS|GPUS?|THREADS|TOPOLOGY|DIST|SRUN_COMM|LAUNCH_NODE|TASK)(_\w+)?",
    r"SLURM_(NNODES|NODELIST|NODEID|NODE_ALIASES|NPROCS|PROCID|LOCALID|GTIDS|CLUSTER_NAME|CONF|DISTRIBUTION|HINT|PRIO_"
    r"PROCESS|RESTART_COUNT|OVERCOMMIT|SUBMIT_(DIR|HOST)|SHARDS_ON_NODE|PROFILE|UMASK)",
    r"RANK|LOCAL_RANK|WORLD_SIZE|GLIBC_TUNABLES|LD_PRELOAD|NVIDIA_TF32_OVERRIDE|PYTHON(MALLOC|DEVMODE|TRACEMALLOC)",
)
_RECORDED = re.compile(rf"(?:{'|'.join(_LIBRARIES)})_\w+|{'|'.join(_OF_SHARED_PREFIX)}")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|AUTH|CREDENTIAL|JWT|COMMENT|_PAT$", re.IGNORECASE)


def is_recorded(name: str) -> bool:
    """Whether an environment variable of this name may be recorded."""
    return _RECORDED.fullmatch(name) is not None


def recorded_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that may change a number, without those whose name or value hints at a secret.

    They are recorded by their name, or by a prefix whose every name is known to be harmless.
    """
    return {
        name: "redacted" if _SECRET.search(name) else redacted(value)
        for name, value in sorted(variables.items())
        if is_recorded(name)
    }
