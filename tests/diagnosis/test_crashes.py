"""Who died first, of what; and who was only taken along."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.cluster import ANCHOR_WALL_NS, Cluster, Death, slow_at

from stepscope.diagnosis import build_window, diagnose
from stepscope.diagnosis.engine.attempts import attempts_of
from stepscope.diagnosis.rules.crashes import failures_in, failures_of
from stepscope.records.finding import Finding
from stepscope.records.series import RankError, RunData

GLOO = "[pair.cc:534] Connection closed by peer [127.0.0.1]:3312. This is typically caused by a remote worker crashing."


def crash_of(cluster: Cluster) -> Finding:
    run = cluster.run()
    found, *rest = diagnose(run, build_window(run))
    assert found.kind == "rank_crashed"
    assert found.severity == "critical"
    assert all(finding.kind != "rank_crashed" for finding in rest)
    return found


def raised(rank: int | None, type_name: str, message: str, *, at_s: float = 1.0, **more: Any) -> RankError:
    pid = 1000 + rank if rank is not None else 99
    wall_ns = ANCHOR_WALL_NS + int(at_s * 1e9)
    return RankError(rank=rank, pid=pid, type=type_name, message=message, wall_ns=wall_ns, **more)


def test_a_rank_that_was_killed_leads_though_its_peers_speak_first() -> None:
    found = crash_of(
        Cluster(
            ranks=3,
            steps=50,
            deaths=(
                Death(rank=1, step=40, phase="forward"),
                Death(rank=0, step=41, state="exception"),
                Death(rank=2, step=41, state="exception"),
            ),
            errors=(
                raised(0, "RuntimeError", GLOO, at_s=0.5),
                raised(
                    2, "DistBackendError", "NCCL error: remote process exited or there was a network error", at_s=0.6
                ),
                raised(None, "ChildFailedError", "train.py FAILED", exit_codes={0: 1, 1: -9, 2: -15}),
            ),
        )
    )
    assert found.title == "Rank 1 was killed by SIGKILL (in step 40, in forward)."
    assert (found.ranks, found.phase, found.steps) == ((1,), "forward", (39, 39))
    assert found.evidence["signal"] == "SIGKILL"
    assert found.evidence["last_step"] == 39
    assert [victim["rank"] for victim in found.evidence["followed_by"]] == [0, 2]


def test_an_exception_leads_and_the_ranks_that_the_launcher_stopped_follow() -> None:
    found = crash_of(
        Cluster(
            ranks=4,
            steps=50,
            deaths=(Death(rank=3, step=30, state="exception"), Death(rank=0, step=31), Death(rank=1, step=31)),
            errors=(
                raised(3, "ValueError", "expected 3 channels\n  got 4", step=30),
                raised(None, "ChildFailedError", "", exit_codes={3: 1, 0: -15}),
            ),
        )
    )
    assert found.title == "Rank 3 raised ValueError: expected 3 channels got 4 (in step 30, in backward)."
    assert found.ranks == (3,)
    assert found.evidence["followers"] == 2
    assert found.confidence == 0.97


def test_a_launcher_that_claims_a_rank_is_not_believed() -> None:
    found = crash_of(
        Cluster(
            ranks=2,
            steps=30,
            deaths=(Death(rank=1, step=20), Death(rank=0, step=21)),
            errors=(raised(0, "ChildFailedError", "FAILED", exit_codes={1: -11}),),
        )
    )
    assert found.title == "Rank 1 was killed by SIGSEGV (in step 20, in backward)."
    assert found.advice[0].startswith("A crash in native code")


def test_the_earliest_of_two_exceptions_leads() -> None:
    errors = (raised(0, "KeyError", "'x'", at_s=2.0), raised(2, "ValueError", "bad", at_s=1.0))
    found = crash_of(Cluster(ranks=3, steps=30, errors=errors))
    assert (found.ranks, found.evidence["exception"]) == ((2,), "ValueError")


def test_a_bug_that_hits_all_ranks_alike_is_one_finding() -> None:
    errors = tuple(raised(rank, "ImportError", "no module named x", at_s=rank) for rank in range(3))
    found = crash_of(Cluster(ranks=3, steps=0, errors=errors))
    assert found.title == "All 3 ranks raised ImportError: no module named x before the first step was complete."
    assert found.ranks == (0, 1, 2)


def test_a_script_that_never_trained() -> None:
    run = Cluster(ranks=0, steps=0, errors=(raised(0, "SyntaxError", "invalid syntax"),)).run()
    (found,) = diagnose(run, build_window(run))
    assert found.title == "The script raised SyntaxError: invalid syntax before the first step was complete."
    assert (found.ranks, found.steps, found.phase) == ((0,), None, None)


def test_a_network_failure_with_nobody_to_blame_leads_itself() -> None:
    found = crash_of(Cluster(ranks=2, steps=30, errors=(raised(0, "RuntimeError", GLOO),)))
    assert found.ranks == (0,)


REFUSED = """Traceback (most recent call last):
  File "/code/train.py", line 9, in <module>
    batch = fetch(url)
