"""Several nodes, one run: what two launchers make of one job, and of whatever dies under way."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli.main import run_command
from stepscope.errors import UsageError

Steps = list[tuple[int, int]]


def steps_of(summary: dict[str, Any]) -> Steps:
    return [(row["rank"], row["steps"]) for row in summary["ranks"]]


@pytest.mark.soak  # near: the test below, with ranks that need no torch, and tests/nodes
@pytest.mark.ranks
def test_a_script_on_two_nodes(commands: Any, nodes: Any, port: Callable[[], int], job: Path, tmp_path: Path) -> None:
    """The same line on both, but for the number: torchrun is started on each, and gloo brings them together."""
    master = str(port())
    for node in (1, 0):
        line = ("--nnodes", "2", "--node_rank", str(node), "--master_addr", "127.0.0.1", "--name", "two")
        ports = ("--master_port", master, "--hub-port", str(nodes.port), "--dir", str(node))
        key = {"STEPSCOPE_KEY": "a key of the tests alone"}
        nodes.processes[node] = commands.start("run", *line, *ports, job, "--steps", "12", env=key)
    done = [nodes.finish(0), nodes.finish(1)]
    assert [one.code for one in done] == [0, 0], [one.stderr for one in done]
    assert done[0].stdout.count("rank 0 step") == done[1].stdout.count("rank 1 step") == 12
    summary = nodes.summary()
    assert (steps_of(summary), summary["world_size"]) == ([(0, 12), (1, 12)], 2)
    assert (summary["status"], summary["exit_code"]) == ("finished", 0)
    meta = json.loads((tmp_path / "0" / "two" / "run.json").read_text())
    assert (meta["nnodes"], meta["sealed"], meta.get("hub")) == (2, True, None)
    # Node 1 has nothing left, and does not take its part for the whole.
    assert list((tmp_path / "1").iterdir()) == []
    assert f"stepscope: recording to 1/two.node1 (hub: https://127.0.0.1:{nodes.port})\n" in done[1].stderr
    assert f"stepscope: all data of node 1 was sent to 127.0.0.1:{nodes.port};" in done[1].stderr
    assert "step time" not in done[1].stderr
    page = f"stepscope: page: https://127.0.0.1:{nodes.port}/#/run/two (its token: 0/two/hub.json)\n"
    assert [page in one.stderr for one in done] == [True, False]
    assert ["trust the run's self-signed certificate" in one.stderr for one in done] == [True, False]
    assert not (tmp_path / "0" / "two" / "hub.json").exists()


@pytest.mark.faults
@pytest.mark.soak
def test_the_hub_is_killed_and_then_the_agent_of_the_other_node(nodes: Any, tmp_path: Path) -> None:
    for node in (0, 1):
        nodes.start(node)
    nodes.until(lambda: nodes.heard_of(1))
    (hub,) = nodes.pids("stepscope.hub", "two")
    os.kill(hub, signal.SIGKILL)
    nodes.until(lambda: nodes.pids("stepscope.hub", "two") not in ([], [hub]))
    (agent,) = nodes.pids("stepscope.agent", "two.node1")
    os.kill(agent, signal.SIGKILL)
    nodes.until(lambda: nodes.pids("stepscope.agent", "two.node1") not in ([], [agent]))
    nodes.over()
    done = [nodes.finish(0), nodes.finish(1)]
    assert [one.code for one in done] == [0, 0], [one.stderr for one in done]
    assert done[0].stderr.count("stepscope: the hub died (signal 9); restarting it\n") == 1
    assert steps_of(nodes.summary()) == [(node, nodes.printed(node, done[node])) for node in (0, 1)]
    assert [row["lost"] for row in nodes.summary()["ranks"]] == [0, 0]
    assert list((tmp_path / "1").iterdir()) == []


@pytest.mark.faults
def test_ctrl_c_on_one_node_is_told_by_the_other(nodes: Any, tmp_path: Path) -> None:
    nodes.start(0)
    nodes.start(1)
    nodes.wait_for(1, "step 20\n")
    nodes.until(lambda: nodes.heard_of(1))
    os.kill(nodes.processes[1].pid, signal.SIGINT)
    one = nodes.finish(1)
    assert one.code == 130, one.stderr
    assert "all data of node 1 was sent" in one.stderr
    assert list((tmp_path / "1").iterdir()) == []
    nodes.over()
    zero = nodes.finish(0)
    assert zero.code == 0, zero.stderr
    first, second = steps_of(nodes.summary())
    assert first == (0, nodes.printed(0, zero))
    assert second[0] == 1
    assert second[1] - nodes.printed(1, one) in (0, 1)  # one may be complete and not yet printed
    (bye,) = [node["bye"] for node in json.loads((tmp_path / "0/two/nodes.json").read_text())["nodes"] if node["node"]]
    assert bye == {"exit_code": 130, "status": "interrupted"}


@pytest.mark.faults
@pytest.mark.soak
def test_without_a_hub_nothing_is_lost(nodes: Any, tmp_path: Path) -> None:
    """Somebody else has its port: node 0 is recorded by itself, node 1 keeps its part and says how to send it."""
    with socket.create_server(("127.0.0.1", nodes.port)):
        nodes.over()
        nodes.start(0, options=("--hub-host", "127.0.0.1"))
        nodes.start(1)
        zero = nodes.finish(0)
        assert zero.code == 0
        why = f"the hub cannot listen on port {nodes.port} of 127.0.0.1: Address already in use"
        other = "choose another --hub-port, the same on every node"
        assert f"stepscope: {why}; {other}; this node is recorded separately\n" in zero.stderr
        assert steps_of(nodes.summary()) == [(0, 1)]
        stderr = nodes.processes[1].stderr
        assert stderr is not None
        assert "recording to" in stderr.readline()
        assert "sending the rest to 127.0.0.1" in stderr.readline()
        os.kill(nodes.processes[1].pid, signal.SIGINT)
        first = nodes.finish(1)
    assert first.code == 0
    spool = tmp_path / "1" / "two.node1"
    assert first.stderr.splitlines()[-1] == "stepscope:     stepscope send 1/two.node1"
    meta = json.loads((spool / "run.json").read_text())
    assert meta["hub"] == {"url": f"https://127.0.0.1:{nodes.port}", "run": "two", "node": 1, "nnodes": 2}
    assert (meta["end"]["exit_code"], meta["sealed"]) == (0, False)
    assert "a key of the tests alone" not in (spool / "run.json").read_text()
    assert list((spool / "steps").glob("*.seg")) != []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", "2", "--node-rank", "0"], "a job on 2 nodes needs a --name, the same on every node,"),
        (["--nnodes", "2", "--name", "x"], "a job on 2 nodes needs --node-rank on every node"),
        (["--nnodes", "2", "--node-rank", "1", "--name", "x"], "node 1 needs the address of node 0;"),
        (["--nnodes", "2", "--node-rank", "2", "--name", "x"], "--node-rank 2 of 2 nodes: must be from 0 to 1"),
        (["--tls-cert", "a.pem"], "--tls-cert and --tls-key must be used together"),
        (["--tls-cert", "a", "--tls-key", "b", "--no-tls"], "--no-tls and --tls-cert cannot be used together"),
        (["--hub-port", "70000"], "--hub-port: must be a port from 1 to 65535, not '70000'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_that_leave_a_question_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        run_command(["run", *words, "train.py"])
    assert str(caught.value).startswith(message)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
