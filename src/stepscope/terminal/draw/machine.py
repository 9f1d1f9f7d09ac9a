"""Memory of the fullest rank and device, and the figures of GPUs and hosts, on one line.

Of a run that is over, GPUs and hosts have the figures of its summary: over the steady steps, not over start-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from stepscope.records.units import bytes_text, count_text
from stepscope.terminal.documents import GpuFigures, Levels, Samples
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
    if known.over:
        return _gpus_of_summary(known.machines.gpus) if known.machines is not None else []
    if known.gpus is None or not known.gpus.series:
        return []
    figures: list[tuple[str, str]] = []
    used, total = _figures(known.gpus, "mem_used"), _figures(known.gpus, "mem_total")
    busy = _figures(known.gpus, "util_percent")
    if busy:
        figures.append((_busy_text(busy), "yellow" if min(busy) < IDLE_PERCENT else ""))
    if used and len(used) == len(total) and all(total):
        figures.append(_fullest("GPU memory", [one / of for one, of in zip(used, total, strict=True)]))
    power, heat = _figures(known.gpus, "power_w"), _figures(known.gpus, "temperature_c")
    figures += [(f"{_mean(power):.0f} W", "")] if power else []
    figures += [(f"{max(heat):.0f} °C", "")] if heat else []
    return figures


def _gpus_of_summary(gpus: Sequence[GpuFigures]) -> list[tuple[str, str]]:
    """Over the steady steps."""
    gpus = [gpu for gpu in gpus if gpu.in_use] or gpus
    figures: list[tuple[str, str]] = []
    busy, power = _medians(gpu.util_percent for gpu in gpus), _medians(gpu.power_w for gpu in gpus)
    shares = [gpu.mem_used_max / gpu.mem_total for gpu in gpus if gpu.mem_used_max is not None and gpu.mem_total]
    heat = [
        gpu.temperature_c.max for gpu in gpus if gpu.temperature_c is not None and gpu.temperature_c.max is not None
    ]
    figures += [(_busy_text(busy), "")] if busy else []
    figures += [_fullest("GPU memory", shares)] if shares else []
    figures += [(f"{_mean(power):.0f} W", "")] if power else []
    figures += [(f"{max(heat):.0f} °C", "")] if heat else []
    return figures


def _hosts(known: Snapshot) -> list[tuple[str, str]]:
    if known.over:
        nodes = known.machines.nodes if known.machines is not None else ()
        cpu = _medians(node.cpu_percent for node in nodes)
        memory = [(node.mem_available_min, node.mem_total) for node in nodes]
        shares = [1 - free / total for free, total in memory if free is not None and total]
        return [*_cpu(cpu, len(cpu)), *([_fullest("host memory", shares)] if shares else [])]
    if known.hosts is None or not known.hosts.series:
        return []
    cpu = _figures(known.hosts, "cpu_percent")
    total, free = _figures(known.hosts, "mem_total"), _figures(known.hosts, "mem_available")
    shares = [1 - one / of for one, of in zip(free, total, strict=False) if of] if len(total) == len(free) else []
    return [*_cpu(cpu, len(cpu) + known.hosts.left_out), *([_fullest("host memory", shares)] if shares else [])]


def _cpu(percent: Sequence[float], hosts: int) -> list[tuple[str, str]]:
    name = "host" if len(percent) == 1 else count_text(hosts, "host")
    return [(f"{name} CPU {_mean(percent):.0f}%", "")] if percent else []


def _busy_text(busy: Sequence[float]) -> str:
    least = f" (least {min(busy):.0f}%)" if len(busy) > 1 else ""
    return f"{count_text(len(busy), 'GPU')} {_mean(busy):.0f}%{least}"


def _fullest(name: str, shares: Sequence[float]) -> tuple[str, str]:
    most = max(shares)
    return f"{name} {most:.0%}", "bold red" if most >= FULL else ""


def _medians(levels: Iterable[Levels | None]) -> list[float]:
    return [one.median for one in levels if one is not None and one.median is not None]


def _figures(samples: Samples, field: str) -> list[float]:
    """The newest of each GPU or host that has it."""
    found = ([value for value in one.values.get(field, []) if value is not None] for one in samples.series)
    return [values[-1] for values in found if values]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
