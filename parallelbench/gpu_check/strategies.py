"""Runs as attempts of the suite's own worker: every strategy on several devices, and models on one.

Each run is held against one device before, during and after its training, as any run is, and its steps must never wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from parallelbench.config.run import Nccl
from parallelbench.config.sites import names_of
from parallelbench.gpu_check.attempts import Answer, answer_of
from parallelbench.gpu_check.results import FailedError
from parallelbench.gpu_check.variants import PLAIN, as_attempt, run_of, waits_by_design
from parallelbench.gpu_check.variants import runs as runs_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from parallelbench.config.run import RunConfig
    from parallelbench.gpu_check.attempts import Workers


WAYS = {
    "nccl.backend=lazy": Nccl(backend="lazy"),
    "nccl.backend=legacy": Nccl(backend="legacy"),
    "nccl.per_edge=true": Nccl(per_edge=True),
}
"""Ways of exchanging messages besides the default."""


def names() -> list[str]:
    """All of torch's strategies for several devices."""
    several = (name for name in names_of("strategy") if name != "single")
    return [name for name in several if run_of(strategy=name).strategy.framework == "torch"]


def strategy(name: str, workers: Workers, labels: Collection[str] = ()) -> str:
    """Check one strategy on as many devices as it can use; `labels`: of its runs, none: all."""
    runs = runs_of(name, workers.device_type, workers.devices, workers.node_count)
    return checked({label: run for label, run in runs.items() if label in labels or not labels}, workers)


def exchanged(how: str, workers: Workers) -> str:
    """Check a pipeline whose GPUs exchange messages in one of the ways of `WAYS`."""
    plain = runs_of("pipeline", workers.device_type, workers.devices, workers.node_count)[PLAIN]
    return checked({how: msgspec.structs.replace(plain, nccl=WAYS[how])}, workers)


def alone(run: RunConfig, workers: Workers) -> str:
    """Check a run on one device."""
    return checked({PLAIN: as_attempt(run, workers.device_type)}, workers)


def checked(runs: Mapping[str, RunConfig], workers: Workers) -> str:
    """Carry runs out, each as an attempt, and judge them; raises `FailedError` with all that is wrong."""
    answers = {label: answer_of(run, workers.carry_out(run)) for label, run in runs.items()}
    return judged(runs, workers.device_type, answers)


def judged(runs: Mapping[str, RunConfig], device_type: str, answers: Mapping[str, Answer]) -> str:
    """The verdict on the answers."""
    first = next(iter(runs.values()))
    where = f"{first.devices} devices, {first.model.name}" + (f", {first.nodes} nodes" if first.nodes > 1 else "")
    if wrong := [f"{label}: {answer.problem}" for label, answer in answers.items() if answer.problem]:
        raise FailedError(f"{where}, {'; '.join(wrong)}")
    return f"{where}, {'; '.join(_texts(runs, device_type, answers))}"


def _texts(runs: Mapping[str, RunConfig], device_type: str, answers: Mapping[str, Answer]) -> Iterator[str]:
    compared = [answer.difference for answer in answers.values() if answer.difference is not None]
    if compared:
        yield f"largest difference from one device {max(compared):.3g}"
    if alike := [label for label, answer in answers.items() if not answer.steps_not_compared]:
        yield f"trained like plain code: {', '.join(alike)}"
    for reason in dict.fromkeys(answer.steps_not_compared for answer in answers.values() if answer.steps_not_compared):
        apart = (label for label, answer in answers.items() if answer.steps_not_compared == reason)
        yield f"steps not compared: {', '.join(apart)} ({reason})"
    if device_type != "cuda":
        return
    reasons = {waits_by_design(run) for run in runs.values()}
    if reasons != {""}:
        yield f"waits by design, so none was looked for: {', '.join(filter(None, sorted(reasons)))}"
    else:
        yield "no step waited"
