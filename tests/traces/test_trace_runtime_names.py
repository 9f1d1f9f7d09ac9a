"""Calls of the runtime that wait for the device, and those that launch graphs."""

from __future__ import annotations

import pytest

from stepscope.traces.model.kernel_names import is_graph_launch, is_synchronizing


@pytest.mark.parametrize(
    "name",
    [
        "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaStreamSynchronize_v3020",
        "cuCtxSynchronize", "cuStreamSynchronize", "hipDeviceSynchronize", "hipStreamSynchronize",
        "hipEventSynchronize", "cudaMemcpy", "cudaMemcpy2D", "cudaMemcpyToSymbol", "cuMemcpyDtoH_v2", "hipMemcpy",
        "hipMemcpyWithStream", "cudaFree", "hipFree", "urQueueFinish", "zeEventHostSynchronize",
    ],
)  # fmt: skip
def test_synchronizing(name: str) -> None:
    assert is_synchronizing(name)


@pytest.mark.parametrize(
    "name",
    [
        "cudaMemcpyAsync", "cudaMemcpy2DAsync", "cuMemcpyDtoHAsync_v2", "hipMemcpyAsync", "cudaFreeAsync",
        "cudaLaunchKernel", "cudaEventQuery", "cudaStreamWaitEvent", "cudaMalloc", "myStreamSynchronize", "",
    ],
)  # fmt: skip
def test_not_synchronizing(name: str) -> None:
    assert not is_synchronizing(name)


def test_graph_launches() -> None:
    names = ("cudaGraphLaunch", "cudaGraphLaunch_v10000", "hipGraphLaunch", "cuGraphLaunch", "cudaGraphInstantiate")
    assert [is_graph_launch(name) for name in names] == [True, True, True, True, False]
