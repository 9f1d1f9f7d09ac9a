"""``stepscope.compare``: what ``stepscope compare`` says, as an object."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.api.run import TEXT_WIDTH, Run
from stepscope.cli.arguments import run_or_url, run_path
from stepscope.comparison.inputs import read_input
from stepscope.comparison.repeats import compare_with_repeats
from stepscope.comparison.statistics import Verdict
from stepscope.comparison.text import render_comparison, render_markdown
from stepscope.frame import Frame, frame_of_records
from stepscope.records.text import printable

__all__ = ["Comparison", "compare"]

PHASE_COLUMNS = ("phase", "before_ms", "after_ms", "change_ms", "change", "low_ms", "high_ms", "real")
RANK_COLUMNS = ("rank", "change_ms", "real", "phase")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run compared with one or several baselines; ``stepscope.compare`` makes it."""

    document: dict[str, Any]
    """Everything, as ``stepscope compare --json`` prints it (docs/compare.md)."""

    @property
    def verdict(self) -> Verdict:
        """``slower``, ``faster``, ``same``, or ``cannot_tell`` if there are too few steps to decide."""
        found: Verdict = self.document["verdict"]
        return found

    @property
    def title(self) -> str:
        """The verdict in one sentence."""
        return str(self.document["title"])

    @property
    def change(self) -> float:
        """By which share the step time changed: 0.1 is 10% slower."""
        return float(self.document["change"])

    @property
    def interval(self) -> tuple[float, float]:
        """Within which that share is, with 99% confidence."""
        low, high = self.document["interval"]
        return float(low), float(high)

    @property
    def like_for_like(self) -> bool:
        """Whether nothing that was recorded about the runs differs in what matters."""
        return bool(self.document["like_for_like"])

    @property
    def notices(self) -> tuple[str, ...]:
        return tuple(self.document["notices"])

    def phases(self) -> Frame:
        """One row per phase, in milliseconds per step; ``low_ms``, ``high_ms``: interval; ``real``: not chance."""
        rows = []
        for row in self.document["phases"]:
            low, high = row["interval_ms"] or (None, None)
            rows.append({**row, "low_ms": low, "high_ms": high})
        return frame_of_records(PHASE_COLUMNS, rows)

    def ranks(self) -> Frame:
        """One row per rank: by how much its own work changed beyond that of the median rank.

        The 64 that changed most; without rows if waiting was not measured.
        """
        return frame_of_records(RANK_COLUMNS, self.document["ranks"]["rows"])

    def to_markdown(self) -> str:
        """Return the comparison for a pull request."""
        return render_markdown(self.document)

    def __str__(self) -> str:
        return printable(render_comparison(self.document, width=TEXT_WIDTH), keep="\n")

    def __repr__(self) -> str:
        return f"<Comparison {self.verdict}: {self.title}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


Source = str | os.PathLike[str] | Run


def compare(
    baseline: Source | Sequence[Source], run: Source, *, only: bool = False, unfinished: bool = False
) -> Comparison:
    """Compare a run with a baseline, or with several, as ``stepscope compare`` does.

    Each is a ``Run``, a run directory, a name in ``runs/``, an archived run, a ``summary.json``, or CSV or JSON with a
    number per step. ``only``: leave out further runs of the baseline in its folder. ``unfinished``: accept runs that
    failed or are still active. Raises ``stepscope.errors.CompareError`` if an input cannot be used.
    """
    several = isinstance(baseline, Sequence) and not isinstance(baseline, str)
    baselines: Sequence[Source] = baseline if several else [baseline]  # type: ignore[assignment,list-item]
    inputs = [read_input(_path(source)) for source in (*baselines, run)]
    return Comparison(
        document=compare_with_repeats(inputs[:-1], inputs[-1], only=only, unfinished=unfinished),
    )


def _path(source: Source) -> Path:
    return source.path if isinstance(source, Run) else run_path(run_or_url(os.fspath(source)))
