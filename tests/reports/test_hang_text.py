"""A hang as the page shows it: grouped, ordered and in words."""

from __future__ import annotations

from typing import Any

from stepscope.records.hang import Culprit, Frame, HangRecord, RankThere, StackGroup, ThreadStack, WaitingIn
from stepscope.reports.hang_text import flight_view, hang_document, ring_of, stacks_view

TORCH = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
CALL = WaitingIn(group="0", description="default_pg", sequence=25, op="all_reduce", sizes="[512]", dtypes="Float")
SHARE = Frame(file="/job/train.py", line=73, function="share")
NEXT = Frame(file="/job/train.py", line=41, function="next")
SECOND = 10**9


def there(rank: int, **more: Any) -> RankThere:
    usual = {"step": 7, "phase": "comm", "since_s": 10.0, "process_state": "S", "cpu_share": 0.0, "waiting_in": CALL}
    return RankThere(**{"rank": rank, "pid": rank, "at": SHARE, **usual, **more})


def hang(**more: Any) -> HangRecord:
    usual: dict[str, Any] = {
        "number": 1,
        "host": "a",
        "kind": "hang_missing_collective",
        "title": "Rank 1 sleeps; rank 0 waits for it.",
        "declared_wall_ns": 112 * SECOND,
        "stopped_wall_ns": 100 * SECOND,
        "threshold_s": 10.0,
        "step_s": 0.08,
    }
    return HangRecord(**{**usual, **more})


def test_since_when_and_how_it_ended() -> None:
    def since(*, over: bool = False, **more: Any) -> str:
        return str(hang_document(hang(ranks=(there(0),), **more), over=over)["text"]["since"])

    usual = "; a step usually takes 80.0 ms."
    assert since() == f"No progress for {{duration}} in step 7{usual}"
    recovered = hang(ranks=(there(0),), over="recovered", over_wall_ns=130 * SECOND, step_s=None)
    assert hang_document(recovered, over=True)["text"]["since"] == "It hung for 30 s in step 7, then continued."
    assert since(over=True) == f"No progress for 12 s in step 7 when this was written; how it ended is not known{usual}"


def test_where_each_rank_is() -> None:
    ranks = (
        there(0),
        there(1, waiting_in=None, at=NEXT, cpu_share=0.5, workers=({"pid": 9, "kind": "dataloader", "state": "T"},)),
        there(2, cpu_share=0.1, since_s=12.0),
        there(3, alive=False, waiting_in=None),
    )
    record = hang(culprits=(Culprit(rank=1, reason="sleeps", at=NEXT),), victims=(0, 2), collective=CALL, ranks=ranks)
    text = hang_document(record, over=False)["text"]
    call = "all_reduce number 25 of default_pg, [512] Float"
    keys = ("who", "call", "state", "cpu", "silent_s", "culprit")
    assert [tuple(row[key] for key in keys) for row in text["places"]["rows"]] == [
        ("1", "not in a collective", "sleeps", "50%", 10.0, True),
        ("3", "", "is gone", "0%", 10.0, False),
        ("0 and 2", call, "sleeps", "0%–10%", 12.0, False),
    ]
    assert text["places"]["rows"][0]["workers"] == ["DataLoader worker 9 is stopped"]
    assert text["places"]["rows"][0]["where"] == {"text": "job/train.py:41 in next", "file": "/job/train.py"}
    assert (text["heading"], text["waiting"], text["call"]) == ("The job is hung", "Ranks 0 and 2", call)
    past = hang_document(record, over=True)["text"]
    assert [row["state"] for row in past["places"]["rows"]] == ["slept", "was gone", "slept"]
    assert (past["heading"], past["culprits"]["rows"][0]["reason"]) == ("The job hung", "slept")


def test_culprits_with_the_same_reason_are_grouped() -> None:
    culprits = tuple(Culprit(rank=rank, reason=reason, at=NEXT) for rank, reason in ((0, "a"), (1, "b"), (3, "a")))
    rows = hang_document(hang(culprits=culprits), over=False)["text"]["culprits"]["rows"]
    assert [(row["ranks"], row["reason"]) for row in rows] == [([0, 3], "a"), ([1], "b")]


def test_a_cycle_is_drawn_only_if_the_sentences_close_it() -> None:
    cycle = ["rank 0 waits for rank 2 in dp (all_reduce 7)", "rank 2 waits for rank 0 in tp (all_reduce 7)"]
    assert ring_of(cycle) == ring_of([line.replace("waits", "waited") for line in cycle]) == [0, 2]
    assert ring_of(["rank 0 waits for rank 2", "rank 1 waits for rank 0"]) == []
    assert (ring_of(["something else", "and more"]), ring_of([])) == ([], [])


