"""The CSV of Nsight Compute: made up after its documented forms, since no machine here has ncu."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from example_counts import examples
from fakes.traces import MadeTrace
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.cli.main import run_command
from stepscope.errors import TraceError
from stepscope.traces.nsight_compute import NcuKernel, function_of, read_ncu

DETAILS = """\
==PROF== Connected to process 4242 (/usr/bin/python3.11)
step 1, loss 0.5
==PROF== Profiling "gemm_bf16" - 0: 0%....50%....100% - 8 passes
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value","Rule Name","Rule Type","Rule Description"
"""
RAW = (
    '"ID","Process ID","Kernel Name","gpu__time_duration.sum","sm__throughput.avg.pct_of_peak_sustained_elapsed",'
    '"gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed","sm__warps_active.avg.pct_of_peak_sustained_active",'
    '"launch__occupancy_limit_registers","launch__occupancy_limit_shared_mem","launch__occupancy_limit_warps","x"\n'
    '"","","","usecond","%","%","%","block","block","block",""\n'
    '"0","7","gemm_bf16","1,234.5","80.5","40","12.5","2","1","16","?"\n'
    '"1","7","gemm_bf16","1,235.5","81.5","42","n/a","2","1","16","?"\n'
    '"2","7","softmax","10","5","90","50","8","32","4",""\n'
)


def details(*rows: tuple[str, str, str, str, str]) -> str:
    """Launch, kernel, metric, unit, value."""
    return DETAILS + "".join(
        f'"{launch}","4242","python3.11","127.0.0.1","{kernel}","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0",'
        f'"GPU Speed Of Light Throughput","{metric}","{unit}","{value}","","",""\n'
        for launch, kernel, metric, unit, value in rows
    )


def test_details(tmp_path: Path) -> None:
    path = tmp_path / "ncu.csv"
    path.write_text(
        details(
            ("0", "gemm_bf16", "Duration", "us", "200.50"),
            ("0", "gemm_bf16", "DRAM Throughput", "%", "35.5"),
            ("0", "gemm_bf16", "Compute (SM) Throughput", "%", "75"),
            ("0", "gemm_bf16", "Achieved Occupancy", "%", "12.5"),
            ("0", "gemm_bf16", "Theoretical Occupancy", "%", "25"),
            ("0", "gemm_bf16", "Block Limit Registers", "block", "2"),
            ("0", "gemm_bf16", "Block Limit Shared Mem", "block", "4"),
            ("0", "gemm_bf16", "Something New", "furlong", "4"),
            ("1", "gemm_bf16", "Duration", "ms", "0.3"),
            ("1", "gemm_bf16", "DRAM Throughput", "%", "n/a"),
        )
        + "the program's last words, with, commas\n"
    )
    assert read_ncu(path) == [
        NcuKernel(
            name="gemm_bf16",
            launches=2,
            duration_ns=250_250,
            occupancy_share=0.125,
            possible_occupancy_share=0.25,
            dram_share=0.355,
            sm_share=0.75,
            limited_by="registers",
        )
    ]


def test_raw(tmp_path: Path) -> None:
    path = tmp_path / "raw.csv"
    path.write_text(RAW)
    gemm, softmax = read_ncu(path)
    assert (gemm.name, gemm.launches, gemm.duration_ns, gemm.limited_by) == ("gemm_bf16", 2, 1_235_000, "shared memory")
    assert (gemm.sm_share, gemm.dram_share, gemm.occupancy_share) == pytest.approx((0.81, 0.41, 0.125))
    assert (softmax.duration_ns, softmax.dram_share, softmax.limited_by) == (10_000, 0.9, "warps")
    assert softmax.possible_occupancy_share is None


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("gemm_bf16", "gemm_bf16"),
        ("void at::native::(anonymous namespace)::softmax<float, 4>(float*, int)", "softmax"),
        ("at::native::vectorized_elementwise_kernel(int, at::native::Add)", "vectorized_elementwise_kernel"),
        ("void cutlass::Kernel2<cutlass_80_tensorop>(T1::Params)", "Kernel2"),
        ("", ""),
        ("<", "<"),
    ],
)
def test_functions(name: str, function: str) -> None:
    assert function_of(name) == function


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPSCOPE_CACHE_GB", "0")
    made = MadeTrace()
    made.step(1, 0, 1000)
    made.launched("gemm_bf16", at=1, start=10, dur=300)
    made.launched("void at::native::softmax<float>(float*)", at=2, start=400, dur=20)
    made.launched("alone", at=3, start=500, dur=5)
    return made.write(tmp_path / "trace.json")


def test_joined_by_name(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "raw.csv"
    path.write_text(RAW + '"3","7","elsewhere","10","5","90","50","8","32","4",""\n')
    assert run_command(["trace", str(trace), "--ncu", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    tables = document["ranks"]["0"]["tables"]
    rows = {row["name"]: row for row in tables["kernels"]["rows"]}
    assert (rows["gemm_bf16"]["ncu_duration_ns"], rows["gemm_bf16"]["ncu_limited_by"]) == (1_235_000, "shared memory")
    assert rows["void at::native::softmax<float>(float*)"]["ncu_dram_share"] == 0.9
    assert rows["alone"]["ncu_duration_ns"] is None
    assert [(row["name"][:4], row["joined_by"], row["launches"]) for row in tables["ncu"]["rows"]] == [
        ("gemm", "name", 2),
        ("void", "function", 1),
    ]
    assert f"{path}: 1 of 3 kernels are not in the trace, such as elsewhere" in document["notices"]
    assert run_command(["trace", str(trace), "--ncu", str(path)]) == 0
    assert "Kernels as measured by Nsight Compute" in capsys.readouterr().out


def test_another_instance_of_a_template_is_not_joined(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "raw.csv"
    path.write_text(
        RAW.replace('"softmax"', '"void at::native::softmax<double>(double*)"').replace("gemm_bf16", "other")
    )
    run_command(["trace", str(trace), "--ncu", str(path), "--json"])
    assert "ncu" not in json.loads(capsys.readouterr().out)["ranks"]["0"]["tables"]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "==PROF== nothing\n", '"unclosed', "\0\0\0", "x" * 200_000])
def test_what_is_not_its_output(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as raised:
        read_ncu(path)
    assert "\n" not in str(raised.value)
    with pytest.raises(TraceError):
        read_ncu(tmp_path / "none.csv")


@given(
    st.binary(max_size=60)
    | st.tuples(st.integers(0, len(RAW)), st.binary(max_size=8), st.integers(0, 12)).map(
        lambda cut: RAW.encode()[: cut[0]] + cut[1] + RAW.encode()[cut[0] + cut[2] :]
    )
)
@settings(max_examples=examples(300), deadline=None)
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(data)
    try:
        kernels = read_ncu(path)
    except TraceError:
        return
    for kernel in kernels:
        assert kernel.name
        assert kernel.duration_ns is None or kernel.duration_ns >= 0
