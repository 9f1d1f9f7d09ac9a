"""``stepscope fleet``, ``stepscope sql --fleet`` and deleting runs by age and size."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from loopback_receiver import Reply, loopback_receiver

from stepscope.cli.main import run_command
from stepscope.errors import UsageError
from stepscope.store.catalog import change_labels, list_runs


@pytest.fixture
def runs(runs_of_a_year: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return runs_of_a_year


def test_the_document_and_the_text_name_the_slow_host(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["fleet", str(runs), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["host"] for row in document["hosts"] if row["suspect"]] == ["gpu-002"]
    assert document["totals"]["runs"] == 120
    for by in ("cause", "time", "job", "team", "user", "host"):
        assert run_command(["fleet", str(runs), "--by", by]) == 0
        text = capsys.readouterr().out
        assert text.startswith(document["totals"]["headline"] + "\n120 runs · ")
        assert f"▲ {document['hosts'][0]['title']}" in text


def test_days_in_the_terminal_are_in_utc_as_on_the_page(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for zone in ("UTC", "Pacific/Kiritimati"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        try:
            assert run_command(["fleet", str(runs), "--by", "time"]) == 0
        finally:
            monkeypatch.delenv("TZ")
            time.tzset()
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    rows = [line.split() for line in texts[0].splitlines()]
    assert ["2025-01-06", "0", "0", "–"] in rows
    assert ["2025-01-20", "2", "99.3", "72%"] in [row[:4] for row in rows]
    assert ["2025-01-27", "5", "129", "70%"] in [row[:4] for row in rows]
    (suspect,) = (row for row in rows if row[:1] == ["gpu-002"])
    assert suspect[4:] == ["2.6", "13%", "forward", "176", ">99.9%", "2025-12-20"]


def test_runs_of_the_last_days_only(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["fleet", str(runs), "--since", "1d", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["totals"]["runs"], document["first_wall_ns"], document["hosts"]) == (0, None, [])


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("plain", "gpu-002\n"),
        ("slurm", "gpu-002\n"),
        ("kubernetes", "operator: NotIn\n              values:\n                - gpu-002\n"),
    ],
)
def test_hosts_to_exclude(runs: Path, capsys: pytest.CaptureFixture[str], form: str, expected: str) -> None:
    command = ["fleet", "exclude-list", str(runs), "--since", "9999w", "--format", form]
    assert run_command(command) == 0
    assert capsys.readouterr().out.endswith(expected)


def test_no_host_to_exclude_is_no_output(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["fleet", "exclude-list", str(runs), "--format", "kubernetes"]) == 0  # the last 90 days
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no host is suspect" in captured.err


def test_without_paths_the_runs_of_all_known_folders(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="no runs yet"):
        run_command(["fleet"])
    shutil.copytree(runs, tmp_path / "runs")
    assert run_command(["fleet"]) == 0
    assert "120 runs" in capsys.readouterr().out
    with pytest.raises(UsageError, match="is a run; name the folder that it is in"):
        run_command(["fleet", str(runs / "run-00000")])


def test_sql_on_all_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = "SELECT count(*) AS runs, round(sum(gpu_hours)) > 0 AS known FROM runs"
    assert run_command(["sql", "--fleet", str(runs), query, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"runs": 120, "known": True}]


@pytest.fixture
def own_runs(runs_of_a_year: Path, tmp_path: Path) -> Path:
    """The ten first runs; the last of them started an hour ago."""
    folder = tmp_path / "runs"
    for path in sorted(runs_of_a_year.iterdir())[:10]:
        shutil.copytree(path, folder / path.name)
    meta = json.loads((folder / "run-00009" / "run.json").read_text())
    meta["created_wall_ns"] = time.time_ns() - 3600 * 10**9
    (folder / "run-00009" / "run.json").write_text(json.dumps(meta))
    for path in folder.iterdir():
        (path / "labels.json").unlink(missing_ok=True)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(entry.path.name for entry in list_runs(folder)[0])


def test_old_runs_are_deleted_but_never_tagged_or_active_ones(
    own_runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_labels(own_runs / "run-00001", add=["baseline"])
    meta = json.loads((own_runs / "run-00002" / "run.json").read_text())
    (own_runs / "run-00002" / "run.json").write_text(json.dumps({**meta, "end": None}))
    (own_runs / "run-00002" / "summary.json").unlink()  # ended without reporting how
    command = ["delete", "--older-than", "90d", str(own_runs)]
    assert run_command([*command, "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 7
    assert "7 runs with " in captured.err
    assert len(names(own_runs)) == 10
    assert run_command([*command, "--yes"]) == 0
    assert names(own_runs) == ["run-00001", "run-00002", "run-00009"]
    assert run_command([*command, "--yes"]) == 0
    assert "no runs to delete" in capsys.readouterr().err


def test_the_oldest_runs_are_deleted_until_the_rest_is_small_enough(own_runs: Path) -> None:
    for path in own_runs.iterdir():
        (path / "steps.parquet").write_bytes(b"x" * 1_000_000)
    change_labels(own_runs / "run-00000", add=["baseline"])
    assert run_command(["delete", "--keep-size", "4M", "--yes", str(own_runs)]) == 0
    assert names(own_runs) == ["run-00000", "run-00007", "run-00008", "run-00009"]


def test_what_is_to_be_deleted_must_be_named(own_runs: Path) -> None:
    with pytest.raises(UsageError, match="name the runs to delete, or use --older-than or --keep-size"):
        run_command(["delete"])


def test_a_suspect_is_reported_once_and_once_more_when_it_is_cleared(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(Path.cwd() / "config"))
    monkeypatch.delenv("STEPSCOPE_ALERT", raising=False)
    own = Path(shutil.copytree(runs, Path.cwd() / "own"))
    with loopback_receiver() as receiver:
        command = ["fleet", str(own), "--since", "3000d", "--alert", f"{receiver.url}/hook"]
        receiver.replies.append(Reply(status=500))
        assert run_command(command) == 1
        assert "1 new suspect, 0 cleared; 0 messages sent" in capsys.readouterr().out
        for _ in range(2):
            assert run_command(command) == 0
        assert "0 new suspects, 0 cleared; 0 messages sent" in capsys.readouterr().out
        # In another period it is missing, but that does not mean that it is over.
        assert run_command(["fleet", str(own), "--since", "1d", "--alert", f"{receiver.url}/hook"]) == 0
        assert "0 new suspects, 0 cleared; 0 messages sent" in capsys.readouterr().out
        for run_dir in sorted(own.iterdir())[2:]:
            shutil.rmtree(run_dir)
        assert run_command(command) == 0
        assert "0 new suspects, 1 cleared; 1 message sent" in capsys.readouterr().out
        documents = [json.loads(request.body) for request in receiver.requests]
    assert [(each["status"], each["run"], each["kind"]) for each in documents[1:]] == [
        ("firing", "fleet", "slow_host"),
        ("resolved", "fleet", "slow_host"),
    ]
    assert documents[1]["title"].startswith("gpu-002 was the slowest host")
    assert documents[1] == documents[0]


def test_suspects_need_a_receiver(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(Path.cwd() / "config"))
    monkeypatch.delenv("STEPSCOPE_ALERT", raising=False)
    with pytest.raises(UsageError, match="no receiver is set"):
        run_command(["fleet", str(runs), "--alert", "off"])
