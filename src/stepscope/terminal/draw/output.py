"""What the job, or the chosen rank, printed last."""

from __future__ import annotations

from rich.text import Text

from stepscope.records.units import bytes_text
from stepscope.terminal.snapshot import Snapshot
from stepscope.terminal.text import columns, printed_lines

__all__ = ["draw_output"]


def draw_output(known: Snapshot, width: int, height: int) -> list[Text]:
    """The newest line is the lowest."""
    output = known.output
    nothing = ["nothing was printed" if known.over else "nothing was printed yet"]
    if output is None:
        head, lines = "output", nothing
    else:
        head = f"{output.path} · {bytes_text(output.size)}"
        lines = printed_lines(output.text, height - 1) or nothing
    shown = [columns([(line, "" if output is not None and output.size else "dim")], width) for line in lines]
    return [columns([(head, "dim")], width), *shown][: max(0, height)]
