"""How far ``stepscope whatif`` is from published analyses of the same traces.

    python bench/whatif_published.py FOLDER

For every ``trace-NAME.parquet`` in the folder with its ``meta-NAME.yaml``, ``result-NAME.json``, ``mw-NAME.json`` and
``ms-NAME.json``: the largest relative deviation in each field.  docs/whatif.md has the figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stepscope.reports.whatif import whatif_document
from stepscope.whatif.operations import Trace, read_meta, read_trace
from stepscope.whatif.replay import analyze

__all__ = ["compared", "deviations", "main"]

DECOMPOSED = {"by_stage": "stage", "by_dp_rank": "dp_rank", "by_operation": "optype"}


def compared(folder: Path, name: str) -> Iterator[tuple[str, Mapping[str, float], Mapping[str, float]]]:
    """Field by field: its name, our values, the published ones."""
    trace = read_trace(folder / f"trace-{name}.parquet", read_meta(folder / f"meta-{name}.yaml"))
    found = whatif_document(analyze(trace))
    result = json.loads((folder / f"result-{name}.json").read_text())
    yield "slowdown", {"": found["slowdown"]}, {"": result["blocking_slowdown"]}
    yield "by_worker", found["by_worker"], _workers(trace, result)
    for ours, theirs in DECOMPOSED.items():
        yield ours, found[ours], result[f"blocking_decompose_by_{theirs}"]
    for kind in ("mw", "ms"):
        yield kind, found[kind], json.loads((folder / f"{kind}-{name}.json").read_text())


def deviations(folder: Path, name: str) -> dict[str, float]:
    """The largest relative deviation of each field; infinite where the keys differ."""
    return {
        field: max(abs(ours[key] / theirs[key] - 1) for key in theirs) if ours.keys() == theirs.keys() else float("inf")
        for field, ours, theirs in compared(folder, name)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="How far `stepscope whatif` is from published analyses.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for path in sorted(folder.glob("trace-*.parquet")):
        name = path.stem.removeprefix("trace-")
        print(name, "  ".join(f"{field} {value:.1e}" for field, value in deviations(folder, name).items()))


def _workers(trace: Trace, result: Mapping[str, Any]) -> dict[str, float]:
    """Not in the published files themselves: by its formula, from what is."""
    lanes, stages = result["blocking_decompose_by_dp_rank"], result["blocking_decompose_by_stage"]
    return {str(rank): min(lanes[str(lane)], stages[str(stage)]) for (lane, stage), rank in trace.ranks.items()}


if __name__ == "__main__":
    main()
