"""The view in plain lines: what was printed once is not printed again."""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec
import pytest

from stepscope.terminal.documents import Event, Finding, Findings, Message, Run, Snapshot, Status, still_s
from stepscope.terminal.feed import Feed, HubReader
from stepscope.terminal.plain import PlainView

TITLE = "Rank 1 sleeps; rank 0 waits for it."
BEGUN = Snapshot(link="live", run=Run(name="r"), status=Status(status="running", ranks=2))
EVENT = Event(number=1, event="hang", severity="critical", title=TITLE, text=f"The job hangs. {TITLE}")
FOUND = Findings(findings=(Finding(kind="hang_host", severity="critical", title=TITLE, ranks=(1,)),))


@pytest.mark.parametrize(
    ("seen", "messages"),
    [
        (({"events": (EVENT,), "findings": FOUND},), [f"✖ The job hangs. {TITLE}"]),
        (({"events": (EVENT,)}, {"events": (EVENT,), "findings": FOUND}), [f"✖ The job hangs. {TITLE}"]),
        (({"findings": FOUND}, {"events": (EVENT,), "findings": FOUND}), [f"✖ {TITLE}"]),
    ],
    ids=["together", "event first", "finding first"],
)
def test_a_hang_is_told_once(seen: tuple[dict[str, object], ...], messages: list[str]) -> None:
    view = PlainView()
    known = [BEGUN, *(replace(BEGUN, **one) for one in seen)]  # type: ignore[arg-type]
    first, *lines = [line for one in known for line in view.lines(one, 0.0, 0)]
    assert first.endswith("r: running, 2 ranks")
    assert [line[line.index("✖") :] for line in lines] == messages


def test_another_finding_is_told_beside_it() -> None:
    more = (*FOUND.findings, Finding(kind="jitter", severity="warning", title="Every 9th step is slow."))
    view = PlainView()
    lines = list(view.lines(replace(BEGUN, events=(EVENT,), findings=Findings(findings=more)), 0.0, 0))
    assert [line.rpartition("  ")[2].partition(" ")[2] for line in lines[1:]] == [
        f"The job hangs. {TITLE}",
        "Every 9th step is slow.",
    ]


def test_one_that_is_over_is_told_in_the_past() -> None:
    """Who comes by afterwards hears the event and the finding of it at once; once is enough."""
    then = "Rank 1 slept; rank 0 waited for it."
    found = Findings(live=False, findings=(replace_title(FOUND.findings[0], then),))
    event = msgspec.structs.replace(EVENT, text=f"The job hung. {then}")
    over = replace(BEGUN, status=Status(status="interrupted", over=True, ranks=2), events=(event,), findings=found)
    lines = list(PlainView().lines(over, 0.0, 0))
    assert [line[line.index("✖") :] for line in lines if "✖" in line] == [f"✖ The job hung. {then}"]


def test_its_end_does_not_make_another_of_it() -> None:
    view = PlainView()
    list(view.lines(replace(BEGUN, events=(EVENT,), findings=FOUND), 0.0, 0))
    then = replace_title(FOUND.findings[0], "Rank 1 slept; rank 0 waited for it.")
    ended = replace(BEGUN, events=(EVENT,), findings=Findings(live=False, findings=(then,)))
    assert list(view.lines(ended, 0.0, 0)) == []


def replace_title(finding: Finding, title: str) -> Finding:
    return msgspec.structs.replace(finding, title=title)


@pytest.mark.parametrize("set_s", [-3600, 3600])
def test_setting_the_time_of_day_makes_no_standstill_and_hides_none(
    monkeypatch: pytest.MonkeyPatch, set_s: int
) -> None:
    """What time it is the hub says, once; from there on only the monotonic clock counts."""
    mono_s, wall_s = 50, 1_700_000_000
    monkeypatch.setattr(time, "monotonic_ns", lambda: mono_s * 10**9)
    monkeypatch.setattr(time, "time_ns", lambda: wall_s * 10**9)
    hub, feed = HubReader.__new__(HubReader), Feed(lambda: pytest.fail("nobody is asked"))
    there_ns = 1_600_000_000 * 10**9
    feed._take(hub, Message(event="heartbeat", id="", data=msgspec.json.encode({"wall_ns": there_ns})))
    steps = {
        "first": [0, 1],
        "last": [0, 1],
        "start_wall_ns": [there_ns - 10**9, there_ns],
        "mean_ns": {"wall": [1e8, 1e8]},
    }
    feed._take(hub, Message(event="steps", id="", data=msgspec.json.encode(steps)))
    assert feed.wall_ns() == there_ns
    wall_s += set_s
    mono_s += 5
    live = replace(feed.now, link="live")
    assert still_s(live, feed.wall_ns()) is None
    mono_s += 55
    assert still_s(live, feed.wall_ns()) == 60.0
