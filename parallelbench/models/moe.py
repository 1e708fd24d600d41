"""Decoder-only transformers whose perceptrons are experts, of which a router picks a few for every token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from parallelbench.config.components import Anatomy, Linears, OwnLoss, RoutedExperts
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.errors import ConfigError
from parallelbench.models.gpt import Gpt

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.config.components import MeanLoss, Split


class GptMoe(Gpt, frozen=True, kw_only=True):
    """`Gpt` with a mixture of experts in each block (Shazeer et al. 2017, arXiv 1701.06538); no token is dropped.

    A linear router and a softmax give each token a probability per expert. The `top_k` most probable experts compute
    it, and their results are added with those probabilities, divided by their sum (Mixtral, arXiv 2401.04088).

    The balance loss is eq. 4 of Switch Transformer (Fedus et al. 2021, arXiv 2101.03961): `balance` × experts ×
    Σ fᵢ · Pᵢ over the experts i, where fᵢ is the share of choices that fell on i and Pᵢ its mean probability: `balance`
    itself where all are equal. It is computed over the tokens of each sample (DeepSeek-V3, arXiv 2412.19437, eqs.
    17-20), and the mean over samples is added to the training loss for each block. So, like the loss itself, it is the
    same however a batch is cut into micro-batches or over ranks. Test losses don't include it.
    """

    experts: Count
    """Perceptrons of a block, each of `mlp_width` hidden units."""
    top_k: Count
    """Experts that compute a token."""
    shared_width: Count | None
    """Hidden units of another expert, which computes all tokens (DeepSeekMoE, arXiv 2401.06066); null: none."""
    balance: Annotated[float, Meta(ge=0)]
    """Coefficient of the balance loss; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.top_k <= self.experts:
            valid = f"model.top_k=2 … {self.experts}" if self.experts > 1 else "model.experts=2 or more, or model=gpt"
            raise ConfigError(
                f"model.top_k={self.top_k} of model.experts={self.experts} is refused: one expert's weight is always "
                f"1, so that the router learns nothing of the loss; choose {valid}"
            )

    def anatomy(self) -> Anatomy:
        """Attention by heads, the shared expert by hidden units; routed experts stay whole.

        No norm has parts of a sequence: what it gives goes to routers and experts, which tensor ranks don't divide.
        """
        gpt = super().anatomy()
        names = ("fc1", "gate", "fc2")
        plan = {path: split for path, split in gpt.linears.plan.items() if path.rpartition(".")[2] not in names}
        limits = self._heads
        if self.shared_width is not None:
            shared: dict[str, Split] = {"fc1": "column", "gate": "column", "fc2": "row"}
            used = [name for name in names if name != "gate" or self.mlp == "swiglu"]
            plan |= {f"block*.moe.shared.{name}": shared[name] for name in used}
            limits += f", model.shared_width={self.shared_width}"
        return gpt._replace(
            linears=Linears(plan, math.gcd(self.key_heads, self.shared_width or 0), limits),
            experts=RoutedExperts(
                each=self.experts,
                blocks=self.layers,
                share=self.layers * self.experts * self.expert_parameters / self.parameters,
            ),
            own_loss=OwnLoss(f"model.balance={self.balance:g}" if self.balance else "", without="model.balance=0"),
            sequence_norms=(),
            sizes_follow_values=True,
        )

    def with_own_loss(self, mean: MeanLoss) -> MeanLoss:
        """Add the blocks' balance losses."""
        from parallelbench.models.moe_layers import with_own_losses

        return with_own_losses(mean) if self.balance else mean

    @property
    def token_weights(self) -> int:
        """Weights of the router, of the experts that compute a token, and of the shared one."""
        matrices = 3 if self.mlp == "swiglu" else 2
        hidden = self.top_k * self.hidden_units + (self.shared_width or 0)
        return self.width * (self.experts + matrices * hidden)

    @property
    def expert_parameters(self) -> int:
        """Of one expert."""
        return self.mlp_parameters(self.hidden_units)

    @property
    def block_mlp_parameters(self) -> int:
        """Of the router, of all experts, and of the shared one."""
        shared = 0 if self.shared_width is None else self.mlp_parameters(self.shared_width)
        return self.experts * (self.width + self.expert_parameters) + shared

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        self.check(in_channels=in_channels, image_size=image_size)
        from parallelbench.models.gpt_layers import new_layers
        from parallelbench.models.modules import sequence
        from parallelbench.models.moe_layers import RoutedBlock

        layers = new_layers(self, lambda block, rotary: RoutedBlock(self, rotary, block=block))
        return sequence(self.layer_names, layers)
