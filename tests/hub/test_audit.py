"""The audit log: who is named in it, what is counted instead of repeated, and that nothing about it stops a hub."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from clock import SecondsClock
from fakes.cluster import Cluster

from stepscope.cli.main import run_command
from stepscope.errors import UsageError
from stepscope.hub.api.auth import ALL, METRICS, Readers, ReaderTokens, TrustedProxy
from stepscope.hub.api.stream import Streams
from stepscope.hub.app import make_app, resources_of
from stepscope.hub.audit import LINES, STRANGERS, WAITING, WINDOW_S, AuditLog, read_audit, rotated, route_and_run
from stepscope.hub.ingest.auth import SILENT_S
from stepscope.hub.runs import Runs
from stepscope.wire.frames import FrameHead, pack_frame
from stepscope.wire.handshake import PROOF_HEADER, Join, write_join
from tests.hub.gate_parts import KEY, Parts, join_of
from tests.hub.run_parts import READER, Hub, record

NOON = 1_700_000_000.0


@pytest.fixture
def clock() -> SecondsClock:
    return SecondsClock()


@pytest.fixture
def log(tmp_path: Path, clock: SecondsClock) -> AuditLog:
    return AuditLog(path=tmp_path / "audit.jsonl", now=lambda: NOON + clock(), clock=clock)


def lines(log: AuditLog, *names: str) -> list[Any]:
    """After everything was written: whole lines, or some fields of each."""
    log.close()
    found = list(read_audit(log.path))
    return [tuple(line.get(name) for name in names) for line in found] if names else found


def read(log: AuditLog, who: str = "anna", route: str = "/api/v1/runs", address: str = "10.0.0.1") -> None:
    log.note("read", via="named token", who=who, address=address, method="GET", route=route, status=200)


# ── what is written ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_request_is_a_line_and_its_repetitions_are_counted(log: AuditLog, clock: SecondsClock) -> None:
    read(log)
    for _ in range(1000):
        clock.now_s += 0.5
        read(log)
        log.gather()
    assert lines(log) == [
        {
            "schema": 1,
            "time": "2023-11-14T22:13:20.000Z",
            "event": "read",
            "via": "named token",
            "who": "anna",
            "address": "10.0.0.1",
            "method": "GET",
            "route": "/api/v1/runs",
            "run": "",
            "status": 200,
        },
        {
            "schema": 1,
            "time": "2023-11-14T22:21:40.000Z",
            "event": "read",
            "via": "named token",
            "who": "anna",
            "address": "10.0.0.1",
            "method": "GET",
            "route": "/api/v1/runs",
            "run": "",
            "status": 200,
            "count": 1000,
            "first": "2023-11-14T22:13:20.500Z",
        },
    ]
    assert log.path.stat().st_mode & 0o777 == 0o600


def test_somebody_who_comes_back_later_has_a_line_of_their_own_again(log: AuditLog, clock: SecondsClock) -> None:
    for _ in range(3):
        read(log)
        clock.now_s += WINDOW_S
        log.gather()
    assert lines(log, "event", "count") == [("read", None)] * 3
    assert not log._repeated
    assert not log._groups


def test_neither_a_reader_nor_strangers_can_fill_the_disk(log: AuditLog) -> None:
    for number in range(10_000):
        read(log, route=f"/api/v1/runs/{{run}}/files/{number}")
        log.note("refused", via="unknown", address=f"10.0.{number >> 8}.{number & 255}", route="other", status=401)
    found = lines(log, "via", "others", "count")
    assert found.count(("named token", None, None)) == LINES
    assert found.count(("unknown", None, None)) == STRANGERS
    assert found[-2:] == [("unknown", True, 10_000 - STRANGERS - 1), ("named token", True, 10_000 - LINES - 1)]
    assert len(found) == LINES + STRANGERS + 4


def test_a_stranger_who_tries_many_paths_does_not_hide_the_others(log: AuditLog) -> None:
    for number in range(100):
        log.note("refused", via="unknown", address="10.0.0.1", route=f"/api/v1/runs/{{run}}/{number}", status=401)
    log.note("refused", via="unknown", address="10.0.0.2", route="other", status=401)
    assert lines(log, "address", "count") == [("10.0.0.1", None), ("10.0.0.2", None), ("10.0.0.1", 99)]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/metrics", ("/metrics", "")),
        ("/api/v1/runs", ("/api/v1/runs", "")),
        ("/api/v1/runs/night", ("/api/v1/runs/{run}", "night")),
        ("/api/v1/runs/night/ranks/17", ("/api/v1/runs/{run}/ranks/{n}", "night")),
        ("/api/v1/runs/3/files/logs/rank-0.log", ("/api/v1/runs/{run}/files/logs/rank-0.log", "3")),
        ("/api/v1/runs/", ("other", "")),
        ("/api/v1/runs/night/files/\x1b[2J", ("other", "night")),
        ("/token=secret", ("other", "")),
        ("/api/v1/sweeps/\x1b[2J", ("other", "")),
        ("/api/v1/traces/" + "x/" * 9 + "x", ("other", "")),
        ("/api/v1/runs/night/" + "x" * 200, ("other", "night")),
    ],
)
def test_a_path_is_told_as_the_api_calls_it(path: str, expected: tuple[str, str]) -> None:
    assert route_and_run(path) == expected


RESOURCES = resources_of(Streams(), lambda: "", ingest=True, changes=True, requests=True)
FILLED = {"{run}": "night~3fa9c1d204", "{path:path}": "logs/rank-0.log", "{file}": "rank-0.json.gz"}
FILLED |= {"{capture}": "step-12", "{silence}": "s-1", "{sweep}": "lr~3fa9c1d204", "{trace}": "nightly~3fa9c1d204"}


@pytest.mark.parametrize("path", sorted({resource.path for resource in RESOURCES if not resource.open}))
def test_every_resource_is_logged_under_its_own_path(path: str) -> None:
    full, expected = path, path
    for name, value in FILLED.items():
        full = full.replace(name, value)
        expected = expected if name == "{run}" else expected.replace(name, value)
    for number in ("{number}", "{rank}"):
        full, expected = full.replace(number, "17"), expected.replace(number, "{n}")
    assert "{" not in full
    assert route_and_run(full) == (expected, FILLED["{run}"] if "{run}" in path else "")


def test_hostile_names_stay_on_their_line_and_are_cut(log: AuditLog, capsys: pytest.CaptureFixture[str]) -> None:
    read(log, who='a\n{"event":"forged"}\n\x1b[2J\u202e' + "x" * 5000)
    assert len(lines(log)) == 1
    assert len(log.path.read_bytes().splitlines()) == 1
    assert len(lines(log)[0]["who"]) == 128
    assert run_command(["audit", str(log.path)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert len(shown.splitlines()) == 3


# ── the file ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_old_files_go(tmp_path: Path) -> None:
    log = AuditLog(path=tmp_path / "audit.jsonl", file_bytes=2000, files=3)
    for number in range(100):
        read(log, who=f"reader {number}")
        assert log.write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())
    kept = [line["who"] for line in read_audit(log.path)]
    assert kept == [f"reader {number}" for number in range(100 - len(kept), 100)], "no gap, newest last"


def test_a_line_that_was_cut_off_costs_only_itself(log: AuditLog) -> None:
    log.path.write_bytes(b'{"event":"re')
    log.path.chmod(0o644)
    read(log)
    assert lines(log, "who") == [("anna",)]
    assert log.path.stat().st_mode & 0o777 == 0o600


@contextmanager
def in_place(path: Path, what: str) -> Iterator[Path]:
    """Something else where the log should be; gives the file that must not change."""
    other = path.with_name("precious")
    other.write_text("as it was")
    if what == "link":
        path.symlink_to(other)
    elif what == "dangling link":
        path.symlink_to(path.with_name("not there"))
    elif what == "hard link":
        path.hardlink_to(other)
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "locked folder":
        path.parent.chmod(0o500)
    try:
        yield other
    finally:
        path.parent.chmod(0o700)


@pytest.mark.parametrize("what", ["link", "dangling link", "hard link", "pipe", "folder", "locked folder"])
def test_what_is_not_our_file_is_left_alone_and_said_once(
    log: AuditLog, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    if what == "locked folder" and os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    with in_place(log.path, what) as other:
        for _ in range(3):
            read(log)
            log.close()
        assert other.read_text() == "as it was"
        assert not other.with_name("not there").exists()
    errors = capsys.readouterr().err
    assert errors.count("cannot write the audit log") == 1
    assert errors.count("\n") == 1


def test_what_the_disk_refused_is_written_later(log: AuditLog, capsys: pytest.CaptureFixture[str]) -> None:
    log.path.mkdir()
    for number in range(WAITING + 5):
        log._queue({"time": "", "event": "read", "who": str(number)})
    log.write()
    log.path.rmdir()
    found = lines(log)
    assert [found[0]["who"], found[-2]["who"], found[-1]["lost"]] == ["0", str(WAITING - 1), 5]
    assert "can be written again" in capsys.readouterr().err


def test_two_processes_share_a_file(log: AuditLog) -> None:
    read(log)
    with log.path.open("ab") as other:
        log.path.chmod(0o600)
        fcntl.flock(other, fcntl.LOCK_EX)
        assert log.write() is False, "later"
    assert log.write() is True
    assert lines(log, "who") == [("anna",)]
    for path in rotated(log.path):
        assert not path.exists()


def test_the_end_and_a_thread_that_still_writes_do_not_write_the_same_lines(
    log: AuditLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(log)
    written, go_on, append = threading.Event(), threading.Event(), log._append

    def slow(text: bytes) -> None:
        append(text)
        written.set()
        assert go_on.wait(60)

    monkeypatch.setattr(log, "_append", slow)
    thread = threading.Thread(target=log.write)  # as ``keep`` does, whose task was cancelled
    thread.start()
    assert written.wait(60)
    assert log.write() is False
    go_on.set()
    thread.join()
    assert lines(log, "who") == [("anna",)]


# ── readers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    record(folder, "night", Cluster(ranks=2, steps=5).run())
    return folder


@contextmanager
def serving(folder: Path, **how: Any) -> Iterator[tuple[Hub, AuditLog]]:
    log = AuditLog(path=folder.parent / "audit.jsonl")

    async def at_once(_seconds: float) -> None:
        pass

    hub = Hub(lambda: make_app(Runs.of_folder(folder), Readers(READER, audit=log, sleep=at_once, **how)))
    try:
        yield hub, log
    finally:
        hub.close()


def test_readers_are_named_and_no_secret_is_written(runs: Path, tmp_path: Path) -> None:
    tokens = ReaderTokens(tmp_path / "tokens.json")
    anna = tokens.create("anna", ALL, now_s=0.0, seconds=1e12)
    grafana = tokens.create("grafana", METRICS, now_s=0.0, seconds=1e12)
    trusted = TrustedProxy(header="X-User", uids=frozenset([os.getuid()]))
    with serving(runs, named=tokens, trusted=trusted) as (hub, log):
        for _ in range(5):
            assert hub.get("/api/v1/runs/night/steps").status == 200
        assert hub.get("/api/v1/runs/night", token=anna).status == 200
        assert hub.get("/api/v1/runs/none?token=" + anna, token=anna).status == 400
        assert hub.get("/metrics", token=grafana).status == 200
        assert hub.get("/api/v1/runs", token=grafana).status == 403
        assert hub.get("/api/v1/runs", token=None, x_user="eve@example.com").status == 200
        assert hub.get("/api/v1/runs/night?token=" + anna, token="wrong-" + anna).status == 401
        assert hub.get("/", token=None).status == 200
        with httpx.Client(base_url=hub.url) as browser:
            assert browser.post("/api/v1/session", json={"token": "wrong"}).status_code == 401
            assert browser.post("/api/v1/session", json={"token": READER}).status_code == 200
            assert browser.post("/api/v1/session").status_code == 200
            assert browser.get("/api/v1/runs").status_code == 200
            assert browser.delete("/api/v1/session").status_code == 200
            assert browser.delete("/api/v1/session").status_code == 200
    base = "/api/v1/runs"
    assert lines(log, "event", "via", "who", "route", "run", "status", "count") == [
        ("read", "hub token", "", f"{base}/{{run}}/steps", "night", 200, None),
        ("read", "named token", "anna", f"{base}/{{run}}", "night", 200, None),
        ("read", "named token", "anna", f"{base}/{{run}}", "none", 400, None),
        ("read", "named token", "grafana", "/metrics", "", 200, None),
        ("refused", "named token", "grafana", base, "", 403, None),
        ("read", "proxy", "eve@example.com", base, "", 200, None),
        ("refused", "unknown", "", f"{base}/{{run}}", "night", 401, None),
        ("signed in", "hub token", "", "/api/v1/session", "", 200, None),
        ("read", "hub token", "", base, "", 200, None),
        ("signed out", "hub token", "", "/api/v1/session", "", 200, None),
        ("read", "hub token", "", f"{base}/{{run}}/steps", "night", 200, 4),
        ("refused", "unknown", None, None, None, 401, 1),
    ]
    assert {line["address"] for line in read_audit(log.path)} == {"127.0.0.1"}
    written = log.path.read_text()
    assert not any(secret in written for secret in (anna, grafana, READER, "wrong", "token="))


def test_a_hub_that_cannot_write_its_log_answers_all_the_same(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = AuditLog(path=tmp_path / "not there" / "audit.jsonl")
    hub = Hub(lambda: make_app(Runs.of_folder(runs), Readers(READER, audit=log)))
    try:
        for _ in range(3):
            assert hub.get("/api/v1/runs/night").status == 200
            log.write()
    finally:
        hub.close()
    log.close()
    assert capsys.readouterr().err.count("cannot write the audit log") == 1
    assert not log.path.parent.exists()


# ── nodes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_node_has_one_line_for_its_start_and_one_for_its_end(
    tmp_path: Path, log: AuditLog, clock: SecondsClock
) -> None:
    (tmp_path / "night").mkdir()
    parts = Parts(tmp_path / "night", clock=clock, audit=log)

    def joined(join: Join) -> str:
        join = parts.challenged(join)
        body, proof = write_join(join, KEY, b"")
        headers = {"Authorization": f"Bearer {join.challenge}", PROOF_HEADER: proof}
        status, said, _ = asyncio.run(parts.ask("join", body, headers))
        assert status == 200
        return str(said["token"])

    def send(join: Join, token: str, **head: Any) -> int:
        frame = pack_frame(FrameHead(node=join.node, spool=join.spool, sent_wall_ns=1, **head), [])
        clock.now_s += 1.0
        return parts.asked("frames", frame, {"Authorization": f"Bearer {token}"})

    first, second = join_of(1), join_of(2)
    tokens = joined(first), joined(second)
    assert [send(first, tokens[0]) for _ in range(50)] == [200] * 50
    assert send(first, tokens[0], bye={"status": "finished"}) == 200
    assert send(first, tokens[0], bye={"status": "finished"}) == 200, "the answer was lost"
    parts.watch.tick()
    assert send(second, tokens[1]) == 200, "it was silent"
    assert parts.asked("frames", b"", {"Authorization": "Bearer x"}) == 401
    parts.watch.close()
    parts.close()
    found = lines(log, "event", "who", "route", "status", "frames", "why")
    base = "/api/v1/runs/{run}"
    assert found == [
        ("joined", "node 1 (h1)", f"{base}/join", 200, None, None),
        ("joined", "node 2 (h2)", f"{base}/join", 200, None, None),
        ("ended", "node 1 (h1)", "", 0, 51, "bye"),
        ("ended", "node 2 (h2)", "", 0, 0, "silent"),
        ("joined", "node 2 (h2)", f"{base}/frames", 200, None, None),
        ("refused", "", f"{base}/frames", 401, None, "token"),
        ("ended", "node 2 (h2)", "", 0, 1, "the hub ends"),
    ]
    assert SILENT_S < 50
    assert {line["run"] for line in read_audit(log.path)} == {"night-2", "night"}


def test_a_method_of_any_length_is_cut(log: AuditLog) -> None:
    log.note("refused", via="unknown", method="A" * 60_000, status=401)
    assert lines(log, "method") == [("A" * 128,)]


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_shows_a_run_or_all_of_them(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    record(runs, "day", Cluster(ranks=1, steps=5).run())
    (tmp_path / "stepscope").mkdir()
    own = AuditLog(path=runs / "night" / "audit.jsonl", now=lambda: NOON)
    read(own, who="first")
    own.note("ended", via="node", who="node 1 (h1)", address="10.0.0.2", run="night", frames=3, bytes=5000, why="bye")
    own.close()
    served = AuditLog(
        path=tmp_path / "stepscope" / "audit.jsonl", now=lambda: NOON + 1, about={"served": str(runs.resolve())}
    )
    for run in ("night", "day"):
        served.note("read", via="hub token", address="127.0.0.1", method="GET", route="/metrics", run=run, status=200)
    served.close()
    elsewhere = AuditLog(path=served.path, now=lambda: NOON + 2, about={"served": str(tmp_path / "others")})
    read(elsewhere, who="elsewhere")
    elsewhere.close()

    def shown(*words: str) -> list[Any]:
        assert run_command(["audit", *words, "--json"]) == 0
        return [(line["who"], line["run"]) for line in json.loads(capsys.readouterr().out)]

    assert shown(str(runs)) == [("first", "night"), ("node 1 (h1)", "night"), ("", "night"), ("", "day")]
    assert shown(str(runs / "night")) == [("first", "night"), ("node 1 (h1)", "night"), ("", "night")]
    assert run_command(["audit", str(runs / "night")]) == 0
    _, _, *rows = (" ".join(line.split()[2:]) for line in capsys.readouterr().out.splitlines())
    assert rows == [
        "first 10.0.0.1 read night /api/v1/runs 200 1",
        "node 1 (h1) 10.0.0.2 ended night 3 frames, 4.9 KiB (bye) 1",
        "the hub's token 127.0.0.1 read night /metrics 200 1",
    ]
    assert run_command(["audit", str(tmp_path / "stepscope")]) == 0
    assert "is empty" in capsys.readouterr().out
    with pytest.raises(UsageError, match="does not exist"):
        run_command(["audit", str(tmp_path / "nowhere")])


@pytest.mark.parametrize(
    "line",
    [
        {"time": "2026-11-17T00:00:00Z", "event": "ended", "frames": 1, "bytes": 10**400},
        {"time": "0001-01-01T00:00:00", "event": "read", "who": "x" * 20},
        {"time": "2026-11-17T00:00:00Z", "event": "read", "who": "x" * 20_000},
        {"time": ["\x1b[2J"], "event": {"a": 1}, "via": [1], "run": ["\x1b[2J"], "route": 5, "why": "\x1b"},
    ],
)
def test_a_log_of_a_stranger_does_not_break_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: dict[str, Any]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "runs" / "evil").mkdir(parents=True)
    (tmp_path / "runs" / "evil" / "audit.jsonl").write_text(json.dumps(line) + "\n")
    assert run_command(["audit", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == 3
    assert "evil" in shown
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) < 300


def test_a_log_of_a_stranger_says_nothing_of_other_runs_and_is_read_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    log = tmp_path / "runs" / "evil" / "audit.jsonl"
    log.parent.mkdir(parents=True)
    forged = {"time": "2026-11-17T00:00:00Z", "event": "read", "who": "anna", "run": "night"}
    long = {**forged, "who": "x" * (1 << 20)}
    log.write_text(json.dumps(forged) + "\n" + "{}\n" * 1000 + json.dumps(long) + "\n")
    assert run_command(["audit", str(tmp_path / "runs"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{**forged, "run": "evil"}]
    with log.open("r+b") as file:
        file.truncate(1 << 33)  # takes no room
    assert len(list(read_audit(log))) == 1
