"""When a rule holds: pure functions of the rule, what is observed, and a small state of the rule's own.

    judged = judge_rule(rule, observation, state)
    judged.signals      what to report now
    judged.state        to be passed on to the next evaluation
    judged.known        False: the run does not show it yet; then nothing is over either

A rule on findings holds for every open episode of its kinds, severity and cost, after it has done so for the rule's
time.  A rule on a measure has one function below, by its name in ``MEASURES`` of ``alerts/settings.py``.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, get_args

from stepscope.alerts import thresholds
from stepscope.alerts.model import Signal, Topic
from stepscope.alerts.observation import MemoryAtEpoch, NodeSilence, Observation, RunEnd
from stepscope.alerts.settings import Rule
from stepscope.flight.stacks import lost_peer
from stepscope.records.finding import SEVERITIES, Severity
from stepscope.records.finding_history import FindingEpisode
from stepscope.records.hang import HangKind
from stepscope.records.text import bytes_text, count_text, duration_text, named_ranks, ns_text, number_text, share_text

__all__ = [
    "STRETCHES",
    "Judged",
    "RuleState",
    "code_line",
    "end_signals",
    "judge_rule",
    "leads_by",
    "line_in",
    "recovered_ns",
    "topic_of",
]

STOPS = frozenset(get_args(HangKind))
"""Kinds that mean that the job no longer makes steps."""
SPEED_IN_GENERAL = frozenset({"change_point", "drift", "throughput_drop", "wait_heavy", "low_gpu_utilization"})
"""Kinds that say that steps are longer, but not why."""
STRETCHES = frozenset(
    {"input_straggler", "compute_straggler", "h2d_straggler", "comm_straggler", "straggler", "node_straggler"}
)
"""Kinds about ranks that are slow in a stretch of steps: the finding's steps end where the ranks recovered."""
TOPICS: dict[str, Topic] = {
    **dict.fromkeys(STOPS | {"no_step", "run_failed", "node_lost"}, "stopped"),
    **dict.fromkeys(
        (
            *("loss_nan", "nan_gradients", "loss_spike", "exploding_gradients", "vanishing_gradients", "dead_layer"),
            *("no_gradient_exchange", "uneven_batches", "unused_parameters", "replica_desync", "not_finite"),
        ),
        "numbers",
    ),
    **dict.fromkeys(
        ("memory_creep", "memory_pressure", "memory_imbalance", "fragmentation", "ram_pressure", "memory_growth"),
        "memory",
    ),
    "checkpoint_age": "checkpoint",
    "run_finished": "run",
}
"""By kind of finding or measure; all others are about speed."""
_CODE_LINE = re.compile(r"[\w@.+-]+(?:/[\w@.+-]+)*\.py:\d+")


def topic_of(kind: str) -> Topic:
    return TOPICS.get(kind, "speed")


