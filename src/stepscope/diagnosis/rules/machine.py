"""Machine findings in the steady steps: idle or throttled GPUs, saturated CPUs, hosts that run out of memory.

These say why a rank may be slow; the rules about time say what it costs, so nothing is priced here.  The samples used
are about a second apart: a short run has a handful.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.readings import (
    Gpu,
    Readings,
    gpu_readings,
    host_readings,
    process_readings,
    row_medians,
)
from stepscope.diagnosis.engine.view import View, cost_of
from stepscope.diagnosis.rules.off_cpu_advice import OFF_CPU_ADVICE
from stepscope.judge import thresholds
from stepscope.judge.advice import advice_for, say
from stepscope.judge.chain import Claim
from stepscope.judge.statistics import peer_deviation
from stepscope.records.finding import Finding, Severity
from stepscope.records.steps import COMPUTE_PHASES
from stepscope.records.text import bytes_text, count_text, cpus_text, ms_text, number_text, share_text

__all__ = ["BusyProcess", "busy_processes", "find_machine", "others_fill"]


# -- GPUs -------------------------------------------------------------------------------------------------------------
# GPUs that are idle, and GPUs that are throttled by heat, power or their clocks.

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
THERMAL = frozenset({"sw_thermal", "hw_thermal"})
THROTTLE_CAUSES = {
    "hw_thermal": "by its temperature",
    "sw_thermal": "by its temperature",
    "hw_power_brake": "by the power supply's brake",
    "hw_slowdown": "by its hardware",
}
HELD_BACK = frozenset(THROTTLE_CAUSES)
"""Reasons that no healthy GPU has; a software power cap is normal under load."""
NO_REASONS: frozenset[str] = frozenset()
GPUS_LISTED = 16
"""Maximum number of GPUs named in the evidence."""
UTILIZATION_ADVICE = (
    say(
        "The host cannot launch work fast enough: a larger batch, torch.compile, CUDA graphs, a fused optimizer.",
        phase=None,
    ),
    say(
        "It waits for data: DataLoader(num_workers=…), pin_memory=True, prefetch_factor; see the time in input.",
        phase="input",
    ),
    say(
        "It waits for copies: pin_memory=True and .to(device, non_blocking=True), or fewer, larger copies.",
        phase="h2d",
    ),
    say("It waits for other ranks or the network: see whether one of them is late.", phase="comm"),
    say("It waits during evaluation: a larger batch there, under torch.no_grad(), or less often.", phase="eval"),
    say(
        "It waits for checkpoints: less often, or torch.distributed.checkpoint.async_save.",
        phase="checkpoint",
    ),
    say(
        "It waits for Python between the phases: .item(), .cpu(), printing and logging in every step, metrics.",
        phase="other",
    ),
    say("It waits for the phase {phase!r}: take it out of the step."),
)
"""``phase``: the host's, in which the GPU is idle."""
THROTTLING_ADVICE = (
    say(
        "It is too hot: airflow, fans, dust, neighbors in its chassis; nvidia-smi -q -d TEMPERATURE,PERFORMANCE.",
        "Until then, exclude the GPU: in a synchronous job all ranks run at its pace.",
        thermal=True,
    ),
    say(
        "The machine's power supply held it back (hardware brake): power cables, supply, rack limits.",
        power_brake=True,
    ),
    say(
        "It runs at its power limit: compare power_limit_w between the GPUs (nvidia-smi -pl sets it).",
        power_cap=True,
    ),
    say(
        "Compare it with its peers: nvidia-smi -q -d CLOCK,PERFORMANCE (locked clocks, power limit, ECC, another job).",
    ),
)
PHASE_WORDS = {
    "input": "waiting for input",
    "h2d": "copying to the device",
    "comm": "waiting for other ranks or the network",
    "eval": "evaluation",
    "checkpoint": "checkpointing",
    "other": "work outside model and optimizer",
}


def find_gpus(view: View) -> list[Claim]:
    gpus, readings = gpu_readings(view)
    if not gpus:
        return []
    return [*_idle(view, gpus, readings), *_throttled(view, gpus, readings)]


# -- idle GPUs --------------------------------------------------------------------------------------------------------


