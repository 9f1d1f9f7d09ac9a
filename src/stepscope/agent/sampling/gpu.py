"""Samples the GPUs through NVML. Without a driver there are no samples and no error.

It runs in a separate thread: NVML can take seconds to start and may never answer when a GPU falls off the bus. Neither
may keep the rings from being drained.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from stepscope.records import run_clock

__all__ = ["GpuSampler"]

THROTTLE_REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
"""NVML bits for reduced clocks; being idle is not one of them."""
SILENCE_S = 30.0


class GpuSampler:
    """Ask with ``request``; ``collect`` returns what has arrived since."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._asked = threading.Event()
        self._found: queue.SimpleQueue[list[dict[str, Any]]] = queue.SimpleQueue()
        self._asked_s: float | None = None
        threading.Thread(target=self._work, name="gpu samples", daemon=True).start()

    def request(self) -> None:
        if self._asked_s is None:
            self._asked_s = time.monotonic()
            self._asked.set()

    def collect(self) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        while not self._found.empty():
            records += self._found.get()
            self._asked_s = None
        return records

    def silent(self) -> bool:
        """Return whether a request has been pending for too long."""
        return self._asked_s is not None and time.monotonic() - self._asked_s > SILENCE_S

    def _work(self) -> None:
        import pynvml

        try:
            pynvml.nvmlInit()
            handles = [
                (index, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())
            ]
            fixed = {index: _identity(pynvml, handle) for index, handle in handles}
        except pynvml.NVMLError:
            handles, fixed = [], {}
        handles = [(index, handle) for index, handle in handles if _visible(index, fixed[index].get("uuid", ""))]
        while True:
            self._asked.wait()
            self._asked.clear()
            common = {
                "wall_ns": run_clock.wall_ns(),
                "mono_ns": time.perf_counter_ns(),
                "node": self._node,
                "kind": "gpu",
            }
            self._found.put(
                [{**common, "index": index, **fixed[index], **_measure(pynvml, handle)} for index, handle in handles]
            )


def _visible(index: int, uuid: str) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES gives the GPU to the job; a list in an unknown format hides nothing."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return True
    words = [word.strip() for word in listed.split(",") if word.strip()]
    if not all(word.isdecimal() or word.startswith("GPU-") for word in words):
        return True
    return any(word == str(index) or (word.startswith("GPU-") and uuid.startswith(word)) for word in words)


def _identity(nvml: Any, handle: Any) -> dict[str, Any]:
    return _answers(
        nvml,
        lambda: {"uuid": _text(nvml.nvmlDeviceGetUUID(handle))},
        lambda: {"name": _text(nvml.nvmlDeviceGetName(handle))},
    )


def _measure(nvml: Any, handle: Any) -> dict[str, Any]:
    return _answers(
        nvml,
        lambda: _utilization(nvml.nvmlDeviceGetUtilizationRates(handle)),
        lambda: _memory(nvml.nvmlDeviceGetMemoryInfo(handle)),
        lambda: {"temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)},
        lambda: {"power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000},
        lambda: {"power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000},
        lambda: {"sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)},
        lambda: {"mem_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)},
        lambda: {"throttle_reasons": _reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))},
    )


def _answers(nvml: Any, *questions: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Collect the values that this GPU and driver provide; leave out the rest."""
    answers: dict[str, Any] = {}
    for ask in questions:
        try:
            answers |= ask()
        except nvml.NVMLError:
            continue
    return answers


def _utilization(rates: Any) -> dict[str, Any]:
    return {"util_percent": rates.gpu, "mem_util_percent": rates.memory}


def _memory(info: Any) -> dict[str, Any]:
    return {"mem_used": info.used, "mem_total": info.total}


def _reasons(mask: int) -> list[str]:
    return [name for bit, name in THROTTLE_REASONS.items() if mask & bit]


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
