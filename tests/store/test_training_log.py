"""What frameworks print of the training, read from the logs of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakes.cluster import Cluster

from stepscope.reports import render_text, summarize
from stepscope.store.live.logs import read_training_log

TITAN = "step: {}  loss:  {}  memory:  1.90GiB(2.40%)  tps: 1,234  tflops: 12.34  mfu: 3.21%\n"
MEGATRON = " iteration  {}/ 1000 | elapsed time per iteration (ms): 40.0 | lm loss: 2.5E+00 |\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_the_last_line_and_our_step(run_dir: Path) -> None:
    run = Cluster(ranks=2, steps=20).run()
    lines = [TITAN.format(step, loss) for step, loss in ((110, 7.5), (115, 6.5), (120, 6.0))]
    (run_dir / "logs" / "rank-0.log").write_text("hello\n" + "".join(lines))
    (run_dir / "logs" / "rank-1.log").write_text(TITAN.format(1, 1.0))
    training_log = read_training_log(run_dir, run.ranks)
    assert (training_log["framework"], training_log["rank"], training_log["iteration"], training_log["step"]) == (
        "torchtitan",
        0,
        120,
        19,
    )
    assert training_log["figures"]["loss"] == {"last": 6.0, "median": 6.5}
    summary = summarize(replace(run, training_log=training_log))
    assert summary["training_log"] == training_log
    text = render_text(summary, width=200)
    assert (
        "training  torchtitan iteration 120 (our step 19) · loss 6 (median 6.5) · 1,234 tokens/s per device · "
        "12.3 TFLOP/s per device · MFU 3.21%"
    ) in text


def test_megatron_prints_on_the_last_rank(run_dir: Path) -> None:
    run = Cluster(ranks=4, steps=20).run()
    (run_dir / "logs" / "rank-0.log").write_text("building the model\n")
    (run_dir / "logs" / "rank-3.log").write_text(MEGATRON.format(20))
    training_log = read_training_log(run_dir, run.ranks)
    assert (training_log["framework"], training_log["rank"], training_log["iteration"], training_log["step"]) == (
        "megatron",
        3,
        20,
        19,
    )


def test_without_such_lines_there_is_nothing(run_dir: Path) -> None:
    run = Cluster(ranks=2, steps=20).run()
    (run_dir / "logs" / "rank-0.log").write_text("{'loss': 2.5}\n")
    assert read_training_log(run_dir, run.ranks) == {}
    assert summarize(run)["training_log"] is None
