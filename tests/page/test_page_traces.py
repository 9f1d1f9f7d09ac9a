"""Traces and captures of a hub in a browser: the list, every view, the switch for the rank, Perfetto, and failures."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster

from stepscope.hub.traces.desk import DeskLimits, TraceDesk
from tests.hub.run_parts import record
from tests.page.browsing import EVIL_IMAGE, TOO_WIDE, ServedFolder, complaints, expect, settled
from tests.page.conftest import traced

LONGEST_S = 120.0
VIEWS = ("Overview", "Timeline", "Operators", "Kernels", "Memory", "Modules", "Distributed", "Two ranks", "Files")
NOTHING = {"Memory": "Memory was not recorded.", "Modules": "Modules were not recorded."}
PERFETTO = """<!doctype html><script>
addEventListener("message", ({ data, source, origin }) => {
  if (data === "PING") source.postMessage("PONG", origin);
  else document.title = `${data.perfetto.title} ${new Uint8Array(data.perfetto.buffer).join(",")}`;
});
</script>"""


@pytest.fixture(scope="module")
def traces_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("traces") / "served"
    (root / "job").mkdir(parents=True)
    traced(0).write(root / "job" / "0.json")
    traced(1, late=4_000).write(root / "job" / "1.json")
    (root / "damaged").mkdir()
    (root / "damaged" / "a.pt.trace.json").write_text('{"traceEvents": [')
    (root / EVIL_IMAGE).mkdir()
    traced(0).write(root / EVIL_IMAGE / "0.json")
    run = record(root, "run", Cluster(ranks=2, steps=50).run())
    capture = run / "captures/step-20"
    capture.mkdir(parents=True)
    for rank in range(2):
        data = gzip.compress((root / f"job/{rank}.json").read_bytes())
        (capture / f"rank-{rank}.pt.trace.json.gz").write_bytes(data)
    return root


@pytest.fixture(scope="module")
def hub(traces_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedFolder]:
    """Its views are already made: nobody waits for a worker in the browser, and none is kept ready."""
    desk = TraceDesk(folder=tmp_path_factory.mktemp("views") / "views", limits=DeskLimits(nice=0, ahead_s=0.0))
    served = ServedFolder(traces_folder, desk=desk)
    for place in ("traces/job", "traces/job/timeline?rank=0", "traces/job/perfetto", "runs/run/captures/step-20/view"):
        until_s = time.monotonic() + LONGEST_S
        while (state := served.hub.get(f"/api/v1/{place}").json["state"]) != "done":
            assert state in ("waiting", "reading")
            assert time.monotonic() < until_s
            time.sleep(0.05)
    yield served
    served.stop()


def opened(page: Any, hub: ServedFolder, place: str) -> Any:
    page.goto(f"{hub.url}/#{place}{'&' if '?' in place else '?'}token={hub.token}")
    page.wait_for_selector("main[aria-busy=false]")
    return page


def show(page: Any, view: str) -> None:
    page.get_by_role("navigation", name="Views").get_by_role("button", name=view, exact=True).click()
    expect(page.get_by_text(re.compile("Reading rank|Comparing rank"))).to_have_count(0)


def test_folders_are_listed_and_open(browser_page: Any, hub: ServedFolder) -> None:
    page = browser_page()
    page.goto(f"{hub.url}/#token={hub.token}")
    listed = page.get_by_role("region", name="Traces")
    expect(listed.get_by_role("link")).to_have_count(3)
    assert page.locator("img").count() == 0, "a name stays a name"
    listed.get_by_role("link", name="job").click()
    expect(page).to_have_url(re.compile("#/trace/job$"))
    expect(page.get_by_role("region", name="Verdict").get_by_role("heading").first).to_contain_text("Rank 1")
    page.keyboard.type("gl")
    expect(listed).to_be_visible()


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_every_view_is_drawn_and_fits(browser_page: Any, hub: ServedFolder, axe: str, theme: str, width: int) -> None:
    page = opened(browser_page(theme=theme, width=width), hub, "/trace/job")
    for view in VIEWS:
        show(page, view)
        if view in NOTHING:
            expect(page.get_by_text(NOTHING[view])).to_be_visible()
        else:
            expect(page.locator("main section.card").first).to_be_visible()
        settled(page)
        assert page.evaluate(TOO_WIDE) == [], view
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        assert complaints(page, axe) == [], view


def test_the_rank_is_switched_and_the_link_keeps_it(browser_page: Any, hub: ServedFolder) -> None:
    page = opened(browser_page(), hub, "/trace/job?view=kernels")
    rank = page.get_by_role("combobox", name="Rank", exact=True)
    expect(rank).to_have_value("1")
    expect(page.get_by_role("heading", name="Tables of rank 1")).to_be_visible()
    rank.select_option("0")
    expect(page.get_by_role("heading", name="Tables of rank 0")).to_be_visible()
    expect(page).to_have_url(re.compile("view=kernels"))
    expect(page).to_have_url(re.compile("rank=0"))
    show(page, "Timeline")
    expect(page.get_by_role("application", name=re.compile("^Timeline: step . of rank 0"))).to_be_visible()
    show(page, "Two ranks")
    expect(page.get_by_role("combobox", name="with rank")).to_have_value("1")
    expect(page.get_by_role("heading", name="Rank 0 and rank 1")).to_be_visible()
    show(page, "Distributed")
    expect(rank).to_have_count(0)


def test_columns_that_do_not_fit_are_shown_on_request(browser_page: Any, hub: ServedFolder) -> None:
    """On a phone no column is cut; the window's width decides again when it changes."""
    page = opened(browser_page(width=390), hub, "/trace/job")
    show(page, "Two ranks")
    table = page.get_by_role("region", name=re.compile("^Table: Kernels"))
    more = page.get_by_role("button", name="Show all 6 columns").last
    expect(more).to_be_visible()
    assert table.evaluate("box => box.scrollWidth <= box.clientWidth")
    few = table.get_by_role("columnheader").count()
    assert 2 <= few < 6
    more.click()
    expect(table.get_by_role("columnheader")).to_have_count(6)
    page.get_by_role("button", name="Show fewer columns").last.click()
    expect(table.get_by_role("columnheader")).to_have_count(few)
    page.set_viewport_size({"width": 1280, "height": 900})
    expect(table.get_by_role("columnheader")).to_have_count(6)
    facts = page.get_by_role("list", name="About the files").get_by_role("listitem")
    tops = facts.evaluate_all("facts => facts.map((fact) => fact.getBoundingClientRect().top)")
    assert len(set(tops)) == 1, "the facts are on one line"


