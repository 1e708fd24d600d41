"""How evenly tokens fall on experts: as in a loop by hand, and the same however a batch is cut or over ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.measure.count_layers import model_counts
from parallelbench.models.moe_layers import ExpertTokens, MixtureOfExperts, take_expert_tokens
from parallelbench.training.observers import ExpertBalance
from parallelbench.training.torch_session import build_model
from tests.ranks import run_ranks
from tests.strategies.test_parity import OVERRIDES
from tests.strategies.training import TOKENS, configure, plain_epochs, trained

SMALL = ("model=gpt_moe_tiny", "model.layers=2", "model.width=16", "model.sequence=12", "model.vocabulary=24")
EXPERTS = ("model.experts=4", "model.mlp_width=24", "model.balance=0.7")
EPOCHS = ("epochs=2", "optimizer.lr=0.5")


def routed(strategy: str, *options: str) -> RunConfig:
    """On two devices or, where the strategy needs more, on four."""
    for devices in (2, 4):
        chosen = (f"strategy={strategy}", f"devices={devices}", *OVERRIDES.get(strategy, []), *options)
        try:
            return configure(*TOKENS, *SMALL, *EXPERTS, *chosen)
        except ConfigError as error:
            refused = error
    raise refused


def small(*options: str) -> RunConfig:
    return configure(*TOKENS, *SMALL, *EXPERTS, *EPOCHS, *options)


def imbalances(rows: dict[str, list[dict[str, Any]]]) -> list[float | None]:
    """The column of all epochs, which rank 0 writes."""
    return [row["expert_imbalance"] for row in rows["epochs"]]


def by_hand(run: RunConfig) -> list[float]:
    """Each block's choices of a training loop, counted behind its router."""
    model = build_model(run).double()
    counts: list[list[int]] = [[0] * 4, [0] * 4]
    routers = [module.router for module in model.modules() if isinstance(module, MixtureOfExperts)]
    for router, total in zip(routers, counts, strict=True):
        router.register_forward_hook(partial(count_choices, total))
    found = []
    for _ in plain_epochs(model, run, run.model.with_own_loss(run.loss.build())):
        assert [sum(total) for total in counts] == [96 * 12 * 2] * 2, "samples, tokens, experts per token"
        found.append(sum(max(total) / (sum(total) / 4) for total in counts) / 2)
        for total in counts:
            total[:] = [0] * 4
    return found


def count_choices(total: list[int], _: Any, __: Any, logits: Tensor) -> None:
    for index in logits.topk(2, dim=-1).indices.flatten().tolist():
        total[index] += 1


@pytest.mark.slow
def test_an_epochs_imbalance_is_that_of_a_loop_by_hand() -> None:
    """Neither evaluations, nor a step before the first epoch, nor what is computed again count."""
    expected = by_hand(small())
    assert expected[0] != expected[1]
    assert min(expected) > 1.02
    plain = imbalances(trained(0, 1, small())[0])
    assert plain == pytest.approx(expected, rel=1e-12)
    for value in ("full", "selective"):
        assert imbalances(trained(0, 1, small(f"activation_recomputation={value}"))[0]) == plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp", ("strategy.micro_batches=3",)),
        ("expert_parallel", ("strategy.expert_ranks=2",)),
        ("fsdp", ("activation_recomputation=full",)),
        ("dp_tp", ()),
        ("parameter_server", ()),
        ("context_parallel", ("model.balance=0",)),
        ("pipeline", ("model.balance=0", "strategy.micro_batches=4")),
    ],
)
@pytest.mark.cases("expert_parallel*", "dp_tp*", "pipeline*")
def test_it_is_the_same_over_ranks(strategy: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """Whichever ranks have the tokens, and whichever the blocks."""
    run = routed(strategy, *EPOCHS, *options)
    one = imbalances(trained(0, 1, small(*(option for option in options if option.startswith("model."))))[0])
    assert len(one) == 2
    ranks = [imbalances(rows) for rows, _ in run_ranks(trained, run.strategy.processes(run, "cpu"), tmp_path, run)]
    assert ranks[0] == pytest.approx(one, rel=1e-12)
    assert not any(ranks[1:]), "rank 0 writes the rows of epochs"


@pytest.mark.parametrize("passes", [0, 1, 63, 64, 65, 200])
def test_no_pass_is_lost_or_kept(passes: int) -> None:
    tokens = ExpertTokens(0)
    for index in range(passes):
        tokens.note(torch.tensor([index, 1, 0]))
    assert sum(map(len, tokens._held.values())) <= 64
    assert tokens.take() == ([passes * (passes - 1) // 2, passes, 0] if passes else [])
    assert tokens.take() == [], "they are of the passes since the last call"


def test_shapes_without_values_are_not_counted() -> None:
    run = small()
    model = build_model(run)
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    model.to("meta")(tokens.to("meta"))
    model_counts(run)
    assert take_expert_tokens(model) == {}
    model.to_empty(device="cpu")(tokens)
    assert [sum(counts) for counts in take_expert_tokens(model).values()] == [2 * 12 * 2] * 2


def test_evaluations_and_passes_without_gradients_are_not_counted() -> None:
    model, tokens = build_model(small()), torch.zeros(2, 12, dtype=torch.int64)
    model.eval()(tokens)
    with torch.no_grad():
        model.train()(tokens)
    assert take_expert_tokens(model) == {}


def test_models_without_experts_are_not_asked() -> None:
    run = configure(*TOKENS, "model=gpt_tiny", "epochs=1")
    balance = ExpertBalance(None, run)  # type: ignore[arg-type]
    balance.epoch_trained(None)
    assert balance.sums() == []
    assert list(balance.epoch_summed([])) == [("epochs", {"expert_imbalance": None})]
