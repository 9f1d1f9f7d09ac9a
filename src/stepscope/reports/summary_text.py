"""A summary as text for the terminal: the verdict first, its price, what to do; then the figures.

The input is the document of ``summary.json`` and nothing else. The text fits the width, except for tracebacks, which
are not wrapped. Without color it is plain, so that ``summary.txt`` can contain the same text.
"""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.flight.stacks import is_user_file
from stepscope.records.collectives import group_name
from stepscope.records.text import (
    bytes_text,
    count_text,
    duration_text,
    ms_text,
    number_text,
    printable_document,
    rate_text,
    share_text,
)
from stepscope.reports.finding_text import finding_mark
from stepscope.reports.goodput_text import goodput_line, is_worth_showing, parts_line
from stepscope.reports.layout import LABEL, NARROWEST, Page, bar, cut
from stepscope.reports.sections import attempt_items, global_steps_text, hang_section, node_items

__all__ = ["communication_lines", "measured_text", "render_text"]


# -- communication table ----------------------------------------------------------------------------------------------
# What the ranks exchange: one line for sibling groups, the longest first.

SENT_COLUMNS, TIME_COLUMNS, LAST_COLUMNS = 15, 10, 12
NARROW = 76
"""Below this width there is no room for the rank that is often last."""
LINES = 8
OFTEN = 0.6
"""A rank that comes last in this share of a group's collectives is named …"""
COLLECTIVES = 8
"""… if at least this many were seen: out of five, some rank comes last in most by chance."""


def measured_text(communication: Mapping[str, Any]) -> str:
    """How communication was measured, if on the device; else empty, also for summaries of earlier versions."""
    measured = communication.get("measured")
    if not measured:
        return ""
    steps, of, missed = measured["steps"], measured["of"], measured["missed"]
    text = f"Communication measured on the device (NCCL's Flight Recorder) in {steps:,} of {count_text(of, 'step')}"
    if missed:
        were, they = ("was", "it") if missed == 1 else ("were", "they")
        text += f"; {count_text(missed, 'step')} {were} overwritten before {they} could be read"
    if last := measured["last_unread"]:
        text += "; the last step was not read" if last == 1 else f"; the last {last:,} steps were not read"
    return f"{text}."


def communication_lines(communication: Mapping[str, Any], width: int) -> list[str]:
    """Lines of the table with its heading; empty without rows."""
    alike: dict[tuple[str, str, str], list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for group in communication["groups"]:
        for op in group["ops"]:
            alike.setdefault((group["kind"], group["description"], op["op"]), []).append((group, op))
    if not alike:
        return []
    shown = sorted(alike.values(), key=lambda rows: -(_mean(rows, "exposed_ms") or _mean(rows, "transfer_ms") or 0.0))
    last = LAST_COLUMNS if width >= NARROW and any(_often_last(rows) for rows in shown[:LINES]) else 0
    columns = width - 2 - SENT_COLUMNS - 2 * TIME_COLUMNS - last
    exposed = any(op["exposed_ms"] is not None for rows in shown for _, op in rows)
    cells = [
        ("exchange", "per step", *(("exposed", "hidden") if exposed else ("transfer", "bus")), "often last"),
        *(_cells(rows, columns - 1, exposed=exposed) for rows in shown[:LINES]),
    ]
    lines = [
        (
            f"  {_cut(what, columns - 1).ljust(columns)}{sent.rjust(SENT_COLUMNS)}{exposed.rjust(TIME_COLUMNS)}"
            f"{hidden.rjust(TIME_COLUMNS)}{whose.rjust(last) if last else ''}"
        ).rstrip()
        for what, sent, exposed, hidden, whose in cells
    ]
    if len(shown) > LINES:
        lines.append(f"  … and {count_text(len(shown) - LINES, 'more')} in summary.json")
    return lines


def _cells(
    rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], columns: int, *, exposed: bool
) -> tuple[str, str, str, str, str]:
    """The cells of one line. ``columns``: width of the first; a long group name is cut in favor of the operation.

    ``exposed``: whether exposed time is known for any row; otherwise the cells show duration and speed.
    """
    group, op = rows[0]
    several = f" ×{len(rows)}" if len(rows) > 1 else ""
    count, size = _mean(rows, "count"), _mean(rows, "bytes")
    sent = f"{count:.3g} × {bytes_text((size or 0.0) / count)}" if count else bytes_text(size)
    if exposed:
        first, second = (ms_text(_mean(rows, name)) for name in ("exposed_ms", "overlapped_ms"))
    else:
        bus = _mean(rows, "bus_bytes_per_s")
        first, second = ms_text(_mean(rows, "transfer_ms")), rate_text(bus) if bus else ""
    who = group_name("" if several else group["name"], group["description"]) or group["kind"]
    what = f"{several} {op['op']}"
    return f"{_cut(who, columns - len(what))}{what}", sent, first, second, _often_last(rows)


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: max(0, columns - 1)] + "…"


