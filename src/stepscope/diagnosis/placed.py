"""The agent's samples as arrays, and whose they are: which host, process or GPU belongs to which rank.

A host goes by its name, a process by host and pid, a GPU by its uuid: torch's numbers are those that
CUDA_VISIBLE_DEVICES leaves, NVML's are the machine's.  Where a GPU cannot be told to be the job's own it is left out,
unless the ranks of its host must use all that there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.samples import number, of_kind
from stepscope.diagnosis.view import View
from stepscope.records.identity import RankIdentity

__all__ = ["Gpu", "Readings", "at_steps", "gpu_readings", "host_readings", "process_readings", "row_medians"]

Floats = NDArray[np.float64]
Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    node: str
    index: int | None
    """NVML's."""
    name: str
    rows: tuple[int, ...]
    """Of the view: the ranks on it; empty when it is only known that some rank of its host uses it."""


@dataclass(frozen=True, kw_only=True)
class Readings:
    """Samples of N things, each in the order of time: every key is an array [N, T], nan where there is none."""

    count: int
    lines: Lines
    owner: NDArray[np.intp]
    """By line: whose it is, 0 … N-1."""

    @cached_property
    def _columns(self) -> NDArray[np.intp]:
        """By line: the how many-th of its owner it is."""
        taken = np.bincount(self.owner, minlength=self.count) if len(self.owner) else np.zeros(self.count, np.intp)
        by_owner = np.argsort(self.owner, kind="stable")
        out = np.empty(len(self.owner), np.intp)
        out[by_owner] = np.arange(len(self.owner)) - np.repeat(np.cumsum(taken) - taken, taken)
        return out

    def of(self, key: str) -> Floats:
        values = [number(line, key) for line in self.lines]
        return self.arranged(np.array([np.nan if value is None else value for value in values], np.float64))

    def arranged(self, values: Floats) -> Floats:
        """[N, T] of one value a line."""
        out = np.full((self.count, int(self._columns.max(initial=-1)) + 1), np.nan)
        out[self.owner, self._columns] = values
        return out


def host_readings(view: View) -> tuple[list[str], Readings]:
    """The hosts of the ranks, in the order of ranks."""
    hosts = list(dict.fromkeys(view.hosts))
    owners = {host: index for index, host in enumerate(hosts)}
    lines = list(of_kind(view.window.samples, "host"))
    return hosts, _readings(lines, [_looked_up(owners, line.get("node")) for line in lines], len(hosts))


def process_readings(view: View) -> Readings:
    """One row for each rank of the view."""
    owners = {(identity.host, identity.pid): row for row, identity in enumerate(_identities(view))}
    lines = list(of_kind(view.window.samples, "process"))
    keys = [(line.get("node"), line.get("pid")) for line in lines]
    return _readings(lines, [_looked_up(owners, key) for key in keys], len(view.rows))


def gpu_readings(view: View) -> tuple[list[Gpu], Readings]:
    """The GPUs that the job's ranks use."""
    identities = _identities(view)
    users = Counter(identity.host for identity in identities if identity.device == "cuda")
    lines = [line for line in of_kind(view.window.samples, "gpu") if _text(line.get("node")) in users]
    keys = [(_text(line.get("node")), _bare(line.get("uuid")), _index(line.get("index"))) for line in lines]
    by_uuid: dict[tuple[str, str], list[int]] = {}
    for row, identity in enumerate(identities):
        if identity.device_uuid:
            by_uuid.setdefault((identity.host, _bare(identity.device_uuid)), []).append(row)
    seen = Counter(node for node, _, _ in set(keys))
    told = {node for node, uuid, _ in keys if (node, uuid) in by_uuid}
    gpus: list[Gpu] = []
    owners: dict[tuple[str, str, int | None], int] = {}
    for key, line in zip(keys, lines, strict=True):
        node, uuid, index = key
        rows = by_uuid.get((node, uuid), [])
        if key in owners or not (rows or (node not in told and seen[node] <= users[node])):
            continue
        if not rows and seen[node] == 1:
            rows = [row for row, identity in enumerate(identities) if identity.host == node]
        owners[key] = len(gpus)
        gpus.append(Gpu(node=node, index=index, name=_text(line.get("name")), rows=tuple(rows)))
    return gpus, _readings(lines, [owners.get(key, -1) for key in keys], len(gpus))


def at_steps(view: View, wall_ns: Floats) -> Floats:
    """[R, T] times of each rank's own machine as step numbers, with fractions."""
    out = np.full_like(wall_ns, np.nan)
    steps = view.window.steps.astype(np.float64)
    for row, index in enumerate(view.rows):
        ends = view.window.end_wall_ns[index]
        there = ~np.isnan(ends)
        if there.any():
            # nan stays nan; before the first and after the last step it is the first and the last.
            out[row] = np.interp(wall_ns[row], ends[there], steps[there])
    return out


def row_medians(values: Floats) -> Floats:
    """[N]; medians of the rows over what is there; nan for a row without any."""
    if not values.shape[1]:
        return np.full(len(values), np.nan)
    ordered = np.sort(values, axis=1)  # nan last
    counts = (~np.isnan(values)).sum(axis=1)
    rows = np.arange(len(values))
    low, high = np.maximum(counts - 1, 0) // 2, np.minimum(counts // 2, values.shape[1] - 1)
    return np.asarray((ordered[rows, low] + ordered[rows, high]) / 2, np.float64)


def _identities(view: View) -> list[RankIdentity]:
    return [view.window.identities[index] for index in view.rows]


def _readings(lines: Lines, owners: Iterable[int], count: int) -> Readings:
    """Without the lines that are nobody's (-1), in the order of time."""
    owner = np.fromiter(owners, np.intp)
    wall_ns = np.array([number(line, "wall_ns") or 0.0 for line in lines], np.float64)
    order = np.argsort(wall_ns, kind="stable")
    order = order[owner[order] >= 0]
    return Readings(count=count, lines=[lines[index] for index in order], owner=owner[order])


def _looked_up(owners: Mapping[Any, int], key: Hashable) -> int:
    try:
        return owners.get(key, -1)
    except TypeError:  # a list or an object where a name should be
        return -1


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _bare(uuid: object) -> str:
    """NVML says ``GPU-…`` where torch says only the rest."""
    return _text(uuid).removeprefix("GPU-")


def _index(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
