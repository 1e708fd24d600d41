"""Attention in blocks, as context parallelism computes it, beside attention to the whole sequence in fp64.

A ring's ranks are threads of this process, on one device; what they send each other goes through queues.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from queue import Queue
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from parallelbench.errors import one_line
from parallelbench.gpu_check.results import FailedError
from parallelbench.measure.traffic import Traffic
from parallelbench.strategies.context import blocks
from parallelbench.strategies.context.attention import GatheredAttention, Gathering, Ring, RingAttention
from parallelbench.strategies.context.tokens import ContextGroup, own_places
from parallelbench.world.numerics import set_precision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

    from parallelbench.world.world import World

RANKS = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LIMITS = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 2.5e-3}
"""Largest difference from fp64 ÷ largest value: five roundings, or as of products in fp32."""
_BACKENDS = (None, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
"""Which kernels the blocks are asked to take; None: what torch chooses."""
_TOKENS = (1024, 1000)
"""Of the sequence; parts of the second one fill no kernel's rows."""
_WAIT_S = 60.0


class Sizes(NamedTuple):
    """Of queries, keys and values."""

    batch: int
    tokens: int
    heads: int
    head_width: int = 64


def exact(world: World, precision: str) -> str:
    """Blocks, and what a ring and gathering ranks make of them, are fp64's within the precision's rounding."""
    set_precision("fp32")
    limit, good, bad = _LIMITS[precision], [], []
    for name, kernel in _kernels(world, DTYPES[precision]):
        try:
            with kernel:
                errors = dict(_errors(world, DTYPES[precision]))
        except Exception as error:
            bad.append(f"{name}: {type(error).__name__}: {one_line(str(error), 200)}")
            continue
        wrong = [f"{what} {error:.2g}" for what, error in errors.items() if not error <= limit]
        if wrong:
            bad.append(f"{name}: {len(wrong)} of {len(errors)}, as {', '.join(wrong[:6])}")
        else:
            good.append(f"{name} {max(errors.values()):.2g}")
    text = f"largest difference from fp64 in {precision} (limit {limit:g})"
    if bad:
        raise FailedError(f"{text}: {'; '.join(bad)}; no fault: {', '.join(good) or 'none'}")
    return f"{text}: {', '.join(good)}"


def _kernels(world: World, dtype: torch.dtype) -> Iterator[tuple[str, AbstractContextManager[object]]]:
    """Names, and contexts within which blocks take that kernel: what torch chooses, and all others that it has."""
    tensors = [torch.empty(2, 12, 256, 64, device=world.device, dtype=dtype) for _ in range(3)]
    seen = set()
    for backend in _BACKENDS if world.device_type == "cuda" else (None,):
        context = partial(sdpa_kernel, [backend, SDPBackend.MATH]) if backend else nullcontext
        with context():
            name = blocks.kernel_for(*tensors, causal=True).name
        if name not in seen and (backend is None or name != blocks.PLAIN.name):
            yield name, context()
        seen.add(name)


