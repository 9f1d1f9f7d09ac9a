"""Findings in files of earlier versions have names that are no longer used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fakes.cluster import Cluster

from stepscope.comparison.inputs import read_input
from stepscope.reports.summary import summarize
from stepscope.store.documents import load_findings, load_summary

OLD = {"kind": "low_gpu_utilisation", "severity": "warning", "title": "The GPUs are 30% busy."}
NOW = {**OLD, "kind": "low_gpu_utilization"}


def test_old_names_are_read_as_todays(tmp_path: Path) -> None:
    summary: dict[str, Any] = {**summarize(Cluster(ranks=2, steps=60).run()), "findings": [OLD], "verdict": OLD}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "findings.json").write_text(json.dumps({"schema": 1, "findings": [OLD]}))
    loaded = load_summary(tmp_path) or {}
    assert (loaded["findings"], loaded["verdict"]) == ([NOW], NOW)
    assert load_findings(tmp_path) == [NOW]
    assert read_input(tmp_path / "summary.json").findings == [NOW]
