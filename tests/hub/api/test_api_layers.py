"""``/layers``: memory and time by module, of a run that is over and of one that goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster
from gpt_layers import layer_lines, layer_records, write_layer_samples

from stepscope.hub.api.steps import _throughput
from stepscope.hub.live.live_run import Judged, LiveRun
from stepscope.hub.open_run import OpenRun
from stepscope.hub.runs import Runs
from stepscope.reports.layers import choose_sample, layers_document
from stepscope.store.file_io import append_jsonl
from stepscope.store.paths import LAYERS
from tests.hub.run_parts import Feed, record

RUN = "/api/v1/runs/gpt/layers"


@pytest.fixture
def layers_hub(tmp_path: Path, serve: Callable[..., Any]) -> Any:
    root = tmp_path / "runs"
    write_layer_samples(record(root, "gpt", Cluster(ranks=4, steps=20).run()))
    record(root, "plain", Cluster(ranks=1, steps=5).run())
    return serve(lambda: Runs.of_folder(root))


def test_the_document(layers_hub: Any) -> None:
    records = layer_records()
    sample = choose_sample(records)
    assert sample is not None
    assert layers_hub.get(RUN).json == layers_document(records, sample)
    chosen = layers_hub.get(f"{RUN}?rank=1&step=250").json
    assert (chosen["rank"], chosen["step"]) == (1, 200)
    small = layers_hub.get(f"{RUN}?modules=10").json
    assert (len(small["modules"]), small["modules_left_out"]) == (10, 115)


def test_refusals_and_etags(layers_hub: Any) -> None:
    assert layers_hub.get(RUN, token=None).status == 401
    assert layers_hub.get("/api/v1/runs/none/layers").status == 404
    missing = layers_hub.get(f"{RUN}?rank=9")
    assert (missing.status, missing.json["error"]) == (404, "there are no layer samples of this rank")
    for wrong in ("rank=-1", "step=x", "modules=0", "modules=1001", "depth=2"):
        assert layers_hub.get(f"{RUN}?{wrong}").status == 400
    tag = layers_hub.get(RUN).headers["ETag"]
    assert layers_hub.get(RUN, If_None_Match=tag).status == 304


def test_a_run_without_samples(layers_hub: Any) -> None:
    document = layers_hub.get("/api/v1/runs/plain/layers").json
    assert (document["rank"], document["ranks"], document["modules"]) == (None, [], [])


def test_samples_of_a_run_that_goes_on(tmp_path: Path, serve: Callable[..., Any]) -> None:
    run = Feed(tmp_path / "runs", "live", Cluster(ranks=2, steps=400))
    run.make(20)
    hub = serve(lambda: Runs.of_folder(tmp_path / "runs"))
    path = "/api/v1/runs/live/layers"
    assert hub.get(path).json["rank"] is None
    append_jsonl(run.run_dir / LAYERS, layer_lines(ranks=2, samples=1))
    while (document := hub.get(path).json)["rank"] is None:
        time.sleep(0.02)  # it is read again after a second at the latest
    assert (document["rank"], document["step"]) == (0, 0)
    run.end()


# -- throughput -------------------------------------------------------------------------------------------------------


def worked(**how: Any) -> list[dict[str, Any]]:
    """Samples every 100 steps, one second apart, with what a step does."""
    work = {"flops": 10**10, "samples": 8, "tokens": 4096}
    return [line | {"work": work} if line["kind"] == "sample" else line for line in layer_lines(ranks=1, **how)]


RATES = {"samples/s": 210.5, "tokens/s": 107_780.0, "TFLOP/s per device": 0.2631}
"""A step takes 38 ms."""


def test_the_throughput_is_charted_with_the_metrics(tmp_path: Path, serve: Callable[..., Any]) -> None:
    root = tmp_path / "runs"
    append_jsonl(record(root, "gpt", Cluster(ranks=1, steps=320).run()) / LAYERS, worked(samples=4))
    hub = serve(lambda: Runs.of_folder(root))
    path = "/api/v1/runs/gpt/metrics"
    found = hub.get(path).json
    assert found["left_out"] == 0
    assert [(metric["name"], metric["step"]) for metric in found["metrics"]] == [
        (name, [100, 200, 300]) for name in RATES
    ]
    assert [metric["value"] for metric in found["metrics"]] == [
        pytest.approx([rate] * 3, rel=0.01) for rate in RATES.values()
    ]
    part = hub.get(f"{path}?first=150&last=250").json["metrics"]
    assert [(row["name"], row["step"]) for row in part] == [(name, [200]) for name in RATES]
    assert hub.get(f"{path}?bins=2").json["metrics"][0]["step"] == [100, 300]
    whole = hub.get("/api/v1/runs/gpt/summary?keys=throughput").json["summary"]["throughput"]
    assert whole["samples_per_second"] == pytest.approx(sum(found["metrics"][0]["value"]) / 3, rel=0.002)
    assert hub.get(f"{path}?first=301").json["metrics"] == []


def test_the_throughput_of_a_run_that_goes_on(tmp_path: Path, serve: Callable[..., Any]) -> None:
    run = Feed(tmp_path / "runs", "live", Cluster(ranks=1, steps=400))
    run.make(220)
    append_jsonl(run.run_dir / LAYERS, worked(samples=3))
    hub = serve(lambda: Runs.of_folder(tmp_path / "runs"))
    while not (found := hub.get("/api/v1/runs/live/metrics").json["metrics"]):
        time.sleep(0.02)  # until its steps and samples are read
    assert {row["name"]: row["value"][0] for row in found} == pytest.approx(RATES, rel=0.01)
    lines = hub.get("/metrics").body.decode().splitlines()
    names = ("samples_per_second", "tokens_per_second", "device_flops_per_second")
    assert [sum(line.startswith(f'stepscope_{name}{{run="live"}} ') for line in lines) for name in names] == [1, 1, 1]
    run.end()


def test_what_the_script_notes_is_not_charted_twice(tmp_path: Path) -> None:
    live = LiveRun()
    live.noted.add(3, {"train/tokens_per_second": 5.0, "loss": 1.0})
    live.noted.add(3, {"mfu": 0.5}, seen=True)
    known = {"samples_per_second": 8.0, "mfu": 0.3, "curve": {"step": [3], "tokens_per_second": [9.0]}}
    live.judge(Judged(throughput={**known, "tokens_per_second": 9.0}))
    run = OpenRun(tmp_path, live)
    assert run.throughput() == known
    assert [row["name"] for row in _throughput(run.throughput(), 0, 9, 9)] == []
    run.document = {"throughput": None}
    assert run.throughput() == {}


@pytest.mark.parametrize(
    "throughput",
    [{}, {"curve": 7}, {"curve": {"step": 7, "mfu": [1]}}, {"curve": {"step": ["1", 2, 3], "mfu": [1, None, "x"]}}],
)
def test_a_summary_from_elsewhere_has_no_curves(throughput: Any) -> None:
    assert list(_throughput({"mfu": None, **throughput}, 0, 9, 9)) == []
