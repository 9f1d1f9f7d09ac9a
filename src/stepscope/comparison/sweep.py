"""The result of a sweep: speed and memory of each variant of a job, and which of them are worth having.

The variants ran in rounds (A B C, A B C, …), so what slows the machine for a while slows all of them.  The speed of a
variant is therefore its mean over the rounds without the rounds' own ups and downs.  How far runs differ by chance is
what is left, pooled over all variants, together with what runs of real jobs usually differ by (``statistics.PRIOR``).

A variant is on the front if no other is as fast with less memory, or faster with as much.  One that only chance may
keep off the front is near it.  A variant that fails has a status and no speed.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from stepscope.comparison.statistics import CONFIDENCE, PRIOR, Level, assumed_spread, t_quantile
from stepscope.records.text import bytes_text, count_text, ms_text, number_text, printable_document
from stepscope.reports.page.documents import finding_part, page_document, page_table, tables_part, titled_lists
from stepscope.reports.tables import finite

__all__ = [
    "HEADS",
    "Trial",
    "VariantTrials",
    "front_svg",
    "sweep_document",
    "sweep_page",
    "sweep_sentences",
    "sweep_table",
]

Floats = NDArray[np.float64]
Place = Literal["front", "near", "dominated", "none"]

SCHEMA = 1
SAME_MEMORY = 0.01
"""Peaks of memory within this share of each other are the same: allocators round."""
PASSES = 50
"""Of the fit of variants and rounds where some trials are missing."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of one variant."""

    round: int
    run: str
    """The name of its folder; empty: it never began."""
    status: str
    """As in every list: ``finished``, ``out of memory``, ``timed out`` …"""
    ok: bool
    level: Level | None = None
    memory: int | None = None
    """Peak of the rank that needs most, in bytes."""
    on_device: bool = False
    """Whether that is memory of the device."""


