"""How sentences name ranks, call sites, collectives, durations and steps. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from stepscope.flight.dump import Operation
from stepscope.flight.stacks import is_user_file, site_frame
from stepscope.records.collectives import group_name
from stepscope.records.hang import Frame, WaitingIn
from stepscope.records.text import duration_text

__all__ = [
    "SOURCE_CHARS",
    "collective_text",
    "epochs_text",
    "file_name",
    "frame_text",
    "group_text",
    "listed",
    "more_than_text",
    "one_line",
    "operation_text",
    "parting_frame",
    "place_text",
    "ranks_text",
    "spans_text",
    "steps_text",
]


# -- ranks, operations and call sites ---------------------------------------------------------------------------------

SPANS_SHOWN = 8


def ranks_text(ranks: Iterable[int], *, start: bool = False) -> str:
    """``rank 1``, ``ranks 0, 2 and 3``, ``ranks 0–7 and 10``."""
    ordered = sorted(set(ranks))
    word = "rank" if len(ordered) == 1 else "ranks"
    return f"{word.capitalize() if start else word} {spans_text(ordered)}"


def spans_text(ranks: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    parts = [part for span in spans for part in ([f"{span[0]}–{span[-1]}"] if len(span) > 2 else map(str, span))]
    if len(parts) > SPANS_SHOWN:
        return ", ".join(parts[:SPANS_SHOWN]) + " …"
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part) if parts else "none"


def operation_text(operation: Operation) -> str:
    """``all_reduce [512] Float``."""
    sizes = operation.input_sizes or operation.output_sizes
    shown = " ".join(str(list(size)) for size in sizes[:3]) + (" …" if len(sizes) > 3 else "")
    return " ".join(part for part in (operation.name, shown, "/".join(operation.dtypes[:2])) if part)


def parting_frame(site: Sequence[Frame], against: Sequence[Frame]) -> Frame | None:
    """The outermost line of user code in which a call site differs from another: there the two paths diverge."""
    common = 0
    while common < min(len(site), len(against)) and site[-1 - common] == against[-1 - common]:
        common += 1
    own = [frame for frame in site[: len(site) - common] if is_user_file(frame.file)]
    return own[-1] if own and against else site_frame(site)


def frame_text(frame: Frame | None) -> str:
    """``train.py:41 in step``."""
    return f"{PurePosixPath(frame.file).name}:{frame.line} in {frame.function}" if frame else ""


# -- sentences about a hang -------------------------------------------------------------------------------------------

SOURCE_CHARS = 60
"""Maximum characters of a line of code in a sentence."""

Lines = Mapping[tuple[str, int], str]


def listed(parts: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]])) if parts else ""


def file_name(path: str) -> str:
    return path.replace("\\", "/").rstrip("/").rpartition("/")[2] or path


def one_line(text: str, most: int) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= most else plain[: most - 1] + "…"


def place_text(frame: Frame | None, lines: Lines, *, code: bool = True) -> str:
    """``train.py:41 (time.sleep(999))``; without its number ``train.py, in next_batch``; empty without a frame."""
    if frame is None:
        return ""
    source = one_line(lines.get((frame.file, frame.line), ""), SOURCE_CHARS) if code else ""
    where = f"{file_name(frame.file)}:{frame.line}" if frame.line else f"{file_name(frame.file)}, in {frame.function}"
    return f"{where} ({source})" if source else where


def group_text(waiting: WaitingIn) -> str:
    return group_name(waiting.group, waiting.description)


def collective_text(waiting: WaitingIn | None) -> str:
    """``all_reduce number 7 of default_pg``, ``recv from rank 3``, or as much of it as is known."""
    if waiting is None:
        return "a collective"
    op = waiting.op or "a collective"
    if waiting.peer is not None:
        return f"{op} {'to' if 'send' in op else 'from'} rank {waiting.peer}"
    number = f" number {waiting.sequence}" if waiting.sequence is not None else ""
    group = group_text(waiting)
    return f"{op}{number}" + (f" of {group}" if group else "")


def steps_text(first: int, last: int) -> str:
    """``step 41``, ``steps 60–61``."""
    return f"step {first:,}" if first == last else f"steps {first:,}–{last:,}"


def epochs_text(first: int, last: int) -> str:
    """``epoch 3``, ``epochs 3–4``, as the framework counts them."""
    return f"epoch {first:,}" if first == last else f"epochs {first:,}–{last:,}"


def more_than_text(seconds: float) -> str:
    """``more than 14 s``, for a duration that is still growing: it stays true while it is read."""
    return f"more than {duration_text(int(seconds), whole=True)}"