def test_the_same_main_thread_is_shown_once_culprits_first() -> None:
    def main(*frames: Frame) -> ThreadStack:
        return ThreadStack(main=True, frames=frames)

    hook = Frame(file="/x/stepscope/recorder/hooks/collectives.py", line=9, function="wait")
    waits = main(hook, Frame(file=TORCH, line=1, function="all_reduce"), Frame(file=TORCH, line=2, function="b"), SHARE)
    helper = ThreadStack(main=False, name="pin", frames=(Frame(file="/x.py", line=1, function="f"),))
    groups = (
        StackGroup(ranks=(0, 3), threads=(waits,)),
        StackGroup(ranks=(1,), threads=(main(NEXT),)),
        StackGroup(ranks=(2,), threads=(waits, helper)),
        StackGroup(ranks=(1,), threads=(main(NEXT),), workers_of=True),
    )
    record = hang(stacks=groups, culprits=(Culprit(rank=1, reason="sleeps"),))
    shown = hang_document(record, over=False)["text"]["stacks"]["groups"]
    assert [(group["who"], group["threads"], group["where"]) for group in shown] == [
        ("DataLoader workers of rank 1", 1, "job/train.py:41 in next"),
        ("Rank 1", 1, "job/train.py:41 in next"),
        ("Ranks 0, 2 and 3", 2, "job/train.py:73 in share"),
    ]
    assert [(piece["own"], piece["package"], len(piece["frames"])) for piece in shown[2]["main"]] == [
        (False, "torch", 2),
        (True, "job", 1),
    ]
    assert stacks_view([], ()) == {"groups": [], "left": 0}


def flight() -> dict[str, Any]:
    def at(enqueued: int, completed: int) -> dict[str, int]:
        return {"enqueued": enqueued, "started": completed, "completed": completed}

    side = {"op": None, "sizes": "", "dtypes": "", "at": None, "frames": []}
    return {
        "title": "T.",
        "ranks": [0, 1],
        "world": 2,
        "culprits": [1],
        "first_divergence": {
            "group": "0",
            "description": "dp",
            "sequence": 7,
            "differs": "missing",
            "ranks": [1],
            "call_sites": [{**side, "ranks": [1]}, {**side, "ranks": [0], "op": "barrier"}],
        },
        "wait_for": [
            {
                "waiters": [0, 2],
                "waited": [1],
                "sequence": 41,
                "op": "all_reduce",
                "group": "1",
                "description": "undefined",
            }
        ],
        "groups": [
            {"name": "0", "description": "default_pg", "members": [0, 1], "ranks": {"0": at(24, 24), "1": at(24, 24)}},
            {"name": "1", "description": "tp", "members": [0, 1], "ranks": {"0": at(6, 6), "1": at(7, 6)}},
        ],
        "grid": {"group": "1", "description": "", "sequences": [40, 41], "rows": [[[0, 2], "cw"], [[1], "c-"]]},
    }


def test_the_recorders_in_words() -> None:
    view = flight_view(flight(), (), ongoing=True)
    assert view is not None
    assert view["about"] == "From all 2 ranks."
    assert view["divergence"]["text"] == "Rank 1 did not call number 7 of dp."
    assert [(side["who"], side["call"], side["odd"]) for side in view["divergence"]["sides"]] == [
        ("Rank 1", "did not call it", True),
        ("Rank 0", "barrier", False),
    ]
    assert view["waits"] == ["Ranks 0 and 2 wait for rank 1 in all_reduce number 41 of group 1."]
    assert [(row["name"], row["behind"], row["called"], row["ended"]) for row in view["groups"]] == [
        ("tp", True, "6 (rank 0), 7 (rank 1)", "6"),
        ("default_pg", False, "24", "24"),
    ]
    assert [row["odd"] for row in view["grid"]["rows"]] == [False, True]
    assert view["grid"]["legend"] == [["c", "ended"], ["w", "called and waits"], ["-", "no longer known"]]
    past = flight_view(flight(), (), ongoing=False)
    assert past is not None
    assert past["waits"] == ["Ranks 0 and 2 waited for rank 1 in all_reduce number 41 of group 1."]
    assert past["grid"]["legend"][1] == ["w", "called and waited"]
    assert flight_view({}, (), ongoing=True) is None
