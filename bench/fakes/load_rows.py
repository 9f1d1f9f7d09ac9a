"""What the ranks of the load generator recorded: a pure function of agent, rank and step, made for many steps at once.

A synchronous job: every step lasts as long as the slowest rank works, and the others wait in ``comm``.  Times are drawn
from a small pool that the agents go through at different places, so a row costs a copy; packing it costs more.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from zlib_ng import zlib_ng

from stepscope.records.steps import BACKWARD, BUILTIN_PHASES, COMM, PHASE_SLOTS, SLOT_BYTES, STEP, STEP_FIELDS
from stepscope.records.text import host_in_name
from stepscope.ring.layout import RingState
from stepscope.wire.frames import BLOCK_MAGIC, TABLE_FIELDS, ring_id

__all__ = ["LoadJob", "LoadRanks", "pack_rows"]

STEP_DTYPE = np.dtype(STEP_FIELDS)
POOL = 4096
ANCHOR_MONO_NS = 1_000_000_000
ANCHOR_WALL_NS = 1_700_000_000_000_000_000
_BLOCK_HEAD = struct.Struct("<4sHHIII")
_BLOCK_VERSION = 1
_ZERO_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class LoadJob:
    """A job of many ranks, alike but for one."""

    agents: int
    ranks_per_agent: int = 8
    steps_per_s: float = 1.0
    """In simulated time."""
    noise: float = 0.02
    slow_rank: int | None = None
    slow_share: float = 0.04
    """Of a step, what the slow rank takes longer in backward."""
    seed: int = 0

    @property
    def ranks(self) -> int:
        return self.agents * self.ranks_per_agent

    def pool_ns(self) -> NDArray[np.uint64]:
        """[POOL, slot]; without comm."""
        step_ns = 1e9 / self.steps_per_s
        shares = {"other": 0.02, "input": 0.03, "forward": 0.25, "backward": 0.45, "optimizer": 0.1}
        random = np.random.default_rng(self.seed)
        pool = np.zeros((POOL, PHASE_SLOTS))
        for name, share in shares.items():
            spread = np.exp(random.normal(0.0, self.noise, POOL))
            pool[:, BUILTIN_PHASES.index(name)] = share * step_ns * spread
        return np.rint(pool).astype(np.uint64)


class LoadRanks:
    """The ranks of one agent."""

    def __init__(self, job: LoadJob, node: int, pool_ns: NDArray[np.uint64]) -> None:
        self._job, self._node, self._pool_ns = job, node, pool_ns
        self._first = node * job.ranks_per_agent
        self.host = f"load{node:05d}"
        self.table: NDArray[Any] = np.zeros(job.ranks_per_agent, TABLE_FIELDS)
        for local in range(job.ranks_per_agent):
            self.table["ring"][local] = np.void(ring_id(self.key(local)))
        self.table["state"] = RingState.RUNNING
        slow = job.slow_rank
        self._slow = slow - self._first if slow is not None and 0 <= slow - self._first < job.ranks_per_agent else None

    def key(self, local: int) -> str:
        """As ``store.paths.ring_key``."""
        return f"{host_in_name(self.host)}-{100 + local}-{ANCHOR_WALL_NS:x}"

    def sidecars(self) -> list[dict[str, Any]]:
        return [self._sidecar(local) for local in range(self._job.ranks_per_agent)]

    def rows(self, first: int, end: int) -> NDArray[Any]:
        """[rank, step] of dtype ``STEP_FIELDS``."""
        job, steps = self._job, np.arange(first, end)
        local = np.arange(job.ranks_per_agent)
        step_ns = round(1e9 / job.steps_per_s)
        rows = np.zeros((job.ranks_per_agent, len(steps)), STEP_DTYPE)
        rows["kind"], rows["seq"], rows["step"] = STEP, steps + 1, steps
        rows["start_ns"] = ANCHOR_MONO_NS + steps * step_ns
        place = ((self._first + local)[:, None] * 7919 + steps * 31) % POOL
        phases = self._pool_ns[place]
        if self._slow is not None:
            phases[self._slow, :, BACKWARD] += np.uint64(round(job.slow_share * step_ns))
        worked = phases.sum(axis=2)
        phases[:, :, COMM] = np.maximum(step_ns, worked) - worked
        rows["phase_ns"] = phases
        rows["wall_ns"] = np.maximum(step_ns, worked)
        rows["micro_batches"] = rows["forwards"] = rows["batches"] = 1
        return rows

    def block(self, first: int, end: int) -> bytes:
        """Those steps of all its ranks."""
        table = self.table.copy()
        table["after_seq"], table["last_seq"], table["rows"] = first, end, end - first
        table["live_step"] = end
        table["live_since_ns"] = ANCHOR_MONO_NS + end * round(1e9 / self._job.steps_per_s)
        return pack_rows(table, self.rows(first, end).reshape(-1))

    def _sidecar(self, local: int) -> dict[str, Any]:
        identity = {
            "host": self.host,
            "pid": 100 + local,
            "rank": self._first + local,
            "local_rank": local,
            "world_size": self._job.ranks,
            "backend": "gloo",
            "script": "train.py",
        }
        return {
            "schema": 1,
            "identity": identity,
            "pid": 100 + local,
            "start_ticks": 1,
            "anchor_mono_ns": ANCHOR_MONO_NS,
            "anchor_wall_ns": ANCHOR_WALL_NS,
            "phase_names": [*BUILTIN_PHASES, *[""] * (PHASE_SLOTS - len(BUILTIN_PHASES))],
            "state": "running",
            "live_phase": 0,
            "live_since_ns": 0,
            "live_step": 0,
            "hook_failures": 0,
            "heard_wall_ns": 0,
            "ended_wall_ns": None,
            "facts": {},
            "groups": [],
        }


def pack_rows(table: NDArray[Any], rows: NDArray[Any]) -> bytes:
    """What ``wire.blocks.pack_block`` makes, from arrays: ``rows`` ring by ring in the table's order."""
    fields = [np.ascontiguousarray(table[name]).tobytes() for name, _ in TABLE_FIELDS]
    bodies = np.ascontiguousarray(rows.view(np.uint8).reshape(-1, SLOT_BYTES)[:, _ZERO_BYTES:].T)
    payload = zlib_ng.compress(b"".join([*fields, bodies.tobytes()]), 1)
    return _BLOCK_HEAD.pack(BLOCK_MAGIC, _BLOCK_VERSION, 0, len(table), len(rows), len(payload)) + payload
