"""Norm layers: the group of ranks gives what one process gives on the whole batch."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelbench.measure.counted_bytes import CountedBytes
from parallelbench.measure.traffic import Traffic
from parallelbench.models.norms import SyncBatchNorm, group_norm, report_norms, synchronize_norms
from tests.norm_kernels import kernels_on_cpus
from tests.ranks import run_ranks
from tests.strategies.test_launches import NO_LAUNCH, Operations

CHANNELS = 3
SHARDS = {1: [5], 2: [5, 3], 3: [4, 1, 6]}
"""World size → samples per rank, as uneven as can be: with 1 sample, a rank's own statistics are far off."""
STEPS = 3


def _batch(world_size: int, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The whole batch, and the gradient that its output gets; ranks differ in mean and spread."""
    generator = torch.Generator().manual_seed(10 * world_size + step)
    samples = sum(SHARDS[world_size])
    x = torch.randn(samples, CHANNELS, 4, 5, generator=generator, dtype=torch.float64)
    shift = torch.arange(samples, dtype=torch.float64).view(-1, 1, 1, 1)
    upstream = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return (x * (1 + shift) + 3 * shift).to(dtype), upstream.to(dtype)


def _trained(layer: nn.Module, batches: list[tuple[Tensor, Tensor]], *, channels_last: bool) -> dict[str, Any]:
    """Outputs, gradients and buffers after a forward and backward pass per batch, then an evaluation."""
    outputs, input_grads = [], []
    for x, upstream in batches:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        x = x.contiguous(memory_format=layout).detach().requires_grad_()
        y = layer(x)
        assert y.is_contiguous(memory_format=layout)
        assert y.dtype == x.dtype
        y.backward(upstream)
        outputs.append(y.detach())
        input_grads.append(x.grad)
    layer.eval()
    evaluated = layer(batches[0][0]).detach()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return {
        "outputs": outputs,
        "input_grads": input_grads,
        "grads": grads,
        "buffers": dict(layer.named_buffers()),
        "evaluated": evaluated,
    }


def _fresh(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The layer with parameters that are not those of the identity."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.linspace(0.5, 2, CHANNELS))
    return layer.to(dtype)


def _on_rank(rank: int, size: int) -> dict[Any, Any]:
    """What one rank of a group sees, by dtype, layout and whether it computes by torch's kernels."""
    group = dist.group.WORLD
    results = {}
    cases = itertools.product((torch.float64, torch.float32, torch.bfloat16), (False, True), (False, True))
    for dtype, channels_last, fused in cases:
        with kernels_on_cpus() if fused else nullcontext():
            shards = []
            for step in range(STEPS):
                x, upstream = _batch(size, step, dtype)
                own = [part.split(SHARDS[size])[rank] for part in (x, upstream)]
                shards.append((own[0], own[1]))
            parameters = torch.float32 if dtype == torch.bfloat16 else dtype
            model = nn.Sequential(_fresh(SyncBatchNorm(CHANNELS), parameters))
            synchronize_norms(model, group)
            results[dtype, channels_last, fused] = _trained(model[0], shards, channels_last=channels_last)
    return results


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda n: f"{n}ranks")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What every rank of a group saw."""
    return run_ranks(_on_rank, request.param, tmp_path_factory.mktemp("norms"))


# fp32 sees sums of some 100 values up to 40; bf16 has 8 bits, so outputs of size 3 are off by about 0.02.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.04}


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_group_equals_batch_norm_on_the_whole_batch(
    ranks: list[dict[Any, Any]], dtype: torch.dtype, channels_last: bool, fused: bool
) -> None:
    # The reference is fp64 on the same (rounded) inputs: only the rounding of the output may be added.
    whole = [_batch(len(ranks), step, dtype) for step in range(STEPS)]
    whole = [(x.double(), upstream.double()) for x, upstream in whole]
    expected = _trained(_fresh(nn.BatchNorm2d(CHANNELS), torch.float64), whole, channels_last=False)
    seen = [rank[dtype, channels_last, fused] for rank in ranks]
    close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype], "check_dtype": False}
    for step in range(STEPS):
        for what in ("outputs", "input_grads"):
            torch.testing.assert_close(torch.cat([s[what][step] for s in seen]), expected[what][step], **close)
    torch.testing.assert_close(torch.cat([s["evaluated"] for s in seen]), expected["evaluated"], **close)
    for name, grad in expected["grads"].items():
        torch.testing.assert_close(sum(s["grads"][name] for s in seen), grad, **close)
    narrow = {**close, "rtol": min(close["rtol"], 2e-5), "atol": min(close["atol"], 2e-5)}
    for name, buffer in expected["buffers"].items():
        for s in seen:
            torch.testing.assert_close(s["buffers"][name], buffer, **narrow)
            assert torch.equal(s["buffers"][name], seen[0]["buffers"][name]), "ranks must not drift apart"


FORWARD = dict.fromkeys(
    (
        *("add_", "batch_norm_stats", "new_full", "cat", "batch_norm_gather_stats_with_counts", "_to_copy"),
        "batch_norm_elemt",
    ),
    1,
)
BACKWARD = dict.fromkeys(("batch_norm_backward_reduce", "cat", "batch_norm_backward_elemt"), 1)
"""Operations that launch something."""


@pytest.fixture
def group(tmp_path: Path) -> Any:
    """A group of this process alone: the collective path without other processes."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_torchs_kernels_take_few_launches_and_their_messages_are_counted(group: Any) -> None:
    layer, traffic = SyncBatchNorm(CHANNELS), mock.Mock()
    synchronize_norms(layer, group)
    report_norms(layer, traffic)
    x = torch.randn(4, CHANNELS, 5, 5, requires_grad=True)
    with kernels_on_cpus():
        with Operations() as forward:
            y = layer(x)
        gradient = torch.ones_like(y)
        with Operations() as backward:
            y.backward(gradient)
    for passed, expected in ((forward, FORWARD), (backward, BACKWARD)):
        assert {name: count for name, count in passed.seen.items() if name not in NO_LAUNCH} == expected
    assert traffic.mock_calls == [
        mock.call.all_gather("activation", 4 * (2 * CHANNELS + 1), 1),
        mock.call.all_reduce("activation", 4 * 2 * CHANNELS, 1),
    ]


