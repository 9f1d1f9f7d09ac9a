"""Traces of any size for benchmarks: a real one over and over, or one that is made up.

Each copy has times, correlations, ids and step numbers of its own, as if the job had been traced for so much longer.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["REAL", "write_trace"]

REAL = Path(__file__).resolve().parents[2] / "shared/data/traces/hta_df_index_resolver_1of2/df_index_resolver.json.gz"
IDS = ("External id", "correlation", "Ev Idx", "Record function id", "Sequence number")
STEP = "ProfilerStep#"
MADE_STEPS = 40


def write_trace(path: Path, events: int, *, steps: int | None = None, rank: int = 0, world_size: int = 1) -> int:
    """About so many events, packed; ``steps``: so many profiler steps of equal length instead of the trace's own.

    Returns how many there are.
    """
    header, base = _real() if REAL.exists() else _made()
    header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world_size}
    count = 0
    with gzip.open(path, "wt", compresslevel=4) as file:
        file.write(json.dumps(header)[:-1] + ', "traceEvents": [')
        for event in _copies(base, events, steps):
            file.write((",\n" if count else "\n") + json.dumps(event))
            count += 1
        file.write('\n], "traceName": "copies.json"}')
    return count


def _real() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    document = json.loads(gzip.decompress(REAL.read_bytes()))
    return {key: value for key, value in document.items() if key != "traceEvents"}, document["traceEvents"]


def _made() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from fakes.traces import MadeTrace

    made = MadeTrace()
    for number in range(MADE_STEPS):
        start = number * 10_000
        made.step(number, start, 9_900)
        for at in range(start + 10, start + 9_000, 30):
            args = made.op("aten::linear", at, 25)
            args |= {"External id": at, "Input Dims": [[64, 1024], [1024, 1024]]}
            made.op("aten::mm", at + 2, 20)
            made.launched("gemm_f16" if at % 90 else "ncclDevKernel_AllReduce", at=at + 5, start=at + 40, dur=24)
    return made.header, made.events


def _copies(base: list[dict[str, Any]], events: int, steps: int | None) -> Iterator[dict[str, Any]]:
    """By time, so that a part of a copy is what the first part of the capture was."""
    placed = sorted((event for event in base if event.get("ph") in ("X", "i", "s", "f")), key=lambda event: event["ts"])
    placed = [event for event in placed if event.get("cat") != "Trace" and isinstance(event["pid"], int)]
    if steps is not None:
        placed = [event for event in placed if not event["name"].startswith(STEP)]
    start, end = placed[0]["ts"], max(event["ts"] + event.get("dur", 0) for event in placed)
    span = end - start + 1
    largest = 1 + max(_largest(event) for event in placed)
    numbers = [int(event["name"].removeprefix(STEP)) for event in placed if event["name"].startswith(STEP)]
    stride = max(numbers) - min(numbers) + 1 if numbers else 0
    yield from (event for event in base if event.get("ph") == "M")
    last = start
    for index in range(events):
        copy, at = divmod(index, len(placed))
        event = _shifted(placed[at], copy * span, copy * largest, copy * stride)
        last = max(last, event["ts"])
        yield event
    host = next(event for event in placed if event.get("cat") == "cpu_op")
    for number in range(steps or 0):
        began = start + (last - start) * number // (steps or 1)
        dur = (last - start) // (steps or 1) - 1
        yield {**host, "cat": "user_annotation", "name": f"{STEP}{number}", "ts": began, "dur": dur, "args": {}}


def _largest(event: dict[str, Any]) -> int:
    args = event.get("args", {})
    return max([int(args.get(name, 0)) for name in IDS] + [int(event.get("id", 0))])


def _shifted(event: dict[str, Any], time: int, number: int, step: int) -> dict[str, Any]:
    out = {**event, "ts": event["ts"] + time}
    if "id" in out:
        out["id"] += number
    if number and "args" in out:
        args = out["args"] = dict(out["args"])
        for name in IDS:
            if name in args:
                args[name] += number
    if step and out["name"].startswith(STEP):
        out["name"] = f"{STEP}{int(out['name'].removeprefix(STEP)) + step}"
    return out