def _idle(view: View, gpus: list[Gpu], readings: Readings) -> list[Claim]:
    used = readings.of("util_percent")
    enough = (~np.isnan(used)).sum(axis=1) >= thresholds.UTILIZATION_SAMPLES
    if not enough.any():
        return []
    by_gpu = row_medians(used[enough])
    typical = float(np.median(by_gpu))
    if typical >= thresholds.UTILIZATION_LOW_PERCENT:
        return []
    phase, share = _waited_for(view)
    seen = share >= thresholds.WAITED_FOR_SHARE
    waits = (
        f", while {PHASE_WORDS.get(phase, f'the phase {phase!r}')} takes {share_text(share)} of the step"
        if seen
        else ""
    )
    who = "The GPU is" if len(gpus) == 1 else "The GPUs are"
    finding = Finding(
        kind="low_gpu_utilization",
        severity="warning" if seen and typical < thresholds.UTILIZATION_WARNING_PERCENT else "info",
        title=f"{who} busy only {typical:.0f}% of the time{waits}.",
        phase=phase if seen else None,
        steps=view.span,
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence={
            "util_percent": round(typical, 1),
            "lowest_percent": round(float(by_gpu.min()), 1),
            "highest_percent": round(float(by_gpu.max()), 1),
            "gpus": int(enough.sum()),
            "samples": int((~np.isnan(used)).sum(axis=1).max()),
            "largest_host_phase": phase,
            "largest_host_share": round(share, 4),
        },
        advice=advice_for(UTILIZATION_ADVICE, phase=phase if seen else None),
        confidence=0.9,
    )
    return [Claim(finding=finding, explained_ns=np.zeros(len(view.steps)))]


def _waited_for(view: View) -> tuple[str, float]:
    """The non-training phase that takes most of the host's time, and its share; host times on any clock."""
    wall = view.window.wall_ns[np.ix_(view.rows, view.columns)]
    total = float(np.nansum(wall)) or 1.0
    shares = {
        name: float(np.nansum(plane[np.ix_(view.rows, view.columns)])) / total
        for name, plane in zip(view.window.phases, view.window.phase_ns, strict=True)
        if name not in COMPUTE_PHASES
    }
    return max(shares.items(), key=lambda item: item[1], default=("", 0.0))


# -- throttled GPUs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Clocks:
    """By GPU [G]."""

    throttled: Floats
    """Share of the samples in which it was throttled for a reason that no healthy GPU has."""
    capped: Floats
    """Share of the samples at its power limit."""
    clock: Floats
    """Typical SM clock while busy, MHz; nan if unknown, here and below."""
    best: Floats
    """Its own highest of the run."""
    peers: Floats
    """Typical clock of the other GPUs of its kind."""
    samples: NDArray[np.intp]
    reasons: list[frozenset[str]]
    """All reasons sampled."""

    @property
    def hot(self) -> Bools:
        often = self.throttled * self.samples >= thresholds.THROTTLED_SAMPLES - 0.5
        return np.asarray((self.throttled >= thresholds.THROTTLED_SHARE) & often & self._has_samples, np.bool_)

    @property
    def slow(self) -> Bools:
        return np.asarray((self.clock <= (1 - thresholds.SLOW_CLOCK_SHARE) * self.peers) & self._has_samples, np.bool_)

    @property
    def limited(self) -> Bools:
        """At its power limit, and it shows in the clock."""
        below = self.clock <= (1 - thresholds.POWER_CAP_CLOCK_SHARE) * np.fmax(self.peers, self.best)
        return np.asarray((self.capped >= thresholds.POWER_CAP_SHARE) & below & self._has_samples, np.bool_)

    @property
    def _has_samples(self) -> Bools:
        return np.asarray(self.samples >= thresholds.MACHINE_SAMPLES, np.bool_)


def _throttled(view: View, gpus: list[Gpu], readings: Readings) -> list[Claim]:
    seen = _clocks(gpus, readings)
    grave = seen.hot | seen.slow
    shown = np.flatnonzero(grave if grave.any() else seen.limited)
    if not len(shown):
        return []
    # Throttled most, then the slowest, then the first.
    hot_share = np.where(seen.hot, seen.throttled, 0.0)[shown]
    order = np.lexsort((-shown, -np.nan_to_num(seen.clock[shown], nan=np.inf), hot_share))
    worst = int(shown[order[-1]])
    reasons = seen.reasons[worst]
    hot = bool(seen.hot[worst])
    finding = Finding(
        kind="gpu_throttled",
        severity="warning" if grave.any() else "info",
        title=_throttled_title(view, gpus[worst], seen, worst),
        ranks=()
        if len(shown) == len(gpus)
        else tuple(sorted(view.ranks[row] for at in shown for row in gpus[at].rows)),
        steps=view.span,
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence={
            "gpus": [_throttled_row(view, gpus[at], seen, at) for at in shown[:GPUS_LISTED]],
            "gpus_held_back": len(shown),
            "gpus_compared": len(gpus),
        },
        advice=advice_for(
            THROTTLING_ADVICE,
            thermal=hot and bool(THERMAL & reasons),
            power_brake=hot and "hw_power_brake" in reasons,
            power_cap=bool(seen.limited[worst]),
        ),
        confidence=0.9,
    )
    return [Claim(finding=finding, explained_ns=np.zeros(len(view.steps)))]


