"""The judge of an active run: what its hub does every few seconds whether or not anyone looks.

    judge = RunJudge(run_dir, live)
    await keep_up(live, poll=…, loop=judge.loop, each_tick=judge.tick)      # alongside: judge.keep_alerting()
    await judge.conclude({"status": "finished"})

The rules (``live/rules.py``) find, the history of findings keeps track (``live/finding_history.py``), and the engine of
alerts (``alerts/engine.py``) makes incidents of that and of what it observes itself.  ``judged.json`` has what
``/metrics`` of other hubs shows of the run.  Loads no server.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepscope.alerts.engine import AlertEngine, IncidentFiles, RunName
from stepscope.alerts.observation import RunEnd
from stepscope.alerts.requests import RequestDesk
from stepscope.alerts.settings import settings_from
from stepscope.errors import NotARun, RunUnwritable, UsageError
from stepscope.hub.captures import CaptureDesk, CapturePolicy, SessionOrders
from stepscope.hub.ingest.tail import Tail, is_long
from stepscope.hub.launcher import UNSAID
from stepscope.hub.live.capture_job import LiveJob
from stepscope.hub.live.digests import DigestLog
from stepscope.hub.live.figures import LAST_STEPS, RunFigures, figures_of, rates_of, write_judged
from stepscope.hub.live.finding_history import FindingHistory
from stepscope.hub.live.lines import LayerLines, Lines
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.observe import Observer
from stepscope.hub.live.rules import UNATTENDED, RuleLoop, catch_up
from stepscope.hub.live.step_arrays import Planes
from stepscope.page.links import page_link
from stepscope.records import run_clock
from stepscope.records.finding_history import ENDED
from stepscope.records.paths import ENV_CAPTURE, TEARDOWN_CUPTI
from stepscope.records.text import say
from stepscope.store.captures import CAPTURES_JUDGED, CaptureSettings, capture_settings, read_captures
from stepscope.store.documents import read_meta
from stepscope.store.paths import JUDGED

__all__ = ["Poll", "RunJudge", "small_model"]

Poll = Callable[[], object]


LINES_BYTES = 6 << 20
SAMPLES_KEPT = 4000
"""Of one node: minutes of every source, and older ones further apart."""
LAYERS_BYTES = 2 << 20
DIGESTS = 2 * LAST_STEPS
"""Only ``judged.json`` reads them: the last steps."""
PLANES_BYTES = 12 << 20
LAST_EVALUATION_S = 2.0
"""The longest that the last evaluation of the rules may take."""


def small_model(run_dir: Path) -> tuple[LiveRun, Poll]:
    """Return a model of a run on one node with only what the rules need, and its poll."""
    live = LiveRun(
        name=run_dir.name,
        run_dir=run_dir,
        meta=read_meta(run_dir),
        planes=Planes(budget_bytes=PLANES_BYTES, room=1),
        digests=DigestLog(DIGESTS, forgets=True),
        received=Lines(most_bytes=LINES_BYTES, most_of_node=SAMPLES_KEPT, layers=LayerLines(LAYERS_BYTES)),
    )
    live.partial = is_long(run_dir)
    poll = Tail(run_dir, live, recent=True).poll
    catch_up(live, poll)
    return live, poll


WRITE_S = 10.0
"""The shortest time between two versions of ``judged.json``."""
OBSERVE_S = 2.0
"""The longest time between two observations for alerts."""
OBSERVE_TICK_S = 0.5
AGAIN_S = 60.0
"""The delay after alerts failed."""
CAPTURE_S = 0.5
"""The shortest time between two looks at captures."""
LAST_CAPTURE_S = 8.0
"""How long the analysis of a capture may take when the run is over."""
LAST_ALERTS_S = 4.0
"""How long to try to write the last alerts: a full disk may have room again once the job is gone."""


class RunJudge:
    def __init__(
        self,
        run_dir: Path,
        live: LiveRun,
        *,
        url: str = "",
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``url``: where the run's page is; ``environ``: has the settings of alerts."""
        self._run_dir = run_dir
        self.live = live
        self._clock = clock
        self._history = FindingHistory(run_dir)
        self.loop = RuleLoop(live, history=self._history, unattended=UNATTENDED, threaded=False)
        settings = settings_from(environ)
        name, spool = str(live.meta.get("name") or run_dir.name), str(live.meta.get("spool", ""))
        base = settings.link or url
        self._engine = AlertEngine(
            IncidentFiles(run_dir),
            settings,
            run=RunName(id=f"{name}~{spool[:12]}", name=name),
            link=lambda number: page_link(base, run_dir.name, incident=number) if base else "",
            desk=RequestDesk(run_dir, environ),
        )
        self._receivers = bool(settings.receivers)
        self._observer = Observer(live, measures={rule.measure for rule in settings.rules if rule.measure})
        self._observed = (float("-inf"), 0)
        self._written_s = self._captured_s = float("-inf")
        session = live.meta.get("session")
        chosen = _capture_settings(environ)
        self._job = LiveJob(live)
        self.captures = CaptureDesk(
            run_dir,
            self._job,
            orders=SessionOrders(Path(session) if isinstance(session, str) and session else None),
            policy=CapturePolicy(chosen.most_per_hour, on_gpus=chosen.on_gpus),
            most_bytes=chosen.most_bytes,
            clock=clock,
        )

    def serve(self, live: LiveRun) -> None:
        """Continue on the model that clients read; from now on rules are evaluated in a thread."""
        self.loop.threaded = True
        self.follow(live)

    def follow(self, live: LiveRun) -> None:
        """Continue on another model of the same run."""
        self.live = live
        self.loop.move_to(live)
        self._observer.move_to(live)
        self._job.move_to(live)

    def tick(self) -> None:
        """Call this every second or two."""
        self._history.flush()
        if self._clock() - self._captured_s >= CAPTURE_S:
            self._captured_s = self._clock()
            with suppress(OSError):  # the disk refused: it is tried again at the next call
                self.captures.tick(self._history.open)
            self.loop.eager, self.loop.captured = self.captures.busy, self.captures.finished
        if self._clock() - self._written_s >= WRITE_S:
            self._written_s = self._clock()
            with suppress(OSError):  # a full disk: the file is too old then, which its readers see
                write_judged(self._run_dir, self._figures())

    def _figures(self) -> RunFigures:
        judged = self.live.judged
        return figures_of(
            self.live,
            status="running",
            wall_ns=run_clock.wall_ns(),
            findings=[finding.to_dict() for finding in judged.findings],
            throughput=rates_of(self.live, judged.throughput),
            incidents=self._engine.incidents,
            captures=read_captures(self._run_dir, most=CAPTURES_JUDGED),
        )

    async def keep_alerting(self) -> None:
        """Observe the run for alerts until canceled.  A failure there is a bug that must not stop the rules."""
        while True:
            alerting = asyncio.create_task(self._alert())
            try:
                await asyncio.wait((alerting,))
            finally:
                alerting.cancel()
            say(f"internal error in alerts, which pause for a minute: {alerting.exception()!r}")
            await asyncio.sleep(AGAIN_S)

    async def _alert(self) -> None:
        while True:
            observed_s, evaluations = self._observed
            if self.live.judged.evaluations != evaluations or self._clock() - observed_s >= OBSERVE_S:
                self._observe()
            await asyncio.sleep(OBSERVE_TICK_S)

    def _observe(self) -> None:
        self._observed = (self._clock(), self.live.judged.evaluations)
        with suppress(OSError):  # the disk refused: the engine tries again at the next call
            self._engine.observe(self._observer.observe(self._history.open))

    async def conclude(self, end: Mapping[str, Any], *, poll: Poll | None = None) -> None:
        """The run is over: judge the last steps, and end what is open.  ``end``: as the launcher reported it.

        RunUnwritable if the disk refuses alerts that receivers wait for; everything else is done then.
        """
        if poll is not None:
            catch_up(self.live, poll)
        with suppress(NotARun):
            self.live.meta = read_meta(self._run_dir)  # says now that the run has ended
        await self._evaluate_last()
        self._observe()
        await self._conclude_captures()
        if self.loop.captured != self.captures.finished:
            self.loop.captured = self.captures.finished
            await self._evaluate_last()
            self._observe()
        exit_code, step = end.get("exit_code"), self.live.frontier
        refused = await self._conclude_alerts(
            RunEnd(
                wall_ns=run_clock.wall_ns(),
                status=str(end.get("status") or UNSAID),
                exit_code=exit_code if isinstance(exit_code, int) else None,
                step=step if step >= 0 else None,
            )
        )
        self._history.conclude(step=step, why=ENDED)
        with suppress(OSError):
            (self._run_dir / JUDGED).unlink(missing_ok=True)
        if refused is not None:
            why = refused.strerror or str(refused)
            raise RunUnwritable(f"cannot write the alerts about the end of {self._run_dir.name}: {why}")

    async def _conclude_alerts(self, end: RunEnd) -> OSError | None:
        """Return why the last alerts could not be written; without receivers nobody waits for them."""
        until_s = self._clock() + LAST_ALERTS_S
        while True:
            try:
                self._engine.conclude(end)
            except OSError as error:
                if not self._receivers:
                    return None
                if self._clock() >= until_s:
                    return error
                await asyncio.sleep(OBSERVE_TICK_S)
            else:
                return None

    async def _evaluate_last(self) -> None:
        judging = asyncio.create_task(self.loop.evaluate())
        await asyncio.wait((judging,), timeout=LAST_EVALUATION_S)
        judging.cancel()

    async def _conclude_captures(self) -> None:
        """Have the traces that were delivered analyzed, within a few seconds."""
        until_s = self._clock() + LAST_CAPTURE_S
        with suppress(OSError):
            self.captures.conclude()
            while self.captures.analyzing and self._clock() < until_s:
                self.captures.tick()
                await asyncio.sleep(OBSERVE_TICK_S / 5)
        self.captures.abandon()


def _capture_settings(environ: Mapping[str, str]) -> CaptureSettings:
    unloads_cupti = environ.get(TEARDOWN_CUPTI) == "1"
    try:
        return capture_settings(environ.get(ENV_CAPTURE, ""), unloads_cupti=unloads_cupti)
    except UsageError as error:
        say(f"{ENV_CAPTURE}: {error}; the default applies")
        return capture_settings("", unloads_cupti=unloads_cupti)
