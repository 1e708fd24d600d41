"""Whether a run's model, loss, metric and optimizer are what every strategy takes them for: asked before training.

A model of one's own is also asked, by a few steps on the CPU, what strategies and checks must not assume of it.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from parallelbench.config.build import package_of
from parallelbench.config.components import Traits
from parallelbench.errors import ConfigError, count_of, one_line, place_of
from parallelbench.models.modules import blank, built
from parallelbench.training.checks.draws import Drawing
from parallelbench.training.checks.plain import updated
from parallelbench.training.failure import classify
from parallelbench.world.generators import Generators, held_generators
from parallelbench.world.numerics import dtype_of, in_arithmetic

if TYPE_CHECKING:
    from collections.abc import Callable

    from parallelbench.config.run import RunConfig


_SAMPLES = 8
_ROUNDING = 1e-4
"""Largest relative difference of a mean or a sum from that of its halves: of the other kind it would be a half."""


def check_scores(run: RunConfig, device: torch.device | str) -> None:
    """Raise `ConfigError` unless, of random outputs, the loss is the mean of that of their halves, and the metric's
    sums are those of the halves together.

    Losses that such outputs have no finite loss of are taken as they are.
    """
    draw = torch.Generator().manual_seed(0)
    shape, dtype = (_SAMPLES, *run.data.label_shape), dtype_of(run.precision)
    logits = torch.rand((*shape, run.logits_per_label), generator=draw, dtype=torch.float64).to(device, dtype)
    labels = torch.randint(run.data.num_classes, shape, generator=draw).to(device)
    loss, metric = (f"{key}={getattr(run, key).name}: the function that {key}.build returns" for key in _SCORES)
    followed = logits.clone().requires_grad_()
    _check_halves(f"{loss} must give the mean over a batch", run.loss.build(), followed, labels, shape=(), share=0.5)
    if size := run.metric_size:
        _check_halves(f"{metric} must give sums", run.metric.build(), logits, labels, shape=(size,), share=1.0)


_SCORES = ("loss", "metric")


def _check_halves(
    what: str, score: Callable[..., Any], logits: Tensor, labels: Tensor, *, shape: tuple[int, ...], share: float
) -> None:
    """`share`: what each half's score counts."""
    whole = score(logits, labels)
    if not isinstance(whole, Tensor) or whole.shape != shape:
        found = tuple(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
        raise ConfigError(f"{what}, a tensor of shape {shape}, but it gives {found}")
    if not shape and not whole.requires_grad:
        raise ConfigError(
            f"{what} that backward can follow, but it is detached from the logits, so nothing would be trained: "
            "compute it by torch's operations, without detach(), item(), numpy or torch.no_grad()"
        )
    first, second = (score(*half).double() for half in zip(logits.chunk(2), labels.chunk(2), strict=True))
    both, whole = share * (first + second), whole.double()
    off = ~((whole - both).abs() <= _ROUNDING * torch.maximum(whole.abs(), both.abs()))  # NaN is off
    if whole.isfinite().all() and off.any():
        raise ConfigError(f"{what}, but it gives {whole.tolist()}, and by its two halves {both.tolist()}")


def check_update(run: RunConfig) -> None:
    """Raise `ConfigError` where an optimizer of one's own updates only with a closure, which strategies don't give."""
    if package_of(type(run.optimizer)) == "parallelbench":
        return
    with Generators().unchanged():
        plain, fails = _fails_to_update(run, with_closure=False), None
        fails = _fails_to_update(run, with_closure=True) if plain else None
    if plain and not fails:
        raise ConfigError(
            f"optimizer={run.optimizer.name} is refused: step() of what its build returns computes the loss again by "
            f"a closure, and strategies call it without one ({plain}); choose optimizer=lbfgs, or update from the "
            f"gradients alone ({place_of(type(run.optimizer).build)})"
        )


def _fails_to_update(run: RunConfig, *, with_closure: bool) -> str:
    """How a small parameter's update fails; empty: it does not."""
    parameter = nn.Parameter(torch.linspace(1.0, 2.0, 6, dtype=torch.float64).reshape(2, 3))

    def loss() -> Tensor:
        parameter.grad = None
        value = parameter.square().mean()
        value.backward()
        return value

    try:
        optimizer = run.optimizer.build([parameter], run, "cpu")
        loss()
        optimizer.step(*([loss] if with_closure else []))  # type: ignore[arg-type]
    except Exception as error:  # a user's optimizer may raise anything
        return one_line(f"{type(error).__name__}: {error}")
    return ""


def check_rate(run: RunConfig) -> None:
    """Raise `ConfigError` where the rate is to change, and the run's optimizer takes no notice of its groups' `lr`.

    An optimizer that can't update a parameter by itself is left to the other checks.
    """
    if not run.lr_schedule.changes:
        return
    try:
        full, half = (_updated_twice(run, factor) for factor in (1.0, 0.5))
        follows = not torch.equal(full, half)
    except KeyError as error:
        follows = error.args != ("lr",)
    except Exception:  # a user's optimizer may raise anything
        return
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
    found, expected = _output(run, samples), (samples, *run.data.label_shape, run.logits_per_label)
    given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    if given != expected:
        raise ConfigError(
            f"model={run.model.name}, called on {count_of(samples, 'sample')}, gives {given}, not logits of shape "
            f"{expected}: change its last layer, {run.data.option_of('num_classes')} of data={run.data.name}, or, of a "
            f"language model, the Vocabulary of its anatomy ({place_of(type(run.model).build)})"
        )


def _output(run: RunConfig, samples: int) -> Any:
    """What the model gives in evaluation."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        found = _without_values(run, _LARGE_TO_CALL, lambda model: model.eval()(blank(run.data, samples)))
        # Small ones get values at once: what code keeps outside its model (a mask in a cache) can be used again.
        return _called(run, built(run, torch.float32).eval(), blank(run.data, samples)) if found is None else found


def _called(run: RunConfig, model: nn.Sequential, values: Any) -> Any:
    """What a model makes of the values; raises `ConfigError` that names the layer which can't take what it gets."""
    try:
        return model(values)
    except Exception:
        _raise_with_layer(run, model, values)
        raise


def _raise_with_layer(run: RunConfig, model: nn.Sequential, values: Any) -> None:
    """Raise `ConfigError` for the first layer that can't take what the one before gives it; where there is one."""
    before = f"data={run.data.name}"
    for name, layer in model._modules.items():
        try:
            given = layer(values)
        except Exception as error:  # a user's layer may raise anything
            kind, reason = classify(error)
            if kind != "error" or isinstance(error, ConfigError):
                raise
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ConfigError(
                f"model={run.model.name}: layer {name} can't take {shape}, which {before} gives it: "
                f"{_innermost(error)}{one_line(reason)}; {_remedy(layer, values)} ({place_of(type(run.model).build)})"
            ) from None
        before, values = f"layer {name}", given


def _remedy(layer: nn.Module, values: Any) -> str:
    """What to correct: types, where the layer takes the same values in another one, else sizes."""
    for dtype in (torch.float32, torch.float64, torch.int64):
        if isinstance(values, Tensor) and dtype != values.dtype:
            with contextlib.suppress(Exception):  # a user's layer may raise anything
                other = deepcopy(layer)
                (in_arithmetic(other, dtype) if dtype.is_floating_point else other)(values.to(dtype))
                return (
                    f"it gets {values.dtype} and would take {dtype}: convert its input in forward (tokens by an "
                    "nn.Embedding), or let the tensors that it makes itself have the input's type"
                )
    return "correct its sizes in build"


def _innermost(error: Exception) -> str:
    """ "Linear(in_features=8, …): ", the module that raised it."""
    found = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [each for each in found if isinstance(each, nn.Module)]
    return f"{one_line(repr(modules[-1]))}: " if modules else ""


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
_STEPS_OF_STATE = 2
"""Steps after which a model must be what its state says."""
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
    with Generators().unchanged():
        return _asked(run)


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
        raise ConfigError(
            f"model={run.model.name} has no parameter that needs a gradient: let some keep requires_grad=True"
        )
    batch = _batch(run, _FEW_SAMPLES, dtype)

    def copied() -> nn.Sequential:
        """Each step begins with the same values; without values there is nothing to copy, nor can torch."""
        try:
            return deepcopy(model) if has_values else model
        except Exception as error:  # a user's module may raise anything
            raise ConfigError(
                f"model={run.model.name} can't be copied by copy.deepcopy, and checks train copies: "
                f"{one_line(f'{type(error).__name__}: {error}')} ({place_of(type(run.model).build)})"
            ) from None

    step, untouched = _step(copied(), run, *batch), set[str]()
    if step.untouched or step.draws:
        more = _batch(run, _MORE_SAMPLES, dtype)
        for _ in range(_STEPS_THAT_DRAW if step.draws and has_values else 1):
            untouched |= _step(copied(), run, *more).untouched
    draws_in_evaluation = _draws(copied().eval(), batch[0])
    if has_values and not draws_in_evaluation:
        _require_state(copied(), copied(), run, batch, draws=step.draws)
    by_kind = any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in model.modules())
    mixes = by_kind if step.draws or not has_values else _mixes(copied(), run, *batch, whole=step.output)
    return Traits(
        draws=step.draws,
        generators=tuple(held_generators(model)),
        draws_elsewhere=step.draws_elsewhere,
        draws_in_evaluation=draws_in_evaluation,
        mixes_samples=mixes,
        untouched=tuple(name for name, _ in model.named_parameters() if name in untouched),
        scalars=tuple(name for name, each in model.named_parameters() if not each.dim()),
        empty=tuple(name for name, each in model.named_parameters() if not each.numel()),
        complex_parameters=tuple(name for name, each in model.named_parameters() if each.is_complex()),
        complex_buffers=tuple(name for name, each in model.named_buffers() if each.is_complex()),
        counters=step.counters,
        shared=_shared(model),
    )


