"""Findings of real traces: of jobs into which a fault was put, and of those that others have published."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from stepscope.traces.across_ranks.replay import like_peers
from stepscope.traces.findings import analyze_job
from stepscope.traces.job import JobAnalysis
from stepscope.traces.model.window import Window
from stepscope.traces.path.whatif import parse_change
from stepscope.traces.rank_analysis import RankAnalysis, analyze_rank
from stepscope.traces.reading.files import read_trace

DATA = Path(__file__).parent / "data" / "h200"


def job_of(paths: Iterable[Path]) -> JobAnalysis:
    traces = [read_trace(path) for path in sorted(paths)]
    return analyze_job([analyze_rank(trace, trace.meta.rank or 0) for trace in traces])


@pytest.fixture
def published(
    real_window: Callable[[Path], Window], real_analysis: Callable[[Path, int], RankAnalysis]
) -> Callable[[Path], JobAnalysis]:
    """Of a folder."""

    def published_job(folder: Path) -> JobAnalysis:
        paths = sorted(folder.glob("*.json.gz"))
        return analyze_job([real_analysis(path, real_window(path).trace.meta.rank or 0) for path in paths])

    return published_job


def kinds(job: JobAnalysis) -> list[tuple[str, str]]:
    return [(finding.kind, finding.severity) for finding in job.findings]


# -- faults put into jobs on an H200 --------------------------------------------------------------------------------

H200 = {
    "healthy": (
        [("exposed_copies", "warning")],
        "Copies between host and device that nothing hides take 2.45 ms of each 12.9 ms step (19%).",
    ),
    "compiled": (
        [("exposed_copies", "warning")],
        "Copies between host and device that nothing hides take 2.43 ms of each 11.5 ms step (21%).",
    ),
    "graphs": (
        [("exposed_copies", "warning")],
        "Copies between host and device that nothing hides take 2.43 ms of each 11.7 ms step (21%).",
    ),
    "naive_attention": (
        [("bandwidth_bound", "warning"), ("exposed_copies", "warning")],
        (
            "The device mostly reads and writes memory: kernels with few operations per byte (copy, elementwise and "
            "softmax) take 10.0 ms of each 15.9 ms step (63%)."
        ),
    ),
    "copies": (
        [("pageable_copies", "critical"), ("loader_bound", "critical")],
        (
            "Copies from pageable memory take 19.1 ms a step (128 MiB at 6.5 GiB/s); the device does nothing else "
            "for 19.1 ms of "
        ),
    ),
    "fp32": (
        [("fp32_matmul", "critical")],
        "Matrix products and convolutions run in float32 without Tensor Cores: 96.2 ms of each 108 ms step (89%).",
    ),
    "fragmentation": (
        [("exposed_copies", "warning"), ("fragmentation", "info")],
        "Copies between host and device that nothing hides take 2.4",
    ),
    "gc": (
        [("gc_pauses", "critical"), ("gpu_idle_host", "critical")],
        (
            "Python's garbage collector stops training: 3 collections, the longest 299 ms; 265 ms of each 612 ms "
            "step (43%)."
        ),
    ),
    "graph_breaks": (
        [("host_sync", "warning"), ("exposed_copies", "info"), ("graph_breaks", "info")],
        "The host waits for the device 3 times a step, mostly in aten::item, and the device then runs dry: 2.43 ms ",
    ),
    "loader": (
        [("loader_bound", "critical"), ("exposed_copies", "info")],
        "Training waits for the DataLoader: 30.3 ms of each 37.9 ms step (80%), 21.8 ms of it with the device idle",
    ),
    "sync": (
        [("host_sync", "critical"), ("exposed_copies", "info")],
        "The host waits for the device 8 times a step, mostly in aten::item at trace_faults.py(83): step, and the ",
    ),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("fault", H200)
def test_faults_of_one_rank(fault: str) -> None:
    job = job_of([DATA / f"{fault}.json.gz"])
    found, verdict = H200[fault]
    assert kinds(job) == found
    assert job.verdict.startswith(verdict)


def test_a_rank_that_sleeps() -> None:
    job = job_of((DATA / "forward-rank1-of-2").glob("*.json.gz"))
    assert job.verdict == (
        "Rank 1 comes last to 4 of 4 collectives; the other waits 19.9 ms of each 24.1 ms step (82%) for it (16 "
        "times as much "
        "waiting as transfer); its host spends 20.0 ms a step more than the other rank's in "
        "DistributedDataParallel.forward."
    )
    assert kinds(job) == [
        ("collective_straggler", "critical"),
        ("gpu_idle_host", "warning"),
        ("ddp_without_nccl", "warning"),
    ]
    # Neither the sleep nor the waiting for it: what is left on both ranks.
    assert job.findings[1].ranks == ()
    assert job.findings[1].evidence["idle_ms_per_step"] < 4.1


HABITS = {
    "threads": (
        [("host_python", "critical"), ("gil_contention", "warning")],
        (
            "1 other thread runs Python while the training thread does: 335 ms of each 528 ms step (63%), mostly in "
            "habits.py(20): count_words. Only one of them can hold the GIL."
        ),
    ),
    "optimizer": (
        [("host_python", "critical"), ("unfused_optimizer", "warning")],
        "Adam updates each parameter for itself, with 360 calls a step: 84.4 ms of each 129 ms step (65%).",
    ),
    "copies": (
        [("host_copies", "warning")],
        "Copying tensors on the host (aten::copy_) takes 2.65 s of each 2.92 s step (91%).",
    ),
}
"""Recorded on a busy machine with two cores (``data/habits/habits.py``)."""


@pytest.mark.parametrize("habit", HABITS)
def test_habits_of_a_process_without_a_device(habit: str) -> None:
    job = job_of([DATA.parent / "habits" / f"{habit}.json.gz"])
    found, title = HABITS[habit]
    assert kinds(job) == found
    assert job.findings[-1].title == title


# -- published traces -----------------------------------------------------------------------------------------------

PUBLISHED = {
    "hta_cp_alexnet": [("start_up", "info"), ("gpu_idle_sync", "info"), ("gpu_idle_host", "info")],
    "hta_cp_event_sync": [("gpu_idle_host", "info")],
    "hta_cp_event_sync_multi": [("gpu_idle_host", "warning")],
    "hta_df_index_resolver_1of2": [
        ("launch_bound", "critical"),
        ("fp32_matmul", "warning"),
        ("low_overlap", "warning"),
        ("fragmentation", "info"),
    ],
    "hta_nccl_data_1of2": [("launch_bound", "critical")],
    "hta_trace_diff/control": [("host_sync", "warning"), ("low_overlap", "warning")],
    "hta_trace_diff/test": [("fp32_matmul", "warning"), ("exposed_copies", "info")],
    "kineto_resnet50_w0": [("loader_bound", "critical"), ("fp32_matmul", "warning")],
}


@pytest.mark.few(3)
@pytest.mark.parametrize("folder", PUBLISHED)
def test_published_traces(shared_data: Path, folder: str, published: Callable[[Path], JobAnalysis]) -> None:
    assert kinds(published(shared_data / "traces" / folder)) == PUBLISHED[folder]


def test_the_late_rank_of_a_published_job(shared_data: Path, published: Callable[[Path], JobAnalysis]) -> None:
    job = published(shared_data / "traces" / "param_dlrm_8rank")
    late = next(finding for finding in job.findings if finding.kind == "collective_straggler")
    assert job.findings[0].kind == "host_sync", "33% to gain, against 3%; both are seen in a single step"
    assert {each.evidence["step_ms"] for each in job.findings} == {19.901}, "all shares are of one step"
    assert late.title == (
        "Rank 7 comes last to 5 of 8 collectives; the others wait 5.02 ms of each 19.9 ms step (25%) for it (28 "
        "times as much "
        "waiting as transfer); it starts the first traced step 4.52 ms after its peers, delayed before the trace; "
        "fixing it alone gains 509 µs, then they wait for rank 6."
    )
    replayed = like_peers(job.ranks, job.collectives, parse_change("rank:7=peers"))
    assert late.cost["seconds"] == replayed.gain_ns / 1e9 <= late.evidence["alone_ms"] / 1e3
    assert late.cost["if_fixed"]["step_ms"] == pytest.approx(19.901 - replayed.gain_ns / 1e6, abs=0.002)
    assert (late.ranks, late.severity) == ((7,), "warning")
    assert late.evidence["transfer_ms"] == 0.225
    assert late.evidence["mostly_waiting"]
    assert late.evidence["causes"] == {"7": {"cause": "before_the_trace", "excess_ms": 4.523}}
    # All but 2% of the communication is waiting: nothing is said of overlap, nor of anybody's network.
    assert not {"low_overlap", "exposed_communication", "collective_jitter"} & {each.kind for each in job.findings}
    assert not any("bucket" in line for each in job.findings for line in each.advice)
