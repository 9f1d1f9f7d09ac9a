"""Bottlenecks that all ranks share: input_bound, h2d_bound, comm_bound, optimizer_bound, compute_bound.

``input_bound``, ``h2d_bound``, ``comm_bound`` and ``optimizer_bound`` are one rule with different numbers: a phase
takes at least a given share of the median rank's time, in at least half of the run's stretches, and more than is
natural for it in Python.  ``compute_bound`` is never a warning: it is what training should be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.claims import least_step_ns
from stepscope.diagnosis.engine.code_location import seen_at
from stepscope.diagnosis.engine.communication import DDP_OP
from stepscope.diagnosis.engine.processor_wait import without_waiting
from stepscope.diagnosis.engine.readings import host_readings, in_steady_steps, process_readings
from stepscope.diagnosis.engine.samples import number, numbers, of_kind
from stepscope.diagnosis.engine.settings import (
    accumulation_setting,
    autocast_setting,
    compile_setting,
    compression_setting,
    copy_setting,
    ddp_setting,
    frameworks_of,
    fsdp_bytes_advice,
    fsdp_offload_advice,
    fsdp_prefetch_advice,
    fsdp_units_advice,
    fused_setting,
    loader_name,
    loader_setting,
    runs_own_loop,
    unused_parameters_advice,
)
from stepscope.diagnosis.engine.view import (
    TimeShare,
    View,
    cost_of,
    epoch_starts,
    in_lockstep,
    is_even,
    lower_median_rank,
    ordinary_steps,
    stretches_with,
    time_share_of,
)
from stepscope.diagnosis.rules.communication import between_stages, bubble_share, exchanges_of
from stepscope.diagnosis.rules.overlap import SHARDED
from stepscope.judge import thresholds
from stepscope.judge.advice import advice_for, say
from stepscope.judge.chain import Claim
from stepscope.judge.statistics import longest, mean_rank, shortest
from stepscope.records.finding import Finding, as_remark
from stepscope.records.steps import COMM_HOOK_PHASE, COMPUTE_PHASES, GRAPH_PHASE
from stepscope.records.text import bytes_text, count_text, ms_text, share_text

__all__ = ["find_bounds", "find_compute_bound", "less_compute_advice", "waited_for_network"]


# -- advice -----------------------------------------------------------------------------------------------------------
# What to do about a bottleneck that all ranks share: sentences chosen by the facts about the live objects.
#
# Facts come from the recorder (``RankSeries.facts``) and any of them may be missing; then the sentence names the
# setting without its present value.

Floats = NDArray[np.float64]


WORKERS_ADVICE = (
    say("The waits come when an epoch starts: {keep}=True keeps the DataLoader's workers.", epoch_starts=True),
    say(
        "The CPUs are already busy; more workers will not help: cache decoded data or do less per sample.",
        no_cores=True,
    ),
    say("The batch is made in the training process itself{seen}: let {how} do it in parallel.", in_process=True),
    say("The workers compute all the time: raise {more}{up_to}, or do less per sample.", workers_do="compute"),
    say(
        "The workers wait for storage: a local copy, larger files, or more of them ({more}).",
        workers_do="wait for storage",
    ),
    say(
        "Every step waits: raise {more}{up_to}; if that does not help, see what workers wait for.",
        every_step=True,
    ),
    say("Workers fall behind in bursts: raise {more}{up_to}, then {ahead}."),
)
"""``every_step``: each step waits about as long; else some steps wait long and most hardly at all."""
BATCHES_ADVICE = (
    say("{pin}=True and .to(device, non_blocking=True) hide the copy behind the computation.", copies=True),
    say("Find the slow part of the dataset's __getitem__: decoding, augmentation, opening files."),
)


def input_advice(view: View, shared_ns: Floats) -> tuple[str, ...]:
    waits = shared_ns[~np.isnan(shared_ns)]
    starts = epoch_starts(view)[~np.isnan(shared_ns)]
    at_starts = float(waits[starts].sum() / waits.sum()) if waits.sum() else 0.0
    _, hosts = host_readings(view)
    workers_share = worker_cpu_share(view)
    io_pressure = _known(hosts.of("io_pressure"))
    waits_for_io = bool(len(io_pressure)) and float(np.median(io_pressure)) >= thresholds.WORKER_IO_PRESSURE
    workers_do = None
    if workers_share is not None and workers_share >= thresholds.WORKER_BUSY_SHARE:
        workers_do = "compute"
    elif workers_share is not None and waits_for_io:
        workers_do = "wait for storage"
    loader, frameworks = _facts(view, "loader"), frameworks_of(view.facts)
    every_step, workers = is_even(waits), loader.get("num_workers")
    counted = isinstance(workers, int)
    in_process = workers == 0 if counted else every_step and bool(_main_busy(view))
    cores = _cores_each(view, numbers(of_kind(view.window.samples, "host"), "cpu_count"))
    settled = counted and (workers == 0 or loader.get("persistent_workers") is True)
    name = loader_name(frameworks, "num_workers")
    facts = {
        "epoch_starts": at_starts >= thresholds.EXPLAINS_SHARE and not settled,
        "keep": loader_name(frameworks, "persistent_workers"),
        "no_cores": _saturated(_known(hosts.of("cpu_percent")), _known(hosts.of("own_cpu_percent")))
        and not (in_process and cores and cores > 1),
        "in_process": in_process,
        "seen": " (num_workers=0)" if workers == 0 else "",
        "how": f"DataLoader workers ({name})"
        if cores is None  # a first try leaves a core to the training process itself
        else loader_setting(frameworks, "num_workers", max(1, min(thresholds.FIRST_WORKERS, cores - 1))),
        "workers_do": workers_do,
        "every_step": every_step,
        "more": f"{name} from {workers}" if counted else name,
        "up_to": "" if cores is None else f" (a process has about {count_text(cores, 'core')} here)",
        "ahead": loader_name(frameworks, "prefetch_factor"),
        "copies": view.clock == "device" and loader.get("pin_memory") is not True,
        "pin": loader_name(frameworks, "pin_memory"),
    }
    return *advice_for(WORKERS_ADVICE, **facts), *advice_for(BATCHES_ADVICE, **facts)


def worker_cpu_share(view: View) -> float | None:
    """CPU time that a DataLoader worker takes, as a share of one core; None without workers or samples."""
    workers = number(_facts(view, "loader"), "num_workers")
    _, hosts = host_readings(view)
    own_percent, cores = _known(hosts.of("own_cpu_percent")), _known(hosts.of("cpu_count"))
    used = process_readings(view).of("cpu_percent")
    if not workers or not len(own_percent) or not len(cores) or not len(_known(used)):
        return None
    of_ranks = float(np.nanmedian(used)) / 100 * len(view.ranks)
    of_job = float(np.median(own_percent)) / 100 * float(np.median(cores)) * len(set(view.hosts))
    return max(of_job - of_ranks, 0.0) / (workers * len(view.ranks))


def h2d_advice(view: View, _: Floats) -> tuple[str, ...]:
    pinned, frameworks = _facts(view, "loader").get("pin_memory"), frameworks_of(view.facts)
    pin, copy = loader_setting(frameworks, "pin_memory", True), copy_setting(frameworks)
    fewer = "Send fewer bytes: uint8 images converted on the device, lengths instead of masks."
    if pinned is False:
        first = f"The DataLoader has pin_memory=False: copies from pageable memory block; set {pin}"
        if not copy:
            return f"{first}.", fewer
        return f"{first} …", f"… and copy with {copy}, so that the next copy overlaps with the computation."
    if runs_own_loop(frameworks):
        ways = " and ".join(filter(None, ("" if pinned else pin, copy)))
        return (f"{ways}: then copies overlap with the computation.", fewer) if ways else (fewer,)
    return f"Copy with {copy} from pinned memory; a second stream for the next batch hides it.", fewer


def comm_advice(view: View, _: Floats) -> tuple[str, ...]:
    ddp, model, fsdp = _facts(view, "ddp"), _facts(view, "model"), _fsdp_facts(view)
    frameworks = frameworks_of(view.facts)
    lines = [*fsdp_units_advice(fsdp), *fsdp_bytes_advice(fsdp), *fsdp_offload_advice(fsdp)]
    if fsdp:
        lines += [] if len(lines) > 1 else fsdp_prefetch_advice(fsdp)
    else:
        lines += unused_parameters_advice(ddp)
    gradient_mb, bucket_mb = number(ddp, "gradient_mb"), number(ddp, "bucket_mb")
    if gradient_mb and bucket_mb and gradient_mb >= thresholds.SMALL_BUCKET_MB:
        if gradient_mb / bucket_mb < thresholds.FEW_BUCKETS:
            lines.append(
                f"{gradient_mb:.0f} MB of gradients in buckets of {bucket_mb:.0f} MB leave nothing to send while "
                f"backward still runs: try {ddp_setting(frameworks, 'bucket_cap_mb', max(1, round(gradient_mb / 4)))}."
            )
        elif bucket_mb < thresholds.SMALL_BUCKET_MB:
            lines.append(f"Buckets of {bucket_mb:.1f} MB are all latency: leave bucket_cap_mb at 25 or above.")
    if number(model, "sync_batchnorm"):
        lines.append(
            f"{model['sync_batchnorm']} SyncBatchNorm layers exchange statistics in every forward: plain BatchNorm or "
            "GroupNorm does not."
        )
    lines += [] if fsdp else _smaller_exchange_advice(view)
    lines.append(
        "All ranks wait equally, so no rank is to blame: look at the links between the hosts."
        if len(set(view.hosts)) > 1
        else "All ranks wait equally and share one host: neither a rank nor a network is to blame."
    )
    return tuple(lines[:3])


def _smaller_exchange_advice(view: View) -> Iterator[str]:
    """How to exchange less, depending on what is exchanged; FSDP's settings are covered elsewhere."""
    rows, frameworks = exchanges_of(view), frameworks_of(view.facts)
    kind = rows[0]["kind"] if rows else "data"
    if kind == "tensor":
        yield (
            "Tensor parallelism exchanges in every layer: keep its groups within a host, or make them smaller and use "
            "more data parallelism."
        )
    elif rows and rows[0]["op"] == "all_to_all":
        yield (
            "An all_to_all is part of each layer that has one: keep its group within a host, or smaller, and start it "
            "before work that does not need its result."
        )
    elif kind in ("context", "expert"):
        yield f"Ranks of a {kind}-parallel group exchange in every layer: keep the group within a host, or smaller."
    elif "deepspeed" in frameworks:
        yield (
            'DeepSpeed config: "overlap_comm": true hides the exchange behind backward, a larger "reduce_bucket_size" '
            "needs fewer calls, and a lower ZeRO stage gathers less."
        )
        yield from _accumulation_advice(view)
    elif _facts(view, "ddp"):
        yield from _accumulation_advice(view)
        yield f"Send bfloat16 ({compression_setting(frameworks)}), or use larger batches."
    else:
        yield from _accumulation_advice(view)
        yield "Send fewer bytes (bfloat16 gradients), or use larger batches."