@dataclass(frozen=True, kw_only=True)
class VariantTrials:
    name: str
    samples: float | None = None
    """Samples that all ranks together process in a step; None: steps are compared."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    trials: Sequence[Trial] = ()


@dataclass(frozen=True, kw_only=True)
class _Fit:
    means: Floats
    """Logarithm of the time per step or sample, by variant; nan: no trial."""
    counts: NDArray[np.int64]
    spread: float
    freedom: float

    def half(self, *counts: int) -> float:
        """Half of the interval of a mean over so many rounds, or of the difference of two."""
        return t_quantile(self.freedom) * self.spread * math.sqrt(sum(1 / count for count in counts))


def sweep_document(name: str, variants: Sequence[VariantTrials], *, rounds: int) -> dict[str, Any]:
    """Everything about a sweep, JSON-safe; what has not run yet is counted as missing."""
    fit = _fit(variants, rounds)
    memory = [_memory(variant) for variant in variants]
    places = [_place(at, variants, fit, memory) for at in range(len(variants))]
    by_sample = all(variant.samples is not None for variant in variants)
    rows = []
    for at, variant in enumerate(variants):
        place, better = places[at]
        rows.append(
            {
                "variant": variant.name,
                "status": _status(variant, rounds),
                "front": place,
                "better": better,
                **_speed(variant, fit, at),
                "memory": memory[at],
                "memory_of": _memory_of(variant),
                "settings": dict(variant.settings),
                "trials": [_trial_row(trial) for trial in variant.trials],
            }
        )
    return {
        "schema": SCHEMA,
        "kind": "sweep",
        "name": name,
        "unit": "samples/s" if by_sample else "steps/s",
        "rounds": rounds,
        "complete": all(_done(variant, rounds) for variant in variants),
        "confidence": CONFIDENCE,
        "noise": finite(fit.spread, 6),
        "variants": rows,
        "front": [row["variant"] for row in sorted(rows, key=_by_memory) if row["front"] == "front"],
    }


def _by_memory(row: Mapping[str, Any]) -> float:
    return row["memory"] or 0


def _trial_row(trial: Trial) -> dict[str, Any]:
    mean = None if trial.level is None else finite(trial.level.mean / 1e6)
    return {"round": trial.round, "run": trial.run, "status": trial.status, "step_ms": mean, "memory": trial.memory}


def _good(variant: VariantTrials) -> list[Trial]:
    return [trial for trial in variant.trials if trial.ok and trial.level is not None]


def _failed(variant: VariantTrials) -> list[Trial]:
    return [trial for trial in variant.trials if not trial.ok or trial.level is None]


def _done(variant: VariantTrials, rounds: int) -> bool:
    """A variant that failed is not repeated."""
    return bool(_failed(variant)) or len(_good(variant)) >= rounds


def _status(variant: VariantTrials, rounds: int) -> str:
    failed, good = _failed(variant), _good(variant)
    if failed:
        word = failed[-1].status if not failed[-1].ok else "too short to measure"
        return word if not good else f"{word} in {len(failed)} of {count_text(len(failed) + len(good), 'round')}"
    if not good:
        return "not run yet"
    return "finished" if len(good) >= rounds else f"{len(good)} of {count_text(rounds, 'round')}"


def _memory(variant: VariantTrials) -> int | None:
    known = [trial.memory for trial in _good(variant) if trial.memory is not None]
    return max(known, default=None)


def _memory_of(variant: VariantTrials) -> str | None:
    good = [trial for trial in _good(variant) if trial.memory is not None]
    return None if not good else "device" if good[0].on_device else "host"


def _speed(variant: VariantTrials, fit: _Fit, at: int) -> dict[str, Any]:
    good = _good(variant)
    if not good or math.isnan(fit.means[at]):
        return {"speed": None, "speed_interval": None, "step_ms": None}
    half = fit.half(len(good))
    speed = math.exp(-fit.means[at]) * 1e9
    step_ms = sum(trial.level.mean for trial in good if trial.level is not None) / len(good) / 1e6
    return {
        "speed": finite(speed),
        "speed_interval": [finite(speed * math.exp(-half)), finite(speed * math.exp(half))],
        "step_ms": finite(step_ms),
    }


# -- statistics -------------------------------------------------------------------------------------------------------


def _fit(variants: Sequence[VariantTrials], rounds: int) -> _Fit:
    """Separate variants, rounds and chance; times are logarithms, so differences are relative."""
    table = np.full((len(variants), max(rounds, 1)), np.nan)
    assumed: list[float] = []
    for row, variant in enumerate(variants):
        for trial in _good(variant):
            if trial.level is not None and trial.round < table.shape[1]:
                table[row, trial.round] = math.log(trial.level.mean / (variant.samples or 1.0))
                assumed.append(assumed_spread(trial.level) ** 2)
    known = ~np.isnan(table)
    counts = known.sum(axis=1)
    means, drift = np.zeros(len(variants)), np.zeros(table.shape[1])
    for _ in range(PASSES):
        means = _means(table - drift, axis=1)
        drift = np.nan_to_num(_means(table - means[:, None], axis=0))
        drift -= drift[known.any(axis=0)].mean() if known.any() else 0.0
    rest = (table - means[:, None] - drift)[known]
    used_rounds = int((known.sum(axis=0) > 0).sum())
    freedom = max(int(known.sum()) - int((counts > 0).sum()) - max(used_rounds - 1, 0), 0)
    prior = sum(assumed) / len(assumed) if assumed else PRIOR.floor**2
    trusted = PRIOR.freedom + freedom
    seen = float((rest**2).sum())
    variance = (PRIOR.freedom * prior + seen) / trusted
    if freedom >= PRIOR.freedom and seen / freedom > variance:
        variance, trusted = seen / freedom, freedom  # the machine is noisier than assumed, and that is well known
    return _Fit(
        means=np.where(counts > 0, means, np.nan), counts=counts, spread=math.sqrt(variance), freedom=float(trusted)
    )


def _means(table: Floats, axis: int) -> Floats:
    known = ~np.isnan(table)
    counts = known.sum(axis=axis)
    sums = np.where(known, table, 0.0).sum(axis=axis)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _place(
    at: int, variants: Sequence[VariantTrials], fit: _Fit, memory: Sequence[int | None]
) -> tuple[Place, str | None]:
    """Whether a variant is on the front, and the one that is better if it is not."""
    own = memory[at]
    if own is None or math.isnan(fit.means[at]):
        return "none", None
    near: str | None = None
    for other, variant in enumerate(variants):
        theirs = memory[other]
        if other == at or theirs is None or math.isnan(fit.means[other]):
            continue
        faster = float(fit.means[at] - fit.means[other])
        half = fit.half(int(fit.counts[at]), int(fit.counts[other]))
        smaller = theirs < own * (1 - SAME_MEMORY)
        as_much = theirs <= own * (1 + SAME_MEMORY)
        if (faster > half and as_much) or (smaller and faster >= 0):
            return "dominated", variant.name
        if as_much and faster > 0:
            near = variant.name
    return ("near", near) if near is not None else ("front", None)


# -- words ------------------------------------------------------------------------------------------------------------

HEADS = ("variant", "status", "speed", "step", "peak memory", "front")
PLACES = {"front": "✔ on the front", "near": "≈ near it", "dominated": "", "none": ""}


def sweep_table(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row of texts per variant under ``HEADS``, the fastest first; failed ones last."""
    rows = sorted(document["variants"], key=lambda row: -(row["speed"] or 0.0))
    return [
        (
            row["variant"],
            row["status"],
            _speed_text(row, document["unit"]),
            "" if row["step_ms"] is None else ms_text(row["step_ms"]),
            "" if row["memory"] is None else bytes_text(row["memory"]),
            _place_text(row),
        )
        for row in rows
    ]


