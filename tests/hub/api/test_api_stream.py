"""A run that goes on: what its clients are told, what they are told when they come back, and who is given up."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.cluster import Cluster, slow_at
from hub_feed import sidecar_of, taken_of
from hypothesis import given
from hypothesis import strategies as st

from stepscope.hub.active_run import whole_run
from stepscope.hub.api.stream import MOST_STEPS, Cursor, Streams, news
from stepscope.hub.ingest import tail as tail_module
from stepscope.hub.ingest.tail import Tail
from stepscope.hub.limits import ServerLimits
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.open_run import OpenRun
from stepscope.hub.runs import OpenPolicy, Runs
from stepscope.store.documents import end_run, read_meta
from stepscope.store.file_io import append_jsonl
from stepscope.store.live.ring_files import RingSidecar
from stepscope.store.paths import EVENTS
from tests.hub.run_parts import Feed

READER = "reader-token-of-the-tests"
STEPS = 2000
CLUSTER = Cluster(ranks=2, steps=STEPS, unfinished={0: STEPS, 1: STEPS}, warmup_steps=0)


class Growing:
    """A run that somebody records while a hub serves it."""

    def __init__(self, run_dir: Path, append: Any) -> None:
        self.run_dir = run_dir
        self.series = CLUSTER.series()
        self.steps = 0
        self._append = append
        self.live = LiveRun(name=run_dir.name, run_dir=run_dir, meta=read_meta(run_dir))
        self.tail = Tail(run_dir, self.live)

    def grow(self, steps: int) -> None:
        """On disk."""
        for series in self.series:
            self._append(self.run_dir, series, self.steps, self.steps + steps)
        self.steps += steps

    def take(self) -> None:
        """Into the model; only where the hub's loop runs."""
        self.tail.poll()
        self.live.tick()

    def say(self, *messages: str) -> None:
        lines = [{"schema": 1, "wall_ns": 1, "event": "warning", "message": text} for text in messages]
        append_jsonl(self.run_dir / EVENTS, lines)


@pytest.fixture
def growing(begun: Any) -> Growing:
    return Growing(*begun(CLUSTER))


Message = tuple[str, str, Any]


def messages(lines: Iterator[str]) -> Iterator[Message]:
    """Event, id and data, as a browser takes them apart."""
    event, number, data = "", "", ""
    for line in lines:
        name, _, value = line.partition(": ")
        if not line and data:
            yield event, number, json.loads(data)
            event, data = "", ""
        elif name == "event":
            event = value
        elif name == "id":
            number = value
        elif name == "data":
            data = value


def until(found: Iterator[Message], event: str) -> list[Message]:
    """All up to the first of that kind."""
    seen = []
    for message in found:
        seen.append(message)
        if message[0] == event:
            return seen
    raise AssertionError(f"no {event} among {seen}")


def test_steps_and_events_come_as_they_are_made_and_a_client_that_comes_back_misses_nothing(
    serve: Any, growing: Growing
) -> None:
    growing.grow(20)
    growing.say("first")
    hub = serve(lambda: Runs.of_live(growing.run_dir, growing.live), streams=Streams(pause_s=0.01))
    hub.in_loop(growing.take)
    path, headers = "/api/v1/runs/growing/stream", {"Authorization": f"Bearer {READER}"}
    with hub.client.stream("GET", path, headers=headers) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        found = messages(stream.iter_lines())
        told = until(found, "status")
        assert [event for event, _, _ in told] == ["heartbeat", "reset", "events", "findings", "status"]
        assert told[1][2] == {"schema": 1, "why": "first", "attempt": 0, "last_step": 19}
        assert told[2][2]["events"][0]["message"] == "first"
        assert told[4][2]["status"] == "running"
        growing.grow(5)
        hub.in_loop(growing.take)
        _, last_id, said = until(found, "steps")[-1]
        assert said["first"] == [20, 21, 22, 23, 24]
        assert said["ranks"] == [2] * 5
        assert "wall" in said["ns"]
    growing.grow(3)
    growing.say("second")
    hub.in_loop(growing.take)
    with hub.client.stream("GET", path, headers={**headers, "Last-Event-ID": last_id}) as stream:
        found = messages(stream.iter_lines())
        told = until(found, "events")
        assert [event for event, _, _ in told] == ["heartbeat", "steps", "events"]
        assert told[1][2]["first"] == [25, 26, 27]
        assert [event["message"] for event in told[2][2]["events"]] == ["second"]
        assert until(found, "status")[-1][2]["status"] == "running"
        end_run(growing.run_dir, exit_code=0, status="finished")
        growing.say("third")
        hub.in_loop(growing.take)
        assert until(found, "status")[-1][2]["status"] == "finished"
    with hub.client.stream("GET", f"{path}?after={last_id}", headers=headers) as stream:
        found = messages(stream.iter_lines())
        assert [next(found)[0], next(found)[0]] == ["heartbeat", "steps"]


