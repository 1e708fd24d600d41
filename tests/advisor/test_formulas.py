"""Parameters, FLOPs and collectives by formula, beside what torch counts and what others published."""

from __future__ import annotations

import csv
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from analysis.advisor import links, transformer
from analysis.advisor.fit import PARAMETERS, SHEET, values_of
from analysis.advisor.layouts import Layouts, layouts_of
from analysis.advisor.machine import Precision, figures_of, machines_of
from analysis.advisor.step import Values, overlapped, step_phases
from analysis.advisor.step_tables import read_measured, shipped_files
from parallelbench.config.sites import Hardware

SMALL = {
    "hidden": 64,
    "layers": 3,
    "heads": 4,
    "vocabulary": 101,
    "sequence": 16,
    "global_batch": 8,
    "micro_batch": 2,
    "tensor": 1,
    "pipeline": 1,
    "data": 1,
    "recompute": 0,
    "sharded": 0,
    "fused_attention": 0,
    "fp8": 0,
}


def one(**changes: float) -> Layouts:
    return layouts_of(SMALL | changes)


def matrix_flops(layouts: Layouts) -> Values:
    """Forward FLOPs of one layer's products with weights, of one micro-batch, on one device: 24·b·s·h² ÷ t in GPT-2.

    Experts' empty room is included.
    """
    matrices = transformer.attention_matrices(layouts) + layouts.visits * transformer.mlp_matrices(layouts)
    return 2.0 * transformer.tokens(layouts) * matrices / layouts.tensor


def test_parameters_are_exactly_those_that_llm_foundry_counted() -> None:
    """All but two models have learned positions; 30b and 70b too, which are sized like the others."""
    (path,) = shipped_files("llm_foundry")
    with path.open() as file:
        published = [int(row["NumParams"]) for row in csv.DictReader(file)]
    assert transformer.parameters(read_measured(path).layouts).tolist() == published


def test_vtrains_rows_on_one_node_are_sums_of_a_few_times_per_kernel() -> None:
    """To the last digit, which no measured step is: so they say nothing about noise, or about what is not additive."""
    path, several = shipped_files("vtrain")
    steps = read_measured(path)
    layouts, per_micro_batch = steps.layouts, steps.layouts.micro_batches
    assert not layouts.recompute.any()
    across = read_measured(several).layouts
    assert across.recompute.all()
    assert not (across.vocabulary % (128 * across.tensor)).any()
    alike = (layouts.hidden == 2048) & (layouts.tensor == 8) & (layouts.micro_batch == 1)
    deep = layouts.layers[alike]
    terms = np.stack([per_micro_batch[alike] * deep, per_micro_batch[alike], deep, np.ones(len(deep))], axis=1)
    times = np.linalg.lstsq(terms, steps.time_s[alike], rcond=None)[0]
    assert len(deep) == 12
    assert terms @ times == pytest.approx(steps.time_s[alike], rel=1e-9)


def test_flops_are_those_that_torch_counts() -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    width, tokens = 64, 2 * 16
    queries, up, down = (torch.nn.Linear(width, n * width) for n in (3, 4, 1))
    back, out = torch.nn.Linear(4 * width, width), torch.nn.Linear(width, 101, bias=False)
    values = torch.randn(2, 16, width)
    with FlopCounterMode(display=False) as counter:
        q, k, v = queries(values).view(2, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)
        mixed = down(((q @ k.transpose(2, 3)).softmax(-1) @ v).transpose(1, 2).reshape(2, 16, width))
        back(up(mixed))
    layer = matrix_flops(one()) + transformer.attention_flops(one())
    assert counter.get_total_flops() == layer[0]
    with FlopCounterMode(display=False) as counter:
        out(values)
    assert counter.get_total_flops() == transformer.logit_flops(one())[0] == 2 * tokens * width * 101


def test_a_steps_model_flops_are_three_times_the_forwards() -> None:
    layouts = one()
    forward = layouts.layers * (matrix_flops(layouts) + transformer.attention_flops(layouts))
    forward = (forward + transformer.logit_flops(layouts)) * layouts.micro_batches
    assert transformer.model_flops(layouts) == pytest.approx(3 * forward)


def test_idle_tiles_cost_what_full_ones_do() -> None:
    """Of 256 × 128 elements, 108 at a time; small or narrow parts of products leave some idle."""
    full = {"hidden": 256 * 108, "heads": 1, "sequence": 256 * 108, "micro_batch": 1, "global_batch": 1}
    a100, h100 = np.array([108.0]), np.array([132.0])
    assert transformer.tiled_flops(one(**full), a100) == pytest.approx(matrix_flops(one(**full)))
    assert transformer.tiled_flops(one(**full), h100) > matrix_flops(one(**full))
    for narrow in ({"hidden": 1024, "heads": 16}, {"hidden": 8192, "heads": 64, "tensor": 64}):
        layouts = one(**narrow, sequence=1024, micro_batch=1)
        assert transformer.tiled_flops(layouts, a100) > 1.3 * matrix_flops(layouts)