def _often_last(rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """The rank that its group waited for longest, if it was last most of the time."""
    candidates = [
        (row["late_ms"] * row["last"], row["rank"], row["last"] / group["arrivals"]["collectives"])
        for group, _ in rows
        if group["arrivals"] and group["arrivals"]["collectives"] >= COLLECTIVES
        for row in group["arrivals"]["ranks"]
    ]
    _, rank, share = max(candidates, default=(0.0, None, 0.0))
    return f"r{rank} {share:.0%}" if share >= OFTEN else ""


def _mean(rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], name: str) -> float | None:
    values = [op[name] for _, op in rows if op.get(name) is not None]
    return sum(values) / len(values) if values else None


# -- summary ----------------------------------------------------------------------------------------------------------

Summary = Mapping[str, Any]

NAME_COLUMNS = 14
MEDIAN_COLUMNS = 14
FRAME = re.compile(r'^\s*File "(?P<path>.+)", line (?P<line>\d+)(?:, in (?P<name>.+))?$')
TRIVIAL_SHARE = 0.01
TRACEBACK_HEAD, TRACEBACK_TAIL = 6, 34
"""First and last lines shown of a traceback that is longer than both together."""
WIDE = 76
"""Width from which host times fit next to device times."""
RECOVERED_SHOWN = 5
OTHERS_SHOWN = 8
FOLLOWERS_SHOWN = 4
NATIVE_SHOWN = 5
FILES_SHOWN = 6
TIMERS_SHOWN = 4
"""Maximum number of Megatron-LM's timers: the longest."""
COMMAND_LINES, CUT_COMMAND_LINES = 6, 3
CONTINUED = " \\"
MANY_HOSTS = 3
RARE = 2
"""A phase of fewer steps than one in so many is shown with their number instead of its mean over all steps."""
SHOWN_FROM = 0.001
"""Share of lost or resent packets from which it is mentioned."""


def render_text(
    summary: Summary,
    *,
    width: int = 80,
    color: bool = False,
    saved: bool | None = None,
    copied: bool = False,
    now_wall_ns: int | None = None,
) -> str:
    """Render a summary.

    ``saved``: whether ``summary.json`` is in the run directory; by default, if the run is over. ``copied``: whether
    ``report.html`` is. ``now_wall_ns``: the current time, for a live run.
    """
    page = Page(max(width, NARROWEST), color)
    summary = printable_document(summary)
    _verdict(page, summary)
    _traceback(page, summary)
    _hangs(page, summary, now_wall_ns)
    _attempts(page, summary)
    _run(page, summary, now_wall_ns)
    _phases(page, summary)
    _communication(page, summary)
    _machine(page, summary)
    _others(page, summary)
    _ending(page, summary, saved=summary["status"] != "running" if saved is None else saved, copied=copied)
    return "\n".join(page.lines).rstrip() + "\n"


