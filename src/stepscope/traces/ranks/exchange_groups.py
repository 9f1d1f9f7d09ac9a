"""In which process group a collective was."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.flight.spelling import ranks_of
from stepscope.traces.model.columns import Rows, Trace
from stepscope.traces.model.window import Window
from stepscope.traces.reading.builder import Numbering

__all__ = ["Group", "GroupKind", "groups_of"]

GroupKind = Literal["data", "tensor", "pipeline", "expert", "context", "unknown"]
WORDS: Final[dict[str, GroupKind]] = {
    **dict.fromkeys(("dp", "data", "ddp", "fsdp", "hsdp", "shard", "replicate", "zero"), "data"),
    **dict.fromkeys(("tp", "tensor"), "tensor"),
    **dict.fromkeys(("pp", "pipe", "pipeline"), "pipeline"),
    **dict.fromkeys(("ep", "expert"), "expert"),
    **dict.fromkeys(("cp", "context", "sp", "sequence", "ulysses"), "context"),
}
"""As they are in the descriptions that torch's meshes (``mesh_tp``), Megatron (``TENSOR_MODEL_PARALLEL_GROUP``) and
vLLM (``tp:0``) give their groups."""

THREADS_OF_GROUP = 2
"""That gloo makes."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that say the same are in the same group: names alone may be those of several, with other ranks each."""

    name: str = ""
    """What torch calls it; empty where the file says nothing of groups."""
    description: str = ""
    members: tuple[int, ...] = ()
    """Their ranks; empty: not told, or not in full."""
    wording: str = ""
    """The ranks as far as they are told."""
    size: int = -1

    @property
    def identity(self) -> tuple[str, tuple[int, ...], str]:
        return self.name, self.members, "" if self.members else self.wording

    @property
    def kind(self) -> GroupKind:
        """What its ranks share, as far as its description or its name says so."""
        words = re.split(r"[^a-z]+", f"{self.description} {self.name}".lower())
        kinds = {WORDS[word] for word in words if word in WORDS}
        if "data" in kinds and kinds <= {"data", "context", "expert"}:
            # Gradients and shards go over the ranks of a sequence, or of an expert's copies, as well.
            return "data"
        return kinds.pop() if len(kinds) == 1 else "unknown"


def groups_of(
    window: Window, rows: Rows, said: NDArray[np.int64], rank: int
) -> tuple[tuple[Group, ...], NDArray[np.int32]]:
    """``said``: [rows]; where ``Trace.collectives`` tells of it.  → the groups; [rows], which it is, or −1."""
    trace = window.trace
    listed = {group.name: group for group in _listed(trace) if not group.members or rank in group.members}
    groups: Numbering[Group] = Numbering()
    out = np.full(len(rows), -1, np.int32)
    table = trace.collectives
    told = said >= 0
    keys = np.stack([table.group, table.description, table.ranks, table.size], axis=1)[said[told]]
    known, inverse = np.unique(keys, axis=0, return_inverse=True)
    codes = np.array([_code(groups, _group(trace, key, listed)) for key in known.tolist()], np.int32)
    if len(codes):
        out[told] = codes[inverse.reshape(-1)]
    _infer(window, rows, out, listed, groups)
    return tuple(groups), out


def _code(groups: Numbering[Group], group: Group | None) -> int:
    return -1 if group is None else groups[group]


def _infer(
    window: Window, rows: Rows, out: NDArray[np.int32], listed: dict[str, Group], groups: Numbering[Group]
) -> None:
    """Of collectives of which nothing is told, in place."""
    slices = window.trace.slices
    if not (out < 0).any():
        return
    if len(listed) <= 1:
        # The only group there is, or a file that knows no groups.
        told = list(groups)
        only = told[0] if len(told) == 1 else Group(size=window.trace.meta.world_size or -1)
        out[out < 0] = groups[next(iter(listed.values()), only)]
        return
    for stream in np.unique(slices.stream[rows[(out < 0) & (slices.device[rows] >= 0)]]):
        same = (slices.stream[rows] == stream) & (slices.device[rows] >= 0)
        others = np.unique(out[same & (out >= 0)])
        if len(others) == 1:
            out[same] = others[0]
    rest = (out < 0) & (slices.device[rows] < 0)
    threads = np.unique(slices.thread[rows[rest]]).tolist()
    by_tid = sorted((tid, thread) for thread in threads if isinstance(tid := window.trace.threads[thread].tid, int))
    if len(by_tid) == THREADS_OF_GROUP * len(listed):
        for place, (_, thread) in enumerate(by_tid):
            group = list(listed.values())[place // THREADS_OF_GROUP]
            out[rest & (slices.thread[rows] == thread)] = groups[group]


def _listed(trace: Trace) -> list[Group]:
    """``pg_config``."""
    out = []
    for each in trace.meta.groups:
        name, size = each.get("pg_name"), each.get("pg_size")
        members = ranks_of(each.get("ranks"))
        size = size if isinstance(size, int) else len(members) or -1
        description = str(each.get("pg_desc") or "")
        if size != 1:
            whole = members if len(members) == size else ()
            out.append(Group(name=str(name), description=description, members=whole, size=size))
    return out


def _group(trace: Trace, key: list[int], listed: dict[str, Group]) -> Group | None:
    """Of what a slice says of it; None: nothing."""
    name, description, wording, size = trace.text(key[0]), trace.text(key[1]), trace.text(key[2]).strip('"'), key[3]
    if not name and not wording:
        return None
    members = ranks_of(wording)
    if not members or (size > 0 and len(members) != size):
        # Torch shortens long lists of ranks; those of the file's header are whole.
        members = listed[name].members if name in listed else ()
    if size < 0:
        size = len(members) or (listed[name].size if name in listed else -1)
    return Group(name=name, description=description, members=members, wording="" if members else wording, size=size)