def test_a_browser_follows_with_its_cookie(serve: Any, growing: Growing) -> None:
    hub = serve(lambda: Runs.of_live(growing.run_dir, growing.live), streams=Streams(heartbeat_s=0.05, pause_s=0.01))
    with httpx.Client(base_url=hub.url, timeout=60) as browser:
        assert browser.get("/api/v1/runs/growing/stream").status_code == 401
        browser.post("/api/v1/session", json={"token": READER})
        with browser.stream("GET", "/api/v1/runs/growing/stream") as stream:
            found = messages(stream.iter_lines())
            assert until(found, "heartbeat")[-1][2]["wall_ns"] > 0
            assert until(found, "heartbeat")


@pytest.mark.parametrize("set_ns", [-3600 * 10**9, 3600 * 10**9])
def test_the_first_word_is_what_time_it_is_by_the_runs_clock(
    serve: Any, growing: Growing, monkeypatch: pytest.MonkeyPatch, set_ns: int
) -> None:
    """By that whoever looks says how long something has lasted: the time of day may be set, or wrong here or there."""
    hub = serve(lambda: Runs.of_folder(growing.run_dir.parent), streams=Streams(pause_s=0.01))
    real_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + set_ns)
    path, headers = "/api/v1/runs/growing/stream", {"Authorization": f"Bearer {READER}"}
    with hub.client.stream("GET", path, headers=headers) as stream:
        event, _, said = next(messages(stream.iter_lines()))
    meta = read_meta(growing.run_dir)
    passed_ns = said["wall_ns"] - meta["created_wall_ns"]
    assert event == "heartbeat"
    assert 0 < passed_ns <= time.monotonic_ns() - meta["created_mono_ns"]


def test_clients_are_counted_and_bounded(serve: Any, growing: Growing) -> None:
    streams = Streams(most=1, heartbeat_s=0.05, pause_s=0.01)
    hub = serve(lambda: Runs.of_live(growing.run_dir, growing.live), streams=streams)
    path, headers = "/api/v1/runs/growing/stream", {"Authorization": f"Bearer {READER}"}
    with hub.client.stream("GET", path, headers=headers) as stream:
        found = messages(stream.iter_lines())
        next(found)
        assert streams.clients == 1
        refused = hub.get(path)
        assert (refused.status, refused.headers["retry-after"]) == (503, "10")
    deadline = time.monotonic() + 30
    while streams.clients and time.monotonic() < deadline:
        time.sleep(0.01)
    assert streams.clients == 0
    assert streams.dropped["full"] == 1


def test_one_who_takes_nothing_is_given_up_and_holds_nothing(serve: Any, growing: Growing) -> None:
    streams = Streams(heartbeat_s=0.05, pause_s=0.001, slow_s=0.1)
    limits = ServerLimits(answer_s=0.5, linger_s=0.2)
    hub = serve(lambda: Runs.of_live(growing.run_dir, growing.live), streams=streams, limits=limits)
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", hub.port))
        stuck.sendall(
            f"GET /api/v1/runs/growing/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {READER}\r\n\r\n".encode()
        )
        deadline = time.monotonic() + 60
        while not streams.dropped["slow"] and time.monotonic() < deadline:
            growing.say(*["x" * 30_000] * 64)
            hub.in_loop(growing.take)
        assert streams.dropped["slow"] == 1
    while streams.clients and time.monotonic() < deadline:
        time.sleep(0.01)
    assert streams.clients == 0
    assert hub.get("/healthz").status == 200


