"""Whether the numbers of one summary contradict each other: a pure check of its document and its text.

Every rule says something that a reader would stumble over: a promised step that is longer than the one there is, shares
of more than the whole, a sentence that quotes another figure than the table beside it, time that two findings claim.
Findings are on the clock of their evidence; the tables are on the host's, so only findings on the host's clock are held
against them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["check_summaries", "contradictions"]

Summary = Mapping[str, Any]
Finding = Mapping[str, Any]

LAST_DIGIT_MS = 0.0005
ROUNDING = 0.03
"""Relative: three digits in a sentence, and a median of ranks against a mean."""
CLAIMS_NO_TIME = ("healthy", "insufficient_data", "compute_bound", "rank_crashed", "slow_network", "memory_creep")
"""And hangs: what they cost is not a part of the steps, or no part that could be taken off."""
CHANGES = ("drift", "change_point", "throughput_drop")
FULL_PERCENT = 90.0
UNITS_MS = {"µs": 0.001, "ms": 1.0, "s": 1000.0}
TIME = r"(\d[\d,.]*) (µs|ms|s)\b"


def check_summaries(folder: Path) -> list[str]:
    """Contradictions in all summaries below the folder; one that is being written is left for the next look."""
    found = []
    # Not rglob(), which raises if a folder goes away while it is read.
    for path in sorted(Path(where, "summary.json") for where, _, names in os.walk(folder) if "summary.json" in names):
        try:
            summary = json.loads(path.read_text())
            text = path.with_suffix(".txt").read_text()
        except (OSError, ValueError):
            continue
        if isinstance(summary, dict) and {"findings", "step_time", "phases"} <= summary.keys():
            found += [f"{path}: {line}" for line in contradictions(summary, text, measured=True)]
    return found


def contradictions(summary: Summary, text: str, *, measured: bool = False) -> list[str]:
    """One line for each; empty when the summary agrees with itself.

    ``measured``: of a real job, a short one on a busy machine perhaps, where a mean may be far from its median.  What
    compares the two is then left out.
    """
    found = [*_tables(summary), *_verdict(summary, text), *_promises(text), *_same_time_twice(summary)]
    found += [*_one_cause_twice(summary), *_whole_run(summary), *_shown(summary, text)]
    for finding in summary["findings"]:
        lines = (*_price(summary, finding), *_quoted(finding), *_slower(finding), *_worded(finding), *_gain(finding))
        lines += tuple(_of_training(summary, finding))
        found += [_line(finding, line) for line in lines]
    if measured:
        return found
    for finding in summary["findings"]:
        lines = (
            *_steps_counted(summary, finding),
            *_every_step(summary, finding),
            *_period(summary, finding),
            *_levels(summary, finding),
            *_processors(summary, finding),
        )
        found += [_line(finding, line) for line in lines]
    return found


def _line(finding: Finding, line: str) -> str:
    return f"{finding['kind']}: {line}; {finding['title']!r}"


def _tables(summary: Summary) -> Iterator[str]:
    times = summary["step_time"]
    in_order = [times[name] for name in ("min_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms")]
    if None not in in_order and in_order != sorted(in_order):
        yield f"step times are not in order: {in_order}"
    mean_ms, per_second = times["mean_ms"], summary["steps"]["per_second"]
    if mean_ms and per_second and not _near(per_second, 1000 / mean_ms):
        yield f"{per_second} steps/s, but the mean step takes {mean_ms} ms"
    for clock in ("host", "device"):
        rows = [row if clock == "host" else row["device"] for row in summary["phases"].values()]
        shares = [row["share"] or 0.0 for row in rows if row is not None]
        if sum(shares) > 1.001 + 0.0001 * len(shares):
            yield f"phases take {sum(shares):.1%} of the time ({clock})"


def _verdict(summary: Summary, text: str) -> Iterator[str]:
    first = summary["findings"][0]
    if (summary["verdict"]["kind"], summary["verdict"]["title"]) != (first["kind"], first["title"]):
        yield "the verdict is not the first finding"
    if "".join(first["title"].split()) not in "".join(text.split()):
        yield "the text does not say the verdict"


def _whole_run(summary: Summary) -> Iterator[str]:
    """The parts of the run add up to its duration, and those of training to what the shares are of."""
    account = summary.get("time_account")
    if not account:
        return
    total = round(sum(account["parts"].values()), 3)
    if total != account["seconds"] or abs(total - summary["run"]["duration_s"]) > 0.0015:
        yield f"parts of {total} s, {account['seconds']} s in all, in a run of {summary['run']['duration_s']} s"
    if min(account["parts"].values()) < 0:
        yield f"a part of the run is negative: {account['parts']}"
    steps = summary["steps"]
    whole_ranks = not steps["left_out"] and steps["total"] == steps["compared"]
    steady_s = (summary["step_time"]["mean_ms"] or 0.0) * steps["steady"] / 1000
    apart_s = abs(steady_s - account["training_time_s"])
    # Each part of the account is rounded to a millisecond.
    if whole_ranks and len(summary["ranks"]) == 1 and apart_s > max(ROUNDING * steady_s, 0.002):
        yield f"{steps['steady']} steps take {steady_s:.3f} s, but the training time is {account['training_time_s']} s"


def _of_training(summary: Summary, finding: Finding) -> Iterator[str]:
    """A cost in seconds is its share of the training time: of all steady steps, whichever were timed on the device."""
    share, seconds = finding["cost"].get("share"), finding["cost"].get("seconds")
    mean_ms = summary["step_time"]["mean_ms"]
    if not share or not seconds or not mean_ms or not _claims_time(finding) or "hang" in finding["evidence"]:
        return
    training_s = mean_ms * summary["steps"]["steady"] / 1000
    if not _near(seconds, share * training_s) and abs(seconds - share * training_s) > 0.0001 * training_s + 0.001:
        yield f"{seconds} s is not {share:.1%} of the training time, {training_s:.3f} s"


def _gain(finding: Finding) -> Iterator[str]:
    """The number in a straggler's title is what its cost is per step."""
    evidence, cost = finding["evidence"], finding["cost"]
    gain_ms = evidence.get("gain_ms")
    if gain_ms is None:
        return
    fixed = cost["if_fixed"]
    gain_s = gain_ms * evidence["steps_used"] / 1000
    if evidence["clock"] == "host" and not _near(gain_s, cost["seconds"]) and abs(gain_s - cost["seconds"]) > 0.001:
        yield f"{gain_ms} ms in each of {evidence['steps_used']} steps is not {cost['seconds']} s"
    quoted = [_ms(*each) for each in re.findall(TIME, finding["title"])]
    if not any(abs(each - gain_ms) <= 0.006 * max(each, gain_ms) + 0.001 for each in quoted):
        yield f"the title does not say what it gains, {gain_ms} ms"
    if ("least" in cost) != (evidence["least_gain_ms"] < gain_ms) or ("least" in cost) != (
        "about " in finding["title"]
    ):
        yield "it is not said everywhere that its gain is uncertain"
    if "least" in cost and not cost["least"]["if_fixed"]["step_ms"] >= fixed["step_ms"]:
        yield f"at least {cost['least']['share']:.1%}, but at most {cost['share']:.1%}"