def _verdict(page: Page, summary: Summary) -> None:
    verdict = summary["verdict"]
    healthy = verdict["kind"] == "healthy"
    page.marked(finding_mark({**summary["findings"][0], **verdict}), verdict["title"], bold=True)
    if verdict["price"]:
        page.labeled("to gain" if healthy else "cost", [f"at most {verdict['price']}" if healthy else verdict["price"]])
    page.labeled("to do", verdict["advice"])
    page.labeled("output", _native(summary["findings"][0]["evidence"]))
    followers = summary["findings"][0]["evidence"].get("followed_by")
    if followers:
        page.labeled("after it", [_followers(summary["findings"][0]["evidence"])])
    if verdict["confidence"] < 0.75 and verdict["kind"] != "rank_crashed":
        page.labeled("certainty", [f"{verdict['confidence']:.0%}: {_doubt(summary['findings'][0])}"])
    page.blank()


def _native(evidence: Mapping[str, Any]) -> list[str]:
    """The last lines that native code printed in a rank that died."""
    lines = [str(line) for line in evidence.get("native") or ()]
    left = len(lines) - NATIVE_SHOWN
    more = f"{left} earlier {'line' if left == 1 else 'lines'} of native code in its log"
    return [*([more] if left > 0 else []), *lines[-NATIVE_SHOWN:]]


def _followers(evidence: Mapping[str, Any]) -> str:
    shown = evidence["followed_by"][:FOLLOWERS_SHOWN]
    whose = [(error, "the script" if error["rank"] is None else f"rank {error['rank']}") for error in shown]
    parts = [f"{who} {error['exception'] or error['signal'] or 'ended'}" for error, who in whose]
    if evidence["followers"] > len(shown):
        parts.append(f"{evidence['followers'] - len(shown)} more")
    return ", ".join(parts)


def _doubt(finding: Mapping[str, Any]) -> str:
    if finding["evidence"].get("wait_measured") is False:
        return "waiting for peers was not measured, so culprit and victim are distinguished by the phases alone."
    return "few steps, or no single phase that explains it."


def _traceback(page: Page, summary: Summary) -> None:
    """The exception that caused the failure; its consequences and those of earlier attempts are in summary.json."""
    crash = summary["findings"][0]
    if crash["kind"] != "rank_crashed" or "attempt" not in crash["evidence"]:
        return  # a crash that only the watchdog saw has no traceback
    of_it = [error for error in summary["errors"] if error["attempt"] == crash["evidence"]["attempt"]]
    shown = (error for error in of_it if (error["script"] or error["rank"] is not None) and error["traceback"])
    error = next((error for error in shown if not error["victim"]), None)
    if error is None or error["type"] == "KeyboardInterrupt":
        return
    if summary["world_size"] <= 1 and (error["script"] or error["rank"] == 0):
        # Python has just printed the traceback, and the log contains it: show only the line.
        where = _raised_at(error["traceback"])
        if where:
            page.lines.pop()
            page.labeled("where", [where])
            page.blank()
        return
    where = f", step {error['step']}" if error["step"] is not None else ""
    who = "the script" if error["script"] else f"rank {error['rank']}"
    page.lines.append(page.paint(f"Traceback of {who}{where}", "bold"))
    lines = (error.get("traceback_short") or error["traceback"]).rstrip().splitlines()
    if lines and lines[0] == "Traceback (most recent call last):":
        del lines[0]
    if len(lines) > TRACEBACK_HEAD + TRACEBACK_TAIL:
        left_out = len(lines) - TRACEBACK_HEAD - TRACEBACK_TAIL
        lines = [*lines[:TRACEBACK_HEAD], f"  … {left_out} lines …", *lines[-TRACEBACK_TAIL:]]
    page.lines += [f"  {line}".rstrip() for line in lines]
    page.blank()


def _hangs(page: Page, summary: Summary, now_wall_ns: int | None) -> None:
    rows = summary["hangs"]
    if not rows:
        return
    heading, *lines = hang_section(rows, page.width, led_by=summary["verdict"]["title"], now_wall_ns=now_wall_ns)
    page.lines += [page.paint(heading, "bold"), *lines]
    page.blank()


