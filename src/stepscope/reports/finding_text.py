"""A finding in words: the name and meaning of its kind, its price, how sure it is, the small charts of its evidence.

``finding_document`` adds all of it to a finding of ``summary.json`` or of a live run when the hub serves it, so runs of
earlier versions get today's text.  Page, terminal and reports draw it and add no words of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from stepscope.flight.wording import epochs_text, ranks_text, steps_text
from stepscope.hangs.report import past_text
from stepscope.records.finding import SEVERITIES
from stepscope.records.hang import HangKind
from stepscope.records.text import bytes_text, count_text, duration_text, ms_text, number_text, share_text
from stepscope.reports.evidence_text import evidence_rows, figure_text, key_name, percent_text

__all__ = [
    "IN_CAPTURES",
    "IN_TRACES",
    "KINDS",
    "WHOLE_TRACE",
    "finding_document",
    "finding_mark",
    "finding_price",
    "findings_document",
    "is_stop",
    "judged_text",
    "kind_meaning",
    "kind_name",
    "nothing_text",
    "price_text",
]


# -- kinds ------------------------------------------------------------------------------------------------------------

KINDS = {
    "input_bound": (
        "Waiting for data",
        (
            "All ranks spend much of each step waiting for the next batch. The training could run faster than the data "
            "arrives."
        ),
    ),
    "h2d_bound": ("Copying to the device", "All ranks spend much of each step copying the batch to the device."),
    "comm_bound": (
        "Slow communication",
        (
            "All ranks spend much of each step communicating. Only the part common to all ranks counts; the rest is "
            "waiting for a rank."
        ),
    ),
    "comm_hook_bound": (
        "Slow communication hook",
        (
            "The function that the script gave DDP to exchange gradients with takes much of each step on all ranks: "
            "neither waiting nor transfer."
        ),
    ),
    "pipeline_bubble": (
        "Pipeline stages wait",
        (
            "The stages of a pipeline wait for each other: some are idle while it fills and drains, and more so if "
            "they are uneven."
        ),
    ),
    "optimizer_bound": ("Slow optimizer", "All ranks spend much of each step in the optimizer."),
    "between_steps": (
        "Work between steps",
        "Evaluation, checkpoints, logging or other work between steps takes much of the time.",
    ),
    "wait_heavy": (
        "Unexplained time",
        "Part of each step is neither input nor forward, backward, communication or optimizer.",
    ),
    "compute_bound": (
        "Computing",
        (
            "Forward, backward and optimizer take nearly all of the time. Nothing is wrong; only faster computation "
            "would help."
        ),
    ),
    "input_straggler": (
        "A rank waits for its data",
        "One rank gets its batches later than the others, and in a synchronous job all others wait for it.",
    ),
    "compute_straggler": (
        "A rank computes more slowly",
        (
            "One rank takes longer than the others in forward, backward or the optimizer, and in a synchronous job all "
            "others wait for it."
        ),
    ),
    "h2d_straggler": (
        "A rank copies more slowly",
        "One rank takes longer to copy its batch to the device, and all others wait for it.",
    ),
    "straggler": (
        "A slow rank",
        (
            "One rank takes longer than the others, in no single phase or in a user-defined one, and all others wait "
            "for it."
        ),
    ),
    "node_straggler": (
        "A slow node",
        "Most ranks of one host are late, but those of most other hosts are not: the machine is the likely cause.",
    ),
    "rotating_straggler": (
        "The slow rank changes each step",
        "In each step a different rank is late by about the same time, as if ranks took turns with extra work.",
    ),
    "imbalance": (
        "Uneven work",
        (
            "The work of the ranks differs by design: batches of unequal length, stages of unequal size, or experts "
            "that get unequal numbers of tokens."
        ),
    ),
    "low_overlap": (
        "Communication is not overlapped",
        "Communication could overlap with computation but hardly does, so it lengthens the step.",
    ),
    "slow_collective": (
        "A slow group",
        (
            "The collectives of one group take longer than those of groups like it, or longer than before, for the "
            "same bytes."
        ),
    ),
    "comm_straggler": ("A slow link", "All communication with one rank or one host is slow."),
    "group_imbalance": (
        "A group communicates more",
        "One of several groups with the same purpose has more to transfer, and the others wait for it.",
    ),
    "slow_network": (
        "Slow network",
        "The network of one host, one link, or the network between all hosts is slow or loses packets.",
    ),
    "stall": ("A single stall", "A step, or a few in a row, took much longer than the others, once. It is over."),
    "jitter": (
        "Recurring slow steps",
        "Single steps are repeatedly much longer than the steps around them, some at a fixed interval.",
    ),
    "drift": ("Steps get longer", "The step time grows steadily over the run."),
    "change_point": (
        "Slower from a step on",
        "From some step on, until the end of the run, steps take longer than before.",
    ),
    "throughput_drop": ("Slower for a while", "Ten or more consecutive steps took longer; then the pace recovered."),
    "loss_nan": (
        "The loss is not a number",
        "The loss that the script noted is NaN or infinite. Nothing is learned from such a step.",
    ),
    "nan_gradients": (
        "Gradients are not numbers",
        "Gradients are NaN or infinite: such a step spoils the weights, or is skipped.",
    ),
    "loss_spike": ("The loss jumped", "The loss that the script noted rose suddenly and has not come back."),
    "exploding_gradients": (
        "Gradients explode",
        "The gradients are a hundred times as large as before, or larger, and stay so.",
    ),
    "vanishing_gradients": (
        "Gradients vanish",
        "Next to nothing of the gradient reaches the first layers, so they do not learn.",
    ),
    "dead_layer": (
        "A layer does not learn",
        "A layer with trainable parameters has a gradient of exactly zero in every sampled step.",
    ),
    "no_gradient_exchange": (
        "Ranks train separately",
        "The ranks of one process group split the data but never exchange gradients: each trains its own model.",
    ),
    "uneven_batches": (
        "Batches of different size",
        "The ranks' loaders have different batch sizes, but their gradients are averaged with the same weight.",
    ),
    "unused_parameters": (
        "Parameters without gradients",
        "Some trainable parameters never get a gradient. They do not take part in the loss.",
    ),
    "replica_desync": (
        "Replicas differ",
        "Ranks that should hold the same weights do not: they train different models.",
    ),
    "memory_creep": (
        "Memory grows",
        "Memory grows step after step and does not shrink. When it runs out, the run ends.",
    ),
    "memory_pressure": (
        "A device is nearly full",
        "Nearly all memory of a device is in use: a little more would end the run.",
    ),
    "memory_imbalance": (
        "A rank needs more memory",
        "One rank needs more device memory than the others, and the fullest device limits the batch size of all.",
    ),
    "fragmentation": (
        "Fragmented memory",
        "The allocator holds much more device memory than was ever in use at the same time.",
    ),
    "low_gpu_utilization": ("Low GPU utilization", "The GPUs are busy less than half of the time."),
    "gpu_throttled": (
        "A GPU is throttled",
        "A GPU runs slower than it could because of heat, power, or a lower clock than the others.",
    ),
    "cpu_saturated": ("CPUs are saturated", "A host has more runnable tasks than CPUs."),
    "ram_pressure": ("Host memory is low", "A host has hardly any memory left, or is swapping."),
    "rank_crashed": (
        "A rank died",
        "A process ended with an exception or a signal, or vanished. What the other ranks then did is a consequence.",
    ),
    "rank_lost": (
        "Ranks are unreachable",
        "The ranks that still report wait for others on hosts that no longer report.",
    ),
    "hang_missing_collective": (
        "Missing collective",
        "The job hangs: some ranks wait in a collective that another rank has not called.",
    ),
    "hang_mismatch": (
        "Mismatched collectives",
        (
            "The job hangs: at the same point, ranks called different operations, or the same one with different sizes "
            "or types."
        ),
    ),
    "hang_deadlock": (
        "Ranks wait for each other",
        "The job hangs: ranks wait for each other in a cycle.",
    ),
    "hang_input": (
        "Stuck loading data",
        "The job hangs: a rank waits in its DataLoader or dataset, and the others wait for it.",
    ),
    "hang_host": (
        "A process is blocked",
        "The job hangs: a process is stopped or waits for a disk, or a C call holds the GIL.",
    ),
    "hang_device": (
        "A device does not finish",
        "The job hangs: a process waits for its device, which does not finish its work.",
    ),
    "hang_unknown": ("The job hangs", "The job hangs, and the available data does not show which rank is responsible."),
    "healthy": (
        "Healthy",
        "No problem was found. The sentence names the largest remaining cost besides the training itself.",
    ),
    "insufficient_data": ("Not enough data", "There are fewer than ten steady steps, too few to judge speed."),
}
"""By kind: its name as a heading, and what it means; docs/diagnosis.md has the details."""
IN_CAPTURES = {
    "bandwidth_bound": "Memory traffic on the device",
    "data_parallel": "One process for several devices",
    "ddp_without_nccl": "Communication through host memory",
    "exposed_copies": "Copies that nothing hides",
    "fp32_matmul": "Products without Tensor Cores",
    "gc_pauses": "Garbage collection",
    "gil_contention": "Python threads compete",
    "gpu_idle_gaps": "Gaps between kernels",
    "gpu_idle_host": "The device waits for the host",
    "gpu_idle_sync": "The device idles in a wait",
    "gpu_underused": "The device has little to do",
    "graph_breaks": "The compiled model is cut",
    "host_copies": "Copies on the host",
    "host_python": "Python between operators",
    "host_sync": "The host waits for the device",
    "launch_bound": "Launches are too slow",
    "low_occupancy": "Kernels with few threads",
    "low_occupancy_attention": "Attention with few threads",
    "pageable_copies": "Copies from pageable memory",
    "small_batch": "Products too small for the device",
    "tiny_kernels": "Many tiny kernels",
    "unfused_optimizer": "The optimizer is not fused",
}
"""Findings that only traces show, which captures add to a run (docs/trace-findings.md): the name as a heading."""
IN_TRACES = {
    "collective_jitter": "Ranks wait for each other in turn",
    "collective_straggler": "A rank comes last to collectives",
    "exposed_communication": "Communication that nothing hides",
    "loader_bound": "Waiting for data",
    "memory_near_limit": "Nearly all memory is in use",
    "recompiles": "The model is compiled again",
    "slow_rank": "A slow rank",
    "start_up": "The process starts up",
    "truncated_trace": "A file that ends early",
}
"""The other findings of traces that runs do not have, or have under another name."""


def kind_name(kind: str, *, over: bool = False) -> str:
    """A kind as a heading. ``over``: the run or the hang is over, so it is named in the past tense."""
    return _kind(kind, over=over)[0]


def kind_meaning(kind: str, *, over: bool = False) -> str:
    return _kind(kind, over=over)[1]


def is_stop(kind: str) -> bool:
    """Whether the job hangs or lost a rank; such findings come first."""
    return kind.startswith("hang_") or kind in ("rank_crashed", "rank_lost")


def finding_mark(finding: Mapping[str, Any]) -> str:
    """How a finding is marked: its severity, or ``healthy`` for a run that has little to gain."""
    if finding["kind"] == "healthy" and not (finding.get("evidence") or {}).get("large"):
        return "healthy"
    return str(finding["severity"])


def _kind(kind: str, *, over: bool) -> tuple[str, str]:
    name, meaning = KINDS.get(kind) or ((IN_CAPTURES | IN_TRACES).get(kind, kind.replace("_", " ")), "")
    return (past_text(name), past_text(meaning)) if over and kind in get_args(HangKind) else (name, meaning)


# -- price ------------------------------------------------------------------------------------------------------------

TRIVIAL_SHARE = 0.01
"""Share of the time below which a cost is not worth a sentence."""
TRIVIAL_LOSS_S = 1.0
"""Lost training time, in seconds, that is not worth a sentence."""
RANK_HOURS_FROM = 0.1
TRAINING = "the training time"
WHOLE_TRACE = "the trace"
"""What a share is of where a trace has no steps."""


def finding_price(kind: str, cost: Mapping[str, Any], evidence: Mapping[str, Any], *, over: bool) -> str | None:
    """The price of a finding about a run, by its kind; None if it is not worth a sentence.

    During a run only its last steps are examined: a checkpoint may precede them.
    """
    if kind == "insufficient_data":
        return None
    if _is_loss(kind, evidence):
        lost = _loss_text(cost, evidence, over=over)
        return f"{lost}." if lost else None
    return price_text(cost, over=over, of=TRAINING)


def price_text(cost: Mapping[str, Any], *, over: bool = True, of: str = "the time") -> str | None:
    """``61% of the time (2.5 s); without it …``, or ``at most 61% …`` if no remedy saves all of it.

    ``over``: whether nothing more can be lost; ``of``: what the share is of.
    """
    parts = _price(cost, over=over, of=of)
    if not parts:
        return None
    share, seconds, *gain = parts
    return f"{'; '.join([f'{share} ({seconds})', *gain])}."


def _is_loss(kind: str, evidence: Mapping[str, Any]) -> bool:
    """Whether training is lost; a death that only the watchdog saw is a hang."""
    return kind == "rank_crashed" and "checkpoint_step" in evidence


def _loss_text(cost: Mapping[str, Any], evidence: Mapping[str, Any], *, over: bool) -> str | None:
    seconds = cost.get("seconds")
    if not cost.get("share") or seconds is None or seconds < TRIVIAL_LOSS_S:
        return None
    lost, saved = f"{duration_text(seconds)} of training is lost", evidence.get("checkpoint_step")
    if saved is not None:
        return f"{lost}: the last checkpoint seen was in step {saved}"
    return f"{lost}: no checkpoint was seen" if over else f"at least {lost}: no checkpoint in the last steps"


def _price(cost: Mapping[str, Any], *, over: bool, of: str) -> tuple[str, ...]:
    """Share, seconds and, if known, what a remedy gains; empty if it is too little."""
    share, seconds = cost.get("share"), cost.get("seconds")
    if not share or seconds is None or share < TRIVIAL_SHARE:
        return ()
    fixed = cost.get("if_fixed") or {}
    step_ms, speedup = fixed.get("step_ms"), fixed.get("speedup")
    so_far = "" if over else " so far"
    if cost.get("least"):
        return _price_range(cost["least"], cost, so_far, of)
    most_share, most_seconds = cost.get("most_share"), cost.get("most_seconds")
    # Without steps, the trace is the only thing whose length is known.
    subject, average = (WHOLE_TRACE, "") if of == WHOLE_TRACE else ("a step", " on average")
    if most_share and most_seconds is not None and most_share > share:
        gain = f"a fix typically gains {share_text(share)}"
        gain += f": {subject} then takes {ms_text(step_ms)}, {speedup:.2f}× as fast" if step_ms and speedup else ""
        return f"at most {share_text(most_share)} of {of}", duration_text(most_seconds), gain
    most, without = ("at most ", "without all of it") if cost.get("up_to") else ("", "without it")
    parts = (f"{most}{share_text(share)} of {of}", f"{duration_text(seconds)}{so_far}")
    if not step_ms or not speedup:
        return parts
    # Compare means: a loss in some steps only does not show in the median step.
    instead = f"{ms_text(step_ms)} instead of {ms_text(step_ms * speedup)}{average}"
    return *parts, f"{without} {subject} takes {instead}, {most}{speedup:.2f}× as fast"


def _price_range(least: Mapping[str, Any], most: Mapping[str, Any], so_far: str, of: str) -> tuple[str, ...]:
    """A price that is not certain, because what the ranks wait for changes with it."""
    parts = (
        f"{share_text(least['share'])} to {share_text(most['share'])} of {of}",
        f"{duration_text(least['seconds'])} to {duration_text(most['seconds'])}{so_far}",
    )
    fast, slow = most["if_fixed"], least["if_fixed"]
    if not (fast["step_ms"] and fast["speedup"] and slow["speedup"]):
        return parts
    steps = f"{ms_text(fast['step_ms'])} to {ms_text(slow['step_ms'])} instead of "
    steps += f"{ms_text(fast['step_ms'] * fast['speedup'])} on average"
    faster = f"{slow['speedup']:.2f} to {fast['speedup']:.2f}× as fast"
    why = "the exchange may take longer when all ranks arrive together"
    return *parts, f"without it a step takes {steps}, {faster}: {why}"


def _price_parts(finding: Mapping[str, Any], *, over: bool) -> list[str]:
    """The price as short phrases, for a screen; the same words as in the summary."""
    kind, cost, evidence = finding["kind"], finding["cost"], finding["evidence"]
    hours = cost.get("rank_hours") or 0.0
    spent = [f"{number_text(hours)} rank-hours"] if hours >= RANK_HOURS_FROM else []
    if _is_loss(kind, evidence):
        lost = _loss_text(cost, evidence, over=over)
        return [lost, *spent] if lost else []
    if is_stop(kind):
        # While a job hangs, a clock next to it counts the seconds.
        stood = over and cost.get("seconds")
        return [f"{duration_text(cost['seconds'])} without progress", *spent] if stood else []
    parts = () if kind == "insufficient_data" else _price(cost, over=over, of=TRAINING)
    if not parts:
        return []
    share, seconds, *gain = parts
    at_most = "at most " if kind == "healthy" and not share.startswith("at most") else ""
    return [f"{at_most}{share}", seconds, *spent, *gain]


def _time_left(finding: Mapping[str, Any]) -> float | None:
    """The share of the time that steps would still take without the finding."""
    fixed = finding["cost"].get("if_fixed") or {}
    speedup = fixed.get("speedup")
    return round(1 / speedup, 4) if speedup and fixed.get("step_ms") and not is_stop(finding["kind"]) else None


def _confidence_text(confidence: float) -> str:
    levels = ((0.9, "nearly certain"), (0.75, "likely"), (0.5, "possible"))
    word = next((word for least, word in levels if confidence >= least), "a guess")
    return f"{word} ({confidence:.0%})"


# -- charts -----------------------------------------------------------------------------------------------------------
# Small charts of the evidence: bars, steps on a line, growing memory.

Chart = dict[str, Any]

MOST_BARS = 10
TRIVIAL = 0.02
"""Share of the longest bar below which a phase has none."""
COMPARED = {
    "Step time": ("after_ms", "before_ms"),
    "Step time, last and first": ("last_ms", "first_ms"),
    "Round trip": ("rtt_us", "others_rtt_us"),
    "Packets lost": ("loss_share", "others_loss_share"),
    "Link speed": ("speed_bps", "others_speed_bps"),
    "Communication": ("exposed_ms", "exchange_ms", "compute_ms"),
    "Device memory needed": ("needed_bytes", "used_bytes", "total_bytes"),
    "Device memory": ("peak_bytes", "typical_bytes", "total_bytes"),
    "Allocator": ("reserved_bytes", "peak_allocated_bytes", "total_bytes"),
    "Host memory": ("available_bytes", "total_bytes"),
    "CPU usage": ("cpu_percent", "own_cpu_percent"),
    "GPU utilization": ("util_percent", "lowest_percent", "highest_percent"),
    "Steps per second": ("steps_per_second_during", "steps_per_second_before"),
}
"""Two or three figures of the same kind to compare; the first is the one in question."""


def _charts(finding: Mapping[str, Any]) -> list[Chart]:
    kind, evidence = finding["kind"], finding["evidence"]
    found = [
        _by_rank(finding, evidence),
        _by_phase(evidence, "excess_ms_by_phase", "Longer than the others, by phase", _whole_text(evidence)),
        _by_phase(evidence, "extra_ms_by_phase", "Extra time, by phase", ""),
        _slow_steps(finding, evidence),
        _growth(finding, evidence),
        *(_compared(evidence, title, keys) for title, keys in COMPARED.items()),
    ]
    if kind == "healthy":
        found.append(_shares(evidence.get("opportunities"), "Possible gain, at most"))
    if kind == "compute_bound":
        found.append(_shares(evidence.get("shares"), "Share of the training time", phases=True))
    if kind.endswith("_bound"):
        found.append(_share(finding, evidence))
    return [chart for chart in found if chart is not None]


def _bar(name: str, value: float, text: str, tone: str = "plain", phase: str | None = None) -> dict[str, Any]:
    """``phase``: whose color it has."""
    return {"name": name, "value": value, "text": text, "tone": tone, "phase": phase}


def _bars(title: str, bars: Sequence[dict[str, Any]], note: str = "", **more: Any) -> Chart:
    """``more``: ``most``, the end of the scale; ``mark``, a line with its name."""
    return {"form": "bars", "title": title, "bars": list(bars), "note": note, "most": None, "mark": None, **more}


def _by_rank(finding: Mapping[str, Any], evidence: Mapping[str, Any]) -> Chart | None:
    figures = _numbers(evidence.get("median_ms_by_rank"))
    if len(figures) < 2:
        return None
    culprits = {str(rank) for rank in finding["ranks"]}
    shown = sorted(figures, key=lambda rank: (rank not in culprits, -figures[rank]))[:MOST_BARS]
    shown.sort(key=lambda rank: int(rank) if rank.isdecimal() else 0)
    left = len(figures) - len(shown)
    compared = evidence.get("compared", "time")
    peers = _number(evidence.get("peers_median_ms"))
    return _bars(
        "Median work per step, without the wait for others" if compared == "work" else f"Median {compared} per step",
        [
            _bar(f"rank {rank}", figures[rank], ms_text(figures[rank]), "culprit" if rank in culprits else "plain")
            for rank in shown
        ],
        f"and {left} more ranks" if left else "",
        mark=None if peers is None else {"value": peers, "name": f"median of the others: {ms_text(peers)}"},
    )


def _by_phase(evidence: Mapping[str, Any], key: str, title: str, note: str) -> Chart | None:
    figures = _numbers(evidence.get(key))
    least = TRIVIAL * max(map(abs, figures.values()), default=0.0)
    shown = sorted((name for name, ms in figures.items() if ms and abs(ms) >= least), key=lambda name: -figures[name])
    bars = [
        _bar(key_name(name) if name == "between" else name, figures[name], _signed(figures[name]), phase=_phase(name))
        for name in shown
    ]
    return _bars(title, bars, note) if bars else None


def _phase(name: str) -> str:
    return "other" if name == "between" else name


def _whole_text(evidence: Mapping[str, Any]) -> str:
    """The title has what fixing gains, a mean; phases are medians, and one may be shorter where another is longer."""
    gain, whole = _number(evidence.get("gain_ms")), _number(evidence.get("excess_ms"))
    if gain is not None:
        return f"medians. Fixing it gains {ms_text(gain)} per step on average, in all phases together"
    if whole is None or evidence.get("compared") != "work":
        return ""
    return f"total work: {_signed(whole)}. Phases are compared separately and may not add up to it"


def _compared(evidence: Mapping[str, Any], title: str, keys: Sequence[str]) -> Chart | None:
    known = [(key, value) for key in keys if (value := _number(evidence.get(key))) is not None]
    if len(known) < 2 or known[0][0] != keys[0]:
        return None
    bars = [
        _bar(key_name(key), value, figure_text(key, value), "plain" if at else "culprit")
        for at, (key, value) in enumerate(known)
    ]
    return _bars(title, bars, most=100 if keys[0].endswith("_percent") else None)


def _shares(value: Any, title: str, *, phases: bool = False) -> Chart | None:
    figures = _numbers(value)
    shown = sorted(figures, key=lambda name: -figures[name])[:MOST_BARS]
    bars = [
        _bar(name.replace("_", " "), figures[name], percent_text(figures[name]), "good", name if phases else None)
        for name in shown
    ]
    return _bars(title, bars) if bars else None


def _share(finding: Mapping[str, Any], evidence: Mapping[str, Any]) -> Chart | None:
    phase = finding["phase"]
    share = _number(evidence.get(f"{phase}_share"))
    if phase is None or share is None:
        return None
    low, high = _number(evidence.get("lowest_share")), _number(evidence.get("highest_share"))
    differ = low is not None and high is not None and low != high
    return _bars(
        "Share of the median rank’s time",
        [
            _bar(phase, share, percent_text(share), "culprit", phase),
            _bar("everything else", 1 - share, percent_text(1 - share)),
        ],
        f"from {percent_text(low or 0)} to {percent_text(high or 0)} across ranks" if differ else "",
        most=1,
    )


def _slow_steps(finding: Mapping[str, Any], evidence: Mapping[str, Any]) -> Chart | None:
    at = evidence.get("at_steps") or (evidence.get("steps_longer") if finding["kind"] == "stall" else None)
    steps = [step for step in at if _number(step) is not None] if isinstance(at, list | tuple) else []
    if not steps or not finding["steps"]:
        return None
    first, last = min(finding["steps"][0], *steps), max(finding["steps"][1], *steps)
    return (
        {"form": "strip", "title": "Slow steps", "steps": steps, "first": first, "last": last} if last > first else None
    )


def _growth(finding: Mapping[str, Any], evidence: Mapping[str, Any]) -> Chart | None:
    first, last, rate = (_number(evidence.get(key)) for key in ("first_bytes", "last_bytes", "bytes_per_step"))
    steps = finding["steps"]
    if first is None or last is None or rate is None or not steps or steps[1] <= steps[0]:
        return None
    start, end = (_number(evidence.get(key)) for key in ("first_step", "last_step"))
    start, end = steps[0] if start is None else start, steps[1] if end is None else end
    points = [[start, first], [end, last]]
    full = _number(evidence.get("runs_out_at_step"))
    ahead = full is not None and full > end
    if full is not None and ahead:
        points.append([full, last + (full - end) * rate])
    return {
        "form": "slope",
        "title": f"From {bytes_text(first)} to {bytes_text(last)}: {bytes_text(rate)} more per step",
        "points": points,
        "end": {"step": full, "text": f"runs out at step {full:,.0f}"} if ahead else None,
    }


def _signed(ms: float) -> str:
    return f"{'−' if ms < 0 else '+'}{ms_text(abs(ms))}"


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and math.isfinite(value) else None


def _numbers(value: Any) -> dict[str, float]:
    found = value.items() if isinstance(value, Mapping) else ()
    return {str(name): number for name, each in found if (number := _number(each)) is not None}


# -- documents --------------------------------------------------------------------------------------------------------

TWO_CHECKS = "A finding appears when two checks agree, and disappears when it no longer holds."


def finding_document(finding: Mapping[str, Any], *, over: bool) -> dict[str, Any]:
    """A finding with its ``text`` (docs/api.md). ``over``: whether the run is over."""
    checked = _checked(finding)
    past = over or isinstance(checked["evidence"].get("over"), str)
    name, meaning = _kind(checked["kind"], over=past)
    price = _price_parts(checked, over=over)
    text = {
        "look": finding_mark(checked),
        "kind": name,
        "meaning": meaning,
        "facts": _facts(checked, name),
        "confidence": _confidence_text(checked["confidence"]),
        "price": price,
        "time_left": _time_left(checked) if price else None,
        "evidence": evidence_rows(checked["evidence"]),
        "charts": _charts(checked),
    }
    return {**finding, "text": text}


def findings_document(rows: Any, verdict: Any, *, live: bool, over: bool) -> dict[str, Any]:
    """The findings of a run with their text.  ``rows`` and ``verdict``: of a summary or of a live run.

    ``live``: the rules still run; the verdict is the first finding in short, with its ``look``.
    """
    known = [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list | tuple) else []
    first = {**(known[0] if known else {}), **(verdict if isinstance(verdict, Mapping) else {})}
    return {
        "live": live,
        "verdict": {**verdict, "look": finding_mark(_checked(first))} if isinstance(verdict, Mapping) else None,
        "findings": [finding_document(row, over=over) for row in known],
    }


def judged_text(judged: Mapping[str, Any], findings: Sequence[Mapping[str, Any]]) -> str:
    """On which steps and ranks the findings of an active run are based."""
    first, step, ranks, of_ranks = (judged[key] for key in ("first_step", "step", "ranks", "of_ranks"))
    steps = f"data up to step {max(step, 0):,}" if first is None or first >= step else f"steps {first:,} to {step:,}"
    if any(finding["kind"].startswith("hang_") and finding["evidence"].get("over") is None for finding in findings):
        steps += ", the last that ended"
    whose = count_text(of_ranks, "rank") if ranks >= of_ranks else f"{ranks:,} of {count_text(of_ranks, 'rank')}"
    stopped = bool(findings) and is_stop(findings[0]["kind"])
    return f"Based on {steps}, {whose}.{'' if stopped else f' {TWO_CHECKS}'}"


def nothing_text(*, over: bool, ranks: int, world_size: int, steps: int, collecting: str = "") -> tuple[str, str]:
    """A headline and a sentence for a run without findings. ``collecting``: how many steps are still needed."""
    if not ranks and over:
        why = "the recorder was not loaded (python -I or -E, env -i, a container or ssh prevent it)"
        return "Nothing was recorded.", f"No process reported a step: the script has none, or {why}."
    if not ranks:
        return (
            "No rank has reported yet.",
            "Ranks report when their first step begins, after imports and the setup of process groups.",
        )
    who = f"{ranks:,} of {count_text(world_size, 'rank')}" if world_size > ranks else count_text(ranks, "rank")
    if not steps and over:
        return f"{who}, no steps.", "The recorder was loaded, but saw no training step."
    if not steps:
        return f"{who}, no steps yet.", "The first step is often slow: compilation, caches, the first batch."
    if over:
        return "Nothing was found.", f"The recorded steps of {who} show no problem."
    if collecting:
        reported = "Bottlenecks and slow ranks are reported once there are enough steps; hangs and crashes at once."
        return collecting, reported
    return "Nothing wrong so far.", TWO_CHECKS


def _facts(finding: Mapping[str, Any], name: str) -> list[str]:
    """Kind, ranks, phase and steps in short."""
    ranks, steps = finding["ranks"], finding["steps"]
    where = ""
    if steps:
        where = f"last complete step {steps[1]:,}" if finding["kind"] == "rank_crashed" else steps_text(*steps)
    kind = "" if finding["kind"] == "healthy" else name
    known = (kind, ranks_text(ranks) if ranks else "", finding["phase"] or "", where, *_counted(finding["evidence"]))
    return [fact for fact in known if fact]


def _counted(evidence: Mapping[str, Any]) -> tuple[str, str]:
    """Steps and epochs as the framework counts them."""
    logged, epochs = _two_numbers(evidence.get("logged_steps")), _two_numbers(evidence.get("epochs"))
    return f"logged as {steps_text(*logged)}" if logged else "", epochs_text(*epochs) if epochs else ""


def _two_numbers(value: Any) -> tuple[int, int] | None:
    known = isinstance(value, list | tuple) and len(value) == 2 and all(type(number) is int for number in value)
    return (value[0], value[1]) if known else None


def _checked(finding: Mapping[str, Any]) -> dict[str, Any]:
    """The finding with values of the right types: a summary may be from another version, or from anyone."""
    cost, evidence, ranks, steps = (finding.get(key) for key in ("cost", "evidence", "ranks", "steps"))
    two = isinstance(steps, list | tuple) and len(steps) == 2 and all(type(step) is int for step in steps)
    return {
        "kind": str(finding.get("kind", "")),
        "severity": next((known for known in SEVERITIES if known == finding.get("severity")), "info"),
        "ranks": [rank for rank in ranks if type(rank) is int] if isinstance(ranks, list | tuple) else [],
        "phase": finding["phase"] if isinstance(finding.get("phase"), str) else None,
        "steps": steps if two else None,
        "cost": _checked_cost(cost) if isinstance(cost, Mapping) else {},
        "evidence": evidence if isinstance(evidence, Mapping) else {},
        "confidence": _number(finding.get("confidence")) or 0.0,
    }


def _checked_cost(cost: Mapping[str, Any]) -> dict[str, Any]:
    fixed, least = cost.get("if_fixed"), cost.get("least")
    known = fixed if isinstance(fixed, Mapping) else {}
    numbers = {key: _number(cost.get(key)) for key in ("share", "seconds", "rank_hours", "most_share", "most_seconds")}
    lower = _checked_cost(least) if isinstance(least, Mapping) else None
    return {
        **numbers,
        "up_to": cost.get("up_to") is True,
        "if_fixed": {key: _number(known.get(key)) for key in ("step_ms", "speedup")},
        "least": lower if lower and lower["share"] is not None and lower["seconds"] is not None else None,
    }
