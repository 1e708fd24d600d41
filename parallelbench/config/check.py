"""Checks whether a run can be done, before anything starts. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from parallelbench.config import alternatives
from parallelbench.config.build import package_of
from parallelbench.config.run import ENGINES, Preprocess, own_reference
from parallelbench.config.task import RECIPES, SELECTING
from parallelbench.errors import ConfigError, choices, count_of, raised_at

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig


def check_run(run: RunConfig, device_type: str) -> None:
    """Raise `ConfigError` with the fix where `run` can't work on devices of this type."""
    _check_preprocess(run, device_type)
    if not run.epochs:
        return
    _check_samples(run)
    run.model.check(**run.data.model_input)
    _check_recomputation(run)
    _check_metric(run)
    run.strategy.check(run, device_type)
    own_reference(run)
    run.optimizer.check(run, device_type)
    check_batch(run, device_type)
    _check_own_loss(run)
    _check_schedule(run)
    _check_clipping(run)
    _check_gpu_options(run, device_type)
    _check_compiled(run, device_type)
    if run.precision == "tf32" and device_type == "cpu":
        raise ConfigError("precision=tf32 exists on CUDA devices only: choose precision=fp32 or bf16 on a CPU")
    if run.launcher.in_this_process and run.strategy.processes(run, device_type) > 1:
        raise ConfigError(
            f"launcher=inline runs one process, but strategy={run.strategy.name} needs more: choose launcher=local"
        )


def _check_samples(run: RunConfig) -> None:
    """Refuse data of a kind that the model, the loader, or another choice can't take."""
    kind = run.data.kind
    if why := alternatives.why_apart(run.model, run.data):
        pairs = alternatives.that_go_together(run)
        raise ConfigError(f"{why}: {f'choose {pairs}' if pairs else 'bring a model of your own (--plugin)'}")
    needed = "tokens" if run.data.label_shape else kind
    refused = {
        f"loader={run.loader.name}": (needed not in run.loader.feeds, "loader=resident"),
        "data.augment=true": (kind != "images" and run.data.augment, "data.augment=false"),
        "channels_last=true": (kind != "images" and run.channels_last, "channels_last=false"),
    }
    for what, (applies, instead) in refused.items():
        if applies:
            where = "labels at each position" if needed != kind else kind
            raise ConfigError(f"{what} with data={run.data.name} is refused: it holds {where}; choose {instead}")


def _check_gpu_options(run: RunConfig, device_type: str) -> None:
    """Refuse choices that would change nothing here, and steps that can't be captured."""
    asked = {
        "graph=true": run.graph,
        "cudnn_benchmark=true": run.cudnn_benchmark,
        f"nccl.backend={run.nccl.backend}": run.nccl.backend != "default",
        "nccl.per_edge=true": run.nccl.per_edge,
        f"nccl.interface={run.nccl.interface}": run.nccl.interface is not None,
    }
    chosen = [choice for choice, is_chosen in asked.items() if is_chosen]
    in_vain = run.graph and not run.strategy.can_be_captured  # so GPUs would not help
    if chosen and device_type != "cuda" and not in_vain:
        instead = ", or choose device=cuda" if is_taken(run, "cuda") else ""
        raise ConfigError(f"{chosen[0]} means nothing without GPUs: leave it out{instead}")
    if run.nccl.per_edge and not run.strategy.has_stages:
        raise ConfigError(
            f"nccl.per_edge=true means nothing for strategy={run.strategy.name}, which has no stages: leave it out, or "
            "choose strategy=pipeline, dp_pp or dp_pp_tp"
        )
    if run.graph and (reason := _why_not_captured(run)):
        raise ConfigError(f"graph=true is refused: {reason}; choose graph=false")


def _check_preprocess(run: RunConfig, device_type: str) -> None:
    """Refuse preprocessing that can't be done, that would change nothing, and runs that would do nothing."""
    chosen = run.preprocess
    if chosen.engine == "none":
        if run.epochs == 0:
            raise ConfigError("epochs=0 trains nothing: choose preprocess.engine, or epochs of at least 1")
        if chosen != Preprocess():
            raise ConfigError(
                "preprocess has options, but preprocess.engine=none does nothing: choose preprocess.engine="
                f"{alternatives.any_of(ENGINES)}"
            )
        return
    if run.data.kind != "images" or run.data.label_shape:
        raise ConfigError(
            f"preprocess.engine={chosen.engine} with data={run.data.name} is refused: its recipes are for images with "
            "one label each; choose preprocess.engine=none"
        )
    if chosen.recipe is None:
        raise ConfigError(f"preprocess.engine={chosen.engine} needs a recipe: {choices('', RECIPES)}")
    if device_type == "cpu" and chosen.threads > run.cores_per_device:
        raise ConfigError(
            f"preprocess.threads={chosen.threads}, but a device has {count_of(run.cores_per_device, 'core')}: choose "
            f"cores_per_device={chosen.threads}, or fewer threads"
        )
    if run.epochs == 0 and run.devices > 1:
        raise ConfigError(f"epochs=0 preprocesses only, in one process: choose devices=1, not {run.devices}")
    if run.epochs and chosen.recipe not in SELECTING:
        raise ConfigError(
            f"a run can't train on what preprocess.recipe={chosen.recipe} prepares, only on the rows of "
            f"{', '.join(SELECTING)}: choose one of these, or epochs=0"
        )
    if run.epochs and run.loader.writes_files:
        raise ConfigError(
            f"loader={run.loader.name} reads files of its own, not what was prepared: choose loader=resident"
        )