def _attempts(page: Page, summary: Summary) -> None:
    rows = summary["attempts"]
    if not rows:
        return
    page.lines.append(
        page.paint(f"{len(rows)} attempts; all figures are from attempt {summary['run']['attempt']}", "bold")
    )
    for label, text in attempt_items(rows):
        page.labeled(label, [text])
    page.blank()


def _raised_at(traceback: str) -> str:
    """The innermost user frame of a traceback: file, line, function and code."""
    lines = traceback.splitlines()
    found = [(match, lines[at + 1 : at + 2]) for at, line in enumerate(lines) if (match := FRAME.match(line))]
    own = [frame for frame in found if is_user_file(frame[0]["path"])]
    for match, code in (own or found)[-1:]:
        inside = f", in {match['name']}" if match["name"] and match["name"] != "<module>" else ""
        return f"{match['path']}, line {match['line']}{inside}" + (f": {code[0].strip()}" if code else "")
    return ""


def _took_s(run: Mapping[str, Any], now_wall_ns: int | None) -> float:
    """Duration of the run; of a live run until now, since its last record may be old."""
    until_now_s = (now_wall_ns - run["created_wall_ns"]) / 1e9 if now_wall_ns is not None else 0.0
    return max(until_now_s, float(run["duration_s"]))


def _run(page: Page, summary: Summary, now_wall_ns: int | None) -> None:
    run, steps = summary["run"], summary["steps"]
    hosts = run["hosts"]
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts" if hosts else ""
    world = summary["world_size"]
    ranks = count_text(len(summary["ranks"]) or world, "process" if world == 1 else "rank")
    if not summary["ranks"]:
        ranks = f"{ranks}, none recorded" if world else "no process recorded"
    ranks += f" on {where}" if where else ""
    took = f" in {duration_text(_took_s(run, now_wall_ns))}" if run["duration_s"] is not None else ""
    page.items("run", [cut(run["name"], 40), ranks, _steps(summary) + took, _status(summary)])
    counted = global_steps_text(summary["facts"], steps["first"], _last_step(summary))
    if counted:
        page.labeled("resumed" if summary["facts"]["global_step"]["first"] else "counted", [counted])
    if run["command"]:
        room = page.width - 2 - LABEL
        lines = _command_lines(run, room)
        page.labeled("command", lines or _cut_command(run, room), verbatim=bool(lines))
    for label, facts in node_items(summary["nodes"]):
        page.items(label, facts)
    for setting in summary["settings"]:
        label, _, about = setting.partition(": ")
        page.items(label, about.split(", "))
    if summary.get("time_account"):  # missing in summaries of earlier versions
        page.items("whole run", [" ".join(texts) for texts in summary["time_account"]["text"].values()])
    ledger = summary.get("goodput")
    if ledger and is_worth_showing(ledger):
        page.items("goodput", [goodput_line(ledger), *parts_line(ledger["parts"], ledger["seconds"])])
    if summary.get("advice_after_failure"):
        page.labeled("restart?", [summary["advice_after_failure"]["text"]])
    time = summary["step_time"]
    if time["p50_ms"] is None:
        return
    parts = [
        f"mean {ms_text(time['mean_ms'])}",
        f"p50 {ms_text(time['p50_ms'])}",
        f"p90 {ms_text(time['p90_ms'])}",
        f"p99 {ms_text(time['p99_ms'])}",
    ]
    parts.append(f"max {ms_text(time['max_ms'])} (step {time['max_step']})")
    if steps["per_second"]:
        parts.append(f"{number_text(steps['per_second'])} steps/s")
    page.items("step time", parts)
    if summary.get("throughput"):  # missing in summaries of earlier versions
        page.items("speed", _throughput(summary))
    if summary["training_log"]:
        page.items("training", _training(summary["training_log"]))
    warmup = steps["warmup"]
    if warmup["count"]:
        page.labeled("warm-up", [_warmup(warmup)])
    page.blank()


