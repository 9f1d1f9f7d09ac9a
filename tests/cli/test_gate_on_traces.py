"""``stepscope gate --trace``: limits on traces, their exit codes, text, JSON and Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes.traces import MadeTrace
from trace_jobs import MadeJob

from stepscope.cli.main import run_command
from stepscope.errors import StepscopeError, TraceError, UsageError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPSCOPE_CACHE_GB", "0")
    return tmp_path


@pytest.fixture
def job(here: Path) -> Path:
    """Two ranks; a step is 4 layers of two kernels of 200 µs, rank 1's of 250 µs, and 20 µs of transfer."""
    folder = here / "traces"
    folder.mkdir()
    made = MadeJob(world=2, layers=4, slower=lambda rank, step, layer: 50.0 if rank == 1 else 0.0).ranks()
    for rank, trace in enumerate(made):
        trace.memory(10, 1 << 20, (rank + 1) << 30, 4 << 30)
        trace.write(folder / f"{rank}.json")
    return folder


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--max-step", "3ms"), 0, "✔ Pass: On rank "),
        (("--max-step", "1ms"), 1, "✖ Fail: On rank "),
        (
            ("--max-kernel", "gemm*=2ms"),
            0,
            "✔ Pass: On rank 1 kernels gemm* take 2.00 ms of a step, within the limit of 2",
        ),
        (
            ("--max-kernel", "gemm*=1999us"),
            1,
            "✖ Fail: On rank 1 kernels gemm* take 2.00 ms of a step, above the limit",
        ),
        (("--max-kernel", "none=1ms"), 2, "▲ Cannot tell: No kernel is named none (rank 0)."),
        (("--max-memory", "2GiB"), 0, "✔ Pass: On rank 1 the peak of device memory is 2.0"),
        (("--max-memory", "1.5GiB"), 1, "✖ Fail: On rank 1 the peak of device memory is 2.0"),
        (("--max-idle", "50%"), 0, "✔ Pass: On rank "),
        (("--max-exposed", "60%", "--max-comm", "0.1%"), 1, "✖ Fail: On rank 0 communication takes"),
        (("--max-memory", "9GiB", "--max-kernel", "none=1ms"), 2, "▲ Cannot tell: No kernel"),
        (("--max-memory", "1GiB", "--max-kernel", "none=1ms"), 1, "✖ Fail: On rank 1 the peak"),
    ],
)
def test_exit_codes(job: Path, words: Sequence[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["gate", "--trace", str(job), *words]) == code
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith(text)


def test_json(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--trace",
        "traces/0.json",
        "--json",
        "--max-kernel",
        "gemm_bf16=1ms",
        "--max-memory",
        "9GB",
        "traces/1.json",
    ]
    assert run_command(["gate", *words]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["result"], document["exit_code"]) == ("trace_gate", "fail", 1)
    assert document["ranks"] == [0, 1]
    assert document["steps"] == 3
    assert [(check["name"], check["result"], check["value"], check["rank"]) for check in document["checks"]] == [
        ("memory", "pass", 2 << 30, 1),
        ("kernel", "fail", 2_000_000, 1),
    ]


def test_markdown_shows_names_as_they_are(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.launched("<b>|evil`", at=1, start=2, dur=50)
    made.write(here / "a.json")
    assert run_command(["gate", "--trace", "a.json", "--markdown", "--max-kernel", "<b>|evil`=10us"]) == 1
    assert "&lt;b&gt;\\|evil\\` take 50.0 µs of a step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--max-step", "1s"), "call prof.step()"),
        (("--max-idle", "1%"), "no work on a device"),
        (("--max-memory", "1GB"), "no work on a device"),
        (("--max-kernel", "*=1s"), "call prof.step()"),
    ],
)
def test_what_a_trace_lacks(here: Path, words: Sequence[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = MadeTrace()
    made.op("aten::mm", 0, 10)
    made.write(here / "a.json")
    assert run_command(["gate", "--trace", "a.json", "--json", *words]) == 2
    assert why in json.loads(capsys.readouterr().out)["text"]


def test_memory_that_was_not_recorded(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.launched("gemm", at=1, start=2, dur=50)
    made.write(here / "a.json")
    assert run_command(["gate", "--trace", "a.json", "--max-memory", "1GB"]) == 2
    assert "profile_memory=True" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "words",
    [("--max-slowdown", "2%"), ("--max-idle", "5%", "--max-slowdown", "2%"), ("--unit", "ms"), ("--html", "a.html")],
)
def test_options_of_runs_are_not_for_traces(job: Path, words: Sequence[str]) -> None:
    wrong = next(word for word in words if word in ("--max-slowdown", "--unit", "--html"))
    with pytest.raises(UsageError, match=f"not for --trace: {wrong}; limits on traces are --max-step"):
        run_command(["gate", "--trace", "traces", *words])


def test_an_unreadable_file_leaves_it_open(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job / "2.json").write_text('{"traceEvents": [{"ph": ')
    assert run_command(["gate", "--trace", str(job), "--max-step", "1s"]) == 2
    assert "1 file could not be read" in capsys.readouterr().out
    assert run_command(["gate", "--trace", str(job), "--max-step", "1ns"]) == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--trace", "none", "--max-idle", "1%"), UsageError),
        (("--trace", "traces"), UsageError),
        (("--trace", "traces", "--max-idle", "a lot"), UsageError),
        (("--trace", "traces", "--max-step", "5"), UsageError),
        (("--trace", "traces", "--max-step", "0ms"), UsageError),
        (("--trace", "traces", "--max-memory", "5%"), UsageError),
        (("--trace", "traces", "--max-kernel", "=5ms"), UsageError),
        (("--trace", "traces", "--max-kernel", "gemm"), UsageError),
        (("--trace", "traces", "--max-idle", "5%", "--record"), UsageError),
        (("base", "new", "--max-idle", "5%"), UsageError),
        (("base", "new", "--max-memory", "5GiB"), UsageError),
        (("--trace", "bad.json", "--max-idle", "5%"), TraceError),
    ],
)
def test_bad_input_never_passes(here: Path, job: Path, words: Sequence[str], error: type[StepscopeError]) -> None:
    (here / "bad.json").write_text("{}")
    with pytest.raises(error) as raised:
        run_command(["gate", *words])
    assert raised.value.exit_code == 3
    assert "\n" not in str(raised.value)
