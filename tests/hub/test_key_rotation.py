"""A new key while a job runs: nodes continue to send, nothing is lost or comes twice, and the old key ends."""

from __future__ import annotations

import io
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster

from stepscope.agent.shipping.client import HubClient
from stepscope.agent.shipping.sender import Sender, Shipper
from stepscope.cli.main import run_command
from stepscope.errors import KeyRefused, UsageError
from stepscope.hub.ingest.endpoints import in_front
from stepscope.hub.ingest.run_ingest import RunIngest
from stepscope.hub.limits import Refusals, Refused
from stepscope.hub.live.live_run import LiveRun
from stepscope.records.files import key_path
from stepscope.records.series import RankSeries
from stepscope.store.create import create_run
from stepscope.store.documents import Destination, end_run, read_meta, write_meta
from stepscope.store.live.ring_files import write_sidecar
from stepscope.store.load import open_run
from stepscope.wire.handshake import Join, KeyRing, load_keys, retire_key, rotate_key, write_hello
from tests.hub.gate_parts import Parts, join_of
from tests.hub.run_parts import Hub, append_steps, record, sidecar_of

STEPS = 30
BYE = {"exit_code": 0, "status": "finished"}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path / "config")}


# ── a job ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Job:
    """Two nodes that do not share a home folder: the hub of node 0, and what node 1 records and sends."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on_hub, self.on_node = ({"XDG_CONFIG_HOME": str(folder / name)} for name in ("hub", "node"))
        monkeypatch.setenv("XDG_CONFIG_HOME", self.on_hub["XDG_CONFIG_HOME"])
        load_keys(self.on_hub)
        key_path(self.on_node).parent.mkdir(parents=True)
        self.copy_key()
        whole = Cluster(ranks=4, steps=STEPS, hosts=2).run()
        own, self.series = (tuple(s for s in whole.ranks if s.identity.host == host) for host in ("node0", "node1"))
        self.run_dir = record(folder / "runs", "job", replace(whole, ranks=own), sealed=False)
        write_meta(self.run_dir, {**read_meta(self.run_dir), "nnodes": 2})
        made = create_run(folder / "kept", "job.node1", ["train.py"], environ={}, sessions=folder / "sessions")
        self.spool = made.run_dir
        self.refusals = Refusals()
        self.gathering = RunIngest(
            self.run_dir,
            LiveRun(name="job"),
            self.refusals,
            names=("job",),
            nnodes=2,
            fingerprint=b"",
            own_spool=str(read_meta(self.run_dir)["spool"]),
        )
        self.hub = Hub(lambda: in_front(self.gathering.ingest, _nothing))
        self._steps = 0
        self._closed = False
        self.sender = self.new_agent()

    def new_agent(self) -> Sender:
        to = Destination(url=self.hub.url, run="job", node=1, nnodes=2)
        return Sender(self.spool, to, lambda: load_keys(self.on_node))

    def look(self) -> None:
        """As the hub does once a second."""
        self.gathering.keys.refresh()
        self.hub.in_loop(self.gathering.tick)

    def forget_tokens(self) -> None:
        """As a hub that was started again."""
        self.hub.in_loop(self.gathering.ingest.admission._tokens.clear)

    def copy_key(self) -> None:
        shutil.copy2(key_path(self.on_hub), key_path(self.on_node))

    def train(self, steps: int, *, turns: int = 20) -> None:
        """So many steps more on node 1, all of which its agent sends.  A hub keeps a wrong key waiting in each turn."""
        for series in self.series:
            append_steps(self.spool, series, self._steps, self._steps + steps)
            write_sidecar(self.spool, _running(series))
        self._steps += steps
        frames = self.sender.counts.frames
        for _ in range(turns):
            self.sender.turn()
            if self.sender.counts.frames > frames:
                return
        raise AssertionError(self.sender.trouble)

    def finish(self) -> None:
        while not self.sender.turn(bye=BYE).delivered:
            assert self.sender.refusal == ""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.sender.close()
        self.hub.close()
        self.gathering.close()


def _running(series: RankSeries) -> Any:
    return replace(sidecar_of(series), state="running")


async def _nothing(*_: Any) -> None:
    raise NotImplementedError


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    made = Job(tmp_path, monkeypatch)
    yield made
    made.close()


def test_a_run_continues_across_a_rotation(job: Job) -> None:
    (old,) = load_keys(job.on_hub)
    job.train(5)
    rotate_key(job.on_hub)
    job.look()
    job.train(5)
    assert job.sender.counts.joins == 1, "nobody has to join again for a new key"
    job.sender.close()
    job.sender = job.new_agent()
    job.train(5)  # this node has only the old key yet
    job.copy_key()
    retire_key(job.on_hub)
    job.look()
    job.train(5)  # its token ended with the old key: it joins again with the new one
    assert job.sender.counts.joins == 2
    job.copy_key()
    job.train(10)
    job.finish()
    assert (job.refusals.by_reason()["token"], job.refusals.by_reason()["key"]) == (0, 0)
    stranger = HubClient(job.hub.url, old)
    with pytest.raises(KeyRefused):
        stranger.join(Join(run="job", node=1, nnodes=2, host="x", spool="ab" * 16, nonce="cd" * 16), patience_s=20)
    stranger.close()
    assert job.refusals.by_reason()["key"] == 1
    job.close()
    end_run(job.run_dir, exit_code=0, status="finished")
    run = open_run(job.run_dir)
    assert {series.rank: series.steps["step"].tolist() for series in run.ranks} == {
        rank: list(range(STEPS)) for rank in range(4)
    }


def test_a_node_may_have_the_new_key_before_the_hub_has_it(job: Job) -> None:
    rotate_key(job.on_node)
    job.train(5)
    assert job.sender.refusal == ""
    assert job.sender.counts.joins == 1


def test_a_node_that_kept_the_old_key_is_refused_until_it_gets_the_new_one(job: Job) -> None:
    job.train(5)
    rotate_key(job.on_hub)
    retire_key(job.on_hub)
    job.look()
    for series in job.series:
        append_steps(job.spool, series, 5, STEPS)
    for _ in range(3):
        job.sender.turn()
    assert "the keys differ" in job.sender.refusal
    job.copy_key()
    for _ in range(3):
        job.sender.turn()
    job.finish()
    job.close()
    end_run(job.run_dir, exit_code=0, status="finished")
    found = {series.rank: series.steps["step"].tolist() for series in open_run(job.run_dir).ranks}
    assert found == {rank: list(range(STEPS)) for rank in range(4)}, "what it could not send waited"


def test_an_agent_whose_key_cannot_be_read_any_more_joins_again_with_the_one_it_has(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", job.on_node["XDG_CONFIG_HOME"])
    job.sender = Shipper(job.spool, Destination(url=job.hub.url, run="job", node=1, nnodes=2))._sender
    job.train(5)
    key_path(job.on_node).unlink()  # or its home folder is away, as when a Kerberos ticket ran out
    job.forget_tokens()
    job.train(5)
    assert (job.sender.counts.joins, job.sender.refusal) == (2, "")
    assert not key_path(job.on_node).exists(), "it does not make one of its own"
    assert capsys.readouterr().err == "", "what a job prints is its own"


def test_an_agent_does_not_go_back_to_an_old_key_at_a_hub_that_had_the_new_one(job: Job) -> None:
    (old,) = lines_of(job.on_hub)
    rotate_key(job.on_hub)
    job.look()
    job.copy_key()
    job.train(5)
    key_path(job.on_hub).write_text(f"{old}\n")  # somebody who has only the old key answers at its address
    job.look()
    job.forget_tokens()
    with pytest.raises(AssertionError, match="the keys differ"):
        job.train(5, turns=2)
    assert job.sender.counts.joins == 1


def test_two_keys_take_no_longer_than_one(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    now, patience = [1000.0], []

    class SlowHub:
        def __init__(self, *_: object) -> None: ...
        def close(self) -> None: ...
        def join(self, _: Join, *, patience_s: float) -> Any:
            patience.append(patience_s)
            now[0] += 4.0
            raise KeyRefused("no")

    monkeypatch.setattr("stepscope.agent.shipping.sender.HubClient", SlowHub)
    monkeypatch.setattr("stepscope.agent.shipping.sender.time.monotonic", lambda: now[0])
    rotate_key(job.on_node)
    job.sender.turn(patience_s=10.0)
    monkeypatch.undo()
    assert patience == [10.0, 6.0]


# ── the hub ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tokens_end_with_their_key_and_no_others(tmp_path: Path) -> None:
    old, new = b"o" * 32, b"n" * 32
    believed = [(old,)]
    parts = Parts(tmp_path, keys=lambda: believed[0])
    admission = parts.admission

    def joined(key: bytes) -> bytes:
        return f"Bearer {parts.welcome(join_of(1 if key == old else 2), key=key).token}".encode()

    first = joined(old)
    believed[0] = (new, old)
    second = joined(new)
    admission.look()
    assert all(admission.sender_of(token) is not None for token in (first, second))
    believed[0] = (new,)
    admission.look()
    assert (admission.sender_of(first), admission.was_ours(first)) == (None, True), "it is no stranger"
    assert admission.sender_of(second) is not None
    with pytest.raises(Refused, match="the keys differ"):
        admission.challenges.answer(*write_hello("ab" * 16, old, b""))
    parts.close()


# ── the file ────────────────────────────────────────────────────────────────────────────────────────────────────────


def lines_of(environ: dict[str, str]) -> list[str]:
    return key_path(environ).read_text().splitlines()


def test_the_file_has_two_keys_and_then_one(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", environ["XDG_CONFIG_HOME"])
    monkeypatch.delenv("STEPSCOPE_KEY", raising=False)
    (first,) = load_keys(environ)
    (old,) = lines_of(environ)
    assert run_command(["key", "rotate"]) == 0
    new, kept = lines_of(environ)
    assert kept == old
    assert len(new) == 64
    assert load_keys(environ)[1:] == (first,)
    with pytest.raises(UsageError, match="retire"):
        run_command(["key", "rotate"])
    assert lines_of(environ) == [new, old]
    assert run_command(["key", "retire"]) == 0
    assert lines_of(environ) == [new]
    with pytest.raises(UsageError, match="no old key"):
        run_command(["key", "retire"])
    assert key_path(environ).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in key_path(environ).parent.iterdir()] == ["key"]
    printed = capsys.readouterr()
    assert not any(key in printed.out + printed.err for key in (old, new))
    monkeypatch.setenv("STEPSCOPE_KEY", "s" * 32)
    with pytest.raises(UsageError, match="STEPSCOPE_KEY is set"):
        run_command(["key", "rotate"])


def test_a_link_to_the_key_stays_one(tmp_path: Path, environ: dict[str, str]) -> None:
    place = key_path(environ)
    place.parent.mkdir(parents=True)
    (tmp_path / "elsewhere").write_text(secrets.token_hex(32))
    (tmp_path / "elsewhere").chmod(0o600)
    place.symlink_to(tmp_path / "elsewhere")
    rotate_key(environ)
    assert place.is_symlink()
    assert len((tmp_path / "elsewhere").read_text().splitlines()) == 2


def test_two_who_rotate_at_once_do_not_lose_a_key(environ: dict[str, str]) -> None:
    (first,) = load_keys(environ)
    done: list[str] = []

    def rotate() -> None:
        try:
            rotate_key(environ)
            done.append("rotated")
        except UsageError as error:
            done.append("refused" if "still accepted" in str(error) or "being changed" in str(error) else str(error))

    threads = [threading.Thread(target=rotate) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == ["refused"] * 7 + ["rotated"]
    assert load_keys(environ)[1] == first


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_text("")


def cut_off(path: Path) -> None:
    path.write_text(path.read_text()[:10])


def cut_off_late(path: Path) -> None:
    path.write_text(secrets.token_hex(20))


def cut_off_behind(path: Path) -> None:
    path.write_text(f"{secrets.token_hex(32)}\nabc")


def open_to_all(path: Path) -> None:
    path.write_text(secrets.token_hex(32))
    path.chmod(0o644)


def too_many(path: Path) -> None:
    path.write_text("".join(f"{secrets.token_hex(32)}\n" for _ in range(3)))


def binary(path: Path) -> None:
    path.write_bytes(b"\xff\x00" * 4)


@pytest.mark.parametrize("spoil", [remove, empty, cut_off, cut_off_late, cut_off_behind, open_to_all, too_many, binary])
def test_a_hub_keeps_its_key_when_the_file_is_spoiled_and_says_so_once(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None]
) -> None:
    keys, path = KeyRing(environ), key_path(environ)
    before = keys()
    whole = path.read_text()
    spoil(path)
    assert [keys.refresh() for _ in range(3)] == [before] * 3
    assert capsys.readouterr().err.count("continuing with the previous key") == 1
    path.unlink(missing_ok=True)
    path.write_text(f"{secrets.token_hex(32)}\n{whole}")
    path.chmod(0o600)
    assert keys.refresh()[1:] == before
    assert len(keys()) == 2
    assert capsys.readouterr().err == ""


def test_an_event_loop_never_waits_for_the_file(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = KeyRing(environ)
    before = keys()

    def away(*_: object, **__: object) -> None:
        raise AssertionError("a home folder on a server that is down would hang here")

    for name in ("stat", "open", "read_text"):
        monkeypatch.setattr(Path, name, away)
    assert keys() == before


def test_a_hub_that_runs_sees_a_new_key_by_itself(environ: dict[str, str]) -> None:
    keys = KeyRing(environ)
    before = keys()
    keys.start()
    try:
        rotate_key(environ)
        deadline_s = time.monotonic() + 60
        while len(keys()) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert keys()[1:] == before
    finally:
        keys.stop()


def test_a_hub_that_nobody_listens_to_continues(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    keys, path = KeyRing(environ), key_path(environ)
    before = keys()
    path.write_text("")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb", buffering=0) as pipe:
        monkeypatch.setattr("sys.stderr", io.TextIOWrapper(pipe, write_through=True))
        assert [keys.refresh(), keys.refresh()] == [before] * 2


def test_a_key_of_the_environment_stays(environ: dict[str, str]) -> None:
    keys = KeyRing({**environ, "STEPSCOPE_KEY": "s" * 32})
    before = keys()
    key_path(environ).parent.mkdir(parents=True)
    key_path(environ).write_text(secrets.token_hex(32))
    assert keys.refresh() == before
