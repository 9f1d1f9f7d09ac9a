"""Samples of the GPUs, by NVML.  No driver, no samples, no error.

In a thread of its own: NVML can take seconds to start and, when a GPU falls off its bus, for ever to answer; neither
may keep the rings from being drained.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["GpuSampler"]

THROTTLE_REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
"""Bits of NVML that mean the clocks are held down; being idle is not one."""
SILENCE_S = 30.0


class GpuSampler:
    """Ask with ``request``; what has come by then is handed out by ``collect``."""

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
        """Asked long ago and not answered."""
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
            common = {"wall_ns": time.time_ns(), "mono_ns": time.perf_counter_ns(), "node": self._node, "kind": "gpu"}
            self._found.put(
                [{**common, "index": index, **fixed[index], **_measure(pynvml, handle)} for index, handle in handles]
            )


def _visible(index: int, uuid: str) -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves the GPU to the job; a list that we do not understand hides nothing."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return True
    words = [word.strip() for word in listed.split(",") if word.strip()]
    if not all(word.isdecimal() or word.startswith("GPU-") for word in words):
        return True
    return any(word == str(index) or (word.startswith("GPU-") and uuid.startswith(word)) for word in words)


def _identity(nvml: Any, handle: Any) -> dict[str, Any]:
    return _readings(nvml, {
        "uuid": lambda: _text(nvml.nvmlDeviceGetUUID(handle)),
        "name": lambda: _text(nvml.nvmlDeviceGetName(handle)),
    })  # fmt: skip


def _measure(nvml: Any, handle: Any) -> dict[str, Any]:
    return _readings(nvml, {
        "util_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "mem_util_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).memory,
        "mem_used": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "mem_total": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "mem_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "throttle_reasons": lambda: _reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
    })  # fmt: skip


def _readings(nvml: Any, questions: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """The answers that this GPU and driver give; the others are left out."""
    answers = {}
    for name, ask in questions.items():
        try:
            answers[name] = ask()
        except nvml.NVMLError:
            continue
    return answers


def _reasons(mask: int) -> list[str]:
    return [name for bit, name in THROTTLE_REASONS.items() if mask & bit]


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
