"""Asks a model of one's own, by a few steps on the CPU, what strategies and checks must not assume of it."""

from __future__ import annotations

import contextlib
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
from parallelbench.errors import ConfigError, raised_at
from parallelbench.models.modules import blank, built
from parallelbench.world.generators import Generators

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parallelbench.config.run import RunConfig


_SAMPLES, _MORE_SAMPLES = 4, 64
"""Of few, a layer that values choose (an expert) may get none: then more are tried."""
_STEPS_THAT_DRAW = 16
"""Steps of a model that draws: what it leaves out now and then shows in one of them."""
_MIXED = 1e-3
"""Share of the largest output by which others in a batch change it: rounding, in whatever arithmetic, changes less."""
_LARGE = 10_000_000
"""Parameters from which a model is asked on tensors without values: with them, its steps would take minutes."""


def traits_of(run: RunConfig) -> Traits:
    """What the run's model is; the suite's own are not asked. The same on every rank.

    Raises `ConfigError` where it can't be trained: the reason and the fix.
    """
    if package_of(type(run.model)) == "parallelbench":
        return Traits()
    called = f"model={run.model.name}, called in training on {_SAMPLES} samples,"
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
    from torch._subclasses.fake_tensor import FakeTensorMode  # optimizers have loaded it

    torch.manual_seed(run.effective_seed)
    # A user's model may look at values; then it has to get some.
    with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
        model = built(run, torch.float32)
        if sum(each.numel() for each in model.parameters()) >= _LARGE:
            return _of_steps(model, run, dtype=torch.float32, has_values=False)
    try:
        torch.manual_seed(run.effective_seed)
        return _of_steps(built(run, torch.float64), run, dtype=torch.float64)
    except RuntimeError:  # it may make tensors of its own, in fp32
        torch.manual_seed(run.effective_seed)
        return _of_steps(built(run, torch.float32), run, dtype=torch.float32)


def _of_steps(model: nn.Sequential, run: RunConfig, *, dtype: torch.dtype, has_values: bool = True) -> Traits:
    if not any(each.requires_grad for each in model.parameters()):
        raise ConfigError("has no parameter that needs a gradient: let some keep requires_grad=True")
    batch = _batch(run, _SAMPLES, dtype)

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
    size = _SAMPLES // 2
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
