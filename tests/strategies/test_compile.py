"""compile=true changes how, not what: each strategy that takes it trains like one device that compiles nothing."""

from __future__ import annotations

import functools
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import msgspec
import pytest
import torch

from parallelbench.config.run import RunConfig
from parallelbench.config.run_rules import check_run
from parallelbench.errors import ConfigError
from parallelbench.optim.optimizers import FirstOrder
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.helpers import configured
from tests.ranks import run_ranks
from tests.strategies.test_context_parallel import SMALL as SMALL_GPT
from tests.strategies.test_context_parallel import TOKENS
from tests.strategies.test_parity import OVERRIDES, assert_equal
from tests.strategies.training import configure, drive, loader_of, one_device, prepared
from tests.test_closing import SMALL, closed, failed, passed, stops_updating

DATA = ["data=synthetic", "data.channels=1", "data.train_samples=96", "data.test_samples=37", "data.image_size=8"]
MLP = [*DATA, "model=mlp", "model.hidden=[24]"]
NORMED = [*DATA, "data.channels=3", "data.image_size=32", "model=resnet_tiny", "model.norm=batch"]
STEP = ["compile=true", "compile_scope=step"]
DEVICES = {
    "ddp": 2,
    "dp_pp_tp": 4,
    "dp_tp": 4,
    "fsdp": 2,
    "fsdp_cp": 2,
    "hsdp": 4,
    "model_parallel": 2,
    "parameter_server": 2,
    "pipeline": 2,
    "ring_ddp": 2,
    "sandblaster_lbfgs": 2,
    "single": 1,
    "tensor_parallel": 2,
    "zero1": 2,
}


GENERATED = "ddp"
"""Whose graphs become C++, which takes most of the time; those of others are traced, and run as they are. One device's
become C++ in `tests/launch/test_runs.py`, where nothing is compared.
"""


