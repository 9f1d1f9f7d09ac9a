"""Put something else in place of a file of a run, and see what a command or the hub's API makes of it.

Run as a program it tries many cases in one process and prints a line of JSON for each, so that a case that never ends
ends this process (after ``CASE_S``), and so that the memory of all cases can be measured:

    python hostile_files.py WORK '{"runs": [...], "kinds": [...], "actions": [...], "names": [...] or null}'

``runs``: folders to copy; ``names``: the files to replace, by default all of the run and all in ``OTHER_FILES``.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

CASE_S = 30
SPARSE_BYTES = 6 << 30
SECRET = "secret-of-the-reader"
WORK = "work"

OTHER_FILES = (
    "alerts/outbox.jsonl",
    "alerts/sent.jsonl",
    "collectives.parquet",
    "comm.parquet",
    "errors/1.json",
    "finding-history.jsonl",
    "flight/nccl_trace_rank_0",
    "flight/rank_0.json",
    "hangs/host-1.evidence.json",
    "hangs/host-1.json",
    "inbox/000001.frames",
    "inbox/hub-events.jsonl",
    "inbox/places.jsonl",
    "incidents.jsonl",
    "labels.json",
    "layers.jsonl",
    "lease.json",
    "logs/rank-0.log",
    "nodes.json",
    "outputs/1.json",
    "outputs/positions",
    "parts/steps-000001.parquet",
    "positions.json",
    "samples.jsonl",
    "samples/0000000000000000-0000000000000010-0.jsonl",
    "stacks.jsonl",
    "steps/other.json",
    "steps/other.seg",
    "summary.json",
)
"""Files that some runs have and a toy job's does not."""
FOLDERS = ("errors", "flight", "hangs", "inbox", "logs", "outputs", "parts", "samples", "steps")


# -- what is put in place of a file -----------------------------------------------------------------------------------


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_link(path: Path) -> None:
    """To a file of the reader outside the run; in place of a folder, to a folder with such files in it."""
    outside = next(parent for parent in path.parents if parent.name == WORK) / "outside"
    secret = f'{{"schema": 1, "message": "{SECRET}", "pid": 1}}\n'
    if path.name in FOLDERS:
        outside.mkdir()
        for name in ("1.json", "main.log", "rank-0.log", "rank_0.json", "positions"):
            (outside / name).write_text(secret)
    else:
        outside.write_text(secret)
    path.symlink_to(outside)


def make_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)


def make_noise(path: Path) -> None:
    path.write_bytes(os.urandom(100_000))


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": make_pipe,
    "folder": make_folder,
    "link": make_link,
    "sparse": make_sparse,
    "noise": make_noise,
}


def files_of(run_dir: Path) -> list[str]:
    """Names of files, and of folders, to replace."""
    there = (str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file())
    return sorted({*there, *OTHER_FILES, *FOLDERS})


def replace(run_dir: Path, name: str, kind: str) -> None:
    path = run_dir / name
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    KINDS[kind](path)


def make_active(run_dir: Path) -> None:
    """Have a copy look as if another container of this machine were recording it right now."""
    meta, lease = (json.loads((run_dir / name).read_text()) for name in ("run.json", "lease.json"))
    meta |= {"place": {**meta["place"], "pid_namespace": "pid:[1]"}, "launcher": {"pid": 1 << 30, "start_ticks": 1}}
    (run_dir / "run.json").write_text(json.dumps(meta))
    (run_dir / "lease.json").write_text(json.dumps({**lease, "mono_ns": time.monotonic_ns()}))


# -- what is done with the run ----------------------------------------------------------------------------------------

COMMANDS: dict[str, tuple[str, ...]] = {
    "report": ("report", "RUN"),
    "incident": ("incident", "RUN", "1", "--markdown"),
    "report --json": ("report", "--json", "RUN"),
    "report --html": ("report", "--redact", "RUN", "--html", "OUT"),
    "list": ("list", "FOLDER"),
    "compare": ("compare", "--unfinished", "GOOD", "RUN"),
    "gate": ("gate", "GOOD", "RUN"),
    "history": ("history", "FOLDER"),
    "sql": ("sql", "RUN", "select count(*) from samples"),
    "memory": ("memory", "RUN"),
    "snapshot": ("snapshot", "RUN"),
    "flight": ("flight", "RUN"),
    "trace": ("trace", "RUN"),
    "audit": ("audit", "RUN"),
    "send": ("send", "RUN", "--to", "https://127.0.0.1:9"),
    "tag": ("tag", "RUN", "night"),
    "delete": ("delete", "--yes", "RUN"),
}
"""Every command that reads a run.  ``watch``, ``serve`` and the notebook read it through the API."""
API = "api"
ALLOWED = {0, 1, 2, 3}
GET_STATUS = {200, 400, 404, 503}