def _clocks(gpus: list[Gpu], readings: Readings) -> _Clocks:
    by_line = [_reasons(names) for names in readings.lines("throttle_reasons")]
    samples = np.bincount(readings.owner, minlength=len(gpus))
    every: list[set[str]] = [set() for _ in gpus]
    for owner, names in zip(readings.owner, by_line, strict=True):
        every[owner] |= names
    clocks, used = readings.of("sm_clock_mhz"), readings.of("util_percent")
    clocks[~(clocks > 0) | (used < thresholds.CLOCK_BUSY_PERCENT)] = np.nan
    few = (~np.isnan(clocks)).sum(axis=1) < thresholds.MACHINE_SAMPLES
    clock = np.where(few, np.nan, row_medians(clocks))
    return _Clocks(
        throttled=_share_of_samples(readings, samples, [bool(names & HELD_BACK) for names in by_line]),
        capped=_share_of_samples(readings, samples, ["sw_power_cap" in names for names in by_line]),
        clock=clock,
        best=np.fmax.reduce(clocks, axis=1, initial=np.nan),
        peers=_of_peers(gpus, clock),
        samples=samples,
        reasons=[frozenset(names) for names in every],
    )


def _of_peers(gpus: list[Gpu], clock: Floats) -> Floats:
    """[G]; the median of the *other* GPUs of the same name; nan without any."""
    out = np.full(len(gpus), np.nan)
    kinds: dict[str, list[int]] = {}
    for at, gpu in enumerate(gpus):
        if not np.isnan(clock[at]):
            kinds.setdefault(gpu.name, []).append(at)
    for alike in kinds.values():
        if len(alike) > 1:
            out[alike] = clock[alike] - peer_deviation(clock[alike][:, None])[:, 0]
    return out


def _share_of_samples(readings: Readings, samples: NDArray[np.intp], hits: list[bool]) -> Floats:
    """[G]; share of each GPU's samples."""
    counts = np.bincount(readings.owner, weights=np.array(hits, np.float64), minlength=len(samples))
    return np.asarray(counts / np.maximum(samples, 1), np.float64)


def _reasons(names: object) -> frozenset[str]:
    return (
        frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) and names else NO_REASONS
    )


def _throttled_title(view: View, gpu: Gpu, seen: _Clocks, at: int) -> str:
    where = f" of {gpu.node}" if len(set(view.hosts)) > 1 else ""
    number = "" if gpu.index is None else f" {gpu.index}"
    rank = f" (rank {view.ranks[gpu.rows[0]]})" if len(gpu.rows) == 1 and len(view.ranks) > 1 else ""
    who = f"GPU{number}{where}{rank}"
    if seen.hot[at]:
        why = next((words for name, words in THROTTLE_CAUSES.items() if name in seen.reasons[at]), "")
        return f"{who} is held back {why} in {share_text(float(seen.throttled[at]))} of the samples."
    if seen.slow[at]:
        return f"{who} runs at {seen.clock[at]:.0f} MHz, GPUs of the same kind at {seen.peers[at]:.0f} MHz."
    against = float(np.fmax(seen.peers[at], seen.best[at]))
    return f"{who} is at its power limit: {seen.clock[at]:.0f} MHz instead of {against:.0f} MHz."


def _throttled_row(view: View, gpu: Gpu, seen: _Clocks, at: int) -> dict[str, Any]:
    return {
        "node": gpu.node,
        "gpu": gpu.index,
        "ranks": [view.ranks[row] for row in gpu.rows],
        "held_back_share": round(float(seen.throttled[at]), 4),
        "power_cap_share": round(float(seen.capped[at]), 4),
        "reasons": sorted(seen.reasons[at]),
        "sm_clock_mhz": _rounded_mhz(seen.clock[at]),
        "peers_sm_clock_mhz": _rounded_mhz(seen.peers[at]),
        "best_sm_clock_mhz": _rounded_mhz(seen.best[at]),
    }


def _rounded_mhz(value: float) -> float | None:
    return None if np.isnan(value) else round(float(value), 1)


# -- hosts ------------------------------------------------------------------------------------------------------------

ONE_CPU = "the CPU"
OWN_CORES = "give the job its own cores (taskset, cgroups, --exclusive)"
RAM_ADVICE = (
    say(
        "Each of {workers} DataLoader workers copies the Python objects it touches: keep indices in numpy arrays.",
        "Fewer workers, a smaller prefetch_factor, memory-mapped data.",
        workers=True,
    ),
    say("Memory-map the data or read it in pieces; fewer ranks or workers on this host."),
)


