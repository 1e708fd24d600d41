"""Attention in blocks by torch's fused kernels: as on one device, what is launched in which order, and what is chosen.

No GPU is needed: stand-ins of the kernels compute on CPUs, and are as strict about what they are given as those of
CUDA; on CUDA tensors without values torch's own tell shapes, and which of them are launched.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from parallelbench.gpu_check.attention import DTYPES, Passing, exact, gathered, ring
from parallelbench.gpu_check.results import FailedError
from parallelbench.measure.traffic import Traffic
from parallelbench.strategies.context import attention, blocks
from parallelbench.strategies.context.attention import GatheredAttention, Gathering, Ring, RingAttention
from parallelbench.strategies.context.tokens import ContextGroup
from parallelbench.world.world import World
from tests.strategies.test_launches import NO_LAUNCH, Operations

RANKS = 4
FUSED = {1: blocks.FLASH, 2: blocks.EFFICIENT, 3: blocks.CUDNN}
"""By torch's numbers."""
OPERATORS = {
    "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
    "cuDNN": "_scaled_dot_product_cudnn_attention",
}


class OnCpus:
    """The three kernels and their backward passes, computed by that of CPUs."""

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Any, ...]:
        self.calls += 1
        assert options["dropout_p"] == 0.0
        assert q.shape[1] == k.shape[1] == v.shape[1]
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        result, normaliser = blocks.CPU.block(q, k, v, causal=options["is_causal"])
        if self.name == "efficient":
            assert options["compute_log_sumexp"]
            filled = F.pad(normaliser, (0, -q.shape[2] % 32), value=math.inf)
            return self._laid_out(result), filled, None, None
        if self.name == "cuDNN":
            assert options["compute_log_sumexp"]
            normaliser = normaliser.unsqueeze(-1)
        return (result, normaliser, *[None] * 7)

    def backward(self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *given: Tensor, **options: Any) -> Any:
        result, normaliser = given or (options["out"], options["logsumexp"])
        batch, heads, rows, width = q.shape
        assert normaliser.is_contiguous(), "kernels read it by its address"
        shapes = {"flash": (rows,), "efficient": (rows - rows % -32,), "cuDNN": (rows, 1)}
        assert normaliser.shape == (batch, heads, *shapes[self.name])
        if self.name == "efficient":
            assert result.stride()[1:] == (width, heads * width, 1), "its kernel knows no other layout"
            assert normaliser[:, :, rows:].isinf().all()
            assert options["grad_input_mask"] == [True, True, True, False]
        else:
            assert (options["max_q"], options["max_k"]) == (rows, k.shape[2])
        whole = result, normaliser.flatten(2)[:, :, :rows]
        found = blocks.CPU.gradients(gradient, (q, k, v), whole, causal=options["is_causal"])
        return (*found, None) if self.name == "efficient" else found

    @staticmethod
    def _laid_out(result: Tensor) -> Tensor:
        return result.transpose(1, 2).contiguous().transpose(1, 2)


def drawn(tokens: int, kv_heads: int) -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(0)
    heads = (4, 4, kv_heads, kv_heads)
    return tuple(torch.randn(2, each, tokens, 8, generator=made, dtype=torch.float64) for each in heads)


