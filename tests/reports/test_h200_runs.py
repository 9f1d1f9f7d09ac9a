"""Runs that were recorded on a real GPU: what the summary says of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stepscope.reports import render_text, summarize
from stepscope.reports.layers import choose_sample, layers_document
from stepscope.store.load import open_run

RUNS = Path(__file__).parent / "data" / "h200"


def summary_of(name: str) -> dict[str, Any]:
    return summarize(open_run(RUNS / name))


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


# -- Layers -----------------------------------------------------------------------------------------------------------


def test_throughput_of_a_gpt() -> None:
    summary = summary_of("gpt_speed")
    found = summary["throughput"]
    # 123.6 million parameters in matrix products, 6 FLOPs each and token, and the attention of 1,024 tokens.
    attention = 12 * 12 * 1024 * 768
    assert found["per_step"] == {"flops": 8192 * (6 * 123_532_032 + attention), "samples": 8, "tokens": 8192}
    assert (found["peak_dtype"], found["peak_tflops"]) == ("bf16", 989.4)
    assert found["mfu"] == pytest.approx(found["tflops"] / 989.4, abs=1e-3)
    assert "177 TFLOP/s (18% of the bf16 peak)" in render_text(summary)


def test_our_first_look_is_no_slow_step_of_the_job() -> None:
    """Step 11 took 145 ms instead of 40: CUDA loads the kernels that look at the layers."""
    assert not any("step 11 " in finding["title"] for finding in summary_of("gpt_speed")["findings"])


def test_the_layers_explain_the_allocators_peak() -> None:
    records = open_run(RUNS / "gpt_speed").layers
    sample = choose_sample(records)
    assert sample is not None
    document = layers_document(records, sample)
    assert document["clock"] == "device"
    assert 0.97 < document["peak"]["bytes"] / sample.device_peak < 1.0
    assert "the step's peak explains 99%" in document["device"]["text"]


@pytest.mark.parametrize(
    ("run", "kind", "ranks", "title"),
    [
        ("flip", "replica_desync", [1], "Rank 1 has different weights from its peers in blocks.7.down from a step "),
        ("nan", "loss_nan", [1], "The loss of rank 1 is NaN from step 49 on, and that of the others from step 50"),
        ("leak", "memory_creep", [], "Device memory in use grows by 970 KiB a step, from 19.0 GiB"),
    ],
)
def test_faults_in_weights_loss_and_memory_lead(run: str, kind: str, ranks: list[int], title: str) -> None:
    first = summary_of(run)["findings"][0]
    assert (first["kind"], first["ranks"]) == (kind, ranks)
    assert first["title"].startswith(title)


def test_what_leaks_is_named() -> None:
    advice = summary_of("leak")["findings"][0]["advice"][0]
    assert advice.startswith("kept, a list made at layers_job.py:156, gets longer")
    assert "float32 [25000000] on cuda:0, 95 MiB each" in advice