@dataclass(frozen=True, kw_only=True)
class RuleState:
    since_ns: Mapping[str, int] = field(default_factory=dict)
    """Since when it holds, by what it holds for (the number of a finding, a measure)."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Of a measure that holds: what it is compared with."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    signals: tuple[Signal, ...] = ()
    state: RuleState = field(default_factory=RuleState)
    known: bool = True


def judge_rule(rule: Rule, seen: Observation, state: RuleState) -> Judged:
    if rule.on == "findings":
        return _judge_findings(rule, seen, state)
    judge = _MEASURES.get(rule.measure)
    return Judged() if judge is None else _after_its_time(rule, seen, state, judge(rule, seen, state))


def leads_by(signal: Signal) -> tuple[int, int, int, float]:
    """Sort signals of one topic by this; the largest names the incident.

    A finding explains more than a measure, and one that names a cause more than one that says that steps are longer.
    """
    general = signal.kind in SPEED_IN_GENERAL or signal.kind in ("hang_unknown", "run_failed")
    return (
        signal.finding is not None,
        SEVERITIES.index(signal.severity),
        not general,
        float(signal.cost.get("share") or 0.0),
    )


# -- findings ---------------------------------------------------------------------------------------------------------


def _judge_findings(rule: Rule, seen: Observation, state: RuleState) -> Judged:
    since: dict[str, int] = {}
    signals = []
    for episode in seen.findings:
        if _concerns(rule, episode.finding) and not _is_past(episode.finding, seen):
            key = str(episode.number)
            since[key] = state.since_ns.get(key, seen.wall_ns)
            if seen.wall_ns - since[key] >= rule.for_seconds * 1e9:
                signals.append(_of_finding(rule, seen, episode))
    for silent in seen.nodes_silent if not rule.kinds or "rank_lost" in rule.kinds else ():
        stopped_ns = silent.since_wall_ns if seen.last_step_wall_ns is None else seen.last_step_wall_ns
        if seen.wall_ns - max(stopped_ns, silent.since_wall_ns) < thresholds.NODE_STOPPED_S * 1e9:
            continue
        who = f"Host {silent.host}" if silent.host else "A node"
        whole_s = (seen.wall_ns - silent.since_wall_ns) / 1e9
        signals.append(
            Signal(
                rule=rule.name,
                kind="node_lost",
                topic="stopped",
                severity=rule.send_as or "critical",
                title=f"{who} has not reported for {duration_text(whole_s, whole=True)}, and the job makes no steps.",
                receivers=rule.receivers,
                ranks=silent.ranks,
                hosts=(silent.host,) if silent.host else (),
                since_step=seen.step,
                since_wall_ns=silent.since_wall_ns,
                cost=_stopped_cost(seen, silent.since_wall_ns),
                advice=("Check whether the host is up and reachable from the first node.",),
            )
        )
    return Judged(signals=tuple(signals), state=RuleState(since_ns=since))


def _concerns(rule: Rule, finding: Mapping[str, Any]) -> bool:
    kind, cost = str(finding.get("kind")), finding.get("cost") or {}
    if rule.kinds and kind not in rule.kinds and not (kind in rule.rank_kinds and _is_about_ranks(finding)):
        return False
    if SEVERITIES.index(_severity(finding)) < SEVERITIES.index(rule.severity):
        return False
    if float(cost.get("share") or 0.0) < rule.cost_share:
        return False
    return kind in STOPS or float(finding.get("confidence") or 0.0) >= thresholds.CONFIDENT


def _is_about_ranks(finding: Mapping[str, Any]) -> bool:
    """Whether some ranks do more than the others; evaluation and checkpoints on one rank are by design."""
    return bool(finding.get("ranks")) and finding.get("phase") not in ("eval", "checkpoint")


def _is_past(finding: Mapping[str, Any], seen: Observation) -> bool:
    """Whether it is over although the rules still show it: a finding about the last steps, but no reason to act now.

    Memory grew for a while and no longer does; a rank was slow in some of the last steps and has recovered.
    """
    if finding.get("kind") in STRETCHES:
        steps = finding.get("steps")
        if not steps or seen.judged_step is None:
            return False
        return seen.judged_step - int(steps[1]) >= thresholds.ENDED_STEPS
    evidence = finding.get("evidence") or {}
    first, last = (evidence.get(name) for name in ("first_step", "last_step"))
    if finding.get("kind") != "memory_creep" or type(first) is not int or type(last) is not int or seen.step is None:
        return False
    return seen.step - last > thresholds.PAST_SHARE * (last - first)


def recovered_ns(finding: Mapping[str, Any], seen: Observation) -> int:
    """When slow ranks recovered; 0 if they have not, or that is not known."""
    if finding.get("kind") not in STRETCHES or not _is_past(finding, seen):
        return 0
    return wall_of_step(seen, finding["steps"][1])


def _severity(finding: Mapping[str, Any]) -> Severity:
    severity = finding.get("severity")
    return severity if severity in SEVERITIES else "info"


def _of_finding(rule: Rule, seen: Observation, episode: FindingEpisode) -> Signal:
    finding = episode.finding
    if (lost := _lost_node(finding, seen)) is not None:
        return _of_lost_node(rule, seen, episode, lost)
    ranks = tuple(rank for rank in finding.get("ranks") or () if type(rank) is int)
    evidence = finding.get("evidence") or {}
    steps = finding.get("steps")
    since_step = int(steps[0]) if steps else episode.first_step
    hosts = tuple(dict.fromkeys(seen.hosts[rank] for rank in ranks if rank in seen.hosts)) or tuple(
        host for host in evidence.get("hosts") or () if isinstance(host, str)
    )
    cost = dict(finding.get("cost") or {})
    began_ns = _began_ns(evidence)
    if finding["kind"] in STOPS:
        cost = _stopped_cost(seen, began_ns or episode.first_wall_ns, cost)
    return Signal(
        rule=rule.name,
        kind=str(finding["kind"]),
        topic=topic_of(str(finding["kind"])),
        severity=rule.send_as or _severity(finding),
        title=str(finding.get("title") or ""),
        receivers=rule.receivers,
        ranks=ranks,
        phase=finding.get("phase"),
        hosts=hosts,
        line=code_line(finding)
        or seen.lines_by_finding.get(episode.number, "")
        or seen.lines_by_phase.get(str(finding.get("phase")), ""),
        since_step=since_step,
        since_wall_ns=began_ns or wall_of_step(seen, since_step) or episode.first_wall_ns,
        cost=cost,
        advice=tuple(str(text) for text in finding.get("advice") or ()),
        finding=episode.number,
    )


def _lost_node(finding: Mapping[str, Any], seen: Observation) -> NodeSilence | None:
    """The node that is to blame for a death: a rank elsewhere lost its connection, and that node no longer reports."""
    evidence = finding.get("evidence") or {}
    if finding.get("kind") != "rank_crashed" or not seen.nodes_quiet:
        return None
    if not lost_peer(str(evidence.get("exception") or ""), str(evidence.get("message") or "")):
        return None
    return next((node for node in seen.nodes_quiet if not set(node.ranks) & set(finding.get("ranks") or ())), None)


def _of_lost_node(rule: Rule, seen: Observation, episode: FindingEpisode, lost: NodeSilence) -> Signal:
    finding = episode.finding
    who = f"Host {lost.host}" if lost.host else "A node"
    crashed = named_ranks(tuple(finding.get("ranks") or ())) if finding.get("ranks") else "The others"
    return Signal(
        rule=rule.name,
        kind="node_lost",
        topic="stopped",
        severity=rule.send_as or _severity(finding),
        title=f"{who} with {named_ranks(lost.ranks).lower()} no longer reports; {crashed.lower()} lost the connection "
        f"to it and raised {(finding.get('evidence') or {}).get('exception')}.",
        receivers=rule.receivers,
        ranks=lost.ranks,
        hosts=(lost.host,) if lost.host else (),
        since_step=seen.step,
        since_wall_ns=lost.since_wall_ns,
        cost=dict(finding.get("cost") or {}),
        advice=("Check whether the host is up, then restart the job, without that host if it is down.",),
        finding=episode.number,
    )


def _began_ns(evidence: Mapping[str, Any]) -> int:
    """When a hang or a death began, if the finding says so."""
    return next((value for name in ("stopped_wall_ns", "wall_ns") if type(value := evidence.get(name)) is int), 0)


def _stopped_cost(seen: Observation, since_ns: int, cost: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The time without progress so far; what was lost of the training counts if it is more."""
    seconds = max((seen.wall_ns - since_ns) / 1e9, 0.0) if since_ns else 0.0
    known = dict(cost or {})
    if seconds <= float(known.get("seconds") or 0.0):
        return known
    ranks = max(seen.world_size, seen.ranks, 1)
    return {**known, "share": 0.0, "seconds": round(seconds, 1), "rank_hours": round(seconds * ranks / 3600, 4)}


