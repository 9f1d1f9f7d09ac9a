"""Of a run's files, what its copy has: the start and the end of some logs, errors, and the summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepscope.hub.copy.asking import Asker
from stepscope.hub.copy.packing import Blobs
from stepscope.hub.copy.plan import Plan
from stepscope.records.places import log_path
from stepscope.records.units import count_text

__all__ = ["add_files"]

ALWAYS = ("summary.txt", "logs/main.log")
MOST_ERRORS = 64
OTHERS = {"logs/": "more log", "errors/": "more error", "flight/": "Flight Recorder dump"}
"""Of which folders a file that is left out is missed, and what it is called."""


async def add_files(
    ask: Asker, plan: Plan, blobs: Blobs, answers: dict[str, Any], chosen: Sequence[int], left_out: list[str]
) -> dict[str, Any]:
    """By path its ``size`` and ``pieces``: offset, and where the bytes are."""
    answers["files"] = await ask.document("files")
    sizes = {entry["path"]: entry["size"] for entry in answers["files"].get("files", [])}
    attempt = answers["steps"].get("attempt", 0)
    logs = [log_path(ask.run.path, rank=rank, attempt=attempt).relative_to(ask.run.path).as_posix() for rank in chosen]
    errors = [path for path in sizes if path.startswith("errors/")][:MOST_ERRORS]
    wanted = [path for path in dict.fromkeys((*ALWAYS, *errors, *logs)) if path in sizes]
    share = max(1024, plan.all_log_bytes // max(1, 2 * len(wanted)))
    most = min(plan.log_bytes, share)
    found, cut = {}, 0
    for path in wanted:
        size = sizes[path]
        asked = [{"offset": 0, "most": 2 * most}] if size <= 2 * most else [{"offset": 0, "most": most}, {"tail": most}]
        pieces = []
        for params in asked:
            reply = await ask.reply(f"files/{path}", "*/*", **params)
            if reply is not None:
                pieces.append([int(reply.headers["x-stepscope-offset"]), *blobs.put(reply.data)])
        cut += len(asked) > 1
        found[path] = {"size": size, "pieces": pieces}
    if cut:
        left_out.append(f"Of {cut:,} files only the first and the last {most // 1024:,} kB are here.")
    for folder, what in OTHERS.items():
        if rest := sum(path.startswith(folder) for path in sizes if path not in found):
            left_out.append(f"Not here: {count_text(rest, what)}.")
    return found
