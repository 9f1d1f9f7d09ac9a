"""Parts of a summary that have rows and text: attempts, nodes, hangs and the settings of the script.

Each part makes rows for ``summary.json``, and the lines of the text from those rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from stepscope.diagnosis.engine.attempts import Attempt, attempts_of
from stepscope.diagnosis.rules.crashes import Failure, crash_text, failures_in
from stepscope.flight.wording import epochs_text, steps_text
from stepscope.hangs.report import hang_lines, past_if_over, steps_of, title_of
from stepscope.records.hang import HangRecord
from stepscope.records.identity import epochs_of, logged_steps
from stepscope.records.series import ALIVE, RankSeries, RunData
from stepscope.records.text import count_text, duration_text, hang_name, ms_text, share_text
from stepscope.reports.event_text import exit_text

__all__ = [
    "attempt_items",
    "attempt_texts",
    "attempts_table",
    "differing_facts",
    "error_text",
    "errors_view",
    "facts_of_run",
    "global_steps_text",
    "hang_section",
    "hangs_table",
    "listed_steps",
    "node_items",
    "nodes_table",
    "settings_of",
]


# -- attempts ---------------------------------------------------------------------------------------------------------
# Attempts of an elastic job, if there are several. The cost of an attempt is its duration and the time until the first
# step of the next one. Which of its steps must be repeated depends on the script's checkpoints and is not reported.

HOSTS_LISTED = 64
HOSTS_NAMED = 3
ATTEMPTS_SHOWN = 8
"""Maximum in the text: the last ones."""
JOINED = "joined"


def attempts_table(run: RunData) -> list[dict[str, Any]]:
    """One row per attempt, in order; empty for a single attempt."""
    attempts = attempts_of(run)
    if len(attempts) < 2:
        return []
    return [_attempt_row(run, attempt, after) for attempt, after in zip_longest(attempts, attempts[1:])]


def attempt_items(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Number and description of each attempt."""
    items = [(str(row["attempt"]), _attempt_line(row)) for row in rows[-ATTEMPTS_SHOWN:]]
    left = len(rows) - ATTEMPTS_SHOWN
    return [("", f"… {count_text(left, 'earlier attempt')} in summary.json"), *items] if left > 0 else items


