"""A load generator: many agents of a hub, over real HTTP, in one process and one thread.

    report = asyncio.run(run_load(LoadPlan(host="127.0.0.1", port=29555, run="load", key=key, job=LoadJob(agents=100))))

Each agent joins, keeps a connection, and sends a frame with the steps that its ranks have made since the last one,
whenever the hub's last answer told it to.  Simulated time runs at ``speed`` times real time; the hub's pacing counts in
simulated seconds, so that frames hold as many steps as they would in a real job, however slow the machine is.

Faults: an agent may lose its connection before the answer comes (it then joins again and goes on from where the hub
says it is) and may send a frame twice.  What the ranks recorded is a pure function of rank and step, so whatever is
sent again is the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import json
import random
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from fakes.load_agent import LoadAgent, Reply
from fakes.load_rows import LoadJob, LoadRanks

__all__ = ["LoadJob", "LoadPlan", "LoadReport", "run_load"]

IDLE_S = 0.02
JOINS_AT_ONCE = 64
RETRIES = 20


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    host: str
    port: int
    run: str
    key: bytes
    job: LoadJob
    seconds: float = 60.0
    """Of simulated time."""
    speed: float = 1.0
    """Simulated seconds in a real one."""
    drop: float = 0.0
    """How often a connection is lost before the answer."""
    duplicate: float = 0.0
    """How often a frame is sent twice."""
    bye: bool = False
    """Whether agents say how it ended, with their last steps."""
    first_node: int = 0
    nnodes: int = 0
    """0: as many as there are agents."""
    sources: tuple[str, ...] = ()
    """Addresses that the agents come from, in turn; a hub lets only so many in from each."""
    tls: ssl.SSLContext | None = None
    certificate: bytes = b""
    """Its fingerprint, where there is TLS."""


@dataclass(kw_only=True)
class LoadReport:
    frames: int = 0
    rows: int = 0
    sent_bytes: int = 0
    joins: int = 0
    dropped: int = 0
    duplicates: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    simulated_s: float = 0.0
    real_s: float = 0.0
    late_s: float = 0.0
    """By how much a frame was sent later than it was due, at most, in simulated seconds."""
    failed: list[str] = field(default_factory=list)
    steps: int = 0
    """That every rank's agent has an answer for."""


async def run_load(plan: LoadPlan, progress: Callable[[float, LoadReport], None] | None = None) -> LoadReport:
    """Until every agent has sent what its ranks recorded in ``seconds``."""
    return await _Load(plan, progress).run()


