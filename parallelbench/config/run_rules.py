"""Checks whether a run can be done, before anything starts. Loads no torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from parallelbench.config.build import package_of
from parallelbench.config.fixes import accepted, fixes, in_words
from parallelbench.config.rule import Refusal, RefusedError, enforce
from parallelbench.config.run import Preprocess
from parallelbench.config.task import RECIPES, SELECTING
from parallelbench.errors import ConfigError, count_of, raised_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from parallelbench.config.rule import Rules
    from parallelbench.config.run import RunConfig


def check_run(run: RunConfig, device_type: str) -> None:
    """Raise `ConfigError` with all that refuses `run` on devices of this type, and what to choose instead."""
    if refused := tuple(refusals(run, device_type)):
        raise UnfitError(refused, run, device_type)


class UnfitError(RefusedError):
    """A run that can't be done. What to choose instead is searched for when somebody is told."""

    def __init__(self, refused: tuple[Refusal, ...], run: RunConfig, device_type: str) -> None:
        super().__init__(refused)
        self._run, self._device_type = run, device_type

    def fixes(self) -> list[list[str]]:
        """What to choose for each refusal, as overrides; see `parallelbench.config.fixes`."""
        return fixes(self._run, self._device_type, self.refusals)

    def __str__(self) -> str:
        """A line for each refusal: the value, what must hold, and what to choose."""
        return self.told_with(())

    def told_with(self, others: Sequence[ConfigError]) -> str:
        """The same of several runs: only what all of them accept is said to choose."""
        runs = [(other._run, other._device_type) for other in others if isinstance(other, UnfitError)]
        chosen = self.fixes()
        together = [[fix] for fix in chosen[0]] if len(chosen) == 1 else [[fix for each in chosen for fix in each]]
        good = [fix for each in together if all(accepted(*at, " ".join(each)) for at in runs) for fix in each]
        lines = []
        for refusal, found in zip(self.refusals, chosen, strict=True):
            said = [fix for fix in found if fix in good]
            lines.append(f"{refusal.reason}: choose {in_words(said)}" if said else refusal.reason)
        return "\n".join(lines)


def refusals(run: RunConfig, device_type: str) -> Iterator[Refusal]:
    """All that refuses a run, but for what would follow from it."""
    for checks in _stages(run, device_type):
        refused = [refusal for check in checks for refusal in _refusals_of(check)]
        yield from refused
        if refused:
            return


def _refusals_of(check: Callable[[], object]) -> tuple[Refusal, ...]:
    try:
        check()
    except RefusedError as error:
        return error.refusals
    except ConfigError as error:  # which names its fix itself, as components of plugins do
        return (Refusal(str(error)),)
    return ()


def _stages(run: RunConfig, device_type: str) -> Iterator[list[Callable[[], object]]]:
    """The checks; each stage counts on what the ones before demand."""
    if run.strategy.starts_ranks:  # nothing is known of what they train
        yield [partial(enforce, _samples_of_power(run)), partial(run.strategy.check, run, device_type)]
        return
    yield [partial(enforce, _preprocessing(run, device_type)), partial(enforce, _samples_of_power(run))]
    if not run.epochs:
        return
    yield [partial(enforce, _samples(run))]
    yield [partial(run.model.check, **run.data.model_input)]
    yield [
        partial(enforce, _recomputation(run)),
        partial(_check_metric, run),
        partial(run.strategy.check, run, device_type),
        partial(run.optimizer.check, run, device_type),
        partial(enforce, _batch(run)),
        partial(enforce, _updates(run)),
        partial(enforce, _gpu_options(run, device_type)),
        partial(enforce, _compiled(run)),
        partial(enforce, _surroundings(run, device_type)),
    ]
    yield [partial(enforce, _normalised(run))]
    if run.lr_schedule.changes:
        yield [partial(run.lr_schedule.check, run)]
        yield [partial(_check_factors, run)]


