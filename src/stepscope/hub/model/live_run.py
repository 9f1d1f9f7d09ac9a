"""A run as its hub sees it while it lasts: what ingest and the tail put in, what the API and the rules take out.

    live = LiveRun(name="night")
    live.ring(sidecar, node="1")        # who a ring is, ahead of its first rows
    live.rows(taken)                    # cheap: rows wait until a few thousand have come together
    live.tick()                         # a few times a second: takes them in, digests the steps that are complete
    live.steps(0, 1000, bins=100)       # and the other documents for the API

``Intake`` has the first half.  One thread, the hub's event loop, calls everything here; rules work on a copy in a
thread of their own (``looks.py``).  Everything handed out is plain JSON: columns as lists, times in nanoseconds on the
hub's clock, ranks by the numbers they are shown as.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.model.digest import MEMORY, QUANTILES, device_width, metrics_of
from stepscope.hub.model.digest_log import Bins, DigestLog
from stepscope.hub.model.intake import Intake
from stepscope.hub.model.planes import NONE
from stepscope.hub.model.registry import ENDED, STATES
from stepscope.records.finding import Finding
from stepscope.records.series import ALIVE

__all__ = ["Judged", "LiveRun"]

MOST_ROWS = 10_000
"""Ranks, events or samples in one answer."""
MOST_BINS = 4096
UNFOLDED_CELLS = 1 << 16
"""Steps times ranks that are digested anew for one answer: some tens of milliseconds."""
WATCHED_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What the last look found."""

    findings: tuple[Finding, ...] = ()
    """Those that are shown, the most severe first."""
    standing: Mapping[int, str] = field(default_factory=dict)
    """By rank, what it is at while the job stands still (``hangs/standing.py``)."""
    communication: Mapping[str, Any] | None = None
    """What the ranks exchanged in the steps that were looked at: the table of ``summary.json``."""
    step: int = NONE
    ranks: int = 0
    """How many were judged …"""
    of_ranks: int = 0
    """… of how many."""
    looks: int = 0
    took_s: float = 0.0
    period_s: float = 0.0
    """From one look to the next."""
    failed: str = ""
    """What went wrong in a look, if one ever did; a fault of ours."""


