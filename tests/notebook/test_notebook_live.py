"""``stepscope.live()``: a process that trains gets a server, which shows it, may be framed, and ends with it."""

from __future__ import annotations

import html
import json
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

SCRIPT = """
import os, sys, threading, time, types
import stepscope

class Display:
    def __init__(self):
        self.display = self
    def __call__(self, data, raw):
        os.write(1, data["text/html"].encode() + b"\\n")  # past sys.stdout, as a kernel does

shell = types.SimpleNamespace(kernel=object())
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell, display=Display())
stepscope.live(name="cells", height=321)
stepscope.live()                # the same server again
os.environ["VSCODE_CWD"] = "/"
stepscope.live()                # and no frame, which would be empty there
print("threads", threading.active_count(), flush=True)
while not os.path.exists("over"):
    with stepscope.step():
        time.sleep(0.02)
"""
PATIENCE_S = 60.0


def ask(address: str, token: str) -> tuple[dict[str, Any], dict[str, str]]:
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read()), dict(response.headers)


def test_a_cell_shows_the_run_while_the_kernel_lives(commands: Any, tmp_path: Path) -> None:
    (tmp_path / "cell.py").write_text(SCRIPT)
    process = commands.start_python(tmp_path / "cell.py")
    lines = [process.stdout.readline() for _ in range(4)]
    found = re.search(r'src="(http://127\.0\.0\.1:\d+)/#/run/cells\?token=([\w-]+)" .* height="321"', lines[0])
    assert found is not None, lines
    assert found[0].partition(" ")[0] in lines[1]
    assert f'<a href="{found[1]}/#/run/cells?token={found[2]}" target="_blank"' in lines[0]  # for who sees no frame
    assert lines[3] == "threads 1\n"
    url, token = found.groups()
    port, run_dir = url.rpartition(":")[2], tmp_path / "runs" / "cells"
    assert html.unescape(lines[2]) == (
        f'<p><a href="{url}/#/run/cells?token={token}" target="_blank" rel="noopener noreferrer">Stepscope: cells, live'
        "</a>. <small>VS Code cannot show a live page in a cell; open the link. If the kernel is not on the machine of "
        f"your browser, forward port {port} first (in the PORTS view). In a terminal: `stepscope watch {run_dir}`. "
        f"After the kernel has ended: stepscope.show('{run_dir}').</small></p>\n"
    )
    deadline = time.monotonic() + PATIENCE_S
    while (about := ask(f"{url}/api/v1/runs/cells", token)[0])["newest_step"] < 5:
        assert time.monotonic() < deadline, about
        time.sleep(0.05)
    _, headers = ask(f"{url}/api/v1/runs/cells", token)
    policy = headers["content-security-policy"]
    assert policy.endswith(
        "frame-ancestors 'self' http://localhost:* http://127.0.0.1:* https://localhost:* https://127.0.0.1:*"
    )
    assert "x-frame-options" not in headers
    assert json.loads((tmp_path / "runs" / "cells" / "hub.json").read_text())["url"] == url
    assert token not in "".join(path.read_text() for path in (tmp_path / "runs" / "cells" / "logs").glob("*"))
    (tmp_path / "over").touch()
    assert commands.finish(process).code == 0
    while commands.survivors():
        assert time.monotonic() < deadline, commands.survivors()
        time.sleep(0.05)
    assert (tmp_path / "runs" / "cells" / "summary.json").is_file()
    assert not (tmp_path / "runs" / "cells" / "hub.json").exists()