def _samples_of_power(run: RunConfig) -> Rules:
    """A counter of a processor's energy begins anew after minutes: samples must not lie further apart."""
    hz = run.measure.telemetry_hz
    yield (
        0 < hz < 0.1,
        f"measure.telemetry_hz={hz:g} is less than one sample in ten seconds",
        ("measure.telemetry_hz=0.1", "measure.telemetry_hz=0"),
    )


def _samples(run: RunConfig) -> Rules:
    """Data of a kind that the model, the loader, or another choice can't take."""
    model, data, kind = run.model, run.data, run.data.kind
    yield (
        kind not in model.takes,
        f"model={model.name} takes {' and '.join(model.takes)}, but data={data.name} holds {kind}",
        ("model", "data"),
    )
    one, other = ("at each position", "for each sample")[:: 1 if model.predicts_positions else -1]
    yield (
        kind in model.takes and model.predicts_positions != bool(data.label_shape),
        f"model={model.name} predicts a label {one}, but data={data.name} has one {other}",
        ("model", "data"),
    )
    needed = "tokens" if data.label_shape else kind
    where = f"with data={data.name} is refused: it holds {'labels at each position' if needed != kind else kind}"
    yield needed not in run.loader.feeds, f"loader={run.loader.name} {where}", ("loader=resident", "loader")
    yield kind != "images" and data.augment, f"data.augment=true {where}", ("data.augment",)
    yield kind != "images" and run.channels_last, f"channels_last=true {where}", ("channels_last",)


def _preprocessing(run: RunConfig, device_type: str) -> Rules:
    """Preprocessing that can't be done, that would change nothing, and runs that would do nothing."""
    chosen = run.preprocess
    if chosen.engine == "none":
        yield run.epochs == 0, "epochs=0 trains nothing without preprocess.engine", ("epochs", "preprocess.engine")
        yield (
            run.epochs and chosen != Preprocess(),
            "preprocess has options, but preprocess.engine=none does nothing",
            (" ".join(_undone(chosen)), "preprocess.engine"),
        )
        return
    who = f"preprocess.engine={chosen.engine}"
    yield (
        run.data.kind != "images" or run.data.label_shape,
        f"{who} with data={run.data.name} is refused: its recipes are for images with one label each",
        ("preprocess.engine=none preprocess.recipe=null", "preprocess.engine"),
    )
    yield chosen.recipe is None, f"{who} needs a recipe ({', '.join(sorted(RECIPES))})", ("preprocess.recipe",)
    yield (
        device_type == "cpu" and chosen.threads > run.cores_per_device,
        f"preprocess.threads={chosen.threads}, but a device has {count_of(run.cores_per_device, 'core')}",
        ("preprocess.threads", f"cores_per_device={chosen.threads}"),
    )
    yield (
        run.epochs == 0 and run.devices > 1,
        f"epochs=0 preprocesses only, in one process, not on devices={run.devices}",
        ("devices=1", "epochs"),
    )
    yield (
        run.epochs and chosen.recipe is not None and chosen.recipe not in SELECTING,
        f"a run can't train on what preprocess.recipe={chosen.recipe} prepares, only on the rows of "
        f"{', '.join(SELECTING)}; epochs=0 prepares alone",
        ("preprocess.recipe",),
    )


def _undone(chosen: Preprocess) -> Iterator[str]:
    """The overrides that give its options back their defaults."""
    for option, usual in msgspec.structs.asdict(Preprocess()).items():
        if getattr(chosen, option) != usual:
            yield f"preprocess.{option}={'null' if usual is None else usual}"


def _recomputation(run: RunConfig) -> Rules:
    """To compute again in backward where there is nothing to, or something else decides it."""
    chosen, model, strategy = run.activation_recomputation, run.model, run.strategy
    if chosen == "none":
        return
    who, key = f"activation_recomputation={chosen} is refused", "activation_recomputation"
    yield (
        strategy.framework != "torch",
        f"{who}: {strategy.framework} trains with a backward pass of its own",
        (key, "strategy"),
    )
    attends = model.anatomy().attention
    yield chosen == "selective" and not attends, f"{who}: model={model.name} names no attention", (key,)
    yield (
        chosen == "full" and len(model.layer_names) == 1,
        f"{who}: model={model.name} has one layer, whose backward pass follows at once",
        ("model", key),
    )
    yield run.compile, f"{who}: the compiler chooses what it computes again", (key, "compile")
    yield run.graph, f"{who}: the state of random numbers that it restores can't be captured", (key, "graph")
    why = strategy.why_no_recomputation(run)
    yield why, f"{who}: {why}", (key, "strategy.schedule", "strategy")


