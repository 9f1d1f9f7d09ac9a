"""The page in a real browser, over real hubs.

    def test_it(browser_page, served, open_run):
        page = browser_page(theme="dark", width=420)
        open_run(page, served, "demo", rank=3)
        expect(page.get_by_role("heading", name="Rank 3")).to_be_visible()

``browser_page(theme="light", width=1280, height=900)``
    opens a Page (Playwright, sync) in a context of its own.  When the test is over there must have been no error or
    warning on the console, no exception, no dialog, no failed request and no request to anywhere but the first page's
    own host; ``browser_page.expects(page, "401", …)`` allows those that match, ``browser_page.troubles(page)`` lists
    all so far.
``runs_folder``
    runs that are over and that nobody may change, made once: ``demo`` (8 ranks × 600 steps on 2 hosts, rank 3 slow in
    forward, samples, events, a stack), ``hang`` (4 ranks, rank 3 never called all_reduce), ``one`` (one rank, which
    noted its loss), ``empty`` (no step), ``gpu`` (device times, GPU samples, memory that creeps), and HOSTILE, in whose
    names and words there is markup everywhere.
``files``, ``front_file``
    pages of made traces and Flight Recorder dumps (``trace``, ``flight``), and of a sweep, as files.
``layers_folder``, ``layers_served``
    runs with samples of layers (``gpt``) and without (``plain``), and a hub of them.
``served``
    a hub of it, for tests that only ask: ``url``, ``token``.
``serve_folder(folder)``
    a hub of the test's own, with ``stop()`` and ``start()`` at the same port.
``serve_process(folder)``
    the same as ``stepscope serve``, a process with ``kill()`` and ``start()``.
``feed(cluster, name="live")``
    a run that goes on in ``feed.folder``: ``make(steps)``, ``say(event, …)``, ``sample(lines)``, ``end()``.
``open_run(page, hub, run, **route)``
    signs in and waits for the run's screen.

Where there is no Chromium, no Playwright or no built page, all of this folder is skipped, and the end of the tests says
so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fakes.browser import launched
from fakes.cluster import Cluster, slow_at
from fakes.dumps import Call, FlightJob, frames_at, stack_text
from fakes.samples import with_samples
from fakes.traces import MadeTrace
from gpt_layers import write_layer_samples
from made_sweeps import FSDP2, variant, write_sweep

from stepscope.cli.main import run_command
from stepscope.cli.output import write_page
from stepscope.comparison.sweep import sweep_page
from stepscope.store.live.failures import write_hang
from tests.hub.run_parts import DEMO, HOSTILE, WALL_NS, Feed, missing_rank, record
from tests.page.browsing import (
    EVIL,
    EVIL_IMAGE,
    LIVE_STEPS,
    LoopOfPlaywright,
    Pages,
    ServedFolder,
    ServedProcess,
    run_address,
    why_skipped,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HERE = Path(__file__).parent
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
SCREEN_MS = 30_000
"""Timeout for a busy machine; a page that is ready is not waited for."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_skipped()
    if not reason:
        from playwright.sync_api import expect

        expect.set_options(timeout=SCREEN_MS)
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def shared_browser() -> Iterator[tuple[Browser, LoopOfPlaywright]]:
    """One browser for all tests of a worker: starting it takes longer than most of them."""
    with launched() as browser:
        loop = LoopOfPlaywright()
        with loop.here():
            browser.new_context().close()  # what a browser starts for its first page is its own, not a test's
        yield browser, loop
        loop.here().__enter__()


@pytest.fixture
def browser_page(shared_browser: tuple[Browser, LoopOfPlaywright], serve_folder: Any) -> Iterator[Pages]:
    """Requested after ``serve_folder``, so that pages are closed before their hubs."""
    browser, loop = shared_browser
    with loop.here():
        pages = Pages(browser)
        yield pages
        troubles = pages.close()
    if troubles:
        pytest.fail("this went wrong in the page:\n  " + "\n  ".join(troubles), pytrace=False)


@pytest.fixture(scope="session")
def axe(root: Path) -> str:
    script = root / "web" / "node_modules" / "axe-core" / "axe.min.js"
    if not script.is_file():
        pytest.skip("axe-core is not here; make page installs it")
    return script.read_text()


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page") / "runs"
    events = [
        {"schema": 1, "wall_ns": WALL_NS + i, "event": "warning", "message": f"number {i}", "host": "node0"}
        for i in range(5)
    ]
    frames = [{"file": "train.py", "line": 3, "function": "main"}]
    stack = {"rank": 3, "pid": 1003, "wall_ns": WALL_NS + 5, "step": 7, "phase": "other", "node": "node0"}
    write_hang(record(root, "hang", Cluster(ranks=4, steps=40).run(), sealed=False), missing_rank())
    one = Cluster(ranks=1, steps=50).run()
    pid = one.ranks[0].identity.pid
    notes = [
        {
            "schema": 1,
            "wall_ns": WALL_NS,
            "event": "note",
            "rank": 0,
            "pid": pid,
            "step": step,
            "values": {"loss": loss},
        }
        for step, loss in enumerate(4.0 / (1 + step) for step in range(50))
    ]
    record(root, "one", one, events=notes)
    record(root, "empty", Cluster(ranks=2, steps=0).run(), sealed=False)
    creeping = Cluster(
        ranks=2,
        steps=300,
        device_timed=True,
        allocated_mb=lambda rank, steps: 40_000 + 100 * steps,
        memory_every=1,
    )
    record(root, "gpu", with_samples(creeping, every_s=0.5))
    hostile = Cluster(ranks=2, steps=30, facts={"model": HOSTILE})
    warning = {"schema": 1, "wall_ns": WALL_NS, "event": HOSTILE[:30], "message": HOSTILE, "host": HOSTILE}
    record(
        root,
        HOSTILE,
        hostile.run(),
        events=[warning],
        stacks=[{**stack, "frames": [{**frames[0], "file": HOSTILE}]}],
    )
    record(root, "demo", with_samples(DEMO, every_s=0.5), events=events, stacks=[{**stack, "frames": frames}])
    return root


