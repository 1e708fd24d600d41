"""Norms and residuals on parts of the sequence: refused where ranks would drop alike."""

from __future__ import annotations

import msgspec
import pytest
from torch import nn

from parallelbench.errors import ConfigError
from parallelbench.models.gpt import Gpt
from parallelbench.training.checks.components import check_traits, traits_of
from tests.strategies.training import small


class Dropping(Gpt, frozen=True, kw_only=True):
    """A model of one's own: GPT with dropout behind its embedding."""

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        model = super().build(in_channels=in_channels, image_size=image_size, num_classes=num_classes)
        first = next(iter(model))
        first.register_forward_hook(lambda layer, _, values: nn.functional.dropout(values, 0.5, layer.training))
        return model


@pytest.mark.cases("tensor_parallel")
@pytest.mark.parametrize("strategy", ["tensor_parallel", "dp_tp", "dp_pp_tp"])
def test_ranks_with_other_tokens_do_not_drop_alike(strategy: str) -> None:
    """Tensor ranks draw the same numbers, as they compute the same values; not so where tokens are divided."""
    devices = {"tensor_parallel": 2, "dp_tp": 4, "dp_pp_tp": 8}[strategy]
    for divided in ("true", "false"):
        run = small(strategy, devices, f"strategy.sequence_parallel={divided}")
        check_traits(run, traits_of(run))
        options = {name: getattr(run.model, name) for name in run.model.__struct_fields__}
        run = msgspec.structs.replace(run, model=Dropping(**options))
        traits = traits_of(run)
        assert traits.draws
        if divided == "false":
            check_traits(run, traits)
        else:
            with pytest.raises(ConfigError, match=r"drop alike.* choose strategy\.sequence_parallel=false"):
                check_traits(run, traits)