def test_a_tensor_group_shares_the_products() -> None:
    for formula in (matrix_flops, transformer.attention_flops, transformer.logit_flops):
        assert formula(one(tensor=4)) == pytest.approx(formula(one()) / 4)


def tiers(**changes: float) -> links.Links:
    sizes = {"link_bytes_per_s": 300e9, "network_bytes_per_s": 100e9, "link_latency_s": 1e-6, "network_latency_s": 1e-5}
    return links.Links(**{name: np.array([value]) for name, value in (sizes | changes).items()})


def group(size: float, stride: float = 1, devices: float = 64) -> links.Group:
    return links.group_of(*(np.array([float(value)]) for value in (size, stride, 8, devices)))


def test_an_all_reduce_in_a_node_is_the_rings() -> None:
    """2·(n − 1)/n·S/β, and n − 1 turns of latency both ways."""
    time = links.all_reduce_s(np.array([8e9]), group(8, devices=8), tiers())
    assert time == pytest.approx(2 * 7 / 8 * 8e9 / 300e9 + 2 * 7 * 1e-6)


def test_an_all_reduce_between_nodes_is_bound_by_the_network() -> None:
    """A ring over 8 nodes of 8 leaves a node in 7 of its 63 turns."""
    time = links.all_reduce_s(np.array([8e9]), group(64), tiers())
    assert time == pytest.approx(2 * 63 / 64 * 8e9 / 100e9 + 2 * (56 * 1e-6 + 7 * 1e-5))


def test_two_trees_cross_between_two_nodes_once_each_way() -> None:
    time = links.all_reduce_s(np.array([8e9]), group(16, devices=16), tiers())
    assert time == pytest.approx(2 * (8e9 / (0.9 * 2 * 100e9) + 1e-5 + 7 * 1e-6))


def test_small_all_reduces_climb_a_tree_and_gathers_go_round_the_ring() -> None:
    """1 KiB over 128 nodes of 8: log₂ of the nodes and a chain in each, against every device in turn."""
    many, message = group(1024, devices=1024), np.array([1024.0])
    tree = links.all_reduce_s(message, many, tiers())
    assert tree == pytest.approx(2 * (1024 / (0.9 * 100e9) + 7 * 1e-5 + 7 * 1e-6))
    round_s = 127 * 1e-5 + (1024 - 128) * 1e-6
    assert links.gather_s(message, many, tiers()) == pytest.approx(1023 / 1024 * 1024 / 100e9 + round_s)
    gloo = replace(tiers(), trees=False)
    assert links.all_reduce_s(message, many, gloo) == pytest.approx(2 * links.gather_s(message, many, tiers()))


def test_sharded_optimizers_scatter_and_gather_where_copies_all_reduce() -> None:
    """On 1,024 devices a ring's turns cost ZeRO 1 what a tree spares the copies."""
    owned, copied = phases(data=1024, owners=1, global_batch=1024), phases(data=1024, global_batch=1024)
    assert owned["communication_s"] >= copied["communication_s"]
    near = (phases(data=4, owners=1)["communication_s"], phases(data=4)["communication_s"])
    assert near[0] == pytest.approx(near[1])


def test_groups_that_cross_nodes_share_each_nodes_network() -> None:
    """With a tensor group in each node, its 8 data-parallel groups send through the same network at once."""
    apart = group(8, stride=8)
    assert (apart.within.item(), apart.nodes.item(), apart.rings.item()) == (1, 8, 8)
    assert links.slowest_bytes_per_s(apart, tiers()).item() == 100e9 / 8
    assert links.slowest_bytes_per_s(group(16, stride=4), tiers()).item() == 100e9 / 4


@pytest.mark.parametrize(("gamma", "expected"), [(1.0, 7.0), (2.0, 5.0), (200.0, 4.0)])
def test_gamma_says_how_much_is_hidden(gamma: float, expected: float) -> None:
    assert overlapped(np.array([3.0]), np.array([4.0]), gamma) == pytest.approx(expected, rel=0.01)


BIG = {"hidden": 4096, "layers": 32, "heads": 32, "vocabulary": 50_304, "sequence": 2048, "global_batch": 256}


