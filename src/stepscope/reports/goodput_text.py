"""The ledger of a run in words: names of its parts, the line of the summary, the table of ``stepscope goodput``.

``web/src/panels/goodput.tsx`` draws what ``goodput_view`` and ``advice_view`` return.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.goodput import PARTS
from stepscope.records.text import count_text, duration_text, share_text
from stepscope.reports.layout import bar

__all__ = [
    "PART_NAMES",
    "advice_view",
    "goodput_line",
    "goodput_lines",
    "goodput_view",
    "is_worth_showing",
    "job_lines",
    "parts_line",
]

PART_NAMES: Mapping[str, str] = {
    "start_up": "start-up",
    "imports": "imports",
    "process_group": "process group",
    "compile": "compile",
    "training": "training",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "stalls": "stalls",
    "hang": "hang",
    "lost": "lost and repeated",
    "restart": "restart",
    "shutdown": "shutdown",
    "unknown": "not recorded",
}
LETTERS: Mapping[str, str] = {
    "start_up": "s",
    "imports": "i",
    "process_group": "g",
    "compile": "c",
    "training": "█",
    "evaluation": "e",
    "checkpoint": "k",
    "stalls": "!",
    "hang": "h",
    "lost": "x",
    "restart": "r",
    "shutdown": "d",
    "unknown": "?",
}
"""Of the picture in the terminal."""
LOST_BY = {
    "counter": "known from the script's own step count",
    "checkpoint": "estimated from the last checkpoint",
    "no_checkpoint": "all of them, because no checkpoint was seen (estimated)",
}
LOW = 0.5
LONG_S = 600.0
"""Goodput below ``LOW`` is shown in the summary of runs that took longer than this: short runs mostly start up."""


def is_worth_showing(ledger: Mapping[str, Any]) -> bool:
    """Whether the summary shows the table."""
    low = ledger["goodput"] is not None and ledger["goodput"] < LOW and ledger["seconds"] >= LONG_S
    return bool(ledger["restarts"] or low)


def goodput_line(ledger: Mapping[str, Any]) -> str:
    """``71% of 2 min 3 s was useful training; 3 restarts, 30 steps lost and repeated``."""
    if ledger["goodput"] is None:
        return "the run has no duration"
    so_far = " so far" if ledger.get("active") else ""
    line = f"{share_text(ledger['goodput'])} of {duration_text(ledger['seconds'])}{so_far} was useful training"
    more = [count_text(ledger["restarts"], "restart")] if ledger["restarts"] else []
    if ledger["lost_steps"]:
        guess = " (estimated)" if ledger["estimated"] else ""
        more.append(f"{count_text(ledger['lost_steps'], 'step')} lost and repeated{guess}")
    return f"{line}; {', '.join(more)}" if more else line


def parts_line(parts: Mapping[str, float], seconds: float) -> list[str]:
    """``training 12.3 s (71%)`` for each part that has any time."""
    return [
        f"{PART_NAMES[part]} {duration_text(parts[part])} ({share_text(parts[part] / seconds if seconds else 0.0)})"
        for part in PARTS
        if parts.get(part)
    ]


def goodput_view(ledger: Any) -> dict[str, Any] | None:
    """The ledger of a summary, which may be of another version, as the page draws it, or None.

    ``parts``: of the whole run; ``attempts``: the last ones, each with its own parts in the order in which they are
    drawn; ``longest_s``: the duration of a whole bar; ``notes``: sentences about lost and unsaved steps.
    """
    try:
        attempts = ledger["attempts"]
        rows = [_attempt_view(attempt) for attempt in attempts[-ATTEMPTS_DRAWN:]]
        return {
            "line": goodput_line(ledger),
            "parts": _parts_view(ledger["parts"], ledger["seconds"]),
            "attempts": rows,
            "left": max(len(attempts) - ATTEMPTS_DRAWN, 0),
            "longest_s": max((row["seconds"] for row in rows), default=0.0),
            "notes": _notes(attempts[-ATTEMPTS_DRAWN:]),
        }
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError):
        return None


ATTEMPTS_DRAWN = 40


def _attempt_view(attempt: Mapping[str, Any]) -> dict[str, Any]:
    seconds = float(attempt["seconds"])
    took = duration_text(seconds)
    useful = "" if attempt["goodput"] is None else f", {share_text(attempt['goodput'])} useful"
    parts = _parts_view(attempt["parts"], seconds)
    return {"name": f"attempt {attempt['attempt']}", "seconds": seconds, "text": f"{took}{useful}", "parts": parts}


def _parts_view(parts: Mapping[str, float], of: float) -> list[dict[str, Any]]:
    return [
        {
            "part": part,
            "name": PART_NAMES[part],
            "seconds": float(parts[part]),
            "text": f"{duration_text(parts[part])} ({share_text(parts[part] / of if of else 0.0)})",
        }
        for part in ORDER
        if parts.get(part)
    ]


def advice_view(advice: Any) -> dict[str, Any] | None:
    """The advice after a failure of a summary, which may be of another version, or None."""
    if not isinstance(advice, Mapping) or not isinstance(advice.get("text"), str) or not advice["text"]:
        return None
    text, evidence = advice["text"], advice.get("evidence")
    rows = [row for row in evidence if isinstance(row, Mapping)] if isinstance(evidence, list) else []
    code = advice.get("exit_code")
    return {
        "text": text[0].upper() + text[1:],
        "evidence": [f"{row.get('source')}: {row.get('text')}" for row in rows],
        "command": f"stepscope advise returns {code}" if type(code) is int else "",
    }


def goodput_lines(ledger: Mapping[str, Any], *, width: int) -> list[str]:
    """The table and the picture of ``stepscope goodput RUN``."""
    lines = [f"goodput: {goodput_line(ledger)}", ""]
    lines += _table(ledger["parts"], ledger["seconds"], width)
    attempts = ledger["attempts"]
    lines += ["", *_picture(attempts, width)]
    return lines + _notes(attempts)


def _notes(attempts: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is known of the steps that were lost, and how many would be now."""
    notes = []
    for attempt in attempts:
        if attempt["lost_steps"]:
            number, count = attempt["attempt"], count_text(attempt["lost_steps"], "step")
            notes.append(f"attempt {number}: {count} lost and repeated, {LOST_BY.get(attempt['lost_by'], '')}")
    last = attempts[-1] if attempts else None
    if last is not None and last["steps"] and last["unsaved_steps"] != 0:
        notes.append(_unsaved(last))
    return notes


