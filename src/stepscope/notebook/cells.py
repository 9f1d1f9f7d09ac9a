"""What a notebook calls: ``stepscope.show()`` shows a run, ``stepscope.live()`` the training in this process.

    kernel ──(no thread, no socket)──   ring ──► agent ──► files of the run ──► our server ──► frame in the cell

The server of ``live()`` (``notebook/__main__.py``) is a separate process that follows the run's files, listens on
loopback, and ends with the kernel: it checks once a second whether the kernel is alive.  A shell that exits immediately
starts it, so that a script that waits for its children never sees it, and it has a separate session, so that
"interrupt" does not reach it.
"""

from __future__ import annotations

import html
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.cli.arguments import locate_run
from stepscope.errors import NotARun, UsageError
from stepscope.page.links import page_link
from stepscope.recorder import api, bootstrap
from stepscope.recorder.guard import warn
from stepscope.recorder.identity import rank_from
from stepscope.records.paths import ENV_RUN_DIR, helper_command, helper_environment
from stepscope.records.run_clock import process_start_ticks
from stepscope.records.text import TIME_IN_NAME, default_name, printable
from stepscope.store.file_io import read_document
from stepscope.store.paths import META, REPORT_FILE, SUMMARY

__all__ = ["frame_of_address", "frame_of_page", "in_notebook", "in_vscode", "live", "page_address", "show"]


# -- notebook cells ---------------------------------------------------------------------------------------------------
# What a cell can show, and whether there is a cell at all.

VSCODE = ("VSCODE_PID", "VSCODE_CWD")
"""A kernel has the first of these if VS Code runs on the same machine, and the second over SSH or from WSL."""
VSCODE_FILE = "__vsc_ipynb_file__"
"""A notebook variable that VS Code sets, even if another program started the kernel."""
SANDBOX = "allow-scripts allow-downloads allow-popups"
"""A page that contains its data needs nothing from the notebook: no cookies, no storage, no forms."""


def in_notebook() -> bool:
    """Whether output appears in a notebook cell; in a terminal IPython it would be text."""
    return getattr(_shell(), "kernel", None) is not None


def in_vscode() -> bool:
    """Whether the cell is in VS Code.

    Its cells have a separate origin: they show a page that contains its data, but an empty frame for any page on this
    machine.
    """
    return any(name in os.environ for name in VSCODE) or VSCODE_FILE in getattr(_shell(), "user_ns", ())


def put_in_cell(markup: str, plain: str) -> None:
    """Show in the running cell; ``plain`` is for frontends without HTML."""
    display: Any = sys.modules["IPython"].display.display
    display({"text/html": markup, "text/plain": plain}, raw=True)


def frame_of_page(page: str, *, title: str, height: int) -> str:
    """Return a frame with the page inside, so that it is saved with the notebook and needs no network."""
    return f'<iframe sandbox="{SANDBOX}" srcdoc="{html.escape(page)}" {_frame_attributes(title, height)}></iframe>'


def frame_of_address(address: str, *, title: str, height: int) -> str:
    return f'<iframe src="{html.escape(address)}" {_frame_attributes(title, height)}></iframe>'


def with_caption(frame: str, *, link: str, words: str, hint: str) -> str:
    """Put a line above a frame, with what to do if the frame stays empty: not every notebook can or may show one."""
    opening = f'<a href="{html.escape(link)}" target="_blank" rel="noopener noreferrer">{html.escape(words)}</a>'
    return f"<p>{opening if link else html.escape(words)}. <small>{html.escape(hint)}</small></p>{frame}"


def _shell() -> Any:
    """Return IPython's shell, if there is one."""
    found: Any = sys.modules.get("IPython")
    return found.get_ipython() if found is not None else None


def _frame_attributes(title: str, height: int) -> str:
    return f'title="{html.escape(title)}" width="100%" height="{height:d}" style="border: 0"'


# -- stepscope.show() -------------------------------------------------------------------------------------------------
# A run's page in a notebook cell, with its data inside; without a cell, its summary.

TIMEOUT_S = 300.0
HEIGHT = 900
HINT = "If nothing appears below, the notebook is not trusted yet or cannot show frames; `{making}` writes a file."


