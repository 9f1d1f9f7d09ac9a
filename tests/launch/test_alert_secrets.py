"""Secrets of alerts in a real run: used, but in no file of the run, no command line, no output, and not in the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
from loopback_receiver import LoopbackReceiver
from waiting import until

TOKEN = "tok3nOfTheAddress0123456789"
KEY = "routingK3yOfTheService012345"
SECRETS = (TOKEN.encode(), KEY.encode())
JOB = """\
import os, sys, time
import stepscope

for _ in range(3):
    with stepscope.step():
        time.sleep(0.01)
print("alerts in the environment:", [name for name in os.environ if name.startswith("STEPSCOPE_ALERT")], flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
sys.exit(3)
"""
SETTINGS = """\
[alerts.receivers.oncall]
type = "pagerduty"
routing_key = { env = "PD_KEY" }
api = "%s"
"""


def command_lines(processes: list[psutil.Process]) -> list[bytes]:
    found = []
    for process in processes:
        try:
            found.append(Path(f"/proc/{process.pid}/cmdline").read_bytes())
        except OSError:
            continue
    return found


def test_secrets_stay_where_they_are(commands: Any, receiver: LoopbackReceiver, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(JOB)
    (tmp_path / "stepscope.toml").write_text(SETTINGS % receiver.url)
    private = {"PD_KEY": KEY, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / ".config")}
    address = f"{receiver.url}/{TOKEN}"
    words = ["--name", "night", "--alert", address, "--alert=run_failed", "train.py"]
    process = commands.start("run", *words, env=private)
    sender = "stepscope.alerts.sender"
    until(lambda: bool(commands.running(sender)) and (tmp_path / "runs" / "night" / "hub.json").exists())
    lines = command_lines(commands.survivors())
    assert any(sender.encode() in line for line in lines)
    assert any(b"stepscope\0run\0--name\0night\0train.py" in line for line in lines)
    assert [line for line in lines if any(secret in line for secret in SECRETS)] == []
    (tmp_path / "go").touch()
    done = commands.finish(process)
    assert done.code == 3
    assert "alerts in the environment: []" in done.stdout
    until(lambda: len(receiver.accepted) >= 2)
    paths = {request.path: request.json for request in receiver.accepted}
    assert paths[f"/{TOKEN}"]["kind"] in ("run_failed", "rank_crashed")
    assert paths["/v2/enqueue"]["routing_key"] == KEY
    for secret in SECRETS:
        assert secret.decode() not in done.stdout + done.stderr
    files = [path for path in done.run_dir.rglob("*") if path.is_file()]
    assert {"outbox.jsonl", "sent.jsonl", "run.json"} <= {path.name for path in files}
    assert [path for path in files if any(secret in path.read_bytes() for secret in SECRETS)] == []
    assert (done.run_dir / "alerts").stat().st_mode & 0o077 == 0
