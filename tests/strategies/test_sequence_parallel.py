"""Norms and residuals on parts of the sequence: refused in words where they can't be cut, or would drop alike."""

from __future__ import annotations

import msgspec
import pytest
from torch import nn

from parallelbench.config.build import from_mapping, to_mapping
from parallelbench.config.identity import run_id
from parallelbench.errors import ConfigError
from parallelbench.models.gpt import Gpt
from parallelbench.training.checks.components import check_traits, traits_of
from tests.strategies.test_gpt_parity import small
from tests.strategies.test_vocabulary_parallel import DEVICES, on_least
from tests.strategies.training import configure

BY_TOKENS = "strategy.sequence_parallel=true"


@pytest.mark.parametrize("strategy", DEVICES)
def test_what_cannot_be_cut_is_refused_with_the_fix(strategy: str) -> None:
    fix = r"choose strategy\.sequence_parallel=false"
    with pytest.raises(ConfigError, match=rf"samples of 11 tokens .* 2 tensor ranks: {fix}, or data\.sequence=1"):
        on_least(strategy, BY_TOKENS, "data.sequence=11")
    with pytest.raises(ConfigError, match=rf"never tried.*: {fix}, or compile=false"):
        on_least(strategy, BY_TOKENS, "compile=true")
    devices = f"devices={DEVICES[strategy]}"
    with pytest.raises(ConfigError, match=rf"model=mlp names no norms .*: {fix}$"):
        configure("data=synthetic", "model=mlp", f"strategy={strategy}", devices, BY_TOKENS)
    with pytest.raises(ConfigError, match=r"model=gpt_moe_tiny names no norms"):
        configure("data=tokens", "model=gpt_moe_tiny", "model.balance=0", f"strategy={strategy}", devices, BY_TOKENS)


def test_runs_without_it_keep_their_ids() -> None:
    plain, by_tokens = on_least("dp_tp"), on_least("dp_tp", BY_TOKENS)
    assert "sequence_parallel" not in to_mapping(plain)["strategy"]
    assert run_id(plain) != run_id(by_tokens)
    assert from_mapping(to_mapping(by_tokens)) == by_tokens


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
