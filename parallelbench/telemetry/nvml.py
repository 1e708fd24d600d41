"""NVML's readings of a run's GPUs. What can't be read is null; the reason is reported once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pynvml

from parallelbench.world.machine import visible_gpus

if TYPE_CHECKING:
    from collections.abc import Callable

Reading = dict[str, Any]

_FOR_GOOD = {
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
}
"""Errors that stay: another call would return the same."""
_GONE = {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED}


def _instant_power_w(handle: Any) -> float:
    (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])
    if value.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(value.nvmlReturn)
    return float(value.value.uiVal / 1000)


def _power_w(handle: Any) -> float:
    return float(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)


WAYS: dict[str, tuple[Callable[[Any], float], ...]] = {
    "energy_j": (lambda gpu: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000,),
    # The instantaneous value first: `nvmlDeviceGetPowerUsage` averages over a second from Ampere on, and on A100 and
    # H100 from samples of a quarter of the time (arXiv 2312.02741).
    "power_w": (_instant_power_w, _power_w),
    "utilization": (lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,),
    "memory_used_bytes": (lambda gpu: int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used),),
    "clock_hz": (lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM) * 1e6,),
    "temperature_c": (
        lambda gpu: float(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)),
        lambda gpu: float(pynvml.nvmlDeviceGetTemperatureV(gpu, pynvml.NVML_TEMPERATURE_GPU)),  # from CUDA 14 on
    ),
    "processes": (
        lambda gpu: len(pynvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu)),
        lambda gpu: len(pynvml.nvmlDeviceGetComputeRunningProcesses_v2(gpu)),  # before driver 510
    ),
    "throttle_reasons": (
        lambda gpu: int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)),
        lambda gpu: int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),  # before driver 535
    ),
}
"""Column of `telemetry` → the ways to read it, the best first; a driver may lack some."""


def opened(count: int, *, warn: Callable[[str, str], None], clock: Callable[[], float] = time.time) -> list[SampledGpu]:
    """The first `count` visible GPUs of this machine, but for those that NVML can't measure.

    `warn` is called with a reason and the GPU.
    """
    found: list[SampledGpu] = []
    try:
        gpus = visible_gpus()[:count]
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        warn(f"NVML can't be used ({error})", "all GPUs")
        return []
    for gpu in gpus:
        if gpu.is_sliced:
            warn("NVML measures whole GPUs, and MIG slices this one", gpu.uuid)
        elif gpu.failure is not None:
            warn(gpu.failure, gpu.uuid or "a GPU")
        else:
            try:
                found.append(SampledGpu(gpu.uuid, pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid), warn, clock))
            except pynvml.NVMLError as error:
                warn(str(error), gpu.uuid)
    return found


class SampledGpu:
    """One GPU, and the ways to read it that still work."""

    def __init__(self, uuid: str, handle: Any, warn: Callable[[str, str], None], clock: Callable[[], float]) -> None:
        self._uuid, self._handle, self._warn, self._clock = uuid, handle, warn, clock
        self._ways = {column: list(ways) for column, ways in WAYS.items()}

    def read(self) -> Reading:
        """All columns. `time` is when the energy counter was read, whose differences count: other calls may be slow."""
        before = self._clock()
        energy_j = self._value("energy_j")
        moment = (before + self._clock()) / 2
        rest = {column: self._value(column) for column in WAYS if column != "energy_j"}
        return {"device_uuid": self._uuid, "time": moment, "energy_j": energy_j, **rest}

    def _value(self, column: str) -> float | None:
        ways = self._ways[column]
        while ways:
            try:
                value = ways[0](self._handle)
            except pynvml.NVMLError as error:
                if error.value in _FOR_GOOD:
                    ways.pop(0)
                if error.value in _GONE:
                    self._forget()
                if error.value not in _FOR_GOOD:
                    self._warn(str(error), self._uuid)
                    return None
                if not ways:
                    self._warn(f"no {column} ({error})", self._uuid)
            else:
                if ways[0] is _power_w:
                    self._warn("power is the driver's average, for lack of an instantaneous one", self._uuid)
                return value
        return None

    def _forget(self) -> None:
        """Stop reading a GPU that fell off the bus: it does not come back, and each call may take long."""
        for ways in self._ways.values():
            ways.clear()