ConnectionRefusedError: [Errno 111] Connection refused
"""


def test_a_connection_of_the_script_itself_is_no_peer_that_was_lost() -> None:
    """The rank that its launcher ended at once has said nothing: it vanished, and that is no reason to accuse it."""
    errors = (raised(1, "ConnectionRefusedError", "[Errno 111] Connection refused", traceback=REFUSED),)
    deaths = (Death(rank=1, step=30, state="exception"), Death(rank=0, step=30))
    found = crash_of(Cluster(ranks=2, steps=50, deaths=deaths, errors=errors))
    assert found.title.startswith("Rank 1 raised ConnectionRefusedError: [Errno 111] Connection refused (in step 30")
    assert [follower["rank"] for follower in found.evidence["followed_by"]] == [0]


def test_a_rank_that_vanished_without_a_word() -> None:
    found = crash_of(Cluster(ranks=2, steps=50, deaths=(Death(rank=1, step=40, phase="input"),)))
    assert found.title == "Rank 1 vanished (in step 40, in input)."
    assert found.confidence == 0.7


@pytest.mark.parametrize(("code", "message"), [(137, "was killed by SIGKILL"), (3, "exited with code 3")])
def test_the_exit_code_of_a_single_process_is_its_ranks(code: int, message: str) -> None:
    end = {"exit_code": code, "status": "crashed", "wall_ns": 1}
    found = crash_of(Cluster(ranks=1, steps=20, deaths=(Death(rank=0, step=12),), meta={"end": end}))
    assert found.title == f"The script {message} (in step 12, in backward)."


def test_preemption_of_the_whole_job_is_told_as_such() -> None:
    error = raised(None, "ChildFailedError", "", exit_codes={0: -15, 1: -15})
    deaths = (Death(rank=0, step=20), Death(rank=1, step=20))
    found = crash_of(Cluster(ranks=2, steps=30, deaths=deaths, errors=(error,)))
    assert found.title == "All 2 ranks were killed by SIGTERM (in step 20, in backward)."
    assert "preemption" in found.advice[0]


def test_ctrl_c_is_no_crash() -> None:
    end = {"exit_code": 130, "status": "interrupted", "wall_ns": 1}
    run = Cluster(
        ranks=2,
        steps=30,
        deaths=(Death(rank=0, step=20, state="exception"), Death(rank=1, step=20)),
        errors=(raised(0, "KeyboardInterrupt", ""),),
        meta={"end": end},
    ).run()
    assert failures_of(run) == []
    assert {finding.kind for finding in diagnose(run, build_window(run))} == {"healthy", "compute_bound"}


def test_an_exception_during_an_interruption_is_still_one() -> None:
    end = {"exit_code": 130, "status": "interrupted", "wall_ns": 1}
    found = crash_of(Cluster(ranks=1, steps=30, errors=(raised(0, "ValueError", "bad"),), meta={"end": end}))
    assert found.evidence["exception"] == "ValueError"


def test_a_rank_that_finished_is_no_failure() -> None:
    assert failures_of(Cluster(ranks=2, steps=30).run()) == []
    assert failures_of(Cluster(ranks=2, steps=30, unfinished={0: 20}).run()) == []


FINISHED = {"end": {"exit_code": 0, "status": "finished", "wall_ns": 1}}


def test_workers_that_their_own_job_ended_when_they_were_done_are_no_crash() -> None:
    """Ray kills its workers, a parent its child; neither leaves a word."""
    done = tuple(Death(rank=rank, step=30, phase="other") for rank in range(2))
    run = Cluster(ranks=2, steps=30, deaths=done, meta=FINISHED).run()
    assert failures_of(run) == []
    assert {finding.kind for finding in diagnose(run, build_window(run))} == {"healthy", "compute_bound"}
    going_on = replace(run, meta={**run.meta, "end": None})
    assert failures_of(going_on, alive=True) == []
    assert [failure.cause for failure in failures_of(going_on)] == ["vanished"] * 2


@pytest.mark.parametrize("death", [Death(rank=1, step=20, phase="other"), Death(rank=1, step=30, phase="forward")])
def test_a_rank_that_was_ended_early_in_a_job_that_ended_well_is_a_remark(death: Death) -> None:
    other = Death(rank=0, step=30, phase="other")
    run = Cluster(ranks=2, steps=30, deaths=(other, death), meta=FINISHED).run()
    first, *rest = diagnose(run, build_window(run))
    assert first.kind == "healthy"
    (remark,) = [finding for finding in rest if finding.kind == "rank_crashed"]
    where = ", in forward" if death.phase == "forward" else ""
    assert remark.title == (
        f"Rank 1 vanished (in step {death.step}{where}); the job continued and ended with exit code 0."
    )
    assert (remark.severity, remark.ranks, remark.cost["seconds"]) == ("info", (1,), 0)


def test_the_kernels_kill_in_a_job_that_ended_well_is_a_remark() -> None:
    deaths = tuple(Death(rank=rank, step=30, phase="other") for rank in range(2))
    run = Cluster(ranks=2, steps=30, deaths=deaths, meta=FINISHED).run()
    pid = next(series.identity.pid for series in run.ranks if series.rank == 1)
    end = {"event": "rank_end", "rank": 1, "pid": pid, "state": "vanished", "oom_kill": True}
    first, *rest = diagnose(replace(run, events=(end,)), build_window(run))
    assert first.kind == "healthy"
    (remark,) = [finding for finding in rest if finding.kind == "rank_crashed"]
    assert remark.title == (
        "Rank 1 was killed by the kernel for lack of memory (in step 30); the job continued and ended with exit code 0."
    )
    assert remark.severity == "info"


def of_script(type_name: str, message: str, *, at_s: float = 20.0) -> RankError:
    """As it is written down: a rank that nobody gave it."""
    return replace(raised(0, type_name, message, at_s=at_s), pid=7, script=True)


FAILED = {"end": {"exit_code": 1, "status": "failed", "wall_ns": 1}}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("killed", [True, False])
def test_a_script_that_fails_after_its_ranks_were_done_is_no_attempt(ranks: int, killed: bool) -> None:
    deaths = tuple(Death(rank=rank, step=30, phase="other") for rank in range(ranks)) if killed else ()
    errors = (of_script("KeyError", "'accuracy'"),)
    run = Cluster(ranks=ranks, steps=30, deaths=deaths, errors=errors, meta=FAILED).run()
    (attempt,) = attempts_of(run)
    assert [error.type for error in attempt.errors] == ["KeyError"]
    found = diagnose(run, build_window(run))[0]
    assert found.title == "The script raised KeyError: 'accuracy' (after step 29)."
    assert (found.severity, found.ranks, found.evidence["cause"]) == ("critical", (), "exception")
    followers = {follower["rank"] for follower in found.evidence["followed_by"]}
    assert followers == (set(range(ranks)) if killed else set())


def test_a_rank_that_spoke_before_its_script_leads() -> None:
    errors = (raised(1, "ValueError", "bad", at_s=0.5), of_script("RuntimeError", "a worker failed"))
    deaths = (Death(rank=1, step=20, state="exception"), Death(rank=0, step=20))
    found = crash_of(Cluster(ranks=2, steps=30, deaths=deaths, errors=errors, meta=FAILED))
    assert found.title == "Rank 1 raised ValueError: bad (in step 20, in backward)."
    assert [(follower["rank"], follower["exception"]) for follower in found.evidence["followed_by"]] == [
        (0, None),
        (None, "RuntimeError"),
    ]


def test_a_script_that_says_what_became_of_ranks_that_said_nothing_leads() -> None:
    """Ray keeps the exception of a worker to itself, ends all of them, and raises it in the driver."""
    deaths = (Death(rank=1, step=20, phase="other"), Death(rank=0, step=20, phase="comm"))
    errors = (of_script("WorkerGroupError", "rank 1: ValueError: bad"),)
    found = crash_of(Cluster(ranks=2, steps=30, deaths=deaths, errors=errors, meta=FAILED))
    assert found.title == "The script raised WorkerGroupError: rank 1: ValueError: bad (after step 19)."


def test_what_is_lost_is_what_came_after_the_last_checkpoint() -> None:
    deaths = (Death(rank=1, step=50),)
    nothing_saved = crash_of(Cluster(ranks=2, steps=50, noise=0.0, warmup_steps=0, deaths=deaths))
    assert nothing_saved.cost["share"] == 1.0
    assert nothing_saved.evidence["checkpoint_step"] is None
    saving = (slow_at(0, "checkpoint", 5.0, range(29, 30)),)
    saved = crash_of(Cluster(ranks=2, steps=50, noise=0.0, warmup_steps=0, deaths=deaths, faults=saving))
    assert saved.evidence["checkpoint_step"] == 29
    assert saved.cost["seconds"] == pytest.approx(20 * 0.039, abs=0.01)
    assert saved.cost["if_fixed"] is None


def test_little_memory_before_a_sigkill_points_at_the_kernel() -> None:
    low = {"kind": "host", "node": "node0", "wall_ns": ANCHOR_WALL_NS, "mem_available": 1, "mem_total": 100}
    end = {"exit_code": 137, "status": "crashed", "wall_ns": 1}
    cluster = Cluster(ranks=1, steps=20, deaths=(Death(rank=0, step=12),), samples=(low,), meta={"end": end})
    assert "out-of-memory killer is the likely sender" in crash_of(cluster).advice[0]


def test_device_out_of_memory_has_its_own_advice() -> None:
    error = raised(0, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 20 MiB")
    assert crash_of(Cluster(ranks=1, steps=20, errors=(error,))).advice[0].startswith("The device ran out of memory")


def two_attempts(first: Cluster, second: Cluster, *errors: RankError) -> RunData:
    """The second begins a minute after the first."""
    run = second.run()
    later = tuple(
        replace(series, anchor_wall_ns=series.anchor_wall_ns + 60 * 10**9, ended_wall_ns=None) for series in run.ranks
    )
    return replace(run, ranks=(*first.series(), *later), errors=errors)


def test_each_attempt_keeps_its_own_errors() -> None:
    """The last attempt leads, with its own error and step, though other errors of its ranks were written."""
    run = two_attempts(
        Cluster(ranks=2, steps=30, deaths=(Death(rank=0, step=25), Death(rank=1, step=25, state="exception"))),
        Cluster(ranks=2, steps=8, attempt=1, deaths=(Death(rank=1, step=7, state="exception", phase="forward"),)),
        raised(1, "KeyError", "'first'", at_s=1.0),
        replace(raised(0, "RuntimeError", GLOO, at_s=62.0), pid=11_000),
        replace(raised(1, "ValueError", "second", at_s=61.0), pid=11_001),
        replace(raised(1, "AttributeError", "at exit", at_s=61.5), pid=12_345),
        raised(None, "ChildFailedError", "", at_s=63.0, exit_codes={0: 1, 1: 1}),
    )
    first, second = attempts_of(run)
    assert [error.type for error in first.errors] == ["KeyError"]
    assert [error.type for error in second.errors] == [
        "ValueError", "AttributeError", "RuntimeError", "ChildFailedError"
    ]  # fmt: skip
    found = diagnose(run, build_window(run))[0]
    assert found.title == "Rank 1 raised ValueError: second (in step 7, in forward)."
    assert found.evidence["attempt"] == 1
    assert [failure.type for failure in failures_in(run, first)] == ["KeyError", ""]


def test_an_attempt_of_which_nothing_was_recorded_is_known_by_its_errors() -> None:
    first = Cluster(ranks=2, steps=30, deaths=(Death(rank=0, step=20), Death(rank=1, step=20, state="exception")))
    errors = (
        raised(1, "KeyError", "'first'", at_s=1.5),
        replace(raised(1, "ValueError", "second", at_s=30.0), pid=7),
        raised(None, "ChildFailedError", "", at_s=31.0, exit_codes={1: 1}),
    )
    run = replace(first.run(), errors=errors)
    assert [(attempt.number, len(attempt.series), len(attempt.errors)) for attempt in attempts_of(run)] == [
        (0, 2, 1),
        (1, 0, 2),
    ]
    found = diagnose(run, build_window(run))[0]
    assert found.title == "Rank 1 raised ValueError: second before the first step was complete."
    assert found.cost["seconds"] == 0


def test_an_error_before_anything_was_recorded_is_of_the_attempt_before() -> None:
    only = Cluster(ranks=2, steps=30, attempt=1).run()
    run = replace(only, errors=(replace(raised(0, "OSError", "no address", at_s=-20.0), pid=7),))
    assert [(attempt.number, len(attempt.errors)) for attempt in attempts_of(run)] == [(0, 1), (1, 0)]
    assert failures_of(run) == []


def test_failures_of_an_earlier_attempt_are_over() -> None:
    first = Cluster(ranks=2, steps=30, deaths=(Death(rank=1, step=20),))
    second = Cluster(ranks=2, steps=30, attempt=1, errors=(raised(1, "ValueError", "bad"),)).run()
    run = Cluster(ranks=0, steps=0).run()
    both = type(run)(**{**vars(second), "ranks": (*first.series(), *second.ranks)})
    assert failures_of(both) == []


@pytest.mark.parametrize(
    ("type_name", "message", "cause"),
    [
        ("ValueError", "bad", "exception"),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20 MiB", "oom_cuda"),
        ("RuntimeError", "CUDA error: out of memory", "oom_cuda"),
        ("MemoryError", "", "oom_host"),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", "oom_host"),
        ("OSError", "[Errno 12] Cannot allocate memory", "oom_host"),
    ],
)
def test_causes_of_exceptions(type_name: str, message: str, cause: str) -> None:
    found = crash_of(Cluster(ranks=2, steps=20, errors=(raised(1, type_name, message),)))
    assert (found.evidence["cause"], found.ranks) == (cause, (1,))
    if cause == "oom_host":
        assert found.advice[0].startswith("The host, or a limit")


@pytest.mark.parametrize(("code", "cause"), [(-9, "signal"), (7, "exit_code"), (None, "vanished")])
def test_causes_of_those_who_said_nothing(code: int | None, cause: str) -> None:
    errors = () if code is None else (raised(None, "ChildFailedError", "", exit_codes={1: code}),)
    found = crash_of(Cluster(ranks=2, steps=30, deaths=(Death(rank=1, step=20),), errors=errors))
    assert (found.evidence["cause"], found.ranks) == (cause, (1,))


def test_the_kernels_kill_is_told_by_the_agent() -> None:
    cluster = Cluster(
        ranks=2,
        steps=30,
        deaths=(Death(rank=1, step=20), Death(rank=0, step=20, state="exception")),
        errors=(raised(0, "RuntimeError", GLOO, at_s=0.1),),
    )
    run = cluster.run()
    pid = next(series.identity.pid for series in run.ranks if series.rank == 1)
    end = {"event": "rank_end", "rank": 1, "pid": pid, "state": "vanished", "oom_kill": True}
    found = diagnose(replace(run, events=(end,)), build_window(run))[0]
    assert found.title == "Rank 1 was killed by the kernel for lack of memory (in step 20, in backward)."
    assert (found.evidence["cause"], found.confidence) == ("oom_kernel", 0.97)
    assert "dmesg lists each process's usage" in found.advice[0]


@pytest.mark.parametrize(
    ("type_name", "message"),
    [
        ("RuntimeError", "[pair.cc:537] Read error [127.0.0.1]:10981: Connection reset by peer."),
        ("RuntimeError", "[unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"),
        ("RuntimeError", "Application timeout caused pair closure"),
        ("RuntimeError", "[pair.cc:553] Read timeout [127.0.0.1]:2"),
        ("DistBackendError", "NCCL error in: x.cpp:1, remote process exited: ncclRemoteError"),
        ("DistBackendError", "[Rank 0] ProcessGroupNCCL's watchdog got stuck"),
        ("DistNetworkError", "The client socket has failed"),
        ("DistStoreError", "wait timeout after 300000ms"),
    ],
)
def test_who_lost_a_peer_does_not_lead_though_it_speaks_first(type_name: str, message: str) -> None:
    errors = (raised(0, type_name, message, at_s=0.1), raised(1, "ValueError", "bad", at_s=0.9))
    found = crash_of(Cluster(ranks=2, steps=20, errors=errors))
    assert (found.ranks, found.evidence["exception"]) == ((1,), "ValueError")


def test_where_all_lost_a_peer_those_who_said_so_lead_not_those_who_were_stopped() -> None:
    errors = (
        raised(1, "RuntimeError", GLOO, at_s=0.9),
        raised(None, "ChildFailedError", "", exit_codes={0: -15, 1: 1}),
    )
    deaths = (Death(rank=0, step=19), Death(rank=1, step=20, state="exception"))
    found = crash_of(Cluster(ranks=2, steps=20, errors=errors, deaths=deaths))
    assert (found.ranks, found.evidence["followers"]) == ((1,), 1)


@pytest.mark.parametrize(("vanished_s", "lead"), [(30.0, "Rank 0 raised RuntimeError"), (2.0, "Rank 1 vanished")])
def test_who_raised_long_before_another_vanished_was_not_taken_along(vanished_s: float, lead: str) -> None:
    run = Cluster(
        ranks=2,
        steps=40,
        hosts=2,
        deaths=(Death(rank=0, step=30, state="exception"), Death(rank=1, step=30)),
        errors=(raised(0, "RuntimeError", GLOO, at_s=1.0),),
    ).run()
    ended_ns = ANCHOR_WALL_NS + int(vanished_s * 1e9)
    run = replace(run, ranks=tuple(replace(rank, ended_wall_ns=ended_ns) if rank.rank else rank for rank in run.ranks))
    found = diagnose(run, build_window(run))[0]
    assert found.kind == "rank_crashed"
    assert found.title.startswith(lead)
    assert (" on node1 " in found.title) is lead.endswith("vanished")


def test_a_phase_that_is_older_than_the_last_step_is_not_told() -> None:
    run = Cluster(ranks=2, steps=40, deaths=(Death(rank=1, step=30, phase="forward"),)).run()
    stale = tuple(replace(rank, live_since_ns=1) if rank.rank else rank for rank in run.ranks)
    assert [failure.phase for failure in failures_of(replace(run, ranks=stale))] == [None]


WATCHDOG = "[rank1]:[E1116 12:00 ProcessGroupNCCL.cpp:1] Process group watchdog thread terminated: "


def aborted(native: dict[int | None, tuple[str, ...]], *deaths: int) -> Finding:
    cluster = Cluster(
        ranks=3,
        steps=50,
        deaths=tuple(Death(rank=rank, step=40) for rank in deaths),
        errors=(raised(None, "ChildFailedError", "", exit_codes=dict.fromkeys(deaths, -6)),),
    )
    run = replace(cluster.run(), native=native)
    return diagnose(run, build_window(run))[0]


def test_what_native_code_said_is_evidence() -> None:
    found = aborted({1: (WATCHDOG + "CUDA error: device-side assert triggered",), None: ("free(): of any",)}, 1)
    assert found.evidence["native"] == [WATCHDOG + "CUDA error: device-side assert triggered"]
    assert found.evidence["native_rank"] == 1
    assert found.advice[0].endswith("its last lines, shown below, say which.")


def test_what_is_in_the_output_of_the_job_alone_is_nobodys_unless_one_was_aborted() -> None:
    assert aborted({None: ("free(): of any",)}, 1).evidence["native_rank"] == 1
    both = aborted({None: ("free(): of any",)}, 0, 1)
    assert (both.evidence["native"], both.evidence["native_rank"]) == (["free(): of any"], None)


def test_one_whose_native_code_only_lost_a_peer_is_a_victim() -> None:
    native: dict[int | None, tuple[str, ...]] = {
        0: (WATCHDOG + "NCCL error: remote process exited or there was a network error",),
        2: (WATCHDOG + "CUDA error: an illegal memory access was encountered",),
    }
    found = aborted(native, 0, 2)
    assert (found.ranks, [follower["rank"] for follower in found.evidence["followed_by"]]) == ((2,), [0])
    assert found.evidence["native"] == list(native[2])


def test_a_killed_rank_has_no_share_in_what_others_printed() -> None:
    cluster = Cluster(
        ranks=2,
        steps=50,
        deaths=(Death(rank=1, step=40),),
        errors=(raised(None, "ChildFailedError", "", exit_codes={1: -9}),),
    )
    run = replace(cluster.run(), native={None: ("free(): of any",)})
    assert diagnose(run, build_window(run))[0].evidence["native"] == []


GLOO_THREAD = "terminate called without an active exception"


def died_at_exit(*deaths: Death, exit_codes: dict[int, int]) -> Finding:
    """Ranks that end their script; those with an exit code die while Python shuts down."""
    errors = (raised(None, "ChildFailedError", "", exit_codes=exit_codes),)
    run = Cluster(ranks=2, steps=80, deaths=deaths, errors=errors).run()
    run = replace(run, native={1: (GLOO_THREAD,)}, meta={**run.meta, "end": {"status": "failed", "exit_code": 1}})
    return diagnose(run, build_window(run))[0]


def test_a_rank_that_aborts_while_python_shuts_down_had_completed_its_training() -> None:
    found = died_at_exit(exit_codes={1: -6})
    assert found.title == (
        "Rank 1 ended the script and died by SIGABRT while Python shut down; the training itself was complete."
    )
    assert (found.kind, found.severity, found.cost["seconds"]) == ("rank_crashed", "warning", 0.0)
    assert found.evidence["at_exit"] is True
    assert "destroy_process_group()" in found.advice[0]
    assert "pytorch issue 190489" in found.advice[1]


def test_a_rank_that_aborts_at_its_end_and_takes_a_running_rank_along_is_critical() -> None:
    found = died_at_exit(Death(rank=0, step=70), exit_codes={0: -15, 1: -6})
    assert (
        found.title
        == "Rank 1 ended the script and died by SIGABRT while Python shut down; other ranks had not ended yet."
    )
    assert (found.severity, found.ranks) == ("critical", (1,))
    assert [follower["rank"] for follower in found.evidence["followed_by"]] == [0]


@pytest.mark.parametrize("code", [-9, -15])
def test_only_a_crash_of_native_code_is_one_of_the_shutdown(code: int) -> None:
    assert died_at_exit(exit_codes={1: code}).evidence["at_exit"] is False


def test_a_single_process_that_aborts_at_its_end_is_called_the_script() -> None:
    run = Cluster(ranks=1, steps=80, meta={"end": {"status": "crashed", "exit_code": 134}}).run()
    assert diagnose(run, build_window(run))[0].title == (
        "The script ended and died by SIGABRT while Python shut down; the training itself was complete."
    )
