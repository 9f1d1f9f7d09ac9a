"""A job that nobody looks at: its hub judges it all the same, stays small, and is continued when it is killed."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from real_prometheus import program, prometheus
from waiting import until

from stepscope.hub.live.figures import read_judged
from stepscope.store.documents import read_finding_history

PAUSED = """
import os, time
import stepscope

while not os.path.exists("pause"):
    with stepscope.step(), stepscope.phase("work"):
        time.sleep(0.02)
while not os.path.exists("over"):
    time.sleep(0.02)
"""
SERVER = ("httptools", "uvloop", "cryptography", "duckdb")
"""Libraries that only a hub with clients needs."""


@pytest.fixture
def receiver() -> Iterator[str]:
    """The address of a receiver of alerts: with one, the hub starts with the job."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook"
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_is_judged_and_prometheus_sees_that_it_is_stuck(
    commands: Any, nodes: Any, script: Callable[..., Path], tmp_path: Path, receiver: str, root: Path
) -> None:
    program("prometheus")
    script(PAUSED)
    run_dir = tmp_path / "runs" / "one"
    job = commands.start("run", "--quiet", "--alert", receiver, "--name", "one", "script.py")
    (first,) = until(lambda: nodes.pids("stepscope.hub", "one"))
    until(lambda: read_finding_history(run_dir))
    assert [name for name in SERVER if name in Path(f"/proc/{first}/maps").read_text()] == []

    os.kill(first, signal.SIGKILL)
    (second,) = until(lambda: [pid for pid in nodes.pids("stepscope.hub", "one") if pid != first])
    before = read_judged(run_dir)
    assert before is not None
    until(lambda: (now := read_judged(run_dir)) is not None and now.wall_ns > before.wall_ns and now.findings)
    (tmp_path / "pause").touch()

    (tmp_path / "token").write_text("token-of-this-test-only")
    (tmp_path / "token").chmod(0o600)
    serving = commands.start("serve", "runs", "--port", "0", "--token-file", "token")
    url = re.search(r"http://127\.0\.0\.1:\d+", serving.stdout.readline())
    assert url is not None
    scrape = {
        "job_name": "stepscope",
        "authorization": {"credentials_file": str(tmp_path / "token")},
        "static_configs": [{"targets": [url[0].rpartition("//")[2]]}],
    }
    rules = yaml.safe_load((root / "deploy/grafana/rules.yml").read_text())
    (rule,) = (rule for rule in rules["groups"][0]["rules"] if rule["alert"] == "StepscopeNoProgress")
    soon = {**rule, "expr": rule["expr"].replace("900", "2"), "for": "0s"}
    quick = {"groups": [{"name": "stepscope", "interval": "1s", "rules": [soon]}]}
    with prometheus(tmp_path / "prometheus", {"scrape_configs": [scrape]}, rules=quick) as server:
        until(lambda: "StepscopeNoProgress" in server.firing())
        (alert,) = server.get("alerts")["alerts"]
    assert alert["labels"]["run"] == "one"
    serving.send_signal(signal.SIGINT)
    assert commands.finish(serving).code == 0
    assert nodes.pids("stepscope.hub", "one") == [second]
    assert [name for name in SERVER if name in Path(f"/proc/{second}/maps").read_text()] == []

    (tmp_path / "over").touch()
    done = commands.finish(job)
    assert (done.code, done.stderr) == (0, "stepscope: the hub died (signal 9); restarting it\n")
    work = [own for own in read_finding_history(run_dir) if own.finding["kind"] == "between_steps"]
    assert {own.number for own in work} == {1}, "the second hub continued what the first had seen"
    assert [own.change for own in work if own.change != "changed"] == ["opened", "resolved"]
    assert work[-1].why == "the run ended"
    assert not (run_dir / "judged.json").exists()
