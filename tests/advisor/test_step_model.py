"""Phases of a transformer's step against sums by hand: what is repeated, what crosses nodes, what is sent how often."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from analysis.advisor.fit import SHEET, values_of
from analysis.advisor.links import all_reduce_s, chain_crossing, gather_s, group_of
from analysis.advisor.machine import Machines, machines_of
from analysis.advisor.memory import memory_parts
from analysis.advisor.step import Phases, Values, links_of, step_phases
from analysis.advisor.transformer import (
    attention_flops,
    device_parameters,
    elementwise_bytes,
    expert_parameters,
    layer_parameters,
    routed_bytes,
    score_bytes,
    tiled_flops,
    work_of,
)
from tests.advisor.machine import hardware_of
from tests.advisor.test_formulas import matrix_flops, one

LARGE = {"hidden": 2048, "layers": 16, "heads": 16, "vocabulary": 50304, "sequence": 2048, "fused_attention": 1}
H100 = machines_of([hardware_of("h100_80gb")])


PRIORS = values_of(SHEET)


def step(fitted: dict[str, float] | None = None, machines: Machines = H100, **changes: float) -> Phases[Values]:
    layouts = one(**LARGE | changes)
    return step_phases(work_of(layouts, machines), layouts, machines, PRIORS | (fitted or {}))


def test_sharded_stages_of_a_pipeline_are_gathered_and_scattered_once_per_step() -> None:
    """They stay whole between micro-batches, as the formula of memory has it."""
    layout = {"pipeline": 4, "data": 4, "sharded": 1, "micro_batch": 1}
    nothing_hidden = {"sharded_overlap": 1.0, "turn_scale": 1e-30}
    few, many = (step(nothing_hidden, **layout, global_batch=size) for size in (32, 256))
    assert many.communication_s[0] == pytest.approx(few.communication_s[0])
    layouts, links = one(**LARGE | layout), links_of(H100, PRIORS | nothing_hidden)
    group = group_of(np.array([4.0]), np.array([1.0]), H100.devices_per_node, np.array([16.0]))
    assert few.communication_s == pytest.approx(
        2.0 * gather_s(2.0 * device_parameters(layouts), group, links), rel=1e-6
    )
    flat = layout | {"pipeline": 1}
    without = [step(nothing_hidden, **flat, global_batch=size).communication_s[0] for size in (32, 256)]
    assert without[1] == pytest.approx(8.0 * without[0], rel=1e-6)
    # ZeRO 2 gathers once per micro-batch where ZeRO 3 gathers twice.
    kept = step(nothing_hidden, **flat | {"stays_gathered": 1}, global_batch=32).communication_s[0]
    assert kept == pytest.approx(2 / 3 * without[0], rel=1e-6)


def test_a_pipeline_over_two_nodes_crosses_once_and_one_message_leaves_the_node() -> None:
    assert chain_crossing(*(np.array([each]) for each in (16.0, 1.0, 8.0))) == pytest.approx(1 / 15)
    assert chain_crossing(*(np.array([each]) for each in (8.0, 1.0, 8.0))) == 0.0
    assert chain_crossing(*(np.array([each]) for each in (4.0, 8.0, 8.0))) == 1.0
    layout = {"pipeline": 16, "global_batch": 16, "micro_batch": 1}
    one_bit = H100.network_bytes_per_s.copy()
    slow = replace(H100, network_bytes_per_s=one_bit / 1e3)
    fast, slowed = step(**layout), step(machines=slow, **layout)
    message_s = 2.0 * 2048 * 2048 / one_bit[0] * PRIORS["network_scale"]
    # The fill and the drain each pass the one boundary between the nodes.
    extra = (slowed.bubble_s - fast.bubble_s)[0]
    assert 2 * message_s * 990 < extra < 16 * 2 * message_s * 1010


MIXTURE = {"experts": 8, "top_k": 2, "capacity": 1.5, "mlp_width": 8192}


def test_interleaved_stages_wait_for_the_messages_between_them() -> None:
    """They halve the bubble, and send twice as often: where sends are slow, plain 1F1B is faster."""
    layout = {"pipeline": 2, "global_batch": 4, "micro_batch": 1}
    slow = replace(H100, link_bytes_per_s=H100.link_bytes_per_s / 1e3)
    plain, interleaved = (
        [step(machines=each, **layout, chunks=chunks).bubble_s[0] for each in (H100, slow)] for chunks in (1, 2)
    )
    assert interleaved[0] < plain[0]
    assert interleaved[1] > plain[1]


def test_experts_hold_parameters_and_compute_their_room() -> None:
    """By hand: 8 MLPs and a router held, 2 × 1.5 computed; one expert and capacity 1 is the dense model."""
    dense, mixed = one(**LARGE), one(**LARGE | MIXTURE)
    h, w, tokens = 2048.0, 8192.0, 2 * 2048.0
    one_mlp = 2 * h * w + w + h
    assert layer_parameters(mixed) - layer_parameters(dense) == pytest.approx(7 * one_mlp + 8 * h)
    assert matrix_flops(mixed) - matrix_flops(dense) == pytest.approx(2 * tokens * ((3.0 - 1.0) * 2 * h * w + 8 * h))
    cut = one(**LARGE | MIXTURE | {"data": 8, "expert": 4})
    whole = one(**LARGE | MIXTURE | {"data": 8})
    assert device_parameters(whole) - device_parameters(cut) == pytest.approx(16 * 6 * one_mlp)
    state = [memory_parts(each).state[0] for each in (whole, cut)]
    assert state[0] - state[1] == pytest.approx(16.0 * 16 * 6 * one_mlp)
    sharded = one(**LARGE | MIXTURE | {"data": 8, "expert": 4, "sharded": 1})
    everything = device_parameters(one(**LARGE | MIXTURE))
    assert memory_parts(sharded).state == pytest.approx(16.0 * everything / 8)


def test_tokens_travel_to_their_experts_and_back_in_every_pass() -> None:
    """Two all-to-alls per layer, forward, backward, and again where the forward pass is repeated."""
    layout = MIXTURE | {"data": 16, "expert": 16, "experts": 16, "global_batch": 32}
    layouts, links = one(**LARGE | layout), links_of(H100, PRIORS)
    message = 2.0 * 2 * 2048 * 2048 * 3.0
    assert routed_bytes(layouts) == pytest.approx(message)
    # Of 16 equal parts 7 stay in the node, and 8 leave it, from all 8 devices at once.
    once = 7 / 16 * message / links.link_bytes_per_s + 8 * 8 / 16 * message / links.network_bytes_per_s
    once = once + 7 * links.link_latency_s + 8 * links.network_latency_s

    def of_a_micro_batch(**changes: float) -> Values:
        few, more = (step(**layout | changes | {"global_batch": size}).communication_s for size in (32, 64))
        return more - few

    assert of_a_micro_batch() == pytest.approx(2 * once * 2 * 16)
    assert of_a_micro_batch(recompute=1) == pytest.approx(2 * once * 3 * 16)
    assert of_a_micro_batch(expert=1) == pytest.approx(0.0, abs=1e-12)


def test_gradients_of_experts_are_reduced_where_the_same_experts_are() -> None:
    layout = MIXTURE | {"data": 8, "global_batch": 16}
    cut, whole = (step(**layout, expert=each).communication_s[0] for each in (8, 1))
    assert cut < whole
    routed = layout | {"expert": 8}
    per_micro_batch = step(**routed | {"global_batch": 32}).communication_s[0] - cut
    links, held = links_of(H100, PRIORS), one(**LARGE | layout | {"expert": 8})
    group = group_of(np.array([8.0]), np.array([1.0]), H100.devices_per_node, np.array([8.0]))
    shared = device_parameters(held) - expert_parameters(held)
    reduced = all_reduce_s(2.0 * PRIORS["gradient_scale"] * shared, group, links)[0]
    assert cut - per_micro_batch == pytest.approx(reduced)


def test_selective_recomputation_repeats_what_its_memory_does_not_keep() -> None:
    no_host = {"launch_scale": 1e-9}
    kept, selective = (step(no_host, global_batch=1, micro_batch=1, selective=each) for each in (0, 1))
    layouts, fitted = one(**LARGE | {"global_batch": 1, "micro_batch": 1}), PRIORS | no_host
    half = 0.5 * tiled_flops(layouts, H100.multiprocessors) / H100.flops_per_s * fitted["product_scale"]
    moved = elementwise_bytes(layouts) / H100.memory_bytes_per_s * fitted["traffic_scale"]
    repeated = 16 * fitted["eager_slower"] * (half + moved)
    assert selective.compute_s - kept.compute_s == pytest.approx(repeated, rel=1e-6)
    written = [step(no_host, global_batch=1, micro_batch=1, selective=each, fused_attention=0) for each in (0, 1)]
    layouts = one(**LARGE | {"global_batch": 1, "micro_batch": 1, "fused_attention": 0})
    scores = attention_flops(layouts) / H100.flops_per_s * fitted["attention_scale"]
    scores = scores + score_bytes(layouts) / H100.memory_bytes_per_s * fitted["traffic_scale"]
    assert written[1].compute_s - written[0].compute_s == pytest.approx(16 * scores, rel=1e-6)
