"""Parts of the terminal view: step times, phases and ranks as bars and tables. Pure.

The text of findings and events comes from the hub.

Drawing: text and bars, the step time, its phases, the table of ranks, one rank in detail.

The phases show the mean over the ranks next to the rank that works longest.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from stepscope.hangs.report import HUNG
from stepscope.records.steps import BUILTIN_PHASES
from stepscope.records.text import bytes_text, count_text, duration_text, ms_text, printable, share_text
from stepscope.reports.layout import MARKS, bar
from stepscope.terminal.documents import (
    Ranks,
    Snapshot,
    on_clock,
    recent_rows,
    row_steps,
    steps_per_second,
    still_s,
    stretch_steps,
    usual_wall_ns,
    usual_words,
)

__all__ = [
    "ORDERS",
    "STYLES",
    "columns",
    "draw_phases",
    "draw_rank",
    "draw_ranks",
    "draw_step_time",
    "finding_line",
    "fit",
    "mean_times",
    "news_line",
    "plain",
    "printed_lines",
    "spark",
    "still_words",
    "wrapped",
]

# -- text and bars ----------------------------------------------------------------------------------------------------
# Text for a screen of cells, cut, padded and wrapped by display width.
#
# Names of hosts and runs, titles and log lines come from other people. Unprintable characters (escape sequences, line
# ends, marks that change the writing direction) become ``?``. We add styles; they are never read from the text.

STYLES = {"critical": "bold red", "warning": "bold yellow", "info": "cyan", "healthy": "green"}
SPARKS = "▁▂▃▄▅▆▇█"
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""Colors and cursor movements in a job's output, which are not shown."""
_VARIANTS = re.compile("[\ufe00-\ufe0f]")
"""Variation selectors request another width for the preceding character, and terminals disagree about it."""
_TAB = 4


def plain(text: str) -> str:
    """One line without anything that a terminal would interpret."""
    return printable(_VARIANTS.sub("", text), mark="?")


def fit(text: str, width: int) -> str:
    """Pad the text to exactly ``width`` cells, or cut it with an ellipsis."""
    text = plain(text)
    if width <= 0:
        return ""
    if cell_len(text) > width:
        return set_cell_size(set_cell_size(text, width - 1).rstrip() + "…", width)
    return set_cell_size(text, width)


def columns(parts: Iterable[tuple[str, str]], width: int) -> Text:
    """Put styled pieces on one line, cut at the width."""
    line = Text(no_wrap=True, end="")
    left = width
    for text, style in parts:
        words = plain(text)
        if cell_len(words) > left:
            line.append(fit(words, left), style)
            return line
        line.append(words, style)
        left -= cell_len(words)
    return line


def wrapped(text: str, width: int, most: int) -> list[str]:
    """At most ``most`` lines, broken between words; the last is cut if the text is longer."""
    words, lines = plain(" ".join(text.split())).split(" "), [""]
    for word in words:
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > most:
        lines = [*lines[: most - 1], " ".join(lines[most - 1 :])]
    return [fit(line, width).rstrip() for line in lines]


def printed_lines(data: bytes, most: int) -> list[str]:
    """The last lines of a job's output as a terminal would show them: ``\\r`` overwrites the line."""
    text = _ESCAPES.sub("", data.decode("utf-8", "replace"))
    lines = text.removesuffix("\n").split("\n") if text else []
    return [plain(_overwritten(line).expandtabs(_TAB)) for line in lines[-most:]] if most > 0 else []


def spark(values: Iterable[float], width: int) -> str:
    """The newest values as a line of blocks, scaled from minimum to maximum; one outlier does not flatten the rest."""
    shown = list(values)[-width:] if width > 0 else []
    if not shown:
        return ""
    ordered = sorted(shown)
    low, high = ordered[0], ordered[min(len(ordered) - 1, int(len(ordered) * 0.98))]
    # Equal step times give a flat line, not noise scaled to the full height.
    span = max(high - low, 0.1 * high)
    steps = len(SPARKS) - 1
    return "".join(SPARKS[round(min((value - low) / span, 1.0) * steps) if span else 0] for value in shown)


