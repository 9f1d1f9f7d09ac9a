"""What the hub saw is part of the run's events: while it lasts, sealed, and once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stepscope.store.create import create_run
from stepscope.store.documents import read_meta, write_meta
from stepscope.store.load import open_run
from stepscope.store.paths import EVENTS, HUB_EVENTS
from stepscope.store.sealed.seal import seal
from tests.hub.gate_parts import Parts, join_of


def test_the_hubs_events_are_the_runs(tmp_path: Path) -> None:
    run_dir = create_run(tmp_path, "night", ["train.py"], sessions=tmp_path / "sessions").run_dir
    parts = Parts(run_dir)
    parts.journal.event("node_joined", node=1, host="b")
    parts.journal.flush()
    (run_dir / EVENTS).write_text(json.dumps({"schema": 1, "wall_ns": 1, "event": "rank_start"}) + "\n")
    parts.welcome(join_of(1))
    parts.watch.close()
    parts.close()
    assert [event["event"] for event in open_run(run_dir).events] == ["rank_start", "node_joined"]
    write_meta(run_dir, {**read_meta(run_dir), "end": {"exit_code": 0}})
    folder = tmp_path / "kept"
    shutil.copytree(run_dir / "inbox", folder)
    seal(run_dir)
    assert not (run_dir / HUB_EVENTS).exists()
    assert [event["event"] for event in open_run(run_dir).events] == ["rank_start", "node_joined"]
    shutil.copytree(folder, run_dir / "inbox")  # as if the seal had been killed before it cleaned up
    assert [event["event"] for event in open_run(run_dir).events] == ["rank_start", "node_joined"]


@pytest.mark.parametrize(
    ("event", "fields", "line"),
    [
        ("node_lost", {"node": 1, "host": "b", "silent_s": 16.4}, "node 1 (b) has sent nothing for 16 s"),
        ("node_back", {"node": 1, "host": "b"}, "node 1 (b) is back"),
        ("node_absent", {"nodes": [2, 3]}, "waiting for nodes that have not joined: 2, 3"),
        (
            "node_bye",
            {"node": 1, "host": "b", "end": {"status": "interrupted", "exit_code": 130}},
            "node 1 (b) ended: interrupted (exit code 130)",
        ),
        ("node_bye", {"node": 1, "host": "b", "end": {"status": "finished", "exit_code": 0}}, ""),
        (
            "refused",
            {"reason": "key", "why": "…", "source": "10.0.0.2"},
            "10.0.0.2 tried to join with a different key; see docs/several-nodes.md",
        ),
        ("refused", {"reason": "frame", "why": "…", "source": "10.0.0.2"}, ""),
    ],
)
def test_node_0_hears_at_once_of_what_somebody_should_see_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], event: str, fields: dict[str, Any], line: str
) -> None:
    run_dir = create_run(tmp_path, "night", ["train.py"], sessions=tmp_path / "sessions").run_dir
    parts = Parts(run_dir)
    parts.journal.event(event, **fields)
    parts.close()
    assert capsys.readouterr().err == (f"stepscope: {line}\n" if line else "")
