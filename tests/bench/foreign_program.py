"""The suite's own training of cnn_small, as a program that the suite knows nothing of: `python foreign_program.py`."""

from __future__ import annotations

from itertools import count

from launch.sweep import one_run
from parallelbench.config.dataset_check import checked
from parallelbench.training.replica import new_replica
from parallelbench.training.torch_session import build_loader, build_model
from parallelbench.world.settings import configure_torch
from parallelbench.world.world import join

OVERRIDES = ("model=cnn_small", "data=digits", "batch_size=64", "device=cpu")


def main() -> None:
    """Train without end: whoever measures ends it."""
    run = one_run(OVERRIDES).run
    configure_torch(run, "cpu")
    world = join("cpu", devices=1, timeout_s=300.0)
    world.wake()
    replica = new_replica(build_model(run), run, world)
    loader = build_loader(checked(run.data, run.data.load(run.site.data_folder)), run, world, replica.data_shard)
    for epoch in count(1):
        for batch in loader.train(epoch):
            replica.step(batch)


if __name__ == "__main__":
    main()
