"""``stepscope report --redact`` of a real run: nothing in it says where, by whom and on what it was made."""

from __future__ import annotations

import base64
import gzip
import json
import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli.main import run_command
from stepscope.page import assets

JOB = """
import os, sys, time
import stepscope

for _ in range(20):
    with stepscope.step(), stepscope.phase("work"):
        time.sleep(0.001)
print("printed by", sys.argv)
address, remote = "10.9.8.7:29500", "https://code.example.org/group/project.git"
raise RuntimeError(f"{os.getcwd()}/in/fold.bin: {address} {remote} {sys.argv[2]} {os.environ['NCCL_TEST_NOTE']}")
"""
SECRETS = {
    "user": "turing-a",
    "folder": "Project-Zephyr",
    "value": "Cohort-77x",
    "environment": "Fabric-B9",
    "address": "10.9.8.7",
    "remote": "code.example.org",
}


@pytest.fixture
def _page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    static = tmp_path / "static"
    (static / "assets").mkdir(parents=True)
    (static / "index.html").write_text('<script src="./assets/a.js"></script>')
    (static / "assets" / "a.js").write_text("const a = 1;")
    monkeypatch.setattr(assets, "STATIC", static)
    assets.find_asset.cache_clear()
    yield
    assets.find_asset.cache_clear()


def inside(page: Path) -> str:
    found = re.search(rb'id="stepscope-data">([^<]*)</script>', page.read_bytes())
    assert found is not None
    return gzip.decompress(base64.b64decode(found[1])).decode(errors="replace")


def found_in(text: str) -> list[str]:
    """Which secrets; the host's name, which may be short, as a word of its own."""
    host = re.compile(rf"(?<![A-Za-z0-9]){re.escape(platform.node())}(?![A-Za-z0-9])")
    return [name for name, secret in SECRETS.items() if secret in text] + ["host"] * bool(host.search(text))


@pytest.mark.usefixtures("_page")
def test_nothing_of_whom_where_and_with_what(
    run_stepscope: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / SECRETS["folder"]
    folder.mkdir()
    (folder / "job.py").write_text(JOB)
    env = {"USER": SECRETS["user"], "NCCL_TEST_NOTE": SECRETS["environment"]}
    words = ("run", "--quiet", "--name", "sent", folder / "job.py", "--cohort", SECRETS["value"])
    run_dir = run_stepscope(*words, env=env, cwd=folder).run_dir
    whole, redacted = tmp_path / "whole.html", tmp_path / "redacted.html"

    assert run_command(["report", str(run_dir), "--html", str(whole), "--json"]) == 0
    assert found_in(inside(whole)) == [*SECRETS, "host"]
    assert set(found_in(capsys.readouterr().out)) == {*SECRETS, "host"}

    before = (run_dir / "summary.json").read_bytes()
    assert run_command(["report", str(run_dir), "--html", str(redacted), "--redact", "--json"]) == 0
    printed = capsys.readouterr()
    assert (found_in(inside(redacted)), found_in(printed.out)) == ([], [])
    assert "read it before you send it" in printed.err
    assert (run_dir / "summary.json").read_bytes() == before
    summary = json.loads(printed.out)
    said = "…/fold.bin: address-1:29500 [address] [redacted] [redacted]"
    assert summary["errors"][0]["message"] == said
    assert 'File "…/job.py", line 10, in <module>' in summary["errors"][0]["traceback"]
    assert (summary["run"]["host"], summary["run"]["user"], summary["run"]["cwd"]) == ("host-1", "user-1", None)
    assert summary["run"]["command"][1:] == ["…/job.py", "--cohort", "[redacted]"]
    assert "printed by" not in inside(redacted)

    assert run_command(["report", str(run_dir), "--html", "--redact"]) == 0
    assert found_in(capsys.readouterr().out) == []
    assert found_in(inside(run_dir / "report-redacted.html")) == []
    assert not (run_dir / "report.html").exists()