def _errors(world: World, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    on_a_gpu = world.device_type == "cuda"
    for tokens in _TOKENS:
        sizes = Sizes(2, tokens, 12) if on_a_gpu else Sizes(1, tokens // 5 // 8 * 8, 2)
        gradient, q, k, v = _drawn(sizes, 4, world, dtype)
        wide = [each.double() for each in (gradient, q, k, v)]
        for causal in (True, False):
            expected = blocks.plain_block(*wide[1:], causal=causal)
            found = blocks.block(q, k, v, causal=causal)
            what = f"{sizes.tokens} tokens, {'causal' if causal else 'whole'}"
            yield from _differences(what, ("result", "log-sum-exp"), found, expected)
            of_inputs = blocks.plain_gradients(wide[0], (wide[1], wide[2], wide[3]), expected, causal=causal)
            gradients = blocks.block_gradients(gradient, (q, k, v), found, causal=causal)
            yield from _differences(what, ("dq", "dk", "dv"), gradients, of_inputs)
            if causal:
                results = expected[0], *of_inputs
        for name, attention in (("ring", ring), ("gathered", gathered)):
            parts = attention(gradient, q, k, v)
            what, names = f"{sizes.tokens} tokens, {name}", ("result", "dq", "dk", "dv")
            yield from _differences(what, names, parts, results)


def _differences(
    what: str, names: tuple[str, ...], found: tuple[Tensor, ...], expected: tuple[Tensor, ...]
) -> Iterator[tuple[str, float]]:
    """Largest |difference| ÷ largest |value|; infinite where it is no number."""
    for name, one, other in zip(names, found, expected, strict=True):
        error = ((one.double() - other).abs().max() / other.abs().max()).item()
        yield f"{what} {name}", math.inf if math.isnan(error) else error


def _drawn(sizes: Sizes, count: int, world: World, dtype: torch.dtype) -> list[Tensor]:
    """Laid out as a model's linear layers leave them."""
    made = torch.Generator().manual_seed(0)
    shape = sizes.batch, sizes.tokens, sizes.heads, sizes.head_width
    return [torch.randn(shape, generator=made).to(world.device, dtype).transpose(1, 2) for _ in range(count)]


class Passing:
    """What autograd hands a function: this calls its passes without autograd, which has one thread per device."""

    saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep them for the pass back."""
        self.saved_tensors = tensors


class _Neighbour(Ring):
    """A rank whose ring are threads of this process."""

    def __init__(self, rank: int, posts: list[Queue[Tensor]]) -> None:
        super().__init__(ContextGroup(rank, len(posts)), Traffic())
        self._posts = posts

    def pass_on(self, values: Tensor) -> Callable[[], Tensor]:
        self._posts[(self.rank + 1) % self.ranks].put(values)
        return partial(self._posts[self.rank].get, timeout=_WAIT_S)


def ring(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Result and gradients of q, k and v of all ranks of a ring, in the order of the sequence."""
    posts: list[Queue[Tensor]] = [Queue() for _ in range(RANKS)]

    def rank(rank: int) -> tuple[Tensor, ...]:
        context, neighbour = Passing(), _Neighbour(rank, posts)
        own_gradient, own_q, own_k, own_v = _own(rank, gradient, q, k, v)
        result = RingAttention.forward(context, own_q, torch.stack([own_k, own_v]), neighbour)
        of_queries, of_own, _ = RingAttention.backward(context, own_gradient)
        return result, of_queries, *of_own

    with ThreadPoolExecutor(RANKS) as pool:
        return _joined(list(pool.map(rank, range(RANKS))))


class _Gathered(Gathering):
    """A rank that has all keys and values, and keeps the gradients for the others."""

    def __init__(self, rank: int, whole: Tensor, of_whole: Tensor) -> None:
        super().__init__(ContextGroup(rank, RANKS), Traffic())
        self._whole, self._of_whole = whole, of_whole

    def gather(self, own: Tensor) -> Callable[[], Tensor]:
        return lambda: self._whole

    def summed(self, whole: Tensor) -> Tensor:
        self._of_whole += whole
        return torch.zeros_like(whole.chunk(RANKS, dim=3)[0])


def gathered(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The same of ranks that gather keys and values."""
    whole = torch.stack([k, v])
    of_whole, parts = torch.zeros_like(whole), []
    for rank in range(RANKS):
        context, own_q = Passing(), _own(rank, q)[0]
        own = torch.stack(_own(rank, k, v))
        result = GatheredAttention.forward(context, own_q, own, _Gathered(rank, whole, of_whole))
        of_queries, of_own, _ = GatheredAttention.backward(context, _own(rank, gradient)[0])
        parts.append((result, of_queries, *of_own))
    result, of_queries, of_keys, of_values = _joined(parts)
    return result, of_queries, of_keys + of_whole[0], of_values + of_whole[1]


def _own(rank: int, *whole: Tensor) -> list[Tensor]:
    """A rank's tokens."""
    tokens = whole[0].shape[2]
    places = own_places(tokens, rank=rank, ranks=RANKS, zig_zag=True).to(whole[0].device)
    # Laid out as a rank's own would be: heads of a token side by side.
    return [each.transpose(1, 2).index_select(1, places).transpose(1, 2) for each in whole]


def _joined(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """All ranks' tokens in the order of the sequence."""
    tokens = sum(part[0].shape[2] for part in parts)
    places = torch.cat([own_places(tokens, rank=rank, ranks=RANKS, zig_zag=True) for rank in range(RANKS)])
    order = places.argsort().to(parts[0][0].device)
    return tuple(torch.cat(each, dim=2).index_select(2, order) for each in zip(*parts, strict=True))
