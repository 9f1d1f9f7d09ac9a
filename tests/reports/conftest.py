"""Trace analyses that nobody ran: figures chosen so that a page of them shows every section."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.records.finding import Finding
from stepscope.traces.device.figures import Pace
from stepscope.traces.device.work import Temporal
from stepscope.traces.model.columns import TraceMeta
from stepscope.traces.model.tables import Table, table_of
from stepscope.traces.model.window import Step
from stepscope.traces.phases import PhaseRow, Phases

MS = 1_000_000
EVIL = "</style><script>alert(1)</script>\x1b[31m&"
"""A name that anybody may put into a trace."""
ADDED = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3>)"
)
GEMM = "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn"
REDUCED = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
CAUSES = {"host_operator": 60 * MS, "compute": 40 * MS, "communication": 14 * MS}


def temporal_of_rank(rank: int) -> Temporal:
    compute_ns, comm_ns, overlap_ns, idle_ns = (60 + rank) * MS, 24 * MS, 9 * MS, 12 * MS
    return Temporal(
        span_ns=compute_ns + comm_ns - overlap_ns + 2 * MS + idle_ns,
        idle_ns=idle_ns,
        compute_ns=compute_ns,
        comm_ns=comm_ns,
        memory_ns=3 * MS,
        overlap_ns=overlap_ns,
        exposed_comm_ns=comm_ns - overlap_ns,
        exposed_memory_ns=2 * MS,
    )


def tables_of_rank(rank: int, steps: tuple[Step, ...]) -> list[Table]:
    times = temporal_of_rank(rank)
    names = ("span_ns", "idle_ns", "compute_ns", "comm_ns", "memory_ns", "overlap_ns", "exposed_comm_ns")
    parts = [getattr(times, name) for name in names]
    return [
        table_of(
            "temporal_steps",
            "Device time by step",
            ("step", "wall_ns", "utilization_share", *names),
            [(step.number, step.end_ns - step.start_ns, 0.8, *parts) for step in steps],
        ),
        table_of(
            "kernels",
            "Kernels by name",
            ("name", "class", "count", "total_ns", "time_share", "mean_ns", "max_ns", "occupancy_share"),
            [
                (ADDED, "elementwise", 4200, 41 * MS, 0.48, 9_762, 81_000, 0.62),
                (GEMM, "gemm", 96, 33 * MS, 0.39, 343_750, 401_000, 0.12),
                (REDUCED, "communication", 12, 12 * MS, 0.13, MS, 2 * MS, None),
                (EVIL, "other", 1, 850, 1e-5, 850, 850, None),
            ],
            limit=3,
            note="Times are of all steps.",
        ),
        table_of("copies", "Copies and memsets", ("direction", "count", "total_ns"), []),
        table_of(
            "queue_curve",
            "Launches queued over time",
            ("stream", "start_ns", "max_length"),
            [("7", at * MS, at % 7) for at in range(50)],
        ),
        table_of(
            "memory",
            "Memory",
            ("time_ns", "allocated_bytes", "reserved_bytes"),
            [(at * MS, (at % 5) << 28, 5 << 28) for at in range(50)],
        ),
    ]


def path_of_rank(steps: tuple[Step, ...]) -> SimpleNamespace:
    length_ns = sum(CAUSES.values())
    rows = [(cause, time_ns, time_ns / length_ns) for cause, time_ns in CAUSES.items()]
    table = table_of("path_causes", "Critical path by cause", ("cause", "time_ns", "time_share"), rows)
    own = ({"number": step.number, "length_ns": step.end_ns - step.start_ns, "causes": {}} for step in steps)
    return SimpleNamespace(length_ns=length_ns, causes=CAUSES, steps=tuple(own), whole=None, tables={table.name: table})


def path_of_job(ranks: int) -> SimpleNamespace:
    length_ns = sum(CAUSES.values())
    by_rank = {1: length_ns - 2 * MS, 0: 2 * MS} if ranks > 1 else {0: length_ns}
    step = SimpleNamespace(number=10, rank=0, length_ns=length_ns, by_rank=by_rank, by_cause=CAUSES)
    columns = ("rank", "before", "cause", "mostly", "time_ns", "time_share", "steps")
    rows = [(1, "all_reduce 1", "host_operator", "aten::mm", 60 * MS, 0.53, 6)] if ranks > 1 else []
    table = table_of("job_path", "Critical path over all ranks", columns, rows)
    return SimpleNamespace(length_ns=length_ns, by_rank=by_rank, by_cause=CAUSES, steps=(step,), table=table)


def ranks_table(ranks: int, found: SimpleNamespace) -> Table:
    columns = (
        *("rank", "measured", "span_ns", "compute_ns", "comm_ns", "overlap_ns", "overlap_share", "exposed_comm_ns"),
        *("memory_ns", "idle_ns", "wait_ns", "transfer_ns", "last_count", "pace_ns"),
    )
    rows = []
    for rank in range(ranks):
        times = temporal_of_rank(rank)
        device = (times.span_ns, times.compute_ns, times.comm_ns, times.overlap_ns, times.overlap_ns / times.comm_ns)
        more = (times.exposed_comm_ns, times.memory_ns, times.idle_ns)
        exchanged = (found.wait_ns[rank], found.own_transfer_ns[rank], found.last_counts[rank])
        rows.append((rank, "device", *device, *more, *exchanged, 19 * MS))
    return table_of("distributed", "Ranks side by side", columns, rows)


def steps_of_rank(count: int) -> tuple[Step, ...]:
    return tuple(
        Step(number=10 + at, name=f"ProfilerStep#{10 + at}", start_ns=at * 20 * MS, end_ns=at * 20 * MS + 19 * MS + at)
        for at in range(count)
    )


def findings(ranks: int) -> tuple[Finding, ...]:
    return (
        Finding(
            kind="trace_straggler" if ranks > 1 else "launch_bound",
            severity="critical",
            title="Rank 1 comes last in 40 of 48 collectives; the others wait 4.1 ms of each 20.0 ms step (21%) for it."
            if ranks > 1
            else "The device waits for the host 4.1 ms of each 20.0 ms step (21%): kernels are launched one by one.",
            ranks=(1,) if ranks > 1 else (),
            steps=(10, 15),
            cost={"share": 0.23, "seconds": 0.027, "if_fixed": {"step_ms": 15.9, "speedup": 1.26}},
            advice=("Look at what it does before its all-reduce.", "torch.compile(model) launches less."),
            confidence=0.95,
        ),
        Finding(
            kind="fp32_matmul",
            severity="warning",
            title=f"Matrix products run in FP32: {EVIL}",
            steps=(10, 15),
            cost={"share": 0.06, "seconds": 0.01, "if_fixed": {"step_ms": 18.8, "speedup": 1.06}},
            advice=('torch.set_float32_matmul_precision("high")',),
            confidence=0.8,
        ),
    )


def phases_of_rank(rank: int, steps: tuple[Step, ...]) -> Phases:
    """A third of them forward; the last rank waits most."""
    rows = []
    for step in steps:
        wall_ns = step.end_ns - step.start_ns
        host = (MS, wall_ns // 3, 6 * MS, MS, rank * MS // 16)
        device = (0, 4 * MS, 8 * MS, MS, rank * MS // 16, 0)
        row = PhaseRow(
            step=step.number,
            wall_ns=wall_ns,
            host_ns=(*host, wall_ns - sum(host)),
            device_span_ns=sum(device) + 2 * MS,
            device_ns=device,
            device_idle_ns=2 * MS,
        )
        rows.append(row)
    return Phases(sources=("ranges", "operators"), rows=tuple(rows))


def rank_analysis(rank: int, ranks: int, steps: int) -> SimpleNamespace:
    own = steps_of_rank(steps)
    return SimpleNamespace(
        rank=rank,
        meta=TraceMeta(
            path=f"traces/rank{rank}.json.gz",
            rank=rank,
            world_size=ranks,
            backend="nccl",
            host="node0",
            devices=({"name": "NVIDIA H200"},),
            read_events=120_000 + rank,
            problems=("2 events have no name",) if rank == 1 else (),
        ),
        steps=own,
        left_out=Step(number=10 + steps, name="ProfilerStep", start_ns=0, end_ns=1),
        pace=Pace(
            steps=steps, host_ns=steps * 19 * MS, device_ns=0, work=temporal_of_rank(rank), device=SimpleNamespace()
        ),
        temporal=temporal_of_rank(rank),
        idle={
            "7": {"host_wait_ns": 6 * MS, "kernel_wait_ns": 4 * MS, "other_ns": 2 * MS, "sync_ns": MS},
            "20": {"host_wait_ns": 30 * MS, "kernel_wait_ns": 0, "other_ns": 0, "sync_ns": 0},
        },
        device={},
        host={},
        path=path_of_rank(own),
        phases=phases_of_rank(rank, own),
        tables={table.name: table for table in tables_of_rank(rank, own)},
    )


def collectives(ranks: int) -> SimpleNamespace:
    everyone = range(ranks)
    several = ranks > 1
    return SimpleNamespace(
        count=48 if several else 0,
        last_counts={rank: (40 if rank == 1 else 8 if rank == 0 else 0) if several else 0 for rank in everyone},
        wait_ns={rank: 0 if rank == 1 or not several else (20 + rank) * MS for rank in everyone},
        own_transfer_ns=dict.fromkeys(everyone, 4 * MS if several else 0),
        cost_by_rank_ns={rank: 25 * MS if rank == 1 else 0 for rank in everyone},
        alone_by_rank_ns={rank: 24 * MS if rank == 1 else 0 for rank in everyone},
        transfer_ns=4 * MS if several else 0,
        least_ns=3 * MS if several else 0,
        cost_ns=25 * MS if several else 0,
        tables={
            "collectives": table_of(
                "collectives",
                "Collectives by group and operation",
                ("group", "op", "ranks", "count", "wait_ns", "transfer_ns", "bus_gbps", "last_rank", "last_count"),
                [("0", "all_reduce", ranks, 48, 147 * MS, 4 * MS, 117.4, 1, 40)] if several else [],
            )
        },
    )


@pytest.fixture
def trace_job() -> Callable[..., Any]:
    """``trace_job(ranks=8, steps=6)``: with a straggler, an evil name and a file that has problems."""

    def make(ranks: int = 1, steps: int = 6) -> Any:
        found = collectives(ranks)
        return SimpleNamespace(
            ranks=tuple(rank_analysis(rank, ranks, steps) for rank in range(ranks)),
            collectives=found,
            clocks=SimpleNamespace(clocks=()),
            distributed=ranks_table(ranks, found),
            path=path_of_job(ranks),
            findings=findings(ranks),
            verdict=findings(ranks)[0].title,
            notices=("1 file does not specify a rank; treated as rank 0",),
            mixed=None,
        )

    return make
