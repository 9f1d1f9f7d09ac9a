"""Kineto's JSON, as ``torch.profiler`` exports it → columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from stepscope.traces.builder import TraceBuilder
from stepscope.traces.categories import DEVICE_KINDS, Kind, kind_of
from stepscope.traces.columns import Ints, Trace, TraceMeta
from stepscope.traces.kineto_events import Event, ExactEvent
from stepscope.traces.text import EventText

__all__ = ["read_kineto"]

NEEDS_EXACT = re.compile(rb'"ts"\s*:\s*\d{14,}\.\d')
"""More than a double can tell apart to the nanosecond."""
ON_DEVICE = frozenset(int(kind) for kind in DEVICE_KINDS)
NO_STREAM = 2**31 - 1
"""CUPTI writes 2³² − 1 where it means none, or all."""
MAX_DEVICE = 1024
MAX_ADDRESS = 2**63 - 1
SIZED = (int(Kind.MEMCPY), int(Kind.MEMSET))


def read_kineto(blocks: Iterable[bytes], path: str) -> Trace:
    """``blocks``: the text, inflated; ``path``: for messages."""
    reader = _Reader()
    text = EventText(blocks, reader.decode)
    for events in text:
        reader.add(events)
    reader.finish()
    return reader.builder.build(_meta(text, path, reader))


class _Reader:
    def __init__(self) -> None:
        self.builder = TraceBuilder()
        self.read_events = 0
        self.skipped = 0
        self.negative = 0
        self.kinds: dict[str | None, int] = {}
        self.flows: dict[Any, tuple[int, int]] = {}
        self._exact = False
        self._asked = False
        self._plain = msgspec.json.Decoder(list[Event])
        self._precise = msgspec.json.Decoder(list[ExactEvent])
        self._each = msgspec.json.Decoder(list[msgspec.Raw])

    def decode(self, text: bytes) -> list[Any]:
        if not self._asked:
            self._exact = NEEDS_EXACT.search(text) is not None
            self._asked = True
        decoder: Any = self._precise if self._exact else self._plain
        try:
            return decoder.decode(text)  # type: ignore[no-any-return]
        except msgspec.ValidationError:
            return self._one_by_one(text)

    def _one_by_one(self, text: bytes) -> list[Any]:
        """Some event has a field of another type than it should: leave out that one only."""
        one: Any = msgspec.json.Decoder(ExactEvent if self._exact else Event)
        out = []
        for raw in self._each.decode(text):
            try:
                out.append(one.decode(raw))
            except msgspec.ValidationError:
                self.skipped += 1
        return out

    def add(self, events: Sequence[Any]) -> None:
        self.read_events += len(events)
        slices, rest = [], []
        for event in events:
            if event.ph == "X":
                slices.append(event)
            elif event.ph in "iMsf":
                rest.append(event)
        if slices:
            self._slices(slices)
        self._others(rest)

    def _time_ns(self, events: Sequence[Any]) -> Ints:
        if self._exact:
            return np.array([_exact_ns(bytes(event.ts)) for event in events], np.int64)
        return _from_us(np.array([event.ts for event in events], np.float64))

    def _slices(self, events: list[Any]) -> None:
        builder, strings, threads = self.builder, self.builder.strings, self.builder.threads
        kinds = self.kinds
        try:
            kind = [kinds[event.cat] for event in events]
        except KeyError:
            for event in events:
                if event.cat not in kinds:
                    kinds[event.cat] = int(kind_of(event.cat))
            kind = [kinds[event.cat] for event in events]
        dur = np.array([event.dur for event in events], np.float64)
        self.negative += int((dur < 0).sum())
        base = builder.count
        builder.add(
            "slices",
            start_ns=self._time_ns(events),
            dur_ns=_from_us(np.maximum(np.nan_to_num(dur), 0.0)),
            kind=kind,
            name=[strings[event.name] for event in events],
            thread=[threads[event.pid, event.tid] for event in events],
            device=[_device(e) if k in ON_DEVICE else -1 for e, k in zip(events, kind, strict=True)],
            stream=[_stream(e) if k in ON_DEVICE else -1 for e, k in zip(events, kind, strict=True)],
            correlation=[event.args.correlation for event in events],
            external=[event.args.external if event.args.external >= 0 else event.args.external_old for event in events],
        )
        self._kernels(base, events, kind)
        self._ops(base, events, kind)

    def _kernels(self, base: int, events: list[Any], kind: list[int]) -> None:
        builder, nan = self.builder, float("nan")
        kernels = [(at, event.args) for at, event in enumerate(events) if kind[at] == Kind.KERNEL]
        if kernels:
            builder.add(
                "kernels",
                row=[base + at for at, _ in kernels],
                occupancy=[nan if args.occupancy is None else args.occupancy for _, args in kernels],
                blocks_per_sm=[nan if args.blocks_per_sm is None else args.blocks_per_sm for _, args in kernels],
                warps_per_sm=[nan if args.warps_per_sm is None else args.warps_per_sm for _, args in kernels],
                graph=[args.graph for _, args in kernels],
            )
        copies = [(at, event.args) for at, event in enumerate(events) if kind[at] in SIZED]
        if copies:
            builder.add(
                "copies", row=[base + at for at, _ in copies], bytes=[int(max(args.bytes, -1)) for _, args in copies]
            )
        syncs = [(at, event.args) for at, event in enumerate(events) if kind[at] == Kind.SYNC]
        if syncs:
            builder.add(
                "syncs",
                row=[base + at for at, _ in syncs],
                on_stream=[args.on_stream if args.on_stream < NO_STREAM else -1 for _, args in syncs],
                record_correlation=[args.record_correlation for _, args in syncs],
            )

    def _ops(self, base: int, events: list[Any], kind: list[int]) -> None:
        builder, strings = self.builder, self.builder.strings
        ops = [
            (at, event.args)
            for at, event in enumerate(events)
            if kind[at] in (Kind.OP, Kind.ANNOTATION)
            and (event.args.sequence >= 0 or event.args.dims or event.args.stack or event.args.module)
        ]
        if ops:
            builder.add(
                "ops",
                row=[base + at for at, _ in ops],
                dims=[_text(strings, args.dims) for _, args in ops],
                types=[_text(strings, args.types) for _, args in ops],
                concrete=[_text(strings, args.concrete) if _has_settings(events[at].name) else -1 for at, args in ops],
                stack=[strings[args.stack] if args.stack else -1 for _, args in ops],
                module=[strings[args.module] if args.module else -1 for _, args in ops],
                sequence=[args.sequence for _, args in ops],
                forward_thread=[args.forward_thread for _, args in ops],
            )
        said = [(at, event.args) for at, event in enumerate(events) if event.args.collective]
        if said:
            builder.add(
                "collectives",
                row=[base + at for at, _ in said],
                op=[strings[args.collective] for _, args in said],
                group=[strings[args.group] if args.group else -1 for _, args in said],
                description=[strings[args.description] if args.description else -1 for _, args in said],
                ranks=[_text(strings, args.ranks) for _, args in said],
                size=[args.group_size for _, args in said],
                sequence=[args.seq for _, args in said],
                in_elements=[args.in_elements for _, args in said],
                out_elements=[args.out_elements for _, args in said],
                dtype=[strings[args.dtype] if args.dtype else -1 for _, args in said],
            )
        pythons = [(at, event.args) for at, event in enumerate(events) if kind[at] == Kind.PYTHON]
        if pythons:
            builder.add(
                "pythons",
                row=[base + at for at, _ in pythons],
                id=[args.python for _, args in pythons],
                parent=[-1 if args.python_parent is None else args.python_parent for _, args in pythons],
                module=[-1 if args.python_module is None else args.python_module for _, args in pythons],
            )

    def _others(self, events: list[Any]) -> None:
        """The allocator's instants, arrows from forward to backward, names of threads."""
        builder, threads = self.builder, self.builder.threads
        memory = [event for event in events if event.ph == "i" and event.name == "[memory]"]
        if memory:
            builder.add(
                "memory",
                time_ns=self._time_ns(memory),
                thread=[threads[event.pid, event.tid] for event in memory],
                device_type=[event.args.device_type for event in memory],
                device=[event.args.device_id for event in memory],
                bytes=[event.args.memory_bytes for event in memory],
                allocated=[event.args.allocated for event in memory],
                reserved=[event.args.reserved for event in memory],
                address=[event.args.address & MAX_ADDRESS if event.args.address > 0 else -1 for event in memory],
            )
        arrows = [event for event in events if event.cat == "fwdbwd"]
        for event, time_ns in zip(arrows, self._time_ns(arrows).tolist(), strict=True):
            end = (threads[event.pid, event.tid], time_ns)
            if event.ph == "s":
                self.flows[event.id, "s"] = end
            else:
                self.flows[event.id, "f"] = end
        for event in events:
            if event.ph == "M" and event.name == "thread_name":
                builder.thread_names[event.pid, event.tid] = event.args.name

    def finish(self) -> None:
        pairs = [
            (start, self.flows[key, "f"])
            for (key, side), start in self.flows.items()
            if side == "s" and (key, "f") in self.flows
        ]
        if pairs:
            self.builder.add(
                "flows",
                from_thread=[start[0] for start, _ in pairs],
                from_ns=[start[1] for start, _ in pairs],
                to_thread=[end[0] for _, end in pairs],
                to_ns=[end[1] for _, end in pairs],
            )


