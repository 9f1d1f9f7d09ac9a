"""What to do about find_unused_parameters=True, by what DDP itself has found of unused parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stepscope.diagnosis.samples import number

__all__ = ["all_were_used", "for_unused"]

ENOUGH_ITERATIONS = 90
"""Backward passes without an unused parameter after which it is said that there are none: the look after step 100."""


def for_unused(ddp: Mapping[str, Any]) -> Iterator[str]:
    """For a job that waits for DDP's exchange; nothing where parameters are unused now and then: then it is needed."""
    if ddp.get("find_unused_parameters") is not True or ddp.get("unused") == "varying":
        return
    costs = "find_unused_parameters=True walks the graph before each backward and delays the buckets"
    iterations = all_were_used(ddp)
    if iterations:
        yield f"{costs}; all parameters took part in each of {iterations:,} backward passes, so drop it."
    elif ddp.get("unused") == "same" and ddp.get("static_graph") is not True:
        yield f"{costs}; the unused parameters never change, so static_graph=True spares the walk."
    else:
        fixed = "" if ddp.get("static_graph") is True else " (if the unused ones never change: static_graph=True)"
        yield f"{costs}: drop it if all parameters are used{fixed}."


def all_were_used(ddp: Mapping[str, Any]) -> int:
    """In how many backward passes all parameters took part, where that is enough to go by; else 0."""
    iterations = int(number(ddp, "iterations") or 0)
    return iterations if ddp.get("unused") == "none" and iterations >= ENOUGH_ITERATIONS else 0
