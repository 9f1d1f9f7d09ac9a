"""Stands in for CUDA where there is none: events, streams and the questions that the device timer asks of torch.

Like the real ones, events must not be touched in a process that was forked from the one that made them: destroying one
there aborts the process, as CUDA's own does (seen on an H200 with torch 2.11).
"""

from __future__ import annotations

import faulthandler
import os
from types import SimpleNamespace
from typing import Any

__all__ = ["Device", "Event"]


class Event:
    """Passes at once; its time is the device's clock at which it was recorded."""

    made = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        type(self).made += 1
        self._pid = os.getpid()
        self._device: Device | None = None
        self.at_ms = 0.0

    def record(self, stream: Device) -> None:
        assert os.getpid() == self._pid
        assert not stream.capturing, "an event was recorded while a graph was captured"
        self._device, self.at_ms = stream, stream.ms

    def query(self) -> bool:
        assert self._device is not None
        assert not self._device.capturing, "an event was asked while a graph was captured"
        return self.at_ms <= self._device.done_ms

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms

    def __del__(self) -> None:
        if os.getpid() != self._pid:
            faulthandler.disable()
            os.abort()


class Device:
    """One device with one stream."""

    def __init__(self) -> None:
        self.ms = 0.0
        """The device's clock: where the stream will be when it has done what was given to it."""
        self.done_ms = float("inf")
        """How far the stream is."""
        self.capturing = False
        self.statistics_read = 0

    def torch(self) -> Any:
        """As much of torch as the timer asks for."""
        return SimpleNamespace(
            cuda=SimpleNamespace(Event=Event, current_stream=lambda index: self),
            _C=SimpleNamespace(
                _CudaEventBase=SimpleNamespace(record=lambda event, stream: event.record(stream)),
                _cuda_getCurrentRawStream=lambda index: 7,
                _cuda_isCurrentStreamCapturing=lambda: self.capturing,
                _cuda_memoryStats=self._statistics,
            ),
        )

    def put_into(self, torch: Any) -> None:
        """Make a real torch, of a build without CUDA, believe that this device is in use."""
        ours, pid = self.torch(), os.getpid()
        for owner, fakes in ((torch.cuda, ours.cuda), (torch._C, ours._C)):
            for name, fake in vars(fakes).items():
                setattr(owner, name, fake)
        torch.cuda.is_initialized = lambda: os.getpid() == pid  # as the real one: not in a forked child
        torch.cuda.current_device = lambda: 0
        torch.cuda.get_device_properties = lambda index: SimpleNamespace(
            name="Stand-in", uuid="none", total_memory=1 << 30
        )

    def _statistics(self, index: int) -> dict[str, Any]:
        self.statistics_read += 1
        return {
            "allocated_bytes": {"all": {"current": 1000, "peak": 3000}},
            "reserved_bytes": {"all": {"current": 4096}},
        }
