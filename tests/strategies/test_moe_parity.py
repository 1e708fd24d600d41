"""Language models with experts under strategies: their balance loss."""

from __future__ import annotations

import pytest
import torch

from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from tests.strategies.test_parity import OVERRIDES
from tests.strategies.training import TOKENS, configure

pytestmark = pytest.mark.slow

SMALL = ("model=gpt_moe_tiny", "model.layers=2", "model.width=16", "model.sequence=12", "model.vocabulary=24")
EXPERTS = ("model.experts=4", "model.mlp_width=24", "model.balance=0.7")
LLAMA = ("model.positions=rope", "model.mlp=swiglu", "model.kv_heads=2", "model.shared_width=20")


def routed(strategy: str, *options: str) -> RunConfig:
    """On two devices or, where the strategy needs more, on four."""
    for devices in (2, 4):
        chosen = (f"strategy={strategy}", f"devices={devices}", *OVERRIDES.get(strategy, []), *options)
        try:
            return configure(*TOKENS, *SMALL, *EXPERTS, *chosen)
        except ConfigError as error:
            refused = error
    raise refused


def test_the_balance_loss_spreads_tokens() -> None:
    """Without it a router whose weights favour two experts keeps to them."""
    from tests.models.test_gpt_moe import chosen, mixture

    largest = []
    for balance in (0.0, 1.0):
        torch.manual_seed(0)
        moe = mixture(model := chosen(experts=4, balance=balance))
        loss = model.with_own_loss(lambda y, x: (y - x).square().mean())
        optimizer = torch.optim.Adam(moe.router.parameters(), lr=0.01)
        x = torch.randn(16, 12, 16) + 1.0
        with torch.no_grad():
            moe.router.weight[:2] += 0.2
        for _ in range(60):
            largest_share = trained_once(moe, loss, optimizer, x)
        largest.append(largest_share)
    assert largest[0] > 1.5
    assert largest[1] < 1.25


def trained_once(moe: torch.nn.Module, loss: object, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """Largest over mean of the experts' tokens."""
    from parallelbench.models.moe_layers import begin

    begin(collects=True)
    optimizer.zero_grad()
    loss(moe(x), x).backward()  # type: ignore[operator]
    optimizer.step()
    choices = moe.router(x).topk(2, dim=-1).indices  # type: ignore[operator]
    counts = torch.bincount(choices.flatten(), minlength=4)
    return float(counts.max() / counts.double().mean())