def _accumulation_advice(view: View) -> Iterator[str]:
    """That gradients can be accumulated; nothing if they already are."""
    frameworks = frameworks_of(view.facts)
    if view.accumulates:
        return
    setting = accumulation_setting(frameworks)
    if setting is None:
        setting = "all but the last backward under model.no_sync()" if _facts(view, "ddp") else ""
    how = f": {setting}" if setting else ""
    yield f"Accumulate gradients over several batches, so that they are exchanged less often{how}."


HOOK_ADVICE = (
    "DDP calls it for every bucket of every step, on all ranks: no sleeping, printing, .item() or files in it.",
    "Without register_comm_hook() DDP averages gradients itself; bf16_compress_hook halves the bytes.",
)


def hook_advice(view: View, _: Floats) -> tuple[str, ...]:
    return HOOK_ADVICE


def optimizer_advice(view: View, _: Floats) -> tuple[str, ...]:
    optimizer = _facts(view, "optimizer")
    name = optimizer.get("class") or "the optimizer"
    frameworks = frameworks_of(view.facts)
    lines = [*fsdp_offload_advice(_facts(view, "fsdp"))]
    if optimizer.get("fused") is not True:
        lines.append(f"{name} does not run fused: {fused_setting(frameworks)} updates all tensors in a few kernels.")
    if optimizer.get("foreach") is False:
        lines.append("foreach=False updates one tensor after the other: remove it.")
    if not view.accumulates:
        setting = accumulation_setting(frameworks)
        how = f": {setting}" if setting else ""
        lines.append(f"Accumulate gradients over several batches, so that it runs less often{how}.")
    if _facts(view, "ddp") and len(view.ranks) > 1:
        lines.append("Every rank updates all parameters: ZeroRedundancyOptimizer shares that among them.")
    return tuple(lines) or ("Larger batches need fewer updates.",)


