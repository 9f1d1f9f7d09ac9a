"""Many files, in this process, in workers and on Ray."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from fakes.traces import MadeTrace
from nsight import MadeReport

from stepscope.errors import UsageError
from stepscope.traces import engine as engine_module
from stepscope.traces.engine import (
    Engine,
    FileTask,
    LocalEngine,
    Options,
    Problem,
    RayEngine,
    analyze_paths,
    engine_named,
    position_in,
    watched,
)
from stepscope.traces.rank_analysis import RankAnalysis
from stepscope.traces.reading.cache import Cache
from stepscope.traces.reading.files import read_traces

HERE, WORKERS = LocalEngine(1), LocalEngine(2)
LOCAL = pytest.mark.parametrize("engine", [HERE, WORKERS], ids=["here", "workers"])
MOSTLY_HERE = pytest.mark.parametrize(
    "engine", [HERE, pytest.param(WORKERS, marks=pytest.mark.soak)], ids=["here", "workers"]
)


def make(folder: Path, ranks: int, *, say_rank: bool = True) -> list[Path]:
    paths = []
    for rank in range(ranks):
        made = MadeTrace(rank=rank if say_rank else None, world_size=ranks)
        made.step(1, 0, 100)
        made.launched("gemm", at=2, start=20, dur=30 + rank)
        made.step(2, 100, 100)
        made.launched("gemm", at=102, start=120, dur=7)
        paths.append(made.write(folder / f"worker{9 - rank}.pt.trace.json.gz"))
    return paths


def shown(found: list[RankAnalysis | Problem]) -> list[tuple[int, int] | str]:
    return [
        each.message if isinstance(each, Problem) else (each.rank, each.temporal.compute_ns // 1000) for each in found
    ]


@LOCAL
def test_an_analysis_for_each_file(tmp_path: Path, engine: Engine) -> None:
    paths = make(tmp_path, 3)
    reports: list[tuple[int, int, int, int]] = []
    found = analyze_paths(paths, Options(), engine, lambda *numbers: reports.append(numbers))
    assert shown(found) == [(0, 30), (1, 31), (2, 32)]
    total = sum(path.stat().st_size for path in paths)
    assert reports[-1] == (3, 3, total, total)
    assert reports == sorted(reports)
    assert shown(analyze_paths(paths, Options(keep_last=True), engine)) == [(0, 37), (1, 38), (2, 39)]


@MOSTLY_HERE
def test_files_that_do_not_say_their_rank_are_numbered(tmp_path: Path, engine: Engine) -> None:
    paths = make(tmp_path, 3, say_rank=False)
    cache = Cache(folder=tmp_path / "cache")
    for _ in range(2):
        assert shown(analyze_paths(paths, Options(cache=cache), engine)) == [(0, 30), (1, 31), (2, 32)]
    # Another place among others is another number, also from the cache.
    assert shown(analyze_paths(paths[1:], Options(cache=cache), engine)) == [(0, 31), (1, 32)]


@LOCAL
def test_a_bad_file_is_a_problem_and_stops_nothing(tmp_path: Path, engine: Engine) -> None:
    good = make(tmp_path, 2)
    bad = tmp_path / "bad.json"
    bad.write_text("<html>")
    found = analyze_paths([good[0], bad, tmp_path / "none.json", good[1]], Options(), engine)
    assert [type(each) for each in found] == [RankAnalysis, Problem, Problem, RankAnalysis]
    for each, path in ((found[1], bad), (found[2], tmp_path / "none.json")):
        assert isinstance(each, Problem)
        assert each.path == str(path)
        assert str(path) in each.message
        assert "\n" not in each.message


@LOCAL
def test_processes_of_one_file_are_ranks(tmp_path: Path, engine: Engine) -> None:
    made = MadeReport()
    for pid in (10, 20):
        made.pid = pid
        made.launched("gemm", at=0, start=1000, end=pid * 1000)
    report = made.write(tmp_path / "a.sqlite")
    paths = [report, *make(tmp_path, 1)]
    assert shown(analyze_paths(paths, Options(), engine)) == [(0, 9), (1, 19), (0, 30)]


@MOSTLY_HERE
def test_the_second_time_nothing_is_read(tmp_path: Path, engine: Engine) -> None:
    paths = make(tmp_path, 3)
    cache = Cache(folder=tmp_path / "cache")
    first = analyze_paths(paths, Options(cache=cache), engine)
    for path in paths:
        entry = cache.entry(path)
        assert entry is not None
        # Only the results are left: had the columns been asked for, they would be there again.
        for file in entry.folder.glob("*.parquet"):
            file.unlink()
        (entry.folder / "index").unlink()
    assert shown(analyze_paths(paths, Options(cache=cache), engine)) == shown(first)
    assert not list(cache.folder.rglob("*.parquet"))
    # Another question is not answered by them.
    assert shown(analyze_paths(paths, Options(cache=cache, keep_last=True), engine)) == [(0, 37), (1, 38), (2, 39)]


def test_no_files() -> None:
    reports: list[tuple[int, ...]] = []
    assert analyze_paths([], Options(), progress=lambda *numbers: reports.append(numbers)) == []
    assert reports == []


@pytest.mark.parametrize(("sizes", "processes"), [([5], 0), ([1, 1, 1], 0), ([3, 3], 2), ([3] * 9, 3), ([9, 1], 2)])
def test_how_many_processes_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], processes: int
) -> None:
    """Of a single file none; of several as many as there are cores and megabytes for."""
    counts: list[int] = []

    def in_workers(jobs: list[object], options: Options, reading: object, count: int) -> list[tuple[int, Problem]]:
        counts.append(count)
        return [(index, Problem(path="", message="")) for index in range(len(jobs))]

    monkeypatch.setattr(engine_module, "_in_workers", in_workers)
    monkeypatch.setattr(engine_module, "_cores", lambda: 3)
    paths = []
    for number, size in enumerate(sizes):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_bytes(b" " * (size << 20))
    analyze_paths(paths, Options())
    assert counts == ([processes] if processes else [])


# ── workers that die ────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def killing_reader(cache: Cache, path: Path, wanted: Callable[[psutil.Process], bool]) -> Iterator[None]:
    """Whoever analyses ``path`` finds a pipe in the cache: it waits for a writer, who comes and has it killed."""
    analyze_paths([path], Options(cache=cache), HERE)
    entry = cache.entry(path)
    assert entry is not None
    pipe = entry.folder / "analyses.msgpack"
    pipe.unlink()
    os.mkfifo(pipe)
    over = threading.Event()

    def kill() -> None:
        with pipe.open("wb"):
            for child in psutil.Process().children(recursive=True):
                if wanted(child):
                    child.kill()
            over.wait(60)

    killer = threading.Thread(target=kill)
    killer.start()
    yield
    over.set()
    killer.join()


@pytest.mark.faults
def test_a_worker_that_is_killed_costs_its_file(tmp_path: Path) -> None:
    good = make(tmp_path, 3)
    cache = Cache(folder=tmp_path / "cache")
    jobs = [FileTask(path=path, number=n, size_bytes=n) for n, path in enumerate(good)]
    with killing_reader(cache, good[1], lambda process: True):
        outcomes = dict(engine_module._in_workers(jobs, Options(cache=cache), None, 1))
    assert outcomes[1] == Problem(
        path=str(good[1]),
        message=f"{good[1]}: the process reading it was killed (SIGKILL), probably out of memory",
    )
    assert isinstance(outcomes[0], list)
    assert isinstance(outcomes[2], list)


def test_a_caller_that_loses_interest_leaves_nothing_behind(tmp_path: Path) -> None:
    paths = make(tmp_path, 3)
    jobs = [FileTask(path=path) for path in paths]
    outcomes = WORKERS.run(jobs, Options(), None)
    next(iter(outcomes))
    del outcomes  # the fixture of all tests looks for processes that are left


@pytest.mark.faults
def test_a_caller_whose_script_has_no_guard(tmp_path: Path, run_python: Callable[..., object]) -> None:
    """Workers are programs of their own: they never run the caller's script again."""
    make(tmp_path, 2)
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from stepscope.traces.engine import Options\n"
        "from stepscope.traces.engine import LocalEngine, analyze_paths\n"
        "found = analyze_paths(sorted(Path('.').glob('*.gz')), Options(), LocalEngine(2))\n"
        "print([each.rank for each in found])\n"
    )
    done = run_python(script)
    assert done.stdout == "[1, 0]\n"  # type: ignore[attr-defined]