def hardware(network_gbit_per_s: float = 1600.0, power_share: float = 1.0) -> Hardware:
    products = {"half_tflops": 312.0, "tf32_tflops": 156.0, "matmul_tflops": 271.2, "power_share": power_share}
    memory = {"memory_gb_per_s": 2039.0, "memory_gib": 80.0}
    links_of_it = {"link_gb_per_s": 300.0, "network_gbit_per_s": network_gbit_per_s, "oversubscription": 1.0}
    figures: dict[str, Any] = products | memory | links_of_it
    return Hardware(accelerator="a100", devices_per_node=8, source="test", **figures)


def phases(network_gbit_per_s: float = 1600.0, **changes: float) -> dict[str, float]:
    layouts, machines = one(**(BIG | changes)), machines_of([hardware(network_gbit_per_s)])
    found = step_phases(transformer.work_of(layouts, machines), layouts, machines, values_of(SHEET))
    return {"step_s": found.step_s.item()} | {each.name: getattr(found, each.name).item() for each in fields(found)}


@pytest.mark.parametrize(
    ("changes", "busy"),
    [
        ({}, set()),
        ({"tensor": 8}, {"communication_s"}),
        ({"data": 64}, {"communication_s"}),
        ({"data": 64, "sharded": 1}, {"communication_s"}),
        ({"pipeline": 8}, {"bubble_s"}),
        ({"tensor": 4, "pipeline": 4, "data": 4}, {"communication_s", "bubble_s"}),
    ],
)
def test_each_kind_of_parallelism_costs_its_own_phase(changes: dict[str, float], busy: set[str]) -> None:
    found = phases(**changes)
    assert {name for name in ("communication_s", "bubble_s") if found[name] > 1e-9} == busy
    assert found["step_s"] == pytest.approx(sum(value for name, value in found.items() if name != "step_s"))


def test_a_power_limit_slows_products_by_its_third_root_and_nothing_else() -> None:
    whole, limited = (figures_of(hardware(power_share=share)) for share in (1.0, 0.5))
    precisions: tuple[Precision, ...] = ("bf16", "tf32")
    for precision in precisions:
        at = [each.matmul(precision).rates[0] for each in (whole, limited)]  # type: ignore[union-attr]
        assert at[1] / at[0] == pytest.approx(0.5 ** (1 / 3))
    assert limited.memory_bytes_per_s == whole.memory_bytes_per_s
    assert limited.peak_flops_per_s == whole.peak_flops_per_s, "MFU refers to the data sheet"
    machines = machines_of([hardware(), hardware(power_share=0.5)])
    assert machines.flops_per_s[1] / machines.flops_per_s[0] == pytest.approx(0.5 ** (1 / 3))


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "published"), [(1024, 2048, 1024, 0.80), (4096, 8192, 16384, 1.39)]
)
def test_products_in_8_bits_gain_by_size_what_was_measured(
    rows: int, depth: int, columns: int, published: float
) -> None:
    """torchao/float8/README.md, forward and backward on an H100; its roofline takes 78 % and 92 % of the data sheet."""
    flops_per_s, bytes_per_s = 0.78 * 989.4e12, 0.92 * 3.35e12
    prior, _ = PARAMETERS["fp8_speed"]
    assert prior is not None
    half_s = 3 * 2.0 * rows * depth * columns / flops_per_s
    eight_s = half_s / prior.value + transformer.casts(rows, columns, depth) / bytes_per_s
    assert half_s / eight_s == pytest.approx(published, abs=0.03)


def test_what_is_cast_to_8_bits_is_every_layers_matrices() -> None:
    """Of one token and a dense layer of four times the width: inputs and results of four products, 12·h² weights."""
    layouts = one(**(BIG | {"sequence": 1, "global_batch": 1, "micro_batch": 1, "fp8": 1}))
    h = BIG["hidden"]
    elements = 12 * h**2 + (h + 3 * h) + (h + h) + 2 * (h + 4 * h)
    assert transformer.cast_bytes(layouts).item() == pytest.approx(6 * elements / 3)


def test_recomputation_repeats_the_forward_pass() -> None:
    """A layer then takes four passes' time instead of three; what does not pass through layers stays."""
    without, with_it = phases(vocabulary=8), phases(vocabulary=8, recompute=1)
    assert with_it["compute_s"] / without["compute_s"] == pytest.approx(4 / 3, rel=1e-3)
    assert with_it["optimizer_s"] == without["optimizer_s"]


@pytest.mark.parametrize("changes", [{"data": 64}, {"data": 64, "sharded": 1}, {"tensor": 16, "data": 4}])
def test_a_slower_network_costs_only_where_groups_cross_nodes(changes: dict[str, float]) -> None:
    assert phases(100.0, **changes)["step_s"] > 1.02 * phases(1600.0, **changes)["step_s"]
    assert phases(100.0, tensor=8)["step_s"] == phases(1600.0, tensor=8)["step_s"]