def compute_advice(view: View) -> tuple[str, ...]:
    """Means of faster computation that are not used yet."""
    model, optimizer, facts = _facts(view, "model"), _facts(view, "optimizer"), view.facts
    on_device, frameworks = view.clock == "device", frameworks_of(facts)
    lines = []
    if on_device and facts and facts.get("autocast") is None and model.get("dtype") in (None, "float32"):
        lines.append(f"The model computes in float32: {autocast_setting(frameworks)} uses the tensor cores.")
    if model.get("compiled") is False and not view.compiled:
        lines.append(f"The model is not compiled: {compile_setting(frameworks)} fuses its small kernels.")
    if on_device and optimizer and optimizer.get("fused") is not True:
        own = fused_setting(frameworks) if frameworks else f"{optimizer.get('class') or 'The optimizer'}(fused=True)"
        lines.append(f"{own} takes fewer kernels.")
    if on_device and facts.get("tf32") is False:
        lines.append('torch.set_float32_matmul_precision("high") lets float32 products use TF32.')
    lines.append(less_compute_advice(view))
    return tuple(lines[:2])


def less_compute_advice(view: View) -> str:
    """Means of computing less, without those that the run uses."""
    model, facts = _facts(view, "model"), view.facts
    narrow = facts.get("autocast") is not None or model.get("dtype") not in (None, "float32")
    ways = [*([] if narrow else ["autocast"]), *([] if view.compiled else ["torch.compile"]), "a larger batch"]
    return f"Faster from here means less compute per sample: {', '.join(ways)}."


