"""The claims about language models on planted runs, and the bytes that one of them rests on as ranks send them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.analysis.factory import Fake, config, published, steady
from tests.analysis.test_claims import REPEATS, WOBBLE
from tests.analysis.test_claims_shipped import shipped
from tests.ranks import run_ranks
from tests.strategies.training import sent_in_a_step, small

pytestmark = pytest.mark.slow

GPT: dict[str, Any] = {"model": "mpt_1b", "data": "tokens", "optimizer": "adamw"}
SCHEDULES = {1: "1f1b", 2: "interleaved_1f1b"}
"""Chunks of the model on each device → the schedule."""


def timed(root: Path, time_s: float, **work: Any) -> None:
    """Six repeats on GPUs, with their time per epoch."""
    for repeat in REPEATS:
        fake = steady(time_s * WOBBLE[(repeat + round(time_s)) % 6], device_type="cuda")
        published(config(root, repeat=repeat, device="cuda", **work), fake)


def pipelines(root: Path, *, devices: int = 4, device: str = "cuda", bubble: float = 0.5, sent: float = 2.0) -> None:
    """Six repeats of one chunk on each device and of two, with so many times the bubble and the bytes."""
    for repeat in REPEATS:
        for chunks, schedule in SCHEDULES.items():
            strategy = {"name": "pipeline", "schedule": schedule, "stages_per_rank": chunks}
            changes = {"strategy": strategy, "devices": devices, "device": device, "repeat": repeat}
            idle = WOBBLE[(repeat + chunks) % 6] * (bubble if chunks == 2 else 1.0)
            moved = int(1000 * (sent if chunks == 2 else 1.0))
            fake = Fake(
                phases=lambda rank, step, idle=idle: {"forward": 1.0, "backward": 2.0, "bubble": idle},  # type: ignore[misc]
                sent=lambda epoch, rank, moved=moved: (0, moved, 0),  # type: ignore[misc]
                device_type=device,
            )
            published(config(root, **(GPT | changes)), fake)


@pytest.mark.cases("0.9-refuted")
@pytest.mark.parametrize(("bubble", "verdict"), [(0.5, "reproduced"), (0.9, "refuted")])
def test_two_chunks_halve_the_bubble(bubble: float, verdict: str, tmp_path: Path) -> None:
    pipelines(tmp_path, bubble=bubble)
    finding = shipped(tmp_path, "interleaving_shrinks_bubble")
    assert (finding.verdict, len(finding.cases)) == (verdict, 1)
    assert finding.cases[0].median == pytest.approx(bubble, rel=0.05)


@pytest.mark.exhaustive
def test_a_bubble_of_cores_decides_nothing(tmp_path: Path) -> None:
    pipelines(tmp_path, devices=2, device="cpu")
    finding = shipped(tmp_path, "interleaving_shrinks_bubble")
    assert (finding.verdict, finding.cases) == ("inconclusive", ())


@pytest.mark.cases("3.0-refuted")
@pytest.mark.parametrize(("sent", "verdict"), [(2.0, "reproduced"), (1.0, "refuted"), (3.0, "refuted")])
def test_two_chunks_send_twice_as_much_on_any_device(sent: float, verdict: str, tmp_path: Path) -> None:
    pipelines(tmp_path, device="cpu", sent=sent)
    assert shipped(tmp_path, "interleaving_sends_more").verdict == verdict


@pytest.mark.exhaustive
@pytest.mark.parametrize(("devices", "ratio"), [(4, 2), (2, 3)])
def test_the_busiest_of_four_devices_sends_twice_as_much_and_of_two_three_times(
    devices: int, ratio: int, tmp_path: Path
) -> None:
    """What genuine ranks count: of two, each sends one way with a single chunk, and both ways with two."""
    busiest = {}
    for chunks, schedule in SCHEDULES.items():
        options = (f"strategy.schedule={schedule}", f"strategy.stages_per_rank={chunks}", "strategy.micro_batches=4")
        run = small("pipeline", devices, "model.layers=6", *options)
        busiest[chunks] = max(rank["said"] for rank in run_ranks(sent_in_a_step, devices, tmp_path, run))
    assert busiest[2] == pytest.approx(ratio * busiest[1], rel=0.05)


@pytest.mark.cases("2-13.0-refuted")
@pytest.mark.parametrize(("nodes", "time_s", "verdict"), [(2, 7.0, "reproduced"), (2, 13.0, "refuted"), (1, 7.0, None)])
def test_tensor_parallelism_is_asked_about_on_two_servers(
    nodes: int, time_s: float, verdict: str | None, tmp_path: Path
) -> None:
    both = {"name": "dp_pp_tp", "stages": 2, "tensor": 4, "micro_batches": 4}
    for strategy, seconds in (("tensor_parallel", 10.0), (both, time_s)):
        timed(tmp_path, seconds, **GPT, nodes=nodes, devices=8, strategy=strategy)
    finding = shipped(tmp_path, "tensor_parallel_stays_within_a_server")
    assert (finding.verdict if finding.cases else None) == verdict


@pytest.mark.cases("full_recomputation_costs_a_third-mpt_1b-1.8-refuted")
@pytest.mark.parametrize(
    ("name", "model", "ratio", "verdict"),
    [
        ("full_recomputation_costs_a_third", "mpt_1b", 1.35, "reproduced"),
        ("full_recomputation_costs_a_third", "mpt_1b", 1.8, "refuted"),
        ("recomputation_costs_a_forward_pass", "resnet50", 1.2, "reproduced"),
        ("recomputation_costs_a_forward_pass", "resnet50", 1.8, "refuted"),
    ],
)
def test_recomputation_is_held_against_what_it_took_them(
    name: str, model: str, ratio: float, verdict: str, tmp_path: Path
) -> None:
    data = "tokens" if model == "mpt_1b" else "cifar10"
    for option, time_s in (("none", 10.0), ("selective", 10.5), ("full", 10.0 * ratio)):
        timed(tmp_path, time_s, model=model, data=data, activation_recomputation=option)
    finding = shipped(tmp_path, name)
    assert (finding.verdict, len(finding.cases)) == (verdict, 1)
