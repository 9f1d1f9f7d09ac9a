"""The judge on any evidence: it never raises, and who is who does not depend on the numbers of the ranks."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import Any

from example_counts import examples
from hang_jobs import IN_ALL_REDUCE, LOOP, SLEEPING, Job, entry, flight, stack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.hangs.evidence import (
    Evidence,
    EvidenceFile,
    LastCollective,
    RankEvidence,
    WorkerEvidence,
    evidence_from_dict,
    evidence_to_dict,
)
from stepscope.hangs.judge import NotAHang, judge
from stepscope.hangs.multi_host import SeenHang, join_hangs
from stepscope.hangs.report import finding_of, hang_lines
from stepscope.records.collectives import OPS, ProcessGroup
from stepscope.records.hang import Frame, HangRecord, ThreadStack

FILES = (
    *("torch/distributed/distributed_c10d.py", "torch/distributed/checkpoint/filesystem.py", "torch/serialization.py"),
    *("torch/utils/data/dataloader.py", "torch/utils/data/_utils/fetch.py", "torch/_inductor/compile_fx.py"),
    *(
        "torch/cuda/__init__.py",
        "torch/autograd/graph.py",
        "/usr/lib/python3.11/socket.py",
        "train.py",
        "data.py",
        "<string>",
    ),
)
FUNCTIONS = ("all_reduce", "recv", "_engine_run_backward", "backward", "save", "evaluate", "step", "<module>", "")
FRAMES = st.tuples(st.sampled_from(FILES), st.integers(0, 99), st.sampled_from(FUNCTIONS))
STACKS = st.lists(FRAMES, max_size=5).map(lambda frames: stack(*frames)) | st.just(())
GROUPS = st.builds(
    ProcessGroup,
    slot=st.integers(0, 3),
    name=st.sampled_from(("0", "1", "2", "")),
    description=st.sampled_from(("default_pg", "mesh_tp", "")),
    ranks=st.lists(st.integers(0, 9), max_size=6, unique=True).map(tuple),
    size=st.integers(0, 12),
)
CALLS = st.builds(
    LastCollective,
    op=st.sampled_from(OPS),
    group=st.none() | GROUPS,
    bytes=st.sampled_from((0, 8, 4096)),
    called_s=st.floats(0, 1e6),
    waiting=st.booleans(),
    peer=st.none() | st.integers(0, 9),
)
SHARES = st.none() | st.floats(0, 20)
STATES = st.sampled_from(("R", "S", "D", "T", "t", "Z", ""))
WORKERS = st.builds(
    WorkerEvidence,
    pid=st.integers(1, 99999),
    kind=st.sampled_from(("dataloader", "compiler", "other")),
    name=st.text(max_size=20),
    process_state=STATES,
    cpu_share=SHARES,
    threads=STACKS,
)
FLIGHTS = st.one_of(
    st.just(b""),
    st.binary(max_size=40),
    st.builds(
        lambda number, op, retired: flight(entry(number, op, retired=retired)),
        st.integers(1, 9),
        st.sampled_from(("gloo:all_reduce", "nccl:all_gather", "gloo:barrier", "x")),
        st.booleans(),
    ),
)
RANKS = st.builds(
    RankEvidence,
    rank=st.integers(0, 9),
    pid=st.integers(1, 99999),
    alive=st.booleans() | st.just(True),
    ended=st.sampled_from(
        ("", "", "killed by SIGKILL", "exited in order", "raised ValueError: x", "raised E: peer process")
    ),
    step=st.none() | st.integers(0, 10**9),
    phase=st.sampled_from(("other", "input", "comm", "eval", "checkpoint", "backward", "mine", "")),
    silent_s=st.floats(0, 1e6),
    process_state=STATES,
    cpu_share=SHARES,
    io_bytes_s=st.none() | st.floats(0, 1e12),
    gil_held=st.none() | st.booleans(),
    threads=STACKS,
    threads_later=STACKS,
    collective=st.none() | CALLS,
    groups=st.lists(GROUPS, max_size=2).map(tuple),
    device=st.sampled_from(("cpu", "cuda:0")),
    gpu_util_percent=st.none() | st.floats(0, 100),
    workers=st.lists(WORKERS, max_size=2).map(tuple),
    flight=FLIGHTS,
)
EVIDENCE = st.builds(
    Evidence,
    host=st.text(max_size=8),
    world_size=st.integers(0, 12),
    ranks=st.lists(RANKS, max_size=6).map(tuple),
    threshold_s=st.floats(0.1, 1e5),
    step_s=st.none() | st.floats(0, 1e4),
    source_lines=st.dictionaries(
        st.tuples(st.just("/job/train.py"), st.integers(0, 99)), st.text(max_size=90), max_size=5
    ),
)


@settings(max_examples=examples(250), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(EVIDENCE)
def test_no_evidence_makes_it_raise(evidence: Evidence) -> None:
    answer = judge(evidence, number=1, declared_wall_ns=2, stopped_wall_ns=1)
    if isinstance(answer, NotAHang):
        assert answer.reason.endswith(".")
        assert answer.check_again_s >= 1.0
        return
    assert answer.title.endswith(".")
    culprits = {culprit.rank for culprit in answer.culprits}
    here = {rank.rank for rank in evidence.ranks}
    assert culprits <= here
    assert set(answer.victims) <= here - culprits
    assert answer.culprits or answer.undecidable, "somebody is to blame, or it is said that nobody can tell"
    repeated = HangRecord.from_dict(json.loads(json.dumps(answer.to_dict())))
    assert (repeated.culprits, repeated.victims, repeated.stacks) == (answer.culprits, answer.victims, answer.stacks)
    for width in (60, 80, 120):
        assert max(map(len, hang_lines(answer, width)), default=0) <= width
    finding = finding_of(answer)
    assert (finding.kind, finding.severity, set(finding.ranks)) == (answer.kind, "critical", culprits)


def read_back(evidence: Evidence) -> EvidenceFile:
    """As it comes out of its file."""
    before = EvidenceFile(number=1, stopped_wall_ns=1, gathered_wall_ns=2, evidence=evidence)
    return evidence_from_dict(json.loads(json.dumps(evidence_to_dict(before))))


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(EVIDENCE)
def test_what_was_kept_is_what_was_gathered(evidence: Evidence) -> None:
    """But for what would steer a terminal, and answers that are no text."""
    once = read_back(evidence).evidence
    assert read_back(once).evidence == once
    assert [replace(rank, workers=(), flight=b"") for rank in once.ranks] == [
        replace(rank, workers=(), flight=b"") for rank in evidence.ranks
    ]


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(EVIDENCE, st.lists(st.sampled_from("abc"), min_size=10, max_size=10))
def test_any_split_over_hosts_is_judged_as_one_host_would_be(evidence: Evidence, places: list[str]) -> None:
    alone = {rank.rank: rank for rank in evidence.ranks}
    whole = replace(read_back(replace(evidence, ranks=tuple(alone[rank] for rank in sorted(alone)))).evidence, host="a")
    seen = []
    for host in sorted({places[rank.rank] for rank in whole.ranks}):
        own = replace(whole, host=host, ranks=tuple(rank for rank in whole.ranks if places[rank.rank] == host))
        verdict = judge(own, number=1, declared_wall_ns=2, stopped_wall_ns=1)
        record = verdict if isinstance(verdict, HangRecord) else None
        seen.append(SeenHang(file=read_back(own), record=record))
    hangs = join_hangs(seen)
    records = [answer.record for answer in seen if answer.record is not None]
    together = judge(whole, number=1, declared_wall_ns=2, stopped_wall_ns=1)
    if len(seen) < 2 or not records:
        assert hangs == records
    elif isinstance(together, NotAHang):
        assert [replace(hang, evidence=hang.evidence[:-1]) for hang in hangs] == records
        assert all("it is not a hang: " in finding.evidence[-1] for finding in hangs)
    else:
        (joined,) = hangs
        assert [part.host for part in joined.parts] == [record.host for record in records]
        equal_fields = ("kind", "culprits", "victims", "undecidable", "collective", "cycle", "evidence", "stacks")
        for name in equal_fields:
            assert getattr(joined, name) == getattr(together, name), name
        assert {**joined.flight, "title": ""} == {**together.flight, "title": ""}
        without = re.compile(r" on (?:[abc]|\d hosts)\b")
        assert without.sub("", joined.title) == without.sub("", together.title)


STACKS_OF_JOBS = {
    "waits": {},
    "sleeps": {"threads": SLEEPING, "threads_later": SLEEPING, "collective": None},
    "loads": {
        "threads": stack(("torch/utils/data/dataloader.py", 1, "_next_data"), LOOP),
        "threads_later": (),
        "collective": None,
    },
    "stopped": {"process_state": "T"},
    "gone": {"alive": False, "threads": (), "collective": None, "ended": "killed by SIGKILL"},
    "keeps the gil": {"threads": SLEEPING, "threads_later": SLEEPING, "collective": None, "gil_held": True},
    "other call": {"collective": LastCollective(op="barrier", group=None, bytes=0, called_s=1.0, waiting=True)},
    "second": {"second": True},
    "works": {"threads": SLEEPING, "collective": None, "cpu_share": 1.0, "process_state": "R"},
}


def outcome(evidence: Evidence) -> tuple[Any, ...]:
    answer = judge(evidence, number=1, declared_wall_ns=2, stopped_wall_ns=1)
    if isinstance(answer, NotAHang):
        return ("not a hang",)
    return answer.kind, {culprit.rank for culprit in answer.culprits}, set(answer.victims), answer.undecidable


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.sampled_from(sorted(STACKS_OF_JOBS)), min_size=2, max_size=9), st.randoms(use_true_random=False))
def test_permuting_the_ranks_permutes_the_verdict(doings: list[str], chance: random.Random) -> None:
    size = len(doings)
    job = Job(ranks=size)
    second = ProcessGroup(slot=1, name="1", description="second", size=size, ranks=tuple(range(size)))
    for rank, doing in enumerate(doings):
        fields = dict(STACKS_OF_JOBS[doing])
        if fields.pop("second", False):
            fields["collective"] = job.waits(group=second)
        elif doing == "other call":
            fields["collective"] = job.waits("barrier", bytes=0)
        job.at(rank, **fields)
    evidence = job.evidence()
    shuffled = list(range(size))
    chance.shuffle(shuffled)
    renamed = [replace(rank, rank=shuffled[rank.rank]) for rank in evidence.ranks]
    chance.shuffle(renamed)
    before, after = outcome(evidence), outcome(replace(evidence, ranks=tuple(renamed)))
    if before == ("not a hang",):
        assert after == before
        return
    kind, culprits, victims, undecidable = before
    assert after == (kind, {shuffled[rank] for rank in culprits}, {shuffled[rank] for rank in victims}, undecidable)


def test_stacks_of_a_thousand_alike_ranks_are_kept_once() -> None:
    hang = Job(ranks=1000).alone(3).hang()
    assert [len(group.ranks) for group in hang.stacks] == [1, 999]
    assert hang.stacks[1].threads == IN_ALL_REDUCE
    assert isinstance(hang.stacks[1].threads[0], ThreadStack)
    assert isinstance(hang.stacks[0].threads[0].frames[0], Frame)
