"""Normalisation of feature maps, among them a BatchNorm whose statistics are those of the global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelbench.world.spans import phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from parallelbench.measure.traffic import Traffic
    from parallelbench.models.cnn import Norm


def norm_layer(norm: Norm) -> Callable[[int], nn.Module]:
    """Return a function from a number of channels to its normalisation layer."""
    if norm == "group":
        return group_norm
    return SyncBatchNorm if norm == "sync" else nn.BatchNorm2d


def group_norm(channels: int) -> nn.GroupNorm:
    """Return a GroupNorm of 32 groups (Wu & He 2018), or of the largest smaller number that divides the channels.

    Groups have at least two channels: on a feature map of 1×1, one channel alone would be normalised to zero.
    """
    most = max(1, min(32, channels // 2))
    return nn.GroupNorm(max(n for n in range(1, most + 1) if channels % n == 0), channels)


class SyncBatchNorm(nn.BatchNorm2d):
    """BatchNorm over the samples of all ranks of a process group, on every device its backend serves.

    `nn.SyncBatchNorm` refuses CPUs. While `process_group` is None, and in evaluation, this is exactly
    `nn.BatchNorm2d`, with the same parameters and buffers. With a group, all its ranks must run the layer
    the same number of times, forward and backward; shards may differ in size. Maps (batch, channels, height, width) to
    the same shape.
    """

    process_group: dist.ProcessGroup | None = None
    """The ranks that share statistics; set by `synchronize_norms`."""
    traffic: Traffic | None = None
    """The replica's, where each message is counted as it is sent; set by `report_norms`."""

    counts_itself: bool = False
    """Whether it has just run uncompiled and counted what it sent, as layers do that backward computes again."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise with the statistics of the global batch (training) or the running ones (evaluation)."""
        if self.process_group is None or not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        # Compiled code counts nothing: `count_compiled_norms` does.
        traffic = None
        if not torch.compiler.is_compiling():
            traffic, self.counts_itself = self.traffic, True
            if has_kernels(x, self.process_group):
                assert self.num_batches_tracked is not None
                self.num_batches_tracked += 1
                fused: Tensor = _FusedNorm.apply(x, self.weight, self.bias, self, self.process_group, traffic)
                return fused
        # bf16 and fp16 inputs (autocast) are summed in fp32, as the native kernels do.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, squares, count = _global_moments(wide, self.process_group, traffic)
        self._update_running(mean.detach(), squares.detach(), count)
        scale = self.weight * torch.rsqrt(squares / count + self.eps)
        mean, scale = mean.to(wide.dtype), scale.to(wide.dtype)
        return ((wide - _per_channel(mean)) * _per_channel(scale) + _per_channel(self.bias)).to(x.dtype)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, squares: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        # At least 1, no error for a single value: reading the count would synchronise host and device.
        unbiased = squares / (count - 1).clamp(min=1)
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)


def synchronize_norms(module: nn.Module, process_group: dist.ProcessGroup | None) -> None:
    """Let all `SyncBatchNorm` layers of a module share statistics over a group; None: each rank alone."""
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm):
            layer.process_group = process_group


def report_norms(module: nn.Module, traffic: Traffic) -> None:
    """Let all `SyncBatchNorm` layers of a module count what they send."""
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm):
            layer.traffic = traffic


def count_compiled_norms(module: nn.Module, traffic: Traffic, *, passes: int = 1) -> None:
    """Count what `SyncBatchNorm` layers send in so many forward and backward passes that are compiled.

    Not what torch.compile has left uncompiled in them, such as layers under `activation_recomputation`.
    """
    for layer in module.modules():
        if not isinstance(layer, SyncBatchNorm) or not passes:
            continue
        counted, layer.counts_itself = layer.counts_itself, False
        if layer.process_group is not None and not counted:
            ranks = layer.process_group.size()
            row_bytes = (2 * layer.num_features + 1) * torch.float64.itemsize
            traffic.all_reduce("activation", 2 * passes * row_bytes, ranks)


