"""Memory of the fullest rank and device, and the figures of GPUs and hosts, on one line."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from stepscope.records.units import bytes_text, count_text
from stepscope.terminal.documents import Sample, Samples
from stepscope.terminal.snapshot import Snapshot
from stepscope.terminal.text import columns, fit

__all__ = ["draw_machine"]

LABEL = 8
FULL = 0.95
"""Of a memory: from here on it is marked."""
IDLE_PERCENT = 50.0


def draw_machine(known: Snapshot, width: int) -> Text:
    parts = [(fit("machine", LABEL), "dim")]
    facts = [*_process(known), *_memory(known), *_gpus(known), *_hosts(known)]
    for at, (words, style) in enumerate(facts):
        parts += [(" · ", "dim")] if at else []
        parts.append((words, style))
    return columns(parts if facts else [*parts, ("no figures" if known.over else "no figures yet", "dim")], width)


def _process(known: Snapshot) -> list[tuple[str, str]]:
    """Of the rank that holds most, without mapped files: now, or the most of a run that is over."""
    held: list[tuple[float, int]] = []
    for one in known.processes.series if known.processes is not None else ():
        whole = one.values.get("rss", [])
        files = one.values.get("rss_file", [])
        levels = [rss - (files[at] or 0.0 if at < len(files) else 0.0) for at, rss in enumerate(whole) if rss]
        if levels and one.rank is not None:
            held.append((max(levels) if known.over else levels[-1], -one.rank))
    if not held:
        return []
    most, rank = max(held)  # of several the first
    return [(f"rank {-rank} {'held' if known.over else 'holds'} {bytes_text(most)}", "")]


def _memory(known: Snapshot) -> list[tuple[str, str]]:
    """What the job holds on its fullest device, by the newest step that was asked."""
    row = next((row for row in reversed(known.steps) if row.memory_bytes.get("allocated")), None)
    if row is None:
        return []
    peak = max(row.memory_bytes.get("peak_allocated", 0.0) for row in known.steps)
    most = f" (peak {bytes_text(peak)})" if peak else ""
    return [(f"device memory {bytes_text(row.memory_bytes['allocated'])}{most}", "")]


def _gpus(known: Snapshot) -> list[tuple[str, str]]:
    if known.gpus is None or not known.gpus.series:
        return []
    figures: list[tuple[str, str]] = []
    used, total = (_figures(known.gpus, name, over=known.over) for name in ("mem_used", "mem_total"))
    busy = _figures(known.gpus, "util_percent", over=known.over)
    if busy:
        least = f" (least {min(busy):.0f}%)" if len(busy) > 1 else ""
        idle = min(busy) < IDLE_PERCENT and not known.over
        figures.append((f"{count_text(len(busy), 'GPU')} {_mean(busy):.0f}%{least}", "yellow" if idle else ""))
    if used and len(used) == len(total) and all(total):
        fullest = max(one / of for one, of in zip(used, total, strict=True))
        figures.append((f"GPU memory {fullest:.0%}", "bold red" if fullest >= FULL else ""))
    power, heat = (_figures(known.gpus, name, over=known.over) for name in ("power_w", "temperature_c"))
    figures += [(f"{_mean(power):.0f} W", "")] if power else []
    figures += [(f"{max(heat):.0f} °C", "")] if heat else []
    return figures


def _hosts(known: Snapshot) -> list[tuple[str, str]]:
    if known.hosts is None or not known.hosts.series:
        return []
    figures: list[tuple[str, str]] = []
    cpu = _figures(known.hosts, "cpu_percent", over=known.over)
    if cpu:
        name = "host" if len(cpu) == 1 else count_text(len(cpu) + known.hosts.left_out, "host")
        figures.append((f"{name} CPU {_mean(cpu):.0f}%", ""))
    total, free = (_figures(known.hosts, name, over=known.over) for name in ("mem_total", "mem_available"))
    if total and len(total) == len(free) and all(total):
        fullest = max(1 - one / of for one, of in zip(free, total, strict=True))
        figures.append((f"host memory {fullest:.0%}", "bold red" if fullest >= FULL else ""))
    return figures


def _figures(samples: Samples, field: str, *, over: bool) -> list[float]:
    """One for each GPU or host that has it: of now, or the mean over a run that is over."""
    found = [_figure(one, field, over=over) for one in samples.series]
    return [value for value in found if value is not None]


def _figure(one: Sample, field: str, *, over: bool) -> float | None:
    values = [value for value in one.values.get(field, []) if value is not None]
    if not values:
        return None
    return _mean(values) if over else values[-1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
