"""Databases for tests, as ``nsys export --type sqlite`` would have written them.

Nsight Systems cannot run here: the tables and columns are those of its documented schema, in two generations.
``OLD`` is about that of 2021: no ``graphId``, ``greenContextId`` or ``eventSyncId``, no table of CUDA events, payloads
as JSON text.  ``NEW`` is that of 2024 and later, with payloads of NCCL as bytes.  Times are nanoseconds, as in the
files.

    made = MadeReport(NEW)
    made.nvtx("step 1", 0, 100_000)
    made.launched("gemm", at=1000, start=5000, end=9000)
    made.write(tmp_path / "report.sqlite")
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import struct
from pathlib import Path
from typing import Any, Final

__all__ = ["NEW", "OLD", "MadeReport", "packed"]

OLD, NEW = "old", "new"
ACTIVITY: Final = ("start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid")
KERNEL: Final = (
    *ACTIVITY, "demangledName", "shortName", "mangledName", "registersPerThread", "gridX", "gridY", "gridZ", "blockX",
    "blockY", "blockZ", "staticSharedMemory", "dynamicSharedMemory", "gridId", "graphNodeId",
)  # fmt: skip
TABLES: Final[dict[str, tuple[str, ...]]] = {
    "CUPTI_ACTIVITY_KIND_KERNEL": KERNEL,
    "CUPTI_ACTIVITY_KIND_MEMCPY": (*ACTIVITY, "bytes", "copyKind", "srcKind", "dstKind", "graphNodeId"),
    "CUPTI_ACTIVITY_KIND_MEMSET": (*ACTIVITY, "value", "bytes", "graphNodeId", "memKind"),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (*ACTIVITY, "syncType", "eventId"),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (*ACTIVITY, "graphId", "graphExecId"),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        *("start", "end", "eventClass", "globalTid", "correlationId", "nameId", "returnValue", "callchainId"),
    ),
    "NVTX_EVENTS": (
        *("start", "end", "eventType", "rangeId", "category", "color", "text", "globalTid", "endGlobalTid", "textId"),
        *("domainId", "uint64Value", "int64Value", "doubleValue", "uint32Value", "int32Value", "floatValue"),
        *("jsonTextId", "jsonText"),
    ),
    "TARGET_INFO_GPU": ("vmId", "id", "name", "busLocation", "totalMemory", "clockRate", "smCount", "uuid"),
    "TARGET_INFO_SESSION_START_TIME": ("utcEpochNs", "utcTime", "localTime"),
    "TARGET_INFO_SYSTEM_ENV": ("globalVid", "devStateName", "name", "nameEnum", "value"),
    "ThreadNames": ("nameId", "priority", "globalTid"),
}
NEWER: Final[dict[str, tuple[str, ...]]] = {
    "CUPTI_ACTIVITY_KIND_KERNEL": ("greenContextId", "launchType", "graphId"),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": ("greenContextId", "eventSyncId"),
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": (
        *("timestamp", "deviceId", "contextId", "greenContextId", "streamId", "correlationId", "globalPid", "eventId"),
        "eventSyncId",
    ),
    "NVTX_EVENTS": ("binaryData",),
    "NVTX_PAYLOAD_SCHEMA_ENTRIES": (
        *("domainId", "schemaId", "idx", "flags", "type", "name", "description", "arrayOrUnionDetail", "offset"),
    ),
    "TARGET_INFO_GPU": ("cuDevice", "threadsPerWarp", "maxWarpsPerSm", "computeMajor", "computeMinor"),
    "TARGET_INFO_CUDA_DEVICE": ("gpuId", "cudaId", "pid", "uuid", "numMultiprocessors"),
    "MPI_RANKS": ("globalTid", "rank"),
}
COLLECTIVE_SCHEMA, INIT_SCHEMA = 100, 101
PUSH_POP: Final = 59


def packed(pid: int, tid: int = 0) -> int:
    """A process and a thread as one number."""
    return 1 << 48 | pid << 24 | tid


class MadeReport:
    """Grows by calls; tables that nobody wrote into are not there, as in the real ones."""

    def __init__(self, generation: str = NEW, *, pid: int = 4000, origin_ns: int = 0) -> None:
        self.generation = generation
        self.pid = pid
        """Of the calls from now on."""
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.strings: dict[str, int] = {}
        self._correlations = itertools.count(1)
        self.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=origin_ns)

    def columns(self, table: str) -> tuple[str, ...]:
        newer = NEWER.get(table, ()) if self.generation == NEW else ()
        return (*TABLES.get(table, ()), *newer)

    def add(self, table: str, **values: Any) -> None:
        """A row; what this generation has no column for is left out."""
        columns = self.columns(table)
        if columns:
            self.rows.setdefault(table, []).append({name: values[name] for name in columns if name in values})

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def gpu(self, number: int = 0, name: str = "NVIDIA H100", sm_count: int = 100, **more: Any) -> None:
        facts = {"vmId": packed(0), "totalMemory": 80 << 30, "threadsPerWarp": 32, "computeMajor": 9, "computeMinor": 0}
        self.add("TARGET_INFO_GPU", id=number, cuDevice=number, name=name, smCount=sm_count, **facts | more)

    def runtime(self, name: str, start: int, end: int, *, tid: int = 4000, correlation: int | None = None) -> int:
        correlation = next(self._correlations) if correlation is None else correlation
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=start,
            end=end,
            globalTid=packed(self.pid, tid),
            correlationId=correlation,
            nameId=self.string(name),
            returnValue=0,
            eventClass=0,
        )
        return correlation

    def kernel(self, name: str, start: int, end: int, *, correlation: int = 0, **more: Any) -> None:
        names = {"demangledName": self.string(name), "shortName": self.string(name.partition("<")[0])}
        grid = dict.fromkeys(("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"), 1)
        self.add("CUPTI_ACTIVITY_KIND_KERNEL", **self._activity(start, end, correlation) | names | grid | more)

    def launched(
        self, name: str, *, at: int, start: int, end: int, call: str = "cudaLaunchKernel_v7000", **more: Any
    ) -> None:
        tid = more.pop("tid", 4000)
        self.kernel(name, start, end, correlation=self.runtime(call, at, at + 1000, tid=tid), **more)

    def memcpy(
        self, start: int, end: int, *, size: int, kind: int = 1, source: int = 0, to: int = 2, **more: Any
    ) -> None:
        kinds = {"bytes": size, "copyKind": kind, "srcKind": source, "dstKind": to}
        self.add("CUPTI_ACTIVITY_KIND_MEMCPY", **self._activity(start, end, 0) | kinds | more)

    def memset(self, start: int, end: int, *, size: int, **more: Any) -> None:
        about = {"bytes": size, "value": 0, "memKind": 2}
        self.add("CUPTI_ACTIVITY_KIND_MEMSET", **self._activity(start, end, 0) | about | more)

    def graph(self, number: int, start: int, end: int, *, correlation: int = 0) -> None:
        about = {"graphId": number, "graphExecId": number}
        self.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", **self._activity(start, end, correlation) | about)

    def wait(self, kind: int, start: int, end: int, *, correlation: int, event: int = 0, **more: Any) -> None:
        about = {"syncType": kind, "eventId": event}
        self.add("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", **self._activity(start, end, correlation) | about | more)

    def event(self, event: int, *, correlation: int, stream: int = 7, **more: Any) -> None:
        """The record of an event, which the new generation has."""
        about = {"eventId": event, "streamId": stream, "correlationId": correlation, "globalPid": packed(self.pid)}
        self.add("CUPTI_ACTIVITY_KIND_CUDA_EVENT", deviceId=0, contextId=1, **about | more)

    def nvtx(self, text: str, start: int, end: int | None, *, tid: int = 4000, **more: Any) -> None:
        """A range, by its text, or as a registered string (``registered=True``)."""
        named: dict[str, Any] = {"textId": self.string(text)} if more.pop("registered", False) else {"text": text}
        about = {"eventType": PUSH_POP, "globalTid": packed(self.pid, tid), "domainId": 0}
        self.add("NVTX_EVENTS", start=start, end=end, **named | about | more)

    def nccl(self, call: str, start: int, end: int, *, communicator: int, size: int, tid: int = 4000) -> None:
        """A call of NCCL with what it says of itself."""
        if self.generation == OLD:
            text = f'{{"NCCL communicator ID": {communicator}, "Message size [bytes]": {size}}}'
            self.nvtx(call, start, end, tid=tid, jsonText=text, registered=True)
            return
        self._schema(COLLECTIVE_SCHEMA, ("NCCL communicator ID", 18, None), ("Message size [bytes]", 22, 8))
        payload = struct.pack("<QQ", communicator, size)
        self.nvtx(call, start, end, tid=tid, binaryData=_blob(COLLECTIVE_SCHEMA, payload), registered=True)

    def nccl_init(self, *, communicator: int, rank: int, ranks: int, start: int = 0, end: int = 10) -> None:
        if self.generation == OLD:
            text = f'{{"NCCL communicator ID": {communicator}, "No. of ranks": {ranks}, "Rank": {rank}}}'
            self.nvtx("ncclCommInitRank", start, end, jsonTextId=self.string(text))
            return
        self._schema(INIT_SCHEMA, ("NCCL communicator ID", 18, 0), ("No. of ranks", 5, 8), ("Rank", 5, 12))
        payload = struct.pack("<Qii", communicator, ranks, rank)
        self.nvtx("ncclCommInitRank", start, end, binaryData=_blob(INIT_SCHEMA, payload))

    def write(self, path: Path) -> Path:
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            database.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
            named = [(number, text) for text, number in self.strings.items()]
            database.executemany("INSERT INTO StringIds VALUES (?, ?)", named)
            for table, rows in self.rows.items():
                columns = self.columns(table)
                database.execute(f"CREATE TABLE {table} ({', '.join(map(_declared, columns))})")
                places = ", ".join("?" * len(columns))
                values = [tuple(row.get(name) for name in columns) for row in rows]
                database.executemany(f"INSERT INTO {table} VALUES ({places})", values)
        return path

    def _activity(self, start: int, end: int, correlation: int) -> dict[str, Any]:
        where = {"deviceId": 0, "contextId": 1, "streamId": 7, "globalPid": packed(self.pid)}
        return {"start": start, "end": end, "correlationId": correlation, **where}

    def _schema(self, number: int, *entries: tuple[str, int, int | None]) -> None:
        table = "NVTX_PAYLOAD_SCHEMA_ENTRIES"
        if not any(row["schemaId"] == number for row in self.rows.get(table, ())):
            for index, (name, kind, offset) in enumerate(entries):
                self.add(table, domainId=1, schemaId=number, idx=index, type=kind, name=name, offset=offset)


def _declared(column: str) -> str:
    texts = ("text", "name", "value", "jsonText", "uuid", "utcTime", "localTime")
    kind = "BLOB" if column == "binaryData" else "TEXT" if column in texts else "INTEGER"
    return f'"{column}" {kind}'


def _blob(schema: int, payload: bytes) -> bytes:
    return struct.pack("<IIIIQQ", 1, 0, schema, 0, len(payload), 32 + len(payload)) + payload