def test_one_value_in_all_is_for_the_plain_code(group: Any) -> None:
    layer = SyncBatchNorm(CHANNELS)
    synchronize_norms(layer, group)
    with kernels_on_cpus():
        assert layer(torch.ones(1, CHANNELS, 1, 1)).isfinite().all()
    assert layer.running_var.isfinite().all()


def test_without_a_group_it_is_batch_norm_and_needs_no_process_group() -> None:
    batches = [_batch(2, step, torch.float32) for step in range(STEPS)]
    assert not dist.is_initialized()
    got = _trained(_fresh(SyncBatchNorm(CHANNELS), torch.float32), batches, channels_last=False)
    expected = _trained(_fresh(nn.BatchNorm2d(CHANNELS), torch.float32), batches, channels_last=False)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-3), (torch.float64, 1e-9)], ids=str)
def test_a_large_mean_beside_a_small_spread_keeps_its_digits(dtype: torch.dtype, most: float, group: Any) -> None:
    x = 1000 + torch.randn(8, CHANNELS, 16, 16, generator=torch.Generator().manual_seed(0), dtype=dtype)
    layer = SyncBatchNorm(CHANNELS).to(dtype)
    synchronize_norms(layer, group)
    expected = nn.BatchNorm2d(CHANNELS).double()(x.double())
    torch.testing.assert_close(layer(x).double(), expected, rtol=0, atol=most)
    # The reason for sums in fp64: those in fp32 are wrong in the second digit here.
    narrow = x.float()
    textbook = (narrow**2).mean((0, 2, 3)) - narrow.mean((0, 2, 3)) ** 2
    assert (textbook - x.double().var((0, 2, 3), correction=0)).abs().max() > 0.01


def test_constant_channels_have_no_negative_variance(group: Any) -> None:
    layer = SyncBatchNorm(50).double()
    synchronize_norms(layer, group)
    values = 1e6 * torch.linspace(1, 2, 50, dtype=torch.float64).view(1, -1, 1, 1) ** 2
    x = values.repeat(8, 1, 3, 3).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert x.grad is not None
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert (layer.running_var >= 0).all()


def _messages(rank: int, size: int) -> dict[str, float]:
    """What a rank sends in a forward and a backward pass."""
    layer, traffic = SyncBatchNorm(CHANNELS), Traffic()
    synchronize_norms(layer, dist.group.WORLD)
    report_norms(layer, traffic)
    x = torch.randn(2, CHANNELS, 4, 4, requires_grad=True)
    with CountedBytes() as counted:
        layer(x).square().sum().backward()
    return {"counted": counted.sent_bytes + counted.control_bytes, "reported": traffic.activation}


@pytest.mark.slow
def test_messages_are_no_longer_for_many_ranks(tmp_path: Path) -> None:
    for size in (2, 4, 8):
        sent = 2 * (size - 1) / size * 2 * (2 * CHANNELS + 1) * 8
        for rank in run_ranks(_messages, size, tmp_path):
            assert rank == {"counted": pytest.approx(sent), "reported": pytest.approx(sent)}


def test_gradients_are_those_of_finite_differences(group: Any) -> None:
    layer = SyncBatchNorm(2).double()
    synchronize_norms(layer, group)
    x = torch.randn(3, 2, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(layer, (x.requires_grad_(),))


def test_under_autocast_the_output_is_bf16_and_the_statistics_fp32(group: Any) -> None:
    layer = nn.Sequential(nn.Conv2d(2, CHANNELS, 3), SyncBatchNorm(CHANNELS))
    synchronize_norms(layer, group)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.randn(4, 2, 8, 8))
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert layer[1].running_mean.dtype == torch.float32
    assert layer[0].weight.grad is not None
    assert layer[0].weight.grad.isfinite().all()


def test_synchronize_norms_reaches_every_sync_norm_and_undoes_itself(group: Any) -> None:
    model = nn.Sequential(SyncBatchNorm(2), nn.Sequential(SyncBatchNorm(2), nn.BatchNorm2d(2)))
    copied = copy.deepcopy(model)
    synchronize_norms(model, group)
    assert model[0].process_group is model[1][0].process_group is group
    assert not hasattr(model[1][1], "process_group")
    assert copied[0].process_group is None
    synchronize_norms(model, None)
    assert model[0].process_group is model[1][0].process_group is None


def test_state_of_sync_and_batch_norm_are_interchangeable() -> None:
    plain, sync = nn.BatchNorm2d(4), SyncBatchNorm(4)
    assert list(plain.state_dict()) == list(sync.state_dict())
    sync.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("channels", "groups"), [(1, 1), (2, 1), (3, 1), (8, 4), (12, 6), (64, 32), (96, 32), (100, 25), (256, 32)]
)
def test_group_norm_divides_the_channels_into_at_most_32_groups(channels: int, groups: int) -> None:
    assert group_norm(channels).num_groups == groups
