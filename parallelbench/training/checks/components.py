"""Whether a run's model, loss, metric and optimizer are what every strategy takes them for: asked before training.

A model of one's own is also asked, by a few steps on the CPU, what strategies and checks must not assume of it.
"""

from __future__ import annotations

import contextlib
import functools
import random
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from parallelbench.config.build import package_of
from parallelbench.config.components import Traits
from parallelbench.errors import ConfigError, count_of, raised_at
from parallelbench.models.modules import blank, built
from parallelbench.training.checks.plain import updated
from parallelbench.training.observers import metric_value
from parallelbench.world.generators import Generators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from parallelbench.config.run import RunConfig


_SAMPLES = 8
_ROUNDING = 1e-4
"""Largest relative difference of two means: of a sum it would be a half."""


def check_mean(run: RunConfig, device: torch.device | str) -> None:
    """Raise `ConfigError` unless the loss of random outputs is one number, and the mean of that of their halves.

    Losses that such outputs have no finite loss of are taken as they are.
    """
    mean = run.loss.build()
    draw = torch.Generator().manual_seed(0)
    shape, classes = (_SAMPLES, *run.data.label_shape), run.data.num_classes
    dtype = torch.float64 if run.precision == "fp64" else torch.float32
    logits = torch.rand((*shape, classes), generator=draw, dtype=torch.float64).to(device, dtype)
    labels = torch.randint(classes, shape, generator=draw).to(device)
    built = f"loss={run.loss.name}: the function that loss.build returns must give the mean over a batch as one number"
    whole = mean(logits, labels)
    if not isinstance(whole, Tensor) or whole.shape != ():
        found = f"a tensor of shape {tuple(whole.shape)}" if isinstance(whole, Tensor) else type(whole).__name__
        raise ConfigError(f'{built}, but it gives {found}: average over all labels, e.g. by reduction="mean"')
    if not whole.isfinite():
        return
    halves = torch.stack([mean(*half) for half in zip(logits.chunk(2), labels.chunk(2), strict=True)]).mean().item()
    if not abs(whole.item() - halves) <= _ROUNDING * max(abs(whole.item()), abs(halves)):
        raise ConfigError(
            f"{built}, but of a batch it is {whole.item():.4g} and the mean of its two halves' is {halves:.4g}: divide "
            'by the number of labels, e.g. by reduction="mean" without weights of classes'
        )


_ROUNDING_OF_SUMS = 1e-4
"""Largest relative difference of two sums: of a mean it would be a half."""


def check_sums(run: RunConfig, device: torch.device | str) -> None:
    """Raise `ConfigError` unless the sums over random outputs are those of their halves, and give a finite number.

    So must outputs that all predict one class, as a model may in its first epochs.
    """
    if not run.metric_size:
        return
    draw = torch.Generator().manual_seed(0)
    shape, classes = (_SAMPLES, *run.data.label_shape), run.logits_per_label
    dtype = torch.float64 if run.precision == "fp64" else torch.float32
    logits = torch.rand((*shape, classes), generator=draw, dtype=torch.float64).to(device, dtype)
    labels = torch.randint(run.data.num_classes, shape, generator=draw).to(device)
    whole = _sums(run, logits, labels)
    first, second = (_sums(run, *half) for half in zip(logits.chunk(2), labels.chunk(2), strict=True))
    both = first + second
    off = (whole - both).abs().nan_to_num(torch.inf)
    if not (off <= _ROUNDING_OF_SUMS * torch.maximum(whole.abs(), both.abs())).all():
        place = int(off.argmax())
        raise ConfigError(
            f"{_metric_of(run)} must give sums, but number {place + 1} of a batch is "
            f"{whole[place].item():.4g}, and of its two halves together {both[place].item():.4g}: add up over labels, "
            "and divide in value"
        )
    alike = torch.zeros_like(logits).index_fill_(-1, torch.zeros(1, dtype=torch.int64, device=device), 1.0)
    for sums, predictions in ((whole, "random predictions"), (_sums(run, alike, labels), "equal predictions")):
        if metric_value(run, sums.tolist()) is None:
            raise ConfigError(
                f"metric={run.metric.name}: {type(run.metric).__qualname__}.value gives no finite number for "
                f"{predictions}: return a number for any sums"
            )


