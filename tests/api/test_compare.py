"""``stepscope.compare``: the verdict of ``stepscope compare`` as an object."""

from __future__ import annotations

import json
from operator import methodcaller
from pathlib import Path

import pytest

import stepscope
from stepscope.cli.main import run_command
from stepscope.errors import CompareError


def test_it_says_what_the_command_says(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = stepscope.compare("before", "after")
    assert run_command(["compare", "before", "after", "--json"]) == 0
    assert found.document == json.loads(capsys.readouterr().out)
    assert found.verdict == "slower"
    low, high = found.interval
    assert 0 < low < found.change < high
    assert found.title in str(found)
    assert found.to_markdown().startswith("#") or found.title in found.to_markdown()
    assert repr(found) == f"<Comparison slower: {found.title}>"
    assert methodcaller("_repr_html_")(found).startswith("<pre>")
    assert found.like_for_like
    assert list(found.notices) == found.document["notices"]


def test_phases_and_ranks(here: Path) -> None:
    found = stepscope.compare(["before", "base2", "base3"], stepscope.open("after"))
    assert [row["phase"] for row in found.phases().rows() if row["real"]] == ["forward"]
    forward = next(row for row in found.phases().rows() if row["phase"] == "forward")
    assert forward["low_ms"] < forward["change_ms"] < forward["high_ms"]
    assert sorted(found.ranks()["rank"]) == [0, 1, 2, 3]
    assert not found.ranks()["real"].any()


def test_inputs(here: Path, tmp_path: Path) -> None:
    with pytest.raises(CompareError, match="before is both the baseline and the run to compare with it"):
        stepscope.compare("before", "before")
    for name, ms in (("old", 100.0), ("new", 120.0)):
        (tmp_path / f"{name}.csv").write_text("ms\n" + "".join(f"{ms + at % 3}\n" for at in range(200)))
    found = stepscope.compare(tmp_path / "old.csv", tmp_path / "new.csv")
    assert (found.verdict, len(found.ranks())) == ("slower", 0)
    assert stepscope.compare("before", "after", only=True).document["baselines"][0]["name"] == "before"


def test_importing_the_package_does_not_replace_the_function(here: Path) -> None:
    assert callable(stepscope.compare)
    assert stepscope.compare("base2", "base3").verdict in ("same", "cannot_tell")
    assert callable(stepscope.compare)
