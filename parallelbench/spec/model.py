"""What a model is: a specification that builds a sequence of named layers."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from parallelbench.spec.dataset import Kind  # noqa: TC001 - msgspec reads the annotations
from parallelbench.spec.structure import Component

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.spec.mean_loss import MeanLoss

Split = Literal["column", "row"]
"""How a linear layer is sharded (Shoeybi et al. 2019, arXiv 1909.08053).

column: by outputs; its input is whole, its output a shard. row: by inputs; its input is a shard, its output whole.
An embedding, whose input is a token, is cut as row: by the vocabulary.
"""


class Model(Component, frozen=True, kw_only=True):
    """A model's options. Importing the file loads no torch; `build` does."""

    takes: ClassVar[tuple[Kind, ...]] = ("images",)
    """Kinds of samples that it can be built for."""
    predicts_positions: ClassVar[bool] = False
    """Whether it returns logits at each position of a sample, for data with a label at each."""
    attention: ClassVar[str] = ""
    """Paths of the modules below the model, `*` for any name, that attend by a method `attend` between their linear
    layers: what `activation_recomputation=selective` computes again. Empty: none do."""

    @property
    @abstractmethod
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers in order: the cut points of layer-wise strategies."""

    sizes_follow_values: ClassVar[bool] = False
    """Whether the host needs values of a forward pass for the sizes of tensors: it then waits for a GPU, and a step can
    be neither compiled nor captured."""

    def tensor_plan(self) -> dict[str, Split]:
        """Which linear layers can be sharded, and how: paths below the model, `*` for any name, in the order of use.

        Between a column layer and the row layer after it, values are shards. Empty where there is nothing to shard.
        """
        return {}

    @property
    def tensor_units(self) -> int:
        """Equal parts of the plan's layers: any number of devices that divides it can share them."""
        return 1

    @property
    def tensor_limits(self) -> str:
        """The options that `tensor_units` follow from, for messages; empty: they say themselves."""
        return ""

    @property
    def routed_experts(self) -> int:
        """Experts of each layer that has some, among which tokens are divided; 0: there are none."""
        return 0

    @property
    def routed_blocks(self) -> int:
        """Layers that have such experts, each with an `ExpertTokens` as an attribute `expert_tokens`."""
        return 0

    @property
    def routed_share(self) -> float:
        """Share of the parameters that these experts have."""
        return 0.0

    @property
    def own_loss(self) -> str:
        """The option by which its layers add losses of their own to the run's, for messages; empty: they add none."""
        return ""

    @property
    def without_own_loss(self) -> str:
        """What to choose for none; empty: nothing."""
        return ""

    def with_own_loss(self, mean: MeanLoss) -> MeanLoss:
        """What training minimises, from the run's loss; only where `Strategy.takes_own_loss` is true, if it is more.

        Called once after each forward pass of the whole model. What is added is a mean over the samples, too.
        """
        return mean

    @property
    def token_heads(self) -> tuple[int, int] | None:
        """Heads of queries, and of keys and values, where causal attention alone joins the tokens of a sample, so that
        devices can hold parts of the sequence; None: they can't. The layers are `TokenEmbed` and `CausalAttention` of
        `parallelbench.models.gpt_layers`.
        """
        return None

    @property
    def vocabulary_entries(self) -> int:
        """Size of the vocabulary that `vocabulary_plan` divides; 0: there is none."""
        return 0

    def vocabulary_plan(self) -> dict[str, Split]:
        """Embedding and head, which `strategy.vocabulary_parallel` shards besides; empty where there is no vocabulary.

        The head is the model's last operation, so that logits are shards.
        """
        return {}

    @property
    def sequence_norms(self) -> tuple[str, ...]:
        """Norms of single tokens, which can have parts of a sequence: paths below the model, `*` for any name.

        What only they and residuals compute may be cut by tokens: the values between two layers, (batch, tokens, …).
        What a norm gives goes to column layers of the plan only, but for the last layer's, whose head takes it. Empty
        where samples are no sequences.
        """
        return ()

    @property
    def tied_layers(self) -> tuple[str, ...]:
        """Layers that share parameters with each other, and so must be on one device; empty: none do."""
        return ()

    def check(self, *, in_channels: int, image_size: int) -> None:
        """Raise `ConfigError` with the fix where the model can't take such samples; before anything starts.

        Of vectors, `in_channels` is the number of features and `image_size` 1; of tokens, the size of the vocabulary
        and the number of positions.
        """

    @abstractmethod
    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        """Build the layers, initialised from torch's current seed.

        Returns an `nn.Sequential` whose children are named `layer_names`; it maps images of shape (batch,
        in_channels, image_size, image_size), or what else it `takes`, to logits of shape (batch, num_classes), or with
        `predicts_positions` (batch, positions, num_classes). Every intermediate value between two layers is one tensor
        whose first dimension is the batch.

        Raises `ConfigError` where `check` does.
        """
