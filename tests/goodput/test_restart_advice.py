"""After a failure: a fixed table of decisions for deaths of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import ANCHOR_WALL_NS, Cluster, Death

from stepscope.goodput.restart_advice import DECISIONS, EXIT_CODES, REPETITIONS, AttemptEnd, advise
from stepscope.records.hang import Culprit, Frame, HangRecord, RankThere
from stepscope.records.series import RankError, RunData

SECOND = 10**9
HERE = Path(__file__).parent
LOADER = '  File "/x/torch/utils/data/_utils/worker.py", line 349, in _worker_loop\n'
COLLECTIVE = '  File "/x/torch/distributed/distributed_c10d.py", line 2806, in all_reduce\n'


def failed(
    rank: int | None = 1,
    kind: str = "",
    message: str = "",
    *,
    steps: int = 50,
    state: Any = "exception",
    traceback: str = "",
    code: int = 1,
    hosts: int = 2,
    attempt: int = 0,
    **more: Any,
) -> RunData:
    """Four ranks on two hosts; ``rank`` dies first."""
    deaths = () if rank is None else (Death(rank=rank, step=steps, state=state, phase="forward"),)
    errors = (
        ()
        if rank is None or not kind
        else (
            RankError(
                rank=rank,
                pid=1000 + 10_000 * attempt + rank,
                type=kind,
                message=message,
                traceback=traceback,
                wall_ns=ANCHOR_WALL_NS + 50 * SECOND,
                step=steps,
            ),
        )
    )
    end = {"status": "failed", "exit_code": code, "wall_ns": ANCHOR_WALL_NS + 60 * SECOND}
    run = Cluster(
        ranks=4, steps=max(steps, 1), hosts=hosts, deaths=deaths, errors=errors, attempt=attempt, meta={"end": end}
    ).run()
    return replace(run, **more)


def killed(rank: int, code: int) -> RunData:
    launcher = RankError(
        rank=None,
        pid=1,
        type="ChildFailedError",
        message="",
        exit_codes={rank: code},
        wall_ns=ANCHOR_WALL_NS + 55 * SECOND,
    )
    run = failed(rank, state="vanished")
    return replace(run, errors=(launcher,))


def interrupted(code: int, message: str = "") -> RunData:
    run = failed(None)
    end = {"status": "interrupted", "exit_code": code, "wall_ns": ANCHOR_WALL_NS + 60 * SECOND}
    errors = (RankError(rank=None, pid=1, type="SignalException", message=message),) if message else ()
    return replace(run, meta={**run.meta, "end": end}, errors=errors)


def hung(kind: Any, *, state: str = "S", culprits: tuple[int, ...] = (2,), idle: bool = False) -> RunData:
    at, cpu_share = (Frame(file="train.py", line=27, function="train"), 0.0) if idle else (None, None)
    hang = HangRecord(
        number=1, host="node0", kind=kind, title="It hangs.", declared_wall_ns=ANCHOR_WALL_NS, over="aborted",
        stopped_wall_ns=ANCHOR_WALL_NS + SECOND, threshold_s=10.0,
        culprits=tuple(Culprit(rank=rank, reason="sleeps") for rank in culprits),
        ranks=tuple(RankThere(rank=r, pid=r, process_state=state, at=at, cpu_share=cpu_share) for r in culprits),
    )  # fmt: skip
    return failed(None, hangs=(hang,))


def hung_and_interrupted(code: int, *, declared_s: float, message: str = "", signal_s: float = 0.0) -> RunData:
    """A rank skipped a collective; the job was ended 300 s after it began."""
    run = hung("hang_missing_collective")
    (hang,) = run.hangs
    hang = replace(hang, declared_wall_ns=ANCHOR_WALL_NS + round(declared_s * SECOND), over="ended")
    end = {"status": "interrupted", "exit_code": code, "wall_ns": ANCHOR_WALL_NS + 300 * SECOND}
    wall_ns = ANCHOR_WALL_NS + round(signal_s * SECOND)
    errors = (RankError(rank=None, pid=1, type="SignalException", message=message, wall_ns=wall_ns),) if message else ()
    return replace(run, hangs=(hang,), meta={**run.meta, "end": end}, errors=errors)


def with_nodes(run: RunData, *, silent_s: float = 0.0, events: tuple[dict[str, Any], ...] = ()) -> RunData:
    """The job of node 0; nodes 1 and 2 never reported their end, node 1 was last heard of some time before node 2."""
    nodes: list[dict[str, Any]] = [{"node": number, "host": f"node{number}", "bye": None} for number in (0, 1, 2)]
    for node in nodes:
        silent_ns = round(silent_s * SECOND) if node["node"] == 1 else 0
        heard_ns = ANCHOR_WALL_NS + 120 * SECOND - silent_ns
        node |= {"here": node["node"] == 0, "replaced_by": "", "heard_wall_ns": heard_ns}
    return replace(run, nodes=tuple(nodes), events=events)


def hub_event(event: str, at_s: float, **more: Any) -> dict[str, Any]:
    return {"event": event, "node": 1, "host": "node1", "wall_ns": ANCHOR_WALL_NS + round(at_s * SECOND), **more}


def without_end(run: RunData) -> RunData:
    return replace(run, meta={**run.meta, "end": None})


def finished(*, steps: tuple[int, ...] = (50, 50, 50, 50)) -> RunData:
    deaths = tuple(Death(rank=rank, step=count, state="exited") for rank, count in enumerate(steps) if count < 50)
    end = {"status": "finished", "exit_code": 0, "wall_ns": ANCHOR_WALL_NS + 60 * SECOND}
    return Cluster(ranks=4, steps=50, hosts=2, deaths=deaths, meta={"end": end}).run()


DEATHS: dict[str, Callable[[], RunData]] = {
    "out of memory on the device": lambda: failed(
        1, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."
    ),
    "out of memory on the host": lambda: failed(1, "MemoryError", ""),
    "NaN": lambda: failed(1, "AssertionError", "loss is nan at step 50"),
    "NaN found by autograd": lambda: failed(
        1, "RuntimeError", "Function 'MulBackward0' returned nan values in its 0th output."
    ),
    "assertion": lambda: failed(1, "AssertionError", "batch has 3 labels"),
    "SIGKILL": lambda: killed(1, -9),
    "segmentation fault": lambda: killed(1, -11),
    "node gone": lambda: with_nodes(failed(2, state="vanished"), events=(hub_event("node_lost", 40),)),
    "node gone, after its hub": lambda: with_nodes(failed(2, state="vanished"), silent_s=70),
    "node gone and back": lambda: with_nodes(
        failed(2, state="vanished"), events=(hub_event("node_lost", 20), hub_event("node_back", 40))
    ),
    "node gone, peers lose connections": lambda: with_nodes(
        failed(0, "RuntimeError", "[gloo/transport/tcp/pair.cc:537] Connection reset by peer"),
        events=(hub_event("node_lost", 40),),
    ),
    "node gone, then preempted": lambda: with_nodes(interrupted(143), events=(hub_event("node_lost", 1),)),
    "head node gone": lambda: with_nodes(without_end(failed(None))),
    "SIGTERM, nodes killed at once": lambda: with_nodes(interrupted(143), events=(hub_event("node_lost", 75),)),
    "Ctrl-C, nodes killed at once": lambda: with_nodes(interrupted(130)),
    "hang, nodes killed at once": lambda: with_nodes(
        hung("hang_missing_collective"), events=(hub_event("node_lost", 75),)
    ),
    "code error, nodes killed at once": lambda: with_nodes(
        failed(0, "ValueError", "bad shape"), events=(hub_event("node_lost", 75),)
    ),
    "NCCL timeout": lambda: failed(
        1,
        "DistBackendError",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
        traceback=COLLECTIVE,
    ),
    "NCCL error of the network": lambda: failed(
        1,
        "DistBackendError",
        "NCCL error: unhandled system error, ncclSystemError: connection closed by peer",
        traceback=COLLECTIVE,
    ),
    "disk full": lambda: failed(0, "OSError", "[Errno 28] No space left on device"),
    "disk full in torch.save": lambda: failed(
        0, "RuntimeError", "PytorchStreamWriter failed writing file data/0: No space left on device"
    ),
    "import error": lambda: failed(1, "ModuleNotFoundError", "No module named 'flash_attn'"),
    "data error on one rank": lambda: failed(
        1, "ValueError", "Caught ValueError in DataLoader worker process 0.", traceback=LOADER
    ),
    "storage error on one rank": lambda: failed(
        1, "OSError", "[Errno 116] Stale file handle: 'shard-7'", traceback=LOADER
    ),
    "ECC error": lambda: failed(2, "RuntimeError", "CUDA error: uncorrectable ECC error encountered"),
    "preemption by SIGTERM": lambda: interrupted(143),
    "preemption of torchrun": lambda: interrupted(1, "Process 7 got signal: 15"),
    "Ctrl-C": lambda: interrupted(130),
    "hang: a rank skipped a collective": lambda: hung("hang_missing_collective"),
    "hang: a rank waits for a lock": lambda: hung("hang_missing_collective", idle=True),
    "hang, then SIGTERM": lambda: hung_and_interrupted(143, declared_s=20),
    "hang, then SIGTERM to torchrun": lambda: hung_and_interrupted(
        1, declared_s=20, message="Process 7 got signal: 15", signal_s=90
    ),
    "hang, then Ctrl-C": lambda: hung_and_interrupted(130, declared_s=20),
    "SIGTERM, then ranks wait for a checkpoint": lambda: hung_and_interrupted(143, declared_s=290),
    "SIGTERM to torchrun, then ranks wait": lambda: hung_and_interrupted(
        1, declared_s=120, message="Process 7 got signal: 15", signal_s=90
    ),
    "hang: cause unknown": lambda: hung("hang_unknown", culprits=()),
    "hang: a rank waits for its disk": lambda: hung("hang_host", state="D"),
    "hang: the device": lambda: hung("hang_device"),
    "exit 0 too early on one rank": lambda: finished(steps=(50, 50, 20, 50)),
    "exit code 3": lambda: failed(1, "SystemExit", "3"),
    "finished": finished,
}


def test_the_table_of_decisions(golden: Callable[[Path, str], None]) -> None:
    lines = []
    for name, made in DEATHS.items():
        advice = advise(made())
        where = " ".join((advice.decision, *advice.hosts))
        lines.append(f"{name:<34}  {advice.cause:<21}  {where:<27}  {advice.exit_code}")
    lines.append(f"{'exit 0 before --steps':<34}  {advise(finished(), expected_steps=60).cause:<21}  stop")
    lines.append(f"{'active':<34}  {advise(failed(None), alive=True).cause:<21}  unknown")
    golden(HERE / "decisions.txt", "\n".join(line.rstrip() for line in lines) + "\n")


@pytest.mark.parametrize("name", DEATHS)
def test_every_decision_has_its_evidence(name: str) -> None:
    document = advise(DEATHS[name]()).to_dict()
    assert document["evidence"], name
    assert all(line["source"] and line["text"] for line in document["evidence"])
    end = AttemptEnd.from_dict(document["end"])
    assert (end.cause, end.steps) == (document["end"]["cause"], document["end"]["steps"])


def test_steps_that_the_user_expects() -> None:
    assert advise(finished(), expected_steps=50).decision == "none"
    early = advise(finished(), expected_steps=60)
    assert (early.decision, early.cause, early.exit_code) == ("stop", "ended_early", 20)
    assert early.evidence[0] == ("steps", "50 of 60 steps")


def end(**more: Any) -> AttemptEnd:
    return AttemptEnd(**{"attempt": 0, "cause": "killed", "host": "node0", "hosts": 2, "step": 20, "steps": 21, **more})


@pytest.mark.parametrize(
    ("earlier", "decision", "cause"),
    [
        ([], "restart", "killed"),
        ([end(step=49, steps=50)], "stop", "same_failure"),
        ([end(step=48)], "restart_without_host", "same_host"),
        ([end(step=48, host="node1")], "restart", "killed"),
        ([end(step=48, cause="preempted")], "restart", "killed"),
        ([end(step=49, cause="native_crash", host="node1")], "restart", "killed"),
    ],
)
def test_what_comes_back_is_not_started_again(earlier: list[AttemptEnd], decision: str, cause: str) -> None:
    """Rank 1, on node0, was killed after step 49."""
    advice = advise(killed(1, -9), earlier=earlier)
    assert (advice.decision, advice.cause) == (decision, cause)


@pytest.mark.parametrize(
    ("earlier", "decision"),
    [
        ([end(cause="preempted", step=None, steps=0)] * 2, "restart"),
        ([end(cause="temporary_error", step=None, steps=0), end(cause="preempted", step=None, steps=0)], "restart"),
        ([end(cause="temporary_error", step=None, steps=0)] * 2, "stop"),
    ],
)
def test_a_preemption_before_the_first_step_is_no_failure(earlier: list[AttemptEnd], decision: str) -> None:
    run = replace(failed(1, "TimeoutError", "rendezvous timed out"), ranks=())
    assert advise(run, earlier=earlier).decision == decision


def test_attempts_that_never_reach_a_step() -> None:
    nothing = [end(step=None, steps=0, host="", cause="temporary_error", type="TimeoutError")] * 2
    run = replace(failed(1, "TimeoutError", "rendezvous timed out"), ranks=())
    assert advise(run, earlier=nothing[:1]).decision == "restart"
    advice = advise(run, earlier=nothing)
    assert (advice.decision, advice.cause) == ("stop", "no_step")
    assert advice.evidence[-1] == ("attempts", "3 attempts in a row made no step")


def test_a_preempted_job_is_started_again_however_often() -> None:
    assert advise(interrupted(143), earlier=[end(cause="preempted", step=None)] * 9).decision == "restart"


def test_earlier_attempts_of_a_run_count() -> None:
    first, second = killed(1, -9), failed(1, state="vanished", attempt=1)
    later = tuple(
        replace(
            each,
            anchor_wall_ns=each.anchor_wall_ns + 100 * SECOND,
            ended_wall_ns=(each.ended_wall_ns or 0) + 100 * SECOND,
        )
        for each in second.ranks
    )
    launchers = (*first.errors, replace(first.errors[0], pid=2, wall_ns=ANCHOR_WALL_NS + 155 * SECOND))
    run = replace(second, ranks=(*first.ranks, *later), errors=launchers)
    assert advise(run).cause == "same_failure"


def test_the_docs_have_the_tables(root: Path) -> None:
    text = (root / "docs" / "restart-advice.md").read_text()
    for cause, (decision, reason) in {**DECISIONS, **REPETITIONS}.items():
        assert f"| `{cause}` | `{decision}` | {reason} |" in text
    for decision, code in EXIT_CODES.items():
        assert f"| {code} | `{decision}`" in text
    for raw in ({}, {"attempt": 0, "cause": "no such"}):
        with pytest.raises(ValueError, match="not the end"):
            AttemptEnd.from_dict(raw)
