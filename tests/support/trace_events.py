"""Checks a file of Chrome trace events: what ui.perfetto.dev and chrome://tracing require, and how processes are named.

Slices of a track must be nested or disjoint; every process has a name and a place, every track a name; arrows come in
pairs; counters have numbers.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any

__all__ = ["checked_events", "tracks_of"]

KNOWN = set("MXCsfi")
Track = tuple[int, int]


def checked_events(path: Path) -> list[dict[str, Any]]:
    """Read and check a file; return its events, times as exact fractions of a microsecond."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    document = json.loads(raw, parse_float=Fraction)
    assert isinstance(document["traceEvents"], list)
    events: list[dict[str, Any]] = document["traceEvents"]
    named: dict[str, Counter[Any]] = defaultdict(Counter)
    slices: dict[Track, list[tuple[Fraction, Fraction]]] = defaultdict(list)
    arrows: dict[tuple[Any, Any], list[str]] = defaultdict(list)
    for event in events:
        assert event["ph"] in KNOWN, event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["name"], str), event
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index"), event
            key = event["pid"] if event["name"].startswith("process") else (event["pid"], event["tid"])
            named[event["name"]][key] += 1
            continue
        assert event["ts"] >= 0, event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            start = Fraction(event["ts"])
            slices[event["pid"], event["tid"]].append((start, start + Fraction(event["dur"])))
        elif event["ph"] in "sf":
            arrows[event["cat"], event["id"]].append(event["ph"])
        elif event["ph"] == "C":
            assert all(isinstance(value, int | Fraction) for value in event["args"].values()), event
    for counts in named.values():
        assert set(counts.values()) <= {1}, "a process or a track has two names or places"
    assert {pid for pid, _ in slices} <= set(named["process_name"]) == set(named["process_sort_index"])
    assert set(slices) <= set(named["thread_name"])
    assert all(sorted(pair) == ["f", "s"] for pair in arrows.values())
    for track, spans in slices.items():
        _nested(track, spans)
    return events


def _nested(track: Track, spans: list[tuple[Fraction, Fraction]]) -> None:
    open_ends: list[Fraction] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], f"slices of track {track} overlap without being nested"
        open_ends.append(end)


def tracks_of(events: list[dict[str, Any]]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the slices by name of the process and of the track."""
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in processes.values()}
    for event in events:
        if event["ph"] == "X":
            track = tracks[event["pid"], event["tid"]]
            found[processes[event["pid"]]].setdefault(track, []).append(event)
    return found
