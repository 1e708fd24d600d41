"""Steps of the suite's strategies on a machine of round numbers, against what one computes by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from analysis.advisor.machine import TRAINED, KernelRates, Known, RateCurve, Sharding
from analysis.advisor.step import NEUTRAL, UPDATE_HANDLING, Phases, overlapped
from analysis.advisor.strategies import SuiteJob, suite_phases
from launch.sweep import one_run
from launch.sweep.compose import group_choices
from parallelbench.errors import ConfigError
from parallelbench.measure.layer_records import Kernels
from tests.advisor.machine import PLAIN, layer, layers, machine

FLOP, PARAMETERS = 1e6, 250_000
MODEL = ["model=mlp", "model.hidden=[64,64,64]", "data=synthetic", "optimizer=sgd", "optimizer.momentum=0.0"]
MORE_DEVICES = {"hsdp": 4, "dp_pp": 4, "dp_tp": 4, "dp_pp_tp": 8}


def phases(
    *overrides: str, figures: Any = None, scales: dict[str, float] | None = None, **counts: Any
) -> Phases[float]:
    run = one_run([*MODEL, "batch_size=64", *overrides]).run
    of_each = {"product_flop": FLOP, "parameters": PARAMETERS, "tensors": 2, "boundary_bytes": 256.0} | counts
    known = layers(run.model.layer_names, **of_each)
    job = SuiteJob(run=run, layers=known, figures=figures or machine())
    return suite_phases(job, PLAIN | (scales or {})).at(0)


def test_one_device_computes_forward_and_twice_that_backward_but_for_the_first_layers_input() -> None:
    found = phases("strategy=single")
    assert found.compute_s == pytest.approx(64 * FLOP * (4 * 3 - 1) / 1e9)
    assert found.optimizer_s == pytest.approx(4 * PARAMETERS * 12 / 1e9)
    assert (found.communication_s, found.bubble_s) == (0.0, 0.0)


def test_kernels_take_what_the_calibration_says_of_their_shapes() -> None:
    """Four layers: attention at a rate by its keys, and pooling by what it writes."""
    rates = RateCurve((40.0, 400.0), (1e6, 1e8), "measured", "a test")
    slow = RateCurve((1.0,), (1e6,), "measured", "a test")
    known = {"attention": KernelRates(rates, slow), "max_pool": KernelRates(slow, rates)}
    figures = machine(kernels={kind: {"fp32": each} for kind, each in known.items()})
    counted = {"attention": Kernels(operations=1, work=1e6, extent=100.0), "max_pool": Kernels(operations=2, work=40.0)}
    found = phases("strategy=ddp", "devices=2", figures=figures, product_flop=1e6, kernels=counted)
    attention, pools = 32 * (1e6 / 1e8 + 1e6 / 1e6), 32 * (40.0 / 1e6 + 40.0 / rates.at(32 * 20.0))
    assert found.compute_s == pytest.approx(4 * (attention + pools)), "attention is no product"
    both: dict[str, Any] = {"figures": figures, "product_flop": 2e6, "kernels": counted}
    whole = phases("strategy=tensor_parallel", "devices=2", **both)
    shared = phases("strategy=tensor_parallel", "devices=2", **both, shardable_flop=1e5)
    less = 4 * 64 * 0.5 * (1e6 / 1e8 + 1e6 / 1e6) + 64 * 0.5 * 1e5 * 11 / 1e9
    assert whole.compute_s - shared.compute_s == pytest.approx(less), "a tensor group shares what lies inside"


def gpu(kernel_per_s: float, *, step_s: float = 0.0, **figures: Any) -> Any:
    """A GPU whose host takes a millisecond per operation; GELU is computed at this rate, backward in no time."""
    rates = KernelRates(*(RateCurve((1.0,), (each,), "measured", "a test") for each in (kernel_per_s, 1e13)))
    of_host = {"train_launch_s": Known(1e-3, "measured", "a test"), "step_s": Known(step_s, "measured", "a test")}
    return machine(**{"device_type": "cuda", "kernels": {"gelu": {"fp32": rates}}} | of_host | figures)


GELU: dict[str, Any] = {"product_flop": 0.0, "operations": 10, "kernels": {"gelu": Kernels(operations=10, work=1e4)}}
LAUNCHES_S = (4 * 3 - 1) * 10e-3
"""Of 10 operations forward, backward has 20, but for the first layer."""


def hidden(kernels_s: float, launches_s: float) -> float:
    """Time of both beside each other."""
    return float(overlapped(np.array([kernels_s]), np.array([launches_s]), NEUTRAL["launch_overlap"])[0])


@pytest.mark.parametrize("kernel_per_s", [1e9, 1e7, 1e6])
def test_a_gpu_computes_while_its_host_launches_what_follows(kernel_per_s: float) -> None:
    """Forward's kernels may be longer than all launches while backward's take no time: the whole step is compared."""
    found = phases("strategy=single", figures=gpu(kernel_per_s), **GELU)
    assert found.compute_s == pytest.approx(hidden(4 * 64 * 1e4 / kernel_per_s, LAUNCHES_S), rel=1e-6)


def test_what_a_step_takes_of_a_gpus_host_is_hidden_where_kernels_are_long() -> None:
    short, long = (phases("strategy=single", figures=gpu(each, step_s=0.1), **GELU).other_s for each in (1e9, 1e5))
    assert short == pytest.approx(0.1, rel=1e-3)
    assert long < 1e-6
    assert phases("strategy=single", figures=machine(step_s=Known(0.1, "measured", "a test")), **GELU).other_s == 0.0


def test_a_gpus_host_that_nobody_measured_trains_slower_than_it_adds() -> None:
    plain = gpu(1e9, train_launch_s=None, launch_s=Known(1e-3 / TRAINED, "measured", "a test"))
    assert phases("strategy=single", figures=plain, **GELU).compute_s == pytest.approx(LAUNCHES_S, rel=1e-3)


def test_autocast_adds_an_operation_for_each_weight_and_each_products_input() -> None:
    """Two norms keep their four parameters; of three products six are cast, and what goes into them."""
    kernels = {"layer_norm": Kernels(operations=2, work=1e-9)}
    counted: dict[str, Any] = {"product_flop": 0.0, "operations": 5, "tensors": 10, "kernels": kernels}
    both = {"matmul_flops_per_s": {name: RateCurve((1.0,), (1e9,), "site", "a test") for name in ("fp32", "bf16")}}
    single, half = (
        phases("strategy=single", f"precision={each}", figures=gpu(1e9, **both), **counted) for each in ("fp32", "bf16")
    )
    assert single.compute_s == pytest.approx((4 * 3 - 1) * 5e-3, rel=1e-3)
    assert half.compute_s == pytest.approx((4 * 3 - 1) * (5 + 6 + 3) * 1e-3, rel=1e-3)


def test_products_of_odd_sides_take_a_gpu_longer() -> None:
    """And are fitted like others; a tensor group shares what is both."""
    figures = machine(device_type="cuda", unaligned={"fp32": 4.0})
    usual_s, odd = 64 * FLOP * 11 / 1e9, {"unaligned_flop": FLOP / 2}
    assert phases("strategy=single", figures=figures, **odd).compute_s == pytest.approx(2.5 * usual_s)
    twice = phases("strategy=single", figures=figures, scales={"product_scale": 2.0}, **odd)
    assert twice.compute_s == pytest.approx(5.0 * usual_s)
    assert phases("strategy=single", **odd).compute_s == phases("strategy=single").compute_s, "of processors none does"
    both: dict[str, Any] = {"figures": figures, "unaligned_flop": FLOP, "shardable_flop": FLOP}
    shared = phases("strategy=tensor_parallel", "devices=2", **both)
    assert shared.compute_s == pytest.approx(0.5 * 4.0 * usual_s)


@pytest.mark.parametrize("strategy", ["model_parallel", "data_parallel", "parameter_server", "ddp", "pipeline"])
def test_every_strategys_step_takes_its_gpus_host(strategy: str) -> None:
    given: dict[str, Any] = {"figures": gpu(1e13, step_s=0.1), **GELU}
    assert phases(f"strategy={strategy}", "devices=2", **given).other_s == pytest.approx(0.1, rel=1e-3)


def test_a_pipelines_step_is_no_shorter_than_its_slowest_stage_on_gpus() -> None:
    """The first of two stages waits for its kernels, the second for its launches: neither hides the other's."""
    run = one_run([*MODEL, "batch_size=64", "strategy=pipeline", "devices=2", "strategy.micro_batches=8"]).run
    kernels = {"gelu": Kernels(operations=1, work=1e6)}
    first, *others = (layer(name, kernels=kernels, product_flop=1.0, operations=1) for name in run.model.layer_names)
    second = [layer(each.name, kernels={}, product_flop=1.0, operations=10) for each in others]
    job = SuiteJob(run=run, layers=[first, others[0], *second[1:]], figures=gpu(1e7))
    step = suite_phases(job, PLAIN).at(0)
    assert step.step_s > 64 * 2 * 1e6 / 1e7 * 0.99
    assert step.step_s > 8 * 2 * 3 * 10e-3 * 0.99


