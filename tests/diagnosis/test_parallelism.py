"""Who is compared with whom under tensor, pipeline, expert and data parallelism, and advice that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes.cluster import ANCHOR_WALL_NS, Cluster, slow_at
from fakes.records import edited

from stepscope.diagnosis import build_window, diagnose
from stepscope.diagnosis.engine.settings import remarks_on
from stepscope.diagnosis.engine.window import is_pipeline, peer_groups
from stepscope.diagnosis.rules.imbalance import STAGE_KINDS
from stepscope.records.collectives import COLLECTIVE_ROW, COMM_ROW, OPS, GroupKind, ProcessGroup
from stepscope.records.finding import Finding
from stepscope.records.series import RunData

WORLD = ProcessGroup(
    slot=0, name="0", description="default_pg", kind="world", backend="gloo", ranks=(0, 1, 2, 3), size=4
)
PLAIN = {"distributed_sampler": False, "sampler": "SequentialSampler"}


def group(slot: int, *ranks: int, kind: GroupKind = "other", description: str = "undefined") -> ProcessGroup:
    name = f"{slot}.{ranks[0]}"
    return ProcessGroup(
        slot=slot, name=name, description=description, kind=kind, backend="gloo", ranks=ranks, size=len(ranks)
    )


def traffic(steps: int, *calls: tuple[int, str]) -> Any:
    """Of each step: an operation in the group of a slot, and so on."""
    rows = np.zeros(steps * len(calls), np.dtype(COMM_ROW))
    rows["step"] = np.repeat(np.arange(steps), len(calls))
    rows["group"] = [slot for slot, _ in calls] * steps
    rows["op"] = [OPS.index(op) for _, op in calls] * steps
    rows["count"], rows["exposed_ns"], rows["span_ns"] = 4, 1_000_000, 1_000_000
    return rows


def with_facts(run: RunData, *about: Mapping[str, Any]) -> RunData:
    """With what each rank says: its facts, groups and calls."""
    return replace(run, ranks=tuple(replace(rank, **own) for rank, own in zip(run.ranks, about, strict=True)))


def pipeline(*, faults: Sequence[Any] = (), steps: int = 60, ranks: int = 2) -> RunData:
    """Torch's own schedule: sends and receives in the default group, and a stage of other size on each rank."""
    run = Cluster(ranks=ranks, steps=steps, faults=tuple(faults)).run()
    comm = traffic(steps, (0, "send"), (0, "recv"))
    facts = [{"pipeline": True, "model": {"parameters": 100 + rank}, "loader": PLAIN} for rank in range(ranks)]
    return with_facts(run, *[{"facts": own, "groups": (WORLD,), "comm": comm} for own in facts])


def groups_of(*about: Mapping[str, Any], steps: int = 20) -> list[int]:
    run = with_facts(Cluster(ranks=len(about), steps=steps).run(), *about)
    return [int(number) for number in peer_groups(run.ranks)]


# -- peers ------------------------------------------------------------------------------------------------------------


def test_stages_of_a_pipeline_are_no_peers() -> None:
    run = pipeline()
    assert is_pipeline(run.ranks)
    assert peer_groups(run.ranks).tolist() == [0, 1]


