"""Runs for the terminal view to look at, and a hub that serves them (``tests/hub/run_parts.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.cluster import Cluster, slow_at
from fakes.samples import with_samples

from stepscope.terminal.feed import Feed, RunAddress
from tests.hub.run_parts import WALL_NS, ServedFolder, record

HOSTILE = "[red]x[/red] \x1b[31m\x1b]0;t\x07 <b> 漢字 \u202e"
"""Markup, sequences that a terminal obeys, wide signs, and one that turns the direction of writing."""
NAME = "[bold]night[-red] 漢字"
"""Of a run; what a terminal obeys cannot stand in the name of one."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that are over and that nobody may change."""
    root = tmp_path_factory.mktemp("live") / "runs"
    slow = Cluster(ranks=8, steps=100, hosts=2, faults=(slow_at(3, "forward", 30.0),), noise=0.0, tail=0.0)
    events = [{"schema": 1, "wall_ns": WALL_NS, "event": "rank_start", "rank": 3, "pid": 1, "host": "node0"}]
    demo = record(root, "demo", with_samples(slow, every_s=1.0), events=events)
    (demo / "logs" / "rank-3.log").write_bytes(b"epoch 1\n\rstep 1\rstep 2\n\x1b[31mred\x1b[0m [bold]\n" + b"x" * 300)
    record(root, "one", Cluster(ranks=1, steps=20).run(), sealed=False)
    record(root, "empty", Cluster(ranks=2, steps=0).run(), sealed=False)
    record(root, "many", Cluster(ranks=60, steps=4).run(), sealed=False)
    warning = {"schema": 1, "wall_ns": WALL_NS, "event": "warning", "message": HOSTILE, "host": HOSTILE}
    hostile = record(root, NAME, Cluster(ranks=2, steps=8).run(), events=[warning], sealed=False)
    (hostile / "logs" / "rank-0.log").write_text(HOSTILE)
    return root


@pytest.fixture(scope="session")
def served(folder: Path) -> Iterator[ServedFolder]:
    """One for all tests that only ask."""
    hub = ServedFolder(folder)
    yield hub
    hub.stop()


@pytest.fixture
def feed_of() -> Iterator[Callable[..., Feed]]:
    """``feed_of(hub, "demo")``: what the view stands on, started; ended with the test."""
    feeds: list[Feed] = []

    def start(hub: ServedFolder, run: str, *, token: str | None = None) -> Feed:
        place = RunAddress(url=hub.url, token=hub.token if token is None else token, run=run)
        feeds.append(Feed(lambda: place))
        feeds[-1].start()
        return feeds[-1]

    yield start
    for feed in feeds:
        feed.close()
