"""Tokens with a name: what they open, until when, and that only their hash is kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli.main import run_command
from stepscope.errors import UsageError
from stepscope.hub.api.reader_tokens import ALL, METRICS, ReaderTokens, run_scope
from stepscope.hub.api.readers import Readers, TrustedProxy
from stepscope.hub.app import make_app
from stepscope.hub.runs import Runs
from tests.hub.run_parts import READER, Hub


def test_each_opens_what_it_is_for_until_it_is_revoked_or_over(folder: Path, tmp_path: Path) -> None:
    tokens, now = ReaderTokens(tmp_path / "tokens.json"), [1000.0]
    everything = tokens.create("a", ALL, now_s=1000.0, seconds=60.0)
    figures = tokens.create("b", METRICS, now_s=1000.0, seconds=60.0)
    one = tokens.create("c", run_scope("demo"), now_s=1000.0, seconds=600.0)
    kept = tmp_path / "tokens.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert not any(token in kept.read_text() for token in (everything, figures, one))
    named = ReaderTokens(kept)
    hub = Hub(lambda: make_app(Runs.of_folder(folder), Readers(READER, now=lambda: now[0], named=named)))

    def statuses(token: str) -> list[int]:
        paths = ("/api/v1/runs", "/metrics", "/api/v1/runs/demo", "/api/v1/runs/demo/steps", "/api/v1/runs/plain")
        return [hub.get(path, token=token).status for path in paths]

    try:
        assert statuses(everything) == [200] * 5
        assert statuses(figures) == [403, 200, 403, 403, 403]
        assert statuses(one) == [403, 403, 200, 200, 403]
        assert hub.get("/api/v1/session", token=one, method="POST").status == 401, "no cookie for it"
        now[0] += 61.0
        assert statuses(everything) == [401] * 5
        tokens.revoke("c")
        assert statuses(one) == [401] * 5
    finally:
        hub.close()


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
    for words in (["create", "anna"], ["create"], ["create", "x", "--expires", "soon"], ["revoke", "nobody"]):
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
