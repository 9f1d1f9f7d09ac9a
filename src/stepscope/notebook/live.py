"""``stepscope.live()``: the live page of the run that this very process trains, in a cell of its notebook.

    kernel ──(no thread, no socket)──   ring ──► agent ──► files of the run ──► server of ours ──► frame in the cell

The server (``__main__.py``) is a process of its own that follows the run's files, listens on loopback, and ends with
the kernel: it looks once a second whether that still lives.  It is started by way of a shell that ends at once, so that
a script that waits for its children never meets it, and in a session of its own, so that "interrupt" is not for it.
"""

from __future__ import annotations

import json
import os
import select
import time
from dataclasses import dataclass
from pathlib import Path

from stepscope.cli.links import page_link
from stepscope.notebook.address import place_of
from stepscope.notebook.cells import frame_of_address, in_notebook, in_vscode, put, told_above
from stepscope.notebook.show import HEIGHT
from stepscope.recorder import api, bootstrap
from stepscope.recorder.guard import warn
from stepscope.recorder.identity import rank_from
from stepscope.records.naming import TIME_IN_NAME, default_name
from stepscope.records.places import ENV_RUN_DIR, helper_command, helper_environment
from stepscope.ring.writer import process_start_ticks

__all__ = ["live"]

PATIENCE_S = 30.0
"""How long the server may take to listen."""
AFTERWARDS = "{hint} In a terminal: `{watch}`. When the kernel has ended: {show}."


@dataclass(frozen=True, kw_only=True)
class _Served:
    run_dir: str
    pid: int
    ticks: int
    port: int
    token: str

    @property
    def running(self) -> bool:
        return self.ticks != 0 and process_start_ticks(self.pid) == self.ticks


_served: list[_Served] = []
"""The one of this process, if there is one."""


def live(
    *,
    name: str | None = None,
    dir: str = "runs",  # noqa: A002 - as init() has it
    height: int = HEIGHT,
    port: int = 0,
    url: str = "",
    proxy: bool | None = None,
) -> None:
    """Record this process if it is not yet (``init``), and show the run as it goes: in a notebook in the cell, else as
    a link.

    ``url`` is where the browser finds the server when it is not on this machine, with ``{port}`` in it where that
    matters (``STEPSCOPE_LIVE_URL`` says the same for all notebooks); ``proxy=True`` stands for jupyter-server-proxy,
    which is taken under JupyterHub unless it is False.  ``port``: one that is forwarded (``ssh -L``).
    """
    if name is None and in_notebook():
        name = default_name(["notebook"], time.strftime(TIME_IN_NAME))  # not by the kernel's own command
    api.init(name=name, dir=dir)
    run_dir = os.environ.get(ENV_RUN_DIR, "")
    if bootstrap.current() is None or not run_dir:
        warn("this process is not recorded; there is nothing to show")
        return
    if (rank_from(os.environ) or 0) != 0:
        return  # the first rank shows the run of all
    served = _serve(run_dir, port)
    if served is None:
        return
    framed, run = not in_vscode(), Path(run_dir).name
    place = place_of(served.port, url=url, proxy=proxy, framed=framed)
    link = page_link(place.base, run, served.token)
    if in_notebook():
        frame = frame_of_address(link, title=f"Stepscope: {run}, live", height=height) if framed else ""
        hint = AFTERWARDS.format(
            hint=place.hint, watch=f"stepscope watch {run_dir}", show=f"stepscope.show({run_dir!r})"
        )
        put(
            told_above(frame, link=link, words=f"Stepscope: {run}, live", hint=hint),
            f"Stepscope: {run_dir}, live: {link}",
        )
    elif os.isatty(1):
        # Past sys.stdout, which is kept in the run's log: who has the link may look.
        os.write(1, f"stepscope: {link}\n".encode())
    else:
        warn(f"{page_link(place.base, run)} (its token: {Path(run_dir, 'hub.json')})")


def _serve(run_dir: str, port: int) -> _Served | None:
    """The server of this run: the one that is there, or a new one.  None, and why, when it cannot be."""
    if _served and _served[0].running and _served[0].run_dir == run_dir:
        return _served[0]
    _served.clear()
    said = _started(run_dir, port)
    if "url" not in said:
        warn(f"no live page: {said.get('error', 'its server did not start')}")
        return None
    pid = int(said["pid"])
    _served.append(
        _Served(
            run_dir=run_dir, pid=pid, ticks=process_start_ticks(pid), port=int(said["port"]), token=str(said["token"])
        )
    )
    return _served[0]


def _started(run_dir: str, port: int) -> dict[str, str]:
    owner = os.getpid()
    ticks = str(process_start_ticks(owner))
    words = ("--run-dir", run_dir, "--port", str(port), "--owner", str(owner), "--owner-ticks", ticks)
    server = helper_command("stepscope.notebook", *words)
    reading, writing = os.pipe()
    try:
        shell = ["/bin/sh", "-c", '"$@" </dev/null >&3 2>/dev/null 3>&- &', "stepscope", *server]
        files = [(os.POSIX_SPAWN_DUP2, writing, 3)]
        environment = helper_environment(os.environ)
        pid = os.posix_spawn(shell[0], shell, environment, file_actions=files, setsid=True)
        os.close(writing)
        writing = -1
        os.waitpid(pid, 0)
        return _line(reading)
    except OSError as error:
        return {"error": str(error.strerror)}
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)


def _line(reading: int) -> dict[str, str]:
    """What the server says first: one line."""
    deadline, said = time.monotonic() + PATIENCE_S, b""
    while not said.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([reading], [], [], left_s)[0]:
            return {"error": f"its server said nothing for {PATIENCE_S:g} s"}
        piece = os.read(reading, 1 << 16)
        if not piece:
            return {}
        said += piece
    found = json.loads(said)
    return {str(key): str(value) for key, value in found.items()}
