"""A copy of a run: the answers of its hub, small enough for a mail, in a file that nothing of a run breaks out of."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.cluster import Cluster, slow_at
from fakes.records import timed_at
from fakes.samples import with_samples
from gpt_layers import write_layer_samples
from hypothesis import given
from hypothesis import strategies as st
from made_runs import Feed, record
from page_files import data_in

from stepscope.cli.main import run_command
from stepscope.errors import NotARun, RunError, RunUnwritable
from stepscope.hub import report_copy
from stepscope.hub.app import make_copy, write_copy
from stepscope.hub.report_copy import FIRST, STEP, Blobs, plans, rounded
from stepscope.page import assets
from stepscope.store.load import open_run

HOSTILE = "</script><script>alert(1)</script>\"'<!--"
SLOW = Cluster(ranks=6, steps=300, hosts=2, faults=(slow_at(3, "forward", 30.0),), allocated_mb=100.0)
pytestmark = pytest.mark.usefixtures("small_page")


def times_of(packed: dict[str, Any], blobs: bytes) -> np.ndarray[Any, Any]:
    at, length = packed["times"]
    low, high = np.frombuffer(blobs, np.uint8, length, at).reshape(2, -1).astype(int)
    codes = low + 256 * high
    times = packed["least"] * np.exp((codes - FIRST) * packed["step"])
    return np.where(codes == 0, np.nan, np.where(codes == 1, 0, times))


@given(st.lists(st.one_of(st.floats(1e-3, 1e15), st.just(0.0), st.just(float("nan"))), max_size=50))
def test_times_are_kept_to_an_eighth_of_a_percent(values: list[float]) -> None:
    blobs = Blobs()
    times = times_of(blobs.times(values), blobs.join())
    assert np.allclose(times, values, rtol=math.expm1(STEP / 2) + 1e-9, equal_nan=True)
    assert [value == 0 for value in times] == [value == 0 for value in values]


def test_figures_are_rounded_and_stay_what_they_are() -> None:
    assert rounded([123456, 0, None, 12.34567, -98766, 7]) == [123500, 0, None, 12.35, -98770, 7]
    assert rounded([]) == []


def test_layers_of_some_ranks_are_included(tmp_path: Path) -> None:
    run_dir = record(tmp_path / "runs", "night", Cluster(ranks=12, steps=20).run())
    write_layer_samples(run_dir, ranks=12, samples=3)
    copy, _ = data_in(make_copy(run_dir, wall_ns=7))
    answers = copy["answers"]
    included = {name for name in answers if name.startswith("layers/")}
    assert included == {f"layers/{rank}" for rank in (0, 1, 2, 4, 5, 6, 7)}
    shown = [answers["layers"], *(answers[name] for name in sorted(included))]
    assert [row["rank"] for row in shown] == [3, 0, 1, 2, 4, 5, 6, 7]
    assert all((row["ranks"], row["steps"]) == ([0, 1, 2, 3, 4, 5, 6, 7], [200]) for row in shown)
    assert all(len(row["modules"]) == 125 for row in shown)
    assert "8 of 12 ranks have their layers included." in copy["left_out"]
    assert "Of 3 samples of the layers, the last one is included." in copy["left_out"]


def test_the_answers_are_the_hubs(tmp_path: Path) -> None:
    run_dir = record(tmp_path / "runs", "night", with_samples(SLOW, every_s=0.5))
    copy, blobs = data_in(make_copy(run_dir, wall_ns=7))
    answers = copy["answers"]
    assert (copy["run"], copy["made_wall_ns"], copy["over"]) == ("night", 7, True)
    assert answers["findings"]["verdict"]["title"].startswith("Rank 3 is 29.5 ms slower")
    assert answers["steps"]["first"] == list(range(300))
    assert sorted(answers["ranks"]["rank"]) == list(range(6))
    assert {f"ranks/{rank}" for rank in range(6)} < answers.keys()
    assert copy["left_out"] == []
    assert answers["steps"]["device_mean_ns"] == {}
    series = SLOW.series()
    walls = np.array([rank_series.steps["wall_ns"] for rank_series in series])
    slowest = times_of(answers["steps"]["ns"]["wall"], blobs).reshape(300, -1)[:, -1]
    assert np.allclose(slowest, walls.max(axis=0), rtol=0.002)
    work = copy["maps"]["work"][0]
    assert (work["exact"], work["rows"], len(work["first_steps"])) == (True, 6, 300)
    assert np.allclose(times_of(copy["maps"]["wall"][0]["cells"], blobs).reshape(6, 300), walls, rtol=0.002)
    piece = copy["files"]["logs/rank-0.log"]["pieces"][0]
    assert blobs[piece[1] : piece[1] + piece[2]].startswith(b"line 0\nline 1\n")
    assert "run.json" not in copy["files"]
    assert str(tmp_path) not in json.dumps(answers["files"])


def test_device_times_are_in_it_where_there_are_any(tmp_path: Path) -> None:
    run = Cluster(ranks=2, steps=40, device_timed=True).run()
    timed = [timed_at(rank, slice(None, None, 4)) for rank in run.ranks]
    run_dir = record(tmp_path / "runs", "gpu", replace(run, ranks=tuple(timed)))
    copy, blobs = data_in(make_copy(run_dir))
    forward = times_of(copy["answers"]["steps"]["device_mean_ns"]["forward"], blobs)
    expected = np.mean([one.steps.device("forward") for one in timed], axis=0)
    assert np.allclose(forward, expected, rtol=0.002, equal_nan=True)


def test_of_a_long_run_less_is_kept_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_copy, "plans", lambda: plans()[4:])
    run_dir = record(tmp_path / "runs", "long", with_samples(Cluster(ranks=40, steps=600), every_s=1.0))
    (run_dir / "logs" / "rank-0.log").write_text("".join(f"line {i}\n" for i in range(20_000)))
    (run_dir / "flight").mkdir()
    for rank in (0, 1):
        (run_dir / "flight" / f"rank_{rank}.json").write_text("{}")
    copy, blobs = data_in(make_copy(run_dir))
    text = " ".join(copy["left_out"])
    assert "Not included: 2 Flight Recorder dumps." in text
    assert "4 of 40 ranks have their own curves." in text
    assert re.search(r"Steps are grouped into \d+ bins of up to \d+ steps\.", text)
    steps = copy["answers"]["steps"]
    assert sum(steps["steps"]) == 600
    assert [first - 1 for first in steps["first"][1:]] == steps["last"][:-1]
    assert len(times_of(steps["mean_ns"]["wall"], blobs)) == len(steps["first"]) <= 256
    first, last = copy["files"]["logs/rank-0.log"]["pieces"]
    size = copy["files"]["logs/rank-0.log"]["size"]
    assert first[0] == 0
    assert last[0] + last[2] == size
    assert blobs[last[1] : last[1] + last[2]].endswith(b"line 19999\n")


def test_the_first_plan_that_fits_is_taken(tmp_path: Path) -> None:
    run_dir = record(tmp_path / "runs", "night", SLOW.run())
    calls: list[tuple[int, int]] = []
    whole = len(make_copy(run_dir, progress=lambda done, total: calls.append((done, total))))
    assert calls == [(done, 12) for done in range(6, 13)]  # the first half is to open it
    smaller = len(make_copy(run_dir, most_bytes=whole - 1))
    assert smaller < whole
    assert len(make_copy(run_dir, most_bytes=1)) <= smaller


def test_a_run_that_goes_on_and_one_that_was_killed(tmp_path: Path) -> None:
    feed = Feed(tmp_path / "runs", "live", SLOW)
    feed.make(150)
    copy, _ = data_in(make_copy(tmp_path / "runs" / "live"))
    assert copy["over"] is False
    assert copy["answers"]["findings"]["verdict"]["title"].startswith("Rank 3 is")
    feed.end()
    killed = record(tmp_path / "runs", "killed", SLOW.run(), sealed=False)
    assert data_in(make_copy(killed))[0]["answers"]["steps"]["last"][-1] == 299


def test_the_command_opens_the_run_once_and_makes_the_same_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = record(tmp_path / "runs", "night", replace(SLOW, ranks=4, steps=40).run())
    expected = data_in(make_copy(run_dir))[0]
    opened: list[Path] = []

    def counted(path: Path, **more: Any) -> Any:
        opened.append(path)
        return open_run(path, **more)

    monkeypatch.setattr("stepscope.cli.finalize.open_run", counted)
    monkeypatch.setattr("stepscope.hub.runs.open_run", counted)
    for page, words in ((run_dir / "report.html", ()), (tmp_path / "a.html", (str(tmp_path / "a.html"),))):
        opened.clear()
        assert run_command(["report", str(run_dir), "--quiet", "--html", *words]) == 0
        assert opened == [run_dir]
        found = data_in(page.read_bytes())[0]
        same = ("findings", "summary", "steps", "ranks", "collectives", "events")
        assert [found["answers"][name] for name in same] == [expected["answers"][name] for name in same]
        assert found["maps"] == expected["maps"]


def test_nothing_of_a_run_breaks_out_of_the_file(tmp_path: Path) -> None:
    named = replace(SLOW, steps=30, facts={"model": HOSTILE})
    event = {"schema": 1, "wall_ns": 1, "event": HOSTILE, "message": HOSTILE, "host": HOSTILE}
    run_dir = record(tmp_path / "runs", "x", named.run(), events=[event])
    meta = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**meta, "name": HOSTILE}))
    made = make_copy(run_dir).decode()
    assert f"<title>{html.escape(HOSTILE)} · Stepscope</title>" in made
    assert made.count("<script") == made.count("</script>") == 2
    assert made.count("<!--") == 0
    assert made.count("<style>") == made.count("</style>") == 1
    script = made.rpartition('<script type="module">')[2].partition("</script>")[0]
    checksum = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', made)
    assert policy is not None
    assert f"script-src 'sha256-{checksum}';" in policy[1]
    assert "unsafe" not in policy[1]
    assert policy[1].startswith("default-src 'none'; ")
    assert "connect-src 'none'" in policy[1]
    assert script == 'const a = "\\x3c/SCRIPT>", b = "\\x3c!--\\x3cscript>", c = 1 < 2;'


def test_what_cannot_be_made_is_said(tmp_path: Path, small_page: Path) -> None:
    run_dir = record(tmp_path / "runs", "night", replace(SLOW, steps=20).run())
    with pytest.raises(NotARun):
        write_copy(tmp_path, tmp_path / "a.html")
    with pytest.raises(RunUnwritable, match="cannot write"):
        write_copy(run_dir, tmp_path / "nowhere" / "a.html")
    assert list(tmp_path.glob("*.html")) == []
    (small_page / "index.html").unlink()
    assets.find_asset.cache_clear()
    with pytest.raises(RunError, match="the page was not built"):
        write_copy(run_dir, tmp_path / "a.html")
    assert assets.report_file(title="x", data=b"") is None
