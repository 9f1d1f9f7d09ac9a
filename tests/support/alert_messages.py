"""Messages about an incident, for tests of the outbox, receivers and the sender."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stepscope.alerts.model import Incident, Message, MessageStatus

__all__ = ["BEGAN_NS", "incident", "lifecycle", "message"]

BEGAN_NS = 1_800_000_000_000_000_000
"""2027-01-15 08:00:00 UTC."""


def incident(**changes: Any) -> Incident:
    """An open incident: rank 2 is slow since step 300."""
    values: dict[str, Any] = {
        "number": 1,
        "topic": "speed",
        "state": "open",
        "kind": "persistent_straggler",
        "severity": "critical",
        "title": "Rank 2 is 29 ms slower than its peers in forward; all other ranks wait for it.",
        "rules": ("critical",),
        "receivers": ("hook",),
        "ranks": (2,),
        "phase": "forward",
        "hosts": ("node-1",),
        "line": "train.py:42",
        "since_step": 300,
        "since_wall_ns": BEGAN_NS,
        "opened_wall_ns": BEGAN_NS,
        "changed_wall_ns": BEGAN_NS,
        "cost": {
            "share": 0.61,
            "seconds": 12.5,
            "rank_hours": 2.5,
            "if_fixed": {"step_ms": 20.0, "speedup": 2.5},
        },
        "advice": ("Look at the code at train.py:42.",),
        "messages": 1,
    }
    return Incident(**{**values, **changes})


def message(
    change: int = 1, status: MessageStatus = "firing", receiver: str = "hook", run: str = "run-1", **changes: Any
) -> Message:
    """The message about that change of an incident; ``changes`` are of the incident."""
    known: dict[str, Any] = {"messages": change, "receivers": (receiver,)}
    if status == "resolved":
        ended = {"state": "resolved", "resolved_wall_ns": BEGAN_NS + 240 * 10**9, "resolved_step": 900}
        known |= {**ended, "resolved_why": "it recovered"}
    about = incident(**{**known, **changes})
    return Message(
        id=f"{run}/{about.number}/{change}/{receiver}",
        receiver=receiver,
        status=status,
        run=run,
        dedup_key=f"{run}/{about.number}",
        created_wall_ns=BEGAN_NS + change * 10**9,
        incident=about,
        link=f"http://127.0.0.1:8000/#/runs/{run}/incidents/{about.number}",
    )


def lifecycle(receiver: str = "hook", run: str = "run-1", number: int = 1) -> list[Message]:
    """Begin, change and end of one incident."""
    begun = message(1, "firing", receiver, run, number=number)
    worse = replace(begun.incident, ranks=(2, 3), messages=2)
    changed = replace(begun, id=f"{run}/{number}/2/{receiver}", status="updated", incident=worse)
    return [begun, changed, message(3, "resolved", receiver, run, number=number)]