def _why_not_captured(run: RunConfig) -> str:
    """Why a step of this run can't be one CUDA graph; empty: it can."""
    reasons = {
        f"a step of strategy={run.strategy.name} can't be captured, only one of single or ddp": (
            not run.strategy.can_be_captured
        ),
        f"optimizer={run.optimizer.name} can't be captured": not run.optimizer.can_be_captured,
        "precision=fp16 adapts the scale of the loss on the host": run.precision == "fp16",
        "compile=true makes other launches of a step": run.compile,
        f"model={run.model.name} has tensors whose sizes follow from what is computed": run.model.sizes_follow_values,
        "a replayed step has no phases for measure.attribution_steps": run.measure.attribution_steps > 0,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _check_compiled(run: RunConfig, device_type: str) -> None:
    """Refuse to compile steps that torch can't compile whole."""
    if run.compile and run.model.sizes_follow_values:
        advice = "compile=false" if run.compile_scope == "model" else "compile=false compile_scope=model"
        raise ConfigError(
            f"compile=true is refused: model={run.model.name} has tensors whose sizes follow from what is computed, so "
            f"torch would compile for each of them; choose {advice}"
        )
    if run.compile_scope == "model":
        return
    compiled = msgspec.structs.replace(run, compile=True)
    can_compile = is_taken(compiled, device_type) and not run.model.sizes_follow_values
    compiling = "compile=true, or " if can_compile else ""
    reasons = {
        f"torch compiles no step of optimizer={run.optimizer.name}: choose compile_scope=model": (
            not run.optimizer.can_be_compiled
        ),
        f"nothing is compiled under compile=false: choose {compiling}compile_scope=model": not run.compile,
        "under precision=fp16 the host decides whether to update: choose precision=bf16, or compile_scope=model": (
            run.precision == "fp16"
        ),
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), ""):
        raise ConfigError(f"compile_scope={run.compile_scope} is refused: {reason}")


def _check_own_loss(run: RunConfig) -> None:
    """Refuse losses of a model's own where no rank could add them."""
    if run.model.own_loss and not run.strategy.takes_own_loss:
        raise ConfigError(
            f"{run.model.own_loss} with strategy={run.strategy.name} is refused: layers of model={run.model.name} add "
            "to the loss, but no device has all layers, whole samples and their loss; choose "
            f"{run.model.without_own_loss}, or strategy=ddp"
        )


def _check_metric(run: RunConfig) -> None:
    """Refuse a metric that means nothing here, or that has no number of sums."""
    own = f"metric={run.metric.name}: {type(run.metric).__qualname__}.size"
    try:
        size = run.metric_size
    except (Exception, SystemExit) as error:  # a user's metric may raise anything
        raise ConfigError(f"{own} fails: {raised_at(error)}") from None
    if type(size) is not int or size < 0:
        raise ConfigError(f"{own} is {size!r}: return how many sums there are, a whole number")
    run.metric.check(run.logits_per_label, run.loss)


def _check_recomputation(run: RunConfig) -> None:
    """Refuse to compute again in backward where there is nothing to, or something else decides it."""
    chosen = run.activation_recomputation
    if chosen == "none":
        return
    reasons = {
        f"{run.strategy.framework} trains with a backward pass of its own: choose a strategy of torch": (
            run.strategy.framework != "torch"
        ),
        f"model={run.model.name} names no attention: choose activation_recomputation=full": (
            chosen == "selective" and not run.model.attention
        ),
        f"model={run.model.name} has one layer, whose backward pass follows at once: {_deeper(run)}": (
            chosen == "full" and len(run.model.layer_names) == 1
        ),
        "the compiler chooses what it computes again: choose compile=false": run.compile,
        "the state of random numbers that it restores can't be captured: choose graph=false": run.graph,
        run.strategy.why_no_recomputation(run): bool(run.strategy.why_no_recomputation(run)),
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), ""):
        raise ConfigError(f"activation_recomputation={chosen} is refused: {reason}, or activation_recomputation=none")