def _status(summary: Summary) -> str:
    text, code = summary.get("status_text") or summary["status"], summary["exit_code"]
    return text if not code or text == f"exit code {code}" else f"{text}, exit code {code}"


def _throughput(summary: Summary) -> list[str]:
    """Our figures, and those that the script notes itself; what its framework logs has a separate line."""
    found, metrics = summary["throughput"], summary["metrics"]
    noted = dict.fromkeys(name for name in found.get("logged", found.get("said", {})).values() if name in metrics)
    parts = [f"{cut(name, 40)} {metrics[name]['last']:.4g} (noted by the script)" for name in noted]
    for name, unit in (("samples_per_second", "samples/s"), ("tokens_per_second", "tokens/s")):
        if found[name] is not None:
            parts.append(f"{number_text(found[name])} {unit}")
    if found["tflops"] is not None:
        devices = {row["device"] for row in summary["ranks"]}
        whose = "" if len(summary["ranks"]) == 1 else " per GPU" if devices == {"cuda"} else " per rank"
        mfu = "" if found["mfu"] is None else f" ({share_text(found['mfu'])} of the {found['peak_dtype']} peak)"
        parts.append(f"{_flops_text(found['tflops'])}{whose}{mfu}")
    elif found["mfu"] is not None:
        parts.append(f"{share_text(found['mfu'])} of the {found['peak_dtype']} peak")
    if parts and found["all_sampled"]:
        parts.append("of sampled steps, which take longer than others")
    return parts


def _flops_text(tflops: float) -> str:
    return f"{number_text(tflops)} TFLOP/s" if tflops >= 0.1 else f"{number_text(tflops * 1e3)} GFLOP/s"


def _training(training: Mapping[str, Any]) -> list[str]:
    """The last figures that the framework printed, or their medians where those are more useful."""
    figures = training["figures"]
    ours = "" if training["step"] is None else f" (our step {training['step']:,})"
    parts = [f"{training['framework']} iteration {training['iteration']:,}{ours}"]
    if "loss" in figures:
        parts.append(f"loss {figures['loss']['last']:.4g} (median {figures['loss']['median']:.4g})")
    for name, unit in (("tokens_per_second", "tokens/s"), ("tflops", "TFLOP/s")):
        if name in figures:
            parts.append(f"{number_text(figures[name]['median'])} {unit} per device")
    if "mfu_percent" in figures:
        parts.append(f"MFU {figures['mfu_percent']['median']:.3g}%")
    if "iteration_ms" in figures:
        parts.append(f"{ms_text(figures['iteration_ms']['median'])} an iteration")
    timers = sorted(training.get("timers_ms", {}).items(), key=lambda item: -item[1]["median"])[:TIMERS_SHOWN]
    parts += [f"{name} {ms_text(took['median'])}" for name, took in timers]
    return parts


def _steps(summary: Summary) -> str:
    """Number of steps, and which; they are counted from 0."""
    steps, last = summary["steps"], _last_step(summary)
    which = f" ({steps['first']}–{last})" if steps["first"] is not None and last != steps["first"] else ""
    return count_text(steps["total"], "step") + which


def _last_step(summary: Summary) -> int | None:
    return max((row["last_step"] for row in summary["ranks"] if row["last_step"] is not None), default=None)


def _command_lines(run: Mapping[str, Any], columns: int) -> list[str]:
    """The command to paste into a shell in the folder where the run was started; no lines if it does not fit."""
    here = f"{run['cwd']}/" if run["cwd"] else ""
    words = [_base_name(run["command"][0]), *(word.removeprefix(here) for word in run["command"][1:])]
    first, *rest = map(shlex.quote, words)
    lines = [first]
    for word in rest:
        if len(lines[-1]) + 1 + len(word) + len(CONTINUED) <= columns:
            lines[-1] += f" {word}"
        else:
            lines[-1] += CONTINUED
            lines.append(word)
    fits = len(lines) <= COMMAND_LINES and all(len(line) <= columns and line.isprintable() for line in lines)
    return lines if fits else []


