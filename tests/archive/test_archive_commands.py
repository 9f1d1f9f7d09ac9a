"""Archived runs in the commands and in a hub, as a user would use them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.cluster import Cluster
from made_runs import record

from stepscope.archive.cache import Archive
from stepscope.archive.location import parse_url
from stepscope.cli.finalize import finalize_run
from stepscope.cli.main import run_command
from stepscope.errors import ArchiveError, NotARun, UsageError
from stepscope.hub.archived_runs import ArchivedRuns


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with steps, sealed and summarized."""
    run_dir = record(tmp_path_factory.mktemp("made") / "runs", "night", Cluster(ranks=2, steps=60).run())
    finalize_run(run_dir, quiet=True)
    return run_dir


@pytest.fixture
def store(tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an archive with two runs; the working directory has ``runs`` with copies of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("night", "day"):
        shutil.copytree(recorded, tmp_path / "runs" / name)
    url = f"file://{tmp_path}/store"
    assert run_command(["archive", "night", "runs/day", "--to", url, "--quiet"]) == 0
    return url


def test_a_run_is_read_where_it_was_archived(store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def output(*words: str) -> str:
        assert run_command(words) == 0
        return capsys.readouterr().out

    local = {words: output(*words, "runs/night") for words in (("report",), ("report", "--json"))}
    assert run_command(["archive", "night", "day", "--to", store, "--replace", "--delete-local"]) == 0
    assert not any((tmp_path / "runs").iterdir())
    assert "deleted runs/night" in capsys.readouterr().err
    rows = json.loads(output("list", "--json", store))
    assert sorted(row["path"] for row in rows) == [f"{store}/day", f"{store}/night"]
    assert "night" in output("list", store)
    document = json.loads(output("report", "--json", f"{store}/night"))
    expected = json.loads(local["report", "--json"])
    assert {key: document[key] for key in ("steps", "step_time", "findings", "notices")} == {
        key: expected[key] for key in ("steps", "step_time", "findings", "notices")
    }
    assert output("report", f"{store}/night").split("files")[0] == local["report",].split("files")[0]
    assert "60" in output("sql", f"{store}/night", "select count(*) from steps where rank = 0")
    assert json.loads(output("compare", "--json", f"{store}/night", f"{store}/day"))["notices"] is not None
    assert "2 runs" in output("history", store)
    page = tmp_path / "page.html"
    output("report", f"{store}/night", "--html", str(page))
    assert page.is_file()


@pytest.mark.parametrize(
    ("words", "error", "why"),
    [
        (["list", "STORE/night"], UsageError, "is a run; `stepscope report"),
        (["report", "STORE/nihgt"], ArchiveError, "did you mean night"),
        (["report", "STORE/night", "--html"], UsageError, "--html FILE"),
        (["history", "STORE/empty"], UsageError, "no runs in"),
        (["tag", "STORE/night", "x"], UsageError, "this command reads runs on disk"),
        (["archive", "nihgt", "--to", "STORE"], NotARun, "no run named nihgt"),
        (["archive", "night", "--to", "STORE?secret=1"], UsageError, "credentials come from the environment"),
        (["list", "gs://bucket/x"], ArchiveError, r"pip install 'stepscope\[archive-gcs\]'"),
        (["list", "nothing://bucket/x"], ArchiveError, "is not a storage that fsspec knows"),
        (["serve", "STORE", "--accept"], UsageError, "an archive is only read"),
        (["run", "--archive", "s3:/bucket", "true"], UsageError, "is not an address"),
    ],
)
def test_mistakes_are_one_line(store: str, words: list[str], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why) as caught:
        run_command([word.replace("STORE", store) for word in words])
    assert "\n" not in str(caught.value)


def test_a_run_that_fails_does_not_stop_the_others(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    (Path("runs") / "day" / "labels.json").write_text("{}")
    assert run_command(["archive", "day", "night", "--to", store]) == ArchiveError.exit_code
    lines = capsys.readouterr().err.splitlines()
    assert "other contents (labels.json); --replace" in lines[0]
    assert "runs/night is already archived" in lines[1]


def test_a_hub_opens_archived_runs(store: str, tmp_path: Path) -> None:
    async def serve() -> None:
        runs = ArchivedRuns(Archive(parse_url(store), {"XDG_CACHE_HOME": str(tmp_path / "hub")}))
        try:
            assert sorted(runs.id_of(entry.path) for entry in await runs.entries()) == ["day", "night"]
            assert not list((tmp_path / "hub").rglob("steps.parquet"))  # nothing was opened yet
            first, second = await asyncio.gather(runs.open("night"), runs.open("night"))
            assert first is second is not None
            assert len(list((tmp_path / "hub").rglob("steps.parquet"))) == 1
            for name in ("nothing", "../night", ".stepscope", ""):
                assert await runs.open(name) is None
            assert not runs.may_delete and not await runs.delete("night") and runs.folders() == []
        finally:
            await runs.close()

    asyncio.run(serve())


def test_run_archives_when_the_job_is_over(store: str, tmp_path: Path) -> None:
    """The job's exit code stays; settings name the archive as well as the option."""
    import subprocess
    import sys

    script = tmp_path / "job.py"
    script.write_text("import stepscope, sys\nwith stepscope.step():\n    pass\nsys.exit(3)\n")
    (tmp_path / "stepscope.toml").write_text(f'[archive]\nto = "{store}"\n')

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "stepscope", "run", "--no-hub", "--no-html", *words, str(script)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    done = run("--name", "one")
    assert (done.returncode, f"archived runs/one as {store}/one" in done.stderr) == (3, True)
    blocked = tmp_path / "file"
    blocked.write_text("")
    failed = run("--name", "two", "--quiet", "--archive", f"file://{blocked}/x")
    assert failed.returncode == 3
    assert f"try again: stepscope archive runs/two --to file://{blocked}/x" in failed.stderr
    assert "Traceback" not in failed.stderr
