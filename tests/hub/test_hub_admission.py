"""Joins, tokens, nodes that are replaced, ranks that belong to somebody, peers and pace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clock import SecondsClock

from stepscope.hub.ingest.auth import RankClaims, SenderLimits, neighbors
from stepscope.hub.limits import REASONS, REFUSED_SOURCES, Bucket, Buckets, Refusals, Refused
from stepscope.wire.handshake import Join, Welcome, write_join
from tests.hub.gate_parts import KEY, Parts, join_of, ring_of


@pytest.fixture
def clock() -> SecondsClock:
    return SecondsClock(100.0)


@pytest.fixture
def make(tmp_path: Path, clock: SecondsClock) -> Iterator[Callable[..., Parts]]:
    made: list[Parts] = []

    def parts(**values: Any) -> Parts:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Parts(folder, clock=clock, **values))
        return made[-1]

    yield parts
    for one in made:
        one.close()


def refusal(parts: Parts, join: Join) -> tuple[int, str, str, float | None]:
    with pytest.raises(Refused) as caught:
        parts.welcome(join)
    error = caught.value
    return error.status, error.reason, error.why, error.retry_s


def bearer(welcome: Welcome) -> bytes:
    return f"Bearer {welcome.token}".encode()


def test_a_token_is_for_one_spool_and_the_last_join_counts(make: Callable[..., Parts]) -> None:
    parts = make()
    first, second = join_of(1), join_of(2)
    tokens = [parts.welcome(join) for join in (first, second)]
    found = [parts.admission.sender_of(bearer(welcome)) for welcome in tokens]
    assert [one and one.spool for one in found] == [first.spool, second.spool]
    repeated = parts.welcome(replace(first, nonce="ab" * 16))
    assert parts.admission.sender_of(bearer(tokens[0])) is None
    assert parts.admission.sender_of(bearer(repeated)) is found[0]
    assert (repeated.run, repeated.local, repeated.next_s) == ("night-2", False, 0.5)
    kept = repr([vars(parts.admission), found[0]])
    assert repeated.token not in kept, "only its hash is kept"


@pytest.mark.parametrize(
    "said", [b"", b"Bearer", b"Bearer ", b"bearer x", b"Basic x", b"\xff", b"Bearer " + bytes(9999)]
)
def test_what_is_no_token(make: Callable[..., Parts], said: bytes) -> None:
    parts = make()
    parts.welcome(join_of(1))
    assert parts.admission.sender_of(said) is None


def test_a_node_is_replaced_when_it_is_silent(make: Callable[..., Parts], clock: SecondsClock) -> None:
    parts = make()
    old, new = join_of(1, host="a"), join_of(1, host="b")
    token = parts.welcome(old)
    clock.now_s += 14
    said = refusal(parts, new)
    assert said == (403, "node_taken", "a is already node 1, and sent data 14 s ago", 1.0)
    clock.now_s += 2
    parts.welcome(replace(new, nonce="ab" * 16))
    assert parts.admission.sender_of(bearer(token)) is None
    assert not parts.admission.is_live(old.spool)
    late = parts.welcome(replace(old, nonce="cd" * 16))
    sender = parts.admission.sender_of(bearer(late))
    assert sender is not None
    assert not sender.current, "it may hand in what it has, no more"
    assert refusal(parts, join_of(1))[1] == "node_taken"


def test_a_node_that_said_bye_is_replaced_at_once(make: Callable[..., Parts]) -> None:
    parts = make()
    old = join_of(1)
    parts.welcome(old)
    sender = parts.admission.senders[old.spool]
    assert parts.admission.heard(sender, bye=True) is False
    assert parts.admission.awaited() == []
    parts.welcome(join_of(1))
    assert len(parts.admission.awaited()) == 1


def test_nodes_are_lost_and_come_back(make: Callable[..., Parts], clock: SecondsClock) -> None:
    parts = make()
    joins = [join_of(node) for node in range(3)]
    for join in joins:
        parts.welcome(join)
    senders = [parts.admission.senders[join.spool] for join in joins]
    clock.now_s += 10
    parts.admission.heard(senders[0], bye=False)
    clock.now_s += 6
    assert parts.admission.look() == senders[1:]
    assert parts.admission.look() == []
    assert (parts.admission.agents, parts.admission.awaited()) == (1, [senders[0]])
    assert parts.admission.heard(senders[1], bye=False) is True
    assert parts.admission.agents == 2


def test_joins_are_limited(make: Callable[..., Parts], clock: SecondsClock) -> None:
    parts = make(limits=SenderLimits(joins=3, joins_per_s=1.0, again=2, again_per_s=0.5))
    for _ in range(3):
        parts.admission.may_join("10.0.0.7")
    with pytest.raises(Refused) as caught:
        parts.admission.may_join("10.0.0.7")
    assert (caught.value.status, caught.value.reason, caught.value.retry_s) == (429, "join_rate", 1.0)
    parts.admission.may_join("10.0.0.8")
    for _ in range(10):
        parts.admission.may_join("127.0.0.1")
    clock.now_s += 1
    parts.admission.may_join("10.0.0.7")
    join = join_of(1)
    for nonce in ("aa" * 16, "bb" * 16):
        parts.welcome(replace(join, nonce=nonce))
    assert refusal(parts, replace(join, nonce="cc" * 16)) == (429, "join_rate", "this node joins too often", 2.0)


def test_the_pace_follows_the_number_of_agents(make: Callable[..., Parts], clock: SecondsClock) -> None:
    parts = make()
    for node in range(1000):
        parts.welcome(join_of(node))
    assert parts.admission.next_s == pytest.approx(1000 / 600)
    assert parts.admission.silence_s == 15.0
    clock.now_s += 16
    parts.admission.look()
    assert (parts.admission.agents, parts.admission.next_s) == (0, 0.5)


def test_agents_come_more_often_while_somebody_looks(make: Callable[..., Parts]) -> None:
    parts = make()
    parts.admission.watched = True
    parts.admission.look()
    assert parts.admission.next_s == 0.25
    parts.admission.watched = False
    parts.admission.look()
    assert parts.admission.next_s == 0.5


def test_silence_is_longer_where_agents_come_seldom(make: Callable[..., Parts]) -> None:
    parts = make()
    parts.admission.next_s = 20.0
    assert parts.admission.silence_s == 65.0


def test_peers_are_told_once_and_when_they_change(make: Callable[..., Parts]) -> None:
    parts = make(nnodes=3, local_spool="ab" * 16)
    local = parts.welcome(join_of(0, nnodes=3, spool="ab" * 16, probe_port=7), address="127.0.0.1")
    assert (local.local, local.peers) == (True, ())
    join = join_of(1, nnodes=3, probe_port=8)
    there = parts.welcome(join, address="10.0.0.5")
    assert [(peer.node, peer.address, peer.port) for peer in there.peers] == [(0, "10.0.0.1", 7)], "where the hub is"
    own, other = (parts.admission.senders[spool] for spool in ("ab" * 16, join.spool))
    told = parts.admission.peers_for(own)
    assert told is not None
    assert [(peer.node, peer.address) for peer in told] == [(1, "10.0.0.5")]
    assert parts.admission.peers_for(own) is None
    parts.welcome(join_of(2, nnodes=3), address="10.0.0.6")
    assert parts.admission.peers_for(other) is None, "node 2 answers no probes"
    parts.admission.heard(own, bye=True)
    assert parts.admission.peers_for(other) == ()


@pytest.mark.parametrize("nnodes", [1, 2, 16, 17, 1000, 12_500])
def test_everybody_is_probed_and_nobody_probes_too_many(nnodes: int) -> None:
    probed = [0] * nnodes
    for node in range(nnodes):
        chosen = list(neighbors(node, nnodes))
        assert node not in chosen
        assert len(set(chosen)) == len(chosen) <= 15
        for other in chosen:
            probed[other] += 1
    assert set(probed) == {len(list(neighbors(0, nnodes)))}


def test_who_was_there_before_a_restart_may_hand_in_what_it_has(make: Callable[..., Parts]) -> None:
    parts = make()
    old = join_of(1)
    parts.admission.recall([old.spool])
    parts.welcome(join_of(1))
    parts.welcome(old)
    assert parts.admission.senders[old.spool].current is False


def test_a_join_works_once(make: Callable[..., Parts]) -> None:
    parts = make()
    join = join_of(1)
    parts.welcome(join)
    assert refusal(parts, join)[:3] == (403, "join", "this join was already used")
    body, _ = write_join(join, KEY, b"")
    assert len(body) < 400


# ── ranks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_rank_is_held_while_its_ring_and_its_spool_live() -> None:
    claims, live = RankClaims(), {"a", "b"}
    mine, same = ring_of(1, 3), ring_of(2, 3)
    claims.take("a", [mine])
    assert claims.contested("a", [mine], live.__contains__) is None
    assert claims.contested("b", [same], live.__contains__) == (same, "a")
    assert claims.contested("b", [ring_of(2, 3, attempt=1)], live.__contains__) is None
    assert claims.contested("b", [ring_of(2, 3, world_size=1)], live.__contains__) is None, "alone: no claim"
    assert claims.contested("b", [replace(same, ended_wall_ns=5)], live.__contains__) is None, "over: no claim"
    live.remove("a")
    assert claims.contested("b", [same], live.__contains__) is None
    assert claims.contested("b", [mine], live.__contains__) == (mine, "a"), "a process is one node's for good"
    live.add("a")
    claims.take("a", [replace(mine, state="exited")])
    assert claims.contested("b", [same], live.__contains__) is None


# ── small parts ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_bucket() -> None:
    bucket = Bucket(rate=2.0, burst=3.0, now_s=0.0)
    assert [bucket.take(1, 0.0) for _ in range(5)] == [0, 0, 0, 0.5, 0.5]
    assert bucket.take(1, 0.5) == 0
    assert bucket.take(100, 10.0) == 0, "more than it holds passes when it is full"
    assert bucket.take(1, 10.0) == 49.0
    assert not bucket.full(11.0)


def test_buckets_are_bounded() -> None:
    buckets: Buckets[str] = Buckets(rate=1.0, burst=2.0, most=2)
    assert [buckets.take(name, 0.0) for name in ("a", "b", "c")] == [0, 0, 2.0]
    assert buckets.take("c", 5.0) == 0, "those that are full again make room"


def test_refusals_are_bounded() -> None:
    refusals = Refusals()
    told = [refusals.count("token", str(n)) for n in range(REFUSED_SOURCES + 50)]
    assert told.count(True) == REFUSED_SOURCES
    assert refusals.count("token", "0") is False
    assert refusals.by_reason() == {**dict.fromkeys(REASONS, 0), "token": REFUSED_SOURCES + 51}
    assert refusals.total == REFUSED_SOURCES + 51