def _cut_command(run: Mapping[str, Any], columns: int) -> list[str]:
    """The command without folders, since the arguments identify a run, and how to get all of it."""
    program, *rest = run["command"]
    words = [_base_name(program), *(_base_name(word) if word.endswith(".py") else word for word in rest)]
    whole = f"stepscope report {shlex.quote(run['name'])} --command"
    return [cut(" ".join(words), CUT_COMMAND_LINES * columns - LABEL), f"(all of it: {whole})"]


def _base_name(path: str) -> str:
    return path.rpartition("/")[2]


def _warmup(warmup: Mapping[str, Any]) -> str:
    reasons = {reason: count for reason, count in warmup["reasons"].items() if reason != "first"}
    why = f" ({', '.join(f'{count} {reason}' for reason, count in reasons.items())})" if reasons else ""
    return f"{count_text(warmup['count'], 'step')} set aside, {duration_text(warmup['seconds'])}{why}"


def _phases(page: Page, summary: Summary) -> None:
    """Where the time goes, by the clock of the findings: on the device if it was timed (the host runs ahead).

    Shares are of the training time, and the times are means over its steps.
    """
    phases = summary["phases"]
    if not phases:
        return
    several = len(summary["ranks"]) > 1
    # Summaries of earlier versions do not say which clock the findings use.
    on_device = summary.get("clock", "device") == "device" and all(row["device"] for row in phases.values())
    two = [bool(rank["steps"]) for rank in summary["ranks"]] == [
        True,
        True,
    ]  # their median would contain half of the slow rank's time
    usual = "other rank" if two else "median rank" if several else "per step"
    heads = [usual.rjust(MEDIAN_COLUMNS), *(["worst rank".rjust(17)] if several else [])]
    with_host = on_device and page.width >= WIDE
    if with_host:
        heads.append("host".rjust(12))
    columns = max(page.width - 2 - NAME_COLUMNS - 6 - sum(map(len, heads)), 6)
    title = "on device" if on_device else "phase"
    page.lines.append(page.paint(f"  {title.ljust(NAME_COLUMNS)}share {' ' * columns}{''.join(heads)}", "dim"))
    for name, row in phases.items():
        shown = row["device"] if on_device else row
        rare = shown["steps"] * RARE < summary["steps"]["steady"]
        if not shown["steps"]:
            continue  # occurred only in steps that were set aside
        usual_ms = max(2 * shown["median_ms"] - shown["worst_ms"], 0.0) if two else shown["median_ms"]
        values = [f"in {count_text(shown['steps'], 'step')}" if rare else ms_text(usual_ms)]
        if several:
            values.append("" if rare else _worst(shown))
        if with_host:
            values.append("" if rare else ms_text(row["median_ms"]))
        figures = "".join(value.rjust(len(head)) for value, head in zip(values, heads, strict=True))
        blocks = page.paint(bar(shown["share"] or 0.0, columns - 1).ljust(columns), "info")
        label = cut(name, NAME_COLUMNS - 1).ljust(NAME_COLUMNS)
        page.lines.append(f"  {label}{share_text(shown['share']):>5} {blocks}{figures}".rstrip())
    page.blank()


def _communication(page: Page, summary: Summary) -> None:
    lines = communication_lines(summary["communication"], page.width) if summary["communication"] else []
    if lines:
        page.lines += [page.paint(lines[0], "dim"), *lines[1:]]
        measured = measured_text(summary["communication"])
        page.lines += [f"  {line}" for line in textwrap.wrap(measured, page.width - 2)]
        page.blank()


def _worst(row: Mapping[str, Any]) -> str:
    whose = f"  r{row['worst_rank']}" if row["worst_ms"] else ""
    return ms_text(row["worst_ms"]) + whose


