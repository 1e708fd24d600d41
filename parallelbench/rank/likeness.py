"""Whether a run trains like one device, how closely, and what a reader must know where it doesn't. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.rank.checked_run import (
    WIDEST_TOLERANCE,
    as_checked,
    granted_tolerance,
    local_statistics,
    uncompared,
    why_in_evaluation,
)
from parallelbench.spec.config import EXACT, own_reference
from parallelbench.spec.traits import TRAITS
from parallelbench.strategies.single import Single

if TYPE_CHECKING:
    from parallelbench.spec.config import RunConfig
    from parallelbench.spec.traits import Traits

UNIT_ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Largest relative error of rounding to the format that products are computed in (IEEE 754; 8 bits in bf16)."""


def statistics_warnings(run: RunConfig) -> list[str]:
    """Why a run does not train like one device, although its strategy could."""
    if not local_statistics(run):
        return []
    piece = "data shard" if run.strategy.micro_batches_per_step(run) == 1 else "micro-batch"
    norm, like_one_device = run.model.norm, as_checked(run).model.norm  # type: ignore[attr-defined]
    text = f"model.norm={norm} normalises each {piece} by its own statistics, so training differs from one device"
    if not checks_parity(run):
        return [text]
    return [f"{text}; parity was checked with model.norm={like_one_device}: choose that to train like one device"]


def tolerance_warnings(run: RunConfig) -> list[str]:
    """What a strategy asks of the checks, where that is more than an exact one needs."""
    asked = run.strategy.parity_tolerance()
    if asked <= EXACT or not checks_parity(run):
        return []
    granted = "" if asked <= WIDEST_TOLERANCE else f", of which {WIDEST_TOLERANCE:g} was granted"
    return [f"parity was checked with the tolerance {asked:g} that the strategy asks for, not {EXACT:g}{granted}"]


def traits_warnings(run: RunConfig, traits: Traits) -> list[str]:
    """What a reader must know of a model of one's own."""
    texts = []
    if why := why_in_evaluation(run, traits):
        checked = "parity was not checked, as it does so in evaluation, too"
        if not traits.draws_in_evaluation:
            checked = f"{'parity' if checks_parity(run) else 'the closing check'} compared it in evaluation mode"
        texts.append(f"{why}; {checked}")
    if left_out := uncompared(run, traits):
        texts.append(f"{', '.join(left_out)} count micro-batches, so they were not compared with one device's")
    if held := (*traits.complex_parameters, *traits.complex_buffers):
        kind = "complex128" if run.precision == "fp64" else "complex64"
        texts.append(f"{', '.join(held)} of model={run.model.name} are complex: they are {kind} in training")
    return texts


def rounding(run: RunConfig, traits: Traits = TRAITS) -> float | None:
    """Relative rounding of the coarsest format that a run's gradients pass through.

    None where the run does not train like one device: by its strategy, by batch statistics of its own, or because its
    ranks draw random numbers of their own.
    """
    if not run.strategy.equals_one_device(run) or local_statistics(run):
        return None
    if why_in_evaluation(run, traits) and not isinstance(run.strategy, Single):
        return None
    granted = granted_tolerance(run)
    return max(UNIT_ROUNDOFF[run.precision], granted if granted > EXACT else 0.0)


def checks_parity(run: RunConfig) -> bool:
    """Whether to check parity; one device compared with itself would always pass."""
    has_reference = run.strategy.equals_one_device(run) or own_reference(run) is not None
    return run.measure.parity and has_reference and not isinstance(run.strategy, Single)


def checks_arithmetic(run: RunConfig, device_type: str) -> bool:
    """Whether to hold all threads against one: a GPU has no threads of the host, and one thread is like itself."""
    torch_trains = run.strategy.framework == "torch"
    return run.measure.parity and torch_trains and device_type == "cpu" and run.cores_per_device > 1


def parity_reference(run: RunConfig) -> str | None:
    """The class of the author's own reference that parity is checked against; None: one device, or not checked."""
    reference = own_reference(run) if checks_parity(run) else None
    return None if reference is None else f"{type(reference).__module__}.{type(reference).__qualname__}"


def reference_warnings(run: RunConfig) -> list[str]:
    """What a run was held against, where that is not one device."""
    name = parity_reference(run)
    if name is None:
        return []
    return [f"parity was checked against the strategy's own reference, {name}, which its author gives: not one device"]
