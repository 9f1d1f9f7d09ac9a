"""``stepscope trace`` writes beside what it reads, never over it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.traces import MadeTrace
from page_files import data_in

from stepscope.cli.main import run_command
from stepscope.errors import UsageError


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    made = MadeTrace(rank=0)
    made.op("aten::mm", 0, 5)
    made.launched("gemm", at=1, start=3, dur=9)
    (tmp_path / "in").mkdir()
    return made.write(tmp_path / "in" / "a.json")


@pytest.mark.usefixtures("small_page")
@pytest.mark.parametrize("option", ["--html", "--perfetto"])
@pytest.mark.parametrize("name", ["in/a.json", "in/../in/a.json", "link.json", "hard.json"])
def test_an_input_is_no_output(option: str, name: str, trace: Path, tmp_path: Path) -> None:
    """Given by name or in a folder, reached by any name."""
    before = trace.read_bytes()
    (tmp_path / "link.json").symlink_to(trace)
    os.link(trace, tmp_path / "hard.json")
    for given in (trace, trace.parent):
        with pytest.raises(UsageError, match="is an input file and would be overwritten"):
            run_command(["trace", str(given), option, str(tmp_path / name)])
    with pytest.raises(UsageError, match="is an input file and would be overwritten"):
        run_command(["trace", str(tmp_path / "hard.json"), "--against", str(trace), option, str(tmp_path / name)])
    assert trace.read_bytes() == before


def test_nor_is_it_a_table(trace: Path, tmp_path: Path) -> None:
    before = trace.read_bytes()
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "kernels.csv").symlink_to(trace)
    for folder in (tmp_path / "tables", trace):
        with pytest.raises(UsageError):
            run_command(["trace", str(trace), "--csv", str(folder)])
    assert trace.read_bytes() == before


def test_half_a_file_replaces_nothing(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "all.json"
    out.write_text("before")

    def fails(traces: Any, clocks: Any, out: Path, **more: Any) -> None:
        out.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stepscope.traces.exports.write_perfetto", fails)
    with pytest.raises(UsageError, match=r"cannot write .*all\.json: No space left on device"):
        run_command(["trace", str(trace), "--perfetto", str(out)])
    assert out.read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"in", "all.json"}


@pytest.mark.usefixtures("small_page")
def test_a_link_stays_one(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.html").write_text("before")
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    assert run_command(["trace", str(trace), "--html", str(tmp_path / "link.html")]) == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("name", [pytest.param("all.json", marks=pytest.mark.soak), "all.json.gz"])
def test_our_own_timeline_is_no_rank(
    name: str, trace: Path, capsys: pytest.CaptureFixture[str], run_stepscope: Callable[..., Any]
) -> None:
    """In the folder it is passed over, again and again; by its name it is refused."""
    out = trace.parent / name
    for _ in range(2):
        assert run_command(["trace", str(trace.parent), "--json", "--perfetto", str(out)]) == 0
        document = json.loads(capsys.readouterr().out)
        assert [file["path"] for file in document["files"]] == [str(trace)]
    assert document["notices"] == [f"skipped, not a trace (or a --perfetto timeline): {out}"]
    for command in (["trace", out], ["sql", out, "select 1"]):
        done = run_stepscope(*command)
        assert (done.code, done.stdout) == (3, "")
        assert done.stderr == (
            f"stepscope: {out}: is a timeline written by --perfetto; read the traces it was made from\n"
        )


@pytest.mark.usefixtures("small_page")
def test_what_is_no_file_is_written_to(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["trace", str(trace), "--json", "--html", "/dev/null"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert json.loads(shown.out)["schema"] == 1
    assert not Path("/dev/null").is_file()


def test_what_if_of_nothing(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["op:nosuch=2x", "kernel:gem=2x", "kernel:gemm=2x", "op:aten::mm=0.5x", "comm=0"]
    assert run_command(["trace", str(trace), "--json", *(f"--what-if={change}" for change in words)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    rows = json.loads(shown.out)["what_if"]["rows"]
    assert [(row["change"], row["remark"]) for row in rows] == [
        ("op:nosuch=2x", "matches nothing"),
        ("kernel:gem=2x", "matches nothing"),
        ("kernel:gemm=2x", ""),
        ("op:aten::mm=0.5x", ""),
        ("comm=0", "matches nothing"),
    ]
    assert [row["gain_share"] for row in rows[:2]] == [0, 0]
    assert rows[3]["gain_share"] < 0, "twice as long"
    assert run_command(["trace", str(trace), "--json", "--what-if", "kernel:gemm=2x"]) == 0
    assert "remark" not in json.loads(capsys.readouterr().out)["what_if"]["columns"]
    with pytest.raises(UsageError, match=r"^what-if 'rank:9=peers': no trace for rank 9$"):
        run_command(["trace", str(trace), "--what-if", "rank:9=peers"])


def test_paths_after_options(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = MadeTrace(rank=1)
    made.op("aten::mm", 0, 5)
    other = str(made.write(tmp_path / "b.json"))
    assert run_command(["trace", str(trace), "--json", other]) == 0
    assert [file["rank"] for file in json.loads(capsys.readouterr().out)["files"]] == [0, 1]
    with pytest.raises(UsageError, match="unknown option: --jsom; did you mean --json"):
        run_command(["trace", str(trace), "--jsom", other])
    query = "select rank from ranks order by rank"
    for words in ([str(trace), other, query, "--csv"], [str(trace), "--csv", other, query]):
        assert run_command(["sql", *words]) == 0
        assert capsys.readouterr().out == "rank\n0\n1\n"


def test_sql_without_a_query(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^no query: stepscope sql .*a\.json \"select …\""):
        run_command(["sql", str(trace)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty contains no trace"):
        run_command(["sql", str(trace), str(tmp_path / "empty"), "select 1"])


@pytest.mark.usefixtures("small_page")
@pytest.mark.parametrize("words", [["--html", "no/x"], ["--perfetto", "no/x"], ["--csv", "file"]], ids=lambda w: w[0])
def test_a_place_that_cannot_be_written_is_a_wrong_command(trace: Path, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError):
        run_command(["trace", str(trace), words[0], str(tmp_path / words[1])])


@pytest.mark.usefixtures("small_page")
def test_mixed_files_are_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        made = MadeTrace(rank=number, world_size=number + 1)
        made.op("aten::mm", 0, 5)
        made.write(tmp_path / f"{number}.json")
    page = tmp_path / "page.html"
    assert run_command(["trace", str(tmp_path), "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("▲ These files do not seem to belong to one job: their world sizes are 1 and 2.")
    assert "1 event ·" in text
    (notice,) = data_in(page.read_bytes())[0]["report"]["notices"]
    assert notice.startswith("These files do not seem to belong to one job")