def _require_state(
    model: nn.Sequential, fresh: nn.Sequential, run: RunConfig, batch: tuple[Tensor, Tensor], *, draws: bool
) -> None:
    """Raise `ConfigError` where a model that has trained makes something else of a batch than another one of its state.

    `model` and `fresh`: two copies. Plain code goes on with the state alone, and so do ranks that exchange it.
    """
    before = _beside_state(model)
    for _ in range(_STEPS_OF_STATE):
        _step(model, run, *batch)
    after = _beside_state(model)
    state = fresh.state_dict()
    for training in (False,) if draws else (False, True):
        with torch.no_grad():
            for name, each in model.state_dict().items():
                if isinstance(each, Tensor) and each.shape == state[name].shape:
                    state[name].copy_(each)
            own, other = (each.train(training)(batch[0].clone()) for each in (model, fresh))
        if (own - other).abs().max() > _ROUNDING * own.abs().max():
            changed = ", ".join(name for name in after if not _equal(before.get(name), after[name]))
            raise ConfigError(
                f"model={run.model.name}: what it computes after some steps depends on "
                f"{changed or 'something'} that is neither a parameter nor a buffer of its state, so checks, and what "
                "ranks exchange, would go on without: keep it by register_buffer(name, tensor), without "
                f"persistent=False ({place_of(type(run.model).build)})"
            )


