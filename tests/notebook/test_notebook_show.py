"""``stepscope.show()``: the page in a cell, the summary where there is none.

A small stand-in takes the place of IPython: of it only ``get_ipython`` and ``display`` are used.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.cluster import Cluster, slow_at
from made_runs import record

import stepscope
from stepscope.notebook import cells
from stepscope.notebook.cells import show


class Notebook:
    """What was put into cells."""

    def __init__(self, *, kernel: bool = True) -> None:
        self.shown: list[dict[str, str]] = []
        shell = SimpleNamespace(kernel=object()) if kernel else SimpleNamespace()
        self.get_ipython = lambda: shell
        self.display = SimpleNamespace(display=self._display)

    def _display(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(data)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    made = Notebook()
    monkeypatch.setitem(sys.modules, "IPython", made)  # type: ignore[arg-type]
    return made


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return record(tmp_path / "runs", "night", Cluster(ranks=2, steps=60, faults=(slow_at(1, "input", 30.0),)).run())


def test_the_page_that_lies_in_the_run_is_shown_as_it_is(notebook: Notebook, run_dir: Path) -> None:
    (run_dir / "summary.json").write_text("{}")
    (run_dir / "report.html").write_text('<p title="a">&amp; "quoted"</p>')
    assert show("night", height=500) is None  # type: ignore[func-returns-value]
    (cell,) = notebook.shown
    assert 'srcdoc="&lt;p title=&quot;a&quot;&gt;&amp;amp; &quot;quoted&quot;&lt;/p&gt;"' in cell["text/html"]
    assert 'height="500"' in cell["text/html"]
    assert "allow-same-origin" not in cell["text/html"]
    assert cell["text/plain"].endswith("runs/night")


def test_an_older_page_is_made_anew(notebook: Notebook, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_dir / "report.html").write_text("old")
    (run_dir / "summary.json").write_text("{}")
    os.utime(run_dir / "report.html", (1, 1))

    def made(command: list[str], **_more: Any) -> subprocess.CompletedProcess[str]:
        words = command[command.index("report") :]
        assert words[:4] == ["report", "--quiet", str(Path("runs/night")), "--html"]
        Path(words[4]).write_text("new")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", made)
    show()
    assert 'srcdoc="new"' in notebook.shown[0]["text/html"]


def test_text_where_there_is_no_cell(run_dir: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """In a plain process; a terminal's IPython has no cells either."""
    monkeypatch.setitem(sys.modules, "IPython", Notebook(kernel=False))
    assert not cells.in_notebook()
    show(run_dir)
    assert capsys.readouterr().out.startswith("✖ Rank 1 is 30.0 ms slower than the other rank in input every step")


def test_no_run_is_a_line(notebook: Notebook, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show("evening")
    hint = f"looked for evening and runs/evening in {Path.cwd()}; `stepscope list` shows all runs"
    assert capsys.readouterr().out == f"stepscope: no run named evening: {hint}\n"
    assert notebook.shown == []


def test_a_page_that_cannot_be_made_is_the_summary(
    notebook: Notebook, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(command: list[str], **_more: Any) -> subprocess.CompletedProcess[str]:
        if "--html" in command:
            return subprocess.CompletedProcess(command, 3, "", "stepscope: the page was not built\n")
        return subprocess.CompletedProcess(command, 0, "the summary\n", "")

    monkeypatch.setattr(subprocess, "run", made)
    show(run_dir)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("the summary\n", "stepscope: the page was not built\n")


def test_vs_code_is_known_by_what_it_leaves_and_shows_the_page_with_its_data(
    notebook: Notebook, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in cells.VSCODE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM_PROGRAM", "vscode")  # Jupyter, started in a terminal of it: that shows frames
    assert not cells.in_vscode()
    for name in cells.VSCODE:
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert cells.in_vscode()
    notebook.get_ipython().user_ns = {"__vsc_ipynb_file__": "/a.ipynb"}
    assert cells.in_vscode()
    (run_dir / "summary.json").write_text("{}")
    (run_dir / "report.html").write_text("a page")
    show("night")
    assert (
        '<iframe sandbox="allow-scripts allow-downloads allow-popups" srcdoc="a page" '
        in notebook.shown[0]["text/html"]
    )


def test_names_are_words_in_the_markup() -> None:
    frame = cells.frame_of_address('http://127.0.0.1:1/#/run/a"b?token=<x>', title='a"b', height=9)
    assert re.fullmatch(
        r'<iframe src="[^"<>]*" title="a&quot;b" width="100%" height="9" style="border: 0"></iframe>', frame
    )


def test_importing_stepscope_and_its_notebook_loads_nothing_heavy() -> None:
    asked = "import stepscope, sys; stepscope.show, stepscope.live\n"
    asked += "print([name for name in ('torch', 'numpy', 'starlette', 'msgspec', 'asyncio') if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(Path(stepscope.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "[]\n"