def command_outcome(words: Iterable[str]) -> dict[str, Any]:
    """What a user would see: exit code and text."""
    from stepscope.cli.main import run_command
    from stepscope.errors import StepscopeError

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run_command(list(words))
        except StepscopeError as error:
            code = error.exit_code
            err.write(f"stepscope: {error}\n")
        except SystemExit as error:
            code = int(error.code or 0)
        except Exception:  # noqa: BLE001 - what a user must never see
            return {"problem": traceback.format_exc()}
    text = err.getvalue()
    problem = ""
    if code not in ALLOWED:
        problem = f"exit code {code}"
    elif code == 3 and text.count("\n") != 1:
        problem = f"not one line: {text!r}"
    elif SECRET in out.getvalue() + text:
        problem = "it shows what a link points to"
    return {"code": code, "text": text, "problem": problem}


def api_outcome(run_dir: Path) -> dict[str, Any]:
    """Every GET of the API, in this process."""
    from stepscope.hub.api.auth import Readers
    from stepscope.hub.api.stream import Streams
    from stepscope.hub.app import make_app, resources_of
    from stepscope.hub.runs import Runs

    paths = [
        re.sub(r"{(\w+)(?::\w+)?}", lambda found: {"run": run_dir.name, "rank": "0"}.get(found[1], "x"), resource.path)
        for resource in resources_of(Streams(), str, ingest=False)
        if resource.method == "GET" and not resource.path.endswith("/stream")
    ]
    names = [f"/api/v1/runs/{run_dir.name}/files/{name}" for name in files_of(run_dir)]

    async def get_all() -> list[tuple[str, int, bytes]]:
        import httpx

        runs = Runs.of_folder(run_dir.parent)
        app = make_app(runs, Readers("token"))
        transport = httpx.ASGITransport(app=app)
        headers = {"Authorization": "Bearer token"}
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://hub", headers=headers) as client:
                answers = [(path, await client.get(path)) for path in (*paths, *names)]
        finally:
            await runs.close()
        return [(path, answer.status_code, answer.content) for path, answer in answers]

    try:
        answers = asyncio.run(get_all())
    except Exception:  # noqa: BLE001 - a fault of the hub
        return {"problem": traceback.format_exc()}
    faults = [f"{path}: {status}" for path, status, _ in answers if status not in GET_STATUS]
    shown = [path for path, _, body in answers if SECRET.encode() in body]
    return {
        "code": 0,
        "text": "",
        "problem": "; ".join([*faults, *(f"{path} shows a link's target" for path in shown)]),
    }


def outcomes(
    work: Path, runs: Iterable[Path], kinds: Iterable[str], actions: Iterable[str], names: Iterable[str] | None = None
) -> Iterator[dict[str, Any]]:
    for base in runs:
        for name in names if names is not None else files_of(base):
            for kind in kinds:
                for action in actions:
                    yield {
                        "run": base.name,
                        "name": name,
                        "kind": kind,
                        "action": action,
                        **_try(work, base, name, kind, action),
                    }


def _try(work: Path, base: Path, name: str, kind: str, action: str) -> dict[str, Any]:
    work = work / WORK
    shutil.rmtree(work, ignore_errors=True)
    run_dir = work / "runs" / "bad"
    shutil.copytree(base, run_dir)
    if base.name == "active":
        make_active(run_dir)
    replace(run_dir, name, kind)
    signal.alarm(CASE_S)
    try:
        if action == API:
            return api_outcome(run_dir)
        words = {"RUN": str(run_dir), "FOLDER": str(run_dir.parent), "GOOD": str(base.with_name("finished"))}
        words["OUT"] = str(work / "out.html")
        return command_outcome(words.get(word, word) for word in COMMANDS[action])
    finally:
        signal.alarm(0)


def _peak_bytes() -> int:
    """Of this program only: ``ru_maxrss`` would include what the process was before ``exec``, a worker of pytest."""
    status = Path("/proc/self/status").read_text()
    (peak_kb,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")]
    return peak_kb << 10


def main() -> None:
    document = json.loads(sys.argv[2])
    runs = map(Path, document["runs"])
    for outcome in outcomes(Path(sys.argv[1]), runs, document["kinds"], document["actions"], document["names"]):
        print(json.dumps(outcome), flush=True)
    print(json.dumps({"peak_bytes": _peak_bytes()}), flush=True)


if __name__ == "__main__":
    main()
