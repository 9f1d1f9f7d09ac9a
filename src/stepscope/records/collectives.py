"""Collectives and process groups: their names, what a group is for, and the rows they are stored in.

The training process writes one word per collective (``ring/layout.py``: COLLECTIVE), and the reader of its ring makes
two kinds of records from them (``records/steps.py``): for every step the sums by group and operation (COMM), and for
some steps, the same ones on all ranks, each collective individually (COLLECTIVE), so that the n-th of a group can be
compared across ranks.

The bytes of a collective are the same on all its ranks: the tensor that is reduced, broadcast or sent; for any kind of
gather or scatter the whole, all ranks' parts together.  Only those of an all_to_all are this rank's own input.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "ALIKE_KINDS",
    "COLLECTIVE_ROW",
    "COMM_ROW",
    "FLAG_ASYNC",
    "FLAG_DEVICE",
    "FLAG_MISSED",
    "FLAG_WAITED",
    "MAX_GROUPS",
    "NO_DESCRIPTION",
    "OPS",
    "PHASE_SHIFT",
    "GroupKind",
    "ProcessGroup",
    "group_kind",
    "group_name",
    "groups_from_json",
    "groups_to_json",
    "kept_by_itself",
    "merged_groups",
]


# -- Collectives ------------------------------------------------------------------------------------------------------

OPS = (
    "unknown",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "send",
    "recv",
)
"""By number; words and records contain the number.  At most 32."""

MAX_GROUPS = 64
"""Groups that are distinguished per rank; the last slot is shared by all later ones."""

FLAG_ASYNC = 1
"""The script did not wait for it at once."""
FLAG_WAITED = 2
"""A wait for it was seen: ``exposed_ns`` and ``end_ns`` are what the host saw."""
FLAG_DEVICE = 4
"""From NCCL's Flight Recorder: its time is that of the kernel on NCCL's stream, from the rank's arrival on."""
FLAG_MISSED = 8
"""Not a collective: those of this step were overwritten in the Flight Recorder before they could be read."""
PHASE_SHIFT = 8
"""The high byte of one collective's flags with FLAG_DEVICE: the phase slot the rank was in at the call."""

GroupKind = Literal["world", "data", "tensor", "pipeline", "expert", "context", "other"]

FIRST_KEPT = 32
KEPT_EVERY = 16


def kept_by_itself(step: int) -> bool:
    """Whether the collectives of this step are stored one by one; depends on its number only, so all ranks agree."""
    return step < FIRST_KEPT or step % KEPT_EVERY == 0


NO_DESCRIPTION = ("", "undefined")
"""The second is torch's own, for a ``new_group()`` without one."""


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """One process group as one rank knows it.  Ranks of the same group agree on ``name``."""

    slot: int
    """Its number in the words of this rank."""
    name: str
    """Torch's name for it: unique in the job."""
    description: str = ""
    """``default_pg``, ``mesh_tp``, Megatron's names …"""
    kind: GroupKind = "other"
    """What it is for, by the names of the mesh's dimensions, or by ``description``."""
    backend: str = ""
    ranks: tuple[int, ...] = ()
    """Global ranks in order; empty if there were too many to list."""
    size: int = 0


def group_name(name: str, description: str) -> str:
    """The displayed name: ``mesh_tp``; ``group 1`` for one created without a name; empty if nothing is known."""
    if description not in NO_DESCRIPTION:
        return description
    return f"group {name}" if name.isdigit() else name


def merged_groups(declared: Sequence[ProcessGroup], found: Sequence[ProcessGroup]) -> tuple[ProcessGroup, ...]:
    """The groups that the rank itself reported, and those of ``found`` whose slots it did not assign."""
    taken = {group.slot for group in declared}
    return (*declared, *(group for group in found if group.slot not in taken))


def groups_to_json(groups: Sequence[ProcessGroup], limit: int) -> bytes:
    """As many of the groups as fit; the ranks of the largest ones are dropped first."""
    rows: list[list[Any]] = [[g.slot, g.name, g.description, g.kind, g.backend, g.size, list(g.ranks)] for g in groups]
    while len(text := json.dumps(rows, separators=(",", ":")).encode()) > limit:
        largest = max(rows, key=lambda row: len(row[6]), default=None)
        if largest is None or not largest[6]:
            rows.pop()
        else:
            largest[6] = []
    return text


def groups_from_json(raw: object) -> tuple[ProcessGroup, ...]:
    """Read what ``groups_to_json`` wrote (parsed); ValueError for invalid rows."""
    if not isinstance(raw, list):
        raise ValueError("groups must be a JSON list")  # noqa: TRY004  # like every other error in the data
    return tuple(_group(row) for row in raw)


