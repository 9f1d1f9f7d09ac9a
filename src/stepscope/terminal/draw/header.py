"""The first line: which run, how it stands, and whether what is below is of now."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from stepscope.hangs.words import steps_text
from stepscope.records.units import count_text, duration_text
from stepscope.terminal.documents import Status
from stepscope.terminal.snapshot import Snapshot
from stepscope.terminal.text import columns, plain

__all__ = ["draw_header", "link_words", "ranks_words"]

NAME_SHARE = 0.4
_STATUS_STYLES = {"running": "bold", "finished": "bold green", "failed": "bold red", "crashed": "bold red"}


def draw_header(known: Snapshot, width: int, *, frozen: bool = False, now_wall_ns: int = 0) -> Text:
    words, style = link_words(known, frozen=frozen, now_wall_ns=now_wall_ns)
    room = width - cell_len(words) - 1
    line = columns(_parts(known, room), room)
    line.append(" " * max(1, width - line.cell_len - cell_len(words)))
    line.append(words, style)
    return line


def link_words(known: Snapshot, *, frozen: bool = False, now_wall_ns: int = 0) -> tuple[str, str]:
    """How the connection is, in a word or two, and its style."""
    if frozen:
        return "■ frozen", "bold reverse"
    if known.link == "lost":
        away_s = (now_wall_ns - known.seen_wall_ns) / 1e9
        ago = f" {duration_text(away_s)}" if known.seen_wall_ns and away_s >= 1 else ""
        return f"○ no hub{ago}, trying", "bold yellow"
    if known.link == "refused":
        return "✖ refused", "bold red"
    if known.link == "missing":
        return "○ no such run", "bold yellow"
    if known.link == "opening":
        return "○ opening …", "dim"
    return ("✔ over", "green") if known.over else ("● live", "green")


def _parts(known: Snapshot, room: int) -> list[tuple[str, str]]:
    run, status = known.run, known.status
    if run is None or status is None:
        return [("stepscope", "bold")]
    name = plain(run.name or run.id)
    most = max(8, int(room * NAME_SHARE))
    shown = name if cell_len(name) <= most else f"{name[: most - 1]}…"
    parts = [(shown, "bold"), (" · ", "dim"), (status.status, _STATUS_STYLES.get(status.status, "bold yellow"))]
    code = (run.context.end or {}).get("exit_code")
    if status.over and isinstance(code, int) and code:
        parts.append((f" ({code})", ""))
    parts += [(" · ", "dim"), (_step_words(known), "")]
    parts += [(" · ", "dim"), ranks_words(status)]
    if status.attempt:
        parts += [(" · ", "dim"), (f"attempt {status.attempt}", "bold yellow")]
    return parts


def ranks_words(status: Status) -> tuple[str, str]:
    """``8 ranks``, ``7 of 8 ranks``, ``7 of 8 ranks stand still``, and their style."""
    most = max(status.ranks, status.world_size)
    if not status.over and status.still_ranks:
        verb = "stands" if status.still_ranks == 1 else "stand"
        some = f"{status.still_ranks:,} of " if status.still_ranks < most else ""
        return f"{some}{count_text(most, 'rank')} {verb} still", "bold red"
    if not status.over and status.live_ranks < most:
        return f"{status.live_ranks:,} of {count_text(most, 'rank')}", ""
    return count_text(status.ranks, "rank"), ""


def _step_words(known: Snapshot) -> str:
    """How far it is: the last step that all made, or the one that it stands in."""
    if known.still_in is not None:
        return f"in {steps_text(*known.still_in)}"
    return f"step {known.step:,}" if known.step >= 0 else "no step" if known.over else "no step yet"
