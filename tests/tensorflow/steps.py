"""Run by TensorFlow's interpreter: the parity check of several attempts in one process, whose start takes long.

Arguments: folders of attempts whose reference was made; those after `--` also train an epoch. Prints one JSON object:
folder → rows of `parity` and the epoch's losses; of parameter servers what was recorded of pushes that are forced to be
stale.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import tensorflow as tf

from parallelbench.config.identity import run_id
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.frameworks.tensorflow import world as world_module
from parallelbench.frameworks.tensorflow.session import TensorFlowSession
from parallelbench.frameworks.tensorflow.world import TensorFlowWorld, _devices
from parallelbench.measure.clock import StartUp
from parallelbench.measure.environment import capture
from parallelbench.measure.memory import MemoryProbe
from parallelbench.results.attempt import Attempt
from parallelbench.results.journal import Journal
from parallelbench.training.exchange import Exchange
from parallelbench.training.loop import device_uuid
from tests.tensorflow.stale import forced

DEVICES = 2


class Quick(TensorFlowSession):
    """A session in a world that several share: TensorFlow's devices are configured once per process."""

    def __init__(self, run: RunConfig, attempt: Attempt, world: TensorFlowWorld) -> None:
        keys = {"run_id": run_id(run), "attempt": attempt.number}
        super(TensorFlowSession, self).__init__(
            run, attempt, journal=Journal(attempt.path / "journal-rank0.jsonl", keys=keys), startup=StartUp(0.0, 0.0)
        )
        self._exchange = Exchange.of(attempt)
        world.device_names = [f"/cpu:{index}" for index in range(run.devices)]
        world.distribution = run.strategy.connect(run, world)  # type: ignore[attr-defined]
        self._join(world)

    def rows(self) -> list[dict[str, Any]]:
        """What the parity check found."""
        arrays = self._run.data.load(Path("unused"))
        self._check_parity(arrays)
        lines = (self._attempt.path / "journal-rank0.jsonl").read_text().splitlines()
        return [entry["row"] for entry in map(json.loads, lines) if entry.get("table") == "parity"]

    def train_further(self, device: str = "cpu") -> list[float]:
        """Losses of the first epoch's steps in the run's own precision, in mean over the batch.

        `device`: as whose the data set is stored. Where TensorFlow has no GPU, it takes the processor for it.
        """
        run, names = self._run, self._world.device_names
        arrays = run.data.load(Path("unused"))
        replica: Any = run.strategy.prepare(self._exchange.read("initial"), run, self._world)  # type: ignore[arg-type]
        with mock.patch.object(self._world, "device_names", [name.replace("cpu", device) for name in names]):
            feed = run.strategy.feed(arrays, run, self._exchange, self._world)  # type: ignore[attr-defined]
        assert {images.dtype.name for images, _ in feed.held} == {"uint8" if device == "cpu" else "float16"}
        losses = [replica.step(batch).tensor()[0] / run.global_batch_size for batch in feed.train(1)]
        self._hand_over(0, self._compared(replica, losses))
        return losses

    def _compared(self, replica: Any, losses: list[float]) -> Any:
        from parallelbench.training.checks.parity import ComparedStep

        return ComparedStep(losses[-1], {}, replica.full_state_dict(), [0.0, 0.0])


def _without_gpu(run: RunConfig) -> str:
    """What a rank says where TensorFlow finds no GPU."""
    try:
        _devices(run, "cuda", local_rank=0, count=1)
    except ConfigError as error:
        return str(error)
    return "found one"


def _on_gpus(run: RunConfig) -> dict[str, Any]:
    """What a node's second rank asks TensorFlow and makes of its answers, where each of two ranks has two GPUs."""
    gpus, calls, peaks = [f"GPU {n}" for n in range(4)], mock.Mock(), {"/gpu:0": 100, "/gpu:1": 200}
    own = gpus[2:]
    uuids = [SimpleNamespace(uuid=f"GPU-{n}") for n in range(4)]
    with (
        mock.patch.dict(os.environ, LOCAL_RANK="1", OMP_NUM_THREADS="3"),
        mock.patch.object(world_module, "visible_gpus", return_value=uuids),
        mock.patch.multiple(
            tf.config,
            list_physical_devices=lambda kind: gpus,
            set_visible_devices=calls.show,
            get_visible_devices=lambda kind: own,
        ),
        mock.patch.multiple(
            tf.config.experimental,
            set_memory_growth=calls.grow,
            get_device_details=lambda gpu: {"device_name": f"A100 of {gpu}"},
            reset_memory_stats=calls.forget,
            get_memory_info=lambda name: {"current": 1, "peak": peaks[name]},
        ),
    ):
        world = TensorFlowWorld(msgspec.structs.replace(run, devices=DEVICES), "cuda")
        probe = MemoryProbe(world)
        probe.start()
        found = probe.stop()
        called = [[name, *arguments] for name, arguments, _ in calls.mock_calls]
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        shown = {"gpus": world.gpus(), "uuids": device_uuid(world)}
        return {**shown, "calls": called, "memory": found, "threads": threads}


def main(folders: list[str], further: list[str]) -> None:
    found: dict[str, Any] = {}
    world: TensorFlowWorld | None = None
    for folder in folders:
        attempt = Attempt(Path(folder))
        run = attempt.config()
        if world is None:
            found["no gpu"], found["gpus"] = _without_gpu(run), _on_gpus(run)
            world = TensorFlowWorld(msgspec.structs.replace(run, devices=DEVICES), "cpu")
        if run.strategy.name == "tf_parameter_server":
            initial = Exchange.of(attempt).read("initial")
            found[folder] = {others: forced(initial, run, world, others=others) for others in (0, 1, 3)}
            continue
        session = Quick(run, attempt, world)
        losses = [session.train_further(device) for device in (("cpu", "gpu") if folder in further else ())]
        found[folder] = {"parity": session.rows(), "losses": losses}
    found["environment"] = capture("tensorflow")
    built = {"is_cuda_build": True, "cuda_version": "12.5", "cudnn_version": "9"}
    with (
        mock.patch.object(tf.sysconfig, "get_build_info", return_value=built),
        mock.patch("parallelbench.measure.environment.output_of", side_effect=lambda command: command[1]),
    ):
        found["of driver"] = capture("tensorflow")["cuda"]
    print(json.dumps(found))


if __name__ == "__main__":
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    attempts = sys.argv[1:]
    main([each for each in attempts if each != "--"], attempts[attempts.index("--") + 1 :])
