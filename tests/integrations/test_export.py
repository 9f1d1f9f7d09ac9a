"""What is exported, whatever the tool: every step once, findings, the summary; a tool that fails is left alone."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from fakes.cluster import Cluster
from made_runs import Feed

from stepscope.assistant.hub_api import HubApi
from stepscope.cli.main import run_command
from stepscope.errors import ExportError, UsageError
from stepscope.hub.runs import Runs
from stepscope.integrations.exporter import (
    TOOLS,
    Destination,
    Exporter,
    Outcome,
    export,
    make_exporter,
    parse_destination,
    thread_cpu_s,
)
from stepscope.integrations.run_feed import PREFIX, FindingChange, News, Row, RunAbout, RunFeed
from stepscope.integrations.settings import load_export_settings

ExportRun = Callable[..., tuple[Outcome, ...]]


class Notebook:
    """An exporter that writes down what it gets, and fails where it is messages to."""

    where = "a notebook"

    def __init__(self, fails_in: str = "") -> None:
        self.rows: list[Row] = []
        self.findings: list[FindingChange] = []
        self.calls: list[str] = []
        self.summary: Mapping[str, Any] = {}
        self.files: list[str] = []
        self._fails_in = fails_in

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self._fails_in:
            raise RuntimeError("no connection")

    def begin(self, run: RunAbout) -> None:
        self._called("begin")
        assert (run.name, run.world_size, run.command) == ("night", 4, "python train.py")

    def write_rows(self, rows: Sequence[Row]) -> None:
        self._called("write_rows")
        self.rows += rows

    def write_finding(self, change: FindingChange) -> None:
        self._called("write_finding")
        self.findings.append(change)

    def finish(self, status: str, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        self._called("finish")
        self.summary = {**summary, "status": status}
        self.files = [path.name for path in files]

    def close(self) -> None:
        self._called("close")


def test_a_finished_run_is_written_as_a_whole(export_run: ExportRun, run_summary: dict[str, Any], news: News) -> None:
    notebook = Notebook()
    (outcome,) = export_run(["trackio"], make=lambda _: notebook)
    assert notebook.calls == ["begin", "write_rows", "write_finding", "finish", "close"]
    assert [row.step for row in notebook.rows] == list(range(200))
    assert tuple(notebook.rows) == news.rows
    (finding,) = notebook.findings
    assert (finding.state, finding.kind, finding.ranks) == ("opened", "compute_straggler", (2,))
    assert notebook.summary["step_time"] == run_summary["step_time"]
    assert (notebook.summary["status"], notebook.files) == ("finished", ["summary.txt"])
    assert outcome == Outcome(
        destination=Destination(tool="trackio"), where="a notebook", rows=200, findings=1, problem=""
    )


def test_phases_of_a_row_are_those_of_the_step(news: News) -> None:
    values = news.rows[100].values
    phases = {name for name in values if name.startswith(f"{PREFIX}phase/") and not name.endswith("_worst_ms")}
    assert {f"{PREFIX}phase/{phase}_ms" for phase in ("forward", "backward", "comm", "optimizer")} <= phases
    slow, usual = values[f"{PREFIX}phase/forward_worst_ms"], values[f"{PREFIX}phase/forward_ms"]
    assert 25 < slow - usual < 35
    assert values[f"{PREFIX}step_worst_ms"] >= values[f"{PREFIX}step_ms"] > slow
    assert values[f"{PREFIX}memory/allocated_gib"] == pytest.approx(100e6 / (1 << 30), rel=0.05)


@pytest.mark.parametrize("where", ["begin", "write_rows", "write_finding", "finish", "close"])
def test_a_tool_that_fails_gets_nothing_more(export_run: ExportRun, where: str) -> None:
    broken, whole = Notebook(fails_in=where), Notebook()
    messages: list[str] = []
    exporters = {"mlflow": broken, "trackio": whole}
    failed, fine = export_run(["mlflow", "trackio"], make=lambda to: exporters[to.tool], tell=messages.append)
    assert (failed.problem, fine.problem) == ("RuntimeError: no connection", "")
    assert broken.calls[-1] == "close"
    assert [call for call in broken.calls if call == where] == [where]
    assert whole.calls == ["begin", "write_rows", "write_finding", "finish", "close"]
    assert messages == []  # the outcome has it; messages are for runs that are followed


def test_a_tool_that_hangs_holds_up_no_other(export_run: ExportRun) -> None:
    answers, whole = threading.Event(), Notebook()

    class Hanging(Notebook):
        def write_rows(self, rows: Sequence[Row]) -> None:
            answers.wait()

    exporters = {"mlflow": Hanging(), "trackio": whole}
    try:
        hung, fine = export_run(["mlflow", "trackio"], make=lambda to: exporters[to.tool], patience_s=0.05)
    finally:
        answers.set()
    assert (hung.hangs, hung.rows, hung.problem) == (True, 0, "it does not answer, for 0 s now")
    assert (fine.hangs, fine.rows, fine.problem) == (False, 200, "")
    assert whole.calls == ["begin", "write_rows", "write_finding", "finish", "close"]
    for thread in threading.enumerate():
        if thread.name.startswith("export-"):
            thread.join()


def test_a_tool_that_works_for_long_is_waited_for(export_run: ExportRun) -> None:
    """As MLflow does that creates a database on a busy machine."""
    enough, readings = threading.Event(), 0

    class Working(Notebook):
        def finish(self, status: str, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
            enough.wait()
            super().finish(status, summary, files)

    def cpu_s(thread: threading.Thread) -> float:
        nonlocal readings
        readings += 1
        if readings == 20:
            enough.set()
        return float(readings)

    (outcome,) = export_run(["mlflow"], make=lambda _: Working(), patience_s=0.0, cpu_s=cpu_s)
    assert (outcome.hangs, outcome.problem, outcome.rows) == (False, "", 200)


def test_the_processor_time_of_a_thread() -> None:
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    assert thread_cpu_s(ended) == 0.0
    before_s = thread_cpu_s(threading.current_thread())
    while time.thread_time() < before_s + 0.05:
        pass
    assert thread_cpu_s(threading.current_thread()) > before_s


def test_a_call_that_fails_is_repeated_at_the_end_of_the_run(export_run: ExportRun) -> None:
    """Pauses between repetitions end with the run; a refusal is not repeated."""

    class Recovering(Notebook):
        def write_rows(self, rows: Sequence[Row]) -> None:
            self.calls.append("write_rows")
            if self.calls.count("write_rows") == 1:
                raise ConnectionError("not now")
            self.rows += rows

    class Refusing(Notebook):
        def write_rows(self, rows: Sequence[Row]) -> None:
            self.calls.append("write_rows")
            raise ExportError("not you")

    async def wait() -> None:
        raise AssertionError("the run is over")

    exporters = {"mlflow": Recovering(), "trackio": Refusing()}
    recovered, refused = export_run(["mlflow", "trackio"], make=lambda to: exporters[to.tool], wait=wait)
    assert (recovered.problem, exporters["mlflow"].rows[-1].step) == ("", 199)
    assert exporters["mlflow"].calls.count("write_rows") == 2
    assert (refused.problem, exporters["trackio"].calls) == ("ExportError: not you", ["begin", "write_rows", "close"])


def test_settings_and_the_command_line_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("tensorboard", "opentelemetry.proto", "trackio"):
        pytest.importorskip(package)
    environment = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    (tmp_path / "config" / "stepscope").mkdir(parents=True)
    (tmp_path / "config" / "stepscope" / "config.toml").write_text('[export]\nto = "trackio"\n')
    project = tmp_path / "project"
    project.mkdir()

    def found(*words: str) -> list[str]:
        return [each.text for each in load_export_settings(project, words, environment).destinations]

    assert found() == ["trackio"]
    assert found("tensorboard:a,otlp:http://host:4318", "trackio") == [
        *("trackio", "tensorboard:a", "otlp:http://host:4318")
    ]
    assert found("off") == []
    assert found("off,tensorboard:a") == ["tensorboard:a"]
    (project / "stepscope.toml").write_text(
        '[alerts]\nlink = "https://hub.example/"\n\n[export]\nto = ["tensorboard:b"]\n'
    )
    assert found() == ["tensorboard:b"]
    assert load_export_settings(project, (), environment).link == "https://hub.example"
    for text, why in {
        'to = ["wandbb"]': "stepscope.toml:2: there is no tool 'wandbb'; did you mean wandb?",
        "to = 3": "stepscope.toml:2: to must be a name or an array of names, not",
        'too = "trackio"': 'stepscope.toml:2: unknown key "too"; did you mean to?',
        'link = "https://hub.example/?token=abc"': "stepscope.toml:2: link must be an address such as",
        'to = "mlflow:http://me:pw@host"': "stepscope.toml:2: the address of mlflow contains a password or key",
    }.items():
        (project / "stepscope.toml").write_text(f"[export]\n{text}\n")
        with pytest.raises(UsageError, match=re.escape(why)):
            load_export_settings(project, (), environment)


def test_a_link_in_a_run_is_not_uploaded(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "runs" / "night"
    shutil.copytree(run_dir, copy)
    (tmp_path / "secret").write_text("mine")
    (copy / "report.html").symlink_to(tmp_path / "secret")
    notebook = Notebook()

    async def work() -> None:
        api = HubApi(Runs.of_folder(copy))
        try:
            destination = parse_destination("trackio", installed=lambda _: True)
            await export(RunFeed(api, "night"), [destination], run_dir=copy, make=lambda _: notebook)
        finally:
            await api.close()

    anyio.run(work)
    assert notebook.files == ["summary.txt"]


def test_an_active_run_is_followed(tmp_path: Path) -> None:
    """Each step is in one row, although they come bit by bit; rows of many steps are means."""
    feed = Feed(tmp_path / "runs", "night", Cluster(ranks=2, steps=300))
    seen: list[News] = []

    async def follow() -> None:
        feed.make(100)
        api = HubApi(Runs.of_folder(feed.run_dir))
        try:
            source = RunFeed(api, "night")
            seen.append(await source.news(most_rows=20))
            seen.append(await source.news(most_rows=20))
            feed.make(7)
            while not seen[-1].rows:
                seen.append(await source.news(most_rows=20))
                await anyio.sleep(0.05)
        finally:
            await api.close()

    anyio.run(follow)
    assert [row.step for row in seen[0].rows] == [*range(7, 99, 8), 99]
    assert seen[1].rows == ()
    assert seen[-1].rows[-1].step == 106
    assert not any(news.over for news in seen)


class ScriptedFeed:
    """News as a test says; None: a request that fails."""

    def __init__(self, *news: News | None) -> None:
        self._news = list(news)

    async def news(self, *, most_rows: int) -> News:
        news = self._news.pop(0)
        if news is None:
            api = HubApi(Runs.of_folder(Path("/nowhere")))
            try:
                await api.get("/api/v1/runs/night")
            finally:
                await api.close()
        assert news is not None
        return news

    async def about(self) -> RunAbout:
        return RunAbout(name="night", command="python train.py", world_size=4, created_wall_ns=1)

    async def summary(self) -> Mapping[str, Any]:
        return {}


def news_of(step: int, *, over: bool = False) -> News:
    return News(rows=(Row(step=step, wall_ns=step, values={"a": 1.0}),), over=over)


def follow(feed: ScriptedFeed, exporter: Exporter, wait: Callable[[], Any], run_dir: Path) -> Outcome:
    async def work() -> tuple[Outcome, ...]:
        destinations = [Destination(tool="trackio")]
        return await export(feed, destinations, run_dir=run_dir, wait=wait, make=lambda _: exporter)  # type: ignore[arg-type]

    (outcome,) = anyio.run(work)
    return outcome


class Slow(Notebook):
    """Writes its first rows when ``go`` is set: until then the others are queued."""

    def __init__(self, go: threading.Event) -> None:
        super().__init__()
        self._go = go

    def write_rows(self, rows: Sequence[Row]) -> None:
        self._go.wait()
        super().write_rows(rows)


@pytest.mark.parametrize("error", [TimeoutError("the run did not end"), ValueError("a mistake")])
def test_what_was_read_is_written_whatever_ends_the_export(tmp_path: Path, error: Exception) -> None:
    go, waits = threading.Event(), 0

    async def wait() -> None:
        nonlocal waits
        waits += 1
        if waits == 3:
            go.set()
            raise error

    slow = Slow(go)
    feed = ScriptedFeed(news_of(1), news_of(2), news_of(3))
    if isinstance(error, TimeoutError):  # the run is not over, and nothing more comes
        outcome = follow(feed, slow, wait, tmp_path)
        assert (outcome.problem, outcome.rows) == ("the run did not end", 3)
    else:
        with pytest.raises(ValueError, match="a mistake"):
            follow(feed, slow, wait, tmp_path)
    assert [row.step for row in slow.rows] == [1, 2, 3]
    assert slow.calls == ["begin", "write_rows", "write_rows", "write_rows", "close"]


@pytest.mark.parametrize("failures", [5, 6])
def test_a_few_requests_may_fail(tmp_path: Path, failures: int) -> None:
    async def wait() -> None: ...

    notebook = Notebook()
    feed = ScriptedFeed(news_of(1), *[None] * failures, news_of(2, over=True))
    outcome = follow(feed, notebook, wait, tmp_path)
    if failures == 5:
        assert (outcome.problem, [row.step for row in notebook.rows]) == ("", [1, 2])
        assert notebook.calls == ["begin", "write_rows", "write_rows", "finish", "close"]
    else:
        assert (outcome.problem, [row.step for row in notebook.rows]) == ("there is no such run", [1])
        assert notebook.calls == ["begin", "write_rows", "close"]


def test_steps_after_a_restart_are_exported(tmp_path: Path) -> None:
    """A restarted job numbers its steps anew, or continues from a checkpoint: lower numbers are new rows."""
    feed = Feed(tmp_path / "runs", "night", Cluster(ranks=2, steps=300))
    seen: list[News] = []

    async def follow() -> None:
        feed.make(100)
        api = HubApi(Runs.of_folder(feed.run_dir))
        try:
            source = RunFeed(api, "night")
            seen.append(await source.news(most_rows=20))
            after_ns = 60 * 10**9
            restarted = Cluster(ranks=2, steps=300, attempt=1).series()
            feed.series = [replace(each, anchor_wall_ns=each.anchor_wall_ns + after_ns) for each in restarted]
            feed.made = 0
            feed.make(20)
            while len(seen) < 3:
                news = await source.news(most_rows=20)
                if news.rows:
                    seen.append(news)
                    feed.make(5)
                await anyio.sleep(0.05)
        finally:
            await api.close()

    anyio.run(follow)
    assert [[row.step for row in news.rows] for news in seen] == [
        [*range(7, 99, 8), 99],
        [*range(20)],
        [*range(20, 25)],
    ]


def test_words_are_checked_before_anything_is_written() -> None:
    assert parse_destination("wandb:team/project", installed=lambda _: True) == Destination(
        tool="wandb", where="team/project"
    )
    for word, why in {
        "tensorbord": "there is no tool 'tensorbord'; did you mean tensorboard?; the tools are",
        "tensorboard": "tensorboard needs a place: tensorboard:FOLDER",
        "otlp": "otlp needs a place: otlp:URL, or set OTEL_EXPORTER_OTLP_ENDPOINT",
        "mlflow:http://me:pass@host": "the address of mlflow contains a password or key",
        "otlp:https://host/?api_key=1234567890": "the address of otlp contains a password or key",
    }.items():
        with pytest.raises(UsageError, match=why.replace("?", r"\?")):
            parse_destination(word, installed=lambda _: True)
    for name in TOOLS:
        with pytest.raises(UsageError, match=rf"{name} is not installed; install it with: pip install 'stepscope\["):
            parse_destination(f"{name}:x", installed=lambda _: False)


def test_the_command(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    assert run_command(["export", str(run_dir), "--to", f"tensorboard:{tmp_path}"]) == 0
    assert capsys.readouterr().out == (
        f"tensorboard:{tmp_path}: 200 rows, 1 finding; tensorboard --logdir {tmp_path}\n"
    )
    with pytest.raises(ExportError, match="is not the URL of a collector"):
        run_command(["export", str(run_dir), "--to", "otlp:ftp://host"])


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_provides_an_exporter(name: str) -> None:
    pytest.importorskip(TOOLS[name].packages[0])
    exporter: Exporter = make_exporter(
        Destination(tool=name, where="http://localhost:1" if name in ("otlp", "mlflow") else "place")
    )
    methods = ("begin", "write_rows", "write_finding", "finish", "close")
    assert [method for method in methods if not callable(getattr(exporter, method, None))] == []
    assert isinstance(exporter.where, str)