def _updates(run: RunConfig) -> Rules:
    """Losses of a model's own where no rank could add them; rates and clipping that updates don't follow."""
    own_loss, strategy = run.model.anatomy().own_loss, run.strategy
    yield (
        own_loss.option and not strategy.takes_own_loss,
        f"{own_loss.option} with strategy={strategy.name} is refused: layers of model={run.model.name} add to the "
        "loss, but no device has all layers, whole samples and their loss",
        (own_loss.without, "strategy"),
    )
    captured = run.graph and strategy.can_be_captured  # else that is refused for itself
    own = "has updates of its own"
    if package_of(type(strategy)) != "parallelbench":
        own += (
            f" unless the ClassVar updates_as_asked of {type(strategy).__qualname__} is True, as it may be where "
            "replicas update by BaseReplica._update"
        )
    if run.lr_schedule.changes:
        who = f"lr_schedule={run.lr_schedule.name} is refused"
        yield (
            not strategy.updates_as_asked,
            f"{who}: strategy={strategy.name} {own}, with one rate",
            ("lr_schedule=constant", "strategy"),
        )
        yield (
            captured,
            f"{who}: with graph=true every step has the rate of the one that was captured",
            ("graph", "lr_schedule"),
        )
        yield (
            run.compiles_step,
            f"{who}: with compile_scope=step each rate would be compiled anew",
            ("compile_scope", "lr_schedule"),
        )
    if run.clip_norm is not None:
        who = f"clip_norm={run.clip_norm:g} is refused"
        yield (
            not strategy.updates_as_asked,
            f"{who}: strategy={strategy.name} {own}, which clip nothing",
            ("clip_norm", "strategy"),
        )
        yield captured, f"{who}: graph=true captures no clipping", ("clip_norm", "graph")


def _gpu_options(run: RunConfig, device_type: str) -> Rules:
    """Choices that would change nothing here, and steps that can't be captured."""
    model, strategy, optimizer = run.model, run.strategy, run.optimizer
    in_vain = run.graph and not strategy.can_be_captured  # so GPUs would not help
    chosen = {
        "graph": run.graph,
        "cudnn_benchmark": run.cudnn_benchmark,
        "measure.waits": run.measure.waits != "allowed" and run.measure.waits,
        "nccl.backend": run.nccl.backend != "default" and run.nccl.backend,
        "nccl.per_edge": run.nccl.per_edge,
        "nccl.interface": run.nccl.interface,
    }
    for key, value in chosen.items():
        yield (
            value and device_type != "cuda" and not in_vain,
            f"{key}={str(value).lower() if value is True else value} means nothing without GPUs",
            (key, "device"),
        )
    refused = f"measure.waits={run.measure.waits} is refused"
    waits = run.measure.waits != "allowed" and device_type == "cuda"
    yield (
        waits and bool(strategy.waits_in_steps),
        f"{refused}: under strategy={strategy.name} the host waits by design ({strategy.waits_in_steps})",
        ("measure.waits", "strategy"),
    )
    yield (
        waits and run.epochs == 1,
        f"{refused} with epochs=1: an attempt's first epoch may wait, so nothing would be looked at",
        ("epochs", "measure.waits"),
    )
    yield (
        run.nccl.per_edge and device_type == "cuda" and not strategy.has_stages,
        f"nccl.per_edge=true means nothing for strategy={strategy.name}, which has no stages",
        ("nccl.per_edge", "strategy"),
    )
    if not run.graph:
        return
    who = "graph=true is refused"
    if not strategy.can_be_captured:
        why = f"a step of strategy={strategy.name} can't be captured, only one of single, ddp, fsdp or hsdp"
        yield True, f"{who}: {why}", ("graph", "strategy")
        return
    yield not optimizer.can_be_captured, f"{who}: optimizer={optimizer.name} can't be captured", ("graph", "optimizer")
    yield (
        run.precision == "fp16",
        f"{who}: precision=fp16 adapts the scale of the loss on the host",
        ("graph", "precision=bf16"),
    )
    yield run.compile, f"{who}: compile=true makes other launches of a step", ("graph", "compile")
    yield (
        model.anatomy().sizes_follow_values,
        f"{who}: model={model.name} has tensors whose sizes follow from what is computed",
        ("graph",),
    )
    yield (
        run.measure.attribution_steps,
        f"{who}: a replayed step has no phases for measure.attribution_steps",
        ("graph", "measure.attribution_steps=0"),
    )