def show(run: str | os.PathLike[str] | None = None, *, height: int = HEIGHT) -> None:
    """Show a run: a folder, or the name of one in ``runs/``; by default the newest there.

    In a notebook this shows its page, which needs no network and is saved with the notebook (a few hundred kilobytes to
    3 MB); anywhere else its summary as text.  All computing happens in a separate process.
    """
    try:
        run_dir = locate_run(None if run is None else Path(run))
    except (UsageError, NotARun) as error:
        print(printable(f"stepscope: {error}"))
        return
    if not (run_dir / META).is_file():
        print(printable(f"stepscope: {run_dir} is not a run"))
        return
    page = _page_of(run_dir) if in_notebook() else None
    if page is None:
        print(_summary_of(run_dir), end="")
        return
    frame = frame_of_page(page, title=f"Stepscope: {run_dir.name}", height=height)
    words = f"Stepscope: {run_dir}"
    put_in_cell(
        with_caption(frame, link="", words=words, hint=HINT.format(making=f"stepscope report {run_dir} --html")), words
    )


def _page_of(run_dir: Path) -> str | None:
    """Return the run's page unless its summary is newer; else make one now.  None: it cannot be made."""
    kept = run_dir / REPORT_FILE
    try:
        if kept.stat().st_mtime_ns >= (run_dir / SUMMARY).stat().st_mtime_ns:
            return read_document(kept).decode()
    except OSError:
        pass  # the run is active, was killed, or is older than this file
    with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
        made = Path(folder, REPORT_FILE)
        done = _run_stepscope("report", "--quiet", str(run_dir), "--html", str(made))
        if done.returncode == 0:
            return made.read_text()
        print(done.stderr.strip() or "stepscope: cannot create the page", file=sys.stderr)
    return None


def _summary_of(run_dir: Path) -> str:
    done = _run_stepscope("report", "--no-color", str(run_dir))
    return done.stdout if done.returncode == 0 else done.stderr


