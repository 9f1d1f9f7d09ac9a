"""The view in plain lines: what was said once is not said again."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from stepscope.terminal.documents import Event, Finding, Findings, Run, Status
from stepscope.terminal.plain import PlainView
from stepscope.terminal.snapshot import Snapshot

TITLE = "Rank 1 sleeps; rank 0 waits for it."
BEGUN = Snapshot(link="live", run=Run(name="r"), status=Status(status="running", ranks=2))
EVENT = Event(number=1, event="hang", title=TITLE)
FOUND = Findings(findings=(Finding(kind="hang_host", severity="critical", title=TITLE, ranks=(1,)),))


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (({"events": (EVENT,), "findings": FOUND},), [f"✖ The job stands still. {TITLE}"]),
        (({"events": (EVENT,)}, {"events": (EVENT,), "findings": FOUND}), [f"✖ The job stands still. {TITLE}"]),
        (({"findings": FOUND}, {"events": (EVENT,), "findings": FOUND}), [f"✖ {TITLE}"]),
    ],
    ids=["together", "event first", "finding first"],
)
def test_a_hang_is_told_once(seen: tuple[dict[str, object], ...], told: list[str]) -> None:
    view = PlainView()
    known = [BEGUN, *(replace(BEGUN, **one) for one in seen)]  # type: ignore[arg-type]
    first, *lines = [line for one in known for line in view.lines(one, 0.0, 0)]
    assert first.endswith("r: running, 2 ranks")
    assert [line[line.index("✖") :] for line in lines] == told


def test_another_finding_is_told_beside_it() -> None:
    more = (*FOUND.findings, Finding(kind="jitter", severity="warning", title="Every 9th step is slow."))
    view = PlainView()
    lines = list(view.lines(replace(BEGUN, events=(EVENT,), findings=Findings(findings=more)), 0.0, 0))
    assert [line.rpartition("  ")[2].partition(" ")[2] for line in lines[1:]] == [
        f"The job stands still. {TITLE}",
        "Every 9th step is slow.",
    ]


def test_one_that_is_over_is_told_in_the_past() -> None:
    """Who comes by afterwards hears the event and the finding of it at once; once is enough."""
    then = "Rank 1 slept; rank 0 waited for it."
    found = Findings(live=False, findings=(replace_title(FOUND.findings[0], then),))
    over = replace(BEGUN, status=Status(status="interrupted", over=True, ranks=2), events=(EVENT,), findings=found)
    lines = list(PlainView().lines(over, 0.0, 0))
    assert [line[line.index("✖") :] for line in lines if "✖" in line] == [f"✖ The job stood still. {then}"]


def test_its_end_does_not_make_another_of_it() -> None:
    view = PlainView()
    list(view.lines(replace(BEGUN, events=(EVENT,), findings=FOUND), 0.0, 0))
    then = replace_title(FOUND.findings[0], "Rank 1 slept; rank 0 waited for it.")
    ended = replace(BEGUN, events=(EVENT,), findings=Findings(live=False, findings=(then,)))
    assert list(view.lines(ended, 0.0, 0)) == []


def replace_title(finding: Finding, title: str) -> Finding:
    return msgspec.structs.replace(finding, title=title)
