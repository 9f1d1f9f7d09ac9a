"""``stepscope sql``."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from rings import RingStream, write_steps

from stepscope.cli.main import main, run_command
from stepscope.cli.output import format_table
from stepscope.errors import NotARun, UsageError
from stepscope.records.identity import RankIdentity
from stepscope.store.create import create_run
from stepscope.store.sealed import sql

QUERY = "select step, step / 2 as half, null as nothing, 'a,b' as text from steps order by step limit 2"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    paths = create_run(tmp_path / "runs", "mine", ["x"], sessions=tmp_path / "s")
    who = RankIdentity(host=platform.node(), pid=os.getpid())
    ring = RingStream(paths.session / f"{os.getpid()}.ring", who)
    write_steps(ring, 3)
    ring.close()
    return paths.run_dir


def test_a_table_csv_and_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["sql", str(run_dir), QUERY]) == 0
    assert capsys.readouterr().out == (
        "step  half  nothing  text\n"
        "────  ────  ───────  ────\n"
        "   0     0           a,b\n"
        "   1   0.5           a,b\n"
        "(2 rows)\n"
    )  # fmt: skip
    assert run_command(["sql", "--csv", str(run_dir), QUERY]) == 0
    assert capsys.readouterr().out == 'step,half,nothing,text\n0,0.0,,"a,b"\n1,0.5,,"a,b"\n'
    assert run_command(["sql", "--json", str(run_dir), QUERY + " offset 1"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"step": 1, "half": 0.5, "nothing": None, "text": "a,b"},
        {"step": 2, "half": 1.0, "nothing": None, "text": "a,b"},
    ]


def test_a_run_by_its_name_and_the_newest_one(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count = "select count(*) as n from steps"
    with monkeypatch.context() as patch:
        patch.chdir(run_dir.parents[1])
        assert run_command(["sql", "mine", count]) == 0
        assert capsys.readouterr().out == "n\n─\n3\n(1 row)\n"
        assert run_command(["sql", "--csv", count]) == 0
        assert capsys.readouterr() == ("n\n3\n", "stepscope: using runs/mine, the newest run\n")
        with pytest.raises(UsageError, match=r'^no query: stepscope sql mine "select …"'):
            run_command(["sql", "mine"])


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("select nope from steps", r'SQL: Binder Error: Referenced column "nope" not found'),
        ("select * from nope", "SQL: Catalog Error: Table with name nope does not exist!"),
        ("this is no sql", "SQL: Parser Error"),
        ("copy steps to '/tmp/x.csv'", "SQL: COPY is not allowed: queries cannot write files"),
    ],
)
def test_a_wrong_query_is_one_clear_line(run_dir: Path, query: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        run_command(["sql", str(run_dir), query])
    assert "\n" not in str(caught.value)


ENDLESS = "select count(*) from range(1000000000000) where range % 7 = 3"


def test_a_query_without_end_is_ended(run_dir: Path) -> None:
    with pytest.raises(UsageError, match=r"^SQL: the query took longer than 50\.0 ms \(see --timeout\)$"):
        run_command(["sql", str(run_dir), ENDLESS, "--timeout", "0.05"])
    with pytest.raises(UsageError, match=r"^SQL: the query took longer than 50\.0 ms"):
        run_command(["sql", str(run_dir), "select * from range(1000000000000)", "--timeout", "0.05"])


def test_a_result_that_does_not_fit_into_memory(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "MOST_ROWS", 50_000)
    with pytest.raises(
        UsageError, match=r"^SQL: the result has more than 50,000 rows; aggregate them, or add a LIMIT$"
    ):
        run_command(["sql", str(run_dir), "select * from range(1000000000000)"])


def test_ctrl_c_ends_a_query(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DuckDB itself does not hear the signal until the query is over."""
    begun = sql._execute

    def execute(con: Any, *arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return begun(con, *arguments)

    monkeypatch.setattr(sql, "_execute", execute)
    monkeypatch.setattr(sys, "argv", ["stepscope", "sql", str(run_dir), ENDLESS, "--timeout", "0"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(NotARun, match="is not a run"):
        run_command(["sql", str(tmp_path), "select 1"])


def test_table_cells_line_up_whatever_they_hold() -> None:
    assert format_table(["n", "verdict"], [["1", "Rank 2 is slow"], ["22", "日本日本日本"]], width=14) == (
        "n   verdict\n"
        "──  ──────────\n"
        "1   Rank 2 is…\n"
        "22  日本日本…"
    )  # fmt: skip
    assert format_table(["n", "verdict"], [["1", "Rank 2 is slow"]], width=3).endswith("\n1  Rank 2…")
    rows = [["日本", "1"], ["a\nb\x1b[31m", "22"], ["é", ""]]
    assert format_table(["name", "n"], rows, numeric=[1]) == (
        "name           n\n"
        "────────────  ──\n"
        "日本           1\n"
        "a\\nb\\x1b[31m  22\n"
        "é"
    )  # fmt: skip
