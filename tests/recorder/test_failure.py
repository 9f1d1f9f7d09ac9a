"""What a process leaves behind when an exception ends it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stepscope.recorder import failure, guard
from stepscope.recorder.recorder import Recorder
from stepscope.records.identity import RankIdentity
from stepscope.ring import RingReader, RingState

WHO = RankIdentity(host="node", pid=1, rank=3, world_size=4)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """How a Flight Recorder was asked that has one word to say."""
    calls: list[tuple[bool, bool]] = []

    def dump(*arguments: bool) -> bytes:
        calls.append(arguments)  # type: ignore[arg-type]
        return b"{}"

    module: Any = ModuleType("torch._C._distributed_c10d")
    module._dump_fr_trace_json = dump
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def die(recorder: Recorder, run_dir: Path) -> None:
    error = ValueError("bad")
    failure.record_failure(recorder, run_dir, error, "Traceback")


def test_a_rank_of_several_leaves_its_flight_recorder(
    make_recorder: Callable[..., Recorder], asked: list[tuple[bool, bool]], tmp_path: Path
) -> None:
    recorder = make_recorder()
    recorder.appear(WHO, serve=False)
    recorder.identity = replace(WHO, pid=os.getpid())
    die(recorder, tmp_path / "run")
    assert asked == [(True, False)]  # all collectives, ended ones too
    assert (tmp_path / "run" / "flight" / "rank_3.json").read_bytes() == b"{}"
    (account,) = (json.loads(path.read_bytes()) for path in (tmp_path / "run" / "errors").iterdir())
    assert (account["type"], account["message"], account["rank"]) == ("ValueError", "bad", 3)


def test_one_that_is_alone_or_was_never_seen_leaves_none(
    make_recorder: Callable[..., Recorder], asked: list[tuple[bool, bool]], tmp_path: Path
) -> None:
    recorder = make_recorder()
    die(recorder, tmp_path / "run")
    recorder.appear(replace(WHO, rank=0, world_size=1), serve=False)
    die(recorder, tmp_path / "run")
    assert asked == []
    assert not (tmp_path / "run" / "flight").exists()


def test_nor_one_whose_torch_has_no_flight_recorder(
    make_recorder: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", ModuleType("empty"))
    failures = guard.failures()
    recorder = make_recorder()
    recorder.appear(WHO, serve=False)
    die(recorder, tmp_path / "run")
    assert guard.failures() == failures
    assert not (tmp_path / "run" / "flight").exists()


def test_every_recorder_is_kept(
    make_recorder: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NCCL's beside gloo's; torch 2.15 has one for each backend and says so."""
    gloo, nccl, nccl2 = (b'{"entries":["%b"]}' % name for name in (b"gloo", b"nccl", b"nccl2"))

    def named(collectives: bool, active: bool, backend: str = "gloo") -> bytes:
        """_dump_fr_trace_json(includeCollectives, onlyActive, backend: str = 'gloo') -> bytes"""
        return {"gloo": gloo, "nccl2": nccl2}[backend]

    module: Any = ModuleType("torch._C._distributed_c10d")
    module._dump_fr_trace_json = lambda *_: gloo
    module._dump_nccl_trace_json = lambda *_: nccl
    monkeypatch.setitem(sys.modules, module.__name__, module)
    recorder = make_recorder()
    recorder.appear(WHO, serve=False)
    die(recorder, tmp_path / "run")
    file = tmp_path / "run" / "flight" / "rank_3.json"
    assert file.read_bytes() == b'{"recorders":[%b,%b]}' % (nccl, gloo)
    module._dump_fr_trace_json = named
    module._dump_nccl_trace_json = lambda *_: b'{"pg_config":{}}'
    die(recorder, tmp_path / "run")
    assert file.read_bytes() == b'{"recorders":[%b,%b]}' % (nccl2, gloo)


@pytest.mark.parametrize(
    ("over", "ago_s", "leaves"),
    [(None, None, False), ("ended", 0, False), ("recovered", 0, True), ("ended", 1000, True)],
)
def test_what_the_agent_kept_of_a_hang_stays(
    make_recorder: Callable[..., Recorder],
    asked: list[tuple[bool, bool]],
    tmp_path: Path,
    over: str | None,
    ago_s: int | None,
    leaves: bool,
) -> None:
    recorder = make_recorder()
    recorder.appear(WHO, serve=False)
    hangs = tmp_path / "run" / "hangs"
    hangs.mkdir()
    over_ns = None if ago_s is None else time.time_ns() - ago_s * 10**9
    (hangs / "node-1.json").write_text(json.dumps({"over": over, "over_wall_ns": over_ns}))
    (hangs / "node-2.json").write_text("{")
    (hangs / "node-3.json").write_text("[]")
    die(recorder, tmp_path / "run")
    assert bool(asked) is leaves


def test_an_account_counts_before_the_flight_recorder_is_asked(
    make_recorder: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorder = make_recorder()
    recorder.appear(WHO, serve=False)
    recorder.identity = replace(WHO, pid=os.getpid())
    seen = []

    def dump(*_: bool) -> bytes:
        assert recorder.ring is not None
        reader = RingReader(recorder.ring.path)
        seen.append((reader.state(), len(list((tmp_path / "run" / "errors").glob("*.json")))))
        reader.close()
        raise OSError("no room")

    module: Any = ModuleType("torch._C._distributed_c10d")
    module._dump_fr_trace_json = dump
    monkeypatch.setitem(sys.modules, module.__name__, module)
    failures = guard.failures()
    die(recorder, tmp_path / "run")
    assert seen == [(RingState.EXCEPTION, 1)]
    assert guard.failures() == failures + 1


@pytest.mark.parametrize("name", ["print_exc", "format_exc"])
def test_exceptions_are_heard_of_only_where_they_end_a_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import traceback

    for original in ("print_exc", "format_exc"):
        monkeypatch.setattr(traceback, original, getattr(traceback, original))
    heard: list[tuple[str, str]] = []
    failure.watch_multiprocessing(lambda error, text: heard.append((str(error), text)))
    raising = "def _wrap():\n    try:\n        raise KeyError('x')\n    except KeyError:"
    code = f"{raising}\n        traceback.{name}()\n_wrap()"
    exec(code, {"traceback": traceback, "__name__": "__main__"})
    assert heard == []
    exec(code, {"traceback": traceback, "__name__": "torch.multiprocessing.spawn"})
    assert [error for error, _ in heard] == ["'x'"]
    assert heard[0][1].endswith("KeyError: 'x'\n")
