"""Diagnose a run: what stopped it, what the chain of rules finds, or that nothing is wrong.

The rules, their order and who wins are in ``rulebook.py``.  Five steps follow the chain: findings that a crowded
machine explains become information (``crowding.py``), they get the reason why processes did not run
(``off_cpu.py``), they are put in order, a run without any is reported as healthy
or too short (``healthy.py``), and captures say what operator, kernel or line is behind a finding (``captures.py``).
Steps and epochs as the framework counts them are added to the evidence.
``hysteresis.py`` adds a sixth while a job runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stepscope.diagnosis.captures import join_captures
from stepscope.diagnosis.crowding import lower_crowded
from stepscope.diagnosis.engine.view import view_of
from stepscope.diagnosis.engine.window import Window, build_window, last_attempt
from stepscope.diagnosis.healthy import find_insufficient, led_by_health
from stepscope.diagnosis.off_cpu import join_off_cpu
from stepscope.diagnosis.rulebook import CHAIN, RecordedJob, available
from stepscope.diagnosis.rules.crashes import find_crashes, ran_out_of_memory
from stepscope.diagnosis.rules.hangs import find_disagreement, find_hangs, led_by_hangs, with_stalls
from stepscope.diagnosis.rules.memory import without_forecast
from stepscope.judge.chain import Chain
from stepscope.judge.finding_cost import finding_order
from stepscope.records.finding import Finding, worded_for
from stepscope.records.identity import epochs_of, logged_steps
from stepscope.records.series import RunData

__all__ = ["diagnose"]


def diagnose(
    run: RunData,
    window: Window | None = None,
    *,
    reached: bool = False,
    alive: bool = False,
    chain: Chain[RecordedJob] = CHAIN,
) -> list[Finding]:
    """Return all findings, what stopped the job first, then by ``finding_order``; never empty, never an exception.

    ``window``: the steps to judge, all of them by default; ``reached``: whether the recorder is known to have got into
    any process, recorded or not; ``alive``: whether the job is still running.
    """
    window = build_window(run) if window is None else window
    view = view_of(window)
    stopped, survived = _stopped(run, alive=alive)
    claims = chain.run(RecordedJob(run=run, view=view), available(view))
    saturated = any(
        claim.finding.kind == "cpu_saturated" and claim.finding.severity != "info" for claim in claims.of("machine")
    )
    slow = [claim.finding for claim in join_off_cpu(view, lower_crowded(view, claims.all, cpu_saturated=saturated))]
    slow = with_stalls(run, slow)
    if any(map(ran_out_of_memory, stopped)):
        slow = [without_forecast(finding) for finding in slow]
    slow.sort(key=finding_order, reverse=True)
    # A crash is reported whatever it costs, and after one there is no point in asking for more steps.
    insufficient = [] if stopped else find_insufficient(run, window, view, reached=reached, alive=alive)
    findings = led_by_health(view, [*stopped, *slow, *insufficient, *survived])
    findings = join_captures(findings, run, view)
    findings = _as_the_framework_counts(run, findings)
    return [worded_for(finding, len(window.ranks)) for finding in findings]


def _stopped(run: RunData, *, alive: bool) -> tuple[list[Finding], list[Finding]]:
    """What stopped the job, and crashes that it survived."""
    hangs = find_hangs(run)
    if all(hang.kind == "rank_crashed" for hang in hangs):  # the first to die may only have waited too long
        hangs = find_disagreement(run) or hangs
    crashes = find_crashes(run, alive=alive)
    survived = [crash for crash in crashes if crash.severity == "info"]
    return led_by_hangs(hangs, [crash for crash in crashes if crash not in survived]), survived


def _as_the_framework_counts(run: RunData, findings: list[Finding]) -> list[Finding]:
    """Add the numbers of a finding's steps in the framework's logs, if they differ, and their epochs."""
    facts = next((series.facts for series in last_attempt(run.ranks) if "progress" in series.facts), None)
    return findings if facts is None else [_counted(finding, facts) for finding in findings]


def _counted(finding: Finding, facts: Mapping[str, Any]) -> Finding:
    if finding.steps is None or finding.kind == "healthy":
        return finding
    logged, epochs = logged_steps(facts, *finding.steps), epochs_of(facts, *finding.steps)
    found = {
        **({"logged_steps": list(logged)} if logged is not None and logged != finding.steps else {}),
        **({"epochs": list(epochs)} if epochs is not None else {}),
    }
    return replace(finding, evidence={**finding.evidence, **found}) if found else finding