def _overwritten(line: str) -> str:
    parts = [part for part in line.split("\r") if part]
    return parts[-1] if parts else ""


def padded_bar(share: float, width: int) -> str:
    return bar(share, width).ljust(width)


# -- phases -----------------------------------------------------------------------------------------------------------

PHASE_NAME = 11
PHASE_NUMBER = 9
PHASE_SHARE = 5
COMM = "comm"
ODD = 1.3
"""A rank is marked if its time in a phase is this many times the mean …"""
ODD_SHARE = 0.05
"""… and the difference is this share of the step."""
FOLD_FROM = 3
"""With more lines than this, the last one sums up the phases without their own line …"""
FOLD_SHARE = 0.02
"""… if they take this share of the step."""
PHASE_COLORS = {
    "input": "yellow",
    "h2d": "yellow",
    "forward": "blue",
    "backward": "magenta",
    "comm": "cyan",
    "optimizer": "green",
    "eval": "white",
    "checkpoint": "white",
}


def mean_times(known: Snapshot) -> dict[str, float]:
    """Mean over the ranks and steps of the stretch, by ``wall``, ``work`` and phase, in nanoseconds."""
    rows = recent_rows(known)
    names = dict.fromkeys(name for row in rows for name in row.mean_ns)
    steps = sum(map(row_steps, rows))
    return {name: sum(row.mean_ns.get(name, 0.0) * row_steps(row) for row in rows) / steps for name in names}


