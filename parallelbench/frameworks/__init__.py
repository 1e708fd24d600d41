"""The frameworks that runs train with. Importing this loads none of them. See docs/adding-a-framework.md."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple


class Framework(NamedTuple):
    """Where a framework's parts are."""

    session: str
    """Dotted name of its `RankSession`."""
    entries: str
    """Dotted name of the function that gives its part of a run's environment."""


FRAMEWORKS = {
    "torch": Framework(
        "parallelbench.training.torch_session.Session", "parallelbench.measure.torch_environment.entries"
    ),
    "tensorflow": Framework(
        "parallelbench.frameworks.tensorflow.tf_session.TensorFlowSession",
        "parallelbench.frameworks.tensorflow.tf_environment.entries",
    ),
}
"""Name, as in `Strategy.framework` → its parts."""

CONTROL_FD = "PARALLELBENCH_CONTROL_FD"
"""Environment variable of rank 0: the descriptor of the socket on which it waits for the other ranks."""
CONTROL_ADDRESS = "PARALLELBENCH_CONTROL_ADDRESS"
"""Environment variable of the other ranks: host:port of that socket."""
CONTROL_SECRET = "PARALLELBENCH_CONTROL_SECRET"
"""Environment variable of all ranks: by what they know each other when they meet there."""
RENDEZVOUS = "PARALLELBENCH_RENDEZVOUS"
"""Environment variable of the ranks' starter, with several nodes: its node's number, the first one's host:port, and the
secret."""


def session_class(framework: str) -> Any:
    """The class of a rank's session; loads the framework."""
    return _named(FRAMEWORKS[framework].session)


def entries_of(framework: str) -> dict[str, Any]:
    """The framework's part of the environment of the calling process; `packages` has its packages' versions."""
    entries: dict[str, Any] = _named(FRAMEWORKS[framework].entries)()
    return entries


def _named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
