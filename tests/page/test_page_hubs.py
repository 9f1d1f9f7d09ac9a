"""The page with unusual hubs: over TLS, below a proxy's path, in a notebook's frame, with many runs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster

from stepscope.hub.api.auth import Readers
from stepscope.hub.app import make_app
from stepscope.hub.runs import Runs
from stepscope.hub.transport import make_certificate
from stepscope.store.create import create_run
from stepscope.store.documents import end_run
from stepscope.store.user_runs import add_folder, known_folders, run_id
from tests.hub.run_parts import READER, Hub, record
from tests.page.browsing import expect, run_address

PREFIX = "/user/ada/proxy/4711"
MANY = 120


@pytest.mark.soak  # near: tests/hub/api/test_serve_command.py
def test_over_tls(browser_page: Any, feed: Any, tmp_path: Path) -> None:
    """After accepting the certificate: everything is encrypted, and steps are drawn as they arrive."""
    run = feed()
    run.make(5)
    tls = make_certificate(folder=tmp_path)
    with closing(Hub(lambda: make_app(Runs.of_folder(feed.folder), Readers(READER, secure=True)), tls=tls)) as hub:
        page = browser_page(ignore_https_errors=True)
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(run_address(hub.url, "live", READER))
        bar = page.locator("header.bar")
        expect(bar).to_contain_text("step 4")
        run.make(5)
        expect(bar).to_contain_text("step 9")
        page.reload()  # signed in by the cookie alone
        expect(bar).to_contain_text("step 9")
        assert {address.split("://")[0] for address in requests} == {"https"}
        (cookie,) = page.context.cookies()
        assert cookie["name"].startswith("__Host-stepscope-")
        assert (cookie["secure"], cookie["httpOnly"], cookie["sameSite"]) == (True, True, "Strict")
        page.context.close()
    run.end()


def below(prefix: str, app: Any, bearing: list[bool]) -> Any:
    """A proxy that serves the hub below a path and strips it; records which requests carried a token."""

    async def stripped(scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"].startswith(f"{prefix}/"), scope["path"]
        bearing.append(any(name == b"authorization" for name, _ in scope["headers"]))
        await app({**scope, "path": scope["path"].removeprefix(prefix)}, receive, send)

    return stripped


@pytest.mark.soak
def test_below_a_path_in_a_frame(browser_page: Any, runs_folder: Path) -> None:
    """As in JupyterLab: all requests are below the path, and none has a header meant for the proxy."""
    bearing: list[bool] = []
    app = make_app(Runs.of_folder(runs_folder / "demo"), Readers(READER), framed=True)
    with closing(Hub(lambda: below(PREFIX, app, bearing))) as hub:
        page = browser_page()
        address = run_address(f"{hub.url}{PREFIX}", "demo", READER, rank=3)
        page.route(
            "**/notebook",
            lambda route: route.fulfill(body=f'<iframe src="{address}"></iframe>', content_type="text/html"),
        )
        page.goto(f"{hub.url}/notebook")
        frame = page.frame_locator("iframe")
        expect(frame.get_by_role("region", name="Verdict").get_by_role("heading").first).to_contain_text("Rank 3 is")
        expect(frame.get_by_role("heading", name="Rank 3", exact=True)).to_be_visible()
        page.context.close()
        assert bearing
        assert not any(bearing)


@pytest.fixture
def many_runs(tmp_path: Path) -> Path:
    for number in range(MANY):
        run_dir = create_run(tmp_path / "runs", f"sweep-{number:03d}", ["x"], sessions=tmp_path / "s").run_dir
        end_run(run_dir, exit_code=0, status="finished")
    return tmp_path / "runs"


@pytest.mark.soak  # near: test_page_list.py
def test_a_list_of_many_runs_draws_a_page_of_it(browser_page: Any, serve_folder: Any, many_runs: Path) -> None:
    hub = serve_folder(many_runs)
    page = browser_page()
    page.goto(f"{hub.url}/#token={hub.token}")
    rows = page.locator("tbody tr")
    expect(page.get_by_text(f"{MANY} runs", exact=True)).to_be_visible()
    expect(rows).to_have_count(50)
    page.get_by_role("button", name="Run", exact=True).click()
    expect(rows.first).to_contain_text("sweep-000")
    page.get_by_role("button", name="Next").click()
    page.get_by_role("button", name="Next").click()
    expect(rows).to_have_count(MANY - 100)
    expect(rows.last).to_contain_text(f"sweep-{MANY - 1}")
    assert page.evaluate("scrollY") == 0
    page.get_by_role("searchbox").fill("p-11")
    expect(rows).to_have_count(10)
    expect(page.get_by_text(f"10 of {MANY} runs")).to_be_visible()


def test_all_runs_of_a_user_appear_as_they_are_made(browser_page: Any, tmp_path: Path) -> None:
    user = {"XDG_STATE_HOME": str(tmp_path / "state")}

    def made(folder: str, steps: int) -> Path:
        run_dir = record(tmp_path / folder, "night", Cluster(ranks=1, steps=steps).run())
        return add_folder(run_dir.parent, user) / run_dir.name

    one, _ = made("one", 5), made("two", 9)
    with closing(Hub(lambda: make_app(Runs.of_user(lambda: known_folders(user)), Readers(READER)))) as hub:
        page = browser_page(width=420)
        page.goto(f"{hub.url}/#token={READER}")
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.filter(has_text=str(one.parent))).to_have_count(1)
        later = made("three", 7)
        expect(rows).to_have_count(3)
        assert page.evaluate("document.documentElement.scrollWidth") <= 420
        page.get_by_role("searchbox").fill("three")
        expect(rows).to_have_count(1)
        rows.get_by_role("link", name="night").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("night")
        expect(page.get_by_role("list", name="Progress")).to_contain_text("step 6")
        assert page.url.endswith(f"/#/run/{run_id(later)}")
        page.context.close()