def _unsaved(last: Mapping[str, Any]) -> str:
    unsaved = last["unsaved_steps"]
    if unsaved is None:
        return f"no checkpoint was seen in attempt {last['attempt']} ({count_text(last['steps'], 'step')})"
    took = duration_text(unsaved * last["step_s"])
    return f"{count_text(unsaved, 'step')} ({took}) since the last checkpoint of attempt {last['attempt']}"


def _table(parts: Mapping[str, float], seconds: float, width: int) -> list[str]:
    names = max(len(name) for name in PART_NAMES.values())
    columns = max(width - names - 26, 10)
    return [
        f"{PART_NAMES[part]:<{names}}  {duration_text(parts[part]):>11}  {share_text(parts[part] / seconds):>5}  "
        f"{bar(parts[part] / seconds, columns)}".rstrip()
        for part in PARTS
        if parts.get(part) and seconds
    ]


def _picture(attempts: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """One line per attempt: its parts in their usual order, as long as the attempt took."""
    longest = max((attempt["seconds"] for attempt in attempts), default=0.0)
    if not longest:
        return []
    columns = max(width - 32, 10)
    lines, used = [], dict.fromkeys(PARTS, False)
    for attempt in attempts:
        drawn = ""
        until = 0.0
        for part in ORDER:
            until += attempt["parts"].get(part, 0.0)
            cells = round(until / longest * columns)
            used[part] |= cells > len(drawn)
            drawn += LETTERS[part] * (cells - len(drawn))
        share = share_text(attempt["goodput"]) if attempt["goodput"] is not None else "–"
        lines.append(f"attempt {attempt['attempt']:<3} {duration_text(attempt['seconds']):>11} {share:>5}  {drawn}")
    legend = "  ".join(f"{LETTERS[part]} {PART_NAMES[part]}" for part in ORDER if used[part])
    return [*lines, *([*textwrap.wrap(legend, width), ""] if legend else [])]


ORDER = (
    *("restart", "start_up", "imports", "process_group", "compile", "training", "evaluation", "checkpoint"),
    *("stalls", "lost", "hang", "unknown", "shutdown"),
)
"""As they follow each other in an attempt, roughly."""


def job_lines(jobs: Sequence[Mapping[str, Any]], runs: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of ``stepscope goodput --all``: each job of several runs, then its runs."""
    rows = []
    for job in jobs:
        names = job["runs"]
        if len(names) > 1:
            apart = f" (+{duration_text(job['between_runs_s'])} between)" if job["between_runs_s"] else ""
            rows.append((f"job of {len(names)} runs{apart}", job["status"], *_cells(job)))
        rows += [
            (f"{'  ' if len(names) > 1 else ''}{name}", runs[name]["status"], *_cells(runs[name])) for name in names
        ]
    return rows


def _cells(ledger: Mapping[str, Any]) -> tuple[str, ...]:
    waste = {part: seconds for part, seconds in ledger["parts"].items() if part != "training" and seconds}
    most = max(waste, key=lambda part: waste[part], default=None)
    share = share_text(ledger["goodput"]) if ledger["goodput"] is not None else "–"
    rest = "" if most is None else f"{PART_NAMES[most]} {share_text(waste[most] / ledger['seconds'])}"
    guess = "~" if ledger["estimated"] and ledger["lost_steps"] else ""
    return duration_text(ledger["seconds"]), share, str(ledger["restarts"]), f"{guess}{ledger['lost_steps']:,}", rest
