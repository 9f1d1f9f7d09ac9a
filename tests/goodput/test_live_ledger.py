"""The ledger of an active run, from sums that the hub keeps, and in ``/metrics``."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from fakes.cluster import Cluster

from stepscope.goodput.ledger import ledger_of
from stepscope.hub.live.figures import figures_of
from stepscope.hub.live.goodput import ledger_document
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.rules import select, snapshot


def test_the_hub_has_the_same_ledger_as_the_loader_would_have() -> None:
    """Eight ranks, 90 steps; the run is active, so that both end now."""
    run = Cluster(ranks=8, steps=100, tail=0.02, unfinished=dict.fromkeys(range(8), 90)).run()
    ranks = tuple(replace(series, ended_wall_ns=None) for series in run.ranks)
    live = LiveRun(name="run", meta=run.meta)
    live.take_series(ranks, {})
    copy = snapshot(live, select(live))
    document = ledger_document(copy.accounts, copy.meta, ())
    assert document is not None
    whole = ledger_of(replace(run, ranks=ranks), now_ns=time.time_ns())
    assert whole is not None
    for part in ("start_up", "compile", "training", "evaluation", "checkpoint", "lost", "restart", "shutdown"):
        assert document["parts"][part] == pytest.approx(whole.parts[part], abs=0.002), part
    assert (document["active"], document["restarts"], document["attempts"][0]["steps"]) == (True, 0, 90)
    live.judge(replace(live.judged, goodput=document))
    figures = figures_of(live, status="running", wall_ns=0, findings=(), throughput=None)
    assert figures.goodput == document["goodput"]
    assert figures.goodput_seconds == document["parts"]
    live.partial = True
    assert snapshot(live, select(live)).accounts is None
