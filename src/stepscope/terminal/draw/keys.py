"""What the keys do: in one line, and on a page of its own."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from stepscope.terminal.text import columns

__all__ = ["draw_help", "draw_keys"]

KILLS = 3
"""This many Ctrl-C end a job that does not react, as without the view."""
HELP = (
    ("↑ ↓", "choose a rank; PgUp, PgDn, Home, End"),
    ("Enter", "look at that rank: its phases and what it printed; Esc: back"),
    ("s", "sort the ranks by work, wait, step time, number"),
    ("v", "all that was found, in full"),
    ("l", "what the job printed"),
    ("e", "what happened"),
    ("f", "freeze: nothing moves until f again"),
    ("h  p  ?", "this page"),
)
NOTES = (
    "Step: the median; phases and table: means; all of the steps whose number is said.",
    "The bars: the mean over all ranks, and beside it the rank that works longest.",
    "Work is a step without the wait for peers: the rank that works longest is the",
    "one that the others wait for. ✖ ▲ ● at a rank: a finding names it.",
)


def draw_keys(width: int, *, beside_job: bool, pane: str, interrupts: int = 0) -> Text:
    """As many as fit, those that one needs most first; the way out is always there.

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
        _add(line, word)
    for word in last:
        _add(line, word)
    return line


def draw_help(width: int, height: int, *, beside_job: bool) -> list[Text]:
    leaving = [("q", "leave the view; the job goes on"), ("Ctrl-C", "end the job, as without the view")]
    rows = [*HELP, *(leaving if beside_job else [("q  Ctrl-C", "leave; the run goes on")])]
    lines = [columns([(f" {key:<11}", "bold"), (words, "")], width) for key, words in rows]
    notes = [columns([(f" {note}", "dim")], width) for note in ("", *NOTES)]
    return [*lines, *notes][:height]


def _add(line: Text, word: str) -> None:
    key, _, rest = word.partition(" ")
    line.append("  " if line.plain else "")
    line.append(key, "bold")
    line.append(f" {rest}", "dim")