class _Load:
    def __init__(self, plan: LoadPlan, progress: Callable[[float, LoadReport], None] | None) -> None:
        self._plan, self._progress = plan, progress
        self._report = LoadReport()
        pool = plan.job.pool_ns()
        nnodes = plan.nnodes or plan.first_node + plan.job.agents
        self._agents = [
            LoadAgent(
                ranks=LoadRanks(plan.job, node, pool),
                run=plan.run,
                node=plan.first_node + node,
                nnodes=nnodes,
                spool=hashlib.sha256(f"{plan.job.seed} {node}".encode()).hexdigest()[:32],
                key=plan.key,
                certificate=plan.certificate,
            )
            for node in range(plan.job.agents)
        ]
        self._chance = random.Random(plan.job.seed)
        self._due: list[tuple[float, int]] = []
        self._unfinished = len(self._agents)
        self._woken = asyncio.Event()

    async def run(self) -> LoadReport:
        began = time.monotonic()
        try:
            room = asyncio.Semaphore(JOINS_AT_ONCE)
            await asyncio.gather(*(self._join(agent, room) for agent in self._agents))
            self._began = time.monotonic()
            # Spread over a round from the start, as agents that begin at different times are.
            round_s = max(agent.next_s for agent in self._agents)
            self._due = [(round_s * (number + 1) / len(self._agents), number) for number in range(len(self._agents))]
            await self._send_all()
        finally:
            for agent in self._agents:
                agent.close()
        report = self._report
        report.simulated_s, report.real_s = self._now_s(), time.monotonic() - began
        report.steps = min(agent.step for agent in self._agents)
        return report

    def _now_s(self) -> float:
        """Simulated, since all have joined."""
        return (time.monotonic() - self._began) * self._plan.speed

    async def _join(self, agent: LoadAgent, room: asyncio.Semaphore) -> None:
        plan = self._plan
        async with room:
            for attempt in range(RETRIES):
                try:
                    source = plan.sources[agent.node % len(plan.sources)] if plan.sources else ""
                    await agent.connect(plan.host, plan.port, source=source, tls=plan.tls)
                    refused = await agent.join()
                except OSError as error:
                    refused = str(error)
                if not refused:
                    self._report.joins += 1
                    return
                await asyncio.sleep(0.1 * (attempt + 1))
        self._report.failed.append(f"node {agent.node}: {refused}")
        self._finish(agent)

    async def _send_all(self) -> None:
        shown_s = 0.0
        while self._unfinished:
            now_s = self._now_s()
            if self._progress is not None and now_s >= shown_s:
                self._progress(now_s, self._report)
                shown_s = now_s + 0.5
            sent = 0
            while self._due and self._due[0][0] <= now_s:
                due_s, number = heapq.heappop(self._due)
                self._report.late_s = max(self._report.late_s, now_s - due_s)
                self._send(number)
                sent += 1
                if sent % 8 == 0:
                    await asyncio.sleep(0)  # let answers in
                    now_s = self._now_s()
            wait_s = (self._due[0][0] - now_s) / self._plan.speed if self._due else IDLE_S
            await asyncio.sleep(max(0.0, min(IDLE_S, wait_s)))

    def _send(self, number: int) -> None:
        agent, plan = self._agents[number], self._plan
        if agent.finished:
            return
        made = int(min(self._now_s(), plan.seconds) * plan.job.steps_per_s)
        last = made >= int(plan.seconds * plan.job.steps_per_s)
        frame, rows = agent.frame(made, bye=last and plan.bye)
        chance = self._chance.random()
        self._report.sent_bytes += len(frame)

        def answered(reply: Reply) -> None:
            self._answered(number, reply, made=made, rows=rows, last=last)

        if chance < plan.drop:
            self._report.dropped += 1
            agent.send(frame, lambda _: None)
            agent.close()
            self._again(agent, number)
        elif chance < plan.drop + plan.duplicate:
            self._report.duplicates += 1
            agent.send(frame, lambda _: agent.send(frame, answered))
        else:
            agent.send(frame, answered)

    def _answered(self, number: int, reply: Reply, *, made: int, rows: int, last: bool) -> None:
        agent, report = self._agents[number], self._report
        report.statuses[reply.status] += 1
        wait_s = agent.next_s
        if reply.status == 200:
            said = json.loads(reply.body)
            agent.took(made)
            agent.next_s = wait_s = float(said["next_s"])
            report.frames += 1
            report.rows += rows
            if last:
                self._finish(agent)
                return
        elif reply.status == 409:
            agent.go_back(json.loads(reply.body)["positions"])
            wait_s = 0.0
        elif reply.status in (429, 507):
            wait_s = float(json.loads(reply.body)["retry_s"])
        else:  # the connection is gone, or the hub does not know us any more
            self._again(agent, number)
            return
        heapq.heappush(self._due, (self._now_s() + wait_s, number))

    def _again(self, agent: LoadAgent, number: int) -> None:
        async def rejoin() -> None:
            agent.close()
            await self._join(agent, asyncio.Semaphore(1))
            if not agent.finished:
                heapq.heappush(self._due, (self._now_s(), number))

        agent.task = asyncio.get_running_loop().create_task(rejoin())

    def _finish(self, agent: LoadAgent) -> None:
        if not agent.finished:
            agent.finished = True
            agent.close()
            self._unfinished -= 1
