"""Evidence, facts and notes in words: names for keys, numbers with the unit of their key, nested values as rows.

The page draws the rows as they are.  A value has a ``form``: ``text``, ``time`` (``wall_ns``, shown in the reader's
time zone), ``list`` (``items``), ``pairs`` (``rows`` of ``name`` and ``value``) or ``table`` (``columns``, ``rows`` of
texts); all but the first two say how many entries they leave out (``left``).  Evidence may come from another version or
from anyone, so any shape is accepted, and the amount is limited.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

from stepscope.flight.wording import spans_text
from stepscope.records.text import bytes_text, duration_text, ms_text, ns_text

__all__ = ["evidence_rows", "facts_sections", "figure_text", "flat_text", "key_name", "percent_text"]

Shown = dict[str, Any]


# -- names and figures ------------------------------------------------------------------------------------------------

NAMES = {
    "action": "what was done",
    "after_ms": "afterwards",
    "at": "place",
    "at_steps": "in steps",
    "before_ms": "before",
    "between": "between steps",
    "compared": "what was compared",
    "excess_ms": "longer by",
    "excess_ms_by_phase": "longer by, per phase",
    "excess_share": "longer by, share of the step",
    "explains": "also explains",
    "extra_ms": "extra",
    "extra_ms_by_phase": "extra per phase",
    "first_bytes": "at the start",
    "first_ms": "at the start",
    "first_step": "from step",
    "gain_ms": "gain per step if fixed",
    "large": "a fifth of the training time or more",
    "last_bytes": "at the end",
    "last_in_steps": "arrived last in steps",
    "last_ms": "at the end",
    "last_step": "to step",
    "least_gain_ms": "gain per step if fixed, at least",
    "logged_steps": "steps in the framework's logs",
    "lockstep": "ranks wait for each other",
    "median_ms_by_rank": "median by rank",
    "ms_per_1000_steps": "growth per 1,000 steps",
    "opportunities": "possible gain, at most",
    "opportunity": "largest opportunity",
    "others_rtt_us": "round trip of others",
    "over": "how it ended",
    "p": "probability by chance (p)",
    "peer": "compared with rank",
    "peers_median_ms": "median of the others",
    "place": "place in the code",
    "rtt_us": "round trip",
    "runs_out_in_s": "runs out in",
    "steps_used": "steps analyzed",
    "stood_s": "hung for",
    "stopped_wall_ns": "last activity",
    "threshold_s": "examined after",
    "told_by": "evidence",
    "usual_ms": "usually",
    "util_percent": "utilization",
    "victims": "waiting ranks",
    "wait_measured": "waiting was measured",
    "wall_ns": "when",
    "wander_ms": "normal variation",
    "which": "which memory",
    "z": "standard errors (z)",
}
"""Names for keys that are not clear by themselves."""
WORDS = {
    "cpu": "CPU",
    "gpu": "GPU",
    "gpus": "GPUs",
    "ddp": "DDP",
    "rss": "resident memory",
    "rtt": "round trip",
    "sm": "SM",
    "pid": "process",
    "tcp": "TCP",
    "ib": "InfiniBand",
    "tf32": "TF32",
    "gc": "garbage collector",
    "op": "operation",
    "ops": "operations",
    "net": "network",
    "mem": "memory",
    "rx": "received",
    "tx": "sent",
    "io": "I/O",
}
_UNIT_AT_END = re.compile(r"_(wall_ns|ms|us|ns|bytes|share|percent|mhz|bps|ps|s|mb|w|c)$")
_UNIT_INSIDE = re.compile(r"_(wall_ns|ms|bytes|share|ns|mb)_")


@lru_cache(4096)
def key_name(key: str) -> str:
    """``peak_allocated_bytes`` → ``peak allocated``."""
    if key in NAMES:
        return NAMES[key]
    plain = _UNIT_INSIDE.sub("_", _UNIT_AT_END.sub("", key))
    return " ".join(WORDS.get(word, word) for word in plain.split("_") if word) or key


def percent_text(share: float) -> str:
    """``3.4%``, ``61%``."""
    percent = share * 100
    return f"{percent:.1f}%" if abs(percent) < 9.95 and percent else f"{math.floor(percent + 0.5)}%"


def _plain_number(value: float) -> str:
    """A number without unit: whole ones in full, others with three digits."""
    if value == int(value):
        return f"{int(value):,}"
    size = abs(value)
    if size < 0.001:
        mantissa, _, power = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(power)}"
    if size < 1:
        return f"{value:.2g}"
    places = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{value:,.{places}f}"


def _with(unit: str) -> Callable[[float], str]:
    return lambda value: f"{_plain_number(value)}{unit}"


def _per_second(value: float) -> str:
    return f"{_bytes(value)}/s"


def _bytes(value: float) -> str:
    return f"-{bytes_text(-value)}" if value < 0 else "<1 B" if 0 < value < 0.5 else bytes_text(value)


UNITS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("_ms_by_rank", ms_text),
    ("_ms_by_phase", ms_text),
    ("ms_per_step", lambda value: f"{ms_text(value)} per step"),
    ("ms_per_1000_steps", ms_text),
    ("bytes_per_step", lambda value: f"{_bytes(value)} per step"),
    ("bytes_per_second", _per_second),
    ("steps_per_second", _with(" steps/s")),
    ("_percent", _with("%")),
    ("_share", percent_text),
    ("_bps", _per_second),
    ("_mhz", _with(" MHz")),
    ("_ps", _with("/s")),
    ("_ms", ms_text),
    ("_us", lambda value: ns_text(value * 1e3)),
    ("_ns", ns_text),
    ("_mb", _with(" MiB")),
    ("_s", duration_text),
    ("_w", _with(" W")),
    ("_c", _with(" °C")),
    ("pressure", percent_text),
    ("seconds", duration_text),
    ("bytes", _bytes),
    ("share", percent_text),
    ("shares", percent_text),
    ("opportunities", percent_text),
)
"""By the end of the key, the longest first."""


@lru_cache(4096)
def _unit_of(key: str) -> Callable[[float], str]:
    return next((write for end, write in UNITS if key.endswith(end)), _plain_number)


def figure_text(key: str, value: float) -> str:
    """A number with its unit; names from the kernel or torch may end like a unit without having one."""
    if not math.isfinite(value):
        return "–"
    write = _unit_of(key)
    return write(value).replace("-", "−", 1) if value < 0 else write(value)


# -- rows -------------------------------------------------------------------------------------------------------------

MOST_ROWS = 24
MOST_COLUMNS = 10
DEEPEST = 4
LONGEST = 2000
SENTENCE = 40
"""Texts longer than this become a list instead of one line."""
_RANKS = re.compile(r"(^|_)(ranks?|victims|culprits|suspects|waiters|waited|members|last_most_often)$")
_WHOLE = re.compile(r"_by_|^shares$|^opportunities$")
"""Values by rank or phase have the unit of the key: ``excess_ms_by_phase``."""
_PLACE = {"file", "line", "function", "text", "share", "seen", "steps"}

SECTIONS = {
    "loader": "Data",
    "ddp": "DistributedDataParallel",
    "fsdp": "FullyShardedDataParallel",
    "model": "Model",
    "optimizer": "Optimizer",
    "gc": "Garbage collector",
}
"""Facts about one object each."""
_SHOWN_ELSEWHERE = ("evaluations", "mesh", "peers", "progress")


def evidence_rows(evidence: Any, *, without: Collection[str] = ()) -> list[dict[str, Any]]:
    """One row per known key: ``key``, ``name`` and ``value``."""
    if not isinstance(evidence, Mapping):
        return []
    return [
        {"key": str(key), "name": key_name(str(key)), "value": _shown(str(key), value, 0)}
        for key, value in evidence.items()
        if key not in without and not _is_empty(value)
    ]


def facts_sections(facts: Any) -> list[dict[str, Any]]:
    """The settings of a rank: ``title`` and ``rows`` of each of its objects, then of the rest."""
    if not isinstance(facts, Mapping):
        return []
    nested = {key: title for key, title in SECTIONS.items() if isinstance(facts.get(key), Mapping)}
    found = [{"title": title, "rows": evidence_rows(facts[key])} for key, title in nested.items()]
    rest = {key: value for key, value in facts.items() if key not in nested and key not in _SHOWN_ELSEWHERE}
    return [section for section in (*found, {"title": "Others", "rows": evidence_rows(rest)}) if section["rows"]]


def flat_text(value: Any, key: str = "") -> str:
    """A value in one line: ``loss 0.25, epoch 3``."""
    if isinstance(value, Mapping):
        known = [(str(name), inner) for name, inner in value.items() if not _is_empty(inner)]
        return ", ".join(f"{key_name(name)} {_flat(_shown(name, inner, 0))}" for name, inner in known)
    return "" if value is None else _flat(_shown(key, value, 0))


def _place_of(value: Any) -> str | None:
    """``train.py:41 in step`` for a value with file and line; None: it is not a place."""
    if not isinstance(value, Mapping) or not isinstance(value.get("file"), str) or type(value.get("line")) is not int:
        return None
    if any(key not in _PLACE for key in value):
        return None
    where = f"{value['file']}:{value['line']}" if value["line"] else str(value["file"])
    return f"{where} in {value['function']}" if isinstance(value.get("function"), str) and value["function"] else where


def _shown(key: str, value: Any, depth: int) -> Shown:
    if isinstance(value, list | tuple):
        return _listed(key, value, depth)
    if isinstance(value, Mapping):
        return _text("…") if depth >= DEEPEST else _nested(key, value, depth)
    if key.endswith("wall_ns") and type(value) in (int, float) and 0 < value < 1 << 62:
        return {"form": "time", "wall_ns": value}
    return _text(_plain(key, value))


def _plain(key: str, value: Any) -> str:
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return figure_text(key, value)
    text = str(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _listed(key: str, values: Sequence[Any], depth: int) -> Shown:
    if _RANKS.search(key) and all(type(value) is int for value in values):
        return _text(spans_text(sorted(set(values))))
    if not any(isinstance(value, Mapping | list | tuple) for value in values):
        some = [_plain(key, value) for value in values[:MOST_ROWS]]
        left = len(values) - len(some)
        if any(len(text) > SENTENCE for text in some):
            return {"form": "list", "items": [_text(text) for text in some], "left": left}
        return _text(", ".join(some) + _more(left))
    if depth >= DEEPEST:
        return _text("…")
    if len(values) > 1 and all(isinstance(value, Mapping) for value in values):
        return _table(values, depth)
    items = [_shown(key, value, depth + 1) for value in values[:MOST_ROWS]]
    return items[0] if len(values) == 1 else {"form": "list", "items": items, "left": len(values) - len(items)}


def _nested(key: str, value: Mapping[Any, Any], depth: int) -> Shown:
    place = _place_of(value)
    if place is not None:
        return _text(place)
    entries = [(str(name), inner) for name, inner in value.items() if not _is_empty(inner)]
    by_rank = key.endswith("_by_rank") or (bool(entries) and all(name.isdecimal() for name, _ in entries))
    whole = _WHOLE.search(key) is not None
    rows = [
        {
            "key": name,
            "name": f"rank {name}" if by_rank else name if whole and name != "between" else key_name(name),
            "value": _shown(key if whole or by_rank else name, inner, depth + 1),
        }
        for name, inner in entries[:MOST_ROWS]
    ]
    return {"form": "pairs", "rows": rows, "left": len(entries) - len(rows)}


def _table(values: Sequence[Mapping[Any, Any]], depth: int) -> Shown:
    keys = dict.fromkeys(key for value in values for key in value)
    columns = [key for key in keys if any(not _is_empty(value.get(key)) for value in values)][:MOST_COLUMNS]
    rows = [
        ["–" if _is_empty(value.get(key)) else _flat(_shown(str(key), value[key], depth + 1)) for key in columns]
        for value in values[:MOST_ROWS]
    ]
    names = [key_name(str(key)) for key in columns]
    return {"form": "table", "columns": names, "rows": rows, "left": len(values) - len(rows)}


def _flat(value: Shown) -> str:
    if value["form"] == "text":
        return str(value["text"])
    if value["form"] == "time":
        return datetime.fromtimestamp(value["wall_ns"] / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    if value["form"] == "list":
        return "; ".join(map(_flat, value["items"])) + _more(value["left"])
    if value["form"] == "pairs":
        return ", ".join(f"{row['name']} {_flat(row['value'])}" for row in value["rows"]) + _more(value["left"])
    rows = (
        ", ".join(f"{name} {cell}" for name, cell in zip(value["columns"], row, strict=True)) for row in value["rows"]
    )
    return "; ".join(rows) + _more(value["left"])


def _text(text: str) -> Shown:
    return {"form": "text", "text": text}


def _more(left: int) -> str:
    return f" and {left} more" if left > 0 else ""


def _is_empty(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, list | tuple | Mapping) and not value)
