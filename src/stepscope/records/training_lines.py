"""Lines in which torchtitan and Megatron-LM say how the training goes: loss, speed and utilisation.  Pure.

    step: 10  loss:  7.1234  grad_norm:  1.2  memory:  1.90GiB(2.4%)  tps: 1,234  tflops: 12.34  mfu: 3.20%
    iteration      100/    1000 | consumed samples: 6400 | elapsed time per iteration (ms): 123.4 | lm loss: 1.2E+00 |

Both may have a time before them, torchtitan's colours in between.  Fields that a line lacks are left out.  Megatron-LM
prints its timers as well, one to a line: the least and the most over the ranks, or the most alone.

    (min, max) time across ranks (ms):
        forward-backward ...............................: (1201.20, 1210.90)
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stepscope.records.native_lines import without_escapes

__all__ = ["FIGURES", "TrainingLine", "summed_up", "timer_line", "training_line"]

FIGURES = ("loss", "grad_norm", "tokens_per_second", "tflops", "mfu_percent", "iteration_ms")
"""What a line may say, in this order; speed is that of one device."""
_NUMBER = r"(-?[\d,]*\.?\d+(?:[eE][+-]?\d+)?|nan|inf)"
_TITAN = re.compile(r"\bstep:\s*(\d+)\s.*\btps:\s*[\d,]+")
_TITAN_FIGURES = {
    "loss": re.compile(rf"\bloss:\s*{_NUMBER}"),
    "grad_norm": re.compile(rf"\bgrad_norm:\s*{_NUMBER}"),
    "tokens_per_second": re.compile(rf"(?<!\w)tps:\s*{_NUMBER}"),
    "tflops": re.compile(rf"(?<!\w)tflops:\s*{_NUMBER}"),
    "mfu_percent": re.compile(rf"(?<!\w)mfu:\s*{_NUMBER}%"),
}
_MEGATRON = re.compile(r"\biteration\s+(\d+)/\s*(?:\d+|infinity)\s*\|(.*)")
_TIMER = re.compile(r"^\s{2,}([\w./ -]{1,80}?) \.{2,}: (?:([\d.]+)|\([\d.]+, ([\d.]+)\))\s*$")
MOST_TIMERS = 64
_MEGATRON_FIGURES = {
    "elapsed time per iteration (ms)": "iteration_ms",
    "throughput per GPU (TFLOP/s/GPU)": "tflops",
    "grad norm": "grad_norm",
    "tokens/sec/gpu": "tokens_per_second",
    "MFU": "mfu_percent",
}


@dataclass(frozen=True, kw_only=True)
class TrainingLine:
    framework: str
    iteration: int
    """As the framework counts them: from 1, and on after a resume."""
    figures: Mapping[str, float] = field(default_factory=dict)


def training_line(line: str) -> TrainingLine | None:
    """What a line of a log says of the training; None: it is no such line."""
    if "tps:" in line and "step:" in line:
        return _titan(without_escapes(line))
    return _megatron(without_escapes(line)) if "iteration" in line and "|" in line else None


def timer_line(line: str) -> tuple[str, float] | None:
    """The name of a timer and what it took on the slowest rank, in milliseconds; None: it is no such line."""
    found = _TIMER.match(without_escapes(line)) if "..: " in line else None
    number = _number(found[2] or found[3]) if found is not None else None
    return None if found is None or number is None else (found[1], number)


def summed_up(lines: Iterable[TrainingLine], timers: Iterable[tuple[str, float]] = ()) -> dict[str, Any]:
    """The last of each figure and its median, and of each timer; {}: there are no lines."""
    said = list(lines)
    if not said:
        return {}
    by_figure = {name: [line.figures[name] for line in said if name in line.figures] for name in FIGURES}
    by_timer: dict[str, list[float]] = {}
    for name, ms in timers:
        if name in by_timer or len(by_timer) < MOST_TIMERS:
            by_timer.setdefault(name, []).append(ms)
    return {
        "framework": said[-1].framework,
        "iteration": said[-1].iteration,
        "lines": len(said),
        "figures": {
            name: {"last": values[-1], "median": statistics.median(values)}
            for name, values in by_figure.items()
            if values
        },
        "timers_ms": {name: {"last": took[-1], "median": statistics.median(took)} for name, took in by_timer.items()},
    }


def _titan(line: str) -> TrainingLine | None:
    found = _TITAN.search(line)
    if found is None:
        return None
    matches = {name: pattern.search(line) for name, pattern in _TITAN_FIGURES.items()}
    said = {name: _number(match[1]) for name, match in matches.items() if match is not None}
    return TrainingLine(framework="torchtitan", iteration=int(found[1]), figures=_finite(said))


def _megatron(line: str) -> TrainingLine | None:
    found = _MEGATRON.search(line)
    if found is None or "elapsed time per iteration" not in line:
        return None
    said: dict[str, float | None] = {}
    for part in found[2].split("|"):
        name, _, value = part.strip().rpartition(":")
        number = _number(value.strip().partition("/")[0])
        if name in _MEGATRON_FIGURES:
            said[_MEGATRON_FIGURES[name]] = number
        elif name.endswith("loss") and "loss" not in said:  # ``lm loss``; there may be others after it
            said["loss"] = number
    return TrainingLine(framework="megatron", iteration=int(found[1]), figures=_finite(said))


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _finite(figures: Mapping[str, float | None]) -> dict[str, float]:
    """JSON has no nan."""
    return {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}
