"""Groups that hold copies of each other's experts: their copies are compared, and their sums begin within backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelbench.config.run import RunConfig
from parallelbench.world.spans import Spans, divided_by
from tests.planted import once_after
from tests.ranks import run_ranks
from tests.strategies.test_expert_parallel import small
from tests.strategies.training import loader_of, prepared
from tests.test_closing import failed, on_ranks, passed, stays_right

RANKS = 2
"""Of a group, in worlds of four."""


def grouped(*options: str, devices: int = 4, expert_ranks: int = RANKS) -> RunConfig:
    return small(f"strategy.expert_ranks={expert_ranks}", *options, devices=devices)


def one_expert_drifts(replica: Any, k: int) -> None:
    """On the last rank, by far less than any loss shows."""

    def drift() -> None:
        with torch.no_grad():
            [*replica.copied().values()][-1][-1].view(-1)[0] += 1e-6

    if replica._world.rank == 3:
        once_after(replica, k, drift)


def every_groups_second_drifts(replica: Any, k: int) -> None:
    """In what all ranks hold; ranks with the same experts stay alike."""

    def drift() -> None:
        with torch.no_grad():
            next(iter(replica.copied()[0])).view(-1)[0] += 1e-6

    if replica._world.rank % RANKS:
        once_after(replica, k, drift)


def no_sums_from_now_on(replica: Any, k: int) -> None:
    """As if the groups lost each other after so many steps."""

    def part() -> None:
        replica._after_backward.__self__._group = dist.new_subgroups(1)[0]

    once_after(replica, k, part)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_groups_pass_the_closing_check_which_compares_their_experts(tmp_path: Path) -> None:
    run = grouped("precision=fp32", "epochs=1", "clip_norm=1.0", "optimizer=adamw")
    mutants = [(stays_right, 0), (one_expert_drifts, 2), (every_groups_second_drifts, 2), (no_sums_from_now_on, 2)]
    right, drifted, together, apart = run_ranks(on_ranks, 4, tmp_path, run, mutants)[0]
    assert not failed(right), [row for row in right if row["passed"] is False]
    expected = {"settled", "exchanges", "copies", "loss", "bytes", "gradients", "update", "evaluation loss"}
    assert expected <= passed(right)
    assert "copies" in failed(drifted)
    assert "copies" in failed(together)
    assert {"copies", "gradients", "bytes"} <= failed(apart)


def phases_of_the_sums(rank: int, size: int, run: RunConfig) -> list[str | None]:
    """The innermost phase where each sum begins, and where they are waited for."""
    replica: Any = prepared(run, rank, size)
    spans, seen = Spans(lambda: 0.0), []
    wait, all_reduce = replica._after_backward, dist.all_reduce

    def noted_wait(traffic: Any) -> None:
        seen.append(spans.innermost)
        wait(traffic)

    def noted_sum(*args: Any, **options: Any) -> Any:
        seen.append(spans.innermost)
        return all_reduce(*args, **options)

    replica._after_backward, dist.all_reduce = noted_wait, noted_sum
    with divided_by(spans), spans.step():
        replica.step(next(loader_of(replica, run).train(epoch=1)))
    return seen


@pytest.mark.exhaustive
@pytest.mark.slow
def test_sums_begin_within_backward_and_waiting_for_them_is_communication(tmp_path: Path) -> None:
    sums = 2 * 4  # of two blocks; two matrices and their biases
    for seen in run_ranks(phases_of_the_sums, 4, tmp_path, grouped()):
        assert seen == ["backward"] * sums + ["communication"]
