"""Runs that were recorded on a real GPU: what the summary says of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stepscope.reports import render_text, summarise
from stepscope.store.load import open_run

RUNS = Path(__file__).parent / "data" / "h200"


def summary_of(name: str) -> dict[str, Any]:
    return summarise(open_run(RUNS / name))


def test_replays_of_a_graph_are_steps_and_no_bottleneck() -> None:
    summary = summary_of("graphs_whole")
    assert summary["steps"]["total"] == 203
    assert summary["steps"]["warmup"]["reasons"] == {"first": 1, "discovery": 2, "compile": 1, "warm-up": 2}
    assert [finding["kind"] for finding in summary["findings"]] == ["healthy"]
    (notice,) = summary["notices"]
    assert notice == (
        "200 of 203 steps were replays of a CUDA graph: "
        "what was captured (forward, backward, optimizer) is one phase there, 'cuda_graph'."
    )
    assert "cuda_graph" in render_text(summary)


def test_a_run_of_a_fifth_of_a_second_has_no_gpu_figures() -> None:
    """The samples around it are of its start, and of other jobs on that GPU: 0%, and 91% once."""
    (gpu,) = summary_of("graphs_whole")["host"]["gpus"]
    assert (gpu["samples"], gpu["util_percent"], gpu["power_w"]) == (0, None, None)
    assert "no sample in the steady steps" in render_text(summary_of("graphs_whole"))


def test_utilization_is_that_of_the_steady_steps() -> None:
    """Half of all samples say 0 to 3%: imports and the start of CUDA."""
    (gpu,) = summary_of("hf_trainer")["host"]["gpus"]
    assert gpu["util_percent"]["median"] == pytest.approx(91)
    assert gpu["samples"] == 3
    assert "busy 91%" in render_text(summary_of("hf_trainer"))


def test_the_peak_of_device_memory_has_its_steps() -> None:
    summary = summary_of("hf_trainer")
    assert summary["memory"]["device_peak"] == {"bytes": 93_415_424, "rank": 0, "steps": [36, 39]}
    assert "allocated 89 MiB at peak (steps 36–39) · reserved 92 MiB" in render_text(summary)


def test_shares_are_by_the_clock_of_the_findings() -> None:
    """Ten steps of the trainer were timed on the device, too few to judge: the verdict speaks of 18% of host time."""
    summary = summary_of("hf_trainer")
    assert summary["clock"] == "host"
    assert summary["phases"]["input"]["share"] == pytest.approx(0.18, abs=0.005)
    text = render_text(summary)
    assert "on device" not in text
    assert re.search(r"input +18%", text)