def test_a_run_that_goes_away_says_so(serve: Any, growing: Growing, tmp_path: Path) -> None:
    end_run(growing.run_dir, exit_code=0, status="finished")
    growing.grow(3)
    hub = serve(lambda: Runs.of_folder(growing.run_dir.parent), streams=Streams(heartbeat_s=0.05, pause_s=0.01))
    headers = {"Authorization": f"Bearer {READER}"}
    with hub.client.stream("GET", "/api/v1/runs/growing/stream", headers=headers) as stream:
        found = messages(stream.iter_lines())
        assert until(found, "status")[-1][2]["over"] is True
        growing.run_dir.rename(tmp_path / "elsewhere")
        assert until(found, "gone")[-1][2]["why"] == "the run no longer exists"
        assert list(found) == []


LATE = ["heartbeat", "reset", "findings", "status", "end"]
"""What one hears who comes when the hub is about to go."""


def test_a_hub_that_ends_with_its_run_says_how_it_ended_and_that_it_goes(serve: Any, growing: Growing) -> None:
    opened: list[Runs] = []

    def make() -> Runs:
        opened.append(Runs.of_live(growing.run_dir, growing.live))
        return opened[0]

    growing.grow(20)
    hub = serve(make, streams=Streams(pause_s=0.01))
    hub.in_loop(growing.take)
    headers = {"Authorization": f"Bearer {READER}"}
    path = "/api/v1/runs/growing"
    with hub.client.stream("GET", f"{path}/stream", headers=headers) as stream:
        found = messages(stream.iter_lines())
        said = until(found, "status")[-1][2]
        assert (said["status"], said["over"]) == ("running", False)
        growing.grow(2)
        hub.in_loop(growing.take)
        hub.in_loop(lambda: opened[0].live()[0].conclude("failed"))
        *before, status, end = list(found)
        assert [event for event, _, _ in before] == ["steps", "findings"]  # the sentence without findings changes
        assert (status[0], status[2]["status"], status[2]["over"]) == ("status", "failed", True)
        assert end == ("end", status[1], {"schema": 1, "why": "the run is over and its hub is stopping"})
    about = hub.get(path).json
    assert (about["status"], about["over"], about["leaving"], about["newest_step"]) == ("failed", True, True, 21)
    assert hub.get(f"{path}/summary").json["live"] is True
    with hub.client.stream("GET", f"{path}/stream", headers=headers) as late:
        assert [event for event, _, _ in messages(late.iter_lines())] == LATE


# ── the cursor by itself ────────────────────────────────────────────────────────────────────────────────────────────


def test_what_lies_behind_a_cursor(growing: Growing) -> None:
    growing.grow(10)
    growing.take()
    run = OpenRun(growing.run_dir, growing.live, fed=True)
    first, cursor = news(run, Cursor())
    assert [event for event, _, _ in first] == ["reset", "findings", "status"]
    found = first[1][1]
    assert (found["live"], found["verdict"], found["findings"]) == (True, None, [])  # nothing was judged yet
    assert found["nothing"][0] == "Nothing wrong so far."
    assert news(run, cursor) == ([], cursor)
    run.conclude("finished")
    over, cursor = news(run, cursor)
    assert [event for event, _, _ in over] == ["findings", "status"]
    assert (over[0][1]["nothing"][0], over[1][1]["status"], over[1][1]["over"]) == (
        "Nothing was found.",
        "finished",
        True,
    )
    growing.grow(MOST_STEPS)
    growing.take()
    exactly, after = news(run, cursor)
    assert [event for event, _, _ in exactly] == ["steps"]
    assert exactly[0][1]["last"][-1] == 9 + MOST_STEPS
    growing.grow(1)
    growing.take()
    behind, _ = news(run, cursor)
    assert behind[0][:2] == ("reset", {"why": "behind", "attempt": 0, "last_step": 10 + MOST_STEPS})
    assert [event for event, _, _ in news(run, after)[0]] == ["steps"]
    ahead, _ = news(run, Cursor(attempt=0, step=10_000, event=99, findings=after.findings, status=after.status))
    assert [said["why"] for event, said, _ in ahead if event == "reset"] == ["behind"]
    other, _ = news(run, Cursor(attempt=3, step=1))
    assert other[0][1]["why"] == "attempt"


