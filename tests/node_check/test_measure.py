"""The loads of a check share its time: each gets its part, however long the check and whatever the node has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stepscope.node_check import judge, measure_node

START_S = 6.0
"""A process that loads torch takes about that long."""
RANKS = {"WORLD_SIZE": "8", "LOCAL_RANK": "0"}
ROW = {
    **dict.fromkeys(("done", "wall_s", "cpu_s"), 1.0),
    "rates": [1.0],
    "waited_s": 0.0,
    "read_rates": [1.0],
    "gpus": [{"tflops": 600.0, "memory_gb_s": 3000.0, "name": "H100"}],
    "hosts": ["n1"],
}


class Loads:
    """Take their time and the start of a process on a clock that stands still otherwise."""

    def __init__(self, **answers: Any) -> None:
        self.now_s = 1000.0
        self.names: list[str] = []
        self.answers = answers

    def clock(self) -> float:
        return self.now_s

    def run(self, loads: Sequence[tuple[str, str]], seconds: float, until_s: float) -> list[dict[str, Any] | None]:
        self.names.append(loads[0][0])
        ended_s = self.now_s + seconds + START_S
        self.now_s = min(ended_s, until_s)
        return [None if ended_s > until_s else self.answers.get(name, ROW) for name, _ in loads]

    def measure(self, seconds: float, folder: Path, environ: dict[str, str]) -> dict[str, Any]:
        return measure_node(seconds, folder, environ, run=self.run, now_s=self.clock, has_gpu=lambda: True)


@pytest.mark.parametrize("environ", [{}, RANKS], ids=["alone", "torchrun"])
@pytest.mark.parametrize("seconds", [2.0, 20.0, 60.0, 90.0])
def test_nothing_is_skipped_for_lack_of_time(seconds: float, environ: dict[str, str], tmp_path: Path) -> None:
    loads = Loads()
    result = loads.measure(seconds, tmp_path, environ)
    assert result["skipped"] == {}
    assert {"processor", "memory", "disk_write", "disk_read", "gpu0_matmul"} <= result["figures"].keys()
    assert loads.names == [*(["links"] if environ else []), "processor", "memory", "disk", "gpu"]
    assert loads.now_s - 1000.0 <= min(seconds + len(loads.names) * START_S + 0.001, 120.0)


def test_a_rank_that_only_helps_measures_the_links_as_long_as_the_first(tmp_path: Path) -> None:
    first, helper = Loads(links=None), Loads()
    first.measure(60.0, tmp_path, RANKS)
    assert helper.measure(60.0, tmp_path, {**RANKS, "LOCAL_RANK": "3"})["figures"] == {"slowest_link": 1.0}
    assert helper.names == ["links"]


@pytest.mark.parametrize(
    ("answers", "reason"),
    [({"gpu": None}, "no answer within its time"), ({"gpu": {}}, "there is no torch that can use it")],
)
def test_a_node_whose_gpus_were_not_measured_is_not_simply_fit(
    answers: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    result = Loads(**answers).measure(60.0, tmp_path, {})
    assert result["skipped"] == {"gpu": reason}
    verdict = judge({**result, "host": "n1", "others": 0.0}, [], [])
    assert verdict.state == "fit"
    assert verdict.title == f"n1 is fit as far as it was measured, without gpu ({reason})."


def test_a_disk_that_is_full_is_not_measured_and_says_so(tmp_path: Path) -> None:
    result = Loads(disk={"skipped": "less than 2 GiB are free"}).measure(60.0, tmp_path, {})
    assert result["skipped"] == {"disk": "less than 2 GiB are free"}
    assert "disk_write" not in result["figures"]