def code_line(finding: Mapping[str, Any]) -> str:
    """``train.py:41``: the line of code that a finding names; empty if it names none."""
    evidence = finding.get("evidence") or {}
    for culprit in evidence.get("culprits") or ():
        if isinstance(culprit, Mapping) and culprit.get("file") and culprit.get("line"):
            return f"{str(culprit['file']).rpartition('/')[2]}:{culprit['line']}"
    growing = evidence.get("growing")
    holder = growing.get("holder") if isinstance(growing, Mapping) else None
    texts = (evidence.get("place"), evidence.get("at"), holder, finding.get("title"))
    return next((line for text in texts if isinstance(text, str) and (line := line_in(text))), "")


def line_in(text: str) -> str:
    """``train.py:41`` of a text that names a line of code; empty if it names none."""
    match = _CODE_LINE.search(text)
    return "" if match is None else match[0]


# -- measures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What a measure shows; without ``title`` it does not hold."""

    title: str = ""
    known: bool = True
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    since_step: int | None = None
    since_wall_ns: int = 0
    cost: Mapping[str, Any] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    advice: tuple[str, ...] = ()


UNKNOWN = _Measured(known=False)
NOTHING = _Measured()


def _after_its_time(rule: Rule, seen: Observation, state: RuleState, found: _Measured) -> Judged:
    """The signal of a measure, after it has held for as long as the rule says."""
    if not found.title:
        return Judged(known=found.known, state=state if not found.known else RuleState())
    since_ns = state.since_ns.get(rule.measure, seen.wall_ns)
    following = RuleState(since_ns={rule.measure: since_ns}, evidence=found.evidence)
    if seen.wall_ns - since_ns < rule.for_seconds * 1e9:
        return Judged(state=following)
    return Judged(signals=(_of_measure(rule, seen, found, since_ns),), state=following)