# ── progress within a file ──────────────────────────────────────────────────────────────────────────────────────────


def test_how_far_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a b"
    path.write_bytes(bytes(5000))
    assert position_in(path, os.getpid()) == 0
    with path.open("rb", buffering=0) as file:
        file.read(1234)
        assert position_in(path, os.getpid()) == 1234
        positions: list[int] = []
        seen = threading.Event()

        def tell(position: int) -> None:
            positions.append(position)
            seen.set()

        with watched(path, tell, every_s=0.001):
            assert seen.wait(30)
    assert set(positions) == {1234}
    assert position_in(path, 2**22 + 1) == 0
    with watched(path, None):
        pass


def test_a_bar_moves_within_one_large_file(tmp_path: Path) -> None:
    """The real reader reads the file bit by bit, and is seen to."""
    made = MadeTrace()
    for number in range(20_000):
        made.op(f"aten::op{number * 7919 % 1009}", number, 0.5, **{"Input Dims": [[number, number * 31 % 1013]]})
    path = made.write(tmp_path / "large.json")
    seen: set[int] = set()
    calls = itertools.count()

    def profile(frame: object, event: str, argument: object) -> None:
        if next(calls) % 500 == 0:
            seen.add(position_in(path, os.getpid()))

    sys.setprofile(profile)
    try:
        read_traces(path)
    finally:
        sys.setprofile(None)
    assert len(seen) > 2
    assert max(seen) <= path.stat().st_size


