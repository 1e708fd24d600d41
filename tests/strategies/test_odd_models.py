"""Odd models of one's own × strategies: each trains with parity passed, or is refused before training with a fix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import torch
from torch import nn

from launch.sweep import one_run
from parallelbench.config.components import Traits
from parallelbench.config.run import RunConfig
from parallelbench.config.run_rules import check_run
from parallelbench.errors import ConfigError
from parallelbench.training.checks import components
from parallelbench.training.checks.before_training import check_parity
from parallelbench.training.checks.components import _of_steps, check_logits, check_traits, traits_of
from parallelbench.training.checks.parity import as_checked, checks_parity, traits_warnings
from parallelbench.training.torch_session import build_model, draw_apart
from parallelbench.world.settings import changed_settings, configure_torch
from parallelbench.world.world import World
from tests import odd_models
from tests.faults import fault
from tests.odd_models import Misfit, Odd, Oddity, OddLayer, Unfit
from tests.ranks import run_ranks
from tests.strategies.training import loader_of, prepared, shard_loader
from tests.test_closing import closed, failed

DEVICES = {"single": 1, "hsdp": 4, "dp_tp": 4, "dp_pp": 4, "dp_pp_tp": 4}
"""Of other strategies: two."""
MORE = {
    "sandblaster_lbfgs": ["optimizer=lbfgs", "optimizer.lr=1.0", "batch_size=48"],
    "downpour": ["optimizer.momentum=0.0"],
}
DATA = ["data=synthetic", "data.channels=1", "data.image_size=8", "data.train_samples=48", "data.test_samples=13"]
STRATEGIES = (
    *("single", "ddp", "ring_ddp", "zero1", "fsdp", "hsdp", "tensor_parallel", "dp_tp", "model_parallel", "pipeline"),
    *("dp_pp", "dp_pp_tp", "parameter_server", "downpour", "sandblaster_lbfgs"),
)
WAITING = set(STRATEGIES) - {"single", "tensor_parallel"}
LAYERWISE = ("fsdp", "hsdp", "dp_tp", "model_parallel", "pipeline", "dp_pp", "dp_pp_tp")
REFUSED: dict[Oddity, tuple[str, set[str]]] = {
    "tuple_in_training": ("gets tuple from its layer odd in training: return one tensor", set(STRATEGIES)),
    "unused": ("steps leave odd.more without a gradient", WAITING),
    "stochastic_depth": ("steps leave odd.linear.weight, odd.linear.bias without", WAITING),
    "scalar": ("cuts parameters along their first dimension, which odd.more lacks", {"fsdp", "hsdp", "dp_tp"}),
    "complex_parameter": ("odd.more is complex: hold real and", {*STRATEGIES} - {"single", "model_parallel"}),
    "empty": ("can't cut odd.more, which has no values: leave it out", {"fsdp", "hsdp", "dp_tp"}),
    "tied": ("share a parameter", {*LAYERWISE, "tensor_parallel"}),
    "tied_and_said": (" share ", {"model_parallel", "pipeline", "dp_pp", "dp_pp_tp", "tensor_parallel", "dp_tp"}),
}
"""What is said → by which strategies; all other pairs train."""
IN_EVALUATION = {"dropout", "stochastic_depth", "draws_always", "own_generators", "batch_norm"}
"""What is compared in evaluation mode, if only where a batch is cut."""


def odd_run(strategy: str, oddity: Oddity, *more: str) -> RunConfig:
    chosen = ["model=mlp", "batch_size=24", "epochs=1", "optimizer=sgd", "optimizer.lr=0.05", *MORE.get(strategy, [])]
    run = one_run([*DATA, *chosen, f"strategy={strategy}", f"devices={DEVICES.get(strategy, 2)}", *more]).run
    return msgspec.structs.replace(run, model=Odd(name="odd", oddity=oddity))


def asked(run: RunConfig) -> Traits:
    """As before each run's training."""
    check_run(run, "cpu")
    check_logits(run)
    traits = traits_of(run)
    check_traits(run, traits)
    return traits


