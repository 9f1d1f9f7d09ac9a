"""``stepscope flight``: what people and programs see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes.dumps import Call, FlightJob, frames_at, stack_text, steps
from page_files import data_in

from stepscope.cli.main import run_command
from stepscope.errors import DumpError, UsageError


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """Rank 2 of 4 sleeps after its fourth call."""
    job = FlightJob(4)
    job.run({rank: steps(3) for rank in range(4)}, until={2: 4})
    job.write(tmp_path / "dumps")
    for rank in range(4):
        inside = ("/job/data.py", 7, "load") if rank == 2 else ("/job/train.py", 42, "step")
        (tmp_path / "dumps" / f"stacks_{rank}.txt").write_text(stack_text(inside))
    return tmp_path / "dumps"


def test_text(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["flight", str(dumps)]) == 0
    shown = capsys.readouterr()
    assert shown.out == (
        "✖ Rank 2 never called all_gather number 5 of default_pg: it is at data.py:7;\n"
        "  ranks 0, 1 and 3 wait for it.\n"
        "  kind       hang_missing_collective\n"
        "  culprit    rank 2 has not called all_gather number 5 of default_pg; it is at\n"
        "             data.py:7\n"
        "             at /job/data.py:7 in load\n"
        "  victims    ranks 0, 1 and 3\n"
        "  wait in    all_gather 5 [256] of default_pg\n"
        "\n"
        "  diverged   at collective 5 of default_pg: not all ranks called it\n"
        "             ranks 0, 1 and 3: all_gather [256] Float\n"
        "               at /job/train.py:42 in step\n"
        "             rank 2: called nothing\n"
        "             rank 2 is in data.py:7 in load\n"
        "\n"
        "  grid       collectives 1 to 5 of default_pg\n"
        "             0, 1 and 3  ████████▒▒\n"
        "             2           ████████··\n"
        "             █ ended  ▓ started  ▒ waiting  ≠ another one  · not called  ? no dump\n"
        "\n"
        "  waits      ranks 0, 1 and 3 → rank 2  in all_gather 5 of default_pg\n"
        "\n"
        "  groups     default_pg: ranks 0–3; called 4–5, started 4, ended 4\n"
        "\n"
        "  stack      rank 2\n"
        "             /job/data.py:7 in load\n"
        "             /job/train.py:300 in <module>\n"
        "  stack      ranks 0, 1 and 3\n"
        "             /job/train.py:42 in step\n"
        "             /job/train.py:300 in <module>\n"
        "\n"
        "  dumps      of 4 ranks\n"
    )
    assert shown.err == "", "no progress where nobody looks"


def test_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = FlightJob(4)
    job.run({rank: steps(3) for rank in range(4)})
    job.write(tmp_path)
    assert run_command(["flight", *map(str, sorted(tmp_path.iterdir()))]) == 0
    assert capsys.readouterr().out == (
        "✔ Nothing is pending: every call of ranks 0–3 has ended.\n"
        "\n"
        "  groups     default_pg: ranks 0–3; called 9, started 9, ended 9\n"
        "\n"
        "  dumps      of 4 ranks\n"
    )


def test_json(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["flight", str(dumps), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    told = {key: document[key] for key in ("schema", "healthy", "kind", "culprits", "victims", "undecidable", "group")}
    assert told == {
        "schema": 1, "healthy": False, "kind": "hang_missing_collective", "culprits": [2], "victims": [0, 1, 3],
        "undecidable": False, "group": "0",
    }  # fmt: skip
    assert document["sequence"] == document["first_divergence"]["sequence"] == 5
    assert document["wait_for"] == [
        {
            "waiters": [0, 1, 3],
            "waited": [2],
            "group": "0",
            "description": "default_pg",
            "sequence": 5,
            "op": "all_gather",
        }
    ]
    assert document["groups"][0]["ranks"]["2"] == {"enqueued": 4, "started": 4, "completed": 4}
    assert document["missing"][0]["at"] == {"file": "/job/data.py", "line": 7, "function": "load"}


@pytest.mark.usefixtures("small_page")
def test_page(dumps: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run_command(["flight", str(dumps), "--html", str(page)]) == 0
    report = data_in(page.read_bytes())[0]["report"]
    assert (report["kind"], report["name"], report["facts"]) == ("flight", "dumps", ["dumps of 4 ranks"])
    verdict = report["verdict"]
    assert (verdict["look"], verdict["kind"]) == ("critical", "Missing collective")
    assert verdict["title"] == (
        "Rank 2 never called all_gather number 5 of default_pg: it is at data.py:7; ranks 0, 1 and 3 wait for it."
    )
    assert {side["title"]: side["items"] for side in verdict["sides"]} == {
        "Culprit": [
            [
                "Rank 2 has not called all_gather number 5 of default_pg; it is at data.py:7",
                "/job/data.py:7 in load",
            ]
        ],
        "Waiting": [["Ranks 0, 1 and 3", ""]],
        "They wait in": [["all_gather 5 [256] of default_pg", ""]],
        "Ranks that others wait for": [["Rank 2 is in data.py:7 in load", ""]],
    }
    flight, stacks = report["parts"]
    view = flight["flight"]
    marks = {row["who"]: row["marks"] for row in view["grid"]["rows"]}
    assert marks == {"ranks 0, 1 and 3": "ccccw", "rank 2": "ccccm"}
    assert (view["groups_left"], view["waits_left"], view["grid"]["left"]) == (0, 0, 0)
    assert [group["who"] for group in stacks["stacks"]["groups"]] == ["Rank 2", "Ranks 0, 1 and 3"]


@pytest.mark.usefixtures("small_page")
def test_a_name_from_a_dump_stays_in_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "<script>alert(1)</script>\x1b[31m"
    job = FlightJob(3, backend="nccl")
    job.add_group("9", evil, [0, 1, 2])
    call = Call(group="9", site=frames_at(3, file=f"/job/{evil}.py", function=evil))
    job.run({rank: [call] * 3 for rank in range(3)}, until={1: 2})
    job.write(tmp_path / "dumps")
    page = tmp_path / "page.html"
    assert run_command(["flight", str(tmp_path / "dumps"), "--html", str(page)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert b"alert" not in page.read_bytes()
    groups = data_in(page.read_bytes())[0]["report"]["parts"][0]["flight"]["groups"]
    assert evil in {group["name"] for group in groups}


@pytest.mark.usefixtures("small_page")
def test_no_dump_at_all(tmp_path: Path) -> None:
    (tmp_path / "rank_0").write_bytes(b"")
    with pytest.raises(DumpError, match="no dump found: rank_0: it is empty"):
        run_command(["flight", str(tmp_path)])
    with pytest.raises(UsageError, match="cannot write"):
        job = FlightJob(1)
        job.run({0: steps(1)})
        job.write(tmp_path)
        run_command(["flight", str(tmp_path), "--html", str(tmp_path / "no" / "page.html")])


@pytest.mark.usefixtures("small_page")
def test_a_dump_is_no_page(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Named or in the folder; but a page that we wrote there before may be replaced."""
    one = next(path for path in sorted(dumps.iterdir()) if not path.name.startswith("stacks"))
    before = one.read_bytes()
    for given in (dumps, one):
        with pytest.raises(UsageError, match="is an input file and would be overwritten"):
            run_command(["flight", str(given), "--html", str(one)])
    assert one.read_bytes() == before
    for _ in range(2):
        assert run_command(["flight", str(dumps), "--html", str(dumps / "hang.html")]) == 0