def _beside_state(model: nn.Module) -> dict[str, Any]:
    """Copies of what modules hold besides their state: buffers that are not persistent, numbers, and other tensors."""
    held = dict[str, Any]()
    for path, module in model.named_modules():
        own = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
        own |= {name: each for name, each in vars(module).items() if not name.startswith("_") and name != "training"}
        for name, each in own.items():
            if isinstance(each, Tensor):
                held[f"{path}.{name}"] = each.detach().clone()
            elif isinstance(each, (int, float)):
                held[f"{path}.{name}"] = each
    return held


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _batch(run: RunConfig, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random samples and labels: of equal ones a norm over a batch makes nothing."""
    empty, shape = blank(run.data, size, dtype=dtype), (size, *run.data.label_shape)
    samples = torch.randint_like(empty, run.data.vocabulary) if run.data.kind == "tokens" else torch.rand_like(empty)
    return samples, torch.randint(run.data.num_classes, shape)


class _Step(NamedTuple):
    draws: bool
    draws_elsewhere: bool
    output: Tensor
    counters: tuple[str, ...]
    untouched: set[str]


def _step(model: nn.Sequential, run: RunConfig, samples: Tensor, labels: Tensor) -> _Step:
    """Forward and backward."""
    loss = run.model.with_own_loss(run.loss.build())
    model.train()
    whole = {name: each for name, each in model.named_buffers() if not (each.is_floating_point() or each.is_complex())}
    versions = {name: each._version for name, each in whole.items()}
    with Drawing(model) as drawn:
        output = samples
        for name, layer in model.named_children():
            output = layer(output)
            if not isinstance(output, Tensor):
                raise ConfigError(
                    f"model={run.model.name} gets {type(output).__name__} from its layer {name} in training: return "
                    "one tensor; with_own_loss adds what else training minimises (docs/adding-a-model.md)"
                )
        _require_gradient(run, output)
        loss(output, labels).backward()
    after = dict(model.named_buffers())
    held = {getattr(each, "_cdata", None) for each in held_generators(model).values()}  # operations see other wrappers
    return _Step(
        bool(drawn.names),
        any(getattr(each, "_cdata", None) not in held for each in drawn.generators),
        output.detach(),
        tuple(name for name in whole if after[name] is not whole[name] or after[name]._version != versions[name]),
        {name for name, each in model.named_parameters() if each.requires_grad and each.grad is None},
    )


def _require_gradient(run: RunConfig, output: Tensor) -> None:
    if not output.requires_grad:
        raise ConfigError(
            f"model={run.model.name}: what its last layer gives in training is detached from all parameters, so "
            "nothing would be trained: compute it by torch's operations, without detach(), .data, numpy or "
            f"torch.no_grad() ({place_of(type(run.model).build)})"
        )


def _mixes(model: nn.Sequential, run: RunConfig, samples: Tensor, labels: Tensor, *, whole: Tensor) -> bool:
    """Whether half of the samples alone give something else."""
    size = _FEW_SAMPLES // 2
    half = _step(model, run, samples[:size], labels[:size]).output
    return bool((half - whole[:size]).abs().max() > _MIXED * whole.abs().max())


def _draws(model: nn.Sequential, samples: Tensor) -> bool:
    with torch.no_grad(), Drawing(model) as drawn:
        model(samples)
    return bool(drawn.names)


def _shared(model: nn.Sequential) -> tuple[tuple[str, ...], ...]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return tuple(tuple(each) for each in names.values() if len({name.partition(".")[0] for name in each}) > 1)
