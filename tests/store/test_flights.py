"""What Flight Recorders and stacks said, as files that ``stepscope flight`` reads."""

from __future__ import annotations

import os
from pathlib import Path

from fakes.dumps import Call, FlightJob

from stepscope.store.live.failures import keep_flights, read_flights


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "flight").iterdir())


def test_what_was_kept_before_goes(tmp_path: Path) -> None:
    keep_flights(tmp_path, {0: b"{}", 12: b"[]"}, {0: "Thread 0x1"})
    assert names(tmp_path) == ["rank_0.json", "rank_12.json", "stacks_0.txt"]
    (tmp_path / "flight" / "mine.json").write_text("not ours")
    for path in (tmp_path / "flight").iterdir():
        os.utime(path, (1e9, 1e9))
    (tmp_path / "flight" / "rank_7.json").write_text("its last words, of a moment ago")
    keep_flights(tmp_path, {12: b"{}"})
    assert names(tmp_path) == ["mine.json", "rank_12.json", "rank_7.json"]
    assert (tmp_path / "flight" / "rank_12.json").read_bytes() == b"{}"
    keep_flights(tmp_path, {})
    assert names(tmp_path) == ["mine.json", "rank_12.json", "rank_7.json"]


def test_nothing_makes_no_folder(tmp_path: Path) -> None:
    keep_flights(tmp_path, {}, {})
    assert list(tmp_path.iterdir()) == []


def disagreed(folder: Path) -> None:
    """Rank 2 of four makes its third call with another size; rank 0, which was aborted, leaves nothing."""
    job = FlightJob(4)
    job.run({rank: [Call(), Call(), Call(size=2048 if rank == 2 else 1024)] for rank in range(4)})
    job.write(folder, name="rank_{}.json", form="json", ranks=(1, 2, 3))


def test_the_verdict_on_what_ranks_left(tmp_path: Path) -> None:
    disagreed(tmp_path / "flight")
    verdict, notices = read_flights(tmp_path, {1: ""}, since_ns=0)
    assert notices == []
    assert (verdict["kind"], verdict["culprits"], verdict["ranks"]) == ("hang_mismatch", [2], [1, 2, 3])


def test_only_what_belongs_to_the_attempt_counts(tmp_path: Path) -> None:
    disagreed(tmp_path / "flight")
    os.utime(tmp_path / "flight" / "rank_1.json", (1e9, 1e9))
    os.utime(tmp_path / "flight" / "rank_3.json", (1e9, 1e9))
    assert read_flights(tmp_path, {}, since_ns=10**18 + 1) == ({}, [])  # one is left: nothing to compare


def test_none_of_it_is_none(tmp_path: Path) -> None:
    assert read_flights(tmp_path, {}, since_ns=0) == ({}, [])
    keep_flights(tmp_path, {0: b"", 1: b"\x00 no dump"})
    assert read_flights(tmp_path, {}, since_ns=0) == ({}, [])


def test_too_much_is_left_to_who_asks_for_it(tmp_path: Path) -> None:
    disagreed(tmp_path / "flight")
    verdict, notices = read_flights(tmp_path, {}, since_ns=0, most_bytes=100)
    assert verdict == {}
    assert notices == [f"flight/ is large and was not analyzed; run stepscope flight {tmp_path / 'flight'}."]


def test_what_nccls_watchdog_wrote_is_read_and_comes_before_what_was_asked_later(tmp_path: Path) -> None:
    disagreed(tmp_path / "flight")
    job = FlightJob(4)
    job.run({rank: [Call()] if rank == 1 else [Call(), Call()] for rank in range(4)})
    job.write(tmp_path / "flight", name="nccl_trace_rank_{}", form="pickle", ranks=(0, 1, 2, 3))
    verdict, notices = read_flights(tmp_path, {}, since_ns=0)
    assert (notices, verdict["problems"], verdict["nccl_dumps"]) == ([], [], [0, 1, 2, 3])
    assert (verdict["kind"], verdict["culprits"]) == ("hang_missing_collective", [1])
    keep_flights(tmp_path, {0: b"{}"})
    assert "nccl_trace_rank_0" in names(tmp_path)
