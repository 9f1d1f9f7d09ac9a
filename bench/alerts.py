"""Faults in real jobs that nobody watches: which messages arrive, when, and what they say; and healthy jobs: none.

    python bench/alerts.py                          # all: about half an hour
    python bench/alerts.py --only slow,crash        # some
    python bench/alerts.py --only healthy --healthy 20 --load bursts

Each job sends its alerts to a webhook on loopback, with the default rules and without a viewer.  The delay is the time
from the fault, as the job itself wrote it down, to the arrival of the message.  A case is right if exactly the expected
messages came, the first within 30 s and with the right rank, line and cost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from harness import SOURCE
from job_process import end_job
from machine_load import LOADS, machine_load

__all__ = ["CASES", "Arrived", "Case", "Outcome", "fault_line", "receiving", "run_case"]

JOB = Path(__file__).resolve().parent / "jobs" / "alert_job.py"
TIMEOUT_S = 300.0
WITHIN_S = 30.0
RANKS = 4


# -- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    id: str
    fault: str = "none"
    kinds: tuple[str, ...] = ()
    """The kinds that the message may name."""
    ranks: tuple[int, ...] | None = None
    """The ranks that it must name; None: any."""
    line: bool = False
    """Whether it must name the line of code."""
    statuses: tuple[str, ...] = ()
    """The messages that must arrive, in order."""
    args: tuple[str, ...] = ()
    nodes: int = 1
    within_s: float = WITHIN_S
    cost: bool = False
    """Whether it must say what share of the time it costs."""


FIRING_AND_END = ("firing", "resolved")
CASES: tuple[Case, ...] = (
    Case(
        id="slow",
        fault="slow",
        kinds=("compute_straggler", "straggler"),
        ranks=(2,),
        line=True,
        cost=True,
        statuses=FIRING_AND_END,
        args=("--steps", "1000"),
    ),
    Case(
        id="hang",
        fault="hang",
        kinds=("hang_missing_collective", "hang_host", "hang_unknown"),
        ranks=(2,),
        line=True,
        statuses=FIRING_AND_END,
        args=("--until", "301", "--steps", "1200", "--hang-s", "30"),
    ),
    Case(id="crash", fault="crash", kinds=("rank_crashed",), ranks=(2,), line=True, statuses=("firing",)),
    Case(
        id="nan",
        fault="nan",
        kinds=("loss_nan", "nan_gradients"),
        statuses=FIRING_AND_END,
        args=("--steps", "1300"),
    ),
    Case(
        id="leak",
        fault="leak",
        kinds=("memory_growth", "memory_creep"),
        ranks=(2,),
        statuses=FIRING_AND_END,
        args=("--at", "300", "--until", "1100", "--steps", "1800"),
    ),
    Case(
        id="loader",
        fault="loader",
        kinds=("input_bound", "change_point"),
        line=True,
        cost=True,
        statuses=FIRING_AND_END,
        args=("--steps", "1200", "--extra-ms", "160"),
    ),
    Case(id="node", fault="none", kinds=("rank_lost", "node_lost"), ranks=(1,), statuses=("firing",), nodes=2),
)
HEALTHY = Case(id="healthy", args=("--steps", "700"))


# -- what arrives -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Arrived:
    wall_s: float
    body: dict[str, Any]


@contextlib.contextmanager
def receiving() -> Iterator[tuple[str, list[Arrived]]]:
    """A webhook on loopback: its address, and what it got so far."""
    arrived: list[Arrived] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            arrived.append(Arrived(wall_s=time.time(), body=json.loads(body)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", arrived
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# -- running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outcome:
    case: Case
    arrived: tuple[Arrived, ...]
    began_s: float | None
    """When the fault began; None: never."""
    ended_s: float | None
    code: int | None
    notes: tuple[str, ...] = field(default=())

    @property
    def delay_s(self) -> float | None:
        return self.arrived[0].wall_s - self.began_s if self.arrived and self.began_s is not None else None

    @property
    def over_s(self) -> float | None:
        """From the end of the fault to the message that it is over."""
        if len(self.arrived) < 2 or self.ended_s is None:
            return None
        return self.arrived[-1].wall_s - self.ended_s

    def faults(self) -> list[str]:
        """What is wrong; empty: nothing."""
        case, wrong = self.case, []
        statuses = tuple(each.body["status"] for each in self.arrived)
        if statuses != case.statuses:
            wrong.append(f"messages {' '.join(statuses) or 'none'}")
        if not case.statuses or not self.arrived:
            return wrong
        first = self.arrived[0].body
        if first["kind"] not in case.kinds:
            wrong.append(f"kind {first['kind']}")
        if case.ranks is not None and tuple(first["ranks"]) != case.ranks:
            wrong.append(f"ranks {first['ranks']}")
        if case.line and first["line"].rpartition("/")[2] != fault_line(case.fault):
            wrong.append(f"line {first['line'] or 'none'}")
        if case.cost and not first["cost"].get("share"):
            wrong.append("no cost")
        if self.delay_s is None or self.delay_s > case.within_s:
            wrong.append("late" if self.delay_s is not None else "no onset")
        return wrong


def fault_line(fault: str) -> str:
    """``alert_job.py:88``: the line of code at fault."""
    lines = JOB.read_text().splitlines()
    number = next(at for at, text in enumerate(lines, 1) if text.endswith(f"# fault: {fault}"))
    return f"{JOB.name}:{number}"


def run_case(case: Case, folder: Path, *, load: str = "none", options: Sequence[str] = ()) -> Outcome:
    """Run the job with alerts to a receiver of ours; ``options``: further ones of ``stepscope run``."""
    folder.mkdir(parents=True)
    marks = folder / "marks"
    script = [str(JOB), "--fault", case.fault, "--marks", str(marks), *case.args]
    with receiving() as (url, arrived), machine_load(load):
        if case.nodes > 1:
            code = _two_nodes(script, folder, url, marks)
        else:
            words = ["--nproc-per-node", str(RANKS), *options]
            with _job([*_command(folder, case.id), *words, *script], folder / "log", url) as process:
                code = _wait(process)
        _until_quiet(arrived, len(case.statuses))
    times = {mark["what"]: mark["wall_s"] for mark in map(json.loads, _lines(marks))}
    return Outcome(case=case, arrived=tuple(arrived), began_s=times.get("begin"), ended_s=times.get("end"), code=code)


def _command(folder: Path, name: str) -> list[str]:
    return [sys.executable, "-m", "stepscope", "run", "--quiet", "--dir", str(folder / "runs"), "--name", name]


@contextlib.contextmanager
def _job(words: Sequence[str], log: Path, url: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "STEPSCOPE_ALERT": url, **variables}
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                end_job(process)


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None


def _two_nodes(script: Sequence[str], folder: Path, url: str, marks: Path) -> int | None:
    """Two launchers on this machine; after a while everything of the second is killed at once."""
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    where = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(ports[0]), "--hub-port", str(ports[1])]
    key = "a key of the benchmark alone"
    with contextlib.ExitStack() as stack:
        nodes = []
        for node in (1, 0):
            words = [*_command(folder / str(node), "two"), *where, "--node-rank", str(node), *script, "--rank", "9"]
            (folder / str(node)).mkdir(exist_ok=True)
            nodes.append(stack.enter_context(_job(words, folder / f"log{node}", url, STEPSCOPE_KEY=key)))
        other, first = nodes
        _until(lambda: _steps(folder / "0" / "runs" / "two") > 150)
        with marks.open("a") as file:
            file.write(json.dumps({"what": "begin", "wall_s": time.time()}) + "\n")
        _kill_all(other.pid)
        time.sleep(60.0)
        first.send_signal(signal.SIGINT)
        return _wait(first)


def _kill_all(root: int) -> None:
    """Kill a process and everything below it, as a machine that loses its power does."""
    import psutil

    tree = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP)
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _steps(run_dir: Path) -> int:
    from stepscope.errors import StepscopeError
    from stepscope.store.load import open_run

    try:
        return max((len(series.steps) for series in open_run(run_dir).ranks), default=0)
    except (StepscopeError, OSError):
        return 0


def _until(condition: Any, limit_s: float = 120.0) -> None:
    until_s = time.monotonic() + limit_s
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.5)


def _until_quiet(arrived: Sequence[Arrived], expected: int) -> None:
    """The sender continues for a moment after the job: wait for what is expected, and a little for what is not."""
    _until(lambda: len(arrived) >= expected, 15.0)
    time.sleep(1.0)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


# -- table ------------------------------------------------------------------------------------------------------------


def row(outcome: Outcome) -> str:
    case, first = outcome.case, outcome.arrived[0].body if outcome.arrived else {}
    wrong = outcome.faults()
    cells = (
        case.id,
        " ".join(each.body["status"] for each in outcome.arrived) or "none",
        "–" if outcome.delay_s is None else f"{outcome.delay_s:.1f} s",
        "–" if outcome.over_s is None else f"{outcome.over_s:.1f} s",
        str(first.get("kind", "–")),
        ",".join(map(str, first.get("ranks", ()))) or "–",
        str(first.get("line") or "–").rpartition("/")[2],
        f"{share:.0%}" if (share := (first.get("cost") or {}).get("share")) else "–",
        "right" if not wrong else "WRONG: " + "; ".join(wrong),
    )
    return "| " + " | ".join(cells) + " |"


HEAD = "| case | messages | delay | end after | kind | ranks | line | cost | verdict |\n" + "|---" * 9 + "|"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases, separated by commas; healthy: the healthy jobs")
    parser.add_argument("--healthy", type=int, default=20, help="number of healthy jobs; every second beside load")
    parser.add_argument("--load", choices=LOADS, default="bursts", help="beside every second healthy job")
    parser.add_argument("--keep", type=Path, help="folder for runs and logs")
    args = parser.parse_args()
    chosen = set(filter(None, args.only.split(",")))
    keep = args.keep or Path(tempfile.mkdtemp(prefix="stepscope-alerts-"))
    print(HEAD, flush=True)
    wrong = 0
    for case in CASES:
        if not chosen or case.id in chosen:
            outcome = run_case(case, _fresh(keep / case.id))
            wrong += bool(outcome.faults())
            print(row(outcome), flush=True)
    for number in range(args.healthy if not chosen or "healthy" in chosen else 0):
        load = args.load if number % 2 else "none"
        outcome = run_case(HEALTHY, _fresh(keep / f"healthy-{number}"), load=load)
        wrong += bool(outcome.faults())
        print(row(outcome).replace("healthy", f"healthy {number + 1} ({load})"), flush=True)
    if args.keep is None and not wrong:
        shutil.rmtree(keep)
    print(f"{wrong} wrong" + (f"; runs and logs are in {keep}" if wrong else ""))
    return 1 if wrong else 0


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