def draw_phases(known: Snapshot, width: int, height: int) -> list[Text]:
    """Draw the longest phases in the order of a step; the last line sums up the others if they matter."""
    mean = mean_times(known)
    wall = mean.pop("wall", 0.0)
    mean.pop("work", None)
    if wall <= 0:
        return []
    slow = _slowest(known)
    by_weight = sorted(mean, key=lambda name: -_phase_weight(name, mean, slow))
    left_out = sum(mean[name] for name in by_weight[max(0, height - 1) :])
    folded = by_weight[height - 2 :] if height > FOLD_FROM and left_out > FOLD_SHARE * wall else []
    own = by_weight[: max(1, height - 1 - bool(folded))]
    shown, folded = sorted(own, key=_phase_order), [name for name in folded if _phase_weight(name, mean, slow) > 0]
    longest = max([1.0, *(mean[name] for name in shown), *(slow.get(name, 0.0) for name in shown)])
    columns_of_rank = PHASE_NUMBER + 2 if slow else 0
    room = width - PHASE_NAME - PHASE_NUMBER - PHASE_SHARE - columns_of_rank
    each = max(4, (room - 4) // 2 if slow else room - 2)
    rows = [_phase_row(name, mean[name], slow.get(name), wall, longest, each, width) for name in shown]
    if folded:
        together = sum(mean[name] for name in folded)
        of_slow = sum(slow.get(name, 0.0) for name in folded) if slow else None
        rows.append(_phase_row(f"+{len(folded)} more", together, of_slow, wall, longest, each, width))
    return [_phase_title(known, width, each, bool(slow)), *rows][:height]


def phase_head(known: Snapshot) -> str:
    """Title of the phase column, which names the clock if devices are timed as well."""
    return "on device" if known.on_device else "host phase" if known.device_timed else "phase"


def _phase_row(name: str, mean: float, slow: float | None, wall: float, longest: float, each: int, width: int) -> Text:
    color = PHASE_COLORS.get(name, "white")
    parts = [
        (fit(name, PHASE_NAME), ""),
        (f"{ms_text(mean / 1e6):>{PHASE_NUMBER}}{share_text(mean / wall):>{PHASE_SHARE}}", ""),
        ("  ", ""),
        (padded_bar(mean / longest, each), color),
    ]
    if slow is not None:
        odd = name != COMM and slow > ODD * mean and slow - mean > ODD_SHARE * wall
        parts += [
            (f"{ms_text(slow / 1e6):>{PHASE_NUMBER}}", "bold" if odd else ""),
            (" ◀" if odd else "  ", "bold red"),
            ("  ", ""),
            (padded_bar(slow / longest, each), color),
        ]
    return columns(parts, width)


def _phase_title(known: Snapshot, width: int, each: int, both: bool) -> Text:
    count = known.status.ranks if known.status is not None else 0
    left = f"{phase_head(known):<{PHASE_NAME}}{'mean':>{PHASE_NUMBER}}{'':>{PHASE_SHARE}}  "
    steps = count_text(stretch_steps(known), "step")
    forms = [f"of {steps}, {count:,} ranks", f"{steps}, {count:,} ranks"] if count != 1 else [f"of {steps}"]
    over = next((words for words in (*forms, steps) if len(words) <= each), "")
    parts = [(left, "dim"), (fit(over, each), "dim")]
    if both and known.slowest is not None:
        rank = f"{f'rank {known.slowest.rank[0]}':>{PHASE_NUMBER}}    "
        parts += [(rank, "dim"), ("works longest" if each >= len("works longest") else "", "dim")]
    return columns(parts, width)


def _slowest(known: Snapshot) -> dict[str, float]:
    """Times of the rank that works longest; empty for a single rank."""
    table = known.slowest
    if table is None or not table.rank or table.total < 2:
        return {}
    return {name: values[0] for name, values in table.mean_ns.items() if values and name not in ("wall", "work")}


def _phase_weight(name: str, mean: dict[str, float], slow: dict[str, float]) -> float:
    return max(mean[name], slow.get(name, 0.0))


def _phase_order(name: str) -> tuple[int, str]:
    """Order within a step: built-in phases, then ``other`` (what no hook claims), then the user's phases."""
    if name == "other":
        return len(BUILTIN_PHASES), name
    return (BUILTIN_PHASES.index(name), name) if name in BUILTIN_PHASES else (len(BUILTIN_PHASES) + 1, name)


# -- step time --------------------------------------------------------------------------------------------------------
# The step time and what it is a figure of, the step rate, and the newest steps as a line of blocks.

STEP_LABEL = 8
LEAST_SPARK = 12
"""Minimum number of blocks; words that would leave less room are dropped."""


def draw_step_time(known: Snapshot, width: int, *, now_wall_ns: int = 0) -> Text:
    """``69.0 ms  median of 256, mean of ranks   14.5/s  ▁▁▂▁``; the rate is shown only while steps arrive."""
    label = (fit("step", STEP_LABEL), "dim")
    if not recent_rows(known):
        return columns([label, ("no steps" if known.over else "no steps yet", "dim")], width)
    parts = [label, (f"{ms_text(usual_wall_ns(known) / 1e6):>8}  ", "bold")]
    still, rate = still_s(known, now_wall_ns), steps_per_second(known, now_wall_ns)
    pace = (still_words(still), "bold yellow") if still is not None else (f"{rate:,.1f}/s" if rate else "", "bold")
    room = width - sum(cell_len(words) for words, _ in parts) - (cell_len(pace[0]) + 2 if pace[0] else 0)
    about = next((words for words in _figure_words(known) if cell_len(words) + 2 + LEAST_SPARK <= room), "")
    parts += [(f"{about}  ", "dim")] if about else []
    parts += [pace, ("  ", "")] if pace[0] else []
    room = width - sum(cell_len(words) for words, _ in parts)
    rows = on_clock(known.steps) if known.on_device else known.steps
    return columns([*parts, (spark([row.mean_ns["wall"] / 1e6 for row in rows], room), "cyan")], width)


def still_words(seconds: float) -> str:
    return f"no step for {duration_text(seconds, whole=True)}"


def _figure_words(known: Snapshot) -> list[str]:
    """Descriptions of the figure, the longest first."""
    middle = usual_words(known)
    if known.status is not None and known.status.ranks > 1:
        return [f"{middle}, mean of ranks", middle]
    return [f"{middle} {'step' if stretch_steps(known) == 1 else 'steps'}", middle]


# -- rank table -------------------------------------------------------------------------------------------------------
# The visible rows in the chosen order, with marks at ranks that a finding names.

T = TypeVar("T")

ORDERS = ("work", "comm", "wall", "rank")
"""Orders of the table as the API names them; the longest time comes first."""
TITLES = {"work": "work", "comm": "wait", "wall": "step", "rank": "rank"}
_STATE_STYLES = {
    "exception": "bold red",
    "vanished": "bold red",
    HUNG: "bold red",
    "exited": "dim",
    "starting": "yellow",
}
_SHORT = {"exception": "error"}
"""Short names for lack of room; all others are as on the page."""
TABLE_RANK, TABLE_STATE, TABLE_NOW, TABLE_NUMBER, TABLE_HOST = 8, 9, 15, 10, 24
"""Widths of the columns; the host gets what the others leave, up to the width that names need."""
NARROW, NARROWEST = 67, 52
"""Below these widths there is no room for a rank's current phase, and for its host and state."""
BAR_FROM = 110
"""Width from which there is room for a bar of work and wait."""
_BAR = "█░"
"""Work and wait."""
STUCK_S = 2.0
"""A rank that is in a phase for longer is shown with the time."""


@dataclass(frozen=True, kw_only=True)
class _Cells:
    rank: str
    host: str
    state: str
    now: str
    numbers: list[str]


def draw_ranks(
    known: Snapshot, width: int, height: int, *, cursor: int, start: int, order: str, now_wall_ns: int = 0
) -> list[Text]:
    """The table. ``start`` and ``cursor``: indexes of the first visible and of the chosen row in the whole table.

    The data may lag behind the view: rows that have not arrived yet are left empty.
    """
    heads = [_column_head(name, order) for name in ("work", "comm", "wall")]
    of = _of_steps(stretch_steps(known), TABLE_NOW - 4) if known.steps else ""
    title = _Cells(
        rank=_column_head("rank", order), host="host", state="state", now=f"now{of:>{TABLE_NOW - 3}}", numbers=heads
    )
    lines = [columns([(words, "dim") for words, _ in _row_parts(title, width)], width)]
    table = known.ranks
    if table is None or not table.rank:
        text = f"no rank has finished a step{'' if known.over else ' yet'}" if known.run is not None else ""
        return [*lines, columns([(f"  {text}", "dim")], width)][: max(0, height)]
    marks = marks_of(known)
    loaded = range(len(table.rank)) if table.order == order else range(0)
    for place in range(start, min(start + height - 1, table.total)):
        at = place - table.start
        line = (
            _rank_row(known, table, at, width, marks, now_wall_ns) if at in loaded else columns([("  …", "dim")], width)
        )
        lines.append(_highlight_row(line, width) if place == cursor else line)
    return lines[: max(0, height)]


def _of_steps(steps: int, room: int) -> str:
    text = f"{count_text(steps, 'step')}:"
    return text if len(text) <= room else f"of {steps:,}:"


def marks_of(known: Snapshot) -> dict[int, str]:
    """The highest severity of the findings that name a rank, by rank."""
    found: dict[int, str] = {}
    for finding in known.findings.findings if known.findings is not None else ():
        for rank in finding.ranks:
            found.setdefault(rank, finding.severity)
    return found


def _rank_row(known: Snapshot, table: Ranks, at: int, width: int, marks: dict[int, str], now_wall_ns: int) -> Text:
    rank, state = table.rank[at], _at(table.state, at, "")
    shown = (_at(table.hang_state, at, None) or state).partition(" ")[0]  # "waits in all_reduce": room for one word
    mark = marks.get(rank, "")
    wall, work = (_at(table.mean_ns.get(name, ()), at, 0.0) for name in ("wall", "work"))
    going = state in ("running", "starting") and not known.over
    cells = _Cells(
        rank=f" {MARKS.get(mark, ' ')}{rank:,}",
        host=_at(table.host, at, ""),
        state=_SHORT.get(shown, shown),
        now=_live_phase(table, at, now_wall_ns) if going else "",
        numbers=[ms_text(value / 1e6) if wall else "–" for value in (work, max(0.0, wall - work), wall)],
    )
    styles = {"rank": STYLES.get(mark, ""), "state": _STATE_STYLES.get(shown, ""), "work": "bold" if mark else ""}
    line = columns([(words, styles.get(name, "")) for words, name in _row_parts(cells, width)], width)
    if width >= BAR_FROM and wall:
        line.append("  ")
        _add_bar(line, work, wall, max(table.mean_ns.get("wall", (wall,))), width)
    return line


def _highlight_row(line: Text, width: int) -> Text:
    marked = Text("▶", end="", no_wrap=True).append_text(line[1:])
    marked.append(" " * max(0, width - marked.cell_len))
    # Do not reverse the colors of the bar: that would show the opposite.
    bar = next((at for at, sign in enumerate(marked.plain) if sign in _BAR), len(marked))
    marked.stylize("reverse", 0, bar)
    return marked


def _live_phase(table: Ranks, at: int, now_wall_ns: int) -> str:
    phase = _at(table.live_phase, at, None)
    if phase is None:
        return ""
    in_it_s = (now_wall_ns - _at(table.live_since_wall_ns, at, now_wall_ns)) / 1e9
    return f"{phase} {_short_time(in_it_s)}" if in_it_s >= STUCK_S else phase


def _short_time(seconds: float) -> str:
    return (
        f"{seconds:.0f}s" if seconds < 100 else f"{seconds / 60:.0f}min" if seconds < 6000 else f"{seconds / 3600:.0f}h"
    )


def _row_parts(cells: _Cells, width: int) -> list[tuple[str, str]]:
    """The cells that fit, each with its name."""
    host = min(
        TABLE_HOST, width - TABLE_RANK - 1 - TABLE_STATE - 3 * TABLE_NUMBER - (TABLE_NOW if width >= NARROW else 0)
    )
    parts = [(fit(cells.rank, TABLE_RANK), "rank")]
    if width >= NARROWEST:
        parts += [(f" {fit(cells.host, host)}", "host"), (f" {fit(cells.state, TABLE_STATE - 1)}", "state")]
    if width >= NARROW:
        parts.append((fit(cells.now, TABLE_NOW), "now"))
    return [
        *parts,
        *((f"{cell:>{TABLE_NUMBER}}", name) for cell, name in zip(cells.numbers, ("work", "", ""), strict=True)),
    ]


def _add_bar(line: Text, work: float, wall: float, longest: float, width: int) -> None:
    room = min(60, width - line.cell_len - 1)
    whole = round(wall / longest * room) if longest else 0
    of_work = min(whole, round(work / longest * room)) if longest else 0
    line.append(_BAR[0] * of_work, "blue")
    line.append(_BAR[1] * (whole - of_work), "cyan")


def _column_head(name: str, order: str) -> str:
    title = TITLES[name]
    if name != order:
        return f"  {title}" if name == "rank" else title
    return f" ▼{title}" if name == "rank" else f"▼ {title}"


def _at(values: Sequence[T], at: int, none: T) -> T:
    return values[at] if at < len(values) else none


# -- rank detail ------------------------------------------------------------------------------------------------------
# One rank: its identity, its phases compared with the mean over all ranks, its newest steps.

DETAIL_NAME, DETAIL_NUMBER = 11, 10


def draw_rank(known: Snapshot, width: int, height: int, *, rank: int) -> list[Text]:
    about = known.rank
    if about is None or about.rank != rank:
        return [columns([(f"Rank {rank}", "bold"), ("  …", "dim")], width)]
    lines = [_rank_title(known, width), *_rank_findings(known, rank, width)]
    walls = [wall / 1e6 for wall in about.steps.wall_ns]
    if walls:
        words = f"{'step, mean':<{DETAIL_NAME}}{ms_text(about.mean_ns.get('wall', 0.0) / 1e6):>{DETAIL_NUMBER}}  "
        lines.append(columns([(words, ""), (spark(walls, width - len(words)), "cyan")], width))
    memory = [level for level in about.steps.memory_bytes.get("allocated", []) if level]
    if memory:
        words = f"{'memory':<{DETAIL_NAME}}{bytes_text(memory[-1]):>{DETAIL_NUMBER}}  "
        lines.append(columns([(words, ""), (spark(memory, width - len(words)), "cyan")], width))
    lines += _rank_phases(known, width, height - len(lines))
    return lines[:height]


def _rank_title(known: Snapshot, width: int) -> Text:
    about = known.rank
    assert about is not None
    who = about.identity
    device = who.device_name or who.device
    known_facts = (
        who.host,
        f"pid {who.pid}",
        device,
        about.now.hang_state or about.now.state,
        f"step {about.now.last_step:,}",
    )
    facts = [fact for fact in known_facts if fact]
    if about.now.live_phase and not known.over:
        facts.append(f"in {about.now.live_phase}")
    return columns([(f"Rank {about.rank}", "bold"), (f"  {' · '.join(facts)}", "")], width)


def _rank_findings(known: Snapshot, rank: int, width: int) -> list[Text]:
    named = [finding for finding in (known.findings.findings if known.findings else ()) if rank in finding.ranks]
    return [
        columns([(f"{MARKS.get(one.severity, '●')} ", STYLES.get(one.severity, "")), (line, "")], width)
        for one in named[:2]
        for line in wrapped(one.title, width - 2, 1)
    ]


def _rank_phases(known: Snapshot, width: int, height: int) -> list[Text]:
    about = known.rank
    assert about is not None
    own = {name: value for name, value in about.mean_ns.items() if name not in ("wall", "work") and value > 0}
    if not own or height < 2:
        return []
    mean = mean_times(known)
    longest = max([*own.values(), *(mean.get(name, 0.0) for name in own)])
    each = max(4, width - DETAIL_NAME - 2 * DETAIL_NUMBER - 4)
    head = f"{phase_head(known):<{DETAIL_NAME}}{'this rank':>{DETAIL_NUMBER}}{'mean':>{DETAIL_NUMBER}}"
    lines = [columns([(head, "dim")], width)]
    for name in sorted(own, key=lambda name: -own[name])[: height - 1]:
        numbers = f"{ms_text(own[name] / 1e6):>{DETAIL_NUMBER}}{ms_text(mean.get(name, 0.0) / 1e6):>{DETAIL_NUMBER}}  "
        bar = (padded_bar(own[name] / longest, each), PHASE_COLORS.get(name, "white"))
        lines.append(columns([(fit(name, DETAIL_NAME), ""), (numbers, ""), bar], width))
    return lines


# -- lines ------------------------------------------------------------------------------------------------------------
# Plain lines about a live run, shared by all commands that follow one.

WITHDRAWN = "○"


def news_line(step: int, words: str, *, wall_s: float | None = None) -> str:
    """``02:14:07  step 1,200   …``."""
    clock = time.strftime("%H:%M:%S", time.localtime(wall_s))
    return f"{clock}  step {max(step, 0):<7,} {printable(words)}"


def finding_line(step: int, severity: str, title: str, *, withdrawn: bool = False, wall_s: float | None = None) -> str:
    mark = WITHDRAWN if withdrawn else MARKS.get(severity, MARKS["info"])
    return news_line(step, f"{mark} {'no longer: ' if withdrawn else ''}{title}", wall_s=wall_s)
