"""Python that keeps a process without a device from computing: loops, preprocessing, sleeps, files.

Where there is a device, what it waits for the host says as much and is told instead (``host.py``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepscope.records.units import share_text
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.view import Claim, View, claim_of

__all__ = ["find_python"]

Ints = NDArray[np.int64]
PLACES_SHOWN = 8


def find_python(view: View, idle_ns: Ints) -> list[Claim]:
    """``host_python``; ``idle_ns`` [R] as in ``loading.py``."""
    stopped_ns = view.each(lambda one: sum(stop.total_ns for stop in one.host.stops))
    saved_ns = np.where(view.on_device, 0, np.minimum(stopped_ns, idle_ns))
    where = (view.share(saved_ns) >= thresholds.PYTHON_SHARE) & (view.per_step(saved_ns) >= thresholds.PYTHON_FLOOR_NS)
    if not where.any():
        return []
    row = int(np.where(where, view.share(saved_ns), -1.0).argmax())
    stops = view.analyses[row].host.stops
    each_ns, share = view.typical(view.per_step(saved_ns), where), view.typical(view.share(saved_ns), where)
    named = stops[0].named
    enough = stops[0].total_ns >= thresholds.EXPLAINS_SHARE * int(stopped_ns[row])
    mostly = f", mostly in {named}" if named and enough else ""
    return [
        claim_of(
            view,
            "host_python",
            f"The main thread runs no operator{view.of_whom(where)} for {view.each_step(each_ns)}, "
            f"{share_text(share)} of the time{mostly}: Python code, or a wait.",
            where=where,
            saved_ns=saved_ns,
            explained_ns=saved_ns,
            evidence={
                "python_ms_per_step": round(each_ns / 1e6, 3),
                "python_share": round(share, 4),
                "stops": [
                    {"place": stop.named, "count": stop.count, "stop_ms": round(stop.total_ns / 1e6, 3)}
                    for stop in stops[:PLACES_SHOWN]
                ],
            },
            advice=(
                f"Begin at {stops[0].place}." if stops[0].place else "Trace with with_stack=True to see the lines.",
                "Loops over elements belong into tensor operations; logging and files into another thread.",
            ),
            confidence=0.85,
        )
    ]