def _of_measure(rule: Rule, seen: Observation, found: _Measured, since_ns: int) -> Signal:
    return Signal(
        rule=rule.name,
        kind=rule.measure,
        topic=topic_of(rule.measure),
        severity=rule.send_as or "warning",
        title=found.title,
        receivers=rule.receivers,
        ranks=found.ranks,
        hosts=found.hosts or tuple(dict.fromkeys(seen.hosts[rank] for rank in found.ranks if rank in seen.hosts)),
        since_step=found.since_step if found.since_step is not None else seen.step,
        since_wall_ns=found.since_wall_ns or since_ns,
        cost=dict(found.cost),
        advice=found.advice,
        evidence=dict(found.evidence),
    )


def _step_time(rule: Rule, seen: Observation, state: RuleState) -> _Measured:
    """Longer than before: the median of the last steps against median and spread of those before them.

    The level stays that of the time before while the rule holds: a job that became slow has not recovered because it
    has been slow for long.
    """
    count = int(rule.parameters.get("steps", 20))
    factor = float(rule.parameters.get("factor", 1.5))
    recent, before = seen.step_ns[-count:], seen.step_ns[-count - thresholds.LEVEL_STEPS : -count]
    if len(recent) < count:
        return UNKNOWN
    level_ns, spread_ns, since_step = (state.evidence.get(name) for name in ("level_ns", "spread_ns", "since_step"))
    now_ns = median(recent)
    holds = level_ns is not None and spread_ns is not None
    if level_ns is None or spread_ns is None:
        if len(before) < thresholds.LEVEL_STEPS_LEAST:
            return UNKNOWN
        level_ns = median(before)
        spread_ns = max(1.4826 * median([abs(each - level_ns) for each in before]), thresholds.SPREAD_FLOOR * level_ns)
        since_step = seen.steps[-count]
    needed_ns = max(factor * spread_ns, thresholds.DEVIATION_SHARE * level_ns)
    if now_ns - level_ns <= needed_ns * (thresholds.RELEASE_SHARE if holds else 1.0):
        return NOTHING
    since_step = int(since_step) if since_step is not None else seen.steps[-count]
    since_ns = wall_of_step(seen, since_step)
    share = 1 - level_ns / now_ns
    seconds = (seen.wall_ns - since_ns) / 1e9 * share if since_ns else 0.0
    spreads = (now_ns - level_ns) / spread_ns
    return _Measured(
        title=f"Steps take {ns_text(now_ns)} instead of {ns_text(level_ns)} since step {since_step:,}, "
        f"{number_text(round(spreads, 1))} times their usual spread longer.",
        since_step=since_step,
        since_wall_ns=since_ns,
        cost={
            "share": round(share, 4),
            "seconds": round(seconds, 3),
            "rank_hours": round(seconds * max(seen.ranks, 1) / 3600, 4),
            "if_fixed": {"step_ms": round(level_ns / 1e6, 3), "speedup": round(now_ns / level_ns, 3)},
        },
        evidence={"level_ns": level_ns, "spread_ns": spread_ns, "since_step": since_step, "now_ns": now_ns},
    )


def _memory_growth(rule: Rule, seen: Observation, state: RuleState) -> _Measured:
    """By the limit in most of the last epochs, and by at least half of it in each."""
    limit = float(rule.parameters.get("mb", 100)) * 1e6
    found: list[tuple[float, list[MemoryAtEpoch]]] = []
    known = False
    for starts in _by_rank(seen.memory):
        # The first epoch fills caches and pools.
        last = starts[1:][-thresholds.EPOCHS - 1 :]
        if len(last) <= thresholds.EPOCHS:
            continue
        known = True
        growth = [(after.bytes - before.bytes) / (after.epoch - before.epoch) for before, after in pairwise(last)]
        pace = median(growth)
        if pace >= limit and min(growth) >= thresholds.GROWS_EACH_SHARE * limit:
            found.append((pace, last))
    if not found:
        return NOTHING if known else UNKNOWN
    pace, most = max(found, key=lambda each: each[0])
    ranks = tuple(sorted(each[0].rank for _, each in found))
    since_step = state.evidence.get("since_step", most[0].step)
    return _Measured(
        title=f"The memory of {named_ranks(ranks).lower()} grows by {bytes_text(pace)} an epoch: "
        f"from {bytes_text(most[0].bytes)} at step {most[0].step:,} to {bytes_text(most[-1].bytes)} "
        f"at step {most[-1].step:,}.",
        ranks=ranks,
        since_step=int(since_step),
        since_wall_ns=int(state.evidence.get("since_wall_ns", most[0].wall_ns)),
        evidence={
            "bytes_per_epoch": round(pace),
            "since_step": int(since_step),
            "since_wall_ns": int(state.evidence.get("since_wall_ns", most[0].wall_ns)),
        },
        advice=(
            "Look for what is kept from epoch to epoch: losses or outputs with their graphs, caches in the dataset.",
        ),
    )


