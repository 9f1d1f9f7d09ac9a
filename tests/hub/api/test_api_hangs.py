"""``/hangs``: what several hosts saw is one standstill, as in the summary; and the hub tells of it while it lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fakes.cluster import Cluster, slow_at
from hang_jobs import Job
from hub_feed import sidecar_of, taken_of

from stepscope.hangs.evidence import EvidenceFile
from stepscope.hangs.judge import judge
from stepscope.hangs.report import past_if_over
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.rules import RuleLoop
from stepscope.hub.runs import Runs
from stepscope.records.hang import HangRecord
from stepscope.store.live.failures import write_evidence, write_hang
from stepscope.store.live.ring_files import RingSidecar
from tests.hub.run_parts import record

S = 10**9
JOB = Job(ranks=4, step=60).alone(3)


def write(run_dir: Path, host: str, ranks: range) -> HangRecord:
    """Both files of a host, which knows its own ranks."""
    whole = JOB.evidence()
    own = replace(whole, host=host, ranks=tuple(rank for rank in whole.ranks if rank.rank in ranks))
    found = judge(own, number=1, declared_wall_ns=112 * S, stopped_wall_ns=100 * S)
    assert isinstance(found, HangRecord)
    write_hang(run_dir, found)
    write_evidence(run_dir, EvidenceFile(number=1, stopped_wall_ns=100 * S, gathered_wall_ns=112 * S, evidence=own))
    return found


def test_hangs_of_several_hosts_are_one_as_in_the_summary(serve: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    run_dir = record(folder, "wide", Cluster(ranks=4, steps=20).run())
    alone = [write(run_dir, "a", range(2)), write(run_dir, "b", range(2, 4))]
    (run_dir / "hangs" / "c-1.json").write_text("{")
    hub = serve(lambda: Runs.of_folder(folder))
    document = hub.get("/api/v1/runs/wide/hangs").json
    (hang,) = document["hangs"]
    assert document["unread"] == ["hangs/c-1.json"]
    assert ([culprit["rank"] for culprit in hang["culprits"]], hang["victims"]) == ([3], [0, 1, 2])
    assert (hang["hosts"], hang["file"], hang["steps"]) == (["a", "b"], "hangs/b-1.json", [60, 60])
    assert hang["title"].endswith(
        "it slept at train.py:41 (time.sleep(999)); ranks 0–2 waited for it."
    )  # the run is over
    assert [part["title"] for part in hang["parts"]] == [past_if_over(one, over=True).title for one in alone]
    assert [(rank["rank"], rank["host"]) for rank in hang["ranks"]] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    (told,) = hub.get("/api/v1/runs/wide/summary?keys=hangs,nothing").json["summary"].pop("hangs")
    assert told == {key: value for key, value in hang.items() if key not in ("schema", "ranks", "flight", "text")}
    assert (hang["text"]["heading"], hang["text"]["waiting"]) == ("The job hung", "Ranks 0–2")


def test_only_what_is_asked_of_a_summary(hub: Any) -> None:
    whole = hub.get("/api/v1/runs/demo/summary").json["summary"]
    some = hub.get("/api/v1/runs/demo/summary?keys=notices,errors").json
    assert some["summary"] == {"errors": whole["errors"], "notices": whole["notices"]}
    assert hub.get("/api/v1/runs/demo/summary?keys=").json["summary"] == whole


def test_a_hang_is_told_although_no_step_is_made_and_withdrawn_when_it_is_over(tmp_path: Path) -> None:
    cluster = Cluster(ranks=4, steps=60, faults=(slow_at(2, "forward", 40.0),))

    async def main() -> list[list[str]]:
        live = LiveRun(run_dir=tmp_path)
        rule_loop = RuleLoop(live)
        for rank_series in cluster.series():
            live.ring(RingSidecar.from_dict(sidecar_of(rank_series, state="running")), node="0")
        seen = []

        async def look() -> None:
            await rule_loop.evaluate()
            seen.append([finding.kind for finding in live.judged.findings])

        for first in (0, 20, 40):
            live.rows(taken_of(cluster.series(), range(first, first + 20)))
            await rule_loop.evaluate()
        await look()
        hang = write(tmp_path, "node0", range(4))
        await look()
        at = live.judged.evaluations
        await look()
        assert live.judged.evaluations == at  # nothing came: nothing is judged
        write_hang(tmp_path, replace(hang, over="recovered", over_wall_ns=130 * S))
        await look()
        return seen

    before, during, still, after = asyncio.run(main())
    assert before == ["compute_straggler"]
    assert during == still == ["hang_missing_collective", "compute_straggler"]
    assert "hang_missing_collective" not in after
    assert after[0] == "compute_straggler"