@pytest.mark.exhaustive
@fault(
    "storage and input",
    "Odd models of one's own",
    injection="dropout, layers left out at random, float64, BatchNorm, frozen layers, unused, scalar, empty, complex "
    "and shared parameters, counters, a tuple in training: under every strategy of torch",
    outcome="each trains with parity passed, in evaluation mode where it draws or where its batches are cut, or is "
    "refused before training with the reason and a fix that works",
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.cases("single", "ddp", "model_parallel", "fsdp")
def test_an_odd_model_trains_like_one_device_or_is_refused(strategy: str, tmp_path: Path) -> None:
    cases: list[tuple[RunConfig, Traits]] = []
    for oddity in get_args(Oddity):
        run = odd_run(strategy, oddity)
        says, by = REFUSED.get(oddity, ("", set()))
        if strategy in by:
            with pytest.raises(ConfigError, match=re.escape(says)) as refusal:
                asked(run)
            for instead in re.findall(r"choose strategy=(\w+)", str(refusal.value)):
                asked(odd_run(instead, oddity))
        else:
            cases.append((run, asked(run)))
    assert torch.get_default_dtype() == torch.float32
    if strategy == "model_parallel":
        placed = "strategy.device_map={inputs: 0, hidden: 1, odd: 1, out: 1}"
        cases.append((run := odd_run(strategy, "tied_and_said", placed), asked(run)))
    processes = DEVICES.get(strategy, 2)
    found = trained(0, 1, cases) if processes == 1 else run_ranks(trained, processes, tmp_path, cases)[0]
    assert found == {run.model.oddity: set() for run, _ in cases}  # type: ignore[attr-defined]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_zero_bubble", None])
@pytest.mark.cases("gpipe", "None")
def test_a_device_may_have_layers_without_parameters_only(schedule: str | None, tmp_path: Path) -> None:
    strategy, words = "model_parallel", ["devices=4", "clip_norm=0.01"]
    if schedule is not None:
        words += [f"strategy.schedule={schedule}", "strategy.stages_per_rank=1", "strategy.micro_batches=4"]
        strategy = "pipeline"
    run = odd_run(strategy, "bare", *words)
    assert run_ranks(trained, 4, tmp_path, [(run, asked(run))])[0] == {"bare": set()}


def trained(rank: int, size: int, cases: list[tuple[RunConfig, Traits]]) -> dict[str, set[str]]:
    """Of each model, what parity and the checks of a short training have found."""
    world, found = World(rank=rank, size=size, local_rank=rank), {}
    for run, traits in cases:
        oddity = run.model.oddity  # type: ignore[attr-defined]
        found[oddity] = failed(closed(world, run, traits=traits))
        if checks_parity(run) and not traits.draws_in_evaluation:
            checked = as_checked(run)
            rows = check_parity(build_model(checked), checked, world, shard_loader, traits=traits)
            found[oddity] |= {f"parity after step {row['step']}" for row in rows or () if not row["passed"]}
    return found


@pytest.mark.exhaustive
def test_what_is_odd_is_found_and_said() -> None:
    traits = {oddity: traits_of(odd_run("single", oddity)) for oddity in get_args(Oddity) if oddity not in REFUSED}
    assert {name for name, found in traits.items() if found.draws} == IN_EVALUATION - {"batch_norm", "stochastic_depth"}
    assert {name for name, found in traits.items() if found.draws_in_evaluation} == {"draws_always"}
    assert {name for name, found in traits.items() if found.mixes_samples} == {"batch_norm"}
    assert traits["counter"].counters == ("odd.buffer",)
    held = ("odd.generators.torch", "odd.generators.python.0", "odd.of_numpy")
    assert traits["own_generators"].generators == held
    plain = Traits()
    assert traits["frozen_first"] == traits["float64_buffer"] == traits["default_dtype"] == plain
    said = {
        name: traits_warnings(odd_run("pipeline", name), traits[name])
        for name in ("dropout", "draws_always", "batch_norm", "counter", "complex_buffer", "frozen_first")
    }
    assert said == {
        "dropout": ["model=odd draws random numbers in training; parity compared it in evaluation mode"],
        "draws_always": [
            "model=odd draws random numbers in training; parity was not checked, as it does so in evaluation, too"
        ],
        "batch_norm": [
            "model=odd mixes the samples of each micro-batch, so training differs from one device; "
            "parity compared it in evaluation mode",
            "odd.num_batches_tracked count micro-batches, so they were not compared with one device's",
        ],
        "counter": ["odd.buffer count micro-batches, so they were not compared with one device's"],
        "complex_buffer": ["odd.buffer of model=odd are complex: they are complex64 in training"],
        "frozen_first": [],
    }
    assert traits_warnings(odd_run("model_parallel", "batch_norm"), traits["batch_norm"]) == []


@pytest.mark.parametrize("oddity", ["dropout", "unused", "frozen_first", "counter", "batch_norm", "tied", "scalar"])
def test_a_large_model_is_asked_without_values(oddity: Oddity, monkeypatch: pytest.MonkeyPatch) -> None:
    run, steps = odd_run("single", oddity), []
    expected = traits_of(run)
    real = _of_steps
    monkeypatch.setattr(components, "_LARGE_TO_TRAIN", 0)
    monkeypatch.setattr(
        components,
        "_of_steps",
        lambda *given, has_values=True, **more: steps.append(has_values) or real(*given, has_values=has_values, **more),
    )
    assert traits_of(run) == expected
    assert steps == [False]


def test_a_generator_that_no_module_holds_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no checkpoint. One that a module holds is, but stands alike on all ranks."""
    elsewhere, forward = torch.Generator(), OddLayer.forward
    held = traits_of(odd_run("ddp", "own_generators"))
    monkeypatch.setattr(
        OddLayer, "forward", lambda self, x: forward(self, x) + torch.rand(x.shape, generator=elsewhere).to(x)
    )
    for strategy, traits, said in (
        ("ddp", held, ["holds generators of its own (odd.generators.torch, "]),
        ("single", held, []),
        ("single", traits_of(odd_run("single", "empty")), ["torch.Generator that none of its modules holds"]),
    ):
        texts = [text for text in traits_warnings(odd_run(strategy, "counter"), traits) if "enerator" in text]
        assert len(texts) == len(said)
        assert all(words in text for words, text in zip(said, texts, strict=True))


def test_what_few_samples_leave_out_is_not_taken_for_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an expert that values choose."""
    monkeypatch.setattr(OddLayer, "forward", lambda self, x: self.linear(x) + (self.more.sum() if len(x) > 8 else 0))
    assert traits_of(odd_run("ddp", "unused")).untouched == ()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "tensor_parallel", "pipeline", "model_parallel"])
