"""A hang as lines for a terminal: who, where, who waits, in what; then the stacks, alike ones once.

Here and not among the reports, because the agent, which speaks first, may not load what those need.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from stepscope.flight.stacks import is_ours, is_users, main_thread
from stepscope.flight.wording import ranks_text
from stepscope.hangs.finding import steps_of, stood_s
from stepscope.hangs.words import collective_text, one_line, seconds_text, steps_text
from stepscope.records.hang import Culprit, Frame, HangRecord, StackGroup
from stepscope.records.naming import hang_name

__all__ = ["hang_lines"]

LABEL = 10
"""Columns of the labels at the left."""
NARROWEST = 60
CULPRITS_SHOWN = 4
CYCLE_SHOWN = 8
GROUPS_SHOWN = 6
FRAMES_SHOWN = 6
SIZES_CHARS = 60
FILES_SHOWN = 3
ENDINGS = {"recovered": "then went on", "ended": "until the job ended", "aborted": "until the job was ended for it"}


def hang_lines(
    record: HangRecord,
    width: int = 80,
    *,
    title: bool = True,
    now_wall_ns: int | None = None,
    steps: tuple[int, int] | None = None,
) -> list[str]:
    """``title``: whether it stands above; a page that leads with it need not say it again.  ``now_wall_ns``: the time,
    of a job that is known to go on; else of one that stands only what was known when it was declared is said.
    ``steps``: as of ``steps_of``, of a record without its ranks."""
    width = max(width, NARROWEST)
    lines = textwrap.wrap(one_line(record.title, 600), width, break_on_hyphens=False) if title else []
    lines += _labelled("culprit", _culprits(record), width)
    lines += _labelled("waiting", _waiting(record), width)
    lines += _labelled("cycle", _cycle(record), width)
    lines += _labelled("told by", record.evidence, width)
    lines += _labelled("since", [_since(record, now_wall_ns, steps or steps_of(record))], width)
    lines += _labelled("done", [record.action] if record.action else (), width)
    for number, group in enumerate(record.stacks[:GROUPS_SHOWN]):
        lines += _labelled("" if number else "stacks", [_whose(group)], width)
        lines += [_cut(f"  {'':{LABEL}}  {line}", width) for line in _frames(group)]
    left = len(record.stacks) - GROUPS_SHOWN
    more = (
        f"{left} more kinds of stacks and all threads"
        if left > 0
        else "all threads of all ranks"
        if record.stacks
        else ""
    )
    lines += _labelled("", [f"{more}: {_files(record)}"] if more else (), width)
    return lines


def _files(record: HangRecord) -> str:
    """Where all of it is; what several hosts saw, in a file each."""
    names = [hang_name(part.host, part.number) for part in record.parts] or [hang_name(record.host, record.number)]
    left = len(names) - FILES_SHOWN
    return ", ".join(f"hangs/{name}" for name in names[:FILES_SHOWN]) + (f" and {left} more" if left > 0 else "")


def _labelled(label: str, texts: Iterable[str], width: int) -> list[str]:
    lines: list[str] = []
    for text in texts:
        for part in textwrap.wrap(" ".join(text.split()), width - 2 - LABEL, break_on_hyphens=False):
            lines.append(f"  {label:{LABEL}}{part}")
            label = ""
    return lines


def _culprits(record: HangRecord) -> list[str]:
    """Those of the same reason together."""
    alike: dict[tuple[str, Frame | None], list[Culprit]] = {}
    for culprit in record.culprits:
        alike.setdefault((culprit.reason, culprit.at), []).append(culprit)
    texts = []
    for (reason, at), culprits in list(alike.items())[:CULPRITS_SHOWN]:
        each = ": each" if len(culprits) > 1 else ""
        who = ranks_text(culprit.rank for culprit in culprits)
        texts.append(f"{who}{_on_host(record, culprits)}{each} {reason}")
        if at is not None and at.line:
            texts.append(f"{at.file}, line {at.line}, in {at.function}")
    if len(alike) > CULPRITS_SHOWN:
        texts.append(f"… and {len(alike) - CULPRITS_SHOWN} more places")
    if not texts and record.undecidable:
        texts.append("cannot be told from what is known here")
    return texts


def _on_host(record: HangRecord, culprits: Sequence[Culprit]) -> str:
    """Where several hosts were judged together."""
    hosts = {rank.rank: rank.host for rank in record.ranks}
    own = {hosts.get(culprit.rank, "") for culprit in culprits}
    return f" on {own.pop()}" if len(record.hosts) > 1 and len(own) == 1 and "" not in own else ""


def _waiting(record: HangRecord) -> list[str]:
    if not record.victims:
        return []
    waiting = record.collective
    details = [waiting.sizes, waiting.dtypes] if waiting is not None else []
    about = one_line(" ".join(detail for detail in details if detail), SIZES_CHARS)
    call = f" in {collective_text(waiting)}" if waiting is not None else ""
    return [f"{ranks_text(record.victims)}{call}{f', {about}' if about else ''}"]


def _cycle(record: HangRecord) -> list[str]:
    shown = list(record.cycle[:CYCLE_SHOWN])
    return [*shown, f"… {len(record.cycle) - CYCLE_SHOWN} more"] if len(record.cycle) > CYCLE_SHOWN else shown


def _since(record: HangRecord, now_wall_ns: int | None, steps: tuple[int, int] | None) -> str:
    where = f" in {steps_text(*steps)}" if steps else ""
    usual = f"; a step usually takes {_step_text(record.step_s)}" if record.step_s else ""
    if record.over is None and now_wall_ns is not None:
        long_s = max(stood_s(record), (now_wall_ns - record.stopped_wall_ns) / 1e9)
        return f"nothing has happened for {seconds_text(long_s)}{where}{usual}"
    if record.over is None:
        return f"nothing happened for {seconds_text(stood_s(record))}{where} when this was written{usual}"
    return f"it stood still for {seconds_text(stood_s(record))}{where}, {ENDINGS[record.over]}{usual}"


def _step_text(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _whose(group: StackGroup) -> str:
    threads = len(group.threads)
    more = f" (main thread of {threads})" if threads > 1 else ""
    return ("DataLoader workers of " if group.workers_of else "") + ranks_text(group.ranks) + more


def _frames(group: StackGroup) -> list[str]:
    """Of the main thread: what it is in, then the user's own lines; what lies between says little."""
    main = main_thread(group.threads)
    frames: Sequence[Frame] = [frame for frame in main.frames if not is_ours(frame.file)] if main is not None else ()
    own = [frame for frame in frames if is_users(frame.file)]
    shown = [*([frames[0]] if frames and frames[0] not in own else []), *own] or list(frames)
    lines = [f"{_short(frame)}:{frame.line or '?'} in {frame.function}" for frame in shown[:FRAMES_SHOWN]]
    return [*lines, f"… {len(shown) - FRAMES_SHOWN} more"] if len(shown) > FRAMES_SHOWN else lines


def _short(frame: Frame) -> str:
    """Of a library from its package on, of the user's own the last folder and the file."""
    _, found, inside = frame.file.rpartition("-packages/")
    return inside if found else "/".join(frame.file.split("/")[-2:])


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: columns - 1] + "…"
