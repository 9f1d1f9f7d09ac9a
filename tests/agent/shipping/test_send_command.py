"""``stepscope send``: what a node kept reaches a hub, and only then is gone."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rings import RingStream

from stepscope.cli.main import run_command
from stepscope.errors import HubError, NotARun, RunError, UsageError
from stepscope.records.identity import RankIdentity
from stepscope.store.documents import end_run, read_meta, write_meta

KEY_TEXT = "a key of sixteen characters or more"
END = {"exit_code": 1, "status": "failed", "wall_ns": 7}


@pytest.fixture
def hub(new_hub: Any, certificates: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("STEPSCOPE_KEY", KEY_TEXT)
    return new_hub(tls=certificates(), key=hashlib.sha256(KEY_TEXT.encode()).digest())


@pytest.fixture
def ended_spool(spool: Any, hub: Any) -> Any:
    """A spool whose node is over."""
    spool.ring(0, ended_wall_ns=1)
    spool.steps(0, 100)
    spool.write("logs/rank-0.log", b"hello")
    document = {"url": hub.url, "run": "job", "node": 1, "nnodes": 2}
    write_meta(spool.run_dir, {**read_meta(spool.run_dir), "hub": document, "launcher": None})
    end_run(spool.run_dir, exit_code=1, status="failed", wall_ns=7)
    return spool


def test_it_sends_and_removes(ended_spool: Any, hub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    hub.start()
    assert run_command(["send", str(ended_spool.run_dir)]) == 0
    spool = hub.spool()
    assert (len(spool.slots[ended_spool.key(0)]) // 256, spool.files["logs/rank-0.log"], spool.byes) == (
        100,
        b"hello",
        [END],
    )
    assert (hub.joins[0].run, hub.joins[0].node, hub.joins[0].nnodes) == ("job", 1, 2)
    assert not ended_spool.run_dir.exists()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("stepscope: sent ")
    assert err.endswith(f" in 1 frame to {hub.url}; {ended_spool.run_dir} was removed\n")


def test_it_goes_on_where_the_agent_stopped(ended_spool: Any, hub: Any) -> None:
    hub.start()
    hub.faults.extend([None, "drop ack", 401, 409, 507])
    ended_spool.write("logs/main.log", bytes(3 << 20))
    assert run_command(["send", str(ended_spool.run_dir)]) == 0
    assert hub.spool().files["logs/main.log"] == bytes(3 << 20)
    assert hub.spool().byes == [END]


@pytest.mark.faults
def test_it_stays_when_the_hub_is_not_there(ended_spool: Any, hub: Any) -> None:
    with pytest.raises(HubError, match="cannot be reached: Connection refused") as caught:
        run_command(["send", str(ended_spool.run_dir)])
    assert caught.value.exit_code == 3
    assert ended_spool.run_dir.exists()


@pytest.mark.faults
def test_it_gives_up_when_nothing_is_taken(ended_spool: Any, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.cli.hub.send.GIVE_UP_S", 0.2)
    hub.start()
    hub.faults.extend([507] * 1000)
    with pytest.raises(HubError, match="its disk is full"):
        run_command(["send", str(ended_spool.run_dir)])
    assert ended_spool.run_dir.exists()


def test_what_no_frame_takes_stays(ended_spool: Any, hub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ended_spool.write("logs/what is this", b"x")
    hub.start()
    assert run_command(["send", str(ended_spool.run_dir)]) == 3
    assert f"; cannot send logs/what is this, so {ended_spool.run_dir} is kept\n" in capsys.readouterr().err
    assert ended_spool.run_dir.exists()


def test_another_hub(ended_spool: Any, hub: Any, new_hub: Any) -> None:
    other = new_hub(key=hub.key).start()
    assert run_command(["send", str(ended_spool.run_dir), "--to", other.url]) == 0
    assert other.spool().byes == [END]
    assert not ended_spool.run_dir.exists()


def test_a_run_that_nobody_meant_to_send_stays(ended_spool: Any, hub: Any) -> None:
    hub.start()
    meta = read_meta(ended_spool.run_dir)
    del meta["hub"]
    write_meta(ended_spool.run_dir, meta)
    with pytest.raises(UsageError, match="specify one with --to URL"):
        run_command(["send", str(ended_spool.run_dir)])
    assert run_command(["send", str(ended_spool.run_dir), "--to", hub.url]) == 0
    assert hub.spool().byes == [END]
    assert ended_spool.run_dir.exists()


def test_what_must_not_be_sent(ended_spool: Any, hub: Any, new_hub: Any, tmp_path: Path) -> None:
    words = ["send", str(ended_spool.run_dir)]
    with pytest.raises(NotARun):
        run_command(["send", str(tmp_path / "nothing")])
    with pytest.raises(UsageError, match="is not the URL of a hub"):
        run_command([*words, "--to", "nonsense"])
    local = new_hub(key=hub.key, local=True).start()
    with pytest.raises(UsageError, match="this is the run itself"):
        run_command([*words, "--to", local.url])
    (ended_spool.run_dir / "inbox").mkdir()
    with pytest.raises(UsageError, match="is the run of all nodes"):
        run_command(words)
    (ended_spool.run_dir / "inbox").rmdir()
    meta = read_meta(ended_spool.run_dir)
    write_meta(ended_spool.run_dir, {**meta, "sealed": True})
    with pytest.raises(RunError, match="sealed here and can no longer be sent"):
        run_command(words)
    assert local.spool().byes == []
    assert ended_spool.run_dir.exists()


def test_a_run_that_goes_on_is_its_agent_s(ended_spool: Any, hub: Any) -> None:
    meta = read_meta(ended_spool.run_dir)
    stream = RingStream(Path(meta["session"]) / "1.ring", RankIdentity(host="b", pid=os.getpid(), rank=0))
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        launcher = {"pid": sleeper.pid, "start_ticks": _ticks(sleeper.pid)}
        write_meta(ended_spool.run_dir, {**meta, "end": None, "launcher": launcher})
        with pytest.raises(UsageError, match="its agent is sending it"):
            run_command(["send", str(ended_spool.run_dir)])
    finally:
        sleeper.communicate(b"\n")
        stream.close()


def test_what_an_agent_left_in_memory_is_sent_too(ended_spool: Any, hub: Any) -> None:
    session = Path(read_meta(ended_spool.run_dir)["session"])
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom stepscope.records.identity import RankIdentity\n"
        "from rings import RingStream, write_steps\n"
        "who = RankIdentity(host='b', pid=os.getpid(), rank=5)\n"
        "write_steps(RingStream(Path(sys.argv[1]) / f'{os.getpid()}.ring', who), 30)\nos._exit(0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, str(session)], env=environment, check=True)
    hub.start()
    assert run_command(["send", str(ended_spool.run_dir)]) == 0
    spool = hub.spool()
    (key,) = [key for key, about in spool.sidecars.items() if about["identity"]["rank"] == 5]
    assert len(spool.slots[key]) // 256 == 30
    assert spool.sidecars[key]["state"] == "vanished"
    assert spool.sidecars[key]["ended_wall_ns"]
    assert not session.exists()


def _ticks(pid: int) -> int | None:
    from stepscope.records.run_clock import process_start_ticks

    return process_start_ticks(pid)
