"""What strangers, and agents gone wrong, can send to a real hub: refused, counted, and no harm to others."""

from __future__ import annotations

import itertools
import json
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.wire.frames import (
    BLOCK_HEAD,
    BLOCK_MAGIC,
    FRAME_BYTES,
    HEAD_BYTES,
    FrameHead,
    Part,
    PartKind,
    pack_frame,
    part_of,
)
from stepscope.wire.handshake import HELLO_PATH, PROOF_HEADER, write_hello, write_join
from tests.hub.gate_parts import KEY, RUN, Agent, HubProcess, bent, everything, join_of, ring_of, rings_part, summed

LIMITS: dict[str, Any] = {
    "connections": 160,
    "per_address": 40,
    "spare_local": False,
    "arrivals": 400,
    "head_s": 1.0,
    "body_s": 1.0,
    "answer_s": 1.0,
    "linger_s": 2.0,
    "senders": {"spare_local": False, "joins": 30, "joins_per_s": 5.0, "contest_s": 0.0},
}
NODES = itertools.count(1)
ADDRESSES = (f"127.0.1.{n}" for n in itertools.count(1))
FRAMES = f"/api/v1/runs/{RUN}/frames".encode()
MEMORY_BYTES = 48 << 20
"""What an attack may add to the hub's memory: a few frames."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    hub = HubProcess(tmp_path_factory.mktemp("gate") / "run", limits=LIMITS)
    yield hub
    said = hub.stop()
    # Each honest agent is gone when its test is over.
    true = ("tried to join with a different key", "has sent nothing for", "have not joined")
    mistakes = [line for line in said.splitlines() if not any(words in line for words in true)]
    assert all("on purpose" in line for line in mistakes), said


@pytest.fixture
def agent(hub: HubProcess) -> Iterator[Agent]:
    """An honest one, from an address of its own, that is served before and after."""
    with Agent(hub, next(NODES), next(ADDRESSES)) as agent:
        assert agent.send()[0] == 200
        yield agent
        status, answer = agent.send()
        keys = ["capture", "next_s", "peers", "received_wall_ns", "sent_wall_ns", "watched"]
        assert (status, sorted(answer)) == (200, keys)


@pytest.fixture
def refused(hub: HubProcess) -> Iterator[dict[str, int]]:
    """What the test says must have been counted, by reason, and nothing else."""
    before = hub.counters()
    expected: dict[str, int] = {}
    yield expected
    after = hub.counters()
    added = {reason: n - before["refused"][reason] for reason, n in after["refused"].items()}
    assert {reason: n for reason, n in added.items() if n} == expected


def request(path: bytes, *headers: bytes, body: bytes = b"", method: bytes = b"POST") -> bytes:
    return b"\r\n".join([method + b" " + path + b" HTTP/1.1", b"host: h", *headers, b"", body])


def bearer(agent: Agent) -> bytes:
    return b"authorization: Bearer " + agent.token.encode()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


# ── who is who ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_token_and_wrong_tokens(hub: HubProcess, agent: Agent, refused: dict[str, int]) -> None:
    frame = agent.frame()
    other = Agent(hub, next(NODES))
    tried = ["", "Bearer ", f"Bearer {agent.token[:-1]}", f"Bearer {agent.token}x", f"Basic {agent.token}", "é"]
    for value in tried:
        lines = [b"authorization: " + value.encode()] if value else []
        answer = hub.exchange(request(FRAMES, *lines, b"content-length: %d" % len(frame), body=frame))
        assert status_of(answer) == 401
        assert agent.token.encode() not in answer
    assert other.send(frame)[0] == 403
    assert agent.send(frame)[0] == 200
    other.close()
    refused |= {"token": len(tried), "spool": 1}


def test_a_rank_of_another_node(hub: HubProcess, agent: Agent, refused: dict[str, int]) -> None:
    thief = Agent(hub, next(NODES))
    head = FrameHead(node=thief.node, spool=thief.join.spool, sent_wall_ns=1)
    forged = ring_of(thief.node, agent.node, world_size=1000)
    for _ in range(3):
        status, answer = thief.send(pack_frame(head, [rings_part(thief.about, forged)]))
        assert (status, answer["why"]) == (
            403,
            f"rank {agent.node} of attempt 0 already runs on h{agent.node} (node {agent.node})",
        )
    assert thief.send(pack_frame(head, [rings_part(agent.about)]))[0] == 403, "another's process"
    assert thief.send()[0] == 200, "its own rank is its own"
    thief.close()
    events = [event for event in hub.counters()["events"] if event.get("source") == f"node {thief.node}"]
    assert [event["reason"] for event in events] == ["rank"], "told once"
    assert [forged.key, str(thief.node)] not in hub.counters()["rings"]
    refused |= {"rank": 4}


def test_a_replayed_frame_changes_nothing(hub: HubProcess, agent: Agent, refused: dict[str, int]) -> None:
    frame = agent.frame(rows=5)
    assert agent.send(frame)[0] == 200
    before = hub.counters()
    for _ in range(4):
        assert agent.send(frame)[0] == 200
    after = hub.counters()
    assert after["figures"]["duplicates"] - before["figures"]["duplicates"] == 4
    assert after["rows"] == before["rows"]
    assert refused == {}


def test_a_frame_from_the_future_is_told_where_to_begin(hub: HubProcess, agent: Agent, refused: dict[str, int]) -> None:
    agent.frame()
    status, answer = agent.send(agent.frame())
    assert (status, answer["positions"]["rings"]) == (409, {agent.about.key: 1})
    agent.after = 1
    assert refused == {}


@pytest.mark.usefixtures("agent")
def test_joins_that_are_refused(hub: HubProcess, refused: dict[str, int]) -> None:
    node = next(NODES)
    guest = Agent(hub, node, source := next(ADDRESSES))
    challenge = guest.hello(join_of(node)).challenge

    def made(number: int, key: bytes = KEY, certificate: bytes = b"", **said: Any) -> tuple[bytes, str]:
        return write_join(join_of(number, challenge=challenge, **said), key, certificate)

    good, proof = made(node)
    bearing = {"Authorization": f"Bearer {challenge}"}
    tried = [
        (good, proof[:-1] + ("0" if proof[-1] != "0" else "1"), 403, "key"),
        (good, "", 403, "key"),
        (good + b" ", proof, 403, "key"),
        (*made(node, b"x" * 32), 403, "key"),
        (*made(node, KEY, b"certificate"), 403, "key"),
        (*made(1000), 403, "join"),
        (*made(3, nnodes=7), 403, "join"),
        (*made(3, run="another"), 403, "join"),
        (*made(3, spool="../.."), 400, "join"),
        (*write_join(guest.join, KEY, b""), 403, "join"),
        (*write_join(join_of(node), KEY, b""), 403, "join"),  # without the challenge in it
        (*made(node), 403, "node_taken"),
    ]
    for body, signature, status, reason in tried:
        assert guest.post("join", body, {PROOF_HEADER: signature, **bearing})[0] == status
        refused[reason] = refused.get(reason, 0) + 1
    for wrong in ("", "x", "Bearer 1.2.3", bearing["Authorization"] + "0", "Bearer " + "9" * 300):
        status, text, _ = guest.post("join", good, {PROOF_HEADER: proof, "Authorization": wrong})
        assert (status, b"hello" in text) == (401, True), "also to an agent of version 1"
        assert guest.post("join", good, {"Authorization": wrong}, path="/api/v1/runs/none/join")[:2] == (status, text)
    refused["token"] = 10
    with Agent(hub, next(NODES), source) as other:
        assert other.send()[0] == 200
    guest.close()


@pytest.mark.usefixtures("agent")
def test_a_flood_of_joins(hub: HubProcess, refused: dict[str, int]) -> None:
    source = next(ADDRESSES)
    body, proof = write_hello("ab" * 16, b"x" * 32, b"")
    lines = (PROOF_HEADER.encode() + b": " + proof.encode(), b"content-length: %d" % len(body))
    attack = request(HELLO_PATH.encode(), *lines, b"connection: close", body=body)
    found = [status_of(hub.exchange(attack, source)) for _ in range(45)]
    assert set(found) == {403, 429}
    assert found[:30] == [403] * 30, "as many as may come at once"
    refused |= {"key": found.count(403), "join_rate": found.count(429)}


# ── garbage ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"\x00" * 4096,
        b"STFR" + bytes(range(256)),
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nhost: h\r\n\r\n",
        request(b"/", b"connection: upgrade", b"upgrade: websocket", method=b"GET"),
        request(b"/\xff\xfe", method=b"GET"),
        request(b"/", b"a\x00b: c", method=b"GET"),
        request(b"/", b" folded: line", method=b"GET"),
        request(FRAMES, b"content-length: 5", b"content-length: 5", body=b"aaaaa"),
        request(FRAMES, b"content-length: 5", b"content-length: 6", body=b"aaaaa"),
        request(FRAMES, b"content-length: -1"),
        request(FRAMES, b"content-length: 5 5", body=b"aaaaa"),
        request(FRAMES, b"content-length: 0x10"),
        request(FRAMES, b"content-length: " + b"9" * 30),
        request(FRAMES, b"content-length: 5", b"transfer-encoding: chunked", body=b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n"),
        request(FRAMES, b"transfer-encoding: chunked", b"transfer-encoding: chunked", body=b"0\r\n\r\n"),
        request(FRAMES, b"transfer-encoding: gzip, chunked", body=b"0\r\n\r\n"),
        request(FRAMES, b"transfer-encoding: xchunked", body=b"0\r\n\r\n"),
        request(FRAMES, b"transfer-encoding: identity"),
        request(b"/", b"content-length: 0", method=b"GET") * 3,
    ],
    ids=lambda sent: repr(sent[:24]) if len(sent) < 60 else repr(sent[-36:]),
)
def test_what_is_no_request_or_could_be_two(
    hub: HubProcess, agent: Agent, sent: bytes, refused: dict[str, int]
) -> None:
    answer = hub.exchange(sent)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert (status_of(answer), answer.split(b"\r\n\r\n", 1)[1]) == (400, b"")
    assert b"server:" not in answer.lower()
    assert agent.send()[0] == 200
    refused |= {"http": 1}


@pytest.mark.usefixtures("agent")
def test_something_behind_the_chunks(hub: HubProcess, agent: Agent, refused: dict[str, int]) -> None:
    frame = agent.frame()
    lines = (bearer(agent), b"transfer-encoding: chunked")
    body = b"%x\r\n" % len(frame) + frame + b"\r\n0\r\nauthorization: Bearer x\r\n\r\n"
    assert status_of(hub.exchange(request(FRAMES, *lines, body=body))) == 400
    agent.after -= 1
    refused |= {"http": 1}


@pytest.mark.parametrize(
    "sent",
    [
        request(b"/", b"x: " + b"a" * 20_000, method=b"GET"),
        request(b"/" + b"a" * 20_000, method=b"GET"),
        request(b"/", *(b"x%d: y" % n for n in range(3000)), method=b"GET"),
        b"GET / HTTP/1.1\r\nx: " + b"a" * 40_000,
        b"GET /" + b"a" * 40_000,
        b"\r\n" * 20_000,
    ],
    ids=["value", "path", "many", "no end", "no end of the path", "empty lines"],
)
@pytest.mark.usefixtures("agent")
def test_a_head_without_end(hub: HubProcess, sent: bytes, refused: dict[str, int]) -> None:
    assert status_of(hub.exchange(sent)) == 431
    refused |= {"head_large": 1}


def test_frames_that_are_none(hub: HubProcess, agent: Agent, refused: dict[str, int]) -> None:
    head = FrameHead(node=agent.node, spool=agent.join.spool, sent_wall_ns=1)
    good = pack_frame(head, [rings_part(agent.about)])
    huge = good[:12] + struct.pack("<I", HEAD_BYTES + 1) + good[16:]
    tried = [b"", b"garbage", bytes(100_000), good[:-1], good + b"x", good[:4] + b"\x02" + good[5:], summed(huge)]
    tried += [bent(good, lambda said: said.update(parts=[said["parts"][0]] * 600)), summed(good[:16] + b"[" * 9000)]
    for body in tried:
        assert agent.send(body)[0] == 400
    refused |= {"frame": len(tried)}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("file", "../../outside.json"),
        ("file", "/tmp/outside.json"),
        ("file", "errors/../../outside.json"),
        ("file", "errors/..\\outside.json"),
        ("file", "hub.json"),
        ("file", "errors/a\u0000.json"),
        ("file", "inbox/000001.frames"),
        ("log", "logs/../outside.log"),
        ("log", "logs/.log"),
        ("lines", "../events.jsonl"),
        ("lines", "run.json"),
        ("rings", "steps/a.json"),
    ],
)
def test_names_that_lead_elsewhere(
    hub: HubProcess, agent: Agent, kind: PartKind, name: str, refused: dict[str, int]
) -> None:
    allowed = {"file": "errors/a.json", "log": "logs/a.log", "lines": "events.jsonl", "rings": ""}
    part = part_of(kind, b"[]\n", name=allowed[kind])
    frame = pack_frame(FrameHead(node=agent.node, spool=agent.join.spool, sent_wall_ns=1), [part])
    before = files_beside(hub)
    assert agent.send(bent(frame, lambda said: said["parts"][0].update(name=name)))[0] == 400
    assert files_beside(hub) == before
    refused |= {"frame": 1}


def files_beside(hub: HubProcess) -> set[Path]:
    return {path for path in hub.run_dir.parent.rglob("*") if not path.name.startswith(".")} - {
        hub.run_dir / "inbox" / "hub-events.jsonl",
        hub.run_dir / "nodes.json",
    }


# ── too much ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_400_megabytes_announced(hub: HubProcess, agent: Agent, refused: dict[str, int]) -> None:
    before = hub.rss_bytes()
    for lines in ([], [bearer(agent)], [bearer(agent), b"expect: 100-continue"]):
        answer = hub.exchange(request(FRAMES, *lines, b"content-length: %d" % (400 << 20)))
        assert status_of(answer) == 413, "before a byte of it was sent"
    assert status_of(hub.exchange(request(FRAMES[:-6] + b"join", b"content-length: 100000"))) == 413
    assert status_of(hub.exchange(request(b"/other", b"content-length: 100000"))) == 413
    assert hub.rss_bytes() - before < MEMORY_BYTES
    refused |= {"body_large": 5}


def test_400_megabytes_in_chunks(hub: HubProcess, agent: Agent, refused: dict[str, int]) -> None:
    before = hub.rss_bytes()
    chunk = b"%x\r\n" % (1 << 20) + bytes(1 << 20) + b"\r\n"
    with hub.connect() as sock:
        sock.sendall(request(FRAMES, bearer(agent), b"transfer-encoding: chunked"))
        sent = 0
        try:
            for _ in range(400):
                sock.sendall(chunk)
                sent += 1
        except OSError:
            pass
        answer = everything(sock)
    assert answer == b"" or status_of(answer) == 413
    assert sent << 20 < 4 * FRAME_BYTES, "no more was taken than a frame, and what sockets hold"
    assert hub.rss_bytes() - before < MEMORY_BYTES
    refused |= {"body_large": 1}


def test_bombs(hub: HubProcess, agent: Agent, refused: dict[str, int]) -> None:
    before = hub.rss_bytes()
    head = FrameHead(node=agent.node, spool=agent.join.spool, sent_wall_ns=1)
    bomb = zlib.compress(bytes(96 << 20), 9)
    blocks = [
        BLOCK_HEAD.pack(BLOCK_MAGIC, 1, 0, rings, rows, len(bomb)) + bomb for rings, rows in ((1, 9), (9, 65_536))
    ]
    parts = [
        Part(kind="rings", data=bomb, size=100),
        Part(kind="rings", data=bomb, size=4 << 20),
        Part(kind="lines", data=bomb, size=4 << 20, name="events.jsonl"),
        Part(kind="file", data=bomb, size=8 << 20, name="errors/1.json"),
        *(Part(kind="steps", data=block, size=len(block)) for block in blocks),
    ]
    for part in parts:
        assert agent.send(pack_frame(head, [part]))[0] == 400
    whole = bent(pack_frame(head, [parts[2]]), lambda said: said["parts"][0].update(size=96 << 20))
    assert agent.send(whole)[0] == 400
    assert hub.rss_bytes() - before < MEMORY_BYTES
    refused |= {"frame": len(parts) + 1}


def test_a_flood_of_connections(hub: HubProcess, agent: Agent, refused: dict[str, int]) -> None:
    source = next(ADDRESSES)
    with hub.many(120, source):
        assert agent.send()[0] == 200
        assert hub.counters()["connections"] <= LIMITS["per_address"] + 8
        with Agent(hub, next(NODES), source) as served:
            assert served.send()[0] == 200, "the newest are served, also from there"
    refused |= {"connections": 120 - LIMITS["per_address"] + 1}


def test_connections_faster_than_anybody_needs_them(hub: HubProcess, agent: Agent) -> None:
    source = next(ADDRESSES)
    before = hub.refused("connection_rate")
    for _ in range(600):
        hub.connect(source).close()
    assert hub.refused("connection_rate") > before
    assert agent.send()[0] == 200


# ── too slow ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_slow_loris(hub: HubProcess, agent: Agent) -> None:
    before = hub.counters()["refused"]
    with hub.many(100, *(f"127.0.2.{n + 1}" for n in range(4)), first=b"POST ") as loris:
        for piece in (FRAMES, b" HTTP/1.1\r\n", b"x: y\r\n", b"z: "):
            for sock in loris:
                send_quietly(sock, piece)
            assert agent.send()[0] == 200
            with Agent(hub, next(NODES), next(ADDRESSES)) as other:
                assert other.send()[0] == 200
        answers = [everything(sock) for sock in loris]
    assert {status_of(answer) for answer in answers if answer} <= {408}
    after = hub.counters()["refused"]
    assert after["head_slow"] - before["head_slow"] == 100


def test_slow_bodies(hub: HubProcess, agent: Agent, refused: dict[str, int]) -> None:
    begun = request(FRAMES, bearer(agent), b"content-length: 30", body=b"S")
    with hub.many(8, next(ADDRESSES), first=begun) as slow:
        assert agent.send()[0] == 200
        assert [status_of(everything(sock)) for sock in slow] == [408] * 8
    refused |= {"body_slow": 8}


def test_somebody_who_does_not_take_the_answer(hub: HubProcess, agent: Agent, refused: dict[str, int]) -> None:
    with hub.connect() as sock:
        sock.sendall(request(b"/large", method=b"GET"))
        while not hub.refused("reader_slow"):
            assert agent.send()[0] == 200
            time.sleep(0.05)
        assert len(everything(sock)) < 64 << 20
    refused |= {"reader_slow": 1}


def test_sockets_that_say_nothing_go_quietly(hub: HubProcess, refused: dict[str, int]) -> None:
    with hub.many(10) as silent:
        assert [everything(sock) for sock in silent] == [b""] * 10
    assert refused == {}


# ── and still ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_mistake_of_ours_is_one_line_and_a_500(hub: HubProcess, agent: Agent, refused: dict[str, int]) -> None:
    assert status_of(hub.exchange(request(b"/fault", method=b"GET"))) == 500
    assert agent.send()[0] == 200
    refused |= {"fault": 1}


def test_an_answer_reaches_one_who_still_sends(hub: HubProcess, agent: Agent, refused: dict[str, int]) -> None:
    """After a restart of the hub, agents with megabytes to send must be told to join again."""
    token, agent.token = agent.token, "another"
    assert agent.send(bytes(FRAME_BYTES))[0] == 401
    agent.token = token
    assert agent.send(bytes(FRAME_BYTES))[0] == 400
    refused |= {"token": 1, "frame": 1}


def test_a_body_in_many_pieces(hub: HubProcess, agent: Agent, refused: dict[str, int]) -> None:
    frame = agent.frame(rows=40)
    pieces = [frame[at : at + 100] for at in range(0, len(frame), 100)]
    chunked = b"".join(b"%x\r\n" % len(piece) + piece + b"\r\n" for piece in pieces) + b"0\r\n\r\n"
    lines = (bearer(agent), b"transfer-encoding: chunked", b"connection: close")
    with hub.connect() as sock:
        whole = request(FRAMES, *lines, body=chunked)
        for at in range(0, len(whole), 97):
            sock.sendall(whole[at : at + 97])
        assert status_of(everything(sock)) == 200
    assert refused == {}


def test_what_was_refused_is_shown(hub: HubProcess, agent: Agent) -> None:
    assert agent.send(b"garbage")[0] == 400
    deadline_s = time.monotonic() + 30
    while True:
        said = json.loads((hub.run_dir / "nodes.json").read_bytes()) if (hub.run_dir / "nodes.json").exists() else {}
        mine = [node for node in said.get("nodes", ()) if node["spool"] == agent.join.spool]
        if mine and mine[0]["refused"]:
            break
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert mine[0]["refused"] == 1
    assert said["refused"]["frame"] >= 1
    events = (hub.run_dir / "inbox" / "hub-events.jsonl").read_text()
    assert f'"event":"node_joined","node":{agent.node},' in events


def send_quietly(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError:
        pass  # its time is over
