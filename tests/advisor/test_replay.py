"""Pipelines' actions are torch's own; replaying them gives the published formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from analysis.advisor.replay import actions, pipeline_s, replayed

TORCH_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B"}


@pytest.mark.parametrize(
    ("kind", "devices", "micro_batches", "chunks"),
    [
        *[(kind, p, m, 1) for kind in ("gpipe", "1f1b") for p, m in ((2, 2), (2, 8), (4, 4), (4, 9), (8, 16))],
        *[("interleaved_1f1b", p, m, v) for p, m, v in ((2, 4, 2), (4, 8, 2), (4, 4, 3), (2, 8, 4))],
    ],
)
def test_actions_are_those_of_torch(kind: str, devices: int, micro_batches: int, chunks: int) -> None:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    theirs = get_schedule_ops(TORCH_NAMES[kind], devices, micro_batches, num_stages_per_rank=chunks)
    ours = actions(kind, devices, micro_batches, chunks)  # type: ignore[arg-type]
    for rank in range(devices):
        order = [
            (action.computation_type.value == "F", action.stage_index, action.microbatch_index)
            for action in theirs[rank]
            if action is not None and action.microbatch_index is not None  # not torch's scaling of gradients
        ]
        if kind == "1f1b":  # torch numbers the last stage's forward passes from 1 on, one ahead of what it runs
            assert [(forward, stage) for forward, stage, _ in ours[rank]] == [each[:2] for each in order]
            assert [each for each in ours[rank] if not each[0]] == [each for each in order if not each[0]]
        else:
            assert ours[rank] == order, rank


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("devices", "micro_batches"), [(2, 2), (4, 8), (8, 32)])
def test_even_stages_idle_as_long_as_the_formula_says(kind: str, devices: int, micro_batches: int) -> None:
    """(m + p − 1)·(T_F + T_B): Narayanan et al. 2021, §2.2."""
    forward, backward = np.array([1.0, 2.0]), np.array([2.0, 5.0])
    time = replayed(
        kind,  # type: ignore[arg-type]
        devices,
        micro_batches,
        [forward] * devices,
        [backward] * devices,
        send_s=np.zeros(2),
    )
    assert time == pytest.approx((micro_batches + devices - 1) * (forward + backward))


def test_interleaving_divides_the_bubble() -> None:
    """Stages a v-th as long idle (p − 1)·(T_F + T_B)/v: Narayanan et al. 2021, §2.2."""
    devices, micro_batches, chunks = 4, 8, 2
    passes = [np.array([0.5])] * 8, [np.array([1.0])] * 8
    time = replayed("interleaved_1f1b", devices, micro_batches, *passes, send_s=np.zeros(1))
    assert time == pytest.approx((micro_batches + (devices - 1) / chunks) * 3.0)


@given(st.integers(2, 6), st.integers(1, 220), st.lists(st.floats(0.1, 10.0), min_size=14, max_size=14))
@settings(max_examples=60, deadline=None)
def test_the_short_replay_is_the_whole_one(devices: int, micro_batches: int, times: list[float]) -> None:
    forward = [np.array([each]) for each in times[:devices]]
    backward = [np.array([each]) for each in times[6 : 6 + devices]]
    send = np.array([3 * times[12]])
    whole = replayed("1f1b", devices, micro_batches, forward, backward, send_s=send)
    assert pipeline_s("1f1b", devices, micro_batches, forward, backward, send_s=send) == pytest.approx(whole, rel=0.01)


@example(2, 2, 40, [1.0] * 24 + [2.0])  # rounds take 12, 12 and 10 s in turn
@given(
    st.integers(2, 4), st.integers(2, 3), st.integers(1, 45), st.lists(st.floats(0.1, 10.0), min_size=25, max_size=25)
)
@settings(max_examples=40, deadline=None)
def test_the_short_replay_is_the_whole_one_with_several_stages_per_device(
    devices: int, chunks: int, groups: int, times: list[float]
) -> None:
    forward = [np.array([each]) for each in times[: devices * chunks]]
    backward = [np.array([each]) for each in times[12 : 12 + devices * chunks]]
    send, sizes = np.array([times[24]]), (devices, groups * devices)
    whole = replayed("interleaved_1f1b", *sizes, forward, backward, send_s=send)
    assert pipeline_s("interleaved_1f1b", *sizes, forward, backward, send_s=send) == pytest.approx(whole, rel=0.01)
