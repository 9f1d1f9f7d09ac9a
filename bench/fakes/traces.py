"""Small traces for tests, as ``torch.profiler`` would have written them.

Times are microseconds, as in the files; three decimals are nanoseconds.

    made = MadeTrace(rank=1, world_size=2)
    made.step(5, 0, 100)
    made.op("aten::mm", 10, 20)
    made.launched("gemm", at=12, start=30, dur=40)
    trace = made.trace()
"""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

from stepscope.traces.model.columns import Trace
from stepscope.traces.reading.kineto import read_kineto

__all__ = ["MAIN_THREAD", "MadeTrace"]

PID = 4000
MAIN_THREAD = 4000
BACKWARD_THREAD = 4001


class MadeTrace:
    """Grows by calls; every call returns the arguments it has given the event, to be changed at will."""

    def __init__(self, *, rank: int | None = 0, world_size: int = 1, header: dict[str, Any] | None = None) -> None:
        info = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size}}
        self.header: dict[str, Any] = {"schemaVersion": 1, **info, **(header or {})}
        self.events: list[dict[str, Any]] = []
        self._correlations = itertools.count(1)

    def add(self, category: str | None, name: str, start: float, dur: float, **more: Any) -> dict[str, Any]:
        """Any event with a duration; ``pid``, ``tid`` and ``args`` as in the file."""
        event: dict[str, Any] = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": dur}
        event |= {"pid": PID, "tid": MAIN_THREAD, "args": {}} | more
        self.events.append(event)
        args: dict[str, Any] = event["args"]
        return args

    def step(self, number: int, start: float, dur: float) -> dict[str, Any]:
        return self.annotation(f"ProfilerStep#{number}", start, dur)

    def annotation(self, name: str, start: float, dur: float, tid: int = MAIN_THREAD) -> dict[str, Any]:
        return self.add("user_annotation", name, start, dur, tid=tid)

    def op(self, name: str, start: float, dur: float, tid: int = MAIN_THREAD, **args: Any) -> dict[str, Any]:
        return self.add("cpu_op", name, start, dur, tid=tid, args=args)

    def python(self, name: str, start: float, dur: float, tid: int = MAIN_THREAD, **args: Any) -> dict[str, Any]:
        return self.add("python_function", name, start, dur, tid=tid, args=args)

    def runtime(self, name: str, start: float, dur: float, tid: int = MAIN_THREAD, **args: Any) -> dict[str, Any]:
        return self.add("cuda_runtime", name, start, dur, tid=tid, args=args)

    def kernel(
        self,
        name: str,
        start: float,
        dur: float,
        *,
        stream: int = 7,
        device: int = 0,
        category: str = "kernel",
        **args: Any,
    ) -> dict[str, Any]:
        """Device work of its own: nothing launched it, unless ``correlation`` says so."""
        args = {"device": device, "stream": stream, **args}
        return self.add(category, name, start, dur, pid=device, tid=stream, args=args)

    def launched(
        self, name: str, *, at: float, start: float, dur: float, call: float = 1, tid: int = MAIN_THREAD, **more: Any
    ) -> dict[str, Any]:
        """Device work and the call that launched it, ``at`` for ``call``; ``more`` is ``kernel``'s."""
        correlation = next(self._correlations)
        self.runtime("cudaLaunchKernel", at, call, tid=tid, correlation=correlation)
        return self.kernel(name, start, dur, correlation=correlation, **more)

    def memory(
        self, time: float, size: int, allocated: int, reserved: int, device: int = 0, address: int | None = None
    ) -> None:
        args = {"Device Type": 1, "Device Id": device, "Bytes": size, "Total Allocated": allocated}
        args |= {"Total Reserved": reserved} | ({} if address is None else {"Addr": address})
        self.events.append(
            {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "s": "t", "ts": time, "pid": PID}
            | {"tid": MAIN_THREAD, "args": args}
        )

    def forward_backward(self, number: int, start: float, end: float, tid: int = BACKWARD_THREAD) -> None:
        """The arrow from a forward operator to its backward one."""
        arrow = {"cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": PID}
        self.events.append({"ph": "s", "ts": start, "tid": MAIN_THREAD, **arrow})
        self.events.append({"ph": "f", "ts": end, "tid": tid, "bp": "e", **arrow})

    def document(self) -> dict[str, Any]:
        return {**self.header, "traceEvents": self.events, "traceName": "made.json"}

    def text(self) -> bytes:
        return json.dumps(self.document()).encode()

    def write(self, path: Path) -> Path:
        """Packed where the name ends in ``.gz``."""
        path.write_bytes(gzip.compress(self.text()) if path.suffix == ".gz" else self.text())
        return path

    def trace(self) -> Trace:
        return read_kineto([self.text()], "made.json")