class LiveRun(Intake):
    judged = Judged()
    asked_s = float("-inf")
    """When somebody last looked."""
    _steps_said: tuple[tuple[int, ...], dict[str, Any]] | None = None
    """The last answer of ``steps``, with what was asked: whoever opens the page asks the same."""

    def asked(self) -> None:
        """Somebody looks."""
        self.asked_s = self._clock()

    @property
    def watched(self) -> bool:
        """Whether somebody looks on: whoever follows a run asks at every heartbeat."""
        return self._clock() - self.asked_s < WATCHED_S

    def judge(self, judged: Judged) -> None:
        self.judged = judged
        self.touch()

    async def changed(self, version: int, timeout_s: float) -> int:
        """Wait until the version is another one, or so long; the version."""
        if self.version == version:
            waiter = asyncio.get_running_loop().create_future()
            self.waiting.add(waiter)
            try:
                await asyncio.wait((waiter,), timeout=timeout_s)
            finally:
                self.waiting.discard(waiter)
        return self.version

    def info(self) -> dict[str, Any]:
        """How the run stands, in one page."""
        self.settle()
        n, of = self.registry.count, self.registry.of
        own = of["attempt"][:n] == self.registry.attempt
        states = Counter(STATES[state] for state in self.registry.states()[own & (of["shown"][:n] != NONE)].tolist())
        return {
            "name": self.name,
            "attempt": self.registry.attempt,
            "world_size": self.registry.world_size,
            "ranks": self.planes.columns,
            "live_ranks": int(self.live_columns().sum()) if self.planes.columns else 0,
            "still_ranks": self._still_ranks(),
            "rings": n,
            "states": dict(states),
            "nodes": len(self.registry.nodes),
            "hosts": len(self.registry.hosts),
            "step": self.frontier,
            "newest_step": self.planes.newest,
            "window": {"steps": self.planes.width, "stride": self.planes.stride, "oldest_step": self.planes.oldest},
            "phases": self.used_phases(),
            "rows": self.rows_taken,
            "rows_repeated": self.rows_repeated,
            "rows_unknown": self.rows_unknown,
            "lost": int(of["lost"][:n].sum()),
            "torn": int(of["torn"][:n].sum()),
            "events": self.said.events_seen,
            "version": self.version,
            "model_bytes": self.planes.nbytes + self.map.nbytes,
            "judged": self._judged(),
        }

    def ranks(
        self, *, first: int = 0, limit: int = 1000, order: str = "rank", chosen: Collection[int] | None = None
    ) -> dict[str, Any]:
        """The ranks of the last attempt as columns.

        ``order``: ``rank``; or ``work``, ``wall`` or the name of a phase: the longest first, by the mean over the
        window.  ``chosen``: only these ranks.
        """
        self.settle()
        of, rings = self.registry.of, self.ring_of
        shown = of["shown"][rings]
        means = self.means(("wall", "work", *self.used_phases()))
        place = np.argsort(shown) if order not in means else np.lexsort((shown, -means[order]))
        if chosen is not None:
            place = place[np.isin(shown[place], list(chosen))]
        place = place[first : first + min(limit, MOST_ROWS)]
        at = rings[place]
        offsets = np.array([self.offsets_ns.get(node, 0) for node in self.registry.nodes], np.int64)
        since = of["live_since_ns"][at] - of["anchor_mono_ns"][at] + of["anchor_wall_ns"][at]
        names = [self.registry.phase_names(ring) for ring in at.tolist()]
        live = zip(names, of["live_phase"][at].tolist(), strict=True)
        heard = of["live_step"][at] > of["last_step"][at]  # else it said where it was before it sent its last step
        states = [self.registry.state(ring) for ring in at.tolist()]
        standing = [self.judged.standing.get(rank) for rank in shown[place].tolist()]
        plain = ("attempt", "local_rank", "pid", "last_step", "rows", "lost", "torn", "hook_failures")
        return {
            "total": len(rings),
            "rank": shown[place].tolist(),
            **{name: of[name][at].tolist() for name in plain},
            "live_step": np.maximum(of["live_step"][at], of["last_step"][at] + 1).tolist(),
            "node": [self.registry.nodes[node] for node in of["node"][at].tolist()],
            "host": [self.registry.hosts[host] for host in of["host"][at].tolist()],
            "state": states,
            "standing": [how if state in ALIVE else None for how, state in zip(standing, states, strict=True)],
            "live_phase": [
                given[slot] if known else None for (given, slot), known in zip(live, heard.tolist(), strict=True)
            ],
            "live_since_wall_ns": (since - offsets[of["node"][at]]).tolist() if len(at) else [],
            "ended_wall_ns": [ended or None for ended in of["ended_wall_ns"][at].tolist()],
            "mean_ns": {name: np.round(values[place]).astype(np.int64).tolist() for name, values in means.items()},
        }

    def steps(self, first: int = 0, last: int | None = None, *, bins: int = 512) -> dict[str, Any]:
        """The digests of these steps, in at most so many bins, as columns."""
        self.tick()
        last = max(0, self.planes.newest) if last is None else last
        asked = (self.version, first, last, bins)
        if self._steps_said is None or self._steps_said[0] != asked:
            self._steps_said = asked, self._as_columns(self._bins(first, last, bins))
        return dict(self._steps_said[1])

    def steps_redone(self, after: int) -> dict[str, Any] | None:
        """The steps that were digested again after that time (``redigests``), as columns; None: there are none."""
        redone = [step for step, number in self.redone.items() if number > after]
        if not redone:
            return None
        found = self._bins(min(redone), max(redone), MOST_BINS)
        return self._as_columns(found.part(np.isin(found.first, redone) & (found.first == found.last)))

    def _bins(self, first: int, last: int, bins: int) -> Bins:
        most = min(max(1, bins), MOST_BINS)
        log = self._unfolded(first, last, most) or self.digests
        return log.bins(first, last, most, metrics=metrics_of(self.planes), device=device_width(self.planes))

    def _unfolded(self, first: int, last: int, most: int) -> DigestLog | None:
        """Of a stretch that the log has coarser than is asked for, its steps digested anew, if they are all there."""
        if self.planes.stride > 1 or self.digests.coarsest(first, last) <= max(1, (last - first + 1) // most):
            return None
        kept = self.planes.complete()
        there = kept[(kept >= first) & (kept <= min(last, self.frontier))]
        if not len(there) or len(there) * self.planes.columns > UNFOLDED_CELLS or kept[0] > first:
            return None
        log = DigestLog(len(there))
        self._put_steps(log, there)
        return log

    def _as_columns(self, found: Bins) -> dict[str, Any]:
        metrics = {"wall": 0, "work": 1, **{name: 2 + self.planes.phases.index(name) for name in self.used_phases()}}
        shown = self.registry.of["shown"][self.ring_of].tolist()
        values = np.round(found.values[:, :, list(metrics.values())]).astype(np.int64).tolist()
        worst = [
            [
                {"rank": shown[column], "step": step, **dict(zip(metrics, own, strict=True))}
                for column, step, own in zip(*of_bin, strict=True)
                if column != NONE
            ]
            for of_bin in zip(found.worst.tolist(), found.worst_step.tolist(), values, strict=True)
        ]
        return {
            "first": found.first.tolist(),
            "last": found.last.tolist(),
            "steps": found.steps.tolist(),
            "ranks": found.ranks.tolist(),
            "quantiles": list(QUANTILES),
            "ns": {
                name: np.round(found.quantiles[:, metric]).astype(np.int64).tolist() for name, metric in metrics.items()
            },
            "mean_ns": {
                name: np.round(found.mean[:, metric]).astype(np.int64).tolist() for name, metric in metrics.items()
            },
            "device_mean_ns": self._device_columns(found),
            "worst": worst,
            "start_wall_ns": found.start_wall_ns.tolist(),
            "memory_bytes": {
                name: [None if level != level else round(level) for level in found.memory[:, at].tolist()]
                for at, name in enumerate(MEMORY)
            },
        }

    def _device_columns(self, found: Bins) -> dict[str, list[int | None]]:
        """By phase with any time on a device; None for a bin of which no step was timed."""
        if not found.device.size:
            return {}
        timed = (found.device[:, 0] > 0).tolist()
        means = np.round(found.device).astype(np.int64)
        return {
            name: [level if known else None for level, known in zip(means[:, place].tolist(), timed, strict=True)]
            for place, name in enumerate(self.planes.phases, 1)
            if f"device:{name}" in self.planes.held
        }

    def findings(self) -> dict[str, Any]:
        return {**self._judged(), "findings": [finding.to_dict() for finding in self.judged.findings]}

    def events(self, after: int = 0, *, limit: int = 1000) -> list[dict[str, Any]]:
        """Those after number ``after``, the oldest first; each has its ``number`` and ``node``."""
        return self.said.events(after, min(limit, MOST_ROWS))

    def samples(
        self,
        *,
        kinds: Collection[str] | None = None,
        nodes: Collection[str] | None = None,
        since_wall_ns: int = 0,
        limit: int = 1000,
    ) -> list[dict[str, Any]]:
        found = self.said.parsed("samples.jsonl", nodes=nodes, since_wall_ns=since_wall_ns, limit=min(limit, MOST_ROWS))
        return [line for line in found if kinds is None or line.get("kind") in kinds]

    def stacks(self, *, nodes: Collection[str] | None = None, limit: int = 1000) -> list[dict[str, Any]]:
        return self.said.parsed("stacks.jsonl", nodes=nodes, limit=min(limit, MOST_ROWS))

    # -- parts ----------------------------------------------------------------------------------------------------

    def used_phases(self) -> list[str]:
        """Those with any time in them."""
        return [name for name in self.planes.phases if f"phase:{name}" in self.planes.held]

    def means(self, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """By name, [column]: the mean over the window; 0 for a rank without a step in it."""
        n, planes = self.planes.columns, self.planes
        count = np.maximum(planes.have[:, :n].sum(axis=0), 1).astype(np.float32)

        def mean(name: str) -> NDArray[np.float32]:
            plane = planes.held.get(name)
            if plane is None:
                return np.zeros(n, np.float32)
            return np.asarray(plane[:, :n].sum(axis=0) / count, np.float32)

        found = {}
        for name in names:
            if name == "work":
                found[name] = mean("wall_ns") - mean("phase:comm")
            else:
                found[name] = mean("wall_ns" if name == "wall" else f"phase:{name}")
        return found

    def _still_ranks(self) -> int:
        """How many live, and stand still all the same: who holds the job up, and who waits for them."""
        if not self.judged.standing:
            return 0
        shown = self.registry.of["shown"][self.ring_of]
        standing = self.ring_of[np.isin(shown, list(self.judged.standing))].tolist()
        return sum(self.registry.state(ring) in ALIVE for ring in standing)

    def _judged(self) -> dict[str, Any]:
        judged = self.judged
        return {
            "step": None if judged.step == NONE else judged.step,
            "ranks": judged.ranks,
            "of_ranks": judged.of_ranks,
            "looks": judged.looks,
            "took_s": round(judged.took_s, 4),
            "period_s": round(judged.period_s, 2),
            "failed": judged.failed,
        }

    def ended(self) -> bool:
        """Whether every rank of the last attempt is known to be gone."""
        states = self.registry.of["state"][self.ring_of]
        return bool(len(states)) and bool((states >= ENDED).all())
