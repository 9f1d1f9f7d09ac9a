"""Samples of a stretch of time as one sample.  Pure.

A coarse sample is the first one of its stretch as it was taken, so medians and shares over many of them stay what they
are, and besides it says what a single instant cannot:

    span_s    how many seconds it stands for
    over      of the whole stretch: "samples" (how many there were) and, by figure, "mean", "max" and "min"

Counts of a probe (``sent``, ``lost``) are added up.  Coarse samples can be made coarser in the same way.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from stepscope.store.thinning import source_of

__all__ = ["LEVELS", "OVER", "SPAN", "Coarsener", "coarsened"]

SPAN = "span_s"
OVER = "over"
LEVELS = {
    "gpu": ("power_w", "temperature_c", "util_percent", "mem_used", "sm_clock_mhz"),
    "host": ("cpu_percent", "mem_available", "swap_used"),
    "process": ("cpu_percent", "rss", "own"),
}
"""By kind, the figures whose mean and extremes are kept.  ``own``: resident memory without mapped files."""
_SUMS = ("sent", "lost")
_LOWEST = ("rtt_us_min",)
_HIGHEST = ("rtt_us_max",)


class Coarsener:
    """Takes samples one by one, in the order of their file, and gives one for each source and stretch."""

    def __init__(self, span_s: int) -> None:
        self._span_s = span_s
        self._found: dict[tuple[Hashable, int], _Stretch] = {}

    def add(self, sample: Mapping[str, Any]) -> None:
        wall_ns = sample.get("wall_ns")
        at = wall_ns // (self._span_s * 1_000_000_000) if type(wall_ns) is int else 0
        key = (source_of(sample), at)
        stretch = self._found.get(key)
        if stretch is None:
            self._found[key] = _Stretch(sample)
        else:
            stretch.add(sample)

    def samples(self) -> list[dict[str, Any]]:
        return [stretch.sample(self._span_s) for stretch in self._found.values()]


def coarsened(samples: Iterable[Mapping[str, Any]], span_s: int) -> list[dict[str, Any]]:
    coarsener = Coarsener(span_s)
    for sample in samples:
        coarsener.add(sample)
    return coarsener.samples()


class _Stretch:
    def __init__(self, first: Mapping[str, Any]) -> None:
        self._first = dict(first)
        self._sums = {name: 0 for name in _SUMS if name in first}
        self._samples = 0
        self._totals: dict[str, tuple[float, int]] = {}
        self._max: dict[str, float] = {}
        self._min: dict[str, float] = {}
        kind = first.get("kind")
        self._figures = LEVELS.get(kind, ()) if isinstance(kind, str) else ()
        self.add(first)

    def add(self, sample: Mapping[str, Any]) -> None:
        over = sample.get(OVER)
        over = over if isinstance(over, dict) else {}
        count = over.get("samples", 1)
        count = count if type(count) is int and count > 0 else 1
        self._samples += count
        for name in self._figures:
            value = _figure(sample, name)
            mean = most = least = value
            if over:
                mean, most, least = (_number(_part(over, part), name, value) for part in ("mean", "max", "min"))
            if mean is None or most is None or least is None:
                continue
            total, counted = self._totals.get(name, (0.0, 0))
            self._totals[name] = (total + mean * count, counted + count)
            self._max[name] = max(most, self._max.get(name, most))
            self._min[name] = min(least, self._min.get(name, least))
        for name in self._sums:
            self._sums[name] += int(_number(sample, name, 0) or 0)
        for names, better in ((_LOWEST, min), (_HIGHEST, max)):
            for name in names:
                value = _number(sample, name, None)
                if value is not None:
                    self._first[name] = better(value, _number(self._first, name, value) or value)

    def sample(self, span_s: int) -> dict[str, Any]:
        means = {name: _rounded(total / counted) for name, (total, counted) in self._totals.items()}
        over = {"samples": self._samples, **({"mean": means, "max": self._max, "min": self._min} if means else {})}
        return {**self._first, **self._sums, SPAN: span_s, OVER: over}


def _figure(sample: Mapping[str, Any], name: str) -> float | None:
    if name != "own":
        return _number(sample, name, None)
    rss, mapped = _number(sample, "rss", None), _number(sample, "rss_file", None)
    return None if rss is None or mapped is None else max(rss - mapped, 0)


def _part(over: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = over.get(name)
    return part if isinstance(part, dict) else {}


def _number(values: Mapping[str, Any], name: str, default: float | None) -> float | None:
    value = values.get(name, default)
    return value if type(value) in (int, float) and -1e300 < value < 1e300 else default


def _rounded(value: float) -> float:
    """A mean with no more digits than it is worth; means of bytes are large numbers."""
    return round(value, 3) if abs(value) < 1e6 else round(value)