def test_replicas_of_a_stage_are_known_by_their_process_group() -> None:
    """As a Megatron-style loop makes them: groups without a name for data (2 x 2) and for the pipeline."""
    comm = traffic(20, (1, "all_reduce"), (2, "send"), (2, "recv"))
    rows = [
        {"groups": (WORLD, group(1, rank // 2 * 2, rank // 2 * 2 + 1), group(2, rank % 2, rank % 2 + 2)), "comm": comm}
        for rank in range(4)
    ]
    facts = [{"model": {"parameters": 100 + rank // 2}} for rank in range(4)]
    assert groups_of(*[{**row, "facts": own} for row, own in zip(rows, facts, strict=True)]) == [0, 0, 1, 1]


def test_named_groups_need_no_facts() -> None:
    """Megatron's names: tensor parallelism within a stage."""
    rows = [
        {
            "groups": (
                group(1, rank // 2 * 2, rank // 2 * 2 + 1, kind="tensor", description="TENSOR_MODEL_PARALLEL_GROUP"),
                group(2, rank % 2, rank % 2 + 2, kind="pipeline", description="PIPELINE_MODEL_PARALLEL_GROUP"),
            )
        }
        for rank in range(4)
    ]
    assert groups_of(*rows) == [0, 0, 1, 1]


def test_first_and_last_stage_that_share_an_embedding_are_no_peers() -> None:
    comm = traffic(20, (0, "send"), (0, "recv"), (3, "all_reduce"))
    tied = group(3, 0, 1)
    rows = [{"facts": {"model": {"parameters": size}}, "groups": (WORLD, tied), "comm": comm} for size in (100, 120)]
    assert groups_of(*rows) == [0, 1]


def test_a_ring_of_equal_ranks_is_no_pipeline() -> None:
    comm = traffic(20, (0, "send"), (0, "recv"))
    rows = [{"facts": {"model": {"parameters": 100}}, "groups": (WORLD,), "comm": comm} for _ in range(4)]
    assert groups_of(*rows) == [0, 0, 0, 0]


def test_data_parallel_groups_of_a_tensor_parallel_job_are_joined() -> None:
    """DDP tells of its replicas only; the tensor-parallel groups between them have equal work as well."""
    rows = [
        {
            "facts": {"peers": [[rank % 2, 2, 2]]},
            "groups": (group(1, rank // 2 * 2, rank // 2 * 2 + 1, kind="tensor", description="mesh_tp"),),
        }
        for rank in range(4)
    ]
    assert groups_of(*rows) == [0, 0, 0, 0]


# -- verdicts ---------------------------------------------------------------------------------------------------------


def only(run: RunData, kind: str) -> Finding:
    (found,) = [finding for finding in diagnose(run) if finding.kind == kind]
    return found


def test_a_slow_stage_of_one_replica_is_an_imbalance_with_its_phase_and_both_prices() -> None:
    found = diagnose(pipeline(faults=[slow_at(1, "forward", 20.0)]))[0]
    assert (found.kind, found.ranks, found.phase) == ("imbalance", (1,), "forward")
    assert found.title.startswith("Rank 1 has 20.0 ms more work in each step than the other pipeline stage, mostly in ")
    assert found.cost["share"] == pytest.approx(10 / 59, abs=0.02)
    assert found.evidence["share_without_excess"] == pytest.approx(20 / 59, abs=0.02)
    assert found.advice[0].startswith("Move layers from the slowest stage")


@pytest.mark.parametrize(
    ("phase", "kind", "doing"),
    [("input", "input_straggler", "in input"), ("checkpoint", "between_steps", "in checkpoints")],
)
def test_a_stage_that_is_slow_where_it_has_no_layers_has_none_to_move(phase: str, kind: str, doing: str) -> None:
    """And its surplus is lost whole: 20 of 59 ms, not the half that the other stage could take over."""
    (found,) = diagnose(pipeline(faults=[slow_at(1, phase, 20.0)]))
    assert (found.kind, found.ranks, found.phase) == (kind, (1,), phase)
    others = "the other pipeline stage"
    assert found.title == f"Rank 1 takes 20.0 ms more than {others} {doing} every step; {others} waits."
    assert found.cost["share"] == pytest.approx(20 / 59, abs=0.02)
    assert not any("layers" in line or "DistributedSampler" in line for line in found.advice)


@pytest.mark.parametrize("phase", sorted(STAGE_KINDS))
def test_its_line_is_named_in_every_phase(phase: str) -> None:
    """Where its stacks agree on one: within the step as well as between two."""
    run = pipeline(faults=[slow_at(1, phase, 20.0)])
    line = {"file": "/scripts/train.py", "line": 27, "function": "Stage.work"}
    about = {"rank": 1, "pid": 101, "wall_ns": ANCHOR_WALL_NS + 10**9, "phase": phase, "between": phase == "other"}
    hook = {"file": "/stepscope/recorder/ledger.py", "line": 149, "function": "timed"}
    seen = [{**about, "step": step, "frames": [line, hook]} for step in (30, 31, 32)]
    (found,) = diagnose(replace(run, stacks=tuple(seen)))
    assert (found.ranks, found.phase) == ((1,), phase)
    assert found.evidence["place"] == "Stage.work, train.py:27"
    assert "(Stage.work, train.py:27) every step; " in found.title


def test_the_schedule_of_a_pipeline_is_no_warning() -> None:
    run = Cluster(ranks=2, steps=60, phases_ms={"forward": 6.0, "backward": 6.0, "inside": 5.0}, comm_ms=4.0).run()
    about = [rank.__dict__ for rank in pipeline().ranks]
    assert only(run, "wait_heavy").severity != "info"
    staged = with_facts(run, *[{name: rank[name] for name in ("facts", "groups", "comm")} for rank in about])
    found = only(staged, "wait_heavy")
    assert found.severity == "info"
    assert found.advice[0].startswith("Mostly the schedule itself")


def test_a_late_rank_of_a_stage_is_not_told_twice() -> None:
    """Rank 3 against rank 2; the stage of both has no more to do than the other."""
    run = Cluster(ranks=4, steps=60, faults=(slow_at(3, "forward", 20.0),)).run()
    facts = [{"peers": [[rank // 2 * 2, 2, 1]], "pipeline": True} for rank in range(4)]
    found = diagnose(with_facts(run, *[{"facts": own} for own in facts]))
    assert [(finding.kind, finding.ranks, finding.phase) for finding in found] == [
        ("compute_straggler", (3,), "forward")
    ]


def test_stages_that_wait_for_each_other_do_not_wait_for_a_network() -> None:
    run = Cluster(ranks=2, steps=60, comm_ms=16.0).run()
    about = [rank.__dict__ for rank in pipeline().ranks]
    found = diagnose(with_facts(run, *[{name: rank[name] for name in ("facts", "groups", "comm")} for rank in about]))[
        0
    ]
    assert (found.kind, found.severity) == ("pipeline_bubble", "info")
    assert found.evidence["even_share"] == pytest.approx(1 / 5)
    assert not any("no_sync" in line or "hosts" in line for line in found.advice)


def test_groups_of_ranks_that_are_no_stages_have_no_layers_to_move() -> None:
    run = Cluster(ranks=4, steps=60, faults=tuple(slow_at(rank, "forward", 20.0) for rank in (2, 3))).run()
    found = diagnose(with_facts(run, *[{"facts": {"peers": [[rank // 2 * 2, 2, 1]]}} for rank in range(4)]))[0]
    assert (found.kind, found.ranks) == ("imbalance", (2, 3))
    assert "the other group of ranks" in found.title
    assert not any("layers" in line for line in found.advice)


# -- the machine ------------------------------------------------------------------------------------------------------


def crowded(run: RunData) -> RunData:
    """Other processes take the cores that the job wants."""
    begin = run.ranks[0].anchor_wall_ns
    line = {
        "kind": "host", "node": run.ranks[0].identity.host, "cpu_percent": 100.0, "own_cpu_percent": 50.0,
        "cpu_count": 2, "procs_running": 6.0,
    }  # fmt: skip
    return replace(run, samples=tuple({**line, "wall_ns": begin + at * 100_000_000} for at in range(100)))


def test_ranks_that_are_late_in_turns_are_not_blamed_on_a_machine_in_other_hands() -> None:
    faults = tuple(slow_at(rank, "forward", 30.0, range(rank, 80, 2)) for rank in range(2))
    run = Cluster(ranks=2, steps=80, faults=faults).run()
    assert diagnose(run)[0].kind == "rotating_straggler"
    found = diagnose(crowded(run))
    assert (found[0].kind, found[0].severity) == ("cpu_saturated", "warning")
    assert {(finding.kind, finding.severity) for finding in found[1:]} == {("rotating_straggler", "info")}


@pytest.mark.parametrize(("steps", "severity"), [(range(4, 42), "info"), (range(42, 80), "warning")])
def test_a_rank_that_was_slow_for_a_while_is_a_symptom_of_a_machine_in_other_hands(steps: range, severity: str) -> None:
    """Not one that is slow to the end: that may be its own fault."""
    run = Cluster(ranks=2, steps=80, faults=(slow_at(1, "optimizer", 40.0, steps),)).run()
    assert only(run, "compute_straggler").severity in ("warning", "critical")
    lowered = only(crowded(run), "compute_straggler").severity
    assert ("info" if lowered == "info" else "warning") == severity


# -- advice -----------------------------------------------------------------------------------------------------------

DDP = {"bucket_mb": 25.0, "gradient_mb": 100.0}


def advice(facts: Mapping[str, Any], *, hosts: int = 1, batches: int = 1) -> str:
    run = Cluster(ranks=4, steps=60, hosts=hosts, comm_ms=40.0, facts=dict(facts)).run()
    run = edited(run, lambda _, steps: steps["batches"].fill(batches))
    return " ".join(only(run, "comm_bound").advice)


@pytest.mark.parametrize(
    ("facts", "setting"),
    [
        ({"ddp": DDP}, "no_sync()"),
        (
            {"ddp": DDP, "frameworks": ["transformers", "accelerate"]},
            "TrainingArguments(gradient_accumulation_steps=…)",
        ),
        ({"ddp": DDP, "frameworks": ["lightning"]}, "Trainer(accumulate_grad_batches=…)"),
        ({"ddp": DDP, "frameworks": ["accelerate"]}, "Accelerator(gradient_accumulation_steps=…)"),
        ({"frameworks": ["deepspeed"]}, '"gradient_accumulation_steps" in the DeepSpeed config'),
    ],
)
def test_accumulation_by_the_name_of_the_framework(facts: Mapping[str, Any], setting: str) -> None:
    assert setting in advice(facts)
    assert "Accumulate" not in advice(facts, batches=4)


def test_deepspeed_has_settings_of_its_own() -> None:
    own = advice({"frameworks": ["deepspeed"]})
    assert "overlap_comm" in own
    assert "no_sync" not in own
    assert "compress_hook" not in own


@pytest.mark.parametrize("hosts", [1, 2])
def test_links_between_hosts_where_there_are_several(hosts: int) -> None:
    assert ("links between the hosts" in advice({}, hosts=hosts)) is (hosts == 2)


@pytest.mark.parametrize(
    ("facts", "replicas"),
    [
        ({"mesh": {"names": ["tp"], "shape": [4]}, "peers": [[0, 4, 1]]}, 0),
        ({"mesh": {"names": ["pp"], "shape": [4]}}, 0),
        ({"mesh": {"names": ["dp", "tp"], "shape": [2, 2]}, "peers": [[0, 4, 1]]}, 2),
        ({"ddp": DDP, "peers": [[0, 4, 1]]}, 4),
        ({"pipeline": True}, 0),
    ],
)
def test_who_needs_a_distributed_sampler(facts: Mapping[str, Any], replicas: int) -> None:
    own = remarks_on(build_window(Cluster(ranks=4, facts={"loader": PLAIN, **facts}).run()))
    expected = [f"Each of the {replicas} replicas of the model draws from the whole dataset"] if replicas else []
    assert [line.partition(" (SequentialSampler)")[0] for line in own] == expected


@pytest.mark.parametrize(
    ("mesh", "second"),
    [
        ({"names": ["dp"], "shape": [2]}, "Give every rank the same number of samples (DistributedSampler) and"),
        ({"names": ["tp"], "shape": [2]}, "Ranks that hold parts of one model need the same samples: let one of them"),
        ({"names": ["dp", "tp"], "shape": [2, 1]}, "Give every rank the same number of samples (DistributedSampler)"),
    ],
)
def test_who_reads_the_same_samples_needs_no_sampler(mesh: Mapping[str, Any], second: str) -> None:
    run = Cluster(ranks=2, steps=60, faults=(slow_at(1, "input", 40.0, range(60)),)).run()
    run = with_facts(run, *[{"facts": {"mesh": mesh, "peers": [[0, 2, 1]]}}] * 2)
    assert only(run, "input_straggler").advice[1].startswith(second)


def test_workers_by_the_name_of_the_framework() -> None:
    facts = {"loader": {"num_workers": 2}, "frameworks": ["transformers"]}
    run = Cluster(ranks=1, steps=60, phases_ms={"input": 20.0, "forward": 10.0, "backward": 20.0}, facts=facts).run()
    assert "raise dataloader_num_workers from 2" in only(run, "input_bound").advice[0]


# -- experts and parts of a sequence ----------------------------------------------------------------------------------

TOKENS = 1 << 20


def routed(run: RunData, given: Any, *, own: Any = TOKENS) -> RunData:
    """Every step sends ``own`` bytes to the experts and ``given`` [R, S] back, and the same again in backward."""
    ranks, steps = len(run.ranks), len(run.ranks[0].steps)
    given, own = np.broadcast_to(given, (ranks, steps)), np.broadcast_to(own, (ranks, steps))
    about = []
    for rank in range(ranks):
        comm = traffic(steps, (0, "all_to_all"))
        comm["bytes"] = 2 * (own[rank] + given[rank])
        calls = np.zeros((steps, 4), np.dtype(COLLECTIVE_ROW))
        calls["step"], calls["nth"], calls["op"] = np.arange(steps)[:, None], np.arange(4), OPS.index("all_to_all")
        calls["bytes"] = np.stack([own[rank], given[rank], own[rank], given[rank]], axis=1)
        calls["end_ns"] = calls["start_ns"] + 1
        about.append({"groups": (WORLD,), "comm": comm, "collectives": calls.reshape(-1)})
    return with_facts(run, *about)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_rank_whose_experts_get_more_tokens_is_no_slow_machine(phase: str) -> None:
    run = Cluster(ranks=4, steps=60, faults=(slow_at(2, phase, 30.0),)).run()
    first, *rest = diagnose(routed(run, np.array([[1], [1], [3], [1]]) * TOKENS))
    assert (first.kind, first.severity, first.ranks, first.phase) == ("imbalance", "critical", (2,), phase)
    assert (first.evidence["by"], first.evidence["times_the_bytes"]) == ("experts", 2.0)
    assert first.title == (
        f"Rank 2 is 29.6 ms slower than its peers in {phase} every step: its experts get more tokens "
        "(it has 2× as many bytes as its peers in all_to_all); all other ranks wait for it."
    )
    assert "router" in first.advice[0]
    assert {finding.kind for finding in rest} <= {"compute_bound"}


def test_a_rank_with_as_many_tokens_is_a_straggler_as_ever() -> None:
    run = Cluster(ranks=4, steps=60, faults=(slow_at(2, "forward", 30.0),)).run()
    first, *_ = diagnose(routed(run, TOKENS))
    assert (first.kind, first.ranks, first.phase) == ("compute_straggler", (2,), "forward")


def test_waiting_for_input_is_not_the_routers() -> None:
    run = Cluster(ranks=4, steps=60, faults=(slow_at(2, "input", 30.0),)).run()
    first, *_ = diagnose(routed(run, np.array([[1], [1], [3], [1]]) * TOKENS))
    assert (first.kind, first.ranks) == ("input_straggler", (2,))


def test_longer_batches_are_not_told_from_the_router_where_nothing_tells() -> None:
    run = Cluster(ranks=4, steps=60, faults=(slow_at(2, "forward", 30.0),)).run()
    more = np.array([[1], [1], [2], [1]]) * TOKENS
    first, *_ = diagnose(routed(run, more, own=more))
    assert (first.kind, first.evidence["by"]) == ("imbalance", "experts")
    assert "experts" not in first.title
    assert any("batches" in line for line in first.advice)


def test_experts_that_get_most_in_turn() -> None:
    steps = 60
    hot = np.arange(steps) % 4
    faults = tuple(slow_at(int(rank), "forward", 30.0, range(step, step + 1)) for step, rank in enumerate(hot))
    given = np.where(np.arange(4)[:, None] == hot, 3, 1) * TOKENS
    first, *rest = diagnose(routed(Cluster(ranks=4, steps=steps, faults=faults).run(), given))
    assert (first.kind, first.severity, first.ranks, first.evidence["by"]) == ("imbalance", "warning", (), "experts")
    assert first.title.startswith(
        "Experts get unequal numbers of tokens, and the rank with the most changes from step to step; "
    )
    assert {finding.kind for finding in rest} <= {"compute_bound"}


def test_parts_of_a_sequence_have_unequal_work_under_a_causal_mask() -> None:
    run = Cluster(ranks=4, steps=60, faults=(slow_at(3, "forward", 30.0),)).run()
    parts = with_facts(run, *[{"facts": {"mesh": {"names": ["cp"], "shape": [4]}}}] * 4)
    first, *_ = diagnose(parts)
    assert (first.kind, first.ranks) == ("compute_straggler", (3,))
    assert "causal mask" in " ".join(first.advice)
    assert "causal mask" not in " ".join(diagnose(run)[0].advice)
