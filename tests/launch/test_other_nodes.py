"""When a hub without a job ends, and which run its successor continues. In pods: tests/deploy/test_pods.py."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli.launch import other_nodes
from stepscope.cli.launch.other_nodes import LEFT_OPEN, all_ended, all_finished, continue_run, wait_for_nodes
from stepscope.records.run_clock import now_of
from stepscope.store.create import create_run
from stepscope.store.documents import NodeInfo, end_run, read_meta, write_meta
from stepscope.store.liveness import LEASE, WATCH_S, LeaseKeeper

ABOUT = {"command": ["stepscope", "run", "--hub-only"], "nnodes": 3}


def node(number: int, status: str | None) -> NodeInfo:
    bye = None if status is None else {"status": status, "exit_code": 0}
    return NodeInfo(node=number, host=f"host{number}", spool=f"{number}{status}", bye=bye)


@pytest.mark.parametrize(
    ("nodes", "over"),
    [
        ([], False),
        ([(1, "finished")], False),
        ([(1, "finished"), (2, None)], False),
        ([(1, "finished"), (2, "finished")], True),
        ([(0, None), (1, "finished"), (2, "finished")], True),
        ([(1, "finished"), (2, "failed")], False),
        ([(1, "finished"), (2, "interrupted"), (2, "finished")], True),
        ([(1, "finished"), (2, "finished"), (2, None)], False),
    ],
    ids=str,
)
def test_the_last_start_of_each_node_counts(nodes: list[tuple[int, str | None]], over: bool) -> None:
    assert all_finished([node(*each) for each in nodes], 2) is over


@pytest.mark.parametrize(
    ("nodes", "over"),
    [([(1, "failed")], False), ([(1, "failed"), (2, None)], False), ([(1, "failed"), (2, "interrupted")], True)],
    ids=str,
)
def test_a_goodbye_counts_whatever_its_reason(nodes: list[tuple[int, str | None]], over: bool) -> None:
    assert all_ended([node(*each) for each in nodes], 2) is over


@pytest.mark.parametrize(
    ("number", "code", "after_s"),
    [(signal.SIGINT, 1, other_nodes.LAST_REPORTS_S), (signal.SIGTERM, LEFT_OPEN, other_nodes.GOODBYES_S)],
    ids=["Ctrl-C", "moved"],
)
def test_how_long_a_hub_waits_for_goodbyes(tmp_path: Path, number: int, code: int, after_s: float) -> None:
    pauses: list[float] = []
    assert wait_for_nodes(tmp_path, 2, lambda: number if len(pauses) > 3 else 0, sleep=pauses.append) == code
    assert sum(pauses) == 4 * other_nodes.POLL_S + after_s


def unfinished(root: Path, **more: Any) -> Path:
    """A run as a hub leaves it that is killed."""
    paths = create_run(root, "train", ["wait"], sessions=root / "sessions", more={**ABOUT, **more})
    return paths.run_dir


def test_a_hub_continues_the_run_of_one_that_is_gone(tmp_path: Path) -> None:
    run_dir = unfinished(tmp_path)
    before = read_meta(run_dir)
    watched: list[float] = []
    paths = continue_run(tmp_path, "train", ABOUT, sleep=watched.append)
    assert paths is not None and (paths.run_dir, paths.name, paths.wanted) == (run_dir, "train", "train")
    assert sum(watched) == WATCH_S
    after = read_meta(run_dir)
    assert after["session"] == str(paths.session) != before["session"]
    assert {key for key in after if after[key] != before[key]} <= {"session", "created_mono_ns"}
    assert abs(now_of(after) - now_of(before)) < 1e9


@pytest.mark.parametrize("why", ["active", "over", "other nodes", "a job of its own", "no lease", "no run"])
def test_other_runs_of_that_name_stay_as_they_are(tmp_path: Path, why: str) -> None:
    other = {"other nodes": {"nnodes": 4}, "a job of its own": {"command": ["torchrun", "train.py"]}}
    if why != "no run":
        run_dir = unfinished(tmp_path, **other.get(why, {}))
    if why == "over":
        end_run(run_dir, exit_code=0, status="finished")
    if why == "no lease":
        (run_dir / LEASE).unlink()
    sleep = (lambda _: LeaseKeeper(run_dir).renew()) if why == "active" else (lambda _: None)
    assert continue_run(tmp_path, "train", ABOUT, sleep=sleep) is None


def test_a_run_of_another_machine_is_continued_with_its_clock(tmp_path: Path) -> None:
    run_dir = unfinished(tmp_path)
    meta = read_meta(run_dir)
    place = {"host": "gone", "boot": "another", "pid_namespace": "another"}
    write_meta(run_dir, {**meta, "host": "gone", "place": place, "created_mono_ns": meta["created_mono_ns"] // 2})
    assert continue_run(tmp_path, "train", ABOUT, sleep=lambda _: None) is not None
    after = read_meta(run_dir)
    assert after["place"] == meta["place"] and after["host"] == meta["host"]
    assert abs(now_of(after) - now_of(meta)) < 1e9