def _shown(summary: Summary, text: str) -> Iterator[str]:
    """Phases in the table: what all ranks take on average, in the share beside it."""
    mean_ms = summary["step_time"]["mean_ms"]
    for name, row in summary["phases"].items():
        if row["mean_ms"] is None or not mean_ms or row["share"] is None or len(summary["ranks"]) > 1:
            continue
        if abs(row["mean_ms"] / mean_ms - row["share"]) > 0.001:
            yield f"{row['mean_ms']} ms of {mean_ms} ms is not {row['share']:.1%} ({name})"
    account = summary.get("time_account")
    joined = " ".join(text.split())
    for name, amount in account["text"].values() if account else ():
        if f"{name} {amount}" not in joined.replace(" · ", " "):
            yield f"the text does not say {name} {amount}"


def _price(summary: Summary, finding: Finding) -> Iterator[str]:
    cost, fixed = finding["cost"], finding["cost"].get("if_fixed") or {}
    share, step_ms, speedup = cost.get("share"), fixed.get("step_ms"), fixed.get("speedup")
    if share is not None and not 0 <= share <= 1:
        yield f"costs {share:.0%} of the time"
    if not step_ms or not speedup or not _claims_time(finding):
        return
    if speedup < 1:
        yield f"without it the job would be slower ({speedup}×)"
    if share is not None and abs(share - (1 - 1 / speedup)) > 0.005:
        yield f"{share:.1%} of the training time, but {speedup}× as fast"
    mean_ms = summary["step_time"]["mean_ms"]
    rounded_ms = LAST_DIGIT_MS * speedup  # a step of some microseconds has one digit left
    near = _near(step_ms * speedup, mean_ms or 0.0) or abs(step_ms * speedup - (mean_ms or 0.0)) <= rounded_ms
    # Findings about the machine name no clock: they are on the summary's.
    on_host = finding["evidence"].get("clock", summary.get("clock", "host")) == "host"
    if on_host and mean_ms and not near:
        yield f"{step_ms} ms, {speedup}× as fast, but the mean step takes {mean_ms} ms"