def _from_us(values: Any) -> Ints:
    """Microseconds with at most three decimals → nanoseconds: whole and decimals apart, so that nothing is lost."""
    whole = np.floor(values)
    return np.asarray(whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64), np.int64)


def _exact_ns(text: bytes) -> int:
    """Of a number as it stands in the file."""
    if b"e" in text or b"E" in text:
        return round(float(text) * 1000)
    whole, _, decimals = text.strip(b'"').partition(b".")
    sign = -1 if whole.startswith(b"-") else 1
    scale: int = 10 ** len(decimals)
    return int(whole) * 1000 + sign * ((int(decimals or b"0") * 2000 + scale) // (2 * scale))


def _text(strings: dict[str, int], raw: msgspec.Raw) -> int:
    return strings[bytes(raw).decode(errors="replace")] if raw else -1


def _has_settings(name: str) -> bool:
    return "conv" in name or "attention" in name


def _device(event: Any) -> int:
    device: Any = event.args.device if event.args.device >= 0 else event.pid
    return int(device) if isinstance(device, int) and 0 <= device < MAX_DEVICE else 0


def _stream(event: Any) -> int:
    stream: int | str = event.args.stream if event.args.stream >= 0 else event.tid
    if isinstance(stream, str):
        digits = re.search(r"\d+", stream)
        stream = int(digits.group()) if digits else 0
    return stream if 0 <= stream < NO_STREAM else -1


def _meta(text: EventText[Any], path: str, reader: _Reader) -> TraceMeta:
    header = text.header
    world = header.get("distributedInfo") or {}
    devices = header.get("deviceProperties") or []
    problems = []
    if text.truncated:
        problems.append(f"cut off: {text.truncated}; everything before is used")
    if reader.skipped:
        problems.append(f"{reader.skipped} events have fields of a wrong type and are left out")
    if reader.negative:
        problems.append(f"{reader.negative} events have a negative duration, counted as none")
    return TraceMeta(
        path=path,
        rank=_int(world.get("rank")),
        world_size=_int(world.get("world_size")),
        backend=world.get("backend") if isinstance(world.get("backend"), str) else None,
        host=header.get("hostname") or header.get("host_name"),
        origin_ns=_int(header.get("baseTimeNanoseconds")) or 0,
        devices=tuple(device for device in devices if isinstance(device, dict)),
        groups=tuple(group for group in world.get("pg_config") or () if isinstance(group, dict)),
        with_stack=bool(header.get("with_stack")),
        record_shapes=bool(header.get("record_shapes")),
        profile_memory=bool(header.get("profile_memory")),
        read_events=reader.read_events,
        truncated=text.truncated,
        problems=tuple(problems),
    )


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