@pytest.mark.cases("single", "pipeline")
def test_a_norm_that_a_train_of_its_own_keeps_frozen_is_frozen_in_every_step(strategy: str, tmp_path: Path) -> None:
    """From the first step on, also of a resumed run, and after each evaluation: under every strategy."""
    processes = DEVICES.get(strategy, 2)
    runs = [odd_run(strategy, "frozen_norm"), odd_run(strategy, "frozen_norm_of_the_model")]
    given = [seen_by_norm(0, 1, runs)] if processes == 1 else run_ranks(seen_by_norm, processes, tmp_path, runs)
    assert given[0] == [(0, 0.0, 1.0)] * len(runs)


def seen_by_norm(rank: int, size: int, runs: list[RunConfig]) -> list[tuple[int, float, float]]:
    """Batches that the norm's statistics have seen in two epochs of which each begins as a resumed attempt does."""
    found = []
    for run in runs:
        saved = None
        for epoch in (1, 2):
            replica = prepared(run, rank, size)
            if saved is not None:
                replica.load_local_state(saved)
            loader = loader_of(replica, run)
            for batch in loader.train(epoch):
                replica.step(batch)
            replica.evaluate(loader.test())
            replica.step(next(loader.train(epoch)))
            saved = replica.local_state()
            state = replica.full_state_dict()
        if rank == 0:
            kept = (state[f"odd.{name}"] for name in ("num_batches_tracked", "running_mean", "running_var"))
            counted, mean, var = kept
            found.append((int(counted), float(mean.abs().max()), float(var.max())))
    return found