def _group(row: Any) -> ProcessGroup:
    kinds = ("world", "data", "tensor", "pipeline", "expert", "context", "other")
    if not isinstance(row, list) or len(row) != 7:  # the fields above
        raise ValueError(f"not a group: {row!r}")
    slot, name, description, kind, backend, size, ranks = row
    texts = all(isinstance(text, str) for text in (name, description, backend))
    numbers = type(slot) is int and type(size) is int and isinstance(ranks, list)
    if not texts or not numbers or kind not in kinds or not all(type(r) is int and r >= 0 for r in ranks):
        raise ValueError(f"not a group: {row!r}")
    if not 0 <= slot < MAX_GROUPS or size < 0:
        raise ValueError(f"not a group: {row!r}")
    return ProcessGroup(
        slot=slot, name=name, description=description, kind=kind, backend=backend, size=size, ranks=tuple(ranks)
    )


COMM_ROW: list[tuple[str, str]] = [
    ("step", "<u8"),
    ("group", "u1"),
    ("op", "u1"),
    ("flags", "<u2"),
    ("count", "<u4"),
    ("bytes", "<u8"),
    ("exposed_ns", "<u8"),
    ("span_ns", "<u8"),
]
"""One row of ``RankSeries.comm``: all collectives of one step, group and operation.

``exposed_ns``: how long the host was blocked in waits for them.  ``span_ns``: the sum of their times from the call to
the end of the wait (0 for one without a known wait).  ``flags``: of any of them.  Count and bytes are for what was
called in this step, the two times for what was waited for in it: a collective that is waited for in a later step is in
a row of that step, too, with a count of 0 unless others were called there.

With FLAG_DEVICE ``span_ns`` is the sum of their times on the device, including waits for later ranks, and
``exposed_ns`` is 0: how much of it blocked the computation is not known here.
"""

COLLECTIVE_ROW: list[tuple[str, str]] = [
    ("step", "<u8"),
    ("group", "u1"),
    ("op", "u1"),
    ("flags", "<u2"),
    ("nth", "<u4"),
    ("bytes", "<u8"),
    ("start_ns", "<u8"),
    ("exposed_ns", "<u8"),
    ("end_ns", "<u8"),
]
"""One row of ``RankSeries.collectives``: the ``nth`` (from 0) collective of that group in that step.

Sends and recvs are counted separately: only the others are the same on all ranks of the group.  ``start_ns``: when the
rank reached it, on its monotonic clock.  ``end_ns``: when the wait for it ended; 0: none seen in that step.

With FLAG_DEVICE ``nth`` is the group's own sequence number, which is the same on all its ranks (mod 2^32; for sends and
recvs that of the pair), ``start_ns`` is when the host called it, and ``end_ns`` is ``start_ns`` plus its time on the
device (0: unknown), not when it ended.
"""


# -- Group kinds ------------------------------------------------------------------------------------------------------
# What a process group is for, by the name it was created with.  The recorder and the agent share this.

ALIKE_KINDS: tuple[GroupKind, ...] = ("data", "tensor", "context", "expert")
"""Groups whose ranks have the same work to do, unlike the stages of a pipeline."""

_DATA = re.compile(r"(?:d|dd|fsd|efsd|hsd)p|data|replicate|shard|batch")
"""The first word of the name of a dimension along which the data differ (``dp``, ``dp_shard``, ``data_parallel`` …)."""
_KIND_WORDS: tuple[tuple[GroupKind, str], ...] = (
    ("pipeline", r"pp|pipe|pipeline|embedding|embd"),
    ("tensor", r"e?tp|tensor"),
    ("context", r"cp|context|sp|sequence"),
    ("expert", r"ep|expert|experts|moe"),
)


def group_kind(description: str) -> GroupKind:
    """What a group is for, by the name it was created with: ``mesh_dp_shard``, ``TENSOR_MODEL_PARALLEL_GROUP`` …"""
    words = description.lower().removeprefix("mesh_").split("_")
    kinds = [kind for word in words if (kind := _kind_of_word(word)) is not None]
    # EXPERT_DATA_PARALLEL_GROUP: the data parallel group of the experts.
    return next((kind for kind in kinds if kind != "expert"), kinds[0] if kinds else "other")


def is_data_dimension(name: str) -> bool:
    """Whether the data differ along a dimension with that name."""
    return _DATA.fullmatch(name.lower().partition("_")[0]) is not None


def _kind_of_word(word: str) -> GroupKind | None:
    if is_data_dimension(word):
        return "data"
    return next((kind for kind, pattern in _KIND_WORDS if re.fullmatch(pattern, word)), None)
