"""Tables as CSV files."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.errors import UsageError
from stepscope.traces.exports import write_csv
from stepscope.traces.model.tables import table_of


def test_one_file_per_table(tmp_path: Path) -> None:
    kernels = table_of("kernels", "Kernels", ["name", "total_ns"], [("a,b", 3), ('"q"', None)])
    other = table_of("kernels", "Kernels", ["name", "share", "total_ns"], [("c\nd", 0.5, 1)])
    of_job = [
        table_of("distributed", "Distributed", ["rank", "wait_ns"], [(0, 1)]),
        table_of("kernels", "Kernels of all", ["name"], [("a",)]),
        table_of("empty", "Nothing", ["x"], []),
    ]
    folder = tmp_path / "a" / "b"
    written = write_csv(folder, {1: {"kernels": other}, 0: {"kernels": kernels}}, of_job)
    assert [path.name for path in written] == ["kernels.csv", "distributed.csv", "job_kernels.csv", "empty.csv"]
    assert {path.name: path.read_text() for path in folder.glob("*.csv")} == {
        "kernels.csv": 'rank,name,total_ns,share\n0,"a,b",3,\n0,"""q""",,\n1,"c\nd",1,0.5\n',
        "distributed.csv": "rank,wait_ns\n0,1\n",
        "job_kernels.csv": "name\na\n",
        "empty.csv": "x\n",
    }
    assert write_csv(folder, {}) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file cannot be written: File exists"):
        write_csv(tmp_path / "file", {})


def test_an_earlier_set_leaves_nothing(tmp_path: Path) -> None:
    """But what somebody else wrote, or changed, stays."""
    tables = {name: table_of(name, name, ["x"], [(1,)]) for name in ("kernels", "memory", "syncs")}
    write_csv(tmp_path, {0: tables})
    (tmp_path / "memory.csv").write_text("mine now\n")
    (tmp_path / "own.csv").write_text("mine\n")
    write_csv(tmp_path, {0: {"kernels": tables["kernels"]}})
    assert {path.name for path in tmp_path.glob("*")} == {".stepscope-tables", "kernels.csv", "memory.csv", "own.csv"}
    assert (tmp_path / "memory.csv").read_text() == "mine now\n"


@pytest.mark.parametrize("listed", ["", "[1]", '{"../outside.csv": [5, 5]}', "{"])
def test_a_list_that_is_not_ours(listed: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside.csv"
    outside.write_text("mine\n")
    folder = tmp_path / "tables"
    folder.mkdir()
    status = outside.stat()
    (folder / ".stepscope-tables").write_text(listed.replace("[5, 5]", f"[{status.st_size}, {status.st_mtime_ns}]"))
    write_csv(folder, {})
    assert outside.exists()


# -- tables -----------------------------------------------------------------------------------------------------------


def test_sums_of_what_is_left_out() -> None:
    made = table_of(
        "some", "Some", ("name", "count", "total_ns", "share", "known"),
        [("a", 3, 50, 0.5, 1), ("b", 2, 30, 0.3, None), ("c", 1, 20, 0.2, 4)], limit=1,
    )  # fmt: skip
    assert made.left_out == 2
    assert made.left_out_sums == {"count": 3, "total_ns": 50}
    assert table_of("some", "Some", ("name", "count"), [("a", 3)]).left_out_sums == {}
    assert table_of("some", "Some", ("name", "count"), []).left_out_sums == {}