def _deeper(run: RunConfig) -> str:
    """What to do about a model of one layer; empty: it has several."""
    if len(run.model.layer_names) > 1:
        return ""
    models = alternatives.deeper_models(run, layers=2)
    return f"choose model={models}" if models else "bring a model of several layers (--plugin)"


def _check_schedule(run: RunConfig) -> None:
    """Refuse a rate that changes where updates can't follow it."""
    if not run.lr_schedule.changes:
        return
    run.lr_schedule.check(run)
    _check_factors(run)
    reasons = {
        f"strategy={run.strategy.name} has updates of its own, with one rate; {_other_updates(run)}": (
            not run.strategy.updates_as_asked
        ),
        "with graph=true every step has the rate of the one that was captured; choose graph=false": run.graph,
        "with compile_scope=step each rate would be compiled anew; choose compile_scope=model": run.compiles_step,
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), ""):
        raise ConfigError(f"lr_schedule={run.lr_schedule.name} is refused: {reason}, or lr_schedule=constant")


def _check_factors(run: RunConfig) -> None:
    """Refuse a schedule whose factors are not above 0 and at most 1, as far as three steps tell."""
    schedule, steps = run.lr_schedule, run.epochs * run.steps_per_epoch
    own = f"lr_schedule={schedule.name}: {type(schedule).__qualname__}.factor"
    for step in sorted({1, (steps + 1) // 2, steps}):
        try:
            factor = float(schedule.factor(step, run))
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # a user's schedule may raise anything
            raise ConfigError(f"{own} fails in step {step} of {steps}: {raised_at(error)}") from None
        if not 0 < factor <= 1:
            raise ConfigError(
                f"{own} is {factor:g} in step {step} of {steps}, but must be above 0 and at most 1: return a share of "
                "optimizer.lr, which is the largest rate"
            )


def _check_clipping(run: RunConfig) -> None:
    """Refuse to clip where updates don't."""
    if run.clip_norm is None:
        return
    reasons = {
        f"strategy={run.strategy.name} has updates of its own, which clip nothing; {_other_updates(run)}": (
            not run.strategy.updates_as_asked
        ),
        "graph=true captures no clipping; choose graph=false": run.graph,
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), ""):
        raise ConfigError(f"clip_norm={run.clip_norm:g} is refused: {reason}, or clip_norm=null")


def _other_updates(run: RunConfig) -> str:
    """What to do about a strategy whose updates follow neither schedule nor clipping; empty: they do."""
    if run.strategy.updates_as_asked:
        return ""
    cls = type(run.strategy)
    others = alternatives.strategies_that_update_as_asked(run)
    instead = f"choose strategy={others}" if others else "choose a strategy of torch that takes the rest of this run"
    if package_of(cls) == "parallelbench":
        return instead
    return (
        f"set the ClassVar updates_as_asked of {cls.__qualname__} to True if its replicas update by "
        f"BaseReplica._update; else {instead}"
    )


_MORE_SHARES = 64
"""Batches of so many times the devices, at most, are tried before one is proposed."""


def check_fit(run: RunConfig, device_type: str) -> None:
    """Refuse what the strategy can't do with this model and batch on so many devices."""
    run.strategy.check(run, device_type)
    check_batch(run, device_type)


def is_taken(run: RunConfig, device_type: str) -> bool:
    """Whether the strategy takes the run, so that it can be advised."""
    try:
        run.strategy.check(run, device_type)
    except ConfigError:
        return False
    return True


def check_batch(run: RunConfig, device_type: str) -> None:
    """Refuse batches that the devices can't share, and those of more samples than there are."""
    batch, shards, samples = run.global_batch_size, run.strategy.data_parallel_degree(run), run.data.train_samples

    def taken(size: int) -> bool:
        return is_taken(msgspec.structs.replace(run, batch_size=size), device_type)

    if batch % shards:
        below = batch - batch % shards
        ways = range(below, 0, -shards), range(below + shards, below + _MORE_SHARES * shards, shards)
        near = [next((size for size in way if taken(size)), None) for way in ways]
        advice = " or ".join(str(size) for size in near if size) or f"a larger multiple of {shards}"
        raise ConfigError(
            f"batch_size={run.batch_size} can't be divided among {shards} devices by strategy={run.strategy.name}: "
            f"choose batch_size={advice}"
        )
    if batch > samples:
        raise ConfigError(
            f"batch_size={run.batch_size} makes a global batch of {batch}, but data={run.data.name} has only {samples} "
            "training samples: choose a smaller batch_size"
        )
