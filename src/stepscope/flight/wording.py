"""Words for ranks, places and operations, the same in every sentence.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from stepscope.flight.entries import Operation
from stepscope.flight.stacks import is_users
from stepscope.records.hang import Frame

__all__ = ["called", "frame_text", "operation_text", "parting_frame", "ranks_text", "site_frame", "spans_text"]

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


def called(operation: Operation | None, sequence: int) -> str:
    """``all_reduce 7``."""
    return f"{operation.name if operation else 'collective'} {sequence}"


def operation_text(operation: Operation) -> str:
    """``all_reduce [512] Float``."""
    sizes = operation.input_sizes or operation.output_sizes
    shown = " ".join(str(list(size)) for size in sizes[:3]) + (" …" if len(sizes) > 3 else "")
    return " ".join(part for part in (operation.name, shown, "/".join(operation.dtypes[:2])) if part)


def site_frame(site: Sequence[Frame]) -> Frame | None:
    """The line of a call site that means something to the user: the innermost of their own."""
    return next((frame for frame in site if is_users(frame.file)), site[0] if site else None)


def parting_frame(site: Sequence[Frame], against: Sequence[Frame]) -> Frame | None:
    """The outermost line of the user's in which a call site differs from another: there the two paths part."""
    common = 0
    while common < min(len(site), len(against)) and site[-1 - common] == against[-1 - common]:
        common += 1
    own = [frame for frame in site[: len(site) - common] if is_users(frame.file)]
    return own[-1] if own and against else site_frame(site)


def frame_text(frame: Frame | None) -> str:
    """``train.py:41 in step``."""
    return f"{PurePosixPath(frame.file).name}:{frame.line} in {frame.function}" if frame else ""