def _compiled(run: RunConfig) -> Rules:
    """To compile steps that torch can't compile whole, and nothing."""
    yield (
        run.compile and run.model.anatomy().sizes_follow_values,
        f"compile=true is refused: model={run.model.name} has tensors whose sizes follow from what is computed, so "
        "torch would compile for each of them",
        ("compile",),
    )
    if run.compile_scope == "model":
        return
    who = f"compile_scope={run.compile_scope} is refused"
    yield (
        not run.optimizer.can_be_compiled,
        f"{who}: torch compiles no step of optimizer={run.optimizer.name}",
        ("compile_scope", "optimizer"),
    )
    yield not run.compile, f"{who}: nothing is compiled under compile=false", ("compile", "compile_scope")
    yield (
        run.precision == "fp16",
        f"{who}: under precision=fp16 the host decides whether to update",
        ("precision=bf16", "compile_scope"),
    )


def _surroundings(run: RunConfig, device_type: str) -> Rules:
    """Arithmetic that the devices lack, and processes that the launcher can't start."""
    yield (
        run.precision == "tf32" and device_type == "cpu",
        "precision=tf32 exists on CUDA devices only",
        ("precision=fp32", "precision=bf16"),
    )
    yield (
        run.launcher.in_this_process and run.strategy.processes(run, device_type) > 1,
        f"launcher=inline runs one process, but strategy={run.strategy.name} needs more",
        ("launcher=local",),
    )


def _batch(run: RunConfig) -> Rules:
    """Batches that the devices can't share, and those of more samples than there are."""
    batch, shards, samples = run.global_batch_size, run.strategy.data_parallel_degree(run), run.data.train_samples
    yield (
        batch % shards,
        f"batch_size={run.batch_size} can't be divided into {shards} equal parts by strategy={run.strategy.name} on "
        f"devices={run.devices}",
        ("batch_size", "devices"),
    )
    yield (
        batch > samples,
        f"batch_size={run.batch_size} makes a global batch of {batch}, but data={run.data.name} has only {samples} "
        "training samples",
        ("batch_size",),
    )


def _normalised(run: RunConfig) -> Rules:
    """BatchNorm of one value per channel, which has no deviation: torch raises, and TensorFlow gives zeros."""
    shards, micro_batches = run.strategy.data_parallel_degree(run), run.strategy.micro_batches_per_step(run)
    samples, norm = run.global_batch_size // shards // micro_batches, getattr(run.model, "norm", None)
    joined = norm == "sync" and shards > 1  # replicas share their statistics
    yield (
        samples == 1 and not joined and run.model.least_normalised(image_size=run.data.model_input["image_size"]) == 1,
        f"model.norm={norm} with one sample in each forward pass is refused (batch_size={run.batch_size}, "
        f"{shards * micro_batches} pieces): the smallest maps of model={run.model.name} are 1×1 with "
        f"data={run.data.name}, and BatchNorm needs more than one value per channel",
        ("batch_size", "strategy.micro_batches", "model.norm=group", "model.norm"),
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