def test_the_loss_moves_its_logits() -> None:
    """64 samples of 64 logits; the last layer's backward pass is twice its forward pass."""
    more = phases("strategy=single", scales={"loss_bytes": 30.0}).compute_s - phases("strategy=single").compute_s
    assert more == pytest.approx(64 * 64 * 30.0 / 1e9)


def test_kernels_far_from_the_speed_of_products_lose_what_they_move_and_others_what_products_lose() -> None:
    """Measured in bf16 alone, where products are ten times as fast as in fp32; and one of fp32 in bf16."""
    products = {
        name: RateCurve((1.0,), (rate,), "measured", "a test") for name, rate in (("fp32", 1e12), ("bf16", 1e13))
    }
    curve = RateCurve((1.0, 10.0), (1e11, 5e12), "measured", "a test")
    known = {"convolution": {"bf16": KernelRates(curve, curve)}, "grouped": {"fp32": KernelRates(curve, curve)}}
    figures = machine(matmul_flops_per_s=products, kernels=known)
    assert figures.kernel("convolution", "bf16").forward.rates == curve.rates
    assert figures.kernel("convolution", "fp32").backward.rates == (5e10, 1e12)
    assert figures.kernel("grouped", "bf16").forward.rates == (1e12, 5e13)


def test_kernels_of_a_site_without_a_rate_in_fp32_are_as_slow_beside_products() -> None:
    counted = {"attention": Kernels(operations=1, work=1e6, extent=64.0)}
    rates = {"bf16": RateCurve((1.0,), (8e9,), "site", "a test"), "fp32": RateCurve((1.0,), (1e9,), "site", "a test")}
    with_it, without = (
        phases("strategy=single", "precision=bf16", figures=machine(matmul_flops_per_s=each), kernels=counted)
        for each in (rates, {"bf16": rates["bf16"]})
    )
    assert without.compute_s == pytest.approx(with_it.compute_s)