def _sums(run: RunConfig, logits: Tensor, labels: Tensor) -> Tensor:
    size = run.metric_size
    try:
        found: Any = run.metric.build()(logits, labels)
    except (Exception, SystemExit) as error:  # a user's metric may raise anything
        raise ConfigError(f"{_metric_of(run)} fails: {raised_at(error)}") from None
    if not isinstance(found, Tensor) or found.shape != (size,):
        kind = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(f"{_metric_of(run)} must give a tensor of shape ({size},), as size says, but it gives {kind}")
    return found.double()


def _metric_of(run: RunConfig) -> str:
    return f"metric={run.metric.name}: the function that metric.build returns"


def check_rate(run: RunConfig) -> None:
    """Raise `ConfigError` where the rate is to change, and the run's optimizer takes no notice of its groups' `lr`.

    An optimizer that can't update a parameter by itself is left to the other checks.
    """
    if not run.lr_schedule.changes:
        return
    try:
        full, half = (_updated_twice(run, factor) for factor in (1.0, 0.5))
    except KeyError as error:
        follows = error.args != ("lr",)
    except Exception:  # a user's optimizer may raise anything
        follows = True
    else:
        follows = not torch.equal(full, half)
    if not follows:
        raise ConfigError(
            f"lr_schedule={run.lr_schedule.name} with optimizer={run.optimizer.name} is refused: its updates do not "
            'depend on param_groups["lr"], which a schedule sets before each step; read the rate there in step(), or '
            "choose lr_schedule=constant"
        )


def _updated_twice(run: RunConfig, factor: float) -> Tensor:
    """A small parameter after two updates, of which the second has this multiple of the rate; the same at each call."""
    generators = Generators()
    with generators.unchanged():
        generators.seed(0)
        return updated(run, factors=(1.0, factor))[0]


_SAMPLES_OF_LOGITS = 4
"""Or a whole global batch where that is smaller: what removes dimensions of one sees the training's samples."""
_LARGE_TO_CALL = 1_000_000
"""Parameters from which a model is called on tensors without values."""


def check_logits(run: RunConfig) -> None:
    """Raise `ConfigError` unless the model maps blank samples to (samples, *label_shape, classes).

    Fewer classes than the data have can't be labels; more would be trained on what no sample is. A language model that
    declares its own vocabulary has that many.
    """
    samples = min(_SAMPLES_OF_LOGITS, run.global_batch_size)
    asked = count_of(samples, "blank sample")
    called = f"model={run.model.name}, built for num_classes={run.data.num_classes} and called on {asked}"
    try:
        found = _output(run, samples)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a user's model may raise anything
        raise ConfigError(f"{called}, fails: {raised_at(error)}; mend it, or choose another model") from None
    expected = (samples, *run.data.label_shape, run.logits_per_label)
    if not isinstance(found, Tensor):
        raise ConfigError(f"{called}, gives {type(found).__name__}: return one tensor, of shape {expected}")
    if found.shape != expected:
        raise ConfigError(f"{called}, gives shape {tuple(found.shape)}, not {expected}: {_fix(run, found, expected)}")


def _fix(run: RunConfig, found: Tensor, expected: tuple[int, ...]) -> str:
    classes = expected[-1]
    if found.shape[:-1] != expected[:-1]:
        per = "for each position of each sample" if run.data.label_shape else "for each sample"
        return f"return {classes} logits {per}, and no other dimensions"
    if run.data.label_shape and found.shape[-1] > classes:
        entries = found.shape[-1]
        return f"let its last layer give {classes} logits, or declare Vocabulary(entries={entries}) in its anatomy"
    return f"let its last layer give {classes} logits, or correct num_classes of data={run.data.name}"