def test_a_default_type_that_code_has_set_is_not_the_runs() -> None:
    run = odd_run("single", "dropout")
    torch.set_default_dtype(torch.float64)
    configure_torch(run, "cpu")
    assert torch.get_default_dtype() == torch.float32
    assert changed_settings(run, "cpu") == []


def test_a_model_without_anything_to_train_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Odd.build
    monkeypatch.setattr(Odd, "build", lambda self, **given: build(self, **given).requires_grad_(False))
    with pytest.raises(ConfigError, match="has no parameter that needs a gradient: let some keep requires_grad=True"):
        asked(odd_run("single", "counter"))


@pytest.mark.parametrize(
    ("unfit", "remedy"),
    [
        ("lazy", r"odd\.linear is LazyLinear, .* give sizes, as of nn\.Linear\(in_features, out_features\)"),
        ("weight_norm", r"odd\.linear is Linear under .* take torch\.nn\.utils\.parametrizations\.weight_norm"),
        ("generator", r"can't be copied by copy\.deepcopy, and checks train copies: TypeError: cannot pickle"),
        ("not_persistent", r"depends on odd\.mean that .* register_buffer\(name, tensor\), without persistent=False"),
        ("attribute", r"depends on odd\.steps that .* register_buffer\(name, tensor\)"),
        ("tensor", r"depends on odd\.mean that .* register_buffer\(name, tensor\)"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_no_strategy_can_train_is_refused_with_the_remedy(unfit: Unfit, remedy: str) -> None:
    run = msgspec.structs.replace(odd_run("single", "bare"), model=Misfit(name="misfit", unfit=unfit))
    with pytest.raises(ConfigError, match=rf"model=misfit.*{remedy}.* \({odd_models.__file__}:\d+\)"):
        asked(run)


def test_an_output_that_no_gradient_passes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after it trains all the same: only where the last layer detaches, nothing does."""
    run = msgspec.structs.replace(odd_run("single", "bare"), model=Misfit(name="misfit", unfit="detached"))
    assert asked(run).untouched == tuple(f"{layer}.{each}" for layer in LAYERS for each in ("weight", "bias"))
    genuine = Misfit.build

    def ends_detached(model: Misfit, **given: int) -> nn.Sequential:
        built = genuine(model, **given)
        built.out.register_forward_hook(lambda _, given, output: output.detach())
        return built

    monkeypatch.setattr(Misfit, "build", ends_detached)
    with pytest.raises(ConfigError, match=r"detached from all parameters, .*without detach\(\)"):
        asked(run)


LAYERS = ("inputs.linear", "hidden.linear", "odd.linear")


def drawn(rank: int, size: int, run: RunConfig) -> list[float]:
    draw_apart(run, World(rank=rank, size=size, local_rank=rank))
    numbers: list[float] = torch.rand(3).tolist()
    return numbers


@pytest.mark.parametrize(
    ("strategy", "alike"),
    [
        ("ddp", [(0,), (1,)]),
        ("hsdp", [(0,), (1,), (2,), (3,)]),
        ("pipeline", [(0,), (1,)]),
        ("tensor_parallel", [(0, 1)]),
        ("dp_tp", [(0, 1), (2, 3)]),
        ("dp_pp_tp", [(0, 1), (2, 3)]),
    ],
)
def test_ranks_draw_numbers_of_their_own_unless_they_compute_the_same(
    strategy: str, alike: list[tuple[int, ...]]
) -> None:
    run = odd_run(strategy, "dropout")
    numbers = [drawn(rank, run.devices, run) for rank in range(run.devices)]
    assert len({tuple(each) for each in numbers}) == len(alike)
    for group in alike:
        assert all(numbers[rank] == numbers[group[0]] for rank in group)
    assert drawn(0, run.devices, run) == numbers[0]
    assert drawn(0, run.devices, msgspec.structs.replace(run, repeat=1)) != numbers[0]
