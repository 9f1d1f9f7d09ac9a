"""The benchmarks' own arithmetic, and one short run of their loop."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import comm_overhead
import harness
import paced
import proctree
import pytest

BARE = harness.BareTool(name="bare", python=sys.executable, baseline="bare")
STEPSCOPE = harness.StepscopeTool(name="stepscope", python=sys.executable, baseline="bare")


def rows_of(*cpu_us: float) -> list[harness.Row]:
    return [
        {**dict.fromkeys((*harness.PAIRED, *harness.ALONE), 0.0), "cpu_us": value, "loss": "0x1p0"} for value in cpu_us
    ]


def test_what_a_tool_adds_is_the_median_of_differences_within_repeats() -> None:
    # The machine was slow in the second repeat, for both: the difference of medians would say 500 or more.
    rows = {"bare": rows_of(100, 900, 110), "stepscope": rows_of(120, 915, 140)}
    assert harness.added_by(STEPSCOPE, rows)["cpu_us"] == 20


def test_table_has_a_column_per_tool_and_one_for_what_it_adds(capsys: pytest.CaptureFixture[str]) -> None:
    harness.print_size("size 1", [BARE, STEPSCOPE], {"bare": rows_of(100), "stepscope": rows_of(125)})
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["bare", "stepscope", "adds", "(least", "to", "most)"]
    row = next(line for line in lines if "cpu_us" in line)
    assert row.split() == ["cpu_us", "100.0", "125.0", "+25.0", "(+25", "to", "+25)"]
    assert lines[-1] == "  losses: bit-identical"


def test_a_tool_that_changes_the_result_is_called_out(capsys: pytest.CaptureFixture[str]) -> None:
    changed = [{**rows_of(1)[0], "loss": "0x1.8p0"}]
    harness.print_size("size 1", [BARE, STEPSCOPE], {"bare": rows_of(1), "stepscope": changed})
    assert "DIFFER" in capsys.readouterr().out


def arguments(*extra: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    harness.add_tool_arguments(parser)
    return parser.parse_args(extra)


def test_tools_are_compared_with_a_bare_run_by_their_own_interpreter() -> None:
    tools = harness.tools_of(arguments("--tools", "stepscope", "--traceml-python", "other/python"))
    assert [(tool.name, tool.python, tool.baseline) for tool in tools] == [
        ("bare", sys.executable, "bare"),
        ("stepscope", sys.executable, "bare"),
        ("bare-traceml", "other/python", "bare-traceml"),
        ("traceml", "other/python", "bare-traceml"),
    ]


def test_unknown_tool_is_refused() -> None:
    with pytest.raises(SystemExit, match="unknown tools: perf"):
        harness.tools_of(arguments("--tools", "bare,perf"))


def test_stepscope_disk_counts_step_data_only(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    (run / "steps").mkdir(parents=True)
    (run / "logs").mkdir()
    (run / "steps" / "a.seg").write_bytes(bytes(100))
    (run / "steps.parquet").write_bytes(bytes(30))
    (run / "logs" / "main.log").write_bytes(bytes(5000))
    assert (STEPSCOPE.running_bytes(tmp_path), STEPSCOPE.sealed_bytes(tmp_path)) == (100, 30)


def test_descendants_see_a_child_and_lose_it_when_it_ends() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.pid in proctree.descendants()
    watch = proctree.TreeWatch()
    assert child.pid in watch.look(training=True)
    child.communicate(b"\n")
    assert child.pid not in proctree.descendants()
    assert watch.beside(training_pid=os.getpid())["beside_mb"] > 1
    assert watch.beside(training_pid=child.pid)["beside_mb"] == sum(
        seen.peak_mb_in_training for pid, seen in watch.seen.items() if pid != child.pid
    )


def test_pace_counts_every_call() -> None:
    calls: list[None] = []
    count, rate = paced.pace(lambda: calls.append(None), rate=2000, seconds=0.02)
    assert count == len(calls) > 0
    assert rate > 0


@pytest.mark.soak
def test_one_bare_run(run_python: object, tmp_path: Path, root: Path) -> None:
    out = tmp_path / "all.json"
    done = run_python(  # type: ignore[operator]
        root / "bench" / "overhead.py", "--tools", "bare", "--sizes", "1", "--steps", "5", "--warm", "2",
        "--repeats", "1", "--json", out,
    )  # fmt: skip
    assert done.code == 0, done.stderr
    assert "losses: bit-identical" in done.stdout
    assert '"threads": 1' in out.read_text()
    assert '"sockets": 0' in out.read_text()


def test_the_price_of_a_collective_is_the_slope_over_their_number() -> None:
    def pairs(*added_us: float) -> list[tuple[harness.Row, harness.Row]]:
        return [({"cpu_us": 100.0}, {"cpu_us": 100.0 + us}) for us in added_us]

    rows = {"explicit-0": pairs(20, 900, 10), "explicit-8": pairs(44, 45, 43), "explicit-32": pairs(116, 117, 0)}
    assert comm_overhead.added(rows["explicit-0"], "cpu_us") == 20
    assert comm_overhead.slope(rows, "cpu_us") == pytest.approx(3.0)
    assert comm_overhead.slope({"ddp-0": pairs(5)}, "cpu_us") is None


@pytest.mark.soak  # near: the slope over collectives above
def test_the_cost_of_hooks_is_measured_inside_a_recorded_process(root: Path) -> None:
    command = [sys.executable, root / "bench" / "hook_costs.py", "--device", "cpu", "--workload", "1", "--pairs", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split("+")[0].split("-")[0].strip() for line in done.stdout.splitlines()[2:]]
    hooks = ["all hooks together", "input", "h2d", "forward", "backward", "optimizer"]
    assert rows == [*hooks, "a look at a few gradients", "a look at all gradients", "keeping clipped norms"]
