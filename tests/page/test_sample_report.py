"""The sample report in docs/: it opens from a file without a network, names the slow rank, and knows no machine."""

from __future__ import annotations

import base64
import getpass
import gzip
import re
import socket
from pathlib import Path
from typing import Any

from tests.page.browsing import expect

DATA = re.compile(rb'id="stepscope-data">([^<]*)<')
MOST_BYTES = 1_000_000
ABSOLUTE = re.compile(r'[" (]/(?!dev/shm)[a-z]+/')
"""A path from the root of a file system."""
READABLE = re.compile(rb"[ -~]{16,}")
"""Documents. Between them lie columns of numbers, whose bytes spell a short host name now and then."""


def test_the_sample_report_opens_offline_and_names_the_slow_rank(root: Path, browser_page: Any) -> None:
    report = root / "docs" / "sample-report.html"
    page = browser_page(offline=True)
    page.goto(report.as_uri())
    page.wait_for_selector("main[aria-busy=false]")
    verdict = page.get_by_role("region", name="Verdict").get_by_role("heading").first
    expect(verdict).to_contain_text("Rank 2 is")
    expect(verdict).to_contain_text("all other ranks wait for it")


def test_the_sample_report_is_small_and_knows_no_machine(root: Path) -> None:
    data = (root / "docs" / "sample-report.html").read_bytes()
    assert len(data) <= MOST_BYTES
    match = DATA.search(data)
    assert match is not None
    text = "\n".join(run.decode() for run in READABLE.findall(gzip.decompress(base64.b64decode(match[1]))))
    assert "four_ranks.py" in text
    assert ABSOLUTE.findall(text) == []
    assert re.findall(rf"\b{re.escape(socket.gethostname())}\b", text) == []
    assert [name for name in (f"{getpass.getuser()}@", "token=") if name in text] == []