def _machine(page: Page, summary: Summary) -> None:
    memory, nodes, gpus = summary["memory"], summary["host"]["nodes"], summary["host"]["gpus"]
    several = len(summary["ranks"]) > 1
    own = memory.get("own_peak")  # as on the page; missing in summaries of earlier versions
    what, peak = (", without mapped files", own) if own else ("", memory["rss_peak"])
    if peak:
        page.items("memory", [f"process peak {bytes_text(peak['bytes'])}{_whose(peak['rank'], several=several)}{what}"])
    for node in nodes[:MANY_HOSTS]:
        page.items(cut(node["node"], LABEL - 1) if len(nodes) > 1 else "host", _node_parts(node))
    if len(nodes) > MANY_HOSTS:
        page.labeled("", [f"… and {count_text(len(nodes) - MANY_HOSTS, 'more host')}"])
    if gpus:
        page.items("GPU", _gpu_parts(gpus))
    page.items("GPU mem", _gpu_memory_parts(memory["ranks"], gpus, several=several))
    page.blank()


def _whose(rank: int, *, several: bool) -> str:
    return f" (rank {rank})" if several else ""


def _node_parts(node: Mapping[str, Any]) -> list[str]:
    parts = []
    if node["cpu_percent"]:
        cores = f" of {count_text(node['cpu_count'], 'core')}" if node["cpu_count"] else ""
        parts.append(f"CPU {node['cpu_percent']['median']:.0f}%{cores} (max {node['cpu_percent']['max']:.0f}%)")
    if node["mem_total"] and node["mem_available_min"] is not None:
        used = node["mem_total"] - node["mem_available_min"]
        parts.append(f"RAM {bytes_text(used)} of {bytes_text(node['mem_total'])}")
    for key, words in (("net_rx_bps", "net in"), ("net_tx_bps", "net out"), ("disk_read_bps", "disk read")):
        if node[key] and node[key]["median"] >= 1_000_000:
            parts.append(f"{words} {rate_text(node[key]['median'])}")
    if node["rtt_us"]:
        lost = node["probe_loss_share"] or 0.0
        some = f", {lost:.1%} lost" if lost >= SHOWN_FROM else ""
        parts.append(f"round trips {ms_text(node['rtt_us']['median'] / 1e3)}{some}")
    if (node["retransmit_share"] or 0.0) >= SHOWN_FROM and node["net_tx_bps"]["median"] >= 1_000_000:
        parts.append(f"TCP sends {node['retransmit_share']:.1%} again")
    return parts