# ── Ray ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_engines_by_name() -> None:
    assert isinstance(engine_named("local"), LocalEngine)
    assert isinstance(engine_named("ray"), RayEngine)


def test_without_ray_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'stepscope\[ray\]'"):
        analyze_paths(make(tmp_path, 1), Options(), RayEngine())


@pytest.mark.soak
@pytest.mark.leaks_allowed
@pytest.mark.filterwarnings("ignore")
def test_a_real_local_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed (stepscope[ray])")
    import ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    paths = make(tmp_path, 5)
    bad = tmp_path / "bad.json"
    bad.write_text("no trace")
    reports: list[tuple[int, int, int, int]] = []
    cache = Cache(folder=tmp_path / "cache")
    files = [*paths, bad]
    found = analyze_paths(files, Options(cache=cache), RayEngine(), lambda *numbers: reports.append(numbers))
    assert not ray.is_initialized()
    assert shown(found) == shown(analyze_paths(files, Options(), HERE))
    assert isinstance(found[-1], Problem)
    assert [numbers[0] for numbers in reports] == [1, 2, 3, 4, 5, 6]
    # One that somebody else started stays.
    with ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False):
        assert shown(analyze_paths(files, Options(cache=cache), RayEngine())) == shown(found)
        assert ray.is_initialized()
        with killing_reader(cache, paths[1], lambda process: process.name().startswith("ray::outcome")):
            (killed,) = analyze_paths(paths[1:2], Options(cache=cache), RayEngine())
        assert isinstance(killed, Problem)
        assert killed.message.startswith(f"{paths[1]}: the Ray worker reading it died: ")
        assert shown(analyze_paths(paths[:1], Options(), RayEngine())) == [(0, 30)]