def test_a_layer_of_nothing_but_a_product_writes_nothing_else() -> None:
    bare = phases("strategy=single", output_bytes=1e3, kernels={})
    older = phases("strategy=single", output_bytes=1e3, kernels=None)
    assert bare.compute_s == phases("strategy=single").compute_s < older.compute_s


def test_ddp_sends_what_a_ring_sends_and_hides_what_gamma_says() -> None:
    found = phases("strategy=ddp", "devices=4")
    assert found.compute_s == pytest.approx(16 * FLOP * 11 / 1e9)
    assert found.communication_s == pytest.approx(2 * 3 / 4 * 4e6 / 1e8)  # 4 MB of gradients, nothing hidden
    hidden = phases("strategy=ddp", "devices=4", scales={"overlap": 1000.0})
    assert hidden.communication_s == pytest.approx(0.0, abs=1e-9)  # backward takes 112 ms, sending 60


def test_owners_send_what_they_updated_to_all_others() -> None:
    """ZeRO 1: gradients are reduced as under DDP, and each of two devices broadcasts half of the parameters."""
    reduced = phases("strategy=ddp", "devices=2").communication_s
    assert phases("strategy=zero1", "devices=2").communication_s == pytest.approx(reduced + 4e6 / 1e8)


def test_groups_across_nodes_share_each_nodes_network() -> None:
    found = phases("strategy=ddp", "devices=8", "nodes=2")
    assert found.communication_s == pytest.approx(2 * 7 / 8 * 4e6 / 1e7)


def test_fsdp_gathers_twice_and_scatters_once_or_gathers_once() -> None:
    once = 3 / 4 * 4e6 / 1e8
    assert phases("strategy=fsdp", "devices=4").communication_s == pytest.approx(3 * once)
    kept = phases("strategy=fsdp", "devices=4", "strategy.reshard_after_forward=false")
    assert kept.communication_s == pytest.approx(2 * once)
    assert kept.optimizer_s == pytest.approx(PARAMETERS * 12 / 1e9)  # a quarter of all parameters