def train_compiled(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    """Compile as a session does, then train; how many graphs that was, and how many more the steps were."""
    backend = "inductor" if run.strategy.name == GENERATED else "aot_eager"
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        return _train_compiled(rank, size, run)


def _train_compiled(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    graphs = counters["stats"]
    replica = prepared(run, rank, size)
    replica.compile_warmup(next(loader_of(replica, run).train(epoch=1)))
    first, evaluate = graphs["unique_graphs"], replica.evaluate
    later = first

    def counting(batches: Any) -> Any:
        nonlocal later
        later = graphs["unique_graphs"]
        return evaluate(batches)

    replica.evaluate = counting  # type: ignore[method-assign]
    return {**drive(replica, run), "graphs": first, "later": later - first}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layers", [("learned", "gelu"), ("rope", "swiglu")], ids=["gpt2", "llama"])
def test_a_language_model_is_compiled_whole(layers: tuple[str, str]) -> None:
    run = configure("model=gpt_tiny", "data=tokens", f"model.positions={layers[0]}", f"model.mlp={layers[1]}")
    explained = torch._dynamo.explain(build_model(run))(torch.zeros(2, 64, dtype=torch.int64))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0), explained.break_reasons


@pytest.mark.exhaustive
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("strategy", DEVICES)
@pytest.mark.cases("ddp", "dp_pp_tp")
def test_a_compiled_strategy_trains_like_one_device(strategy: str, tmp_path: Path) -> None:
    """With its loss and its update, where torch can compile these; and nothing is left to compile after the start."""
    own = OVERRIDES.get(strategy, ["optimizer.momentum=0.9"])
    whole = ["compile=true"] if strategy in ("sandblaster_lbfgs", "fsdp_cp") else STEP
    work = (*TOKENS, *SMALL_GPT) if strategy == "fsdp_cp" else MLP
    run = configure(*work, f"strategy={strategy}", f"devices={DEVICES[strategy]}", *whole, *own)
    ranks = run_ranks(train_compiled, run.strategy.processes(run, "cpu"), tmp_path, run)
    assert all(rank["graphs"] for rank in ranks) or strategy == "sandblaster_lbfgs"
    assert any(rank["graphs"] for rank in ranks)
    assert [rank["later"] for rank in ranks] == [0] * len(ranks)
    assert_equal(ranks, one_device(msgspec.structs.replace(run, compile=False)), tolerance=1e-9)


class Compiler:
    """Takes the place of `torch.compile`: notes what it is given, and leaves it as it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[str] = []
        monkeypatch.setattr(torch, "compile", self)

    def __call__(self, part: Any, **options: Any) -> Any:
        self.given.append(getattr(part, "__name__", type(part).__name__))
        return part


@pytest.mark.parametrize("scope", ["model", "step"])
def test_what_is_compiled(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(monkeypatch)
    run = configure(*MLP, "compile=true", f"compile_scope={scope}")
    prepared(run)
    assert compiler.given == (["loss", "step", "Sequential"] if scope == "step" else ["Sequential"])


@pytest.mark.cases("adagrad")
@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_the_steps_that_compile_leave_no_trace(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Compiler(monkeypatch)
    run = configure(*NORMED, f"optimizer={optimizer}", "optimizer.implementation=foreach", "precision=fp32")
    expected = drive(prepared(run), run)
    compiled = msgspec.structs.replace(run, compile=True, compile_scope="step")
    replica = run.strategy.prepare(build_model(run), compiled, World())
    replica.compile_warmup(next(loader_of(replica, run).train(epoch=1)))
    found = drive(replica, run)
    assert found["steps"] == expected["steps"]
    torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)


def test_steps_that_compile_draw_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    Compiler(monkeypatch)
    run = configure(*MLP, *STEP)
    model = build_model(run)
    drawn = []
    model.register_forward_hook(lambda *_: drawn.append(torch.rand(())))  # as dropout does
    replica = run.strategy.prepare(model, run, World())
    before = torch.get_rng_state()
    replica.compile_warmup(next(loader_of(replica, run).train(epoch=1)))
    assert drawn
    assert torch.equal(torch.get_rng_state(), before)


class NAdam(FirstOrder, frozen=True, kw_only=True):
    """A user's optimizer: what it keeps begins at 1, so zeros would not undo the steps that compile."""

    torch_name: ClassVar[str] = "NAdam"

    def options(self) -> dict[str, Any]:
        return {}


def test_an_optimizer_of_a_users_is_compiled_only_if_it_says_so() -> None:
    own = NAdam(name="nadam", lr=0.1, lr_rule="constant", weight_decay=0.0, implementation="auto")
    run = msgspec.structs.replace(configured(*STEP), optimizer=own)
    with pytest.raises(ConfigError, match="torch compiles no step of optimizer=nadam"):
        check_run(run, "cpu")


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_after_training_compiled_steps_are_held_against_plain_code(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    run = configure(*SMALL, "strategy=single", f"optimizer={optimizer}", *STEP)
    rows = closed(World(), run)
    assert not failed(rows)
    assert {"loss", "gradients", "update", "rounding", "evaluation loss"} <= passed(rows)
    assert "update" in failed(closed(World(), run, stops_updating, 0))


def test_on_a_gpu_a_compiled_update_counts_on_the_device_and_is_not_fused() -> None:
    """The host would have to know the number of the step; a fused update is left as it is by torch.compile."""
    run = configured(*STEP)
    parameters = [torch.nn.Parameter(torch.zeros(2, device="meta"))]
    (group,) = run.optimizer.build(parameters, run, "cuda").param_groups
    assert (group["foreach"], group["fused"], group["capturable"]) == (True, None, True)
    (group,) = run.optimizer.build(parameters, run, "cpu").param_groups
    assert (group["foreach"], group["capturable"]) == (True, False)


def test_batches_of_an_evaluation_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ in size: each size would be compiled anew, within the epoch."""
    run = configure(*MLP, *STEP)
    replica = prepared(run)
    monkeypatch.setattr(replica._numerics, "training_loss", None)  # type: ignore[attr-defined]
    sums = replica.evaluate(islice(loader_of(replica, run).test(), 1))
    assert sums is not None