def test_the_merged_timeline_goes_to_perfetto_and_to_a_file(browser_page: Any, hub: ServedFolder) -> None:
    page = browser_page()
    browser_page.expects(page, "ui.perfetto.dev", "target origin")
    page.context.route(
        "https://ui.perfetto.dev/**", lambda route: route.fulfill(body=PERFETTO, content_type="text/html")
    )
    opened(page, hub, "/trace/job?view=timeline")
    with page.context.expect_page() as popup:
        page.get_by_role("button", name="Open in Perfetto").click()
    popup.value.wait_for_function("document.title.startsWith('job 31,139,')")
    expect(page.get_by_role("region", name="Perfetto").get_by_role("status")).to_contain_text("Opened in Perfetto.")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download", exact=True).click()
    assert download.value.suggested_filename == "job.perfetto.json.gz"
    events = json.loads(gzip.decompress(Path(download.value.path()).read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)


def test_what_cannot_be_shown_says_why(browser_page: Any, hub: ServedFolder) -> None:
    page = browser_page()
    browser_page.expects(page, "404")
    opened(page, hub, "/trace/damaged")
    expect(page.get_by_role("heading", name="These traces cannot be shown")).to_be_visible()
    expect(page.get_by_text("damaged/a.pt.trace.json")).to_be_visible()
    opened(page, hub, "/trace/none")
    expect(page.get_by_role("heading", name="Traces not found")).to_be_visible()


# -- captures ---------------------------------------------------------------------------------------------------------


def capture(state: str, **more: Any) -> dict[str, Any]:
    order = {"id": "step-20", "ranks": [0, 1], "at_step": 20, "steps": 6, "warmup": 2}
    report = {"rank": 1, "state": "delivered", "problem": "", "first_step": 20, "last_step": 25}
    times = {"start_ms": 30.0, "stop_ms": 20.0, "write_ms": 950.0}
    return {
        "order": {**order, "memory": False, "stacks": True, "shapes": False},
        "state": state,
        "requested_wall_ns": 1_700_000_000_000_000_000,
        "done_wall_ns": 0,
        "reason": "request",
        "request": "",
        "finding": "",
        "by": "anna",
        "problem": "",
        "reports": [] if state == "ordered" else [{**report, **times}],
        "files": ["rank-0.pt.trace.json.gz", "rank-1.pt.trace.json.gz"] if state == "done" else [],
        "size_bytes": 4_000_000 if state == "done" else 0,
        "verdict": "Rank 1 comes last to 6 of 6 collectives." if state == "done" else "",
        "severity": "warning" if state == "done" else "",
        "findings": [],
        "differences": [],
        "figures": {"step_ms": 41.0, "usual_step_ms": 38.2} if state == "done" else {},
        **more,
    }


DIFFERENCE = {
    "what": "operator",
    "name": "aten::mm",
    "rank": 1,
    "peer": 0,
    "extra_ns": 30_100_000,
    "phase": "backward",
    "line": "train.py:64",
    "text": "Rank 1 spends 30.1 ms more than rank 0 in aten::mm in backward.",
}


@pytest.fixture
def answering() -> Callable[..., list[Any]]:
    """Answer for the list of captures; returns what was posted."""

    def answer(page: Any, captures: list[dict[str, Any]], may: list[str]) -> list[Any]:
        posted: list[Any] = []

        def handle(route: Any) -> None:
            if route.request.method == "POST":
                posted.append(route.request.post_data_json)
                captures.insert(0, capture("ordered"))
                route.fulfill(json={"schema": 1, "request": "x"})
            else:
                route.fulfill(json={"schema": 1, "captures": captures, "total": len(captures), "may": may})

        page.route(re.compile(r"/runs/[^/]+/captures(\?.*)?$"), handle)
        return posted

    return answer


def test_captures_of_a_run_are_listed_and_open(
    browser_page: Any, hub: ServedFolder, answering: Callable[..., list[Any]], axe: str
) -> None:
    page = browser_page(width=390)
    failed = capture("failed", problem="Rank 1 did not answer within 60 s.")
    failed["order"] = {**failed["order"], "id": "step-2"}
    answering(page, [capture("done", differences=[DIFFERENCE]), failed], [])
    opened(page, hub, "/run/run")
    listed = page.get_by_role("region", name="Captures")
    expect(listed.get_by_role("listitem")).to_have_count(2)
    expect(listed.get_by_role("listitem").first).to_contain_text("steps 20–25")
    expect(listed.get_by_role("listitem").first).to_contain_text("step time 41.0 ms instead of 38.2 ms")
    expect(listed.get_by_role("link", name="Rank 1 did not answer within 60 s.")).to_be_visible()
    expect(listed.get_by_role("button", name="Capture now")).to_have_count(0)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    listed.get_by_role("link", name="Rank 1 comes last").click()
    page.wait_for_selector("main[aria-busy=false]")
    expect(page).to_have_url(re.compile("#/run/run/capture/step-20"))
    expect(page.get_by_role("region", name="Capture", exact=True)).to_contain_text("aten::mm in backward. train.py:64")
    expect(page.get_by_role("region", name="Verdict").get_by_role("heading").first).to_contain_text("Rank 1")
    show(page, "Kernels")
    expect(page.get_by_role("heading", name="Tables of rank 1")).to_be_visible()
    assert complaints(page, axe) == []
    page.get_by_role("link", name="Run run").click()
    expect(listed).to_be_visible()


def test_a_capture_is_requested_and_followed(
    browser_page: Any, serve_folder: Any, feed: Any, open_run: Any, answering: Callable[..., list[Any]]
) -> None:
    running = feed()
    running.make(30)
    page = browser_page()
    captures: list[dict[str, Any]] = []
    posted = answering(page, captures, ["capture"])
    open_run(page, serve_folder(feed.folder, changes=True), "live")
    form = page.get_by_role("form", name="Capture now")
    form.get_by_role("combobox", name="Ranks").select_option("listed")
    form.get_by_label("Ranks to capture").fill("two")
    form.get_by_role("button", name="Capture now").click()
    expect(form.get_by_role("alert")).to_have_text("Enter ranks such as 0, 3 or 4-7.")
    form.get_by_label("Ranks to capture").fill("0, 2")
    form.get_by_label("memory").check()
    form.get_by_role("button", name="Capture now").click()
    listed = page.get_by_role("region", name="Captures")
    expect(listed.get_by_role("link", name="ordered: starts at step 20")).to_be_visible()
    assert posted == [{"choose": "listed", "ranks": [0, 2], "steps": 6, "memory": True, "shapes": False}]
    expect(form.get_by_role("button", name="Capturing …")).to_be_disabled()
    captures[0] = capture("profiling")
    expect(listed.get_by_role("link", name="profiling")).to_be_visible()
    captures[0] = capture("done")
    expect(listed.get_by_role("link", name="Rank 1 comes last")).to_be_visible()
    expect(form.get_by_role("button", name="Capture now")).to_be_enabled()
