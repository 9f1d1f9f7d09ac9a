"""Tokens with a name: what they open, until when, and that only their hash is kept."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.cluster import Cluster

from stepscope.cli.main import run_command
from stepscope.errors import UsageError
from stepscope.hub.api.auth import ALL, METRICS, SESSION_S, NamedToken, Readers, ReaderTokens, TrustedProxy, run_scope
from stepscope.hub.api.stream import Streams
from stepscope.hub.app import make_app
from stepscope.hub.audit import AuditLog, read_audit
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.runs import Runs
from tests.hub.run_parts import READER, Hub, record


async def at_once(_seconds: float) -> None:
    """Wrong tokens are slowed down, which other tests have seen enough of."""


def test_each_opens_what_it_is_for_until_it_is_revoked_or_over(folder: Path, tmp_path: Path) -> None:
    tokens, now = ReaderTokens(tmp_path / "tokens.json"), [1000.0]
    everything = tokens.create("a", ALL, now_s=1000.0, seconds=60.0)
    figures = tokens.create("b", METRICS, now_s=1000.0, seconds=60.0)
    one = tokens.create("c", run_scope("demo"), now_s=1000.0, seconds=600.0)
    file = tmp_path / "tokens.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert not any(token in file.read_text() for token in (everything, figures, one))
    named = ReaderTokens(file)
    readers = Readers(READER, now=lambda: now[0], named=named, sleep=at_once)
    hub = Hub(lambda: make_app(Runs.of_folder(folder), readers))

    def statuses(token: str) -> list[int]:
        paths = ("/api/v1/runs", "/metrics", "/api/v1/runs/demo", "/api/v1/runs/demo/steps", "/api/v1/runs/plain")
        return [hub.get(path, token=token).status for path in paths]

    try:
        assert statuses(everything) == [200] * 5
        assert statuses(figures) == [403, 200, 403, 403, 403]
        assert statuses(one) == [200, 403, 200, 200, 403]
        assert [run["id"] for run in hub.get("/api/v1/runs", token=one).json["runs"]] == ["demo"]
        assert hub.get("/api/v1/runs", token=one).json["total"] == 1
        now[0] += 61.0
        assert statuses(everything) == [401] * 5
        tokens.revoke("c")
        assert statuses(one) == [401] * 5
    finally:
        hub.close()


def test_a_token_for_a_run_does_not_open_another_that_was_to_have_its_name(tmp_path: Path) -> None:
    run_dir = record(tmp_path / "runs", "night-2", Cluster(ranks=2, steps=5).run())
    tokens = ReaderTokens(tmp_path / "tokens.json")
    first = tokens.create("anna", run_scope("night"), now_s=0.0, seconds=1e12)
    second = tokens.create("bert", run_scope("night-2"), now_s=0.0, seconds=1e12)
    runs = Runs.of_live(run_dir, LiveRun(name="night-2"), wanted="night")
    hub = Hub(lambda: make_app(runs, Readers(READER, named=tokens)))
    try:
        for rest in ("", "/steps", "/files", "/files/summary.json", "/stream"):
            assert hub.get(f"/api/v1/runs/night{rest}", token=first).status == 404
        assert hub.get("/api/v1/runs", token=first).json["runs"] == []
        assert hub.get("/api/v1/runs/night").status == 200, "with the hub's token it is found by that name"
        assert hub.get("/api/v1/runs/night-2/steps", token=second).status == 200
    finally:
        hub.close()


def test_a_token_that_is_created_brings_back_none_that_is_revoked_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, others = (ReaderTokens(tmp_path / "tokens.json") for _ in range(2))
    tokens.create("anna", ALL, now_s=0.0, seconds=60.0)
    reached, go_on, write = threading.Event(), threading.Event(), tokens._write

    def slow(all_of_them: tuple[NamedToken, ...]) -> None:
        reached.set()
        assert go_on.wait(60)
        write(all_of_them)

    monkeypatch.setattr(tokens, "_write", slow)
    create = threading.Thread(target=lambda: tokens.create("bert", ALL, now_s=0.0, seconds=60.0))
    create.start()
    assert reached.wait(60)
    revoke = threading.Thread(target=lambda: others.revoke("anna"))
    revoke.start()
    revoke.join(0.2)  # it has to wait; if it did not, it would be done by now
    go_on.set()
    create.join()
    revoke.join()
    assert [one.name for one in ReaderTokens(tmp_path / "tokens.json").all()] == ["bert"]


@contextmanager
def signed_in(
    folder: Path, tokens: ReaderTokens, now: list[float], token: str, audit: AuditLog | None = None
) -> Iterator[httpx.Client]:
    """A browser with a session for that token."""
    readers = Readers(READER, named=tokens, now=lambda: now[0], sleep=at_once, audit=audit)
    streams = Streams(heartbeat_s=0.05, pause_s=0.0)
    hub = Hub(lambda: make_app(Runs.of_folder(folder), readers, streams=streams))
    try:
        with httpx.Client(base_url=hub.url, timeout=60) as browser:
            assert browser.post("/api/v1/session", json={"token": token}).status_code == 200
            yield browser
    finally:
        hub.close()


def test_a_session_has_the_scope_of_its_token_and_ends_with_it(folder: Path, tmp_path: Path) -> None:
    tokens, now = ReaderTokens(tmp_path / "tokens.json"), [1000.0]
    token = tokens.create("anna", run_scope("demo"), now_s=1000.0, seconds=600.0)
    with signed_in(folder, tokens, now, token) as browser:
        (cookie,) = browser.cookies.jar
        assert token not in str(cookie.value)
        assert browser.post("/api/v1/session").json()["seconds"] == 600
        paths = ("/api/v1/runs", "/metrics", "/api/v1/runs/demo", "/api/v1/runs/plain")
        assert [browser.get(path).status_code for path in paths] == [200, 403, 200, 403]
        tokens.revoke("anna")
        assert browser.get("/api/v1/runs/demo").status_code == 401
        assert tokens.create("anna", ALL, now_s=1000.0, seconds=600.0) != token
        assert browser.get("/api/v1/runs/demo").status_code == 401, "another token of that name"
    with signed_in(folder, tokens, now, tokens.create("bert", ALL, now_s=1000.0, seconds=60.0)) as browser:
        now[0] += 59.0
        assert browser.get("/api/v1/runs/demo").status_code == 200
        now[0] += 1.0
        assert browser.get("/api/v1/runs/demo").status_code == 401, "it ends with its token"


def test_a_file_that_somebody_edited_makes_no_session_that_never_ends(folder: Path, tmp_path: Path) -> None:
    tokens, now = ReaderTokens(tmp_path / "tokens.json"), [1000.0]
    token = tokens.create("anna", ALL, now_s=1000.0, seconds=float("inf"))
    with signed_in(folder, tokens, now, token) as browser:
        assert browser.post("/api/v1/session").json()["seconds"] == SESSION_S
        text = (tmp_path / "tokens.json").read_text()
        (tmp_path / "tokens.json").write_text(text.replace("Infinity", "NaN"))
        assert browser.get("/api/v1/runs").status_code == 401
        (tmp_path / "tokens.json").write_text(text[:-5])
        assert browser.get("/api/v1/runs").status_code == 401, "cut off"
        (tmp_path / "tokens.json").write_text(text)
        assert browser.get("/api/v1/runs").status_code == 200
        (tmp_path / "tokens.json").unlink()
        assert browser.get("/api/v1/runs").status_code == 401


def test_what_is_open_when_a_token_is_revoked_ends(folder: Path, tmp_path: Path) -> None:
    tokens, now = ReaderTokens(tmp_path / "tokens.json"), [1000.0]
    audit = AuditLog(path=tmp_path / "audit.jsonl")
    with signed_in(folder, tokens, now, tokens.create("anna", ALL, now_s=1000.0, seconds=600.0), audit) as browser:
        with browser.stream("GET", "/api/v1/runs/plain/stream") as stream:
            told = stream.iter_lines()
            assert any(line == "event: heartbeat" for line in told)
            tokens.revoke("anna")
            for _ in told:
                pass  # to its end, which is a clean one
        assert browser.get("/api/v1/runs/plain/stream").status_code == 401
    audit.close()
    assert [(line["event"], line["who"], line["status"]) for line in read_audit(audit.path)] == [
        ("signed in", "anna", 200),
        ("read", "anna", 200),
        ("refused", "anna", 401),
        ("refused", "", 401),
    ]


def test_another_token_takes_the_place_of_a_session(folder: Path, tmp_path: Path) -> None:
    tokens, now = ReaderTokens(tmp_path / "tokens.json"), [1000.0]
    audit = AuditLog(path=tmp_path / "audit.jsonl")
    token = tokens.create("anna", run_scope("demo"), now_s=1000.0, seconds=600.0)
    figures = tokens.create("grafana", METRICS, now_s=1000.0, seconds=600.0)
    with signed_in(folder, tokens, now, token, audit) as browser:
        refused = browser.post("/api/v1/session", json={"token": figures})
        assert (refused.status_code, refused.json()["error"]) == (403, "this token is for /metrics only")
        assert browser.post("/api/v1/session", json={"token": "wrong"}).status_code == 401
        assert browser.get("/api/v1/runs/demo").status_code == 200, "the session is as it was"
        assert browser.post("/api/v1/session", json={"token": READER}).status_code == 200
        assert browser.get("/api/v1/runs/plain").status_code == 200
    audit.close()
    assert [(line["event"], line["who"], line["route"], line["run"]) for line in read_audit(audit.path)] == [
        ("signed in", "anna", "/api/v1/session", ""),
        ("refused", "grafana", "/api/v1/session", ""),
        ("refused", "", "/api/v1/session", ""),
        ("read", "anna", "/api/v1/runs/{run}", "demo"),
        ("signed in", "", "/api/v1/session", ""),
        ("read", "", "/api/v1/runs/{run}", "plain"),
    ]


def test_a_file_that_others_may_read_counts_for_nothing(tmp_path: Path) -> None:
    tokens = ReaderTokens(tmp_path / "tokens.json")
    token = tokens.create("a", ALL, now_s=0.0, seconds=60.0)
    (tmp_path / "tokens.json").chmod(0o644)
    assert ReaderTokens(tmp_path / "tokens.json").find(token, 1.0) is None
    (tmp_path / "tokens.json").write_text("nothing")
    (tmp_path / "tokens.json").chmod(0o600)
    assert ReaderTokens(tmp_path / "tokens.json").all() == ()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    shown: Callable[[], Any] = capsys.readouterr
    assert run_command(["token", "create", "anna", "--run", "night", "--expires", "2w"]) == 0
    said = shown()
    token = said.out.strip()
    assert "for the run night and expires in 2w" in said.err
    found = ReaderTokens(tmp_path / "stepscope" / "tokens.json").find(token, 0.0)
    assert found is not None
    assert (found.name, found.expires_s - found.created_s) == ("anna", 14 * 86_400)
    assert run_command(["token", "list"]) == 0
    listed = shown().out
    assert ("the run night" in listed, token in listed) == (True, False)
    hostile = ("a\nb", "\x1b[2J", "x" * 65, "../x", "-x", "")
    for words in (
        ["create", "anna"],
        ["create"],
        ["create", "x", "--expires", "soon"],
        ["create", "x", "--run", ""],  # as of a variable that is not set
        ["revoke", "nobody"],
        *(["create", "--", name] for name in hostile),
    ):
        with pytest.raises(UsageError):
            run_command(["token", *words])
    assert run_command(["token", "revoke", "anna"]) == 0
    assert ReaderTokens(tmp_path / "stepscope" / "tokens.json").all() == ()


@pytest.mark.parametrize(("uids", "status"), [([os.getuid()], 200), ([os.getuid() + 1], 401)])
def test_a_proxy_of_the_right_user_vouches_with_one_header(folder: Path, uids: list[int], status: int) -> None:
    trusted = TrustedProxy(header="X-User", uids=frozenset(uids))
    hub = Hub(lambda: make_app(Runs.of_folder(folder), Readers(READER, trusted=trusted)))
    try:
        assert hub.get("/api/v1/runs", token=None, x_user="anna").status == status
        assert hub.get("/api/v1/runs", token=None, x_user=" ").status == 401
        assert hub.get("/api/v1/runs", token=None).status == 401
    finally:
        hub.close()
