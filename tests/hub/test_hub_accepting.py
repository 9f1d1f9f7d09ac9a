"""``serve --accept``: strangers neither write anything nor learn which runs there are."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.hub.ingest.run_ingest import FolderIngest
from stepscope.hub.limits import Refusals
from stepscope.hub.runs import Runs
from stepscope.records.files import key_path
from stepscope.store.create import create_run
from stepscope.store.documents import end_run, read_meta, write_meta
from stepscope.wire.frames import FrameHead, pack_frame, part_of
from stepscope.wire.handshake import (
    HELLO_PATH,
    PROOF_HEADER,
    Join,
    load_keys,
    read_challenge,
    write_hello,
    write_join,
)


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPSCOPE_KEY", "a key of the tests")
    made = create_run(tmp_path / "runs", "night", ["train.py"], environ={}, sessions=tmp_path / "sessions")
    end_run(made.run_dir, exit_code=0, status="finished")
    write_meta(made.run_dir, {**read_meta(made.run_dir), "nnodes": 2, "launcher": None})
    (made.run_dir / "summary.txt").write_text("as it was")
    return made.run_dir


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


class Asker:
    def __init__(self, run_dir: Path) -> None:
        self.done: list[Path] = []
        runs = Runs.of_folder(run_dir.parent)
        self.accepting = FolderIngest(runs.path_of, Refusals(), fingerprint=b"", done=self.done.append)

    async def ask(self, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes, dict[bytes, bytes]]:
        messages: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            messages.append(message)

        sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        sent.append((b"content-length", str(len(body)).encode()))
        scope = {"type": "http", "method": "POST", "path": path, "headers": sent, "client": ("10.0.0.9", 5)}
        await self.accepting({**scope, "server": ("10.0.0.1", 7070)}, receive, send)
        return messages[0]["status"], messages[1]["body"], dict(messages[0]["headers"])


def test_strangers_write_nothing_and_learn_nothing(finished: Path) -> None:
    before = everything(finished.parent)

    async def run() -> None:
        asker = Asker(finished)
        for what in ("join", "frames"):
            for headers in ({}, {"authorization": "Bearer x"}, {"authorization": "Bearer 1.2.3"}):
                there = await asker.ask(f"/api/v1/runs/night/{what}", b"{}", **headers)
                assert there == await asker.ask(f"/api/v1/runs/another/{what}", b"{}", **headers)
                assert (there[0], b"night" in there[1]) == (401, False)
        body, proof = write_hello("ab" * 16, b"x" * 32, b"")
        assert (await asker.ask(HELLO_PATH, body, **{PROOF_HEADER: proof}))[0] == 403
        assert (await asker.ask(HELLO_PATH, b"x" * 2000, **{PROOF_HEADER: proof}))[0] == 413
        await asker.accepting.close()
        assert asker.done == []

    asyncio.run(run())
    assert everything(finished.parent) == before


async def joined(asker: Asker, key: bytes) -> None:
    body, proof = write_hello("ab" * 16, key, b"")
    status, text, headers = await asker.ask(HELLO_PATH, body, **{PROOF_HEADER: proof})
    assert status == 200
    challenge = read_challenge(text, headers[PROOF_HEADER.encode()].decode(), "ab" * 16, key, b"")
    bearer = f"Bearer {challenge}"
    join = Join(run="night", node=1, nnodes=2, host="h", spool="cd" * 16, nonce="ef" * 16, challenge=challenge)
    body, proof = write_join(join, key, b"")
    assert (await asker.ask("/api/v1/runs/none/join", body, authorization=bearer))[0] == 404
    said = await asker.ask("/api/v1/runs/night/join", body, authorization=bearer, **{PROOF_HEADER: proof})
    assert (said[0], json.loads(said[1])["run"]) == (200, "night")


def test_one_who_joins_and_sends_nothing_changes_no_summary(finished: Path) -> None:
    async def run() -> None:
        asker, (key,) = Asker(finished), load_keys(os.environ)
        await joined(asker, key)
        await asker.accepting.close()
        assert asker.done == []

    asyncio.run(run())
    assert (finished / "summary.txt").read_text() == "as it was"


def test_what_one_run_was_sent_is_worth_nothing_at_another_or_a_second_time(finished: Path) -> None:
    """Recorded on its way, or kept by a node: a hello, a join, a token and a frame."""
    other = Path(shutil.copytree(finished, finished.with_name("day")))
    write_meta(other, {**read_meta(other), "name": "day"})
    before = everything(other)

    async def run() -> None:
        asker, (key,) = Asker(finished), load_keys(os.environ)
        hello = write_hello("ab" * 16, key, b"")
        challenges = []
        for _ in range(2):
            _, text, headers = await asker.ask(HELLO_PATH, hello[0], **{PROOF_HEADER: hello[1]})
            proof = headers[PROOF_HEADER.encode()].decode()
            challenges.append(read_challenge(text, proof, "ab" * 16, key, b""))
        assert challenges[0] != challenges[1], "a repeated hello is another one"
        bearer = {"authorization": f"Bearer {challenges[0]}"}
        join = Join(run="night", node=1, nnodes=2, host="h", spool="cd" * 16, nonce="ef" * 16, challenge=challenges[0])
        body, proof = write_join(join, key, b"")
        recorded = {**bearer, PROOF_HEADER: proof}
        assert (await asker.ask("/api/v1/runs/day/join", body, **recorded))[0] == 403
        status, welcome, _ = await asker.ask("/api/v1/runs/night/join", body, **recorded)
        assert status == 200
        for path in ("night", "day"):
            assert (await asker.ask(f"/api/v1/runs/{path}/join", body, **recorded))[0] == 403
        swapped = {"authorization": f"Bearer {challenges[1]}", PROOF_HEADER: proof}
        assert (await asker.ask("/api/v1/runs/night/join", body, **swapped))[0] == 403
        # The other run is open, too: its own node is there, and sends nothing.
        own = replace(join, run="day", spool="dc" * 16, nonce="fe" * 16, challenge=challenges[1])
        body, proof = write_join(own, key, b"")
        own_bearer = {"authorization": f"Bearer {challenges[1]}", PROOF_HEADER: proof}
        assert (await asker.ask("/api/v1/runs/day/join", body, **own_bearer))[0] == 200
        token = {"authorization": f"Bearer {json.loads(welcome)['token']}"}
        line = part_of("lines", b'{"event": "forged"}\n', name="events.jsonl", offset=0)
        frame = pack_frame(FrameHead(node=1, spool="cd" * 16, sent_wall_ns=1), [line])
        assert (await asker.ask("/api/v1/runs/day/frames", frame, **token))[0] == 401
        foreign = pack_frame(FrameHead(node=1, spool="dc" * 16, sent_wall_ns=1), [line])
        assert (await asker.ask("/api/v1/runs/night/frames", foreign, **token))[0] == 403
        packed = gzip.compress(bytes(64 << 20))
        tracemalloc.start()
        answer = await asker.ask("/api/v1/runs/night/frames", packed, content_encoding="gzip", **token)
        assert (answer[0], tracemalloc.get_traced_memory()[1] < 8 << 20) == (400, True), "it is never unpacked"
        tracemalloc.stop()
        await asker.accepting.close()
        assert asker.done == []

    asyncio.run(run())
    assert {
        name: data for name, data in everything(other).items() if "/inbox" not in name and "nodes" not in name
    } == before


def test_a_key_that_is_gone_is_not_made_anew_while_it_serves(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STEPSCOPE_KEY")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    async def run() -> None:
        (key,) = load_keys(os.environ)
        asker = Asker(finished)
        key_path(os.environ).unlink()
        await joined(asker, key)
        await asker.accepting.close()

    asyncio.run(run())
    assert not key_path(os.environ).exists()