def _output(run: RunConfig, samples: int) -> Any:
    """What the model gives in evaluation."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        found = _without_values(run, _LARGE_TO_CALL, lambda model: model.eval()(blank(run.data, samples)))
        # Small ones get values at once: what code keeps outside its model (a mask in a cache) can be used again.
        return built(run, torch.float32).eval()(blank(run.data, samples)) if found is None else found


def _without_values(run: RunConfig, least: int, ask: Callable[[nn.Sequential], Any]) -> Any:
    """What a model of at least so many parameters answers without values; None: it is smaller, or looks at them."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # optimizers have loaded it

    with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
        model = built(run, torch.float32)
        if sum(each.numel() for each in model.parameters()) >= least:
            return ask(model)
    return None


_FEW_SAMPLES, _MORE_SAMPLES = 4, 64
"""Of few, a layer that values choose (an expert) may get none: then more are tried."""
_STEPS_THAT_DRAW = 16
"""Steps of a model that draws: what it leaves out now and then shows in one of them."""
_MIXED = 1e-3
"""Share of the largest output by which others in a batch change it: rounding, in whatever arithmetic, changes less."""
_LARGE_TO_TRAIN = 10_000_000
"""Parameters from which a model is asked on tensors without values: with them, its steps would take minutes."""


def traits_of(run: RunConfig) -> Traits:
    """What the run's model is; the suite's own are not asked. The same on every rank.

    Raises `ConfigError` where it can't be trained: the reason and the fix.
    """
    if package_of(type(run.model)) == "parallelbench":
        return Traits()
    called = f"model={run.model.name}, called in training on {_FEW_SAMPLES} samples,"
    with Generators().unchanged():
        try:
            return _asked(run)
        except ConfigError as error:
            raise ConfigError(f"{called} {error}") from None
        except (Exception, SystemExit) as error:  # a user's model may raise anything
            raise ConfigError(f"{called} fails: {raised_at(error)}; mend it, or choose another model") from None


def check_traits(run: RunConfig, traits: Traits) -> None:
    """Raise `ConfigError` where the strategy can't train a model that is so."""
    if why := run.strategy.why_not_model(run, traits):
        raise ConfigError(f"strategy={run.strategy.name} with model={run.model.name} is refused: {why}")


def _asked(run: RunConfig) -> Traits:
    torch.manual_seed(run.effective_seed)
    steps = functools.partial(_of_steps, run=run, dtype=torch.float32, has_values=False)
    found: Traits | None = _without_values(run, _LARGE_TO_TRAIN, steps)
    if found is not None:
        return found
    try:
        torch.manual_seed(run.effective_seed)
        return _of_steps(built(run, torch.float64), run, dtype=torch.float64)
    except RuntimeError:  # it may make tensors of its own, in fp32
        torch.manual_seed(run.effective_seed)
        return _of_steps(built(run, torch.float32), run, dtype=torch.float32)


def _of_steps(model: nn.Sequential, run: RunConfig, *, dtype: torch.dtype, has_values: bool = True) -> Traits:
    if not any(each.requires_grad for each in model.parameters()):
        raise ConfigError("has no parameter that needs a gradient: let some keep requires_grad=True")
    batch = _batch(run, _FEW_SAMPLES, dtype)

    def copied() -> nn.Sequential:
        """Each step begins with the same values; without values there is nothing to copy, nor can torch."""
        return deepcopy(model) if has_values else model

    step, untouched = _step(copied(), run, *batch), set[str]()
    if step.untouched or step.draws:
        more = _batch(run, _MORE_SAMPLES, dtype)
        for _ in range(_STEPS_THAT_DRAW if step.draws and has_values else 1):
            untouched |= _step(copied(), run, *more).untouched
    by_kind = any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in model.modules())
    mixes = by_kind if step.draws or not has_values else _mixes(copied(), run, *batch, whole=step.output)
    return Traits(
        draws=step.draws,
        draws_in_evaluation=_draws(copied().eval(), batch[0]),
        mixes_samples=mixes,
        untouched=tuple(name for name, _ in model.named_parameters() if name in untouched),
        scalars=tuple(name for name, each in model.named_parameters() if not each.dim()),
        empty=tuple(name for name, each in model.named_parameters() if not each.numel()),
        complex_parameters=tuple(name for name, each in model.named_parameters() if each.is_complex()),
        complex_buffers=tuple(name for name, each in model.named_buffers() if each.is_complex()),
        counters=step.counters,
        shared=_shared(model),
    )