def find_machine(view: View) -> list[Claim]:
    """``low_gpu_utilization``, ``gpu_throttled``, ``cpu_saturated`` and ``ram_pressure``; their saved time is zero."""
    if not view.enough:
        return []
    hosts, readings = host_readings(view)
    ranks = _in_their_steps(view, process_readings(view))
    limited, swapping = _limited_hosts(view, hosts, ranks), _swapping_hosts(view, hosts, ranks)
    short, claims = _ram(view, hosts, readings, ranks)
    # A host has one finding of a kind: the one that says most about it.
    cpu = [*_quota(view, hosts, ranks, limited), *_cpu(view, hosts, readings, ~limited)]
    cpu += _steal(view, hosts, readings, ~limited)
    return [*find_gpus(view), *cpu, *claims, *_swapping(view, hosts, ranks, swapping & ~short)]


# -- CPUs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Cpu:
    """By host [H]; medians over the samples, nan if unknown."""

    percent: Floats
    own: Floats
    cores: Floats
    running: Floats
    load: Floats
    pressure: Floats
    ranks: Floats

    @property
    def full(self) -> NDArray[np.bool_]:
        waiting = np.where(np.isnan(self.running), self.load, self.running)
        crowded = waiting >= thresholds.CPU_RUNNABLE_PER_CORE * self.cores
        busy = (self.percent >= thresholds.CPU_FULL_PERCENT) & crowded
        return np.asarray(busy | (self.pressure >= thresholds.CPU_PRESSURE), np.bool_)

    @property
    def others(self) -> NDArray[np.bool_]:
        """Whether other processes take a good part of a CPU that is full."""
        busy = self.percent >= thresholds.CPU_FULL_PERCENT
        return np.asarray(busy & (self.own < thresholds.CPU_OTHERS_SHARE * self.percent), np.bool_)

    @property
    def wanted(self) -> NDArray[np.bool_]:
        """Whether the job's ranks themselves want to run most of the time."""
        each = self.own / 100 * self.cores / np.maximum(self.ranks, 1.0)
        fair = np.minimum(self.cores / np.maximum(self.running, 1.0), 1.0)
        return np.asarray(~(each < thresholds.CPU_WANTED_SHARE * fair), np.bool_)

    @property
    def heavy(self) -> NDArray[np.bool_]:
        """Whether the job itself crowds the cores."""
        crowded = self.running >= thresholds.CPU_HEAVY_PER_CORE * self.cores
        return np.asarray(crowded & ~self.others, np.bool_)


def others_fill(view: View) -> bool:
    """Whether other programs take a good part of a full CPU; of a short run, as far as its few samples show."""
    hosts, readings = host_readings(view)
    seen = _cpu_of(view, hosts, readings)
    return bool((seen.full & seen.others & seen.wanted).any())


def _cpu_of(view: View, hosts: list[str], readings: Readings) -> _Cpu:
    percent = readings.of("cpu_percent")
    return _Cpu(
        percent=row_medians(percent),
        own=row_medians(readings.of("own_cpu_percent")),
        cores=row_medians(readings.of("cpu_count")),
        running=row_medians(readings.of("procs_running")),
        load=row_medians(readings.of("load1")),
        pressure=row_medians(readings.of("cpu_pressure")),
        ranks=np.bincount(_host_of_rows(view, hosts), minlength=len(hosts)).astype(np.float64),
    )


def _cpu(view: View, hosts: list[str], readings: Readings, among: Bools) -> list[Claim]:
    percent = readings.of("cpu_percent")
    enough = (~np.isnan(percent)).sum(axis=1) >= thresholds.MACHINE_SAMPLES
    seen = _cpu_of(view, hosts, readings)
    full = seen.full & enough & among
    if not full.any():
        return []
    by_host = _busy_processes(readings)
    others, heavy = seen.others & full, seen.heavy & full
    grave = (others & seen.wanted) | heavy
    severity: Severity = "warning" if grave.any() else "info"
    shown = np.flatnonzero(grave if grave.any() else full)
    worst = int(shown[np.lexsort((seen.running[shown] / seen.cores[shown], heavy[shown], others[shown]))[-1]])
    return [
        _host_claim(
            view,
            hosts,
            shown,
            kind="cpu_saturated",
            severity=severity,
            title=_cpu_title(
                view,
                hosts[worst],
                seen,
                worst,
                others=bool(others[worst]),
                heavy=bool(heavy[worst]),
                busy=by_host.get(worst, []),
            ),
            evidence={
                "node": hosts[worst],
                "cpu_percent": _rounded(seen.percent[worst]),
                "own_cpu_percent": _rounded(seen.own[worst]),
                "cpu_count": _rounded(seen.cores[worst]),
                "procs_running": _rounded(seen.running[worst]),
                "load1": _rounded(seen.load[worst]),
                "cpu_pressure": _rounded(seen.pressure[worst], 3),
                "ranks_on_node": view.hosts.count(hosts[worst]),
                "samples": int((~np.isnan(percent[worst])).sum()),
                "busy_processes": [process.document for process in by_host.get(worst, [])],
            },
            advice=_cpu_advice(
                others=bool(others[worst]),
                busy=[process.text for process in by_host.get(worst, [])],
                heavy=bool(heavy[worst]),
                ranks=view.hosts.count(hosts[worst]),
                cores=_whole(seen.cores[worst]),
                facts=_facts_of(view, hosts[worst]),
            ),
        )
    ]


