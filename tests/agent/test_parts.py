"""The agent's parts on their own: the pipe, the journal, the GPU sampler with a driver of our making."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.agent.drain import _open_pidfd
from stepscope.agent.job_context import Control
from stepscope.agent.journal import MAX_SAMPLES, Journal
from stepscope.agent.sampling.host import GpuSampler
from stepscope.store import file_io


def test_the_end_is_heard_in_pieces(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    control = Control(reading)
    os.write(writing, b'{"end": {"exit_co')
    control.feed()
    assert (control.end, control.closed) == (None, False)
    os.write(writing, b'de": 0, "status": "finished"}}\n')
    control.feed()
    assert control.end == {"exit_code": 0, "status": "finished"}


def test_noise_is_passed_over(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    control = Control(reading)
    os.write(writing, b'hello\n[]\n{"end": 3}\n\xff\n{"other": {}}\n' + b"[" * 3000 + b"\n")
    control.feed()
    assert (control.end, control.closed) == (None, False)


def test_a_launcher_that_died_is_an_end_of_file(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.close(writing)
    control = Control(reading)
    control.feed()
    assert (control.end, control.closed) == (None, True)


def test_no_standard_input_at_all() -> None:
    control = Control(987654)
    control.feed()
    assert control.closed


def test_the_journal_keeps_what_the_disk_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(tmp_path)
    with monkeypatch.context() as patch:

        def full(path: Path, records: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr("stepscope.agent.journal.append_jsonl", full)
        journal.event("rank_start", rank=1)
        journal.samples({"n": n} for n in range(MAX_SAMPLES + 5))
        assert [journal.flush(), journal.flush()] == [False, False]
    assert journal.flush()
    assert [e["event"] for e in file_io.read_jsonl(tmp_path / "events.jsonl")[0]] == ["rank_start", "warning"]
    samples = file_io.read_jsonl(tmp_path / "samples.jsonl")[0]
    assert (samples[0], len(samples)) == ({"n": 5}, MAX_SAMPLES)
    assert capsys.readouterr().err.count("\n") == 1


class FakeNvmlError(Exception):
    pass


class FakeNvml:
    """Two GPUs; the second one tells nothing about its power."""

    NVMLError = FakeNvmlError
    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = 0
    NVML_CLOCK_MEM = 2

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlDeviceGetUUID": lambda h: f"GPU-{h}abc",
            "nvmlDeviceGetName": lambda h: b"Fake GPU",
            "nvmlDeviceGetUtilizationRates": lambda h: SimpleNamespace(gpu=90 + h, memory=40),
            "nvmlDeviceGetMemoryInfo": lambda h: SimpleNamespace(used=10, total=100),
            "nvmlDeviceGetTemperature": lambda h, _: 61,
            "nvmlDeviceGetPowerUsage": self._power,
            "nvmlDeviceGetEnforcedPowerLimit": lambda h: 700_000,
            "nvmlDeviceGetClockInfo": lambda h, kind: 1980 + kind,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda h: 0x1 | 0x4 | 0x40,
        }
        return answers[name]

    def _power(self, handle: int) -> int:
        if handle:
            raise FakeNvmlError
        return 350_500


def sampled(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> list[dict[str, Any]]:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    sampler = GpuSampler("node")
    sampler.request()
    records: list[dict[str, Any]] = []
    deadline = time.monotonic() + 10
    while sampler.pending and time.monotonic() < deadline:
        records += sampler.collect()
    assert not sampler.silent()
    return records


@pytest.mark.leaks_allowed
def test_gpu_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second = sampled(monkeypatch, FakeNvml())
    assert {key: value for key, value in first.items() if not key.endswith("_ns")} == {
        "node": "node",
        "kind": "gpu",
        "index": 0,
        "uuid": "GPU-0abc",
        "name": "Fake GPU",
        "util_percent": 90,
        "mem_util_percent": 40,
        "mem_used": 10,
        "mem_total": 100,
        "temperature_c": 61,
        "power_w": 350.5,
        "power_limit_w": 700.0,
        "sm_clock_mhz": 1980,
        "mem_clock_mhz": 1982,
        "throttle_reasons": ["sw_power_cap", "hw_thermal"],
    }
    assert "power_w" not in second
    assert json.dumps(second)


@pytest.mark.leaks_allowed
@pytest.mark.parametrize(
    ("listed", "indices"), [("1", [1]), ("GPU-0abc", [0]), ("", []), ("0,1", [0, 1]), ("MIG-x", [0, 1])]
)
def test_only_the_jobs_own_gpus(monkeypatch: pytest.MonkeyPatch, listed: str, indices: list[int]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert [record["index"] for record in sampled(monkeypatch, FakeNvml())] == indices


@pytest.mark.leaks_allowed
def test_no_driver_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise FakeNvmlError

    assert sampled(monkeypatch, SimpleNamespace(NVMLError=FakeNvmlError, nvmlInit=no_driver)) == []


@pytest.mark.leaks_allowed
def test_a_driver_that_never_answers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=never.wait, NVMLError=OSError))
    sampler = GpuSampler("node", silence_s=-1.0)
    assert not sampler.silent()
    sampler.request()
    assert sampler.silent()
    assert sampler.collect() == []


def test_a_process_that_is_gone_has_no_descriptor() -> None:
    assert _open_pidfd(1 << 30) is None
