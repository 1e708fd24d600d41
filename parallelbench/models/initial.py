"""Initial values that are drawn when a layer is asked for: the bits that `built` gives, a layer at a time.

One stream of random numbers runs through a model while it is built. `unfilled` builds it on the meta device, without
values, and notes what its code does to each tensor. `fill` gives a layer its values: the stream goes on to them, and
what it draws for others on the way is dropped. So a process holds what its strategy keeps, and one layer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallelbench.models.modules import built

if TYPE_CHECKING:
    from collections.abc import Callable

    from parallelbench.config.run import RunConfig


_FACTORIES = {"aten::empty", "aten::zeros", "aten::ones", "aten::full"}
_OVERWRITES = {"aten::normal_", "aten::uniform_", "aten::fill_", "aten::zero_"}
"""Operations in place that read nothing of what was there."""


def unfilled(run: RunConfig) -> nn.Sequential:
    """A run's model without values, for `fill`.

    Its code may make tensors and change them in place, as that of all models of the suite does; all else is an error.
    """
    with _Notes(run.effective_seed) as notes:
        model = built(run)
    for tensor in (*model.parameters(), *model.buffers()):
        if (values := notes.of(tensor)) is not None:
            tensor.__dict__["_initial"] = values
    return model


def fill(module: nn.Module) -> None:
    """Give the tensors of a module that have no values yet theirs, on the CPU; what layers share stays shared.

    Layers may be filled in any order; in the order of the model, nothing is drawn twice.
    """
    for each in module.modules():
        tables: list[dict[str, Any]] = [each._parameters, each._buffers]
        for held in tables:
            for name, tensor in held.items():
                values: _Values | None = getattr(tensor, "_initial", None)
                if tensor is not None and values is not None:
                    held[name] = values.of(tensor)


@dataclass(eq=False)
class _Change:
    """What a model's code does in place to a tensor, or to a part of it."""

    function: Callable[..., Tensor]
    part: Tensor
    """A meta tensor."""
    draws: bool
    needed: bool = True
    """Whether something of what it leaves stays."""
    state: Tensor | None = None
    """Of the stream when it came to this; None: it has not yet."""

    def do(self, memory: Tensor, generator: torch.Generator, *, offset: int = 0) -> None:
        """Do it to a part of the same strides: random numbers depend on them."""
        own = memory.as_strided(self.part.size(), self.part.stride(), offset)
        self.function(own, generator=generator) if self.draws else self.function(own)


@dataclass(eq=False)
class _Values:
    """How a tensor gets its values."""

    stream: _Stream
    make: Callable[[], Tensor]
    like: Tensor
    """A meta tensor."""
    changes: list[_Change] = field(default_factory=list)
    taken: Tensor | None = None

    def __deepcopy__(self, memo: object) -> None:
        """None: copies of a tensor without values stay without."""

    def note(self, change: _Change, *, overwrites: bool) -> None:
        """Add a change; after one that overwrites all values those before it are needless."""
        if overwrites and change.part.numel() == self.like.numel():
            for earlier in self.changes:
                earlier.needed = False
        self.changes.append(change)
        if change.draws:
            self.stream.to_come.append(change)

    @torch.no_grad()
    def of(self, tensor: Tensor) -> Tensor:
        """What takes the place of a tensor without values: the same each time."""
        if self.taken is None:
            assert tensor.shape == self.like.shape
            needed = [change for change in self.changes if change.needed]
            for change in needed[:1]:
                self.stream.come_to(change)  # before there is memory for both
            values = self.make()
            for change in needed:
                change.do(values, self.stream.at(change), offset=int(change.part.storage_offset()))
            self.taken = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
        return self.taken


class _Stream:
    """The random numbers that run through a model."""

    def __init__(self, seed: int) -> None:
        self.to_come: deque[_Change] = deque()
        """Those changes that draw and that it has not come to, in their order."""
        self._generator = torch.Generator().manual_seed(seed)

    def at(self, change: _Change) -> torch.Generator:
        """What a change draws from, and has to."""
        self.come_to(change)
        if not change.draws:
            return self._generator
        if change.state is None:
            self.to_come.popleft()
            return self._generator
        earlier = torch.Generator()
        earlier.set_state(change.state)
        return earlier

    def come_to(self, change: _Change) -> None:
        """Draw all that comes before a change, unless the stream has come to it already, and drop it."""
        scratch = torch.empty(0)
        while change.draws and change.state is None and self.to_come[0] is not change:
            passed = self.to_come.popleft()
            if passed.needed:
                passed.state = self._generator.get_state()
            span = 1 + sum((n - 1) * stride for n, stride in zip(passed.part.size(), passed.part.stride(), strict=True))
            if scratch.numel() < span or scratch.dtype != passed.part.dtype:
                scratch = torch.empty(span, dtype=passed.part.dtype)
            passed.do(scratch, self._generator)


class _Notes(TorchDispatchMode):
    """Makes tensors without values, and notes what is done to them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._stream = _Stream(seed)
        self._values: dict[int, _Values] = {}
        """By their memory."""

    def of(self, value: Any) -> _Values | None:
        """Of a tensor that was made here, or of a view of it."""
        return self._values.get(value.untyped_storage()._cdata) if isinstance(value, Tensor) else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it on the meta device."""
        kwargs, name = kwargs or {}, func._schema.name
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if name in _FACTORIES:
            made = func(*args, **kwargs | {"device": "meta"})
            self._values[made.untyped_storage()._cdata] = _Values(self._stream, partial(func, *args, **kwargs), made)
            return made
        result, own = func(*args, **kwargs), self.of(args[0]) if args else None
        if own is not None and func._schema.is_mutable:
            tensor, *others = args  # the first is not kept: it will know its values, and they must go with it
            assert not any(self.of(each) for each in tree_leaves((others, kwargs))), f"{name} of two tensors"
            options = {key: value for key, value in kwargs.items() if key != "generator"}
            change = _Change(lambda part, **drawn: func(part, *others, **options, **drawn), tensor.detach(), draws)
            own.note(change, overwrites=name in _OVERWRITES)
        else:
            made_here = [self.of(each) for each in tree_leaves(result) if isinstance(each, Tensor)]
            assert all(made_here) or not (draws or any(map(self.of, tree_leaves((args, kwargs))))), name
        return result
