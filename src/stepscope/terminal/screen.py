"""The screen: its layout, the state of the view, and every part except the times. Independent of Textual.

The screen has exactly as many lines as there is room for, with the most important ones first:

    which run, its status                                                        ● live
    ✖ what is wrong, its price, what to do
    step time, and the newest steps
    the phases          ┐
    the machines        │ or, in their place: a rank, the output, events, help;
    the table of ranks  ┘ in a wide window, next to them
    the last event
    the keys

Everything stays in place between redraws: the table takes the lines that the other parts leave.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.cells import cell_len
from rich.text import Text

from stepscope.flight.wording import steps_text
from stepscope.records.text import bytes_text, count_text, duration_text
from stepscope.reports.layout import MARKS
from stepscope.terminal.documents import Event, Finding, GpuFigures, Levels, Samples, Snapshot, Status, Wanted
from stepscope.terminal.drawing import (
    ORDERS,
    STYLES,
    columns,
    draw_phases,
    draw_rank,
    draw_ranks,
    draw_step_time,
    fit,
    plain,
    printed_lines,
    wrapped,
)

__all__ = [
    "Pane",
    "ViewState",
    "draw_header",
    "draw_keys",
    "draw_machine",
    "draw_screen",
    "draw_verdict",
    "move_cursor",
    "next_order",
    "ranks_words",
    "refresh_frozen",
    "toggle_pane",
    "wanted_by",
]


# -- view state -------------------------------------------------------------------------------------------------------
# Which pane, which rank, in which order. An immutable value: each key makes a new one.

Pane = Literal["ranks", "rank", "findings", "output", "events", "help"]


@dataclass(frozen=True, kw_only=True)
class ViewState:
    pane: Pane = "ranks"
    order: str = "work"
    cursor: int = 0
    """Index of the chosen rank in the table."""
    start: int = 0
    """Index of the first visible row."""
    rank: int | None = None
    """The rank shown in detail."""


def move_cursor(view: ViewState, by: int, *, total: int, rows: int) -> ViewState:
    """Move the cursor by ``by`` rows, and scroll the table to it."""
    cursor = min(max(view.cursor + by, 0), max(total - 1, 0))
    start = min(view.start, cursor)
    start = max(start, cursor - max(rows, 1) + 1)
    return replace(view, cursor=cursor, start=max(0, min(start, max(total - rows, 0))))


def next_order(view: ViewState, phases: tuple[str, ...]) -> ViewState:
    """Sort by the next order; skip an order that the run has no data for."""
    orders = [order for order in ORDERS if order != "comm" or "comm" in phases]
    at = orders.index(view.order) if view.order in orders else -1
    return replace(view, order=orders[(at + 1) % len(orders)], cursor=0, start=0)


def toggle_pane(view: ViewState, pane: Pane) -> ViewState:
    return replace(view, pane="ranks" if view.pane == pane else pane, rank=None)


def wanted_by(view: ViewState, *, rows: int, output: bool) -> Wanted:
    """What to request for a view. ``output``: whether there is room for it in addition to the rest."""
    # One screen of rows before and one after the visible ones, so that scrolling does not wait.
    before = min(view.start, max(1, rows))
    return Wanted(
        order=view.order,
        start=view.start - before,
        limit=before + 2 * max(1, rows),
        rank=view.rank if view.pane == "rank" else None,
        output=output or view.pane in ("output", "rank"),
    )


def refresh_frozen(frozen: Snapshot, now: Snapshot, view: ViewState) -> Snapshot:
    """Update a frozen view with current data, but only where the user moves to something that it does not contain."""
    if not _has_rows(frozen, view) and _has_rows(now, view):
        frozen = replace(frozen, ranks=now.ranks)
    if view.rank is not None and now.rank is not None and now.rank.rank == view.rank:
        if frozen.rank is None or frozen.rank.rank != view.rank:
            return replace(frozen, rank=now.rank, output=now.output)
    elif frozen.output is None or (frozen.rank is not None and view.rank is None):
        return replace(frozen, rank=None, output=now.output)
    return frozen


def _has_rows(known: Snapshot, view: ViewState) -> bool:
    table = known.ranks
    return table is not None and table.order == view.order and view.cursor - table.start in range(len(table.rank))


# -- header -----------------------------------------------------------------------------------------------------------
# Which run, its status, and whether the data below is current.

NAME_SHARE = 0.4
_STATUS_STYLES = {"info": "bold green", "warning": "bold yellow", "critical": "bold red"}
_OVER = {"info": ("✔ over", "green"), "warning": ("■ over", "yellow"), "critical": ("✖ over", "bold red")}


def draw_header(known: Snapshot, width: int, *, frozen: bool = False, now_wall_ns: int = 0) -> Text:
    words, style = link_words(known, frozen=frozen, now_wall_ns=now_wall_ns)
    room = width - cell_len(words) - 1
    parts = _header_parts(known, room)
    if known.page and sum(cell_len(text) for text, _ in parts) + 3 + cell_len(known.page) <= room:
        parts += [(" · ", "dim"), (known.page, "dim")]
    line = columns(parts, room)
    line.append(" " * max(1, width - line.cell_len - cell_len(words)))
    line.append(words, style)
    return line


def link_words(known: Snapshot, *, frozen: bool = False, now_wall_ns: int = 0) -> tuple[str, str]:
    """State of the connection in a word or two, and its style."""
    if frozen:
        return "■ frozen", "bold reverse"
    if known.link == "lost":
        away_s = (now_wall_ns - known.seen_wall_ns) / 1e9
        ago = f" {duration_text(away_s, whole=True)}" if known.seen_wall_ns and away_s >= 1 else ""
        return f"○ no hub{ago}, retrying", "bold yellow"
    if known.link == "refused":
        return "✖ refused", "bold red"
    if known.link == "missing":
        return "○ no such run", "bold yellow"
    if known.link == "opening":
        return "○ opening …", "dim"
    if not known.over:
        return "● live", "green"
    severity = known.status.severity if known.status is not None else "warning"
    return _OVER.get(severity, _OVER["critical"])


def _header_parts(known: Snapshot, room: int) -> list[tuple[str, str]]:
    run, status = known.run, known.status
    if run is None or status is None:
        return [("stepscope", "bold")]
    name = plain(run.name or run.id)
    most = max(8, int(room * NAME_SHARE))
    shown = name if cell_len(name) <= most else f"{name[: most - 1]}…"
    parts = [(shown, "bold"), (" · ", "dim"), (plain(status.words), _status_style(status))]
    parts += [(" · ", "dim"), (_step_words(known), "")]
    parts += [(" · ", "dim"), ranks_words(status)]
    if status.attempt:
        parts += [(" · ", "dim"), (f"attempt {status.attempt}", "bold yellow")]
    return parts


def _status_style(status: Status) -> str:
    return "bold" if status.words == "running" else _STATUS_STYLES.get(status.severity, "bold red")


def ranks_words(status: Status) -> tuple[str, str]:
    """Number of ranks, or how many of them live or hang (``7 of 8 ranks``), and the style."""
    hung = status.hung_ranks and not status.over
    return plain(status.ranks_text) or count_text(status.ranks, "rank"), "bold red" if hung else ""


def _step_words(known: Snapshot) -> str:
    """Progress: the last step that all ranks finished, or the one in which the job hangs."""
    hung_steps = known.status.hung_steps if known.status is not None else None
    if hung_steps is not None:
        return f"in {steps_text(*hung_steps)}"
    return f"step {known.step:,}" if known.step >= 0 else "no step" if known.over else "no step yet"


# -- verdict ----------------------------------------------------------------------------------------------------------
# What is wrong, what it costs and what to do.

TITLE_LINES = 3
SHORT = 3
"""Up to this height the title may take the line of the advice."""
VERDICT_LABEL = 7
MORE_FROM = 40
"""Width from which the number of other findings is shown."""
GRAVEST_FIRST = ("critical", "warning", "info")


def draw_verdict(known: Snapshot, width: int, height: int) -> list[Text]:
    verdict = known.findings.verdict if known.findings is not None else None
    if verdict is None or not verdict.title:
        return _no_verdict(known, width, height)
    look = verdict.look if verdict.look in MARKS else verdict.severity if verdict.severity in MARKS else "info"
    # With little room the whole title matters more than the advice, which `v` shows.
    room = max(1, height - bool(verdict.price) - (bool(verdict.advice) and height > SHORT))
    more = _other_findings(known) if width >= MORE_FROM else []
    reserved = sum(len(words) for words, _ in more) + 2 if more else 0
    first, *rest = wrapped(verdict.title, width - 2 - reserved, min(room, TITLE_LINES))
    style = STYLES.get(look, "bold")
    padded = fit(first, width - reserved) if more else first
    lines = [columns([(f"{MARKS.get(look, '●')} ", style), (padded, "bold"), *more], width)]
    lines += [columns([("  ", ""), (line, "bold")], width) for line in rest]
    if verdict.price:
        gain = verdict.kind == "healthy"
        price = f"at most {verdict.price}" if gain else verdict.price
        # A price that does not fit on a line gets a second one if that leaves a line for the advice.
        most = 2 if height - len(lines) > 2 else 1
        lines += _labeled("to gain" if gain else "cost", price, width, most)
    for advice in verdict.advice:
        if len(lines) >= height:
            break
        label = "to do" if advice is verdict.advice[0] else ""
        last = advice is verdict.advice[-1]
        lines += _labeled(label, advice, width, height - len(lines) if last else min(2, height - len(lines)))
    if len(lines) < height and (found := _found_in(known)):
        lines += _labeled("found", found, width, height - len(lines))
    return lines[:height]


def _found_in(known: Snapshot) -> str:
    """Since when the verdict holds: its steps, and those that were judged."""
    found = known.findings
    if found is None or not found.findings:
        return ""
    return " · ".join([*found.findings[0].text.facts, *([found.judged.text] if found.judged.text else [])])


def _other_findings(known: Snapshot) -> list[tuple[str, str]]:
    """``▲ +4 more: v``: the number of other findings, and the highest severity among them."""
    others = known.findings.findings[1:] if known.findings is not None else ()
    if not others:
        return []
    gravest = next((one for one in GRAVEST_FIRST if any(other.severity == one for other in others)), "info")
    return [(MARKS[gravest], STYLES[gravest]), (f" +{len(others)} more: ", ""), ("v", "bold")]


def _labeled(label: str, text: str, width: int, most: int) -> list[Text]:
    lines = wrapped(text, width - VERDICT_LABEL - 3, most)
    return [
        columns([(f"  {label if at == 0 else '':<{VERDICT_LABEL}} ", "dim"), (line, "")], width)
        for at, line in enumerate(lines)
    ]


def _no_verdict(known: Snapshot, width: int, height: int) -> list[Text]:
    if known.link in ("refused", "missing") or (known.link == "lost" and known.run is None):
        lines = wrapped(known.why, width - 2, height)
        return [
            columns([("✖ " if at == 0 else "  ", "bold red"), (line, "bold")], width) for at, line in enumerate(lines)
        ]
    if known.run is None:
        text = "Opening the run …"
    else:
        text = " ".join(known.findings.nothing) if known.findings is not None else ""
    lines = wrapped(text or "Nothing was found.", width - 2, max(1, height))
    return [columns([("● " if at == 0 else "  ", "dim"), (line, "")], width) for at, line in enumerate(lines)]


# -- findings ---------------------------------------------------------------------------------------------------------
# All findings in full: the verdict with its advice, then the others.

ADVICE_INDENT = 4


def draw_findings(known: Snapshot, width: int, height: int) -> list[Text]:
    """Draw at most ``height`` lines; findings that do not fit are counted."""
    found = known.findings.findings if known.findings is not None else ()
    if not found:
        return [columns([("no findings so far", "dim")], width)][:height]
    judged = known.findings.judged.text if known.findings is not None else ""
    last = [columns([(line, "dim")], width) for line in wrapped(judged, width, 3)] if judged else []
    lines: list[Text] = []
    for at, finding in enumerate(found):
        block = _finding_lines(finding, width, first=at == 0)
        if len(lines) + len(block) > height - (at < len(found) - 1):
            left = len(found) - at
            return [*lines, columns([(f"  and {left} more: `stepscope report`", "dim")], width)][:height]
        lines += block
    return [*lines, *last][:height]


def _finding_lines(finding: Finding, width: int, *, first: bool) -> list[Text]:
    """Title, facts and price, advice."""
    mark = (f"{MARKS.get(finding.look, '●')} ", STYLES.get(finding.look, ""))
    lines = [
        columns([("  ", "") if at else mark, (line, "bold" if first else "")], width)
        for at, line in enumerate(wrapped(finding.title, width - 2, 4))
    ]
    about = " · ".join([*finding.text.facts, *finding.text.price[:2]])
    if about:
        lines += [columns([("  ", ""), (line, "dim")], width) for line in wrapped(about, width - 2, 2)]
    for advice in finding.advice:
        start, *rest = wrapped(advice, width - ADVICE_INDENT - 2, 4)
        lines.append(columns([(f"{'– ':>{ADVICE_INDENT + 2}}", "dim"), (start, "")], width))
        lines += [columns([(" " * (ADVICE_INDENT + 2), ""), (line, "")], width) for line in rest]
    return lines


# -- events -----------------------------------------------------------------------------------------------------------

LINE_LABEL = 8
_EVENT_STYLES = {"critical": "bold red", "warning": "yellow"}


def draw_event_line(known: Snapshot, width: int) -> Text:
    """The newest event, or the problem with the connection if there is one."""
    if known.link in ("lost", "refused", "missing") and known.run is not None:
        return columns([(fit("hub", LINE_LABEL), "dim"), (known.why, "bold yellow")], width)
    if not known.events:
        return columns([(fit("event", LINE_LABEL), "dim"), ("none" if known.over else "none yet", "dim")], width)
    event = known.events[-1]
    return columns(
        [
            (fit("event", LINE_LABEL), "dim"),
            (f"{_event_time(event)}  ", "dim"),
            (event.sentence, _event_style(event)),
        ],
        width,
    )


def draw_events(known: Snapshot, width: int, height: int) -> list[Text]:
    """The events, newest first."""
    head = f"events · {len(known.events)} newest" if known.events else "events · none"
    shown = list(reversed(known.events))[: max(0, height - 1)]
    lines = [
        columns([(f"{_event_time(event)}  ", "dim"), (event.sentence, _event_style(event))], width) for event in shown
    ]
    return [columns([(head, "dim")], width), *lines]


def _event_style(event: Event) -> str:
    return _EVENT_STYLES.get(event.severity, "")


def _event_time(event: Event) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(event.wall_ns / 1e9))
    except (OverflowError, OSError, ValueError):
        return "--:--:--"


# -- machines ---------------------------------------------------------------------------------------------------------
# Memory of the fullest rank and device, and the figures of GPUs and hosts, on one line. For a finished run, GPU and
# host figures come from its summary: they cover the steady steps, without start-up.

FULL = 0.95
"""Memory is marked from this share on."""
IDLE_PERCENT = 50.0


def draw_machine(known: Snapshot, width: int) -> Text:
    parts = [(fit("machine", LINE_LABEL), "dim")]
    facts = [*_process_memory(known), *_device_memory(known), *_gpus(known), *_hosts(known)]
    for at, (words, style) in enumerate(facts):
        parts += [(" · ", "dim")] if at else []
        parts.append((words, style))
    return columns(parts if facts else [*parts, ("no figures" if known.over else "no figures yet", "dim")], width)


def _process_memory(known: Snapshot) -> list[tuple[str, str]]:
    """Memory of the rank with the most, without mapped files: current, or the peak of a finished run."""
    memory: list[tuple[float, int]] = []
    for one in known.processes.series if known.processes is not None else ():
        whole = one.values.get("rss", [])
        files = one.values.get("rss_file", [])
        levels = [rss - (files[at] or 0.0 if at < len(files) else 0.0) for at, rss in enumerate(whole) if rss]
        if levels and one.rank is not None:
            memory.append((max(levels) if known.over else levels[-1], -one.rank))
    if not memory:
        return []
    most, rank = max(memory)  # the first of several equal ones
    return [(f"rank {-rank} {'held' if known.over else 'holds'} {bytes_text(most)}", "")]


def _device_memory(known: Snapshot) -> list[tuple[str, str]]:
    """Memory that the job holds on its fullest device, from the newest step with a measurement."""
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
    used, total = _newest_figures(known.gpus, "mem_used"), _newest_figures(known.gpus, "mem_total")
    busy = _newest_figures(known.gpus, "util_percent")
    if busy:
        figures.append((_busy_text(busy), "yellow" if min(busy) < IDLE_PERCENT else ""))
    if used and len(used) == len(total) and all(total):
        figures.append(_fullest("GPU memory", [one / of for one, of in zip(used, total, strict=True)]))
    power, heat = _newest_figures(known.gpus, "power_w"), _newest_figures(known.gpus, "temperature_c")
    figures += [(f"{_mean(power):.0f} W", "")] if power else []
    figures += [(f"{max(heat):.0f} °C", "")] if heat else []
    return figures


def _gpus_of_summary(gpus: Sequence[GpuFigures]) -> list[tuple[str, str]]:
    """GPU figures over the steady steps."""
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
    cpu = _newest_figures(known.hosts, "cpu_percent")
    total, free = _newest_figures(known.hosts, "mem_total"), _newest_figures(known.hosts, "mem_available")
    shares = [1 - one / of for one, of in zip(free, total, strict=False) if of] if len(total) == len(free) else []
    return [*_cpu(cpu, len(cpu) + known.hosts.left_out), *([_fullest("host memory", shares)] if shares else [])]


def _cpu(percent: Sequence[float], hosts: int) -> list[tuple[str, str]]:
    name = "host" if len(percent) == 1 else count_text(hosts, "host")
    return [(f"{name} CPU {_mean(percent):.0f}%", "")] if percent else []


def _busy_text(busy: Sequence[float]) -> str:
    least = f" (min {min(busy):.0f}%)" if len(busy) > 1 else ""
    return f"{count_text(len(busy), 'GPU')} {_mean(busy):.0f}%{least}"


def _fullest(name: str, shares: Sequence[float]) -> tuple[str, str]:
    most = max(shares)
    return f"{name} {most:.0%}", "bold red" if most >= FULL else ""


def _medians(levels: Iterable[Levels | None]) -> list[float]:
    return [one.median for one in levels if one is not None and one.median is not None]


def _newest_figures(samples: Samples, field: str) -> list[float]:
    """The newest value of each GPU or host that has the field."""
    found = ([value for value in one.values.get(field, []) if value is not None] for one in samples.series)
    return [values[-1] for values in found if values]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# -- output -----------------------------------------------------------------------------------------------------------
# The last output of the job, or of the chosen rank.


def draw_output(known: Snapshot, width: int, height: int) -> list[Text]:
    """Draw the last lines, the newest at the bottom."""
    output = known.output
    nothing = ["nothing was printed" if known.over else "nothing was printed yet"]
    if output is None:
        head, lines = "output", nothing
    else:
        head = f"{output.path} · {bytes_text(output.size)}"
        lines = printed_lines(output.text, height - 1) or nothing
    shown = [columns([(line, "" if output is not None and output.size else "dim")], width) for line in lines]
    return [columns([(head, "dim")], width), *shown][: max(0, height)]


# -- keys -------------------------------------------------------------------------------------------------------------
# The keys on one line, and the help page.

KILLS = 3
"""Number of Ctrl-C that kill a job that does not react, the same as without the view."""
KEY_HELP = (
    ("↑ ↓", "choose a rank; PgUp, PgDn, Home, End"),
    ("Enter", "show that rank: its phases and its output; Esc: back"),
    ("s", "sort the ranks by work, wait, step time, number"),
    ("v", "all findings in full"),
    ("l", "the job's output"),
    ("e", "events"),
    ("f", "freeze the view; f again resumes it"),
    ("h  p  ?", "this page"),
)
HELP_NOTES = (
    "Step times are medians, phases and table are means, over the steps shown.",
    "Bars: the mean over all ranks, then the rank that works longest.",
    "Work is the step time without waiting for peers: the others wait for the rank that works longest.",
    "✖ ▲ ● mark ranks that a finding names.",
)


def draw_keys(width: int, *, beside_job: bool, pane: str, interrupts: int = 0) -> Text:
    """Draw as many keys as fit, the most important first; the key to leave is always included.

    ``interrupts``: how often the job was asked to end.
    """
    if interrupts:
        left = max(0, KILLS - interrupts)
        more = f"; Ctrl-C {'once' if left == 1 else 'twice'} more kills it" if left else ""
        return columns([("The job was asked to end", "bold yellow"), (more, ""), ("  q leave", "dim")], width)
    first = "Esc back" if pane != "ranks" else "↑↓ Enter rank"
    last = ["? help", "q leave" if beside_job else "q quit"]
    room = width - sum(cell_len(word) + 2 for word in last)
    line = Text(no_wrap=True, end="")
    for word in (first, "s sort", "v verdict", "l output", "e events", "f freeze"):
        if line.cell_len + cell_len(word) + 2 > room:
            break
        _add_key(line, word)
    for word in last:
        _add_key(line, word)
    return line


def draw_help(width: int, height: int, *, beside_job: bool) -> list[Text]:
    leaving = [("q", "leave the view; the job continues"), ("Ctrl-C", "end the job, as without the view")]
    rows = [*KEY_HELP, *(leaving if beside_job else [("q  Ctrl-C", "leave; the run continues")])]
    lines = [
        columns([(f" {key if at == 0 else '':<11}", "bold"), (line, "")], width)
        for key, words in rows
        for at, line in enumerate(wrapped(words, width - 12, height))
    ]
    notes = [line for note in HELP_NOTES for line in wrapped(note, width - 1, height)]
    return [*lines, *(columns([(f" {line}", "dim")], width) for line in ("", *notes))][:height]


def _add_key(line: Text, word: str) -> None:
    key, _, rest = word.partition(" ")
    line.append("  " if line.plain else "")
    line.append(key, "bold")
    line.append(f" {rest}", "dim")


# -- layout -----------------------------------------------------------------------------------------------------------

WIDE = 140
"""Width from which there is a second column."""
LEFT_SHARE = 0.58
RULES_FROM = 30
"""Height from which there are rules between the parts."""
_VERDICT_LINES = ((14, 1), (18, 2), (30, 3), (40, 6), (100_000, 8))
"""Pairs of a screen height and the number of lines for screens below it."""
_PHASE_LINES = ((16, 0), (20, 3), (24, 5), (30, 6), (100_000, 11))
TABLE_LEAST = 3
VERDICT_MORE = 3
"""More lines for the verdict, as far as the table of ranks leaves them empty."""
FILLED_FROM = 4
"""Empty lines of the left column from which on they are filled."""
LINES_WITHOUT = 6
"""Header, step time, machine, head of the table, event, keys."""


@dataclass(frozen=True, kw_only=True)
class DrawnScreen:
    lines: list[Text]
    rows: int
    """Visible rows of the table."""
    output: bool
    """Whether there is room for the output in addition to the rest."""


def draw_screen(
    known: Snapshot,
    view: ViewState,
    width: int,
    height: int,
    *,
    frozen: bool = False,
    beside_job: bool = False,
    interrupts: int = 0,
    now_wall_ns: int = 0,
) -> DrawnScreen:
    wide = width >= WIDE
    rule = [Text("─" * width, "dim", no_wrap=True, end="")] if height >= RULES_FROM else []
    top = [draw_header(known, width, frozen=frozen, now_wall_ns=now_wall_ns)]
    most = _lines_for(_VERDICT_LINES, height)
    if not wide and height < RULES_FROM and view.pane == "ranks":
        phases = len(draw_phases(known, width, height)) if _lines_for(_PHASE_LINES, height) else 0
        most += max(0, min(VERDICT_MORE, height - LINES_WITHOUT - most - phases - _ranks(known)))
    verdict = draw_verdict(known, width, most)
    top += [*rule, *verdict, *rule, draw_step_time(known, width, now_wall_ns=now_wall_ns)]
    bottom = [draw_event_line(known, width)] if height >= 12 else []
    bottom = [*rule, *bottom, draw_keys(width, beside_job=beside_job, pane=view.pane, interrupts=interrupts)]
    room = max(0, height - len(top) - len(bottom))
    left = int(width * LEFT_SHARE) if wide else width
    rows = 0
    if wide or view.pane == "ranks":
        body, rows = _main_column(known, view, left, room, height, now_wall_ns)
        if wide:
            beside = _pane(known, view, width - left - 3, room, beside_job=beside_job)
            body, beside = _filled(known, view, (body, left), (beside, width - left - 3), room)
            body = _side_by_side(body, beside, left, room)
    else:
        body = _pane(known, view, width, room, beside_job=beside_job)
    body = body[:room] + [Text("", end="")] * max(0, room - len(body))
    lines = [*top, *body, *bottom][:height]
    for line in lines:
        line.truncate(width)  # a window too narrow for a single word
    return DrawnScreen(lines=lines, rows=rows, output=wide)


def _main_column(
    known: Snapshot, view: ViewState, width: int, room: int, height: int, now_wall_ns: int
) -> tuple[list[Text], int]:
    """Phases, machines and the table; the number of its rows."""
    below = [draw_machine(known, width)]
    if height >= RULES_FROM:
        below.append(Text("─" * width, "dim", no_wrap=True, end=""))
    most = _lines_for(_PHASE_LINES, height)
    if most:
        most = max(most, room - len(below) - 1 - _ranks(known))  # lines that a short table leaves empty
    phases = draw_phases(known, width, min(most, max(0, room - TABLE_LEAST - 1)))
    lines = [*phases, *below]
    left = max(0, room - len(lines))
    table = draw_ranks(
        known, width, left, cursor=view.cursor, start=view.start, order=view.order, now_wall_ns=now_wall_ns
    )
    return [*lines, *table], max(0, left - 1)


def _filled(
    known: Snapshot, view: ViewState, left: tuple[list[Text], int], right: tuple[list[Text], int], room: int
) -> tuple[list[Text], list[Text]]:
    """The two columns, each lines and width, with findings and events in the lines that they leave empty.

    Findings continue the left column if it has room; events go where more lines are empty.
    """
    both = [left, right]
    for pane, draw in (("findings", draw_findings), ("events", draw_events)):
        empty = [room - len(lines) - 1 for lines, _ in both]
        at = 0 if (pane == "findings" and empty[0] >= FILLED_FROM) or empty[0] >= empty[1] else 1
        if view.pane != pane and empty[at] >= FILLED_FROM:
            lines, width = both[at]
            rule = [Text("─" * width, "dim", no_wrap=True, end="")]
            both[at] = [*lines, *rule, *draw(known, width, empty[at])], width
    return both[0][0], both[1][0]


def _ranks(known: Snapshot) -> int:
    return max(known.ranks.total if known.ranks is not None else 0, known.status.ranks if known.status else 0)


def _pane(known: Snapshot, view: ViewState, width: int, room: int, *, beside_job: bool) -> list[Text]:
    if view.pane == "help":
        return draw_help(width, room, beside_job=beside_job)
    if view.pane == "findings":
        return draw_findings(known, width, room)
    if view.pane == "events":
        return draw_events(known, width, room)
    if view.pane == "rank" and view.rank is not None:
        detail = draw_rank(known, width, max(1, room - 4), rank=view.rank)
        return [*detail, *draw_output(known, width, room - len(detail))]
    return draw_output(known, width, room)


def _side_by_side(left: list[Text], right: list[Text], width: int, room: int) -> list[Text]:
    lines: list[Text] = []
    for at in range(room):
        line = left[at].copy() if at < len(left) else Text("", end="")
        line.append(" " * max(0, width - line.cell_len))
        line.append(" │ ", "dim")
        if at < len(right):
            line.append_text(right[at])
        lines.append(line)
    return lines


def _lines_for(steps: tuple[tuple[int, int], ...], height: int) -> int:
    return next(lines for below, lines in steps if height < below)
