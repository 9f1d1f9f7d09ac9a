"""Traces as TensorBoard's profiler plugin wants them."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from fakes.traces import MadeTrace

from stepscope.cli.main import run_command
from stepscope.errors import UsageError
from stepscope.traces.model.columns import TraceMeta
from stepscope.traces.tensorboard import worker_file, write_tensorboard

WORKER = re.compile(r"^(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?$")
NODE_PROCESS = re.compile(r"^(.*)_(\d+)")
"""torch-tb-profiler 0.4.3 finds workers, and their hosts and processes, by these patterns (its ``consts.py``)."""

META = TraceMeta(path="a.json", rank=3, host="node-1", pid=4242, origin_ns=1_694_128_201_545_000_000)


@pytest.mark.parametrize(
    ("meta", "worker"),
    [
        (META, "node-1_4242"),
        (replace(META, host="../evil host\n", pid=7), "evil-host_7"),
        (replace(META, host=None), "rank_3"),
        (replace(META, pid=None), "node-1_3"),
    ],
)
def test_names(meta: TraceMeta, worker: str) -> None:
    name = worker_file(3, meta)
    found = WORKER.match(name)
    assert found is not None
    assert found.groups() == (worker, ".1694128201545")
    assert NODE_PROCESS.match(worker) is not None


def test_all_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE_GB", "0")
    source = tmp_path / "job"
    source.mkdir()
    texts = []
    for rank in range(3):
        made = MadeTrace(rank=rank, world_size=3)
        made.step(1, 10**15 + rank * 1000, 100)
        texts.append(made.text())
    (source / "0.json").write_bytes(texts[0])
    (source / "1.json.gz").write_bytes(gzip.compress(texts[1]))
    (source / "2.json.zst").write_bytes(zstandard.compress(texts[2]))
    assert run_command(["trace", str(source), "--tensorboard", str(tmp_path / "logs")]) == 0
    files = sorted((tmp_path / "logs" / "job").iterdir())
    assert [file.name for file in files] == [f"rank_{rank}.{10**12 + rank}.pt.trace.json.gz" for rank in range(3)]
    assert [json.loads(gzip.decompress(file.read_bytes())) for file in files] == list(map(json.loads, texts))
    assert f"{tmp_path / 'logs' / 'job'}: 3 traces; view with: tensorboard --logdir" in capsys.readouterr().err


def test_what_is_left_out_or_refused(tmp_path: Path) -> None:
    made = MadeTrace().write(tmp_path / "a.json")
    meta = replace(META, path=str(made))
    files, notices = write_tensorboard(
        [(0, meta), (1, replace(META, format="nsight", path="b.sqlite")), (2, meta)], tmp_path / "out"
    )
    assert len({file.name for file in files}) == 2
    assert notices == ["b.sqlite is not of torch.profiler: TensorBoard's plugin cannot read it"]
    with pytest.raises(UsageError, match="has the traces themselves"):
        write_tensorboard([(0, meta)], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write_tensorboard([(0, meta)], tmp_path / "file" / "out")
