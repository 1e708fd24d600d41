"""What a rank's start takes of host memory, where layers get their values as they are cut."""

from __future__ import annotations

import tempfile
from pathlib import Path

from launch.sweep import one_run
from parallelbench.training.replica import new_replica
from parallelbench.training.torch_session import new_model
from parallelbench.world.world import World
from tests.bench.measure import Figure
from tests.ranks import run_ranks

RANKS = 2
GOAL = 1.3
MODEL = ("model=gpt", "model.width=1024", "model.heads=16", "model.layers=40", "model.tied=false")
DATA = ("data=tokens", "data.vocabulary=1024", "data.sequence=64", "model.vocabulary=1024", "model.sequence=64")
STRATEGIES = ("fsdp", "tensor_parallel", "pipeline")


def figures() -> list[Figure]:
    """Peak of resident memory above what was there, without one layer, ÷ the rank's share of the parameters."""
    return [_figure(strategy) for strategy in STRATEGIES]


def _figure(strategy: str) -> Figure:
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(_measure, RANKS, Path(folder), strategy)
    whole, layer = found[0][1:]
    values = [(peak - layer) / (whole / RANKS) for peak, *_ in found]
    note = f"gpt of {whole / 1e9:.2f} GB, its largest layer {layer / 1e6:.0f} MB; each rank's"
    return Figure(
        f"{strategy}, 2 ranks: start's peak of host memory, less a layer ÷ share", values, "×", GOAL, False, note
    )


def _measure(rank: int, size: int, strategy: str) -> tuple[int, int, int]:
    """Bytes of the peak, of the whole model, and of its largest layer."""
    run = one_run([*DATA, *MODEL, f"strategy={strategy}", f"devices={size}", "batch_size=8"]).run
    model = new_model(run)
    layers = [sum(each.nbytes for each in layer.parameters()) for layer in model]
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    replica = new_replica(model, run, World(rank=rank, size=size, local_rank=rank))
    peak = _status_bytes("VmHWM") - before
    replica.close()
    return peak, sum(layers), max(layers)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