def _batch(run: RunConfig, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random samples and labels: of equal ones a norm over a batch makes nothing."""
    empty, shape = blank(run.data, size, dtype=dtype), (size, *run.data.label_shape)
    samples = torch.randint_like(empty, run.data.vocabulary) if run.data.kind == "tokens" else torch.rand_like(empty)
    return samples, torch.randint(run.data.num_classes, shape)


class _Step(NamedTuple):
    draws: bool
    output: Tensor
    counters: tuple[str, ...]
    untouched: set[str]


def _step(model: nn.Sequential, run: RunConfig, samples: Tensor, labels: Tensor) -> _Step:
    """Forward and backward."""
    loss = run.model.with_own_loss(run.loss.build())
    model.train()
    whole = {name: each for name, each in model.named_buffers() if not (each.is_floating_point() or each.is_complex())}
    versions = {name: each._version for name, each in whole.items()}
    with _drawing() as drawn:
        output = samples
        for name, layer in model.named_children():
            output = layer(output)
            if not isinstance(output, Tensor):
                raise ConfigError(
                    f"gets {type(output).__name__} from its layer {name}: return one tensor, in training as in "
                    "evaluation; with_own_loss adds what else training minimises (docs/adding-a-model.md)"
                )
        loss(output, labels).backward()
    after = dict(model.named_buffers())
    return _Step(
        bool(drawn),
        output.detach(),
        tuple(name for name in whole if after[name] is not whole[name] or after[name]._version != versions[name]),
        {name for name, each in model.named_parameters() if each.requires_grad and each.grad is None},
    )


def _mixes(model: nn.Sequential, run: RunConfig, samples: Tensor, labels: Tensor, *, whole: Tensor) -> bool:
    """Whether half of the samples alone give something else."""
    size = _FEW_SAMPLES // 2
    half = _step(model, run, samples[:size], labels[:size]).output
    return bool((half - whole[:size]).abs().max() > _MIXED * whole.abs().max())


def _draws(model: nn.Sequential, samples: Tensor) -> bool:
    with torch.no_grad(), _drawing() as drawn:
        model(samples)
    return bool(drawn)


def _shared(model: nn.Sequential) -> tuple[tuple[str, ...], ...]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return tuple(tuple(each) for each in names.values() if len({name.partition(".")[0] for name in each}) > 1)


class _Draws(TorchDispatchMode):
    """Notes operations that draw from any of torch's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | (kwargs or {})
        # Attention is tagged whether it drops something or not.
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("dropout_p") != 0.0:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _drawing() -> Iterator[list[str]]:
    """Names what draws random numbers: torch's operations, and generators whose state is another one at the end."""
    before = _generators()
    with _Draws() as mode:
        yield mode.names
    mode.names += [name for name, state in _generators().items() if state != before[name]]


def _generators() -> dict[str, object]:
    algorithm, key, *rest = np.random.get_state()
    with no_dispatch():  # not even among tensors without values does this one have none
        of_torch = torch.get_rng_state().numpy().tobytes()
    return {
        "torch": of_torch,
        "numpy": (algorithm, np.asarray(key).tobytes(), *rest),
        "random": random.getstate(),
    }
