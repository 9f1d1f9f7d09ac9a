"""What the Flight Recorders of the ranks say, in the terms of a hang."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stepscope.hangs.evidence import Evidence
from stepscope.records.hang import WaitingIn

__all__ = ["Recorders", "read_recorders"]


@dataclass(frozen=True, kw_only=True)
class Recorders:
    verdict: dict[str, Any] = field(default_factory=dict)
    """That of ``flight/``; {}: nobody answered."""
    pending: dict[int, tuple[WaitingIn, ...]] = field(default_factory=dict)
    """By rank: the collectives that were begun and have not ended, in order."""
    answered: frozenset[int] = frozenset()


def read_recorders(evidence: Evidence) -> Recorders:
    return Recorders()