def test_fsdp_costs_what_sharding_was_calibrated_to_cost() -> None:
    """Four layers of 1 MB: on as many devices as were calibrated, that very time; it hides behind no computation."""
    message = 3 / 4 * 1e6 / 1e8
    calibrated = Sharding(sizes_bytes=(1e6,), times_s=(0.05,), ranks=4, origin="measured", source="a test")
    sharded = machine(sharding=calibrated)
    scales = {"sharded_overlap": 1000.0, "shard_copies": 7.0}
    whole = phases("strategy=fsdp", "devices=4", figures=sharded)
    assert whole.communication_s == pytest.approx(4 * 0.05)
    hidden = phases("strategy=fsdp", "devices=4", figures=sharded, scales=scales)
    # Computing takes 176 ms, messages 90.
    assert hidden.communication_s == pytest.approx(4 * (0.05 - 3 * message))
    kept = phases("strategy=fsdp", "devices=4", "strategy.reshard_after_forward=false", figures=sharded)
    assert kept.communication_s == pytest.approx(4 * 2 / 3 * 0.05)
    fewer = phases("strategy=fsdp", "devices=2", figures=sharded)
    assert fewer.communication_s == pytest.approx(4 * (0.05 - 3 * message + 3 * 1 / 2 * 1e6 / 1e8))


def test_without_a_calibration_of_sharding_each_gathering_costs_the_host() -> None:
    """Of four layers, three times each."""
    costly, usual = (
        phases("strategy=fsdp", "devices=4", scales={"shard_launch_s": each}).communication_s for each in (1e-3, 0.0)
    )
    assert costly - usual == pytest.approx(4 * 3 * 1e-3)


def test_a_layer_between_those_calibrated_lies_between_them() -> None:
    calibrated = Sharding(sizes_bytes=(1e3, 1e5), times_s=(1e-3, 1e-2), ranks=2, origin="measured", source="a test")
    times_s = calibrated.layers_s(np.array([10.0, 1e3, 1e4, 1e5, 1e7]))
    assert times_s == pytest.approx([1e-3, 1e-3, 10**-2.5, 1e-2, 1.0])


def test_hsdp_reduces_a_shard_between_the_copies() -> None:
    found = phases("strategy=hsdp", "devices=4", "strategy.shard=2")
    assert found.communication_s == pytest.approx(3 * 1 / 2 * 4e6 / 1e8 + 2 * 1 / 2 * 2e6 / 1e8)


def test_tensor_parallelism_shares_products_and_sums_activations() -> None:
    found = phases(
        "strategy=tensor_parallel",
        "devices=2",
        shardable_flop=FLOP,
        shardable_parameters=PARAMETERS,
        exchanged_bytes=1e3,
    )
    assert found.compute_s == pytest.approx(64 * FLOP / 2 * 11 / 1e9)
    assert found.communication_s == pytest.approx(2 * 1 / 2 * 4 * 64 * 1e3 / 1e8)
    assert found.optimizer_s == pytest.approx(2 * PARAMETERS * 12 / 1e9)


def test_shards_cost_the_host_of_a_tensor_group_and_of_an_update() -> None:
    """Four linear layers; an update of plain SGD is three operations for each of two tensors of a layer."""
    cut: dict[str, Any] = {"shardable_flop": FLOP, "exchanges": 1}

    def added(strategy: str) -> tuple[float, float]:
        costly, usual = (
            phases(f"strategy={strategy}", "devices=2", scales={"tensor_launch_s": each}, **cut) for each in (1e-3, 0.0)
        )
        return costly.compute_s - usual.compute_s, costly.optimizer_s - usual.optimizer_s

    updates_s = UPDATE_HANDLING * 3 * 4 * 2 * 1e-3
    assert added("tensor_parallel") == pytest.approx(((4 * 3 - 1) * 1e-3, updates_s))
    assert added("fsdp") == pytest.approx((0.0, updates_s))
    assert added("ddp") == (0.0, 0.0)


def test_each_message_of_a_tensor_group_costs_its_own_time() -> None:
    """Six in each of four layers, of which older results don't say how many they are."""
    words: dict[str, Any] = {"exchanged_bytes": 1e3, "scales": {"message_s": 1e-3}}
    six, older = (phases("strategy=tensor_parallel", "devices=2", **words, exchanges=each) for each in (6, 0))
    moved = 2 * 1 / 2 * 4 * 64 * 1e3 / 1e8
    assert six.communication_s == pytest.approx(moved + 4 * 6 * 1e-3)
    assert older.communication_s == pytest.approx(moved + 4 * 2 * 1e-3)