def _speed_text(row: Mapping[str, Any], unit: str) -> str:
    if row["speed"] is None:
        return ""
    half = (row["speed_interval"][1] - row["speed_interval"][0]) / 2 / row["speed"]
    return f"{number_text(row['speed'])} {unit} ±{half:.1%}"


def sweep_sentences(document: Mapping[str, Any]) -> list[str]:
    failed = [f"{row['variant']} failed: {row['status']}." for row in _failures(document)]
    return [*_front_sentences(document), *failed, *_missing_sentence(document)]


def _failures(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Variants without a speed that were tried."""
    return [row for row in document["variants"] if row["speed"] is None and row["status"] != "not run yet"]


def _missing_sentence(document: Mapping[str, Any]) -> list[str]:
    return [] if document["complete"] else ["The sweep is not complete; the same command runs what is missing."]


def _front_sentences(document: Mapping[str, Any]) -> list[str]:
    rows = {row["variant"]: row for row in document["variants"]}
    measured = [row for row in document["variants"] if row["speed"] is not None]
    sentences = []
    if document["front"]:
        fastest, smallest = rows[document["front"][-1]], rows[document["front"][0]]
        sentences.append(
            f"Fastest: {fastest['variant']}, {_speed_text(fastest, document['unit'])}, {bytes_text(fastest['memory'])}."
        )
        if smallest is not fastest:
            share = smallest["speed"] / fastest["speed"]
            sentences.append(
                f"Least memory: {smallest['variant']}, {bytes_text(smallest['memory'])}, at {share:.0%} of that speed."
            )
    elif measured:
        sentences.append("The memory of the variants is not known, so there is no front.")
    return sentences


def _memory_words(points: Sequence[Mapping[str, Any]]) -> str:
    of = {row["memory_of"] for row in points}
    return f"peak memory of {'the device' if of == {'device'} else 'a process'} (largest rank)"


# -- page -------------------------------------------------------------------------------------------------------------


def sweep_page(document: Mapping[str, Any], runs: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the page shows of a sweep, in the form of ``reports/page/documents.py``.

    ``runs``: by variant, the ID of a run that can be opened from there.
    """
    document = printable_document(document)
    title, *more = [*_front_sentences(document), *_missing_sentence(document)] or ["No variant was measured."]
    return page_document(
        "sweep",
        document["name"],
        [count_text(len(document["variants"]), "variant"), count_text(document["rounds"], "round")],
        [_front_part(document, runs or {}), *tables_part("Variants", [_variants_table(document)])],
        verdict=finding_part(
            "info" if document["front"] else "warning",
            title,
            sides=titled_lists([("Also", [(line, "") for line in more])]),
        ),
        complete=document["complete"],
    )


def _front_part(document: Mapping[str, Any], runs: Mapping[str, str]) -> dict[str, Any]:
    """Memory and time of each variant; the time of a step or, where variants process other amounts, of a sample."""
    rows = [row for row in document["variants"] if row["speed"] is not None and row["memory"] is not None]
    what = document["unit"].partition("/")[0].removesuffix("s")
    points = [
        {
            "name": row["variant"],
            "memory": row["memory"],
            "ns": finite(1e9 / row["speed"]),
            "interval_ns": [finite(1e9 / speed) for speed in reversed(row["speed_interval"])],
            "place": row["front"],
            "facts": [
                ["speed", _speed_text(row, document["unit"])],
                ["step", ms_text(row["step_ms"])],
                ["peak memory", bytes_text(row["memory"])],
                ["front", _place_text(row)],
            ],
            "run": runs.get(row["variant"]),
        }
        for row in sorted(rows, key=_by_memory)
    ]
    return {
        "form": "front",
        "title": f"Memory and time per {what}",
        "about": f"bars: {document['confidence']:.0%} intervals; the best are at the lower left",
        "label": _label(document),
        "across": _memory_words(rows),
        "up": f"time per {what}",
        "points": points,
        "failed": [[row["variant"], row["status"]] for row in _failures(document)],
    }


def _place_text(row: Mapping[str, Any]) -> str:
    return PLACES[row["front"]] or (f"{row['better']} is better" if row["better"] else "")


def _variants_table(document: Mapping[str, Any]) -> dict[str, Any] | None:
    unit = document["unit"]
    rows = [
        {
            "variant": row["variant"],
            "front": _place_text(row),
            unit: row["speed"],
            "interval": " to ".join(map(number_text, row["speed_interval"] or ())),
            "step_ns": None if row["step_ms"] is None else row["step_ms"] * 1e6,
            "memory_bytes": row["memory"],
            "status": row["status"],
            "settings": _settings_text(row["settings"]),
        }
        for row in sorted(document["variants"], key=lambda row: -(row["speed"] or 0.0))
    ]
    table = {"title": "Variants", "note": "", "left_out": 0, "columns": list(rows[0]) if rows else [], "rows": rows}
    return page_table(table, len(rows))


def _settings_text(settings: Mapping[str, Any]) -> str:
    """As one would type them: variables, options of ``stepscope run``, arguments of the script."""
    variables = [f"{name}={value}" for name, value in settings.get("env", {}).items()]
    return shlex.join([*variables, *settings.get("options", ()), *settings.get("args", ())])


# -- picture ----------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 46, 64
TICKS = 5
NAME_WIDTH, NAME_HEIGHT = 110, 15
_STYLE = """\
svg { font: 13px system-ui, sans-serif; background: #fff; color: #1b1f24; }
text { fill: #57606a; } .title { fill: #1b1f24; font-weight: 650; font-size: 15px; } .grid { stroke: #e8eaee; }
.line { fill: none; stroke: #0b62c4; stroke-width: 2; } .front { fill: #0b62c4; } .near { fill: #8fa6bf; }
.dominated { fill: #fff; stroke: #57606a; stroke-width: 1.5; } .error { stroke: #57606a; } .failed { fill: #b3261e; }
.name { fill: #1b1f24; }
@media (prefers-color-scheme: dark) {
  svg { background: #16181d; } text { fill: #9aa4b2; } .title, .name { fill: #e8eaee; } .grid { stroke: #2b3038; }
  .line { stroke: #6cb1ff; } .front { fill: #6cb1ff; } .dominated { fill: #16181d; stroke: #9aa4b2; }
  .error { stroke: #9aa4b2; } .failed { fill: #ff8b82; }
}"""


def front_svg(document: Mapping[str, Any]) -> str:
    """The front as one picture: memory to the right, speed upwards; failed variants are listed below."""
    points = [row for row in document["variants"] if row["speed"] is not None and row["memory"] is not None]
    failed = _failures(document)
    height = HEIGHT + 18 * len(failed)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    label = escape(_label(document), {'"': "&quot;"})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">',
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="24">{escape(document["name"])}: speed and peak memory</text>',
    ]
    if points:
        parts += _plot(points, document)
    else:
        parts.append(f'<text x="{LEFT}" y="{TOP + 40}">No variant has a speed and a peak of memory.</text>')
    for place, row in enumerate(failed):
        text = escape(f"✖ {row['variant']}: {row['status']}")
        parts.append(f'<text class="failed" x="{LEFT}" y="{HEIGHT + 8 + 18 * place}">{text}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _label(document: Mapping[str, Any]) -> str:
    return " ".join([f"Speed and memory of {document['name']}.", *sweep_sentences(document)])


def _plot(points: Sequence[Mapping[str, Any]], document: Mapping[str, Any]) -> list[str]:
    memory = _axis([row["memory"] for row in points])
    speed = _axis([value for row in points for value in row["speed_interval"]])

    def x(value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (value - memory[0]) / (memory[1] - memory[0]), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - speed[0]) / (speed[1] - speed[0]), 1)

    parts = []
    for at in range(TICKS):
        share = at / (TICKS - 1)
        bytes_at, speed_at = (low + (high - low) * share for low, high in (memory, speed))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(speed_at)}" y2="{y(speed_at)}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(speed_at) + 4}" text-anchor="end">{number_text(speed_at)}</text>')
        parts.append(
            f'<text x="{x(bytes_at)}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{bytes_text(bytes_at)}</text>'
        )
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 24}" text-anchor="end">{_memory_words(points)}</text>')
    parts.append(f'<text x="{LEFT - 70}" y="{TOP - 14}">{document["unit"]}</text>')
    front = sorted((row for row in points if row["front"] == "front"), key=_by_memory)
    corners: list[str] = []
    for row in front:
        if corners:
            corners.append(f"{x(row['memory'])},{corners[-1].partition(',')[2]}")
        corners.append(f"{x(row['memory'])},{y(row['speed'])}")
    parts.append(f'<polyline class="line" points="{" ".join(corners)}"/>')
    placed: list[tuple[float, float]] = []
    for row in sorted(points, key=lambda row: -row["speed"]):
        left, top = x(row["memory"]), y(row["speed"])
        low, high = (y(value) for value in row["speed_interval"])
        end = left > WIDTH * 0.75
        parts.append(f'<line class="error" x1="{left}" x2="{left}" y1="{low}" y2="{high}"/>')
        parts.append(
            f'<circle class="{row["front"]}" cx="{left}" cy="{top}" r="5"><title>{escape(row["variant"])}: '
            f"{escape(_speed_text(row, document['unit']))}, {bytes_text(row['memory'])}</title></circle>"
        )
        across = left + (-9 if end else 9)
        down = _free(across, top - 7, placed)
        placed.append((across, down))
        anchor = "end" if end else "start"
        name = escape(row["variant"])
        parts.append(f'<text class="name" x="{across}" y="{down}" text-anchor="{anchor}">{name}</text>')
    return parts


def _free(across: float, down: float, placed: Sequence[tuple[float, float]]) -> float:
    """The next place below for a name that would cover another one."""
    while any(abs(across - x) < NAME_WIDTH and abs(down - y) < NAME_HEIGHT for x, y in placed):
        down += NAME_HEIGHT
    return down


def _axis(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = max((high - low) * 0.12, high * 0.02)
    return max(low - room, 0.0), high + room