def _by_rank(memory: Iterable[MemoryAtEpoch]) -> list[list[MemoryAtEpoch]]:
    found: dict[int, list[MemoryAtEpoch]] = {}
    for each in memory:
        found.setdefault(each.rank, []).append(each)
    return list(found.values())


def _gpu_idle(rule: Rule, seen: Observation, state: RuleState) -> _Measured:
    limit_ns = float(rule.parameters.get("seconds", 300)) * 1e9
    if seen.step is None:
        return UNKNOWN  # before the first step a GPU has nothing to do
    fresh = [gpu for gpu in seen.gpus if seen.wall_ns - gpu.sample_wall_ns <= thresholds.STALE_SAMPLE_S * 1e9]
    idle = [gpu for gpu in fresh if gpu.sample_wall_ns - gpu.busy_wall_ns >= limit_ns]
    if not idle:
        return NOTHING if fresh or not seen.gpus else UNKNOWN
    since_ns = min(gpu.busy_wall_ns for gpu in idle)
    long = duration_text((seen.wall_ns - since_ns) / 1e9, whole=True)
    first = idle[0]
    who = f"GPU {first.index} of {first.host}" if len(idle) == 1 else count_text(len(idle), "GPU")
    has = "has" if len(idle) == 1 else "have"
    return _Measured(
        title=f"{who} {has} had no work for {long}.",
        ranks=tuple(sorted({rank for gpu in idle for rank in gpu.ranks})),
        hosts=tuple(dict.fromkeys(gpu.host for gpu in idle)),
        since_wall_ns=since_ns,
        cost={"share": 0.0, "seconds": round((seen.wall_ns - since_ns) / 1e9, 1)},
        advice=("See on the page what the ranks of these GPUs do: input, evaluation, a checkpoint, or a wait.",),
    )


def _no_step(rule: Rule, seen: Observation, state: RuleState) -> _Measured:
    """Unless the job compiles, evaluates, writes a checkpoint or starts; each excuse expires."""
    limit_s = max(float(rule.parameters.get("seconds", 600)), thresholds.USUAL_STEPS * _usual_step_s(seen))
    since_ns = seen.last_step_wall_ns if seen.last_step_wall_ns is not None else seen.doing_since_wall_ns
    if not since_ns:
        return UNKNOWN
    waited_s = (seen.wall_ns - since_ns) / 1e9
    if waited_s < limit_s + (thresholds.EXCUSED_S if seen.doing else 0.0):
        return NOTHING
    last = "there was none yet" if seen.step is None else f"the last was step {seen.step:,}"
    doing = f" The job {seen.doing}." if seen.doing else ""
    return _Measured(
        title=f"No step was completed for {duration_text(waited_s, whole=True)}; {last}.{doing}",
        since_step=seen.step,
        since_wall_ns=since_ns,
        cost=_stopped_cost(seen, since_ns),
        advice=("`stepscope report RUN` shows where each rank is.",),
    )


def _usual_step_s(seen: Observation) -> float:
    """The mean length of the last steps, with everything between them; 0 if there are too few."""
    if len(seen.step_walls) < 2:
        return 0.0
    (first, first_ns), (last, last_ns) = seen.step_walls[0], seen.step_walls[-1]
    return (last_ns - first_ns) / 1e9 / (last - first)


def _not_finite(rule: Rule, seen: Observation, state: RuleState) -> _Measured:
    steps = int(rule.parameters.get("steps", 3))
    over = max(thresholds.FINITE_AGAIN_STEPS, steps)
    bad = [each for each in seen.not_finite if each.steps >= steps and each.finite_steps < over]
    if not bad:
        return NOTHING
    first = min(bad, key=lambda each: each.first_step)
    whose = f" of {named_ranks(first.ranks).lower()}" if first.ranks and len(first.ranks) < seen.ranks else ""
    return _Measured(
        title=f"{first.name}{whose} is NaN or infinite since step {first.first_step:,}.",
        ranks=first.ranks if len(first.ranks) < seen.ranks else (),
        since_step=first.first_step,
        since_wall_ns=wall_of_step(seen, first.first_step),
        advice=("Stop the run and restart it from a checkpoint before that step.",),
    )