def test_a_gpipe_of_equal_stages_idles_by_the_formula() -> None:
    """(p−1)/(m+p−1) of the step (Huang et al. 2019), where sends cost nothing."""
    shape = ("strategy=pipeline", "devices=4", "strategy.schedule=gpipe", "strategy.micro_batches=4")
    found = phases(*shape, boundary_bytes=0.0)
    # The first stage has no gradient of its input to compute, so the others' share of idleness is the formula's.
    longest = 64 / 4 * FLOP * 3 / 1e9
    assert found.compute_s == pytest.approx(4 * longest)
    assert found.bubble_s == pytest.approx((4 - 1) * longest - 16 * FLOP / 1e9, rel=0.05)


def test_naive_model_parallelism_is_never_faster_than_one_device() -> None:
    alone = {"alone": 0.5}
    one = phases("strategy=single", scales=alone)
    split = phases("strategy=model_parallel", "devices=4", scales=alone)
    assert split.compute_s + split.bubble_s == pytest.approx(one.compute_s)
    assert split.communication_s == pytest.approx(2 * 3 * 64 * 256 / 1e8)


def test_a_server_takes_every_workers_gradients_and_sends_all_parameters() -> None:
    found = phases("strategy=parameter_server", "devices=3")
    assert found.communication_s == pytest.approx(2 * 2 * 4e6 / 1e8)
    halves = phases("strategy=parameter_server", "devices=4", "strategy.servers=2")
    assert halves.communication_s == pytest.approx(2 * 2 * 2e6 / 1e8)


def test_a_strategys_phases_add_up_to_its_step() -> None:
    found = phases("strategy=fsdp", "devices=4")
    parts = (found.compute_s, found.communication_s, found.bubble_s, found.optimizer_s, found.data_s, found.other_s)
    assert found.step_s == pytest.approx(sum(parts))
    assert found.stretched(2.0).step_s == pytest.approx(2 * found.step_s)


NAMES = group_choices()["strategy"]
WITHOUT_FORMULA = {"sandblaster_lbfgs", "context_parallel", "expert_parallel", "fsdp_cp"}
WITHOUT_FORMULA |= {name for name in NAMES if name.startswith("tf_")}


@pytest.mark.parametrize("strategy", [name for name in NAMES if name not in WITHOUT_FORMULA])
def test_every_strategy_of_torch_has_a_formula(strategy: str) -> None:
    devices = 1 if strategy == "single" else MORE_DEVICES.get(strategy, 4)
    counts: dict[str, Any] = {"shardable_flop": FLOP / 2, "shardable_parameters": 1000, "exchanged_bytes": 10.0}
    assert phases(f"strategy={strategy}", f"devices={devices}", **counts).step_s > 0


def test_what_no_formula_knows_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="no formula knows strategy=tf_single"):
        phases("strategy=tf_single")
    for strategy in ("context_parallel", "fsdp_cp"):
        with pytest.raises(ConfigError, match=f"no formula knows strategy={strategy}"):
            phases(f"strategy={strategy}", "devices=2")
    for options in ((), ("strategy.expert_ranks=2",)):
        with pytest.raises(ConfigError, match="no formula knows strategy=expert_parallel"):
            phases("strategy=expert_parallel", "devices=4", *options)
    with pytest.raises(ConfigError, match="line search"):
        _lbfgs()
    with pytest.raises(ConfigError, match="precision=bf16"):
        phases("strategy=single", "precision=bf16", figures=machine(matmul_flops_per_s={}))


def _lbfgs() -> Phases[float]:
    run = one_run(["model=mlp", "data=synthetic", "optimizer=lbfgs", "strategy=sandblaster_lbfgs", "devices=2"]).run
    job = SuiteJob(run=run, layers=layers(run.model.layer_names), figures=machine())
    return suite_phases(job, PLAIN).at(0)


def test_messages_between_nodes_share_the_network_only_with_those_that_leave_at_once() -> None:
    """Two devices per node, 10⁸ bytes/s within and 10⁷ between."""
    split = phases("strategy=model_parallel", "devices=4", "nodes=2")
    assert split.communication_s == pytest.approx(2 * 64 * 256 * (2 / 1e8 + 1 / 1e7))
    served = phases("strategy=parameter_server", "devices=4", "nodes=2")
    assert served.communication_s == pytest.approx(2 * 4e6 * (1 / 1e8 + 2 / 1e7))
    two = phases("strategy=parameter_server", "devices=4", "nodes=2", "strategy.servers=2")
    assert two.communication_s == pytest.approx(2 * 2e6 * 2 / 1e7 * 2)
