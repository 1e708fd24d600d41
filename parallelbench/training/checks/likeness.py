"""Whether a run trains like one device, how closely, what is compared with it, and what was found. Loads no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from parallelbench.config.components import EXACT, TRAITS
from parallelbench.config.run import own_reference
from parallelbench.optim.optimizers import Adagrad, Adam
from parallelbench.strategies.single import Single

if TYPE_CHECKING:
    from parallelbench.config.components import Optimizer, Traits
    from parallelbench.config.run import RunConfig


class Finding(NamedTuple):
    """One thing that was checked, or was not."""

    check: str
    detail: str
    """What was compared, or why nothing was."""
    step: int | None = None
    """Counts from 1 over all epochs; the closing check's follow the last of training."""
    difference: float | None = None
    limit: float | None = None

    def row(self, epoch: int) -> dict[str, Any]:
        """The row after an epoch. What was not compared has not passed, and has not failed."""
        # A NaN compares as False, so it fails.
        passed = None if self.limit is None or self.difference is None else self.difference <= self.limit
        return {"epoch": epoch, **self._asdict(), "passed": passed}


_LEAST_EPS = 1e-6
_SAMPLES = 32
"""Approximate samples per step: enough to distinguish a right strategy from a wrong one."""
PARITY_TEST_SAMPLES = 37
"""Test samples that are evaluated after each step: a prime number, so that every split makes unequal parts."""
WIDEST_TOLERANCE = 0.05
"""Most that a strategy may ask for (`Strategy.parity_tolerance`): what gradients rounded to bf16 need."""
_CLIP_NORM = 1e-4
"""Largest norm that gradients are clipped to: that of an untrained model's is far larger, also of a squared error."""
_EPOCH_STEPS = 2
"""Steps per epoch of the check, so that three steps pass from one epoch to the next."""


def as_checked(run: RunConfig) -> RunConfig:
    """The run to check: fp64, small batches, short epochs, and no batch statistics that depend on the split.

    A schedule's changes are moved into the few steps that are compared; gradients are clipped to less than their norms.
    """
    checked = msgspec.structs.replace(
        run,
        precision="fp64",
        compile=False,
        batch_size=_batch_size(run),
        scaling="strong",
        optimizer=_checked_optimizer(run),
        measure=msgspec.structs.replace(
            run.measure,
            steps_per_epoch=_EPOCH_STEPS,
            parity_steps=max(run.measure.parity_steps, run.strategy.least_parity_steps(run)),
        ),
    )
    if run.clip_norm is not None:
        checked = msgspec.structs.replace(checked, clip_norm=min(run.clip_norm, _CLIP_NORM))
    if run.lr_schedule.changes:
        steps = checked.steps_per_epoch
        epochs = -(-checked.measure.parity_steps // steps)
        schedule = run.lr_schedule.shortened(1 / steps)
        checked = msgspec.structs.replace(checked, epochs=epochs, lr_schedule=schedule)
    if local_statistics(run):
        # Micro-batches pass a layer one after the other, so not even synchronised statistics cover the whole batch.
        norm = "sync" if run.strategy.micro_batches_per_step(run) == 1 else "group"
        checked = msgspec.structs.replace(checked, model=msgspec.structs.replace(run.model, norm=norm))
    return checked


def _checked_optimizer(run: RunConfig) -> Optimizer:
    """The run's optimizer with its rate as used, and a denominator that makes no steps of noise.

    Where a gradient is zero in truth (an attention's key bias), Adagrad with eps=1e-10 makes whole steps of its last
    bits, which no two ways of summing share.
    """
    changes: dict[str, Any] = {"lr": run.optimizer.scaled_lr(run), "lr_rule": "constant"}
    if isinstance(run.optimizer, (Adam, Adagrad)):
        changes["eps"] = max(run.optimizer.eps, _LEAST_EPS)
    return msgspec.structs.replace(run.optimizer, **changes)


def _batch_size(run: RunConfig) -> int:
    """A global batch that every split divides, small so that the check needs little memory and time.

    Where an epoch is one step, the strategy may need the whole training set at once.
    """
    if run.steps_per_epoch == 1:
        return run.global_batch_size
    pieces = run.strategy.data_parallel_degree(run) * run.strategy.micro_batches_per_step(run)
    pieces = math.lcm(pieces, run.devices)
    return min(run.global_batch_size, pieces * -(-_SAMPLES // pieces))


def granted_tolerance(run: RunConfig) -> float:
    """What the strategy asks for, up to the most that one may."""
    return min(run.strategy.parity_tolerance(), WIDEST_TOLERANCE)


def statistics_pieces(run: RunConfig) -> int | None:
    """Equal pieces of a global batch that batch normalisation takes its statistics of; None where pieces overlap."""
    norm, micro_batches = getattr(run.model, "norm", None), run.strategy.micro_batches_per_step(run)
    if norm == "batch":
        return run.strategy.data_parallel_degree(run) * micro_batches
    return None if norm == "sync" and micro_batches > 1 else 1


def cut_statistics(run: RunConfig, traits: Traits) -> bool:
    """Whether a model of one's own mixes the samples of each of several pieces of a global batch: see `pieces_of`."""
    pieces = run.strategy.data_parallel_degree(run) * run.strategy.micro_batches_per_step(run)
    return traits.mixes_samples and pieces > 1 and not _says_its_norm(run)


def _says_its_norm(run: RunConfig) -> bool:
    return getattr(run.model, "norm", None) in ("batch", "sync")


def pieces_of(run: RunConfig, traits: Traits) -> int | None:
    """Slices of a global batch that plain code computes one after the other.

    Where batch statistics are local, each slice has its own, as in training; None where they can't be had so.
    Elsewhere slices only save memory.
    """
    if _says_its_norm(run):
        return statistics_pieces(run)
    if traits.mixes_samples:
        return run.strategy.data_parallel_degree(run) * run.strategy.micro_batches_per_step(run)
    return math.gcd(run.global_batch_size, run.devices)


def why_in_evaluation(run: RunConfig, traits: Traits) -> str:
    """Why a model can be compared in evaluation mode only; empty: it is compared as it trains."""
    if traits.draws:
        return f"model={run.model.name} draws random numbers in training"
    if cut_statistics(run, traits):
        piece = "data shard" if run.strategy.micro_batches_per_step(run) == 1 else "micro-batch"
        return f"model={run.model.name} mixes the samples of each {piece}, so training differs from one device"
    return ""


def uncompared(run: RunConfig, traits: Traits) -> tuple[str, ...]:
    """Buffers that no split can leave as one device does: they count micro-batches."""
    return traits.counters if run.strategy.micro_batches_per_step(run) > 1 else ()


def local_statistics(run: RunConfig) -> bool:
    """Whether batch normalisation sees only a part of each global batch, so that no split can equal one device."""
    return statistics_pieces(run) != 1


def as_reference(run: RunConfig) -> RunConfig:
    """The same training on one device: by the strategy's own reference where it has one."""
    return msgspec.structs.replace(
        run,
        strategy=own_reference(run) or Single(name="single"),
        optimizer=msgspec.structs.replace(run.optimizer, lr=run.optimizer.scaled_lr(run), lr_rule="constant"),
        batch_size=run.global_batch_size,
        scaling="strong",
        devices=1,
        nodes=1,
        graph=False,
        activation_recomputation="none",
    )


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
