"""``stepscope whatif``: what people and programs see."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from stepscope.cli.main import run_command
from stepscope.errors import TraceError, UsageError

META = "trial_name: small\ndp_size: 2\npp_size: 1\nworld_size: 2\n"
ROWS = """
    SELECT lane AS dp_rank, 0 AS stage, lane AS rank, step, optype, start_ts::DOUBLE AS start_ts,
           end_ts - start_ts::DOUBLE AS duration, 0 AS seq_id
    FROM (VALUES
        (0, 'forward-compute', 0, 2), (0, 'backward-compute', 2, 6), (0, 'grads-reduce-scatter', 6, 13),
        (0, 'optimizer', 13, 14),
        (1, 'forward-compute', 0, {slow}), (1, 'backward-compute', {slow}, 12), (1, 'grads-reduce-scatter', 12, 13),
        (1, 'optimizer', 13, 14)
    ) operations(lane, optype, start_ts, end_ts), range(3) steps(step)
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    (tmp_path / "meta.yaml").write_text(META)
    with duckdb.connect() as con:
        con.execute(f"COPY ({ROWS.format(slow=4)}) TO '{tmp_path / 'trace.parquet'}' (FORMAT parquet)")
    return tmp_path / "trace.parquet"


def run(trace: Path, *more: str) -> int:
    return run_command(["whatif", str(trace), "--meta", str(trace.parent / "meta.yaml"), *more])


def test_text(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trace) == 0
    shown = capsys.readouterr()
    assert shown.out == (
        "▲ Stragglers make this job 1.27 times as slow as without them: 14.0 s a step\n"
        "  instead of 11.0 s.\n"
        "  cause      rank 1 of 2 workers: working at the usual pace would save all of\n"
        "             the lost time.\n"
        "\n"
        "             slowdown if only this were slow, and its share of the lost time\n"
        "  workers    rank 1 (dp 1, stage 0)         1.273×  100%  ████████████████████\n"
        "  stages     stage 0                        1.273×  100%  ████████████████████\n"
        "  dp ranks   dp rank 1                      1.273×  100%  ████████████████████\n"
        "  operations backward-compute               1.182×   67%  █████████████▍\n"
        "             forward-compute                1.091×   33%  ██████▋\n"
        "\n"
        "  stage 0    ░░██\n"
        "             data-parallel ranks 0 to 1; █ is 1.27×, ░ near 1\n"
        "\n"
        "  trace      2 workers (2 data-parallel ranks × 1 pipeline stage), 3 steps\n"
    )
    assert shown.err == "", "no progress where nobody looks"


def test_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trace, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [
        "schema", "slowdown", "by_worker", "by_stage", "by_dp_rank", "by_operation", "mw", "ms", "worst_workers",
        "steps", "notes",
    ]  # fmt: skip
    assert found["by_worker"] == pytest.approx({"1": 14 / 11, "0": 1})
    assert found["mw"] == pytest.approx(
        {"trem": 11, "tadd": 14, "tori": 14, "tideal": 11, "rem": 1, "add": 1, "Mw": 1}
    )  # fmt: skip
    assert list(found["ms"]) == ["trem", "tadd", "tori", "tideal", "rem", "add", "Ms"]


def test_a_job_with_nothing_wrong(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with duckdb.connect() as con:
        con.execute(f"COPY ({ROWS.format(slow=4)} WHERE lane = 1) TO '{trace}' (FORMAT parquet)")
    assert run(trace) == 0
    assert capsys.readouterr().out == (
        "✔ No stragglers to speak of: 14.0 s a step, 1.000 times the ideal.\n"
        "\n"
        "  trace      1 worker (1 data-parallel rank × 1 pipeline stage), 3 steps\n"
        "  note       the trace holds 1 of the 2 data-parallel ranks of the job\n"
    )


def test_progress_on_a_terminal(
    trace: Path, capsys: pytest.CaptureFixture[str], show_progress: Callable[[], None]
) -> None:
    show_progress()
    assert run(trace, "--json") == 0
    errors = capsys.readouterr().err
    assert errors.startswith(f"\r\x1b[Kreplaying █{'░' * 23} 1/14")
    assert errors.endswith("\r\x1b[K"), "and wiped"


def test_what_is_missing_is_said(trace: Path) -> None:
    with pytest.raises(UsageError, match="--meta"):
        run_command(["whatif", str(trace)])
    with pytest.raises(TraceError, match=r"none\.parquet does not exist"):
        run(trace.with_name("none.parquet"))
    (trace.parent / "meta.yaml").write_text("dp_size: 2\npp_size: 4\n")
    with pytest.raises(TraceError, match="does not fit the meta file") as error:
        run(trace)
    assert error.value.exit_code == 3
