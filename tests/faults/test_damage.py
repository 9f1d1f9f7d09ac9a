"""Run directories that are cut off, foreign or not there, and rings of another version: one clear line each."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepscope.cli.main import main, run_command
from stepscope.errors import StepscopeError

pytestmark = pytest.mark.faults


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def test_what_is_no_run_and_what_was_cut_off(
    start: Callable[..., Any],
    toy: Path,
    run_stepscope: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    patient = start("run", "--quiet", "--name", "good", toy, "--steps", "15", "--pause-ms", "10")
    patient.wait_for("step 5 ")
    # A ring that another version of Stepscope wrote, in the same session.
    (ring,) = patient.session().glob("*.ring")
    other = bytearray(ring.read_bytes()[:8192])
    other[8:12] = struct.pack("<I", 99)
    (patient.session() / "1.ring").write_bytes(other)
    assert patient.finish().code == 0
    good = patient.run_dir()
    summary = json.loads((good / "summary.json").read_text())
    assert (summary["steps"]["total"], summary["world_size"], summary["status"]) == (15, 1, "finished")
    (notice,) = set(summary["notices"])
    assert notice.startswith(f"A ring could not be read: {patient.session()}/1.ring has ring layout 99;")
    shutil.rmtree(json.loads((good / "run.json").read_text())["session"])  # the foreign ring kept it

    runs = good.parent
    bad = {name: shutil.copytree(good, runs / name) for name in ("meta", "parquet", "ranks", "summary")}
    cut(bad["meta"] / "run.json")
    cut(bad["parquet"] / "steps.parquet")
    cut(bad["ranks"] / "ranks.json")
    cut(bad["summary"] / "summary.json")
    (runs / "foreign").mkdir()
    (runs / "foreign" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("no folder")
    expected = {
        bad["meta"]: "run.json is damaged or cut off: it is not valid JSON",
        bad["parquet"]: "steps.parquet is damaged: ",
        bad["ranks"]: "ranks.json is damaged",
        runs / "foreign": "foreign is not a run: it contains no run.json",
        tmp_path / "nowhere": "nowhere does not exist",
    }
    refused = {(command, path): said for path, said in expected.items() for command in ("report", "sql")}
    refused["report", tmp_path / "file"] = "file does not exist"
    refused["sql", tmp_path / "file"] = "file: is not JSON"  # a file may be one
    for (command, path), said in refused.items():
        with pytest.raises(StepscopeError) as caught:
            run_command([command, str(path), *(["select 1"] if command == "sql" else [])])
        assert (caught.value.exit_code, *capsys.readouterr()) == (3, "", "")
        (line,) = str(caught.value).splitlines()
        assert said in line
    done = run_stepscope("report", bad["parquet"])  # as a user sees it
    assert (done.code, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert done.stderr.startswith("stepscope: ")
    assert run_command(["report", "--json", str(bad["summary"])]) == 0
    assert json.loads(capsys.readouterr().out)["steps"]["total"] == 15
    assert json.loads((bad["summary"] / "summary.json").read_text())["steps"]["total"] == 15
    assert run_command(["list", str(runs)]) == 0
    listed = capsys.readouterr()
    assert "run.json is damaged or cut off" in listed.err
    assert listed.out.count("good") >= 1
    assert not (runs / "foreign" / "summary.json").exists()


def test_a_line_end_in_the_name_of_a_run_does_not_split_an_error_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "runs" / "a\nstepscope: all is well\t\x1b[31m"
    run_dir.mkdir(parents=True)
    (run_dir / "run.json").write_text("{")
    for words in (["report", str(run_dir)], ["sql", str(run_dir), "select 1"], ["delete", "--yes", str(run_dir)]):
        monkeypatch.setattr(sys, "argv", ["stepscope", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert (ended.value.code, printed.out, printed.err.count("\n")) == (3, "", 1), printed
        assert r"a\nstepscope: all is well\t\x1b[31m" in printed.err
    assert run_command(["list", str(run_dir.parent)]) == 0
    assert capsys.readouterr().err.count("\n") == 1


def test_a_machine_that_went_down(
    start: Callable[..., Any], toy: Path, commands: Any, run_stepscope: Callable[..., Any]
) -> None:
    """Everything at once, the memory too, and the last frame half written."""
    patient = start("run", "--quiet", toy, "--steps", "10000", "--pause-ms", "5")
    patient.wait_for("step 20 ")
    patient.until(lambda: [path for path in (patient.run_dir() / "steps").glob("*.seg") if path.stat().st_size])
    shutil.rmtree(patient.session())
    everything = commands.survivors()
    for process in everything:
        process.suspend()  # or the agent would still be told of the rank's death
    for process in everything:
        os.kill(process.pid, signal.SIGKILL)
    psutil.wait_procs(everything, timeout=10)
    patient.finish()
    (segment,) = (patient.run_dir() / "steps").glob("*.seg")
    os.truncate(segment, segment.stat().st_size - 5)
    with (patient.run_dir() / "events.jsonl").open("a") as events:
        events.write('{"schema":1,"wall_ns":17')
    done = run_stepscope("report", patient.run_dir())
    assert done.code == 0, done.stderr
    summary = patient.summary()
    assert summary["status"] == "crashed"
    notices = " ".join(summary["notices"])
    for part in (
        "was cut off or damaged",
        "The rings of rank 0 are gone and were not read completely",
        "The agent died before the run ended",
        "The launcher died before it could record how the run ended.",
        "1 lines of events.jsonl could not be read.",
    ):
        assert part in notices
    assert json.loads((patient.run_dir() / "run.json").read_text())["sealed"] is True
    listed = run_stepscope("list", "--json", patient.run_dir().parent)
    assert [row["status"] for row in json.loads(listed.stdout)] == ["crashed"]