def _fsdp_facts(view: View) -> Mapping[str, Any]:
    """The facts about FSDP; {} if the ranks wait for something else: tensor parallelism, say."""
    rows = exchanges_of(view)
    if rows and rows[0]["op"] not in SHARDED and rows[0]["kind"] != "data":
        return {}
    return _facts(view, "fsdp")


def _facts(view: View, name: str) -> Mapping[str, Any]:
    facts = view.facts.get(name)
    return facts if isinstance(facts, dict) else {}


def _saturated(percent: Floats, own_percent: Floats) -> bool:
    """Whether the job itself has used up the CPUs; load of unknown origin counts as the job's."""
    if not len(percent) or np.median(percent) < thresholds.BUSY_CPU_PERCENT:
        return False
    return not len(own_percent) or bool(np.median(own_percent) >= thresholds.CPU_OTHERS_SHARE * np.median(percent))


def _main_busy(view: View) -> bool | None:
    """Whether the training processes themselves were busy all the time; None without samples of them."""
    readings = process_readings(view)
    used, wall_ns = readings.of("cpu_percent"), readings.of("wall_ns")
    steady = [in_steady_steps(view.window, (int(row),), wall_ns[at]) for at, row in enumerate(view.rows)]
    known = _known(used[np.array(steady, np.bool_).reshape(used.shape)])
    return float(np.median(known)) >= thresholds.BUSY_PROCESS_PERCENT if len(known) else None


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def _cores_each(view: View, counts: list[float]) -> int | None:
    """Cores of the smallest host divided by the ranks on the fullest one."""
    ranks = Counter(view.window.hosts)
    return max(1, int(min(counts)) // max(ranks.values())) if counts and ranks else None


# -- rules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Rule:
    kind: str
    phase: str
    share: float
    critical: float
    floor_ns: float
    words: str
    """How the title begins."""
    advice: Callable[[View, Floats], tuple[str, ...]]
    """Takes the view and the phase's time in each step [S]."""


BOUND_RULES = (
    _Rule(
        kind="input_bound",
        phase="input",
        share=thresholds.INPUT_SHARE,
        critical=thresholds.INPUT_CRITICAL_SHARE,
        floor_ns=thresholds.INPUT_FLOOR_NS,
        words="Training waits for input:",
        advice=input_advice,
    ),
    _Rule(
        kind="h2d_bound",
        phase="h2d",
        share=thresholds.H2D_SHARE,
        critical=thresholds.INPUT_CRITICAL_SHARE,
        floor_ns=thresholds.H2D_FLOOR_NS,
        words="Copies to the device take",
        advice=h2d_advice,
    ),
    _Rule(
        kind="comm_bound",
        phase="comm",
        share=thresholds.COMM_SHARE,
        critical=thresholds.COMM_CRITICAL_SHARE,
        floor_ns=thresholds.COMM_FLOOR_NS,
        words="All ranks wait for the network:",
        advice=comm_advice,
    ),
    _Rule(
        kind="comm_hook_bound",
        phase=COMM_HOOK_PHASE,
        share=thresholds.COMM_HOOK_SHARE,
        critical=thresholds.COMM_HOOK_CRITICAL_SHARE,
        floor_ns=thresholds.COMM_HOOK_FLOOR_NS,
        words="DDP's communication hook takes",
        advice=hook_advice,
    ),
    _Rule(
        kind="optimizer_bound",
        phase="optimizer",
        share=thresholds.OPTIMIZER_SHARE,
        critical=thresholds.OPTIMIZER_CRITICAL_SHARE,
        floor_ns=thresholds.OPTIMIZER_FLOOR_NS,
        words="The optimizer takes",
        advice=optimizer_advice,
    ),
)


STACKS_WERE_THERE = "the sampled stacks were there"


def find_bounds(view: View, network: Sequence[Claim] = (), rare: Sequence[Claim] = ()) -> list[Claim]:
    """``network``: already explained waits of all ranks; ``rare``: steps that are occasionally long.

    A step that is occasionally long in a phase says nothing about the phase in the other steps.
    """
    unknown = {"h2d"} if view.hides_device else set()
    if all(view.window.identities[row].world_size <= 1 for row in view.rows):
        unknown.add("comm")  # DDP with one process has no peers: what it reports is its own work
    rules = [rule for rule in BOUND_RULES if rule.phase in view.phases and rule.phase not in unknown]
    claims = [claim for rule in rules if (claim := _apply(view, rule, network, rare)) is not None]
    calm = without_waiting(view)
    if calm is None:
        return claims
    # While ranks wait for a processor and for each other, the share of everything else is small.
    known = {claim.finding.phase for claim in claims}
    hidden = [_apply(calm, rule, network, rare, view) for rule in rules if rule.phase not in known]
    return [*claims, *(replace(claim, finding=as_remark(claim.finding)) for claim in hidden if claim is not None)]


def waited_for_network(view: View, known: Sequence[Claim]) -> Floats | None:
    """[S]; what all ranks wait for the network, if that is much of the step; ``known``: claims that explain a part."""
    rule = next(rule for rule in BOUND_RULES if rule.phase == "comm")
    alone = all(view.window.identities[row].world_size <= 1 for row in view.rows)
    claim = None if alone or rule.phase not in view.phases else _apply(view, rule, known, ())
    return claim.explained_ns if claim is not None and claim.finding.kind == rule.kind else None


def _apply(
    view: View, rule: _Rule, network: Sequence[Claim], rare: Sequence[Claim], passed: View | None = None
) -> Claim | None:
    """``passed``: the view of the time that really passed, if ``view`` is without the wait for a processor."""
    passed = passed or view
    used, epoch_starts_count = ordinary_steps(view)
    for claim in rare:
        if claim.finding.phase == rule.phase:
            used &= ~(claim.explained_ns > 0)
    durations_ns = _durations(view, rule, network)
    if len(view.ranks) > 1 and not view.in_group:
        durations_ns = np.broadcast_to(_of_step(view, durations_ns), durations_ns.shape)
    part = time_share_of(view, durations_ns, used)
    if part.share < rule.share or part.mean_ns < rule.floor_ns:
        return None
    shared_ns = lower_median_rank(durations_ns)
    if stretches_with(shared_ns[used], view.step_ns[used], rule.share) < thresholds.BOTTLENECK_SHARE:
        return None
    saved_ns = _everywhere(_saved(view, rule, durations_ns, shared_ns), used)
    taken_share = cost_of(passed, saved_ns)["share"]
    if view.comm_measured:
        saved_ns = np.minimum(saved_ns, view.step_ns - least_step_ns(view, rule.phase))
    # It can never be removed completely; how much depends on what is done.
    cost = {**cost_of(passed, saved_ns), "up_to": True}
    finite = part.by_rank[~np.isnan(part.by_rank)]
    exchanges = exchanges_of(view) if rule.phase == "comm" else []
    place = seen_at(view, phase=rule.phase) if rule.phase in ("input", COMM_HOOK_PHASE) else ""
    if rule.phase == "comm" and between_stages(view):
        return _bubble(view, part, saved_ns, shared_ns[used], exchanges)
    hook = _hook_of(view, rule, exchanges)
    where = f", mostly in {place}" if place else _mostly(exchanges, part.mean_ns)
    if hook:
        place = place or hook
        where = f", mostly in {place}" if rule.phase == COMM_HOOK_PHASE else f"{where}, far more than its bytes need"
        where += f"; DDP's communication hook ({hook}) runs in it" if rule.phase == "comm" else ""
    finding = Finding(
        kind="comm_hook_bound" if hook else rule.kind,
        severity="critical" if part.share >= rule.critical else "warning",
        title=(
            f"{_words(view, rule)} {ms_text(part.mean_ns / 1e6)} {_how_often(shared_ns[used])}, "
            f"{share_text(taken_share)} of the training time{_gainable(taken_share, cost['share'])}{where}."
        ),
        phase=rule.phase,
        steps=view.span,
        cost=cost,
        evidence={
            "clock": view.clock,
            f"{rule.phase}_share": round(part.share, 4),
            f"{rule.phase}_ms_per_step": round(part.mean_ns / 1e6, 3),
            "taken_share": round(taken_share, 4),
            "lowest_share": round(float(finite.min()), 4),
            "highest_share": round(float(finite.max()), 4),
            "step_ms": round(view.median_step_ns / 1e6, 3),
            "steps_used": int(used.sum()),
            "epoch_starts_included": epoch_starts_count,
            **({"worker_cpu_share": _rounded(worker_cpu_share(view))} if rule.phase == "input" else {}),
            **({"place": place or None} if hook or rule.phase in ("input", COMM_HOOK_PHASE) else {}),
            **({"exchanges": exchanges} if exchanges else {}),
        },
        advice=(
            *([f"Look at {place}: {'the hook is there' if place == hook else STACKS_WERE_THERE}."] if place else []),
            *(hook_advice if hook else rule.advice)(view, np.where(used, shared_ns, np.nan)),
        ),
        confidence=0.95 if len(view.steps) >= 3 * thresholds.MIN_STEPS else 0.8,
    )
    return Claim(finding=finding, explained_ns=saved_ns)


def _hook_of(view: View, rule: _Rule, exchanges: Sequence[dict[str, Any]]) -> str:
    """The script's communication hook, if it is what takes the time: ``compress, train.py:40``.

    Its own time is a phase.  What it appends to the exchange (``then``) is part of the wait: on one host, an exchange
    that takes many times what its bytes need contains more than the transfer.
    """
    hook = _facts(view, "ddp").get("comm_hook")
    if not isinstance(hook, str) or rule.phase not in ("comm", COMM_HOOK_PHASE):
        return ""
    if rule.phase == COMM_HOOK_PHASE:
        return hook
    reduced = next((row for row in exchanges if row["op"] == DDP_OP), None)
    if reduced is None or len(set(view.hosts)) > 1:
        return ""
    buckets = max(number(_facts(view, "ddp"), "buckets") or 1, 1)
    needed_ns = (
        reduced["bytes_per_step"] / thresholds.EXCHANGE_BYTES_PER_S * 1e9 + buckets * thresholds.EXCHANGE_START_NS
    )
    return hook if reduced["ms_per_step"] * 1e6 >= thresholds.EXCHANGE_TIMES * needed_ns else ""


def _gainable(taken_share: float, share: float) -> str:
    """What of it can be gained at most, where the step would wait for something else instead."""
    return f" ({share_text(share)} can be gained)" if share < thresholds.GAINABLE_SHARE * taken_share else ""


def _words(view: View, rule: _Rule) -> str:
    if rule.phase == "comm" and len(set(view.hosts)) == 1:
        return "All ranks wait for the exchange:"
    return rule.words


def _bubble(view: View, part: TimeShare, saved_ns: Floats, shared_ns: Floats, exchanges: list[dict[str, Any]]) -> Claim:
    """Pipeline stages that wait for each other: while the pipeline fills and drains, some are idle.

    Even stages wait too; that part is due to the schedule, and not a fault.
    """
    least = bubble_share(view)
    finding = Finding(
        kind="pipeline_bubble",
        severity="warning" if least is None or part.share >= least + thresholds.BUBBLE_SLACK else "info",
        title=(
            f"Pipeline stages wait for each other: {ms_text(part.mean_ns / 1e6)} {_how_often(shared_ns)}, "
            f"{share_text(part.share)} of the training time"
            f"{'' if least is None else f' ({share_text(least)} if all were even)'}."
        ),
        phase="comm",
        steps=view.span,
        cost={**cost_of(view, saved_ns), "up_to": True},
        evidence={
            "clock": view.clock,
            "comm_share": round(part.share, 4),
            "comm_ms_per_step": round(part.mean_ns / 1e6, 3),
            "even_share": None if least is None else round(least, 4),
            "stages": len(np.unique(view.groups)),
            "step_ms": round(view.median_step_ns / 1e6, 3),
            "exchanges": exchanges,
            "steps_used": len(shared_ns),
        },
        advice=(
            "Split the batch into more microbatches: filling and draining it then takes a smaller share of each step.",
            "An interleaved schedule (several smaller stages per rank) or a zero-bubble one leaves less idle time.",
        ),
        confidence=0.8,
    )
    return Claim(finding=finding, explained_ns=saved_ns)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _how_often(shared_ns: Floats) -> str:
    return "of every step" if is_even(shared_ns) else "a step on average"


def _durations(view: View, rule: _Rule, network: Sequence[Claim]) -> Floats:
    """[R, S]; for communication only what every rank has: the rest is waiting for a rank, not for the network."""
    durations_ns = view.phase(rule.phase)
    if rule.phase != "comm" or len(view.ranks) < 2:
        return durations_ns
    left_ns = shortest(durations_ns)
    for claim in network:
        left_ns = np.maximum(left_ns - claim.explained_ns, 0.0)
    return np.where(np.isnan(durations_ns), np.nan, left_ns)


def _of_step(view: View, durations_ns: Floats) -> Floats:
    """[S]; of processes that share no group, what is part of the step's length: each loses what it has itself."""
    if in_lockstep(view.wall_ns):
        return mean_rank(durations_ns)
    longest_at = np.nanargmax(view.wall_ns, axis=0)
    return np.asarray(durations_ns[longest_at, np.arange(len(view.steps))], np.float64)


def _mostly(exchanges: Sequence[dict[str, Any]], mean_ns: float) -> str:
    """The operation that takes most of it, if one does."""
    if not exchanges or exchanges[0]["ms_per_step"] < thresholds.EXPLAINS_SHARE * mean_ns / 1e6:
        return ""
    most = exchanges[0]
    size = f" of {bytes_text(most['bytes_per_step'])}" if most["bytes_per_step"] else ""
    where = f" in group {most['group']} ({most['kind']})" if most["group"] else ""
    return f", mostly in {most['op']}{size}{where}"


def _saved(view: View, rule: _Rule, durations_ns: Floats, shared_ns: Floats) -> Floats:
    """[S]; the saving without it: by replay if waits are measured, else what the median rank has of it."""
    if view.comm_measured and rule.phase != "comm":
        return longest(view.work_ns) - longest(view.work_ns - durations_ns)
    return shared_ns


def _everywhere(saved_ns: Floats, used: NDArray[np.bool_]) -> Floats:
    """[S]; for steps that say nothing about it (the longest, epoch starts) at most the average of the others.

    They wait like the others; other rules report what they have beyond that.
    """
    return np.where(used, saved_ns, np.minimum(saved_ns, saved_ns[used].mean()))


def find_compute_bound(view: View) -> list[Claim]:
    """Forward, backward and optimizer take nearly all of the step: reported along with ``healthy``."""
    if not view.enough:
        return []
    used, _ = ordinary_steps(view)
    durations_ns = np.sum([view.phase(name) for name in COMPUTE_PHASES], axis=0)
    part = time_share_of(view, durations_ns, used)
    if part.share < thresholds.COMPUTE_SHARE:
        return []
    names = [name for name in COMPUTE_PHASES if name != GRAPH_PHASE or name in view.phases]
    by_phase: dict[str, Any] = {name: round(time_share_of(view, view.phase(name), used).share, 4) for name in names}
    graphed = by_phase.get(GRAPH_PHASE, 0.0)
    what = "forward, backward and optimizer" if part.share - graphed >= thresholds.OPPORTUNITY_SHARE else ""
    what = " and ".join(filter(None, (what, "replays of a CUDA graph" if graphed else "")))
    finding = Finding(
        kind="compute_bound",
        severity="info",
        title=f"Most of the time is spent on training itself: {what} take {share_text(part.share)}.",
        steps=view.span,
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence={
            "clock": view.clock,
            "compute_share": round(part.share, 4),
            "shares": by_phase,
            "step_ms": round(view.median_step_ns / 1e6, 3),
            "steps_used": int(used.sum()),
        },
        advice=compute_advice(view),
        confidence=0.9,
    )
    return [Claim(finding=finding, explained_ns=np.zeros(len(view.steps)))]