def _run_stepscope(*words: str) -> subprocess.CompletedProcess[str]:
    command = helper_command("stepscope", *words)
    try:
        return subprocess.run(
            command,
            env=helper_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", f"stepscope: {error}\n")


# -- address of the live page -----------------------------------------------------------------------------------------
# Where a browser finds the server of ``stepscope.live()``, and what to try if it does not.
#
#     place = page_address(41161, url="", proxy=None)
#     place.base       "http://127.0.0.1:41161", or "/user/ada/proxy/41161" through Jupyter's server
#
# The server listens on this machine's loopback.  A browser on another machine reaches it the way it reaches Jupyter:
# through jupyter-server-proxy, below Jupyter's own prefix, or through the user's own proxy.

ENV_URL = "STEPSCOPE_LIVE_URL"
"""Like ``live(url=…)``, for all notebooks of a platform."""
ENV_HUB_PREFIX = "JUPYTERHUB_SERVICE_PREFIX"
ENV_JUPYTER_PID = "JPY_PARENT_PID"
"""The pid of the server that started the kernel."""

UNFRAMED = (
    "VS Code cannot show a live page in a cell; open the link. If the kernel is not on the machine of your browser, "
    "forward port {port} first (in the PORTS view)."
)


@dataclass(frozen=True, kw_only=True)
class PageAddress:
    base: str
    hint: str
    """What to do if the page does not appear."""


def page_address(port: int, *, url: str, proxy: bool | None, framed: bool = True) -> PageAddress:
    """Return the page's address.

    ``proxy`` None: decide by the environment; under JupyterHub the browser is never on this machine.  ``framed``:
    whether the cell can show the page.  An editor that cannot (VS Code) has no use for a path below Jupyter's address
    either, so that is not chosen automatically.
    """
    environment = os.environ
    given = url or ("" if proxy is not None else environment.get(ENV_URL, ""))
    if given:
        base = given.replace("{port}", str(port)).rstrip("/")
        hint = f"If the frame below is empty, {base} does not forward to port {port} on the kernel's machine."
    elif proxy or (proxy is None and framed and environment.get(ENV_HUB_PREFIX)):
        base = f"{_jupyter_prefix(environment).rstrip('/')}/proxy/{port}"
        hint = "If the frame below is empty, Jupyter’s server lacks jupyter-server-proxy (`pip install` it there)."
    else:
        base = f"http://127.0.0.1:{port}"
        hint = (
            "If the frame below is empty, open the link; if Jupyter is not on the machine of your browser, use "
            f"live(proxy=True) or `ssh -L {port}:127.0.0.1:{port}`."
        )
    return PageAddress(base=base, hint=hint if framed else UNFRAMED.format(port=port))


def _jupyter_prefix(environment: Mapping[str, str]) -> str:
    """Return the path of Jupyter's server at its own address."""
    told = environment.get(ENV_HUB_PREFIX) or _told_by_server(environment.get(ENV_JUPYTER_PID, ""))
    return told if told.startswith("/") else "/"


def _told_by_server(pid: str) -> str:
    """Read it from the file that the server keeps next to its kernels' files; empty if there is no such file."""
    found: Any = sys.modules.get("ipykernel.connect")
    try:
        kernel = Path(found.get_connection_file()) if found is not None else Path()
        about = json.loads((kernel.parent / f"jpserver-{int(pid)}.json").read_bytes())
        return str(about["base_url"])
    except (OSError, ValueError, LookupError, TypeError, RuntimeError):
        return ""  # another program started the kernel


# -- stepscope.live() -------------------------------------------------------------------------------------------------

PATIENCE_S = 30.0
"""How long the server may take to listen."""
AFTERWARDS = "{hint} In a terminal: `{watch}`. After the kernel has ended: {show}."


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
"""The server of this process, if there is one."""


def live(
    *,
    name: str | None = None,
    dir: str = "runs",  # noqa: A002 - as init() has it
    height: int = HEIGHT,
    port: int = 0,
    url: str = "",
    proxy: bool | None = None,
) -> None:
    """Record this process if necessary (``init``), and show the run live: in the notebook cell, or as a link.

    ``url`` is where the browser finds the server if it is not on this machine, with ``{port}`` in it where needed
    (``STEPSCOPE_LIVE_URL`` sets it for all notebooks); ``proxy=True`` uses jupyter-server-proxy, which is the default
    under JupyterHub unless ``proxy`` is False.  ``port``: a port that is forwarded (``ssh -L``).
    """
    if name is None and in_notebook():
        name = default_name(["notebook"], time.strftime(TIME_IN_NAME))  # not the kernel's command
    api.init(name=name, dir=dir)
    run_dir = os.environ.get(ENV_RUN_DIR, "")
    if bootstrap.current() is None or not run_dir:
        warn("this process is not recorded; there is nothing to show")
        return
    if (rank_from(os.environ) or 0) != 0:
        return  # the first rank shows the run for all
    served = _serve(run_dir, port)
    if served is None:
        return
    framed, run = not in_vscode(), Path(run_dir).name
    place = page_address(served.port, url=url, proxy=proxy, framed=framed)
    link = page_link(place.base, run, served.token)
    if in_notebook():
        frame = frame_of_address(link, title=f"Stepscope: {run}, live", height=height) if framed else ""
        hint = AFTERWARDS.format(
            hint=place.hint, watch=f"stepscope watch {run_dir}", show=f"stepscope.show({run_dir!r})"
        )
        put_in_cell(
            with_caption(frame, link=link, words=f"Stepscope: {run}, live", hint=hint),
            f"Stepscope: {run_dir}, live: {link}",
        )
    elif os.isatty(1):
        # Not through sys.stdout, which is copied into the run's log: anyone with the link may view the run.
        os.write(1, f"stepscope: {link}\n".encode())
    else:
        warn(f"{page_link(place.base, run)} (its token: {Path(run_dir, 'hub.json')})")


def _serve(run_dir: str, port: int) -> _Served | None:
    """Return the server of this run, starting it if necessary.  On failure, warn and return None."""
    if _served and _served[0].running and _served[0].run_dir == run_dir:
        return _served[0]
    _served.clear()
    said = _start_server(run_dir, port)
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


def _start_server(run_dir: str, port: int) -> dict[str, str]:
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
        return _first_line(reading)
    except OSError as error:
        return {"error": str(error.strerror)}
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)


def _first_line(reading: int) -> dict[str, str]:
    """Read the server's first line."""
    deadline, said = time.monotonic() + PATIENCE_S, b""
    while not said.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([reading], [], [], left_s)[0]:
            return {"error": f"its server did not respond for {PATIENCE_S:g} s"}
        piece = os.read(reading, 1 << 16)
        if not piece:
            return {}
        said += piece
    found = json.loads(said)
    return {str(key): str(value) for key, value in found.items()}