def _quoted(finding: Finding) -> Iterator[str]:
    """Shares of the time in a title are in the document, too."""
    known = {_percent(finding["cost"].get("share"))}
    for value in _numbers(finding["evidence"]):
        known.add(_percent(value))
    for quoted in re.findall(r"(<?\d+%) of the (?:training )?time", finding["title"]):
        near = {quoted, *(f"{int(quoted.strip('<%')) + by}%" for by in (-1, 1))}  # a mean of ranks against the worst
        if not near & known and _claims_time(finding):
            yield f"{quoted} of the time is nowhere in its evidence"
    shares = finding["evidence"].get("shares")
    if isinstance(shares, dict) and sum(shares.values()) > 1.01:
        yield f"its parts take {sum(shares.values()):.0%} of the time"


def _steps_counted(summary: Summary, finding: Finding) -> Iterator[str]:
    """``300 ms each in 7 of 38 steps`` is what it costs."""
    for counted in re.findall(r"([\d,]+) of ([\d,]+) steps", finding["title"]):
        hit, all_steps = map(_whole, counted)
        if hit > all_steps or all_steps > summary["steps"]["compared"]:
            yield f"{hit} of {all_steps} steps, of {summary['steps']['compared']}"
    often = rf"(\d+)% of the (?:training )?time .*?: {TIME}(?: each)? in ([\d,]+) of ([\d,]+) steps"
    said = re.search(often, finding["title"])
    mean_ms = summary["step_time"]["mean_ms"]
    if said and mean_ms and _on_host(finding):
        share, each, unit, some, of = said.groups()
        told = _ms(each, unit) * _whole(some) / _whole(of) / mean_ms
        if not 0.5 * int(share) / 100 <= told <= 2 * int(share) / 100 + 0.01:
            yield f"that makes {told:.0%} of the time"


def _every_step(summary: Summary, finding: Finding) -> Iterator[str]:
    """What every step has of a phase, the median step has as well."""
    said = re.search(rf"{TIME} (?:of every step|each time)", finding["title"])
    row = summary["phases"].get(finding["phase"])
    if said is None or row is None or not _on_host(finding):
        return
    each_ms = _ms(*said.groups())
    most_ms = max(row["median_ms"] or 0.0, row["worst_ms"] or 0.0)
    if each_ms > 2.2 * most_ms:
        yield f"{each_ms} ms of every step, but the median step has {most_ms} ms of {finding['phase']}"
    if each_ms > (summary["step_time"]["p90_ms"] or each_ms) * (1 + ROUNDING):
        yield f"{each_ms} ms of every step, but most steps are shorter than that"


def _period(summary: Summary, finding: Finding) -> Iterator[str]:
    period, spikes = finding["evidence"].get("period"), finding["evidence"].get("spikes")
    match = re.match(r"Every (\d+)\w\w step", finding["title"])
    if (match is not None) != (period is not None) or (match and int(match[1]) != period):
        yield f"its period is {period}"
    if period is None or spikes is None:
        return
    steady = summary["steps"]["steady"]
    if not 0.4 * steady / period - 2 <= spikes <= steady / period + 2:
        yield f"{spikes} times in {steady} steps is not every {period}"
    lost_ms, extra_ms = finding["cost"].get("seconds", 0.0) * 1000, finding["evidence"]["extra_ms"]
    if lost_ms and not 0.4 <= extra_ms * spikes / lost_ms <= 2.5:
        yield f"{extra_ms} ms {spikes} times is not {lost_ms:.0f} ms"
    usual_ms, p50_ms = finding["evidence"].get("usual_ms"), summary["step_time"]["p50_ms"]
    if usual_ms and p50_ms and _on_host(finding) and not _near(usual_ms, p50_ms):
        yield f"the usual step takes {usual_ms} ms, but the median one {p50_ms} ms"
    at = finding["evidence"].get("at_steps") or []
    apart = [later - earlier for earlier, later in pairwise(at)]
    off = [gap for gap in apart if min(gap % period, -gap % period) > 1]
    if len(off) > 0.5 * len(apart):
        yield f"it came at steps {at}"


def _slower(finding: Finding) -> Iterator[str]:
    before_ms, after_ms = finding["evidence"].get("before_ms"), finding["evidence"].get("after_ms")
    if finding["kind"] in CHANGES and before_ms and after_ms and after_ms <= before_ms:
        yield f"{after_ms} ms is not longer than {before_ms} ms"


def _worded(finding: Finding) -> Iterator[str]:
    """Numbers that nobody would write."""
    if finding["kind"] == "insufficient_data" and "exit code" in finding["title"]:
        return  # it quotes the script
    title = re.sub(r"mostly .*? \(pids? ", "(", finding["title"])  # without commands of other processes
    if re.search(r"\+-|--|\bnan\b|\binf\b| -\d|\b0 of ", title):
        yield "an odd number"