def _throughput_below(rule: Rule, seen: Observation, state: RuleState) -> _Measured:
    for name, unit, value in (
        ("samples_per_second", "samples/s", seen.samples_per_second),
        ("tokens_per_second", "tokens/s", seen.tokens_per_second),
    ):
        level = rule.parameters.get(name)
        if level is None:
            continue
        if value is None:
            return UNKNOWN
        if value < level:
            title = f"The throughput is {number_text(value)} {unit}, below {number_text(level)}."
            return _Measured(title=title, evidence={"value": value, "level": level})
    return NOTHING


def _mfu_below(rule: Rule, seen: Observation, state: RuleState) -> _Measured:
    level = float(rule.parameters.get("level", 0.0))
    if seen.mfu is None:
        return UNKNOWN
    if seen.mfu >= level:
        return NOTHING
    title = f"The model FLOPs utilization is {share_text(seen.mfu)}, below {share_text(level)}."
    return _Measured(title=title, evidence={"value": seen.mfu, "level": level})


def _checkpoint_age(rule: Rule, seen: Observation, state: RuleState) -> _Measured:
    """Since the last checkpoint or, if there was none, the first step."""
    limit_s = float(rule.parameters.get("minutes", 120)) * 60
    since_ns = seen.checkpoint_wall_ns or seen.first_step_wall_ns
    if since_ns is None:
        return UNKNOWN
    age_s = (seen.wall_ns - since_ns) / 1e9
    if age_s < limit_s:
        return NOTHING
    old = duration_text(age_s, whole=True)
    title = f"The last checkpoint is {old} old (step {seen.checkpoint_step:,})."
    if seen.checkpoint_wall_ns is None or seen.checkpoint_step is None:
        title = f"No checkpoint was seen in {old} of training."
    return _Measured(title=title, since_step=seen.checkpoint_step, since_wall_ns=since_ns)


_MEASURES: dict[str, Callable[[Rule, Observation, RuleState], _Measured]] = {
    "step_time": _step_time,
    "memory_growth": _memory_growth,
    "gpu_idle": _gpu_idle,
    "no_step": _no_step,
    "not_finite": _not_finite,
    "throughput_below": _throughput_below,
    "mfu_below": _mfu_below,
    "checkpoint_age": _checkpoint_age,
}


# -- end of the run ---------------------------------------------------------------------------------------------------

ENDINGS = {
    "finished": "The run finished",
    "failed": "The run failed",
    "crashed": "The run crashed",
    "unfinished": "The run ended without a result: its launcher died",
    "interrupted": "The run was interrupted",
}


def end_signals(rules: Iterable[Rule], seen: Observation, end: RunEnd) -> tuple[Signal, ...]:
    """The signals of rules on the end of a run."""
    wanted = {"finished": ("run_finished",), "interrupted": ()}.get(end.status, ("run_failed",))
    step = end.step if end.step is not None else seen.step
    code = f" with exit code {end.exit_code}" if end.exit_code else ""
    at = f" after step {step:,}" if step is not None else " before its first step"
    title = f"{ENDINGS.get(end.status, f'The run ended ({end.status})')}{code}{at}."
    return tuple(
        Signal(
            rule=rule.name,
            kind=rule.measure,
            topic=topic_of(rule.measure),
            severity=rule.send_as or ("info" if rule.measure == "run_finished" else "critical"),
            title=title,
            receivers=rule.receivers,
            since_step=step,
            since_wall_ns=end.wall_ns,
            advice=("`stepscope report RUN` has the verdict.",) if rule.measure == "run_failed" else (),
        )
        for rule in rules
        if rule.on == "measure" and rule.measure in wanted
    )


def wall_of_step(seen: Observation, step: int | None) -> int:
    """When a step ended, interpolated between those that are known; 0 if it is not known."""
    known = seen.step_walls
    if step is None or not known or step < known[0][0]:
        return 0
    at = bisect_right(known, (step, 1 << 63))
    (before, before_ns), (after, after_ns) = known[at - 1], known[min(at, len(known) - 1)]
    if after <= before:
        return before_ns
    return before_ns + (after_ns - before_ns) * min(step - before, after - before) // (after - before)
