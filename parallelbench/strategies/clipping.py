"""Gradients clipped by the norm of all of them (Pascanu et al. 2013, arXiv 1211.5063), whichever rank holds a part."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from parallelbench.strategies.state import local
from parallelbench.world.spans import phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from parallelbench.measure.traffic import Traffic


Groups = tuple[dist.ProcessGroup, ...]

_TINY = 1e-6
"""Added to the norm that is divided by, as in `torch.nn.utils.clip_grad_norm_`."""
SUM_BYTES = 8
"""Bytes of a sum of squares, which is float64."""


class Clipping:
    """Scales gradients down where the norm of all of them exceeds `most`.

    A gradient that several ranks hold alike counts once. Where a rank holds a part (a shard, a stage), the parts'
    sums of squares are added up over the groups of ranks that hold the others, in one message per group.
    """

    def __init__(
        self,
        most: float,
        parameters: Iterable[Tensor],
        *,
        over: Groups,
        traffic: Traffic,
    ) -> None:
        """`over`: groups of ranks, each of which has other parameters."""
        self._most, self._traffic = most, traffic
        self.norms = StepNorms(most)
        """Of each gradient before it was clipped."""
        self._parts: dict[Groups, list[Tensor]] = {over: []}
        """Groups over which squares are added up, one after the other → this rank's parts of such gradients."""
        for parameter in parameters:
            self._parts.setdefault((*_shard_groups(parameter), *over), []).append(parameter)
            self._device = parameter.device
        self._norm: Tensor | None = None
        """Of the last gradient, before it was clipped."""

    def clip(self) -> None:
        """Scale the gradients; the host waits for no device."""
        if any(self._parts):  # parts of a gradient are on other ranks
            squares = {over: self._squares(parts) for over, parts in self._parts.items()}
            with phase("communication"):
                total = self.sum_over_ranks(squares)
            self._norm = norm = total.sqrt()
            self._scale_parts()
        else:
            (parameters,) = self._parts.values()
            self._norm = norm = torch.nn.utils.clip_grad_norm_(parameters, self._most)
        self.norms.note(norm)

    def _scale_parts(self) -> None:
        by_type: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for parts in self._parts.values():
            for gradient in _gradients(parts):
                by_type[gradient.dtype].append(gradient)
        for dtype, gradients in by_type.items():
            torch._foreach_mul_(gradients, self._factor().to(gradients[0].device, dtype))

    def sum_over_ranks(self, squares: Mapping[Groups, Tensor]) -> Tensor:
        """The sum of all squares, the same on every rank that holds a part; a collective."""
        left = dict(squares)
        while group := max(left, key=len)[:1]:
            beginning = [over for over in left if over[:1] == group]
            sums = torch.stack([left.pop(over) for over in beginning])
            dist.all_reduce(sums, group=group[0])
            self._traffic.all_reduce("gradient", SUM_BYTES * len(sums), group[0].size())
            for over, total in zip(beginning, sums, strict=True):
                left[over[1:]] = left.get(over[1:], 0) + total
        return left[()]

    def unclipped(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of the last update as they were before; waits for the device."""
        factor = 1.0 if self._norm is None else self._factor().item()
        return dict(gradients) if factor == 1.0 else {name: each / factor for name, each in gradients.items()}

    def _squares(self, parameters: Iterable[Tensor]) -> Tensor:
        """The sum of the squares of this rank's parts, in float64."""
        gradients = _gradients(parameters)
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack(torch._foreach_norm(gradients)).double().square().sum()

    def _factor(self) -> Tensor:
        assert self._norm is not None
        return (self._most / (self._norm + _TINY)).clamp(max=1.0)


def _shard_groups(parameter: Tensor) -> Groups:
    """The groups of ranks that hold the other shards of a parameter, one per dimension of its mesh that cuts it."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements
    return tuple(mesh.get_group(index) for index, placed in enumerate(placements) if not placed.is_replicate())


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """This rank's parts."""
    gradients = []
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            assert getattr(gradient, "placements", ()) == getattr(parameter, "placements", ()), "cut like its parameter"
            gradients.append(local(gradient))
    return gradients


_MOST_HELD = 64
"""Numbers on the device that wait for being put together."""


class StepNorms:
    """Keeps the norm of each step on the device, which nobody waits for, until they are taken."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._held: list[Tensor] = []
        self._blocks: list[Tensor] = []

    def note(self, norm: Tensor) -> None:
        """One step's norm, in memory that nobody writes again."""
        self._held.append(local(norm).detach())
        if len(self._held) == _MOST_HELD:
            self._put_together()

    def take(self) -> dict[str, float]:
        """Columns of `ranks` about the steps since the last call; empty where no step has a norm that is a number.

        Under precision=fp16 a gradient may overflow; its step is skipped, and counts here neither as clipped nor not.
        """
        self._put_together()
        norms = [norm for block in self._blocks for norm in block.tolist() if math.isfinite(norm)]
        self._blocks.clear()
        if not norms:
            return {}
        return {
            "gradient_norm_mean": math.fsum(norms) / len(norms),
            "gradient_norm_max": max(norms),
            "clipped_share": sum(norm > self._most for norm in norms) / len(norms),
        }

    def _put_together(self) -> None:
        if self._held:
            self._blocks.append(torch.stack(self._held))
            self._held.clear()
