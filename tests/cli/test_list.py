"""``stepscope list``."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path

import pytest

from stepscope.cli.main import run_command
from stepscope.errors import UsageError
from stepscope.store.catalog import change_labels
from stepscope.store.create import create_run
from stepscope.store.documents import end_run, read_meta, save_summary, write_meta
from tests.archive.conftest import SUMMARY


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, created_s in (("old", 1_700_000_000), ("new", 1_700_003_600)):
        run_dir = create_run(tmp_path / "runs", name, ["x"], sessions=tmp_path / "s").run_dir
        write_meta(run_dir, {**read_meta(run_dir), "created_wall_ns": created_s * 10**9})
        end_run(run_dir, exit_code=1, status="failed")
    save_summary(tmp_path / "runs" / "old", SUMMARY, "")
    return tmp_path / "runs"


def when(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def test_a_table_newest_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["list", str(runs)]) == 0
    assert capsys.readouterr().out == (
        "run  started           status    ranks   steps  median step  verdict\n"
        "───  ────────────────  ────────  ─────  ──────  ───────────  ───────────────────────────\n"
        f"new  {when(1_700_003_600)}  failed\n"
        f"old  {when(1_700_000_000)}  finished      4  12,000       123 ms  ✖ Rank 2 is slow in forward\n"
    )


def test_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["list", "--json", str(runs)]) == 0
    new, old = json.loads(capsys.readouterr().out)
    ended_ns = read_meta(runs / "old")["end"]["wall_ns"]
    assert old == {
        "name": "old",
        "path": str(runs / "old"),
        "created_wall_ns": 1_700_000_000 * 10**9,
        "status": "finished",
        "status_text": "finished",
        "status_severity": "info",
        "ranks": 4,
        "steps": 12_000,
        "median_step_ms": 123.456,
        "verdict": "Rank 2 is slow in forward",
        "severity": "critical",
        "cost_share": None,
        "duration_s": (ended_ns - 1_700_000_000 * 10**9) / 1e9,
        "host": platform.node(),
        "user": read_meta(runs / "old")["user"],
        "command": ["x"],
        "commit": "",
        "branch": "",
        "dirty": False,
        "metrics": {},
        "tags": [],
        "note": "",
    }
    assert (new["status"], new["ranks"], new["verdict"]) == ("failed", None, "")


def test_a_metric_that_is_nan_by_now_has_no_last_value(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = {"kind": "loss_nan", "evidence": {"name": "loss", "first_step": 60}}
    metrics = {"loss": {"last": 0.017, "step": 59}, "lr": {"last": 0.1, "step": 149}}
    save_summary(
        runs / "old", {**SUMMARY, "findings": [lost, {"kind": "loss_nan", "evidence": None}], "metrics": metrics}, ""
    )
    assert run_command(["list", "--json", str(runs)]) == 0
    assert json.loads(capsys.readouterr().out)[1]["metrics"] == {"lr": 0.1}


@pytest.mark.parametrize(
    ("throughput", "shown"),
    [
        ({"samples_per_second": 400.0, "tokens_per_second": 204_800.0}, {"tokens/s": 204_800.0}),
        ({"samples_per_second": 400.0, "tokens_per_second": None}, {"samples/s": 400.0}),
        ({"tokens_per_second": "many"}, {}),
        (None, {}),
    ],
)
def test_the_throughput_is_a_last_value(
    runs: Path, capsys: pytest.CaptureFixture[str], throughput: object, shown: dict[str, float]
) -> None:
    save_summary(runs / "old", {**SUMMARY, "throughput": throughput}, "")
    assert run_command(["list", "--json", str(runs)]) == 0
    assert json.loads(capsys.readouterr().out)[1]["metrics"] == shown


def test_a_damaged_run_does_not_hide_the_others(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "bad").mkdir()
    (runs / "bad" / "run.json").write_text('{"sch')
    (runs / "old" / "summary.json").write_text('{"steps": 3, "step_time": [], "verdict": 4, "status": null}')
    assert run_command(["list", str(runs)]) == 0
    shown = capsys.readouterr()
    assert shown.err == f"stepscope: {runs}/bad/run.json is damaged or cut off: it is not valid JSON\n"
    assert len(shown.out.splitlines()) == 4


def test_nothing_to_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["list", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"No runs in {tmp_path} yet.\n"
    assert run_command(["list", "--json", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "[]\n"


def test_before_any_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        assert run_command(["list"]) == 0
    assert capsys.readouterr().out == "No runs in runs yet.\n"


@pytest.mark.parametrize(
    ("columns", "heads", "row"),
    [
        (88, "run  started           status    ranks   steps  median step  verdict", "forward"),
        (87, "run  started           status     steps  median step  verdict", "forward"),
        (75, "run  started           status    median step  verdict", "forward"),
        (72, "run  status    median step  verdict", "123 ms  ✖ Rank 2 is slow in forward"),
        (50, "run  status    verdict", "old  finished  ✖ Rank 2 is slow in forward"),
        (40, "run  status    verdict", "old  finished  ✖ Rank 2 is slow in forw…"),
        (10, "run  status    verdict", "old  finished  ✖ Rank…"),
    ],
)
def test_a_table_as_wide_as_the_terminal(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int, heads: str, row: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout.isatty", lambda: True)
        patch.setenv("COLUMNS", str(columns))
        assert run_command(["list", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= max(columns, len("run  finished  verdict"))
    assert lines[0] == heads
    assert lines[-1].endswith(row)


def test_a_long_name_is_cut_last(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "old").rename(runs / "a-name-that-takes-all-the-room")
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout.isatty", lambda: True)
        patch.setenv("COLUMNS", "40")
        assert run_command(["list", str(runs)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "a-name-that-takes-al…  finished  ✖ Rank…"


def test_how_a_run_ended_in_the_words_of_its_summary(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = {"status": "crashed", "status_text": "killed (SIGKILL)", "status_severity": "critical"}
    save_summary(runs / "old", {**SUMMARY, **ended}, "")
    assert run_command(["list", str(runs)]) == 0
    assert "  killed (SIGKILL)  " in capsys.readouterr().out.splitlines()[-1]
    for word in ("crashed", "killed"):
        assert run_command(["list", "--json", "--status", word, str(runs)]) == 0
        assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == ["old"]


@pytest.fixture
def five(tmp_path: Path) -> Path:
    """The newest first: e, d, c, b, a."""
    folder = tmp_path / "runs"
    severities = {"a": "warning", "b": "critical", "c": None, "d": "info", "e": "info"}
    for place, (name, severity) in enumerate(severities.items()):
        run_dir = create_run(folder, name, ["x"], sessions=tmp_path / "s").run_dir
        write_meta(run_dir, {**read_meta(run_dir), "created_wall_ns": (1_700_000_000 + place) * 10**9})
        end_run(run_dir, exit_code=0, status="failed" if name in "bd" else "finished")
        verdict = {"kind": "healthy" if name == "e" else "x", "severity": severity, "title": f"verdict of {name}"}
        status = "failed" if name in "bd" else "finished"
        about = {
            "status": status,
            "status_text": status,
            "steps": {"total": 9 - place},
            "step_time": {"p50_ms": place % 3},
        }
        save_summary(run_dir, {**SUMMARY, **about, "verdict": verdict if severity else None}, "")
    return folder


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("", "edcba"),
        ("--limit 2", "ed"),
        ("--limit 9", "edcba"),
        ("--status failed", "db"),
        ("--status failed --status fin", "edcba"),
        ("--status running", ""),
        ("--sort name", "abcde"),
        ("--sort steps", "abcde"),
        ("--sort step-time", "cebda"),
        ("--sort severity", "badec"),
        ("--sort severity --status finished --limit 2", "ae"),
    ],
)
def test_which_runs_and_in_which_order(
    five: Path, capsys: pytest.CaptureFixture[str], options: str, names: str
) -> None:
    assert run_command(["list", "--json", str(five), *options.split()]) == 0
    assert "".join(entry["name"] for entry in json.loads(capsys.readouterr().out)) == names


def test_marks_of_severity(five: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["list", str(five)]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines[0].index("verdict")
    marked = ["✔ verdict of e", "● verdict of d", "", "✖ verdict of b", "▲ verdict of a"]
    assert [line[at:] for line in lines[2:]] == marked


def test_some_of_the_runs_on_a_terminal(
    five: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout.isatty", lambda: True)
        assert run_command(["list", str(five), "--limit", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "(3 of 5 runs)"
    assert run_command(["list", str(five), "--status", "running"]) == 0
    assert capsys.readouterr().out == f"No runs in {five} with the status running.\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--status", "fialed"], "--status: must be one of finished, failed, .*, not 'fialed'; did you mean failed"),
        (["--sort", "size"], "--sort: must be one of started, name, .*, not 'size'"),
        (["--limit", "0"], "--limit: must be 1 or more runs, not '0'"),
    ],
)
def test_options_that_mean_nothing(five: Path, words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_command(["list", str(five), *words])


def test_a_run_is_listed_under_its_folders_name(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "old").rename(runs / "moved")
    assert run_command(["list", str(runs)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("moved  ")


def test_no_folder(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    for name, why in (("runs", "runs is not a folder"), ("rnus", r"rnus does not exist; did you mean runs\?")):
        with pytest.raises(UsageError, match=why):
            run_command(["list", str(tmp_path / name)])


def test_tags_and_names(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    change_labels(runs / "old", add=["baseline", "bf16"], name="before")
    change_labels(runs / "new", add=["bf16"])
    assert run_command(["list", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run           started           status    ranks   steps  median step  tags           verdict"
    assert lines[2] == f"new           {when(1_700_003_600)}  failed                                bf16"
    assert lines[3].startswith(
        f"old (before)  {when(1_700_000_000)}  finished      4  12,000       123 ms  baseline bf16"
    )
    for tags, names in ((["bf16"], ["new", "before"]), (["bf16", "baseline"], ["before"])):
        assert run_command(["list", "--json", str(runs), *(f"--tag={tag}" for tag in tags)]) == 0
        assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == names
    assert run_command(["list", "--tag", "none", "--status", "failed", str(runs)]) == 0
    assert capsys.readouterr().out == f"No runs in {runs} with the status failed and the tag none.\n"


def test_the_costliest_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    findings = {"findings": [{"kind": "straggler", "cost": {"share": 0.25}}]}
    save_summary(runs / "old", {**SUMMARY, **findings}, "")
    assert run_command(["list", "--json", "--sort", "cost", str(runs)]) == 0
    assert [(entry["name"], entry["cost_share"]) for entry in json.loads(capsys.readouterr().out)] == [
        ("old", 0.25),
        ("new", None),
    ]
