"""The thread, and the real agent that has it: it ends in time, says the truth, and what one left another takes up."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rings import RingStream, write_steps
from waiting import until

from stepscope.agent.shipping.sender import Delivered, Shipper
from stepscope.errors import UsageError
from stepscope.records.identity import RankIdentity
from stepscope.ring import RingState
from stepscope.store.create import RunPaths, create_run
from stepscope.store.documents import Destination, read_meta, write_meta
from stepscope.store.file_io import read_jsonl

KEY_TEXT = "a key of sixteen characters or more"
BYE = {"exit_code": 0, "status": "finished"}
PATIENCE_S = 30.0


def shipper(spool: Any, hub: Any) -> Shipper:
    made = Shipper(spool.run_dir, Destination(url=hub.url, run="job", node=1, nnodes=2), keys=lambda: (hub.key,))
    made.start()
    return made


def test_it_sends_while_the_run_goes_on_and_ends_with_a_bye(spool: Any, hub: Any) -> None:
    ship = shipper(spool, hub)
    for count in range(1, 4):
        spool.ring(0, heard_wall_ns=count)
        spool.steps(0, count)
        until(lambda count=count: hub.stored and hub.spool().last_seq.get(spool.key(0)) == 5 * count * (count + 1))
    spool.lines("events.jsonl", {"event": "agent_end"})
    assert ship.finish(BYE, PATIENCE_S) == Delivered(whole=True, run="job-2")
    spool.equals(hub.spool())
    assert (hub.spool().byes, len(hub.joins), ship.counts.joins) == ([BYE], 1, 1)
    assert ship.finish(BYE, 0.0).word() == {"delivered": True, "run": "job-2"}
    assert ship.news() == []


@pytest.mark.faults
def test_the_hub_comes_late_and_goes_and_comes_back(spool: Any, new_hub: Any) -> None:
    hub = new_hub()
    ship = shipper(spool, hub)
    spool.ring(0)
    spool.steps(0, 10)
    until(lambda: ship.counts.failed)
    hub.start()
    until(lambda: hub.stored and hub.spool().last_seq.get(spool.key(0)) == 100)
    hub.stop()
    spool.steps(0, 10)
    until(lambda: ship.counts.failed >= 2)
    hub.start()
    assert ship.finish(BYE, PATIENCE_S).whole
    spool.equals(hub.spool())


@pytest.mark.faults
def test_without_a_hub_it_ends_in_time_and_says_what_is_left(spool: Any, new_hub: Any) -> None:
    hub = new_hub()
    spool.write("logs/main.log", bytes(1000))
    done = shipper(spool, hub).finish(BYE, 0.3)
    why = f"the hub at 127.0.0.1:{hub.port} cannot be reached: Connection refused"
    assert done == Delivered(whole=False, left_bytes=1000, why=why)
    assert done.word() == {"delivered": False, "left_bytes": 1000, "why": why}


@pytest.mark.faults
def test_a_hub_that_takes_frames_and_never_answers_holds_nobody_up(spool: Any, hub: Any) -> None:
    hub.faults.extend(["silence"] * 5)
    spool.write("logs/main.log", bytes(1000))
    ship = shipper(spool, hub)
    until(lambda: len(hub.paths) == 2)
    done = ship.finish(BYE, 0.2)
    assert done == Delivered(whole=False, left_bytes=1000, why="the time limit was reached")
    hub.stop()


@pytest.mark.faults
def test_at_the_end_nobody_is_waited_for_who_is_not_there(
    spool: Any, new_hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.agent.shipping.sender.SILENCE_S", 0.2)
    done = shipper(spool, new_hub()).finish(BYE, 10 * PATIENCE_S)
    assert "cannot be reached" in done.why


@pytest.mark.faults
def test_a_full_disk_at_the_hub_is_told(spool: Any, hub: Any) -> None:
    hub.faults.extend([507] * 1000)
    spool.write("logs/main.log", b"x")
    done = shipper(spool, hub).finish(BYE, 3.0)
    assert (done.whole, done.why) == (False, "the hub accepts no data: its disk is full")
    assert hub.spool().byes == []


def test_what_cannot_be_sent_keeps_the_folder(spool: Any, hub: Any) -> None:
    spool.write("logs/what is this", b"x")
    done = shipper(spool, hub).finish(BYE, PATIENCE_S)
    assert (done.whole, done.why) == (False, "cannot send logs/what is this")
    assert hub.spool().byes == [BYE]


@pytest.mark.faults
def test_without_a_key_it_says_so(spool: Any, hub: Any) -> None:
    def no_key() -> bytes:
        raise UsageError("other users can read the key")

    to = Destination(url=hub.url, run="job", node=1, nnodes=2)
    ship = Shipper(spool.run_dir, to, keys=no_key)
    ship.start()
    assert ship.finish(BYE, 0.2).why == "other users can read the key"


def test_it_stops_without_a_word(spool: Any, hub: Any) -> None:
    ship = shipper(spool, hub)
    until(lambda: hub.frames)
    ship.stop()
    assert hub.spool().byes == []


# ── in the agent ────────────────────────────────────────────────────────────────────────────────────────────────────


class Node:
    """A rank of ours, and agents as its launcher starts them."""

    def __init__(self, folder: Path, hub: Any) -> None:
        command = ["python", "train.py"]
        self.paths: RunPaths = create_run(folder, "job.node1", command, environ={}, sessions=folder / "sessions")
        self.run_dir = self.paths.run_dir
        self._hub = hub
        self._agents: list[subprocess.Popen[str]] = []
        host = RankIdentity(host="b", pid=os.getpid(), rank=0)
        self._stream = RingStream(self.paths.session / f"{os.getpid()}.ring", host)
        self._stream.ring.set_state(RingState.RUNNING)
        self._steps = 0

    def steps(self, count: int) -> None:
        write_steps(self._stream, count, first=self._steps)
        self._steps += count

    def agent(self, prelude: str = "") -> subprocess.Popen[str]:
        places = ["--run-dir", str(self.run_dir), "--session", str(self.paths.session), "--hang-after", "0"]
        hub = ["--hub", self._hub.url, "--node", "1", "--nnodes", "2", "--run-name", "job"]
        code = f"{prelude}\nimport runpy, sys\nsys.argv = {['stepscope.agent', *places, *hub]!r}\n"
        code += "runpy.run_module('stepscope.agent', run_name='__main__')"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "STEPSCOPE_KEY": KEY_TEXT}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._agents.append(subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, **pipes))
        return self._agents[-1]

    def end(self, agent: subprocess.Popen[str]) -> list[Any]:
        """Tell it so; what it answers."""
        said, complaints = agent.communicate(json.dumps({"end": BYE}) + "\n", timeout=PATIENCE_S)
        assert (agent.returncode, complaints) == (0, "")
        return [json.loads(line) for line in said.splitlines()]

    def close(self) -> None:
        self._stream.close()
        for agent in self._agents:
            if agent.poll() is None:
                agent.kill()
            agent.communicate()


@pytest.fixture
def secure_hub(new_hub: Any, certificates: Any) -> Any:
    return new_hub(tls=certificates(), key=hashlib.sha256(KEY_TEXT.encode()).digest())


@pytest.fixture
def node(tmp_path: Path, secure_hub: Any) -> Iterator[Node]:
    made = Node(tmp_path / "runs", secure_hub)
    yield made
    made.close()


def received(hub: Any) -> int:
    """Records of the one ring."""
    return sum(len(slots) for slots in hub.spool().slots.values()) // 256 if hub.stored else 0


@pytest.mark.faults
def test_agents_that_are_killed_are_followed_by_one_that_delivers(node: Node, secure_hub: Any) -> None:
    secure_hub.start()
    for total in (700, 1400):
        agent = node.agent()
        node.steps(700)
        until(lambda total=total: received(secure_hub) >= total)
        agent.kill()
        agent.wait()
        secure_hub.stop()
        secure_hub.start()
    agent = node.agent()
    node.steps(50)
    assert node.end(agent) == [{"delivered": True, "run": "job-2"}]
    spool = secure_hub.spool()
    assert received(secure_hub) == 1450
    assert spool.byes == [BYE]
    assert spool.files["events.jsonl"] == (node.run_dir / "events.jsonl").read_bytes()
    assert {join.probe_port > 0 for join in secure_hub.joins} == {True}
    (about,) = spool.sidecars.values()
    assert about == json.loads(next((node.run_dir / "steps").glob("*.json")).read_bytes())


@pytest.mark.faults
def test_an_agent_without_its_hub_says_so_and_keeps_everything(node: Node) -> None:
    node.steps(700)
    agent = node.agent("import stepscope.agent.loop as loop\nloop.SHIPPING_S = 0.3")
    until(lambda: list((node.run_dir / "steps").glob("*.seg")))
    (said,) = node.end(agent)
    assert said["delivered"] is False
    assert said["left_bytes"] >= 100
    assert "cannot be reached" in said["why"]
    assert [event["event"] for event in read_jsonl(node.run_dir / "events.jsonl")[0]][-1] == "agent_end"


@pytest.mark.faults
def test_an_agent_that_is_told_not_to_wait_says_what_is_left(node: Node, secure_hub: Any) -> None:
    secure_hub.faults.extend([507] * 10_000)
    secure_hub.start()
    agent = node.agent()
    until(lambda: secure_hub.paths[1:])
    assert agent.stdin is not None
    agent.stdin.write(json.dumps({"end": BYE}) + "\n")
    agent.stdin.flush()
    until(lambda: any(e["event"] == "agent_end" for e in read_jsonl(node.run_dir / "events.jsonl")[0]))
    agent.terminate()
    said, _ = agent.communicate(timeout=PATIENCE_S)
    assert json.loads(said)["delivered"] is False
    assert json.loads(said)["why"] == "the hub accepts no data: its disk is full"


@pytest.mark.faults
def test_an_agent_whose_launcher_died_delivers_and_tidies_up(node: Node, secure_hub: Any) -> None:
    secure_hub.start()
    write_meta(node.run_dir, {**read_meta(node.run_dir), "launcher": None})
    (node.paths.session / f"{os.getpid()}.ring").unlink()  # no rank is left
    agent = node.agent("import stepscope.agent.loop as loop\nloop.NO_RANKS_S = 0.1")
    until(lambda: secure_hub.frames)
    agent.communicate(timeout=PATIENCE_S)  # closes its input
    assert agent.returncode == 0
    assert secure_hub.spool().byes == [{"exit_code": None, "status": "orphaned"}]
    assert b"agent_end" in secure_hub.spool().files["events.jsonl"]
    assert not node.run_dir.exists()
