"""What a job would cost without its stragglers: as a document and as text for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from stepscope.records.text import count_text, ms_text, printable
from stepscope.reports.layout import WIDE_LABEL, labeled_lines
from stepscope.whatif.replay import Effect, WhatIf

__all__ = ["render_whatif", "whatif_document"]

SCHEMA = 1
NEGLIGIBLE = 1.03
"""Smaller slowdowns are within the error of a replay."""
EXPLAINS = 0.5
"""From this share of the lost time on, something counts as the cause."""
TRIVIAL = 0.005
SHOWN = 4
NAME = 30
BAR = 20
NARROWEST = 60
SHADES = " ░▒▓█"
EIGHTHS = " ▏▎▍▌▋▊▉█"


def whatif_document(found: WhatIf) -> dict[str, Any]:
    """The names inside ``mw`` and ``ms`` are those of the published analysis (docs/whatif.md)."""
    return {
        "schema": SCHEMA,
        "slowdown": found.slowdown,
        "by_worker": _named(found.by_worker),
        "by_stage": _named(found.by_stage),
        "by_dp_rank": _named(found.by_dp_rank),
        "by_operation": dict(found.by_operation),
        "mw": {**_effect(found.mw), "Mw": found.mw.share_removed},
        "ms": {**_effect(found.ms), "Ms": found.ms.share_removed},
        "worst_workers": list(found.worst_workers),
        "steps": found.steps,
        "notes": list(found.notes),
    }


def render_whatif(found: WhatIf, *, width: int = 80) -> str:
    """The verdict, its causes, the worst workers, stages, ranks and operations, and a map of the workers."""
    width = max(width, NARROWEST)
    lines = [*_verdict(found, width), ""]
    if found.slowdown >= NEGLIGIBLE:
        heading = "slowdown if only this were slow, and its share of the lost time"
        lines += [" " * (2 + WIDE_LABEL) + heading, *_tables(found), ""]
        lines += [*_map(found, width), ""]
    lines += labeled_lines("trace", f"{_extent(found)}, {count_text(found.steps, 'step')}", width)
    for note in found.notes:
        lines += labeled_lines("note", printable(note), width)
    return "\n".join(lines) + "\n"


def _named(slowdowns: Mapping[int, float]) -> dict[str, float]:
    return {str(key): value for key, value in slowdowns.items()}


def _effect(effect: Effect) -> dict[str, float | None]:
    return {
        "trem": effect.removed_s,
        "tadd": effect.added_s,
        "tori": effect.original_s,
        "tideal": effect.ideal_s,
        "rem": effect.share_removed,
        "add": effect.share_added,
    }


def _verdict(found: WhatIf, width: int) -> list[str]:
    original_s, ideal_s = found.mw.original_s, found.mw.ideal_s
    if found.slowdown < NEGLIGIBLE:
        text = f"No stragglers to speak of: {ms_text(original_s * 1000)} a step, {found.slowdown:.3f} times the ideal."
        return _marked("✔", text, width)
    times = f"{ms_text(original_s * 1000)} a step instead of {ms_text(ideal_s * 1000)}"
    text = f"Stragglers make this job {found.slowdown:.2f} times as slow as without them: {times}."
    lines = _marked("▲", text, width)
    for sentence in _causes(found):
        lines += labeled_lines("cause", sentence, width)
    return lines


def _causes(found: WhatIf) -> Iterator[str]:
    workers, stage = found.mw.share_removed or 0.0, found.ms.share_removed or 0.0
    ranks = ", ".join(str(rank) for rank in found.worst_workers[:SHOWN])
    more = ", …" if len(found.worst_workers) > SHOWN else ""
    who = f"{'rank' if len(found.worst_workers) == 1 else 'ranks'} {ranks}{more}"
    if workers >= EXPLAINS:
        yield f"{who} of {len(found.by_worker)} workers: working at the usual pace would save {_saved(workers)}."
    if stage >= EXPLAINS and len(found.by_stage) > 1:
        yield (
            f"the last pipeline stage: working at the usual pace would save {_saved(stage)}. It also computes the "
            "loss; give it fewer layers."
        )
    if max(workers, stage) < EXPLAINS:
        yield (
            f"neither the worst workers ({who}: {_saved(workers)}) nor the last stage ({_saved(stage)}): the delays "
            "are spread over the job, as with uneven sequence lengths or pauses on each rank in turn."
        )


def _saved(share: float) -> str:
    return "all of the lost time" if share >= 0.995 else f"{max(share, 0.0):.0%} of the lost time"


def _tables(found: WhatIf) -> Iterator[str]:
    workers = {f"rank {rank} (dp {found.place[rank][0]}, stage {found.place[rank][1]})": value
               for rank, value in found.by_worker.items()}  # fmt: skip
    for label, slowdowns in (
        ("workers", workers),
        ("stages", {f"stage {stage}": value for stage, value in found.by_stage.items()}),
        ("dp ranks", {f"dp rank {lane}": value for lane, value in found.by_dp_rank.items()}),
        ("operations", found.by_operation),
    ):
        for place, (name, value) in enumerate(list(slowdowns.items())[:SHOWN]):
            share = max((value - 1) / (found.slowdown - 1), 0.0)
            if place and share < TRIVIAL:
                break
            label_shown = label if place == 0 else ""
            row = f"  {label_shown:<{WIDE_LABEL}}{name:<{NAME}}{value:>6.3f}×{share:>6.0%}  {_bar(share)}"
            yield row.rstrip()


def _bar(share: float) -> str:
    eighths = round(min(share, 1.0) * BAR * 8)
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")


def _map(found: WhatIf, width: int) -> Iterator[str]:
    """Rows are stages, columns data-parallel ranks; if there are too many, a column shows the worst of several."""
    lanes = sorted(found.by_dp_rank)
    room = width - 2 - WIDE_LABEL
    per_column = -(-len(lanes) // room)
    broad = 2 if len(lanes) * 2 <= room else 1
    value = {where: found.by_worker[rank] for rank, where in found.place.items()}
    highest = max(*value.values(), NEGLIGIBLE)
    for stage in sorted(found.by_stage):
        cells = [
            max(value[lane, stage] for lane in lanes[first : first + per_column])
            for first in range(0, len(lanes), per_column)
        ]
        yield f"  {f'stage {stage}':<{WIDE_LABEL}}" + "".join(_shade(cell, highest) * broad for cell in cells)
    several = f", {per_column} per column" if per_column > 1 else ""
    yield (
        " " * (2 + WIDE_LABEL)
        + f"data-parallel ranks {lanes[0]} to {lanes[-1]}{several}; █ is {highest:.2f}×, ░ near 1"
    )


def _shade(value: float, highest: float) -> str:
    """Blank is never used, so that the frame of the map stays visible."""
    level = (value - 1) / (highest - 1)
    return SHADES[min(max(round(level * (len(SHADES) - 1)), 1), len(SHADES) - 1)]


def _extent(found: WhatIf) -> str:
    lanes, stages = len(found.by_dp_rank), len(found.by_stage)
    shape = f"{count_text(lanes, 'data-parallel rank')} × {count_text(stages, 'pipeline stage')}"
    return f"{count_text(len(found.by_worker), 'worker')} ({shape})"


def _marked(mark: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=f"{mark} ", subsequent_indent="  ")