@pytest.fixture(scope="session")
def served(runs_folder: Path) -> Iterator[ServedFolder]:
    hub = ServedFolder(runs_folder)
    yield hub
    hub.stop()


def traced(rank: int, *, late: float = 0.0) -> MadeTrace:
    """Steps of 20 ms; the rank comes ``late`` to the all-reduce; names that somebody made up."""
    trace = MadeTrace(rank=rank, world_size=2)
    for number in range(6):
        at = number * 20_000.0
        trace.step(number, at, 20_000)
        trace.op("aten::mm", at + 10, 50)
        trace.launched("ampere_sgemm_128x64_nn", at=at + 20, start=at + 100, dur=9_000)
        trace.launched(EVIL, at=at + 30, start=at + 9_200, dur=300)
        arrival = at + 10_000 + late
        trace.op("record_param_comms", arrival - 50, 60)
        trace.launched(REDUCE, at=arrival - 30, start=arrival, dur=at + 15_000 - arrival, stream=20)
    return trace


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "traces").mkdir()
    traced(0).write(folder / "traces" / f"{EVIL.replace('/', '|')}.json")
    traced(1, late=4_000).write(folder / "traces" / "1.json")
    job = FlightJob(4, backend="nccl")
    job.add_group("9", EVIL, [0, 1, 2, 3])
    call = Call(group="9", site=frames_at(3, file=f"/job/{EVIL}.py", function=EVIL))
    job.run({rank: [call] * 3 for rank in range(4)}, until={1: 2})
    job.write(folder / "dumps")
    (folder / "dumps" / "stacks_1.txt").write_text(stack_text(("/job/data.py", 7, "load")))
    made = {"trace": folder / "trace.html", "flight": folder / "flight.html"}
    assert run_command(["trace", str(folder / "traces"), "--top", "4", "--html", str(made["trace"])]) == 0
    assert run_command(["flight", str(folder / "dumps"), "--html", str(made["flight"])]) == 0
    return made


@pytest.fixture(scope="session")
def front_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("front")
    variants = [*FSDP2, variant(EVIL_IMAGE, [25.0, 25.1, 24.9], 900), variant("slow", [], None, failed="timed out")]
    write_page(folder / "front.html", sweep_page(write_sweep(folder / "fsdp2", variants)))
    return folder / "front.html"


@pytest.fixture(scope="session")
def layers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layers") / "runs"
    write_layer_samples(record(root, "gpt", Cluster(ranks=4, steps=1000, tail=0.0).run()), layers=4)
    record(root, "plain", Cluster(ranks=2, steps=50).run())
    return root


@pytest.fixture(scope="session")
def layers_served(layers_folder: Path) -> Iterator[ServedFolder]:
    hub = ServedFolder(layers_folder)
    yield hub
    hub.stop()


@pytest.fixture
def serve_folder() -> Iterator[Callable[..., ServedFolder]]:
    hubs: list[ServedFolder] = []

    def serve(folder: Path, *, changes: bool = False) -> ServedFolder:
        hubs.append(ServedFolder(folder, changes=changes))
        return hubs[-1]

    yield serve
    for hub in hubs:
        hub.stop()


@pytest.fixture
def serve_process(commands: Any, tmp_path: Path) -> Callable[[Path], ServedProcess]:
    return lambda folder: ServedProcess(commands.start, folder, tmp_path / "reader-token")


class Feeds:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, cluster: Cluster | None = None, name: str = "live") -> Feed:
        """Default cluster: 4 ranks, of which rank 2 is slow."""
        slow = Cluster(ranks=4, steps=LIVE_STEPS, faults=(slow_at(2, "forward", 40.0),), allocated_mb=100.0)
        return Feed(self.folder, name, cluster or slow)


@pytest.fixture
def feed(tmp_path: Path) -> Feeds:
    return Feeds(tmp_path / "runs")


@pytest.fixture
def open_run() -> Callable[..., Page]:
    def open_it(page: Page, hub: ServedFolder | ServedProcess, run: str, **route: int) -> Page:
        page.goto(run_address(hub.url, run, hub.token, **route))
        page.wait_for_selector("main[aria-busy=false]", timeout=SCREEN_MS)
        return page

    return open_it
