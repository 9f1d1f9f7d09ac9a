"""SQL over a run: the same answers sealed or not, and no way out of the tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rings import step_phases, write_steps

from stepscope.errors import NotARun, UsageError
from stepscope.records.finding import Finding
from stepscope.store.create import RunPaths
from stepscope.store.documents import end_run, save_summary
from stepscope.store.file_io import append_jsonl
from stepscope.store.sealed.seal import seal
from stepscope.store.sealed.sql import query

FINDING = Finding(
    kind="straggler", severity="warning", title="Rank 1 is slow", ranks=(1,), phase="forward", confidence=0.9
).to_dict()


@pytest.fixture(params=["open", "sealed"])
def run(request: pytest.FixtureRequest, paths: RunPaths, rings: Any, drain: Callable[..., Any]) -> Path:
    first, second = rings(0), rings(1, device="cuda", device_timed=True)
    second.set_phase_name(9, "my phase")
    write_steps(first, 10)
    write_steps(second, 5, device=True)
    samples = [
        {"wall_ns": 1, "kind": "host", "cpu_percent": 5.0},
        {"wall_ns": 2, "kind": "gpu", "throttle_reasons": ["a"]},
    ]
    append_jsonl(paths.run_dir / "samples.jsonl", samples)
    append_jsonl(paths.run_dir / "events.jsonl", [{"schema": 1, "wall_ns": 3, "event": "warning", "message": "m\n"}])
    save_summary(paths.run_dir, {"schema": 1, "findings": [FINDING]}, "text")
    end_run(paths.run_dir, exit_code=0, status="finished")
    if request.param == "sealed":
        seal(paths.run_dir)
    return paths.run_dir


def test_steps(run: Path) -> None:
    result = query(run, "select rank, count(*) as n, sum(forward_ns) from steps group by rank order by rank")
    assert result.columns == ("rank", "n", "sum(forward_ns)")
    assert result.rows == (
        (0, 10, sum(step_phases(step)[3] for step in range(10))),
        (1, 5, sum(step_phases(step)[3] for step in range(5))),
    )


def test_every_phase_is_a_column_and_device_times_may_be_missing(run: Path) -> None:
    names = [row[0] for row in query(run, "describe steps").rows]
    assert names[:5] == ["rank", "attempt", "step", "start_ns", "wall_ns"]
    phases = [name for name in names if name.endswith("_ns") and not name.startswith(("device_", "ddp_", "between_"))][
        2:
    ]
    assert (phases[0], phases[-2:]) == ("input_ns", ["phase_my_phase_ns", "other_ns"])
    assert {"comm_ns", "eval_ns", "phase_my_phase_ns", "device_forward_ns", "device_phase_my_phase_ns"} <= set(names)
    assert query(run, "select max(between_ns) from steps").rows == ((0,),)
    counts = "select rank, count(device_wall_ns), max(comm_ns) from steps group by rank order by rank"
    assert query(run, counts).rows == ((0, 0, 0), (1, 5, 0))


def test_the_other_tables(run: Path) -> None:
    assert query(run, "select kind, cpu_percent, throttle_reasons from samples order by wall_ns").rows == (
        ("host", 5.0, None),
        ("gpu", None, ["a"]),
    )
    assert query(run, "select event, wall_ns, rank, data from events").rows == (
        ("warning", 3, None, '{"message": "m\\n"}'),
    )
    assert query(run, "select kind, ranks, confidence from findings").rows == (("straggler", "[1]", 0.9),)
    ranks = "select rank, device, device_timed, state, steps from ranks order by rank"
    assert query(run, ranks).rows == ((0, "cpu", False, "vanished", 10), (1, "cuda", True, "vanished", 5))


FORBIDDEN = (
    "copy (select 1) to '{tmp}/out.csv'",
    "copy steps to '{tmp}/out.parquet' (format parquet)",
    "select * from read_csv('{tmp}/secret.csv')",
    "select * from '{tmp}/secret.csv'",
    "select * from read_text('/etc/hostname')",
    "select * from glob('/*')",
    "attach '{tmp}/other.db' as other",
    "export database '{tmp}/all'",
    "install httpfs",
    "load httpfs",
    "set enable_external_access = true",
    "set temp_directory = '{tmp}'",
    "reset lock_configuration",
    "pragma enable_external_access = true",
)


def test_the_database_is_shut(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("a\n1\n")
    before = sorted(tmp_path.rglob("*"))
    sealed = (run / "steps.parquet").exists()
    for statement in FORBIDDEN if sealed else FORBIDDEN[::4]:  # both are queried through one connection
        with pytest.raises(UsageError, match=r"^SQL: ") as caught:
            query(run, statement.format(tmp=tmp_path))
        assert "\n" not in str(caught.value), statement
        assert sorted(tmp_path.rglob("*")) == before, statement


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("select * from columns", "does not exist"),  # a variable of ours
        ("select wal_ns from steps", r'^SQL: Binder Error: Referenced column "wal_ns" not found in FROM clause!'),
        ("selec 1", r"^SQL: Parser Error"),
        *((empty, r"^SQL: the query is empty$") for empty in ("", "  \n", ";", "-- nothing")),
        ("create table a as select 1; select * from a", "^SQL: only one statement is allowed; the query has 2$"),
    ],
)
def test_a_wrong_query_is_one_clear_line(paths: RunPaths, text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        query(paths.run_dir, text)


def test_differences_may_be_negative(run: Path) -> None:
    types = {row[1] for row in query(run, "describe steps").rows}
    assert types == {"BIGINT"}
    rows = query(run, "select min(wall_ns - lag) from (select wall_ns, lag(wall_ns) over () as lag from steps)").rows
    assert rows[0][0] < 0


def test_a_statement_without_rows(paths: RunPaths) -> None:
    assert query(paths.run_dir, "create table mine as select 1").rows == ((1,),)


def test_a_note_is_what_the_user_said(paths: RunPaths, rings: Any) -> None:
    ring = rings(0)
    ring.note(3, b'{"loss":1.5}')
    ring.note(4, b'{"stage":"warm","on":true,"bad":NaN,"lr":1}')
    assert query(paths.run_dir, "select rank, step, data from events where event = 'note' order by step").rows[0] == (
        *(0, 3),
        '{"values": {"loss": 1.5}}',
    )
    # Only numbers are metrics.
    assert query(paths.run_dir, "select * from metrics order by step").rows == ((0, 3, "loss", 1.5), (0, 4, "lr", 1.0))


def test_an_empty_run_has_empty_tables(paths: RunPaths) -> None:
    for table in ("steps", "samples", "events", "metrics", "findings", "ranks"):
        assert query(paths.run_dir, f"select * from {table}").rows == ()


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(NotARun):
        query(tmp_path, "select 1")
