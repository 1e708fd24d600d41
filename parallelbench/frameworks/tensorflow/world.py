"""One rank's place in a TensorFlow run: devices, the other ranks, and what a checkpoint holds."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import tensorflow as tf

from parallelbench.errors import ConfigError, count_of
from parallelbench.frameworks.control_group import meet
from parallelbench.world.machine import DeviceMemory, visible_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from parallelbench.config.run import RunConfig


class TensorFlowWorld:
    """One rank's place; `parallelbench.frameworks.RankWorld`."""

    def __init__(self, run: RunConfig, device_type: str) -> None:
        """Configure TensorFlow's devices, and meet the other ranks."""
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank, self.device_type = int(os.environ.get("LOCAL_RANK", "0")), device_type
        self.device_names = _devices(run, device_type, local_rank=self.local_rank, count=run.devices // self.size)
        """TensorFlow's names of the devices that this rank drives."""
        self.distribution: Any = None
        """The `tf.distribute.Strategy`, once it is connected."""
        self.patience: AbstractContextManager[None] = nullcontext()
        """Around what waits for other ranks inside TensorFlow."""
        self._group = meet(self.rank, self.size, timeout_s=run.launcher.collective_timeout_s)

    @property
    def _gpu_names(self) -> list[str]:
        return self.device_names if self.device_type == "cuda" else []

    def gpus(self) -> list[tuple[str, str]]:
        """Name, as CUDA has it, and UUID of each GPU. NVML and TensorFlow count this process's GPUs alike."""
        own = tf.config.get_visible_devices("GPU")
        first = self.local_rank * len(own)
        names = (tf.config.experimental.get_device_details(gpu)["device_name"] for gpu in own)
        return [(name, gpu.uuid) for name, gpu in zip(names, visible_gpus()[first:], strict=False)]

    def reset_peaks(self) -> None:
        for name in self._gpu_names:
            tf.config.experimental.reset_memory_stats(name)

    def peaks(self) -> list[DeviceMemory]:
        """Of each GPU what tensors have held; TensorFlow tells no more."""
        return [DeviceMemory(tf.config.experimental.get_memory_info(name)["peak"]) for name in self._gpu_names]

    def memory_bytes(self) -> list[int | None]:
        """TensorFlow does not say."""
        return [None for _ in self._gpu_names]

    def synchronize(self) -> None:
        """Wait until this rank's devices are idle; on CPUs a call returns when its work is done."""
        if self.device_type == "cuda":
            tf.test.experimental.sync_devices()

    def barrier(self) -> None:
        self._group.total([0.0])

    def total(self, values: Sequence[float]) -> list[float]:
        return self._group.total(values)

    def gather(self, value: Any) -> list[Any]:
        return self._group.gather(value)

    def addresses(self, count: int = 1) -> list[list[str]]:
        """host:port of ports that are free, `count` of this rank's, those of all ranks: where TensorFlow may listen."""
        return self.gather([self._group.address() for _ in range(count)])

    def configure_cluster(self, role: str) -> None:
        """Tell TensorFlow where all ranks are."""
        addresses = [of_rank[0] for of_rank in self.addresses()]
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {role: addresses}, "task": {"type": role, "index": self.rank}})

    def checksum(self, copied: Iterable[NDArray[Any]]) -> int:
        """64 bits of a sha256 of all values."""
        digested = hashlib.sha256()
        for array in copied:
            digested.update(np.ascontiguousarray(array).data.cast("B"))
        return int.from_bytes(digested.digest()[:8], "big")

    def exchange_counter(self) -> Callable[[], int]:
        """TensorFlow does not say."""
        return int

    def random_state(self) -> list[Any]:
        """Nothing: the twins draw no numbers while they train."""
        return []

    def set_random_state(self, states: Any) -> None:
        """Likewise."""

    def write_state(self, state: dict[str, Any], file: BinaryIO) -> None:
        """As npz; of `state` only the replica's arrays."""
        np.savez(file, **state["replica"])

    def read_state(self, path: Path) -> dict[str, Any]:
        with np.load(path) as read:
            return {"replica": {name: read[name] for name in read.files}, "random": []}

    def leave(self) -> None:
        """Leave the other ranks, together: TensorFlow reports a worker that goes first as an error."""
        if self.size > 1:
            self.barrier()
        self._group.close()


def _devices(run: RunConfig, device_type: str, *, local_rank: int, count: int) -> list[str]:
    """Names of this rank's devices; on CPUs logical ones are made, whose threads are the devices' cores."""
    # Beside GPUs as many as `pin` gave this rank; 0: all cores.
    threads = run.cores_per_device * count if device_type == "cpu" else int(os.environ.get("OMP_NUM_THREADS", "0"))
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    if device_type == "cuda":
        found = tf.config.list_physical_devices("GPU")
        here = run.devices // run.nodes
        if len(found) < here:
            raise ConfigError(
                f"TensorFlow finds {count_of(len(found), 'GPU')} where the run has {here}: run `make "
                "venv-tensorflow-gpu`, or choose device=cpu"
            )
        own = found[local_rank * count : (local_rank + 1) * count]
        tf.config.set_visible_devices(own, "GPU")
        for gpu in own:
            tf.config.experimental.set_memory_growth(gpu, True)
        return [f"/gpu:{index}" for index in range(count)]
    tf.config.set_visible_devices([], "GPU")
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    return [f"/cpu:{index}" for index in range(count)]


def entries() -> dict[str, Any]:
    """Its packages, threads, GPUs and precision."""
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    devices = max(1, len(tf.config.list_logical_devices("CPU")))
    build = tf.sysconfig.get_build_info()
    return {
        "packages": {"tensorflow": tf.__version__},
        "threads": threads // devices,
        "tensorflow": {"intra_op_threads": threads, "logical_cpus": devices},
        "cuda": {"version": build["cuda_version"], "cudnn": build["cudnn_version"]} if build["is_cuda_build"] else None,
        "tensor_float_32": tf.config.experimental.tensor_float_32_execution_enabled(),
    }
