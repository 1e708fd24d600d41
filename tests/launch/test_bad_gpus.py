"""GPUs that no run can use: the attempt ends before a rank starts, in one line, and is not tried again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.attempt import supervisor
from launch.attempt.supervisor import carry_out
from parallelbench.errors import ConfigError
from parallelbench.results.attempt import Outcome
from parallelbench.results.folder import RunFolder
from parallelbench.training import session
from parallelbench.world.machine import Gpu, Machine
from parallelbench.world.world import World
from tests.helpers import configured


def gpu(uuid: str = "a", **changes: Any) -> Gpu:
    return Gpu(**({"name": "A100", "uuid": f"GPU-{uuid}", "memory_bytes": 2**36} | changes))


LOST = gpu(name="unreadable GPU", uuid="", memory_bytes=None, failure="GPU is lost")
BAD: dict[str, tuple[list[Gpu], list[str], str]] = {
    "lost": ([gpu(), LOST], [], "GPU 1 can't be used (GPU is lost): hide it with CUDA_VISIBLE_DEVICES, or ask for"),
    "slices": ([gpu(is_sliced=True), gpu("b")], [], "MIG slices GPU 0: NCCL connects no slices, and their sizes may"),
    "types": ([gpu(), gpu("b", name="H100")], [], "GPUs of several types (A100, H100) would train together, at the"),
    "too few": ([gpu()], [], "devices=2, but this machine has 1 CUDA device: choose devices=1 or fewer, or device=cpu"),
    "interface": ([gpu(), gpu("b")], ["nccl.interface=ib7"], "nccl.interface=ib7 is not on "),
    "interface of the site": (
        [gpu(), gpu("b")],
        ["nodes=2", "devices=4", "site.network_interface=ib7"],
        "site.network_interface=ib7 is not on ",
    ),
}
"""What a node may be like → GPUs, the run's choices, and how the reason begins or goes on."""


@pytest.mark.parametrize("case", BAD)
def test_the_attempt_has_an_outcome_and_is_not_tried_again(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, overrides, words = BAD[case]
    here = Machine(cores=tuple(range(8)), physical_cores=8, gpus=tuple(found), node_cores=8)
    monkeypatch.setattr(supervisor, "this_machine", lambda: here)
    run = configured("strategy=ddp", "devices=2", f"results={tmp_path}", *overrides)
    folder = RunFolder.of(run)
    folder.write_intent(run, [])

    def train(_: Any) -> Outcome:
        raise AssertionError("no rank may start")

    outcome = carry_out(folder, run, device_type="cuda", skip=lambda *_: "", train=train)
    assert isinstance(outcome, Outcome)
    assert (outcome.outcome, outcome.reason.count("\n")) == ("error", 0)
    assert words in outcome.reason
    state = folder.state()
    assert (state.state, state.label, state.to_run) == ("failed", "error", False)


OTHERS = {"A100": None, "H100": "A100 on rank 0; H100 on rank 1"}


@pytest.mark.parametrize("other", OTHERS)
def test_types_that_differ_between_nodes_are_refused_by_all_ranks(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["A100", other]
    for rank in range(2):
        monkeypatch.setattr(World, "gpus", lambda _, name=names[rank]: [(name, "GPU-of-its-own")])

        def gathered(_: World, name: str, rank: int = rank) -> list[str]:
            assert name == names[rank]
            return names

        monkeypatch.setattr(World, "gather", gathered)
        world = World(rank=rank, size=2, device_type="cuda")
        if OTHERS[other] is None:
            session.require_one_type(world)
            continue
        with pytest.raises(ConfigError, match=rf"\({OTHERS[other]}\): choose a type with site\.gpu_type"):
            session.require_one_type(world)