def of_one_device(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    inputs = [each.clone().requires_grad_() for each in (q, k, v)]
    each = q.shape[1] // k.shape[1]
    wide = [inputs[0], *(heads.repeat_interleave(each, dim=1) for heads in inputs[1:])]
    result = F.scaled_dot_product_attention(*wide, is_causal=True)
    return result.detach(), *torch.autograd.grad(result, inputs, gradient)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("ranks_attention", [ring, gathered])
@pytest.mark.parametrize("kernel", FUSED.values(), ids=lambda kernel: kernel.name)
def test_fused_blocks_of_all_ranks_are_one_devices_attention(
    kernel: blocks.Kernel, ranks_attention: Callable[..., tuple[Tensor, ...]], kv_heads: int, monkeypatch: Any
) -> None:
    stand_in = OnCpus(kernel.name)
    monkeypatch.setattr(torch.ops.aten, OPERATORS[kernel.name], stand_in.forward)
    monkeypatch.setattr(torch.ops.aten, f"{OPERATORS[kernel.name]}_backward", stand_in.backward)
    monkeypatch.setattr(blocks, "kernel_for", lambda *_, causal: kernel)
    given = drawn(tokens=8 * 5, kv_heads=kv_heads)  # 5 and 10 queries: no multiple of a kernel's rows
    found, expected = ranks_attention(*given), of_one_device(*given)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert stand_in.calls == {ring: 16, gathered: 10}[ranks_attention]


class Echo(Ring):
    """Notes in which order it is used; what it is given is what arrives."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(ContextGroup(0, RANKS), Traffic())
        self._events = events

    def pass_on(self, values: Tensor) -> Callable[[], Tensor]:
        self._events.append("sends")

        def arrived() -> Tensor:
            self._events.append("waits")
            return values

        return arrived


class Whole(Gathering):
    """The same of what is gathered."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(ContextGroup(1, RANKS), Traffic())
        self._events = events

    def gather(self, own: Tensor) -> Callable[[], Tensor]:
        self._events.append("sends")

        def arrived() -> Tensor:
            self._events.append("waits")
            return torch.cat([own] * RANKS, dim=3)

        return arrived

    def summed(self, whole: Tensor) -> Tensor:
        self._events.append("sums")
        return whole.chunk(RANKS, dim=3)[0]


MOST_FORWARD, MOST_BACK = 24, 25
"""Launches of a rank of a ring of four in bf16, of which four are blocks. One block of 1,024 plain tokens took 127."""
ONLY_DESCRIBES = NO_LAUNCH | {"new_empty", "promote_types"}
STEPS = ["waits", "sends", "block"] * 2 + ["waits", "block"]
"""Of a ring of four, after its own block: what is held is sent on before it is used."""


def noted(events: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def noting(*arguments: Any, **options: Any) -> Any:
        events.append(name)
        return function(*arguments, **options)

    return noting


def passes(ranks: Callable[[list[str]], Any], function: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], ...]:
    """What happens forward, and back."""
    events: list[str] = []
    for name in ("block", "block_gradients"):
        monkeypatch.setattr(attention, name, noted(events, "block", getattr(blocks, name)))
    context, (gradient, q, k, v) = Passing(), drawn(tokens=16, kv_heads=4)
    function.forward(context, q, torch.stack([k, v]), ranks(events))
    forward = events.copy()
    events.clear()
    function.backward(context, gradient)
    return forward, events


def test_a_rings_next_keys_are_under_way_while_a_block_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, back = passes(Echo, RingAttention, monkeypatch)
    assert forward == ["sends", "block", *STEPS]
    # A block's gradients are added to those that arrive with its keys, and sent on.
    first, middle, last = (
        ["waits", "sends", "block", "sends"],
        ["waits", "sends", "block", "waits", "sends"],
        STEPS[-2:],
    )
    assert back == ["sends", "block", *first, *middle, *last, "waits", "sends", "waits"]


def test_keys_are_gathered_while_a_ranks_own_block_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, back = passes(Whole, GatheredAttention, monkeypatch)
    assert forward == ["sends", "block", "waits", "block", "block"]
    assert back == [*forward, "sums"]


def launched(kernel: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], ...]:
    """Forward and back, by a rank of a ring, of 8,192 tokens in all, 12 heads of 64, on CUDA tensors without values."""
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, is_causal: kernel)
    context = Passing()
    with FakeTensorMode():
        gradient, q, k, v = (
            torch.empty(2, 2048, 12, 64, device="cuda:0", dtype=DTYPES[precision]).transpose(1, 2) for _ in range(4)
        )
        own = torch.stack([k, v])
        with Operations() as forward:
            result = RingAttention.forward(context, q, own, Echo([]))
        with Operations() as back:
            of_queries, of_own, _ = RingAttention.backward(context, gradient)
    normaliser = context.saved_tensors[-1]
    assert {each.device for each in (result, normaliser, of_queries, of_own)} == {torch.device("cuda:0")}
    assert (result.shape, result.dtype) == (q.shape, q.dtype)
    assert (normaliser.shape, normaliser.dtype) == (q.shape[:-1], torch.float32), "merged in fp32"
    assert (of_queries.shape, of_queries.dtype, of_own.shape, of_own.dtype) == (q.shape, q.dtype, own.shape, own.dtype)
    return tuple(
        Counter({name: n for name, n in operations.seen.items() if name not in ONLY_DESCRIBES})
        for operations in (forward, back)
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("number", FUSED, ids=lambda number: FUSED[number].name)
def test_a_block_is_one_launch_of_the_kernel_that_torch_chooses(
    number: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, back = launched(number, precision, monkeypatch)
    name = OPERATORS[FUSED[number].name]
    assert (forward[name], back[f"{name}_backward"]) == (RANKS, RANKS)
    assert forward.total() <= MOST_FORWARD, forward
    assert back.total() <= MOST_BACK, back


def test_what_torch_has_no_kernel_for_is_plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of fp64: each block is some hundred launches."""
    forward, _ = launched(0, "fp32", monkeypatch)
    assert forward["logsumexp"] == 8 + 3 * 4


@pytest.mark.parametrize(
    ("number", "width", "name"),
    [(1, 64, "flash"), (1, 20, "plain products"), (2, 20, "efficient"), (3, 64, "cuDNN"), (0, 64, "plain products")],
)
def test_the_kernel_is_what_torch_would_choose(
    number: int, width: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, is_causal: asked.append(is_causal) or number)
    with FakeTensorMode():
        q = torch.empty(2, 4, 8, width, device="cuda:0", dtype=torch.bfloat16)
        assert blocks.kernel_for(q, q, q, causal=True).name == name
        assert asked == [True]
        assert blocks.kernel_for(q[:0], q[:0], q[:0], causal=False) is blocks.PLAIN, "flash refuses an empty batch"
    assert blocks.kernel_for(*drawn(8, 4)[:3], causal=True) is blocks.CPU


def test_gpu_check_names_the_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_log_sum_exp(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        result, normaliser = blocks._cpu_block(q, k, v, causal=causal)
        return result, torch.zeros_like(normaliser)

    monkeypatch.setattr(blocks, "CPU", blocks.CPU._replace(block=without_log_sum_exp))
    with pytest.raises(FailedError, match=r"in bf16 \(limit 0.02\): of CPUs: .*causal log-sum-exp 1"):
        exact(World(), "bf16")