BUSY_LISTED = 3
"""The number of commands that are named."""
PIDS_LISTED = 4


def _cpu_advice(
    *, others: bool, busy: Sequence[str], heavy: bool, ranks: int, cores: int | None, facts: Mapping[str, Any]
) -> tuple[str, ...]:
    """``others``: other programs take the CPU; ``busy``: which; ``ranks``: number on the host; ``facts``: of one."""
    if others:
        if not busy:
            return (f"Find the process with top (the samples name none), or {OWN_CORES}.",)
        return (f"Stop or move {', '.join(busy)}; or {OWN_CORES}.",)
    lines = []
    threads, workers = _count(facts.get("threads")), _loader_workers(facts)
    if threads > 1 and cores is not None and threads * ranks > cores:
        fit = max(1, cores // ranks)
        lines.append(
            f"{ranks} ranks with {threads} threads each on {cores} cores: OMP_NUM_THREADS={fit} "
            f"or torch.set_num_threads({fit})."
        )
    if workers > 0 and cores is not None and (workers + 1) * ranks > cores:
        fit = max(0, cores // ranks - 1)
        lines.append(f"{workers} DataLoader workers for each rank are too many for the cores: num_workers={fit}.")
    if not lines and cores is not None and ranks > cores:
        lines.append(f"{ranks} ranks share {cores} cores: more ranks will not be faster here.")
    if not lines:
        lines.append("Use fewer threads (OMP_NUM_THREADS) or DataLoader workers, or do less work per sample.")
    if heavy and len(lines) == 1:
        lines.append("With more runnable threads than cores, step times also vary more.")
    return tuple(lines)


def _loader_workers(facts: Mapping[str, Any]) -> int:
    loader = facts.get("loader")
    return _count(loader.get("num_workers")) if isinstance(loader, dict) else 0


def _count(value: object) -> int:
    """0 for anything that is not a count."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


@dataclass(frozen=True, kw_only=True)
class BusyProcess:
    """A command outside the job that uses the CPU; several processes may run it."""

    command: str
    pids: tuple[int, ...]
    percent: float
    """Mean use over the samples that name processes, of one core, of all its processes together."""

    @property
    def text(self) -> str:
        """``python burn.py (pid 4711, 97% of a core)``."""
        words = self.command.split()
        words[0] = words[0].rsplit("/", 1)[-1]
        short = " ".join(words[:2] if len(words) < 3 or not words[1].startswith("-") else words[:3])
        short = short if len(short) <= COMMAND_SHOWN else f"{short[:COMMAND_SHOWN]}…"
        more = ", …" if len(self.pids) > PIDS_LISTED else ""
        pids = f"pid{'s' if len(self.pids) > 1 else ''} {', '.join(map(str, self.pids[:PIDS_LISTED]))}{more}"
        return f"{short} ({pids}, {share_text(self.percent / 100)} of a core)"

    @property
    def document(self) -> dict[str, Any]:
        pids = list(self.pids[:PIDS_LISTED])
        return {"command": self.command, "pids": pids, "cpu_percent": round(self.percent, 1)}


COMMAND_SHOWN = 48


def busy_processes(view: View, host: str) -> list[BusyProcess]:
    """The commands outside the job that used most of a host's CPU."""
    hosts, readings = host_readings(view)
    return _busy_processes(readings).get(hosts.index(host), [])


def _busy_processes(readings: Readings) -> dict[int, list[BusyProcess]]:
    """By host: the commands that used most of the CPU outside the job, in the samples that name any."""
    counts: Counter[int] = Counter()
    used: dict[int, dict[str, float]] = {}
    pids: dict[tuple[int, str], dict[int, None]] = {}
    for host, listed in zip(readings.owner.tolist(), readings.lines("busy_processes"), strict=True):
        if not isinstance(listed, list) or not listed:
            continue
        counts[host] += 1
        for line in listed:
            pid, _, rest = str(line).partition(" ")
            percent, _, command = rest.partition(" ")
            try:
                number, value = int(pid), float(percent)
            except ValueError:
                continue
            if command.strip():
                own = used.setdefault(host, {})
                own[command] = own.get(command, 0.0) + value
                pids.setdefault((host, command), {})[number] = None
    return {
        host: [
            BusyProcess(command=command, pids=tuple(pids[host, command]), percent=total / counts[host])
            for command, total in sorted(commands.items(), key=lambda item: -item[1])[:BUSY_LISTED]
        ]
        for host, commands in used.items()
    }


def _cpu_title(
    view: View, host: str, seen: _Cpu, at: int, *, others: bool, heavy: bool, busy: list[BusyProcess]
) -> str:
    where = _where(view, host)
    cores = _whole(seen.cores[at])
    of_cores = f"all {cores} cores" if cores is not None and cores > 1 else ONE_CPU
    if others:
        taken = (seen.percent[at] - seen.own[at]) / 100 * seen.cores[at]
        of = "the cores" if cores is None else count_text(cores, "core")
        own = number_text(float(seen.own[at] / 100 * seen.cores[at]))
        then = "the job competes for them" if seen.wanted[at] else f"the job uses {own}"
        mostly = f", mostly {busy[0].text}" if busy else ""
        return f"Other processes use {number_text(float(taken))} of {of}{where}{mostly}; {then}."
    if heavy:
        running = number_text(float(seen.running[at]))
        return f"The job overloads {of_cores}{where}: typically {running} tasks are ready to run at once."
    if seen.percent[at] < thresholds.CPU_FULL_PERCENT:
        waited = share_text(float(seen.pressure[at]))
        title = f"Tasks wait for a processor {waited} of the time{where}"
        room = seen.percent[at] < thresholds.CPU_ROOM_PERCENT
        return f"{title}, though the CPUs are not full." if room else f"{title}."
    by_job = seen.own[at] >= thresholds.CPU_OWN_SHARE * seen.percent[at]
    if by_job:
        return f"The job keeps {of_cores}{where} busy."
    return f"{of_cores[0].upper()}{of_cores[1:]}{where} {'is' if of_cores == ONE_CPU else 'are'} busy all the time."


# -- host memory ------------------------------------------------------------------------------------------------------


def _ram(view: View, hosts: list[str], readings: Readings, ranks: _Ranks) -> tuple[Bools, list[Claim]]:
    """Which hosts [H] are short of memory, and the finding."""
    total, available = readings.of("mem_total"), readings.of("mem_available")
    share = available / np.where(total > 0, total, np.nan)
    low = (share < thresholds.RAM_LOW_SHARE).sum(axis=1) >= thresholds.MACHINE_SAMPLES
    critical = (share < thresholds.RAM_CRITICAL_SHARE).sum(axis=1) >= thresholds.MACHINE_SAMPLES
    least = np.fmin.reduce(share, axis=1, initial=np.nan)
    swap = readings.of("swap_used")
    swapped = _growth(swap)
    swapping = (swapped >= thresholds.RAM_SWAP_BYTES) & ~(least >= thresholds.RAM_SWAP_SHARE)
    pressure = readings.of("memory_pressure")
    waits = row_medians(pressure)
    waiting = (waits >= thresholds.RAM_PRESSURE) & (_counts(pressure) >= thresholds.MACHINE_SAMPLES)
    # Reclaiming what other programs mapped also counts as pressure: then no rank waits for it.
    harmless = waiting & ~(low | swapping) & _without_waits(view, hosts, ranks)
    grave = (low | swapping | waiting) & ~harmless
    short = grave if grave.any() else harmless
    if not short.any():
        return short, []
    worst = int(np.lexsort((-np.nan_to_num(least, nan=1.0), short, critical))[-1])
    smallest = float(np.fmin.reduce(available[worst], initial=np.nan))
    severity: Severity = "critical" if critical.any() else "warning" if grave.any() else "info"
    return short, [
        _host_claim(
            view,
            hosts,
            np.flatnonzero(short),
            kind="ram_pressure",
            severity=severity,
            title=_ram_title(
                _where(view, hosts[worst]),
                low=bool(low[worst]),
                available=smallest,
                share=float(least[worst]),
                swapped=float(swapped[worst]) if swapping[worst] else None,
                waits=float(waits[worst]),
            ),
            evidence={
                "node": hosts[worst],
                "available_bytes": _whole(smallest),
                "total_bytes": _whole(float(np.fmax.reduce(total[worst], initial=np.nan))),
                "available_share": _rounded(least[worst], 4),
                "swapped_bytes": _whole(swapped[worst]),
                "memory_pressure": _rounded(waits[worst], 3),
                "samples": int(_counts(share)[worst]),
            },
            advice=advice_for(RAM_ADVICE, workers=_loader_workers(_facts_of(view, hosts[worst]))),
        )
    ]


def _ram_title(where: str, *, low: bool, available: float, share: float, swapped: float | None, waits: float) -> str:
    if low:
        return f"Host memory{where} is nearly used up: {bytes_text(available)} available ({share_text(share)})."
    if swapped is not None:
        return f"The host{where} swapped out {bytes_text(swapped)} during the run."
    return f"Tasks{where} wait for memory {share_text(waits)} of the time."


# -- what ranks wait for ----------------------------------------------------------------------------------------------
# Only what all ranks of a host have: where one rank is late, its finding has the cause (``diagnosis/off_cpu.py``).


@dataclass(frozen=True, kw_only=True)
class _Ranks:
    """By rank [R]; medians over the samples of its steps, nan if unknown."""

    throttled: Floats
    quota: Floats
    waited: Floats
    disk: Floats
    faults_ps: Floats
    swapped: Floats


def _in_their_steps(view: View, readings: Readings) -> _Ranks:
    ends = view.window.end_wall_ns[view.rows]
    first, last = (np.fmin.reduce(ends, axis=1, initial=np.nan), np.fmax.reduce(ends, axis=1, initial=np.nan))
    at = readings.of("wall_ns")
    since = at - thresholds.OFF_CPU_SAMPLE_NS
    inside = (since >= first[:, None]) & (at <= last[:, None])

    def typical(key: str) -> Floats:
        values = np.where(inside, readings.of(key), np.nan)
        return np.where(_counts(values) >= thresholds.MACHINE_SAMPLES, row_medians(values), np.nan)

    waited, throttled = typical("cpu_wait"), typical("throttled")
    return _Ranks(
        # The kernel adds up the processors on which the quota is used up: the main thread waits no longer than this.
        throttled=np.where(np.isnan(waited), throttled, np.minimum(throttled, waited)),
        quota=typical("cpu_quota"),
        waited=waited,
        disk=typical("disk_wait"),
        faults_ps=typical("major_faults_ps"),
        swapped=typical("swapped"),
    )


def _hosts_with(view: View, hosts: list[str], having: Bools) -> Bools:
    """[H]; the hosts of which all ranks have it."""
    rows_without = np.bincount(_host_of_rows(view, hosts)[~having], minlength=len(hosts))
    return np.equal(rows_without, 0)


def _host_of_rows(view: View, hosts: list[str]) -> NDArray[np.intp]:
    """[R]; which of the hosts each rank is on."""
    numbers = {host: number for number, host in enumerate(hosts)}
    return np.array([numbers[host] for host in view.hosts], np.intp)


def _limited_hosts(view: View, hosts: list[str], ranks: _Ranks) -> Bools:
    used_up = ranks.throttled >= thresholds.THROTTLED_CPU_SHARE
    return _hosts_with(view, hosts, used_up & ~np.isnan(ranks.quota))


def _swapping_hosts(view: View, hosts: list[str], ranks: _Ranks) -> Bools:
    each = ranks.faults_ps * view.median_step_ns / 1e9
    return _hosts_with(view, hosts, (ranks.swapped >= thresholds.SWAPPED_BYTES) & (each >= thresholds.FAULTS_A_STEP))


def _without_waits(view: View, hosts: list[str], ranks: _Ranks) -> Bools:
    """[H]; the hosts of which all ranks are known to wait neither for the disk nor for pages."""
    from_disk = ranks.disk < thresholds.OFF_CPU_SHARE
    for_pages = ranks.faults_ps * thresholds.FAULT_LEAST_NS / 1e9 < thresholds.OFF_CPU_SHARE
    return _hosts_with(view, hosts, from_disk & for_pages)


def _quota(view: View, hosts: list[str], ranks: _Ranks, limited: Bools) -> list[Claim]:
    shown = np.flatnonzero(limited)
    if not len(shown):
        return []
    rows = np.flatnonzero(np.isin(view.hosts, [hosts[at] for at in shown]))
    worst = int(rows[int(ranks.throttled[rows].argmax())])
    share, quota = float(ranks.throttled[worst]), float(ranks.quota[worst])
    waits_ms = float(np.fmax(ranks.waited[worst], share)) * view.median_step_ns / 1e6
    whose = "the rank" if len(view.ranks) == 1 else "the ranks"
    they = "it waits" if len(view.ranks) == 1 else "they wait"
    title = (
        f"The CPU quota of {whose}{_where(view, view.hosts[worst])} ({cpus_text(quota)}) is used up "
        f"{share_text(share)} of the time: {they} {ms_text(waits_ms)} of each step."
    )
    return [
        _host_claim(
            view,
            hosts,
            shown,
            kind="cpu_saturated",
            severity="warning",
            title=title,
            evidence={
                "node": view.hosts[worst],
                "cause": "quota",
                "cpu_quota": round(quota, 3),
                "throttled_share": round(share, 4),
                "cpu_wait_ms": round(waits_ms, 3),
            },
            advice=advice_for(OFF_CPU_ADVICE, cause="quota", host=view.hosts[worst]),
        )
    ]


def _steal(view: View, hosts: list[str], readings: Readings, among: Bools) -> list[Claim]:
    stolen = readings.of("cpu_steal")
    typical = np.where(_counts(stolen) >= thresholds.MACHINE_SAMPLES, row_medians(stolen), np.nan)
    shown = np.flatnonzero((typical >= thresholds.STEAL_SHARE) & among)
    if not len(shown):
        return []
    worst = int(shown[int(typical[shown].argmax())])
    share = float(typical[worst])
    title = f"The hypervisor takes {share_text(share)} of the processors' time{_where(view, hosts[worst])} (steal)."
    return [
        _host_claim(
            view,
            hosts,
            shown,
            kind="cpu_saturated",
            severity="warning",
            title=title,
            evidence={"node": hosts[worst], "cause": "steal", "cpu_steal": round(share, 4)},
            advice=advice_for(OFF_CPU_ADVICE, cause="steal", host=hosts[worst] or "the host"),
        )
    ]


def _swapping(view: View, hosts: list[str], ranks: _Ranks, swapping: Bools) -> list[Claim]:
    shown = np.flatnonzero(swapping)
    if not len(shown):
        return []
    each = ranks.faults_ps * view.median_step_ns / 1e9
    rows = np.flatnonzero(np.isin(view.hosts, [hosts[at] for at in shown]))
    worst = int(rows[int(each[rows].argmax())])
    host = view.hosts[worst]
    who = "The rank reads" if len(view.ranks) == 1 else "The ranks read"
    faults = count_text(round(float(each[worst])), "major fault")
    return [
        _host_claim(
            view,
            hosts,
            shown,
            kind="ram_pressure",
            severity="warning",
            title=f"{who} swapped memory{_where(view, host)}: {faults} a step.",
            evidence={
                "node": host,
                "cause": "swap",
                "major_faults_per_step": round(float(each[worst]), 1),
                "swapped_bytes": _whole(ranks.swapped[worst]),
            },
            advice=advice_for(OFF_CPU_ADVICE, cause="swap", host=host or "the host"),
        )
    ]


# -- shared by CPU and memory -----------------------------------------------------------------------------------------


def _host_claim(
    view: View,
    hosts: list[str],
    shown: NDArray[np.intp],
    *,
    kind: str,
    severity: Severity,
    title: str,
    evidence: dict[str, Any],
    advice: tuple[str, ...],
) -> Claim:
    """One finding for all hosts that have it; no rank is named if all hosts do."""
    names = [hosts[index] for index in shown]
    ranks = [rank for rank, host in zip(view.ranks, view.hosts, strict=True) if host in set(names)]
    finding = Finding(
        kind=kind,
        severity=severity,
        title=title,
        ranks=() if len(names) == len(hosts) else tuple(ranks),
        steps=view.span,
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence={**evidence, "nodes": names},
        advice=advice,
        confidence=0.9,
    )
    return Claim(finding=finding, explained_ns=np.zeros(len(view.steps)))


def _growth(values: Floats) -> Floats:
    """[N]; from the first of each row to its largest; nan with too few samples."""
    first = np.full(len(values), np.nan)
    for column in values.T[::-1]:
        first = np.where(np.isnan(column), first, column)
    grown = np.fmax.reduce(values, axis=1, initial=np.nan) - first
    return np.where(_counts(values) >= thresholds.MACHINE_SAMPLES, grown, np.nan)


def _counts(values: Floats) -> NDArray[np.intp]:
    return np.asarray((~np.isnan(values)).sum(axis=1), np.intp)


def _facts_of(view: View, host: str) -> dict[str, Any]:
    """Facts of the first rank on the host that has any."""
    own = (view.window.facts[index] for index, name in zip(view.rows, view.hosts, strict=True) if name == host)
    return next((facts for facts in own if facts), {})


def _where(view: View, host: str) -> str:
    return f" of {host}" if len(set(view.hosts)) > 1 else ""


def _rounded(value: float, digits: int = 1) -> float | None:
    return None if np.isnan(value) else round(float(value), digits)


def _whole(value: float) -> int | None:
    return None if np.isnan(value) else round(float(value))
