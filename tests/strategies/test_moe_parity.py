"""Language models with experts under strategies: their balance loss."""

from __future__ import annotations

import pytest

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