def _levels(summary: Summary, finding: Finding) -> Iterator[str]:
    """``30.3 ms instead of 15.0 ms``: the median step cannot be longer than both."""
    before_ms, after_ms = finding["evidence"].get("before_ms"), finding["evidence"].get("after_ms")
    times = summary["step_time"]
    if finding["kind"] != "change_point" or not before_ms or not after_ms or not times["p50_ms"]:
        return
    if _on_host(finding) and times["p50_ms"] > 1.1 * after_ms:
        yield f"the median step takes {times['p50_ms']} ms, longer than both"
    if _on_host(finding) and after_ms > times["max_ms"] * (1 + ROUNDING):
        yield f"the longest step takes {times['max_ms']} ms"


def _processors(summary: Summary, finding: Finding) -> Iterator[str]:
    if "CPUs are not full" not in finding["title"]:
        return
    for node in summary["host"]["nodes"]:
        percent = (node["cpu_percent"] or {}).get("median")
        if node["node"] == finding["evidence"].get("node") and percent is not None and percent >= FULL_PERCENT:
            yield f"CPU {percent:.0f}%"


def _same_time_twice(summary: Summary) -> Iterator[str]:
    """What all ranks lose in one phase is no more than the phase takes, and all of it no more than there is."""
    findings = [
        finding for finding in summary["findings"] if _claims_time(finding) and not finding["cost"].get("up_to")
    ]
    for name, row in summary["phases"].items():
        own = [
            finding for finding in findings if finding["phase"] == name and not finding["ranks"] and _on_host(finding)
        ]
        claimed = sum(_share_in(finding, name) for finding in own)
        if len(own) > 1 and row["share"] is not None and claimed > 1.1 * row["share"] + 0.02:
            titles = " / ".join(row["title"] for row in own)
            yield f"{claimed:.0%} of the time is claimed of {name}, which takes {row['share']:.0%}: {titles}"


def _share_in(finding: Finding, phase: str) -> float:
    """The part of a finding's share that lies in the phase, by its own evidence.

    A title may be led by the largest of several phases.  Slow steps are as long as on their slowest rank: where ranks
    are late in turn, the job loses more than they spend in the phase on average.
    """
    share: float = finding["cost"].get("share", 0.0)
    evidence = finding["evidence"]
    extra_ms, by_phase = evidence.get("extra_ms"), evidence.get("extra_ms_by_phase") or {}
    if extra_ms and phase in by_phase:
        return share * min(max(by_phase[phase], 0.0) / extra_ms, 1.0)
    return (evidence.get("shares") or {}).get(phase, share)


def _one_cause_twice(summary: Summary) -> Iterator[str]:
    """Two findings that warn of one phase on the same ranks and steps: something is always so, or it began."""
    warnings = [finding for finding in summary["findings"] if finding["severity"] != "info" and _claims_time(finding)]
    for at, warning in enumerate(warnings):
        for other in warnings[at + 1 :]:
            if warning["phase"] != other["phase"] or warning["phase"] is None or warning["ranks"] != other["ranks"]:
                continue
            changes = [each for each in (warning, other) if each["kind"] in CHANGES]
            if len(changes) == 1:
                (always,) = (each for each in (warning, other) if each is not changes[0])
                part = changes[0]["cost"].get("share", 0.0)
                if part < 0.75 * always["cost"].get("share", 0.0):
                    continue  # most of it has always been so
            elif warning["kind"] != other["kind"] or warning["kind"] == "stall" or warning["steps"] != other["steps"]:
                continue
            yield f"one cause is told twice: {warning['title']} / {other['title']}"


def _promises(text: str) -> Iterator[str]:
    """``a step takes 39.0 ms instead of 69.0 ms on average, 1.77× as fast``."""
    joined = " ".join(text.split())
    for then, unit, now, now_unit, speedup in re.findall(
        rf"a step takes {TIME} instead of {TIME} on average, ([\d.]+)× as fast", joined
    ):
        then_ms, now_ms = _ms(then, unit), _ms(now, now_unit)
        if then_ms > now_ms or not _near(now_ms / then_ms, float(speedup)):
            yield f"the text promises {then_ms} ms instead of {now_ms} ms, {speedup}× as fast"


def _claims_time(finding: Finding) -> bool:
    return finding["kind"] not in CLAIMS_NO_TIME and not finding["kind"].startswith("hang_")


def _on_host(finding: Finding) -> bool:
    return finding["evidence"].get("clock", "host") == "host"


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for one in value.values():
            yield from _numbers(one)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def _percent(share: float | None) -> str:
    return "<1%" if share is not None and 0 < share < 0.01 else "" if share is None else f"{share:.0%}"


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= ROUNDING * max(abs(one), abs(other))


def _ms(number: str, unit: str) -> float:
    return float(number.replace(",", "").rstrip(".")) * UNITS_MS[unit]


def _whole(number: str) -> int:
    return int(number.replace(",", ""))
