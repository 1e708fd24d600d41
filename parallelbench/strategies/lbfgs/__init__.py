"""L-BFGS on sharded vectors: Sandblaster (Dean et al. 2012, NIPS, section 4.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from parallelbench.optim.optimizers import Lbfgs
from parallelbench.strategies.data_parallel import DataParallelStrategy
from parallelbench.strategies.shared_refusals import first_of, two_devices, why_complex, why_untouched

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.config.components import Traits
    from parallelbench.config.replica import Replica
    from parallelbench.config.rule import Rules
    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World


class SandblasterLbfgs(DataParallelStrategy, frozen=True, kw_only=True):
    """L-BFGS on sharded vectors: Sandblaster (Dean et al. 2012, NIPS, section 4.2).

    Every rank evaluates its slice of the whole training set and holds its shard of all of L-BFGS's vectors.

    For one gradient, ranks evaluate their slices, reduce-scatter the gradient, and all-gather the parameters of the
    next point. Gradients, directions and the history stay in shards; only their dot products, sums and largest
    components travel. Unlike in the paper there is no coordinator: every rank runs `torch.optim.LBFGS` on the same
    numbers, and so the same line search. Nor does a slow worker get less to do: every rank has one equal slice.

    A step is one iteration, an epoch has one step, and a loss counts once, at the iteration's start. Samples that can't
    be divided among the ranks are dropped from its batch: other samples in each epoch. Parity is checked in fp64:
    in fp32 a sum in another order may send the line search another way.
    """

    evaluates_repeatedly: ClassVar[bool] = True

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        """Refuses one device, and optimizers of another kind; `Lbfgs` refuses mini-batches."""
        yield from two_devices(run)
        whole = run.data.train_samples - run.data.train_samples % run.devices
        yield (
            not isinstance(run.optimizer, Lbfgs),
            f"strategy={self.name} with optimizer={run.optimizer.name} is refused: the strategy is an optimizer "
            "itself, over the whole training set",
            (f"optimizer=lbfgs batch_size={whole}",),
        )

    def why_not_model(self, run: RunConfig, traits: Traits) -> str:
        """All parameters are one real vector."""
        return first_of(why_untouched(traits), why_complex(traits))

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        from parallelbench.strategies.lbfgs.sandblaster import SandblasterReplica

        assert isinstance(run.optimizer, Lbfgs)
        return SandblasterReplica(model, run.optimizer, run=run, world=world)