def _gpu_parts(gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    """GPUs that the job uses, if known, else all; over the steady steps."""
    shown = _in_use(gpus)
    names = sorted({str(gpu["name"]) for gpu in shown if gpu["name"]})
    count = f"{len(shown)} of {len(gpus)}" if len(shown) < len(gpus) else str(len(gpus))
    parts = [f"{count}× {cut(names[0], 30)}" if names else f"{count} {'GPU' if len(gpus) == 1 else 'GPUs'}"]
    if not any(gpu.get("samples", 1) for gpu in shown):
        parts.append("no sample in the steady steps")
    busy = [gpu["util_percent"]["median"] for gpu in shown if gpu["util_percent"]]
    if busy:
        parts.append(f"busy {min(busy):.0f}–{max(busy):.0f}%" if max(busy) - min(busy) >= 1 else f"busy {busy[0]:.0f}%")
    for key, form in (("temperature_c", "up to {:.0f} °C"), ("power_w", "up to {:.0f} W")):
        highest = [gpu[key]["max"] for gpu in shown if gpu[key]]
        if highest:
            parts.append(form.format(max(highest)))
    reasons = sorted({reason for gpu in shown for reason in gpu["throttle_reasons"]})
    if reasons:
        parts.append(f"clocks held back: {', '.join(reasons)}")
    return parts


def _in_use(gpus: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return [gpu for gpu in gpus if gpu.get("in_use")] or gpus


def _gpu_memory_parts(
    ranks: Sequence[Mapping[str, Any]], gpus: Sequence[Mapping[str, Any]], *, several: bool
) -> list[str]:
    """Memory of the rank with the least room on its device; if no rank's is known, of the fullest device."""
    known = [row for row in ranks if row["device_peak"] is not None or row.get("device_free") is not None]
    if not known:
        used = [(gpu["mem_used_max"], gpu["mem_total"]) for gpu in _in_use(gpus)]
        full = [(total - most, total) for most, total in used if most is not None and total]
        return [f"{bytes_text(min(full)[0])} of {bytes_text(min(full)[1])} free"] if full else []
    row = min(known, key=lambda row: (_or(row.get("device_free"), math.inf), -_or(row["device_peak"], 0), row["rank"]))
    parts = []
    if row["device_peak"] is not None:
        parts.append(f"allocated {bytes_text(row['device_peak'])} at peak{_at_steps(row.get('device_peak_steps'))}")
        parts.append(f"reserved {bytes_text(row.get('device_reserved_max', row['device_reserved']))}")
    if row.get("device_free") is not None:
        left = "free" if row["device_free_from"] == "nvml" else "not reserved"
        parts.append(f"{bytes_text(row['device_free'])} of {bytes_text(row['device_total'])} {left}")
    return [*parts[:-1], parts[-1] + _whose(row["rank"], several=several)]


def _at_steps(steps: Sequence[int | None] | None) -> str:
    """The steps between two reads of the allocator in which the peak was reached; the first read has no predecessor."""
    if steps is None:
        return ""
    first, last = steps
    if first is None:
        return f" (by step {last:,})"
    return f" (step {last:,})" if first == last else f" (steps {first:,}–{last:,})"


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _others(page: Page, summary: Summary) -> None:
    others = summary["findings"][1:]
    if others:
        page.lines.append(page.paint("Also found", "bold"))
        for finding in others[:OTHERS_SHOWN]:
            mark = "healthy" if finding["kind"] == "healthy" else finding["severity"]
            page.marked(mark, finding["title"], bold=False)
            share = finding["cost"].get("share")
            if share and share >= TRIVIAL_SHARE and finding["cost"].get("if_fixed"):
                page.labeled("cost", [f"{share_text(share)} of the training time"])
            page.labeled("to do", finding["advice"][:1])
        if len(others) > OTHERS_SHOWN:
            page.lines.append(f"  … and {len(others) - OTHERS_SHOWN} more in summary.json")
        page.blank()


def _recovered(page: Page, summary: Summary) -> None:
    """Findings that were shown while the run was active and were over before its end."""
    last = {(found["kind"], tuple(found["ranks"])) for found in summary["findings"] if found["severity"] != "info"}
    over = [
        row
        for row in summary.get("history", ())  # earlier versions wrote none
        if not row["open"] and not row["why"] and (row["kind"], tuple(row["ranks"])) not in last
    ]
    if not over:
        return
    page.lines.append(page.paint("Over before the end", "bold"))
    for row in over[:RECOVERED_SHOWN]:
        page.lines += textwrap.wrap(
            f"{row['title']} {row['text']}",
            page.width,
            initial_indent="  · ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
    if len(over) > RECOVERED_SHOWN:
        page.lines.append(f"  … and {len(over) - RECOVERED_SHOWN} more in summary.json")
    page.blank()


def _ending(page: Page, summary: Summary, *, saved: bool, copied: bool) -> None:
    _recovered(page, summary)
    if summary["notices"]:
        page.lines.append(page.paint("Worth knowing", "bold"))
        for notice in summary["notices"]:
            page.lines += textwrap.wrap(
                notice, page.width, initial_indent="  · ", subsequent_indent="    ", break_on_hyphens=False
            )
        page.blank()
    logs = summary["logs"]
    results = [*(["summary.json"] if saved else []), *(["report.html"] if copied else [])]
    files = [f"in {summary['run']['path']}", *results, *logs[:FILES_SHOWN]]
    if len(logs) > FILES_SHOWN:
        files.append(f"{len(logs) - FILES_SHOWN} more logs")
    page.items("files", files)