def attempt_texts(rows: Any) -> list[str]:
    """The attempts of a summary, which may be of another version, as sentences."""
    known = [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
    return [f"Attempt {row.get('attempt', 0)}: {_attempt_line({**_NO_ATTEMPT, **row})}" for row in known]


_NO_ATTEMPT: Mapping[str, Any] = {
    **dict.fromkeys(("first_step", "last_step", "seconds", "pause_s", "end")),
    "hosts": [],
    "host_count": 0,
    "ranks": 0,
}


def _attempt_row(run: RunData, attempt: Attempt, after: Attempt | None) -> dict[str, Any]:
    numbers = [int(series.steps["step"][at]) for series in attempt.series if len(series.steps) for at in (0, -1)]
    hosts = sorted({series.identity.host for series in attempt.series})
    began_ns = min((series.anchor_wall_ns for series in attempt.series), default=None)
    ended_ns = max((ended for series in attempt.series if (ended := _ended_ns(series)) is not None), default=None)
    starts = [_first_step_ns(series) for series in after.series if len(series.steps)] if after else []
    next_ns = min(starts, default=None)
    return {
        "attempt": attempt.number,
        "world_size": attempt.world_size,
        "ranks": len(attempt.series),
        "hosts": hosts[:HOSTS_LISTED],
        "host_count": len(hosts),
        "first_step": min(numbers, default=None),
        "last_step": max(numbers, default=None),
        "began_wall_ns": began_ns,
        "ended_wall_ns": ended_ns,
        "seconds": _seconds(began_ns, ended_ns),
        "pause_s": _seconds(ended_ns, next_ns),
        "end": _attempt_end(run, attempt, after),
    }


def _attempt_line(row: Mapping[str, Any]) -> str:
    hosts = row["hosts"]
    on = f" on {row['host_count']} hosts" if row["host_count"] > 1 else f" on {hosts[0]}" if hosts else ""
    if not row["ranks"]:
        parts = ["nothing was recorded"]
    else:
        first, last = row["first_step"], row["last_step"]
        steps = "no step" if last is None else f"step {first}" if first == last else f"steps {first}–{last}"
        parts = [f"{count_text(row['ranks'], 'rank')}{on}, {steps}"]
        if row["seconds"] is not None:
            parts[0] += f" in {duration_text(row['seconds'])}"
    parts += [row["end"]] if row["end"] else []
    if row["pause_s"] is not None:
        parts.append(f"{duration_text(row['pause_s'])} until the next one's first step")
    return "; ".join(parts)


def _attempt_end(run: RunData, attempt: Attempt, after: Attempt | None) -> str | None:
    """How the attempt ended, without a full stop; None: it still runs."""
    failures = failures_in(run, attempt)
    began_it = [failure for failure in failures if not failure.victim and not failure.taken]
    text = _failures_text(failures, attempt) + _where(attempt, began_it) if failures else "ended normally"
    alive = sorted({series.identity.host for series in attempt.series if series.state in ALIVE})
    if any(map(_is_known, began_it)) or (after is None and not alive):
        return text
    if after is None:
        return None
    if alive:
        return f"{_hosts(alive)} no longer heard from"
    missed = any(failure.taken and failure.type for failure in failures)  # the others noticed that the rank vanished
    change = _membership(attempt, after)
    return text if began_it and missed and not change.endswith(JOINED) else change or text


def _is_known(failure: Failure) -> bool:
    return bool(failure.type or failure.signal or failure.oom_killed or failure.exit_code)


def _failures_text(failures: Sequence[Failure], attempt: Attempt) -> str:
    if all(failure.victim for failure in failures):
        return "its ranks were stopped"
    text = crash_text(failures, attempt)
    return text[0].lower() + text[1:]


def _where(attempt: Attempt, failures: Sequence[Failure]) -> str:
    """The host of the ranks that caused the end, if there are several hosts."""
    hosts = {series.rank: series.identity.host for series in attempt.series}
    guilty = {hosts[failure.rank] for failure in failures if failure.rank in hosts}
    return f" on {guilty.pop()}" if len(set(hosts.values())) > 1 and len(guilty) == 1 else ""


def _membership(attempt: Attempt, after: Attempt) -> str:
    """What changed in the hosts or, failing that, in the number of ranks; empty if nothing did."""
    before, then = ({series.identity.host for series in side.series} for side in (attempt, after))
    joined, left = sorted(then - before), sorted(before - then)
    if joined and left:
        return f"{_hosts(left)} replaced by {_hosts(joined, verb=False)}"
    if joined or left:
        return f"{_hosts(joined or left, verb=False)} {JOINED if joined else 'left'}"
    if attempt.series and after.series and attempt.world_size != after.world_size:
        return f"started again with {count_text(after.world_size or 0, 'rank')}"
    return ""


def _hosts(hosts: Sequence[str], *, verb: bool = True) -> str:
    named = f"host {hosts[0]}" if len(hosts) == 1 else f"hosts {', '.join(hosts[:HOSTS_NAMED])}"
    more = f" and {len(hosts) - HOSTS_NAMED} more" if len(hosts) > HOSTS_NAMED else ""
    return f"{named}{more}{(' was' if len(hosts) == 1 else ' were') if verb else ''}"


def _ended_ns(series: RankSeries) -> int | None:
    """When the rank ended, else when its last step ended; None: it runs, or never did anything."""
    if series.ended_wall_ns:
        return series.ended_wall_ns
    if series.state in ALIVE or not len(series.steps):
        return None
    return _wall_ns(series, int(series.steps["start_ns"][-1]) + int(series.steps["wall_ns"][-1]))


def _first_step_ns(series: RankSeries) -> int:
    return _wall_ns(series, int(series.steps["start_ns"][0]))


def _wall_ns(series: RankSeries, mono_ns: int) -> int:
    return mono_ns - series.anchor_mono_ns + series.anchor_wall_ns


def _seconds(since_ns: int | None, until_ns: int | None) -> float | None:
    if since_ns is None or until_ns is None or until_ns < since_ns:
        return None
    return round((until_ns - since_ns) / 1e9, 3)


# -- errors -----------------------------------------------------------------------------------------------------------

MESSAGE_CHARS = 240
EXIT_CODES_SHOWN = 4
_RULES = re.compile(r"[=_*-]{4,}")
"""Lines drawn in a message."""


def errors_view(rows: Any) -> dict[str, Any]:
    """The errors of a summary, which may be of another version: original ones (``own``), and a sentence on the others.

    ``text``: who raised what in which step; ``title``: whose traceback it is.  Launchers only report how ranks ended.
    """
    known = [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
    own = [row for row in known if not row.get("victim") and (row.get("rank") is not None or row.get("script"))]
    followed = [row for row in known if row not in own]
    shown = [
        {
            "text": error_text(row),
            "title": f"Traceback of {_error_source(row)}{_error_step(row, ', step')}",
            "type": str(row.get("type", "")),
            "traceback": str(row.get("traceback") or ""),
            "traceback_short": str(row.get("traceback_short") or row.get("traceback") or ""),
        }
        for row in own
    ]
    return {"own": shown, "followed": _followed_text(followed, own) if followed else ""}


def error_text(row: Mapping[str, Any]) -> str:
    """``Rank 1 raised ValueError in step 6: no such label``."""
    message = " ".join(_RULES.sub(" ", str(row.get("message") or "")).split())
    message = message if len(message) <= MESSAGE_CHARS else message[: MESSAGE_CHARS - 1] + "…"
    codes = row.get("exit_codes")
    known = codes if isinstance(codes, Mapping) else {}
    ends = [f"rank {rank} {exit_text(code)}" for rank, code in known.items() if type(code) is int][:EXIT_CODES_SHOWN]
    who = _error_source(row)
    text = f"{who[0].upper()}{who[1:]} raised {row.get('type') or 'an exception'}{_error_step(row, ' in step')}"
    return text + (f": {message}" if message else "") + (f" ({', '.join(ends)})" if ends else "")


def _error_source(row: Mapping[str, Any]) -> str:
    return "the script" if row.get("script") else "the launcher" if row.get("rank") is None else f"rank {row['rank']}"


def _error_step(row: Mapping[str, Any], word: str) -> str:
    return f"{word} {row['step']:,}" if type(row.get("step")) is int else ""


def _followed_text(followed: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> str:
    """``After that, rank 0 and the launcher ended: …``: launchers are not ranks, and a rank may have reported twice."""
    first = error_text(followed[0])
    began = {row.get("rank") for row in own}
    ranks = [
        rank for rank in dict.fromkeys(row.get("rank") for row in followed) if rank is not None and rank not in began
    ]
    if not ranks:
        return first
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} other ranks"
    launcher = any(row.get("rank") is None and not row.get("script") for row in followed)
    return f"After that, {who}{' and the launcher' if launcher else ''} ended: {first}"


# -- nodes ------------------------------------------------------------------------------------------------------------
# A job on one node has no rows. With many nodes, the text names those with a problem and counts the others.

NODES_LISTED = 1024
"""Maximum rows in ``summary.json``: nodes with a problem, then the first ones."""
NODES_SHOWN = 8
"""Maximum lines in the text."""
CLOCK_OFF_MS = 1000.0
"""From this offset on a clock counts as a problem."""
CLOCK_SHOWN_MS = 10.0
"""From this offset on it is mentioned."""


def nodes_table(run: RunData, *, alive: bool) -> list[dict[str, Any]]:
    """One row per node, by number; several if the node was started more than once."""
    if not run.nodes:
        return []
    series = {(series.identity.attempt, series.rank): series for series in run.ranks}
    sent = {node["spool"]: [series.pop(pair) for pair in node["series"] if pair in series] for node in run.nodes}
    hosts = {node["spool"]: node["host"] for node in run.nodes}
    # Data that no node sent was recorded here, by an agent that may never have reached the hub.
    own = {"node": 0, "host": run.meta.get("host"), "offset_ns": 0, "rtt_ns": 0, "bye": run.meta.get("end")}
    here = next((node for node in run.nodes if node["here"]), own)
    rows = [_node_row({**here, "bye": own["bye"]}, list(series.values()), hosts, lost=False)]
    rows += [
        _node_row(node, sent[node["spool"]], hosts, lost=node["bye"] is None and not alive)
        for node in run.nodes
        if not node["here"]
    ]
    odd = [row for row in rows if _is_odd_node(row)][:NODES_LISTED]
    shown = [*odd, *[row for row in rows if not _is_odd_node(row)][: NODES_LISTED - len(odd)]]
    return sorted(shown, key=lambda row: (row["node"], row["joined_wall_ns"] or 0))


def node_items(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Label and facts of each line."""
    if len(rows) <= NODES_SHOWN:
        return [(f"node {row['node']}", _node_facts(row)) for row in rows]
    odd = [row for row in rows if _is_odd_node(row)]
    items = [(f"node {row['node']}", _node_facts(row)) for row in odd[:NODES_SHOWN]]
    if len(odd) > NODES_SHOWN:
        items.append(("", [f"… and {len(odd) - NODES_SHOWN:,} more with lost data or other problems"]))
    rest = [row for row in rows if not _is_odd_node(row)]
    if rest:
        steps = sorted({row["steps"] for row in rest if row["ranks"]}) or [0]
        words = count_text(steps[0], "step") if len(steps) == 1 else f"{steps[0]:,}–{steps[-1]:,} steps"
        worst = max(abs(row["clock_offset_ms"] or 0.0) for row in rest)
        items.append(
            ("nodes", [f"{len(rest):,} {'others' if odd else 'in all'}", words, f"clocks within {ms_text(worst)}"])
        )
    return items


def _node_row(
    node: Mapping[str, Any], series: Sequence[RankSeries], hosts: Mapping[str, str], *, lost: bool
) -> dict[str, Any]:
    ranks = sorted({rank.rank for rank in series})
    bye = node["bye"]
    offset_ns, rtt_ns = node["offset_ns"], node["rtt_ns"]
    return {
        "node": node["node"],
        "host": node["host"],
        "address": node.get("address") or None,
        "ranks": len(ranks),
        "first_rank": ranks[0] if ranks else None,
        "last_rank": ranks[-1] if ranks else None,
        "steps": max((len(rank.steps) for rank in series), default=0),
        "clock_offset_ms": None if offset_ns is None else round(offset_ns / 1e6, 3),
        "clock_error_ms": None if rtt_ns is None else round(rtt_ns / 2e6, 3),
        "joined_wall_ns": node.get("joined_wall_ns") or None,
        "heard_wall_ns": node.get("heard_wall_ns") or None,
        "status": str(bye["status"]) if isinstance(bye, Mapping) and "status" in bye else None,
        "lost": lost,
        "replaced_by": hosts.get(node.get("replaced_by", "")),
        "duplicates": node.get("duplicates", 0),
        "refused": node.get("refused", 0),
    }


def _is_odd_node(row: Mapping[str, Any]) -> bool:
    clock_off = abs(row["clock_offset_ms"] or 0.0) > CLOCK_OFF_MS
    return bool(row["lost"] or row["replaced_by"] or row["refused"] or clock_off)


def _node_facts(row: Mapping[str, Any]) -> list[str]:
    first, last = row["first_rank"], row["last_rank"]
    facts = [str(row["host"])]
    if first is not None:
        facts.append(f"rank {first}" if first == last else f"ranks {first}–{last}")
        facts.append(count_text(row["steps"], "step"))
    offset, error = row["clock_offset_ms"], row["clock_error_ms"]
    if offset is not None and abs(offset) >= CLOCK_SHOWN_MS:
        way = "ahead" if offset > 0 else "behind"
        facts.append(f"clock {ms_text(abs(offset))} {way} (± {ms_text(error)})")
    if row["lost"]:
        facts.append("lost")
    if row["replaced_by"]:
        facts.append(f"replaced by {row['replaced_by']}")
    if row["refused"]:
        facts.append(f"{count_text(row['refused'], 'frame')} refused")
    return facts


# -- hangs ------------------------------------------------------------------------------------------------------------

HANG_KEYS_LEFT_OUT = ("schema", "ranks", "flight")
"""Long keys that are in the hang's file."""
HANGS_SHOWN = 3


def hangs_table(hangs: Sequence[HangRecord], *, over: bool = False) -> list[dict[str, Any]]:
    """One row per hang, by time, in its current wording (``past_if_over``); ``file``: the full record."""
    return [
        {key: value for key, value in past_if_over(hang, over=over).to_dict().items() if key not in HANG_KEYS_LEFT_OUT}
        | {"file": f"hangs/{hang_name(hang.host, hang.number)}", "steps": listed_steps(hang)}
        for hang in hangs
    ]


def listed_steps(hang: HangRecord) -> list[int] | None:
    """First and last of the steps in which the job hung, for JSON."""
    steps = steps_of(hang)
    return None if steps is None else [*steps]


def hang_section(
    rows: Sequence[Mapping[str, Any]], width: int, *, led_by: str = "", now_wall_ns: int | None = None
) -> list[str]:
    """The heading and the lines of the first few hangs.

    ``led_by``: the headline of the page; ``now_wall_ns``: the current time, for a live run.
    """
    if now_wall_ns is not None and any(row["over"] is None for row in rows):
        earlier = f" (it also hung {count_text(len(rows) - 1, 'time')} before)" if len(rows) > 1 else ""
        lines = [f"The job is hung{earlier}"]
    else:
        lines = ["The job hung" if len(rows) == 1 else f"The job hung {len(rows)} times"]
    for row in rows[:HANGS_SHOWN]:
        record = HangRecord.from_dict({**row, "schema": 1})
        first_last = row.get("steps")
        steps = (first_last[0], first_last[1]) if first_last else None
        lines += hang_lines(record, width, title=title_of(record) != led_by, now_wall_ns=now_wall_ns, steps=steps)
    if len(rows) > HANGS_SHOWN:
        lines.append(f"  … and {len(rows) - HANGS_SHOWN} more in hangs/")
    return lines


# -- settings of the script -------------------------------------------------------------------------------------------
# One table for the run: the facts of one rank, and where other ranks differ from it.

COMPARED = ("loader", "ddp", "fsdp", "optimizer", "threads")
"""Facts that should be equal on all ranks …"""
RANK_SPECIFIC = (
    *("length", "last_batch", "epochs", "set_epoch_missing", "gradient_mb", "group", "buckets", "bucket_sizes_mb"),
    *("tensors", "batchnorm", "iterations", "unused", "parameters", "units", "largest_share", "resharded_units"),
)
"""… except those that depend on a rank's share of the data or the model."""

COUNTED_BY = {
    "transformers": " of Hugging Face Trainer",
    "lightning": " of Lightning's Trainer",
    "deepspeed": " of the DeepSpeed engine",
    "optimizer": " by the optimizer's own count",
    "accelerate": " as the script logs them with Accelerate",
    "torchtitan": " of torchtitan's trainer",
}
FRAMEWORK_NAMES = {
    "transformers": "Hugging Face",
    "lightning": "Lightning",
    "accelerate": "Accelerate",
    "torchtitan": "torchtitan",
}

DTYPE_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
EXPLICIT = "explicit"


def facts_of_run(current: Sequence[RankSeries]) -> dict[str, Any]:
    """Facts of the lowest rank that has any; {}: unknown."""
    known = [series for series in current if series.facts]
    return dict(min(known, key=lambda series: series.rank).facts) if known else {}


def differing_facts(current: Sequence[RankSeries]) -> list[str]:
    """Settings on which the ranks disagree, such as ``loader.num_workers``."""
    seen: dict[str, list[Any]] = {}
    for series in current:
        for key in (key for key in COMPARED if key in series.facts):
            value = series.facts[key]
            named = {f"{key}.{name}": part for name, part in value.items()} if isinstance(value, dict) else {key: value}
            for name, part in named.items():
                if part not in seen.setdefault(name, []):
                    seen[name].append(part)
    return sorted(
        name for name, values in seen.items() if len(values) > 1 and name.rpartition(".")[2] not in RANK_SPECIFIC
    )


def global_steps_text(facts: Mapping[str, Any], first: int | None, last: int | None) -> str:
    """Map the steps of this run to the training's global steps, if they differ.

    They differ after a resume, and if the script counts steps differently.
    """
    counted = facts.get("global_step")
    if not isinstance(counted, dict) or "first" not in counted or first is None or last is None:
        return ""
    behind = counted["first"]
    by = COUNTED_BY.get(str(counted.get("by")), "")
    if "last" in counted and "at" in counted:
        return _counts_text(counted, by)
    if not behind:
        return ""
    which = f"steps {first:,}–{last:,} here are" if last > first else f"step {first:,} here is"
    logged = logged_steps(facts, first, last)
    if logged is not None:
        by = COUNTED_BY.get(str(facts["progress"].get("by")), by)
    return f"{which} global {steps_text(*(logged or (first + behind, last + behind)))}{by}"


def _counts_text(counted: Mapping[str, Any], by: str) -> str:
    """Mapping for a counter that counts differently; an optimizer may be one of several, or have skipped steps."""
    behind, last, at = counted["first"], counted["last"], counted["at"]
    if counted.get("by") == "optimizer" and not behind:
        return ""
    why = (
        ", which counts the steps of each optimizer" if counted.get("by") == "lightning" and last > behind + at else ""
    )
    begin = f"step 0 here is global step {behind:,} and " if behind else ""
    return f"{begin}step {at:,} {'' if behind else 'here '}is global step {last:,}{by}{why}"


def settings_of(facts: Mapping[str, Any], first: int | None, last: int | None) -> list[str]:
    """How the model is sharded, in one sentence: ``FSDP2: 25 units, largest 12% of the parameters, …``.

    And how far the framework says that the training is: ``trainer: Hugging Face, logged as steps 16–30, epoch 1, …``.
    """
    return [*_sharding_of(facts), *_progress_of(facts, first, last)]


def _progress_of(facts: Mapping[str, Any], first: int | None, last: int | None) -> list[str]:
    progress = facts.get("progress")
    about: list[str] = []
    if isinstance(progress, Mapping) and first is not None and last is not None:
        logged, epochs = logged_steps(facts, first, last), epochs_of(facts, first, last)
        if logged is not None and logged != (first, last):
            about.append(f"logged as {steps_text(*logged)}")
        if epochs is not None:
            about.append(epochs_text(*epochs))
    about += [_evaluation_text(row) for row in facts.get("evaluations") or () if isinstance(row, Mapping)]
    by = progress.get("by") if isinstance(progress, Mapping) else None
    name = FRAMEWORK_NAMES.get(str(by))
    return [f"trainer: {', '.join([*([name] if name else []), *about])}"] if about else []


def _evaluation_text(row: Mapping[str, Any]) -> str:
    """``eval 3 times (141 ms)``: how often, and how long in all."""
    times = "once" if row["count"] == 1 else f"{row['count']:,} times"
    return f"{row['name']} {times} ({duration_text(row['ms'] / 1e3)})"


def _sharding_of(facts: Mapping[str, Any]) -> list[str]:
    fsdp = facts.get("fsdp")
    if not isinstance(fsdp, dict) or not fsdp.get("units"):
        return []
    about = [count_text(fsdp["units"], "unit")]
    if fsdp.get("largest_share") is not None and fsdp["units"] > 1:
        about.append(f"largest {share_text(fsdp['largest_share'])} of the parameters")
    about += [*_sharding(fsdp), *_precision(fsdp), *_prefetch(fsdp)]
    if "cpu_offload" in fsdp:
        about.append("offloaded to the CPU" if fsdp["cpu_offload"] else "no offload")
    return [f"FSDP{fsdp.get('version', '')}: {', '.join(about)}"]


def _sharding(fsdp: Mapping[str, Any]) -> list[str]:
    if fsdp.get("strategy") == "no_shard":
        return ["not sharded"]
    hybrid = ["replicated across shards (hybrid)"] if str(fsdp.get("strategy")).startswith("hybrid") else []
    units, resharded = fsdp["units"], fsdp.get("resharded_units")
    if resharded is None:
        return hybrid
    if not resharded:
        return [*hybrid, "kept after forward"]
    # FSDP2 always keeps the root, since backward needs it immediately.
    some = f"{resharded} of them " if resharded < units - 1 else ""
    return [*hybrid, f"{some}resharded after forward"]


def _precision(fsdp: Mapping[str, Any]) -> list[str]:
    names = {"param_dtype": "parameters", "reduce_dtype": "reduction"}
    return [f"{DTYPE_NAMES.get(fsdp[key], fsdp[key])} {name}" for key, name in names.items() if key in fsdp]


def _prefetch(fsdp: Mapping[str, Any]) -> list[str]:
    """Differences from torch's defaults."""
    if fsdp.get("version") == 1:
        lacks = "backward_prefetch" in fsdp and fsdp["backward_prefetch"] is None
        return [
            *(["no backward prefetch"] if lacks else []),
            *(["forward prefetch"] if _has_forward_prefetch(fsdp) else []),
        ]
    ways = {"forward": _has_forward_prefetch(fsdp), "backward": fsdp.get("backward_prefetch") == EXPLICIT}
    explicit_ways = [way for way, explicit in ways.items() if explicit]
    return [f"explicit {' and '.join(explicit_ways)} prefetch"] if explicit_ways else []


def _has_forward_prefetch(fsdp: Mapping[str, Any]) -> bool:
    return fsdp.get("forward_prefetch") is True