def has_kernels(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether torch has kernels for these values: on CUDA, in fp32 or less; for one value in all they give no number.

    Not for tensors without values (`FakeTensorMode`).
    """
    several = x.numel() // x.shape[1] * group.size() > 1
    return several and x.is_cuda and x.dtype != torch.float64 and type(x) is Tensor


class _FusedNorm(torch.autograd.Function):
    """The same by torch's own kernels, which take few launches.

    What `torch.nn.SyncBatchNorm` does: ranks gather each other's statistics in forward, and add up two numbers a
    channel in backward. The kernels update the running statistics. They want the table of all ranks, of which each
    sends (ranks − 1) rows' bytes: for resnet50 on 64 ranks 13.4 MB a step, beside 201 MB of gradients. One sum instead,
    as in the plain code below, would take some ten launches more for each norm, whose forward has seven.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        norm: SyncBatchNorm,
        group: dist.ProcessGroup,
        traffic: Traffic | None,
    ) -> Tensor:
        assert norm.momentum is not None
        x = _dense(x)
        channels, ranks = x.shape[1], group.size()
        mean, deviation = torch.batch_norm_stats(x, norm.eps)  # the inverse of the deviation
        row = torch.cat([mean, deviation, mean.new_full((1,), x.numel() // channels)])
        table = row.new_empty(ranks, len(row))
        with phase("communication"):
            dist.all_gather_into_tensor(table.view(-1), row, group=group)
        means, deviations, counts = table.split([channels, channels, 1], dim=1)
        mean, deviation = torch.batch_norm_gather_stats_with_counts(
            x, means, deviations, norm.running_mean, norm.running_var, norm.momentum, norm.eps, counts.view(-1)
        )
        ctx.save_for_backward(x, weight, mean, deviation, counts.to(torch.int32))
        ctx.group, ctx.traffic = group, traffic
        if traffic is not None:
            traffic.all_gather("activation", table.nbytes, ranks)
        return torch.batch_norm_elemt(x, weight, bias, mean, deviation, norm.eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, deviation, counts = ctx.saved_tensors
        grad = _dense(grads[0])
        total, products, of_weight, of_bias = torch.batch_norm_backward_reduce(
            grad, x, mean, deviation, weight, True, True, True
        )
        both = torch.cat([total, products])
        with phase("communication"):
            dist.all_reduce(both, group=ctx.group)
        if ctx.traffic is not None:
            ctx.traffic.all_reduce("activation", both.nbytes, ctx.group.size())
        total, products = both.split(x.shape[1])
        of_x = torch.batch_norm_backward_elemt(grad, x, mean, deviation, weight, total, products, counts)
        return of_x, of_weight, of_bias, None, None, None


def _dense(x: Tensor) -> Tensor:
    """As the kernels want it: without gaps, in either memory format."""
    return x if x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()


def _per_channel(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)


def _global_moments(x: Tensor, group: dist.ProcessGroup, traffic: Traffic | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean, the sum of centred squares (both of shape (channels,)) and the count over all ranks, in fp64.

    One sum over the ranks, of a row as long for many of them as for two: each rank's Σx, Σx² and count. The variance
    is the difference of two of its numbers, which costs (mean ÷ deviation)² · 1e-16 of it. In fp32 that difference
    would lose all digits where the mean is large beside the spread; in fp64 it loses fewer than the values of an fp32
    map have lost already. A rank's own sums come from its mean and centred squares, which lose none.
    """
    channels = x.shape[1]
    count = x.numel() // channels
    var, mean = (moment.double() for moment in torch.var_mean(x, dim=(0, 2, 3), correction=0))
    row = torch.cat([mean * count, (var + mean**2) * count, mean.new_full((1,), count)])
    sums, squares, total = _summed_over(row, group, traffic).split([channels, channels, 1])
    total = total.detach()
    mean = sums / total
    # Not less than zero, which rounding may make of a constant channel.
    return mean, (squares - mean**2 * total).clamp(min=0), total


class _AllReduceSum(torch.autograd.Function):
    """The sum over the ranks. Each rank's input adds to each rank's output, so gradients are summed, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, traffic: Traffic | None) -> Tensor:
        ctx.group, ctx.traffic = group, traffic
        total = x.detach().clone(memory_format=torch.contiguous_format)
        with phase("communication"):
            dist.all_reduce(total, group=group)
        if traffic is not None:
            traffic.all_reduce("activation", total.nbytes, group.size())
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _summed_over(grads[0], ctx.group, ctx.traffic), None, None


def _summed_over(x: Tensor, group: dist.ProcessGroup, traffic: Traffic | None) -> Tensor:
    total: Tensor = _AllReduceSum.apply(x, group, traffic)
    return total