def test_a_step_that_a_rank_sent_late_is_told_again(begun: Any) -> None:
    run_dir, _ = begun(CLUSTER)
    first, second = CLUSTER.series()
    live = LiveRun(name=run_dir.name, run_dir=run_dir, meta=read_meta(run_dir))
    for one in (first, second):
        live.ring(RingSidecar.from_dict(sidecar_of(one, state="running")), node="0")
    live.rows(taken_of([second], range(4)))
    live.tick()
    run = OpenRun(run_dir, live, fed=True)
    _, cursor = news(run, Cursor())
    live.rows(taken_of([first], range(6)))
    live.rows(taken_of([second], range(4, 6)))
    live.tick()
    told, after = news(run, cursor)
    repeated, fresh = told[0], told[1]
    assert [event for event, _, _ in told] == ["again", "steps", "status"]
    assert (repeated[1]["first"], repeated[1]["ranks"]) == ([0, 1, 2, 3], [2] * 4)
    assert (fresh[1]["first"], fresh[1]["ranks"]) == ([4, 5], [2, 2])
    assert news(run, after) == ([], after)
    back, _ = news(run, Cursor.from_id(after.to_id()) or Cursor())  # it does not say which of these it has
    assert [(event, said["first"]) for event, said, _ in back if event == "again"] == [("again", [0, 1, 2, 3])]


@given(st.one_of(st.text(max_size=60), st.from_regex(r"-?\d{1,30}(\.-?\d{1,30}){0,5}", fullmatch=True)))
def test_an_id_of_any_kind_is_a_cursor_or_none(said: str) -> None:
    cursor = Cursor.from_id(said)
    if cursor is not None:
        assert Cursor.from_id(cursor.to_id()) == cursor


def test_changed_wakes_everybody() -> None:
    async def run() -> list[int]:
        live = LiveRun()
        waiting = [asyncio.create_task(live.changed(live.version, 30)) for _ in range(3)]
        await asyncio.sleep(0)
        live.touch()
        return await asyncio.gather(*waiting)

    assert asyncio.run(run()) == [1, 1, 1]


def test_a_long_run_shows_its_last_steps_first_and_says_when_it_has_all(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole run is read only when the client has seen its last steps."""
    monkeypatch.setattr(tail_module, "LONG_BYTES", 0)
    monkeypatch.setattr(tail_module, "RECENT_BYTES", 1 << 14)
    seen = threading.Event()

    async def patient(run: OpenRun) -> Any:
        while not seen.is_set():
            await asyncio.sleep(0.01)
        return await whole_run(run, after_s=0.0)

    feed = Feed(tmp_path / "runs", "long", Cluster(ranks=2, steps=1000, faults=(slow_at(1, "forward", 30.0),)))
    feed.make(900, frame=2)
    hub = serve(lambda: Runs.of_folder(feed.run_dir.parent, OpenPolicy(read_whole=patient)))
    path = "/api/v1/runs/long"
    about, steps = hub.get(path).json, hub.get(f"{path}/steps").json
    assert (about["reading"], about["newest_step"], steps["last"][-1]) == (True, 899, 899)
    assert steps["first"][0] > 0
    while not (found := hub.get(f"{path}/findings").json["findings"]):
        pass  # it makes no further step: what it shows is enough to be sure
    assert (found[0]["ranks"], hub.get(path).json["reading"]) == ([1], True)
    with hub.client.stream("GET", f"{path}/stream", headers={"Authorization": f"Bearer {READER}"}) as stream:
        told = messages(stream.iter_lines())
        until(told, "reset")
        seen.set()
        first = -1
        while first != 0:  # on a busy machine the client may be behind once before the whole run was read
            *_, (_, _, repeated) = until(told, "reset")
            first = hub.get(f"{path}/steps").json["first"][0]
    assert (repeated["why"], repeated["last_step"]) == ("behind", 899)
    assert hub.get(path).json["reading"] is False
    assert hub.get(f"{path}/findings").json["findings"][0]["ranks"] == [1], "it stays found"
    feed.make(10)
    while hub.get(path).json["newest_step"] < 909:
        pass
